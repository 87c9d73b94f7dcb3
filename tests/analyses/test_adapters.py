"""Every adapter is proved by identities: outputs, queries, keys and maps that the model itself computes."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from attngeo.connection_walk import analyze, identities
from attngeo.connection_walk.adapters import adapter_errors
from attngeo.errors import UserError
from attngeo.language_models import architectures
from attngeo.language_models.architectures import ARCHITECTURES, EXAMPLE, architecture_of, register
from attngeo.language_models.capture import LayerCapture, in_float64, stream_layers, working_precision_softmax
from attngeo.language_models.comparisons import Comparison, compared_vectors, stream_comparisons
from attngeo.language_models.loading import LoadedModel, load
from tests.analyses import tiny_language_models as tiny
from tests.documents import GUIDES
from tests.tolerances import (
    FLOAT32_INSIDE_FLOAT64,
    FLOAT32_SOFTMAX_MAPS,
    ROTARY_FLOAT32_ANGLES,
    WALK_IDENTITY_FLOAT32,
    WALK_IDENTITY_FLOAT64,
)

FAMILIES = tuple(ARCHITECTURES)
TURNED_OR_NORMED_IN_FLOAT32 = ("gemma3_text", "modernbert", "qwen3")
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    *((family, {"heads": 3, "head_dim": 8, "width": 21}) for family in tiny.FREE_HEADS),
    *((family, {"heads": 6, "groups": 2}) for family in tiny.GROUPED),
    *((family, {"heads": 5, "groups": 1}) for family in tiny.GROUPED),
    ("falcon", {"parallel_attn": False}),
    ("falcon", {"heads": 4, "groups": 2, "num_ln_in_parallel_attn": 1}),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("mpnet", {"heads": 1, "head_dim": 7}),
    ("opt", {"do_layer_norm_before": False, "enable_bias": False}),
    ("bloom", {"apply_residual_connection_post_layernorm": True}),
    ("dinov2", {"qkv_bias": False}),
]


def _name(case: tuple[str, dict[str, Any]]) -> str:
    return " ".join((case[0], *(f"{key}={value}" for key, value in case[1].items())))


def _loaded(case: tuple[str, dict[str, Any]], dtype: torch.dtype = torch.float64) -> tuple[LoadedModel, Tensor]:
    """A tiny model and a window that is longer than any sliding window."""
    loaded = tiny.loaded(tiny.config(case[0], **case[1]), dtype)
    return loaded, tiny.windows(loaded.model.config)[0]


@pytest.mark.parametrize("case", LAYOUTS, ids=_name)
def test_outputs_vectors_and_maps_of_every_layout_are_the_models_own(case: tuple[str, dict[str, Any]]) -> None:
    loaded, window = _loaded(case)
    exact, own = (adapter_errors(loaded, window, float64_softmax=choice) for choice in (True, False))
    assert max(exact.output, own.output) <= WALK_IDENTITY_FLOAT64
    rounded = case[0] in TURNED_OR_NORMED_IN_FLOAT32
    assert max(exact.vectors, own.vectors) <= (FLOAT32_INSIDE_FLOAT64 if rounded else WALK_IDENTITY_FLOAT64)
    assert exact.maps <= WALK_IDENTITY_FLOAT64
    assert own.maps <= FLOAT32_SOFTMAX_MAPS
    assert loaded.model.config._attn_implementation == "eager"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in loaded.model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_float32_model_walks_within_float32(family: str) -> None:
    loaded, window = _loaded((family, {}), torch.float32)
    errors: list[float] = []

    def on_layer(capture: LayerCapture) -> None:
        assert capture.output.dtype == torch.float32
        site = loaded.sites[capture.layer]
        errors.append(identities.walk_error(capture, site, site.weights()))

    stream_layers(loaded, window, on_layer)
    assert len(errors) == tiny.LAYERS
    assert max(errors) <= WALK_IDENTITY_FLOAT32


@pytest.mark.parametrize("family", FAMILIES)
def test_sites_hold_views_of_the_models_own_weights_and_copy_none(family: str) -> None:
    loaded, _ = _loaded((family, {}))
    own = {parameter.untyped_storage().data_ptr() for parameter in loaded.model.parameters()}
    for site in loaded.sites:
        for name in ("query", "key", "value", "output"):
            weight = getattr(site, f"{name}_weight")
            assert weight.untyped_storage().data_ptr() in own, f"{name}_weight is a copy"


# The library's own default attention is the one that people run; these classes know the eager one only.
EAGER_ONLY = ("bloom", "gemma2", "mpnet")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in EAGER_ONLY])
def test_the_analysed_network_is_the_one_that_people_run(family: str) -> None:
    loaded, window = _loaded((family, {}))
    own = window.to(loaded.model.dtype) if loaded.adapter.reads == "audio" else window
    inputs = {loaded.adapter.input_name: own[None]}
    states = []
    for implementation in ("eager", "sdpa"):
        loaded.model.config._attn_implementation = implementation
        with working_precision_softmax(), torch.no_grad():
            states.append(loaded.model(**inputs, **loaded.adapter.call_options).last_hidden_state)
    torch.testing.assert_close(states[1], states[0])


def test_falcons_eager_position_bias_is_not_the_one_that_people_run() -> None:
    """Why this variant is refused; once the library agrees with itself it can be supported."""
    configuration = tiny.config("falcon")
    configuration.alibi = True
    model = transformers.FalconModel._from_config(configuration, attn_implementation="eager").double().eval()
    tiny.move_parameters(model)
    states = []
    for implementation in ("eager", "sdpa"):
        model.config._attn_implementation = implementation
        with torch.no_grad():
            states.append(model(tiny.windows(tiny.config("falcon"))[:1]).last_hidden_state)
    assert identities.relative_error(states[1], states[0]) > 1e-3


@pytest.mark.parametrize("family", TURNED_OR_NORMED_IN_FLOAT32)
def test_projections_are_exact_before_the_library_rounds_them_to_float32(family: str) -> None:
    loaded, window = _loaded((family, {}))
    site = loaded.sites[1]
    computed: list[Tensor] = []
    linears = ("Wqkv",) if family == "modernbert" else ("q_proj", "k_proj")
    for name in linears:
        site.attention.get_submodule(name).register_forward_hook(lambda module, args, out: computed.append(out[0]))
    inputs: list[Tensor] = []
    stream_layers(loaded, window, lambda capture: inputs.append(capture.attention_input))
    own = computed[0].chunk(3, dim=-1)[:2] if family == "modernbert" else computed
    projected = site.query_key_weights().project(site.states(inputs[1]))
    for ours, theirs in zip(projected, own, strict=True):
        by_head = theirs.unflatten(-1, (len(ours), -1)).transpose(0, 1)
        assert identities.relative_error(ours, by_head) <= WALK_IDENTITY_FLOAT64


def _comparisons(loaded: LoadedModel, window: Tensor) -> list[tuple[LayerCapture, Comparison]]:
    found: list[tuple[LayerCapture, Comparison]] = []
    with in_float64(loaded), working_precision_softmax():
        stream_comparisons(loaded, window, lambda capture, comparison: found.append((capture, comparison)))
    return found


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "bert"])
def test_planted_singular_directions_of_a_query_are_on_the_right_sides(family: str) -> None:
    """GPT-2 stores [in, out], a Linear [out, in]: with heads as wide as the model nothing but the value tells them."""
    loaded, _ = _loaded((family, {"heads": 1, "head_dim": 6}))
    site = loaded.sites[1]
    draw = torch.Generator().manual_seed(0)
    left, right = torch.linalg.qr(torch.randn(6, 2, dtype=torch.float64, generator=draw)).Q.T
    assert site.query_weight is not None
    planted = torch.outer(left, right).reshape(site.query_weight.shape)
    site.query_weight.copy_(planted)
    if site.gain is not None:
        site.gain.fill_(1)
    query = loaded.sites[1].query_key_weights().query[0]
    u, s, vh = torch.linalg.svd(query)
    torch.testing.assert_close(s, torch.tensor([1.0, 0, 0, 0, 0, 0], dtype=torch.float64))
    torch.testing.assert_close((u[:, 0] @ left).abs(), torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close((vh[0] @ right).abs(), torch.tensor(1.0, dtype=torch.float64))


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("llama", {"rope_type": "default", "rope_theta": 100.0}),
        ("llama", {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}),
        ("gpt_neox", {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}),
        ("phi3", {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}),
    ],
    ids=["whole", "scaled", "partial", "partial, fused"],
)
def test_queries_at_positions_0_1_and_100_are_turned_by_the_half_split_angles(
    family: str, rope: dict[str, Any]
) -> None:
    case = (family, {"head_dim": 8, "rope_parameters": rope, "max_position_embeddings": 128})
    loaded, _ = _loaded(case)
    window = torch.randint(tiny.VOCABULARY, (101,), generator=torch.Generator().manual_seed(1))
    capture, comparison = _comparisons(loaded, window)[0]
    site = loaded.sites[0]
    plain, _ = site.query_key_weights().project(site.states(capture.attention_input))
    turned_width = int(8 * rope.get("partial_rotary_factor", 1))
    for position in (0, 1, 100):
        expected = plain[:, position].clone()
        for component in range(turned_width // 2):
            angle = position / rope.get("factor", 1.0) * rope["rope_theta"] ** (-2 * component / turned_width)
            first, second = plain[:, position, component], plain[:, position, component + turned_width // 2]
            expected[:, component] = first * math.cos(angle) - second * math.sin(angle)
            expected[:, component + turned_width // 2] = second * math.cos(angle) + first * math.sin(angle)
        got = comparison.query[:, position]
        torch.testing.assert_close(got, expected, rtol=0, atol=ROTARY_FLOAT32_ANGLES * plain.abs().max().item())
    assert (comparison.maps() - capture.attention).abs().max() <= WALK_IDENTITY_FLOAT64


@pytest.mark.parametrize(
    ("family", "left_out"),
    [
        ("bloom", {"bias": None}),
        ("gemma2", {"soft_cap": None}),
        ("gemma2", {"scaling": 6**-0.5}),
        ("mistral", {"bias": "causal mask without its window"}),
        ("mpnet", {"bias": None}),
        ("opt", {"scaling": 5**-0.5}),
        ("t5", {"bias": None}),
        ("t5", {"scaling": 5**-0.5}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_maps_notice_what_a_score_is_made_of_besides_queries_and_keys(family: str, left_out: dict[str, Any]) -> None:
    loaded, window = _loaded((family, {}))
    capture, comparison = _comparisons(loaded, window)[1 if family == "gemma2" else 0]
    assert (comparison.maps() - capture.attention).abs().max() <= WALK_IDENTITY_FLOAT64
    if isinstance(left_out.get("bias"), str):
        left_out = {"bias": torch.full((len(window), len(window)), -torch.inf).triu(1)}
    elif "bias" in left_out and loaded.adapter.causal:
        # The mask itself stays: only the position bias goes.
        left_out = {"bias": torch.where(capture.attention == 0, -torch.inf, 0.0)}
    assert (replace(comparison, **left_out).maps() - capture.attention).abs().max() > 1e-3


@pytest.mark.parametrize("wrong", ["heads swapped", "query for key", "norm left out"])
def test_the_proof_notices_a_wrong_query_or_key(wrong: str) -> None:
    loaded, window = _loaded(("qwen3", {"heads": 4, "groups": 2}))
    site = loaded.sites[0]
    assert site.query_weight is not None
    changes: dict[str, dict[str, Any]] = {
        "heads swapped": {"query_weight": site.query_weight.flip(1)},
        "query for key": {"key_weight": site.query_weight[:, : site.query_weight.shape[1] // 2]},
        "norm left out": {"query_norm": None},
    }
    adapter = replace(loaded.adapter, sites=lambda model: [replace(site, **changes[wrong])])
    assert adapter_errors(replace(loaded, adapter=adapter), window).vectors > 1e-2
    capture, comparison = _comparisons(loaded, window)[0]
    query, _ = compared_vectors(site, site.states(capture.attention_input), comparison.rotation)
    assert identities.relative_error(query, comparison.query) <= FLOAT32_INSIDE_FLOAT64


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_analysed_from_its_folder(family: str, tmp_path: Path) -> None:
    folder = tiny.saved(tmp_path / family, tiny.config(family))
    frame = analyze(folder, **tiny.given(tiny.config(family), 1), null_draws=2, edges=1)  # type: ignore[arg-type]
    assert set(frame["family"]) == {family}
    assert frame.query("metric == 'identity_error'")["value"].max() <= WALK_IDENTITY_FLOAT64
    trained = frame.query("metric == 'isometry_score' and control == 'trained'")["value"]
    assert bool(((trained > 0) & (trained <= 1)).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_with_a_head_loads_without_it(family: str, tmp_path: Path) -> None:
    """As most are on the hub: other names of the same parameters, and some that the headless model leaves unread."""
    heads = {
        "dinov2": transformers.AutoModelForImageClassification,
        "t5": transformers.AutoModelForSeq2SeqLM,
        "vit": transformers.AutoModelForImageClassification,
        "whisper": transformers.AutoModelForSpeechSeq2Seq,
    }
    usual = transformers.AutoModelForCausalLM if ARCHITECTURES[family].causal else transformers.AutoModelForMaskedLM
    model = heads.get(family, usual).from_config(tiny.config(family))
    tiny.move_parameters(model)
    model.save_pretrained(tmp_path)
    own = model.get_encoder() if family == "whisper" else model.base_model
    for name, parameter in load(tmp_path).model.named_parameters():
        assert torch.equal(parameter, own.get_parameter(name)), name


def test_of_an_encoder_decoder_the_encoder_alone_is_analysed(tmp_path: Path) -> None:
    configuration = tiny.config("t5")
    configuration.num_decoder_layers = 2
    both = transformers.T5Model._from_config(configuration, attn_implementation="eager").eval()
    tiny.move_parameters(both)
    both.save_pretrained(tmp_path / "both")
    loaded = load(tmp_path / "both")
    assert not any("decoder" in name or "EncDec" in name for name, _ in loaded.model.named_parameters())
    window = tiny.windows(tiny.config("t5"))[0]
    own = both.encoder(window[None], output_attentions=True).attentions
    captured: list[LayerCapture] = []
    stream_layers(loaded, window, captured.append)
    assert len(captured) == tiny.LAYERS
    for capture, attention in zip(captured, own, strict=True):
        torch.testing.assert_close(capture.attention, attention[0])


@pytest.mark.network
@pytest.mark.parametrize(
    "model", ["minilm-l3", "minilm-l6", "all-mpnet-base-v2", "smollm2-135m-instruct@gguf-q4_1", "dinov2-s"]
)
def test_the_embedded_models_prove_their_adapters(model: str) -> None:
    from attngeo.data.embedded import fetch, is_fetched

    if model == "all-mpnet-base-v2" and not is_fetched(model):
        pytest.skip("0.4 GB that the preset study alone needs: `attngeo fetch all-mpnet-base-v2` has it proved, too")
    loaded, draw = load(fetch(model), None), torch.Generator().manual_seed(0)
    on_images = loaded.adapter.reads == "images"
    window = torch.randn(3, 98, 112, generator=draw) if on_images else torch.randint(1000, 20000, (41,), generator=draw)
    exact, own = (adapter_errors(loaded, window, float64_softmax=choice) for choice in (True, False))
    assert max(exact.output, exact.vectors, exact.maps, own.output) <= WALK_IDENTITY_FLOAT64
    assert own.maps <= FLOAT32_SOFTMAX_MAPS


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures, "ARCHITECTURES", dict(ARCHITECTURES))


def _starcoder2() -> LoadedModel:
    configuration = transformers.Starcoder2Config(
        vocab_size=tiny.VOCABULARY,
        hidden_size=24,
        num_hidden_layers=tiny.LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=17,
        sliding_window=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    return tiny.loaded(configuration)


@pytest.mark.usefixtures("restored")
def test_the_remedy_of_an_unknown_architecture_is_ten_lines_that_add_one() -> None:
    with pytest.raises(UserError, match="'starcoder2'") as refusal:
        _starcoder2()
    example = refusal.value.remedy.partition(":\n\n")[2]
    assert example == EXAMPLE
    assert sum(bool(line) for line in EXAMPLE.splitlines()) <= 10
    exec(example, {})
    loaded = _starcoder2()
    errors = adapter_errors(loaded, tiny.windows(loaded.model.config)[0])
    assert max(errors.output, errors.vectors, errors.maps) <= WALK_IDENTITY_FLOAT64
    with pytest.raises(UserError, match="already"):
        exec(example, {})


@pytest.mark.usefixtures("restored")
def test_the_guides_adapter_is_the_one_of_the_remedy_and_its_proof_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, proof = (
        next(block for block in re.findall(r"```python\n(.*?)```", GUIDES["language_models"], re.S) if call in block)
        for call in ("register(", "adapter_errors(")
    )
    assert adapter == EXAMPLE
    exec(adapter, {})
    monkeypatch.chdir(tmp_path)
    _starcoder2().model.float().save_pretrained("my_model")
    names: dict[str, Any] = {}
    exec(proof, names)
    assert max(vars(names["errors"]).values()) <= WALK_IDENTITY_FLOAT64


@pytest.mark.usefixtures("restored")
def test_a_class_without_the_attention_interface_is_refused_by_name_unless_it_says_what_it_compares() -> None:
    loaded, window = _loaded(("mpnet", {}))
    silent = replace(loaded, adapter=replace(loaded.adapter, compared=None))
    with pytest.raises(UserError, match="'mpnet'"):
        adapter_errors(silent, window)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in silent.model.modules())


def test_an_adapter_without_queries_is_told_so() -> None:
    loaded, _ = _loaded(("bert", {}))
    with pytest.raises(UserError, match="BertSelfAttention"):
        replace(loaded.sites[0], query_weight=None).query_key_weights()


@pytest.mark.usefixtures("restored")
def test_a_family_is_registered_once() -> None:
    register(replace(ARCHITECTURES["bert"], name="mine"))
    assert architecture_of(transformers.BertConfig()).name == "bert"
    with pytest.raises(UserError, match="'mine'"):
        register(replace(ARCHITECTURES["bert"], name="mine"))
