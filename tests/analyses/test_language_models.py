"""Loading, adapters and capture: the right weights, one layer at a time, and the model left as it was."""

import json
import weakref
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from attngeo.connection_walk import analyze
from attngeo.errors import UserError
from attngeo.language_models.architectures import ARCHITECTURES, architecture_of
from attngeo.language_models.capture import LayerCapture, in_float64, stream_layers, working_precision_softmax
from attngeo.language_models.loading import load, parameters, random_init
from attngeo.language_models.windows import audio_windows, image_windows, shuffled_window, text_windows
from tests.analyses import tiny_language_models as tiny

FAMILIES = tuple(ARCHITECTURES)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "dinov2"])
def test_a_planted_value_direction_is_found_on_the_input_side(family: str) -> None:
    """Square matrices hide a transposed reading (GPT-2 stores [in, out]): a rank-one map x -> <x, a> b is planted."""
    loaded = tiny.loaded(tiny.config(family, heads=1, head_dim=6))
    width = loaded.model.config.hidden_size
    a, b = torch.eye(width, dtype=torch.float64)[1], torch.eye(width, dtype=torch.float64)[4]
    block = loaded.model.h[0] if family == "gpt2" else None
    if block is not None:
        block.ln_1.weight.data.fill_(1)
        block.attn.c_attn.weight.data[:, 2 * width :] = torch.outer(a, b)
    else:
        site = loaded.sites[0]
        if site.gain is not None:
            site.gain.data.fill_(1)
        site.value_weight.T.data.copy_(torch.outer(b, a))  # a Linear keeps [out, in]
    value = loaded.sites[0].weights().value[0]
    torch.testing.assert_close(value, torch.outer(a, b), rtol=0, atol=0)


def test_grouped_query_heads_share_the_value_map_of_their_group() -> None:
    weights = tiny.loaded(tiny.config("llama", heads=6, groups=2)).sites[1].weights()
    assert weights.group.tolist() == [0, 0, 0, 1, 1, 1]
    assert weights.value.shape == (2, 36, 6)
    assert weights.output.shape == (6, 6, 36)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_times_gain_plus_shift_give_back_what_attention_read(family: str) -> None:
    loaded = tiny.loaded(tiny.config(family))
    # A dead component must come out as zero, not as infinity; Gemma's gain is 1 + w.
    if family.startswith("gemma"):
        loaded.model.layers[0].input_layernorm.weight.data[2] = -1
    elif loaded.sites[0].gain is not None:
        loaded.sites[0].gain.data[2] = 0
    site = loaded.sites[0]
    inputs = []
    stream_layers(loaded, tiny.windows(loaded.model.config)[0], lambda capture: inputs.append(capture.attention_input))
    states = site.states(inputs[0])
    assert states.isfinite().all()
    gain = 1 if site.gain is None else site.gain
    shift = 0 if site.shift is None else site.shift
    torch.testing.assert_close(states * gain + shift, inputs[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_maps_are_the_models_own(family: str) -> None:
    loaded = tiny.loaded(tiny.config(family))
    window = tiny.windows(loaded.model.config)[0]
    captured: list[LayerCapture] = []
    stream_layers(loaded, window, captured.append)
    inputs = window[None].double() if loaded.adapter.reads == "audio" else window[None]
    own = loaded.model(**{loaded.adapter.input_name: inputs}, output_attentions=True, **loaded.adapter.call_options)
    assert [capture.layer for capture in captured] == list(range(tiny.LAYERS))
    for capture, attention in zip(captured, own.attentions, strict=True):
        torch.testing.assert_close(capture.attention, attention[0], rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_two_layers_of_maps_are_alive_at_once(family: str) -> None:
    loaded = tiny.loaded(tiny.config(family))
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def on_layer(capture: LayerCapture) -> None:
        nonlocal most
        alive.append(weakref.ref(capture.attention.untyped_storage()))
        most = max(most, sum(reference() is not None for reference in alive))

    stream_layers(loaded, tiny.windows(loaded.model.config)[0], on_layer)
    assert len(alive) == tiny.LAYERS
    assert most == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_float64_by_blocks_equals_a_float64_copy_and_leaves_the_weights_alone(family: str, dtype: torch.dtype) -> None:
    loaded = tiny.loaded(tiny.config(family), dtype)
    before = {name: (parameter.data_ptr(), parameter.dtype) for name, parameter in loaded.model.named_parameters()}
    window = tiny.windows(loaded.model.config)[0]
    blockwise: list[torch.Tensor] = []
    with in_float64(loaded), working_precision_softmax():
        stream_layers(loaded, window, lambda capture: blockwise.append(capture.output))
    after = {name: (parameter.data_ptr(), parameter.dtype) for name, parameter in loaded.model.named_parameters()}
    assert after == before
    assert loaded.model.config._attn_implementation == "eager"
    loaded.model.double()
    whole: list[torch.Tensor] = []
    with working_precision_softmax():
        stream_layers(loaded, window, lambda capture: whole.append(capture.output))
    assert all(output.dtype == torch.float64 for output in blockwise)
    for ours, theirs in zip(blockwise, whole, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_an_error_inside_leaves_no_hook_and_no_upcast_weight_behind() -> None:
    loaded = tiny.loaded(tiny.config("llama"), torch.float32)

    def fail(capture: LayerCapture) -> None:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"), in_float64(loaded):
        stream_layers(loaded, tiny.windows(loaded.model.config)[0], fail)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in loaded.model.modules())


@pytest.mark.parametrize(
    "configuration",
    [
        transformers.BartConfig(),
        transformers.DebertaV2Config(),
        transformers.MptConfig(),
        transformers.BertConfig(is_decoder=True),
        transformers.BloomConfig(slow_but_exact=True),
        transformers.FalconConfig(alibi=True),
        transformers.Gemma3TextConfig(use_bidirectional_attention=True),
        transformers.GPT2Config(add_cross_attention=True),
    ],
    ids=[
        "bart",
        "deberta",
        "mpt",
        "bert decoder",
        "bloom in slices",
        "falcon alibi",
        "gemma encoder",
        "cross attention",
    ],
)
def test_unsupported_attention_is_refused_by_name(configuration: transformers.PretrainedConfig) -> None:
    with pytest.raises(UserError, match=configuration.model_type) as refusal:
        architecture_of(configuration)
    assert all(family in refusal.value.remedy for family in FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_folder_loads_as_the_same_network(family: str, tmp_path: Path) -> None:
    folder = tiny.saved(tmp_path / "tiny-model", tiny.config(family))
    opened = load(folder)
    assert (opened.id, opened.precision, opened.tokenizer) == ("tiny-model", "float32", None)
    reference = tiny.network(tiny.config(family), torch.float32)
    assert parameters(opened.model) == parameters(reference)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(opened.model.get_parameter(name).data, parameter.data, rtol=0, atol=0)


def test_precision_is_that_of_the_file_and_quantisation_that_of_the_name(tmp_path: Path) -> None:
    folder = tiny.saved(tmp_path / "half", tiny.config("bert"), torch.bfloat16)
    assert load(folder).precision == "bfloat16"
    assert load(folder, None).model.dtype == torch.bfloat16
    assert load(folder, model_id="half@gguf-q4_1").precision == "gguf-q4_1"
    (folder / "source.json").write_text(json.dumps({"name": "half@gguf-q8_0", "quantised": "8-bit weights"}))
    assert load(folder).precision == "gguf-q8_0"


def test_missing_weights_shards_and_folders_are_errors_before_any_analysis(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        load(tmp_path / "nowhere")
    folder = tiny.saved(tmp_path / "model", tiny.config("llama"))
    weights = load_file(folder / "model.safetensors")
    del weights["layers.1.self_attn.v_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"layers\.1\.self_attn\.v_proj\.weight"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="weights"):
        load(folder)
    sharded = tmp_path / "sharded"
    tiny.network(tiny.config("llama"), torch.float32).save_pretrained(sharded, max_shard_size="8KB")
    shards = sorted(sharded.glob("*.safetensors"))
    assert len(shards) > 2
    load(sharded)
    shards[1].unlink()
    with pytest.raises(UserError, match="weights"):
        load(sharded)


def test_a_hub_name_is_fetched_without_code_and_an_unknown_one_is_a_plain_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[tuple[str, list[str]]] = []
    commit = "0123456789abcdef0123456789abcdef01234567"

    def snapshot(name: str, revision: str | None, allow_patterns: list[str], local_files_only: bool) -> str:
        asked.append((name, allow_patterns))
        if name != "someone/tiny" or revision not in (None, "v1.0", commit):
            raise OSError("404 not found")
        return str(tiny.saved(tmp_path / "snapshots" / commit, tiny.config("bert")))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    for pin in ("", "@v1.0", f"@{commit}"):
        opened = load(f"someone/tiny{pin}")
        assert (opened.id, opened.revision, opened.quantised) == ("tiny", commit, None), "a pin is not a precision"
        assert load(f"someone/tiny{pin}", model_id=f"tiny{pin}").quantised is None
    frame = analyze("someone/tiny@v1.0", tiny.windows(tiny.config("bert"), 1), null_draws=2, edges=0)
    assert set(frame["revision"]) == {commit}
    with pytest.raises(UserError, match="someone/tiny@v9"):
        load("someone/tiny@v9")
    asked[1:] = []
    assert not any(pattern.endswith((".py", ".bin")) for pattern in asked[0][1])
    with pytest.raises(UserError, match="someone/else") as refusal:
        load("someone/else")
    assert "404" in refusal.value.what
    with pytest.raises(UserError, match=r"no config\.json"):
        load("results/models/mine")
    assert [name for name, _ in asked] == ["someone/tiny", "someone/else"]


def test_an_at_sign_in_a_path_is_part_of_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.saved(tmp_path / "models" / "tiny@gguf-q4_1", tiny.config("bert"))
    (tmp_path / "models" / "empty@main").mkdir()
    for folder in ("models/tiny@gguf-q4_1", tmp_path / "models" / "tiny@gguf-q4_1"):
        opened = load(folder)
        assert (opened.id, opened.quantised, opened.revision) == ("tiny@gguf-q4_1", "gguf-q4_1", "")
    with pytest.raises(UserError, match=r"no config\.json"):
        load("models/empty@main")


def test_an_untrained_network_is_a_function_of_the_seed_and_leaves_the_global_generator_alone() -> None:
    configuration = tiny.config("gpt2")
    state = torch.get_rng_state()
    first, second, other = (random_init(configuration, seed, model_id="x").model for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.wte.weight, other.wte.weight)


@pytest.fixture
def with_tokenizer(tmp_path: Path) -> Path:
    """A BERT whose tokenizer puts [CLS] before and [SEP] after words named by their number."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2} | {f"w{index}": index + 3 for index in range(50)} | {"a": 53}
    configuration = tiny.config("bert")
    configuration.vocab_size = len(words)
    folder = tiny.saved(tmp_path / "words", configuration)
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    return folder


def test_windows_are_full_keep_to_one_text_and_carry_the_special_tokens(with_tokenizer: Path) -> None:
    loaded = load(with_tokenizer)
    low, high = (" ".join(f"w{index}" for index in span) for span in (range(0, 20), range(20, 43)))
    cut = text_windows(loaded, [low, high], windows=5, window_tokens=9)
    assert [len(window) for window in cut] == [9] * 5
    for window in cut:
        assert (window[0], window[-1]) == (1, 2)
        body = window[1:-1] - 3
        assert torch.equal(body, torch.arange(body[0], body[0] + 7)), "a window runs on through one text"
        assert bool((body < 20).all()) or bool((body >= 20).all())
    assert len(text_windows(loaded, [low, high], windows=99, window_tokens=9)) == 2 + 3
    spread = text_windows(loaded, [low, high], windows=2, window_tokens=9)
    assert spread[0][1] < 23 <= spread[1][1], "two windows of two texts come from both"


def test_empty_and_short_texts_are_left_out_and_reported(with_tokenizer: Path) -> None:
    loaded = load(with_tokenizer)
    text = " ".join(f"w{index}" for index in range(30))
    with pytest.warns(UserWarning, match="2 of 3 texts"):
        assert len(text_windows(loaded, ["", text, "w1 w2"], windows=4, window_tokens=12)) == 3
    with pytest.warns(UserWarning, match="1 of 1"), pytest.raises(UserError, match="fills a window"):
        text_windows(loaded, "w1 w2", windows=4, window_tokens=12)
    with pytest.raises(UserError, match="64 positions"):
        text_windows(loaded, text, windows=4, window_tokens=65)
    with pytest.raises(UserError, match="special tokens"):
        text_windows(loaded, text, windows=4, window_tokens=2)
    with pytest.raises(UserError, match="hold nothing"):
        text_windows(loaded, text, windows=0, window_tokens=12)


def test_shuffled_tokens_are_the_same_tokens_and_special_ones_keep_their_places(with_tokenizer: Path) -> None:
    loaded = load(with_tokenizer)
    loaded.tokenizer.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]"})
    window = text_windows(loaded, " ".join(f"w{index}" for index in range(30)), windows=1, window_tokens=23)[0]
    kept = window.clone()
    shuffled = shuffled_window(loaded, window, torch.Generator().manual_seed(0))
    assert torch.equal(window, kept)
    assert (shuffled[0], shuffled[-1]) == (1, 2)
    assert not torch.equal(shuffled, window)
    assert torch.equal(shuffled.sort().values, window.sort().values)
    assert torch.equal(shuffled_window(loaded, window, torch.Generator().manual_seed(0)), shuffled)
    bare = torch.tensor([7])
    assert torch.equal(shuffled_window(tiny.loaded(tiny.config("gpt2")), bare, torch.Generator()), bare)


def test_shuffled_patches_are_whole_patches_of_the_same_image() -> None:
    vision = tiny.loaded(tiny.config("dinov2"))  # patches of 7: 3 x 4 of them, and a rest of 2 rows and 3 columns
    image = torch.randn(3, 23, 31, generator=torch.Generator().manual_seed(0))
    shuffled = shuffled_window(vision, image, torch.Generator().manual_seed(1))

    def patches(picture: torch.Tensor) -> list[bytes]:
        return [
            picture[:, 7 * row : 7 * row + 7, 7 * column : 7 * column + 7].contiguous().numpy().tobytes()
            for row in range(3)
            for column in range(4)
        ]

    assert patches(shuffled) != patches(image)
    assert sorted(patches(shuffled)) == sorted(patches(image))
    assert torch.equal(shuffled[:, 21:], image[:, 21:])
    assert torch.equal(shuffled[:, :, 28:], image[:, :, 28:])


def test_text_without_a_tokenizer_and_images_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(UserError, match="no tokenizer"):
        text_windows(tiny.loaded(tiny.config("llama")), "some words", windows=1, window_tokens=5)
    vision = tiny.loaded(tiny.config("dinov2"))
    with pytest.raises(UserError, match="smaller than one patch"):
        image_windows(vision, torch.zeros(2, 3, 5, 28), windows=1)
    with pytest.raises(UserError, match="hold nothing"):
        image_windows(vision, torch.zeros(0, 3, 28, 28), windows=1)
    with pytest.raises(TypeError, match="float tensor"):
        image_windows(vision, torch.zeros(2, 3, 28, 28, dtype=torch.uint8), windows=1)


@pytest.mark.parametrize("family", [family for family in FAMILIES if ARCHITECTURES[family].reads == "tokens"])
def test_the_longest_window_that_is_let_through_runs_and_a_longer_one_is_refused(family: str) -> None:
    """RoBERTa and MPNet have positions in their tables that no token can have."""
    loaded = tiny.loaded(tiny.config(family))
    positions = ARCHITECTURES[family].positions(loaded.model.config)
    longest = 97 if positions is None else positions  # longer than any table of the tiny configurations
    if positions is not None:
        with pytest.raises(UserError, match=f"exceeds the {positions} positions"):
            text_windows(loaded, torch.zeros(1, positions + 1, dtype=torch.long), 1, 4)
    window = text_windows(loaded, torch.full((1, longest), 5), 1, 4)[0]
    captured: list[LayerCapture] = []
    stream_layers(loaded, window, captured.append)
    assert len(captured) == tiny.LAYERS
    assert captured[0].attention.shape[-1] == longest


@pytest.mark.parametrize("family", tiny.EVERYDAY)
def test_a_network_in_which_no_attention_is_found_is_an_error_and_no_empty_table(family: str) -> None:
    configuration = tiny.config(family)
    configuration.num_hidden_layers = 0
    with pytest.raises(UserError, match="tiny has no attention layer"):
        analyze(tiny.loaded(configuration), **tiny.given(configuration))  # type: ignore[arg-type]


def test_token_ids_beyond_the_vocabulary_and_none_at_all_are_refused() -> None:
    loaded = tiny.loaded(tiny.config("gpt2"))
    for ids in (torch.tensor([[1, tiny.VOCABULARY]]), torch.tensor([[-1, 2]])):
        with pytest.raises(UserError, match="exceed the 53 of tiny"):
            text_windows(loaded, ids, 1, 2)
    with pytest.raises(UserError, match="hold nothing"):
        text_windows(loaded, torch.empty(0, 5, dtype=torch.long), 1, 5)


def test_features_of_another_shape_or_kind_are_refused_and_shuffled_by_token() -> None:
    loaded = tiny.loaded(tiny.config("whisper"))
    good = tiny.windows(loaded.model.config, 3)
    assert len(audio_windows(loaded, good, 2)) == 2
    spoilt = good.clone()
    spoilt[1, 2, 3] = torch.nan
    for features, expected in (
        (good[:, :, :-1], "reads 7 mel bins of 22 frames"),
        (good[:, :-1], "reads 7 mel bins of 22 frames"),
        (good.long(), "floating-point"),
        (good[0], "floating-point"),
        (good[:0], "hold nothing"),
        (spoilt, "not all finite"),
    ):
        with pytest.raises(UserError, match=expected):
            audio_windows(loaded, features, 2)
    shuffled = shuffled_window(loaded, good[0], torch.Generator().manual_seed(3))
    pairs, moved = (window.unflatten(1, (11, 2)).transpose(0, 1).flatten(1).tolist() for window in (good[0], shuffled))
    assert moved != pairs
    assert sorted(moved) == sorted(pairs)
