"""Weight files: complete, or refused by name; whole in memory or layer by layer, the numbers are the same."""

import gc
import json
import os
import pickle
import socket
import struct
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from attngeo.connection_walk import analyze
from attngeo.connection_walk.weights_only import analyze_weights
from attngeo.errors import UserError
from attngeo.language_models import loading, memory
from attngeo.language_models.architectures import ARCHITECTURES
from attngeo.language_models.capture import LayerCapture, stream_layers, working_precision_softmax
from attngeo.language_models.checkpoint import open_checkpoint
from attngeo.language_models.loading import load, parameters, random_init
from attngeo.language_models.on_demand import SitesOnDemand
from attngeo.language_models.padding import stream_batch
from attngeo.language_models.windows import image_windows, text_windows, whole_texts
from tests.analyses import tiny_language_models as tiny
from tests.tolerances import PADDED_BATCH_FLOAT64, UNTRAINED_SPREAD, WINDOW_MEMORY

INDEX = "model.safetensors.index.json"
FAMILIES = sorted(ARCHITECTURES)


def sharded(folder: Path, shards: int, dtype: torch.dtype = torch.float32) -> Path:
    """A tiny Llama below a language-model head's names, in so many shards."""
    tiny.saved(folder, tiny.config("llama", groups=1), dtype)
    weights = {f"model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    placed = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in sorted(weights)[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


@pytest.mark.parametrize("shards", [2, 3])
def test_shards_are_one_model(shards: int, tmp_path: Path) -> None:
    opened = load(sharded(tmp_path / "cut", shards))
    reference = tiny.network(tiny.config("llama", groups=1), torch.float32)
    for name, parameter in reference.named_parameters():
        assert torch.equal(opened.model.get_parameter(name), parameter)
    assert len(open_checkpoint(tmp_path / "cut").files) == shards


@pytest.mark.parametrize("shards", [2, 3])
def test_an_incomplete_set_of_shards_is_named_before_any_analysis(shards: int, tmp_path: Path) -> None:
    folder = sharded(tmp_path / "cut", shards)
    last = folder / f"model-{shards:05d}-of-{shards:05d}.safetensors"
    whole = last.read_bytes()

    def refused(*expected: str) -> None:
        with pytest.raises(UserError) as refusal:
            load(folder)
        assert all(text in refusal.value.what for text in expected), refusal.value.what
        assert "fetch" in refusal.value.remedy

    last.write_bytes(whole[:-7])
    refused(last.name, "cut short")
    last.write_bytes(b"<html>not found</html>")
    refused(last.name)
    last.write_bytes(b"")
    refused(last.name)
    last.unlink()
    refused(last.name, "missing")
    last.write_bytes(whole)
    index = (folder / INDEX).read_text()
    placed = json.loads(index)
    placed["weight_map"]["model.layers.7.self_attn.v_proj.weight"] = last.name
    (folder / INDEX).write_text(json.dumps(placed))
    refused("model.layers.7.self_attn.v_proj.weight", last.name)
    (folder / INDEX).write_text(index[:-30])
    refused(INDEX, "damaged")
    (folder / INDEX).unlink()
    refused(INDEX, f"{shards} shards")
    (folder / INDEX).write_text(index)
    load(folder)


def test_weights_of_another_shape_are_refused_with_their_file(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "cut", 2)
    name = "model.layers.1.self_attn.o_proj.weight"
    file = open_checkpoint(folder).tensors[name].file
    weights = load_file(file)
    save_file(weights | {name: weights[name][:, :-3].contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"layers\.1\.self_attn\.o_proj\.weight") as refusal:
        load(folder)
    assert file.name in refusal.value.what
    assert "config.json" in refusal.value.remedy


def test_a_folder_without_weights_names_what_there_is(tmp_path: Path) -> None:
    folder = tiny.saved(tmp_path / "model", tiny.config("bert"))
    (folder / "model.safetensors").rename(folder / "tf_model.h5")
    with pytest.raises(UserError, match=r"no weights.*tf_model\.h5") as refusal:
        load(folder)
    assert "save_pretrained" in refusal.value.remedy


def test_pickled_weights_are_read_as_data_and_never_run(tmp_path: Path) -> None:
    folder = tiny.saved(tmp_path / "model", tiny.config("bert"))
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    opened = load(folder, on_demand=True)
    assert opened.weights is None
    assert torch.equal(opened.model.embeddings.word_embeddings.weight, weights["embeddings.word_embeddings.weight"])

    class Planted:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "planted"),))

    torch.save({"weights": Planted()}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot be read"):
        load(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Planted(), protocol=2))
    with pytest.raises(UserError, match="cannot be read"):
        load(folder)
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize(
    ("family", "table", "output"), [("llama", "embed_tokens", "lm_head"), ("gpt2", "wte", "lm_head")]
)
def test_embeddings_stored_under_the_tied_output_alone_are_found_and_counted_once(
    family: str, table: str, output: str, tmp_path: Path
) -> None:
    configuration = tiny.config(family)
    configuration.tie_word_embeddings = True
    folder = tiny.saved(tmp_path / "tied", configuration)
    weights = load_file(folder / "model.safetensors")
    expected, size = weights.pop(f"{table}.weight"), parameters(load(folder).model)
    save_file(weights | {f"{output}.weight": expected}, folder / "model.safetensors", metadata={"format": "pt"})
    opened = load(folder)
    assert torch.equal(opened.model.get_input_embeddings().weight, expected)
    assert parameters(opened.model) == size
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=table):
        load(folder)


def test_the_precision_is_that_of_every_shard_and_of_the_rounding_asked_for(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "half", 2, torch.bfloat16)
    assert load(folder).precision == "bfloat16", "a wider dtype of the computation keeps every bit"
    assert load(folder, torch.float16).precision == "bfloat16 as float16"
    file = open_checkpoint(folder).files[1]
    save_file({k: v.float() for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    assert load(folder, None).precision == "bfloat16+float32"


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_by_layer_gives_the_same_bits_as_a_whole_model(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    configuration = tiny.config(family)
    folder = tiny.saved(tmp_path / "tiny", configuration, torch.bfloat16)
    opened = load(folder, None)
    assert opened.weights is None
    whole = analyze(opened, **tiny.given(configuration))
    monkeypatch.setattr(loading, "ON_DEMAND_SHARE", 0.0)
    opened = load(folder, None)
    assert opened.weights is not None, "larger than the share of memory"
    assert "they stay on disk" in caplog.text
    assert isinstance(opened.sites, SitesOnDemand)
    pd.testing.assert_frame_equal(whole, analyze(opened, **tiny.given(configuration)), check_exact=True)
    assert load(folder, torch.float32).weights is None, "another precision is a copy"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_alone_give_the_rows_of_the_whole_analysis(family: str, tmp_path: Path) -> None:
    configuration = tiny.config(family)
    folder = tiny.saved(tmp_path / "tiny", configuration)
    alone = analyze_weights(folder, seed=5)
    whole = analyze(folder, **tiny.given(configuration, 1), seed=5)
    keys = ["model", "precision", "layer", "head", "metric", "control"]
    both = alone.merge(whole, on=keys, suffixes=("", "_whole"), how="left")
    assert {"trained", "null", "excess", "random_init"} <= set(alone["control"])
    assert len(both) == len(alone)
    for column in ("value", "n", "spread", "spread_kind", "convention"):
        pd.testing.assert_series_equal(both[column], both[f"{column}_whole"], check_exact=True, check_names=False)


def test_weights_on_demand_go_with_their_last_use(tmp_path: Path) -> None:
    configuration = tiny.config("llama")
    folder = tiny.saved(tmp_path / "tiny", configuration)
    openers: list[Callable[[], Any]] = [
        lambda: load(folder, None, on_demand=True),
        lambda: random_init(configuration, 0, model_id="x", on_demand=True),
    ]
    for opener in openers:
        opened = opener()
        stream_layers(opened, torch.arange(5), lambda capture: None)
        site = opened.sites[1]
        alive = [weakref.ref(opened.model), weakref.ref(opened.weights)]
        gc.disable()
        try:
            del opened, site
            assert [reference() for reference in alive] == [None, None]
        finally:
            gc.enable()


def test_pages_are_given_back_after_every_layer(tmp_path: Path) -> None:
    folder = tiny.saved(tmp_path / "wide", tiny.config("llama", heads=8, head_dim=128))
    opened = load(folder, None, on_demand=True)
    file = str((folder / "model.safetensors").resolve())

    def resident_kib() -> int:
        text = Path("/proc/self/smaps").read_text()
        return sum(int(part.split("Rss:")[1].split()[0]) for part in text.split(file)[1:])

    opened.weights.release()  # type: ignore[union-attr]
    before = resident_kib()
    assert opened.model.layers[0].self_attn.q_proj.weight.double().abs().sum() > 0
    assert resident_kib() >= before + opened.model.layers[0].self_attn.q_proj.weight.nbytes // 1024
    stream_layers(opened, torch.arange(5), lambda capture: None)
    assert resident_kib() <= before + 4 * os.sysconf("SC_PAGE_SIZE") // 1024


@pytest.mark.parametrize("family", FAMILIES)
def test_an_untrained_network_follows_the_librarys_law(family: str) -> None:
    configuration = tiny.config(family, heads=4, head_dim=16)
    adapter = ARCHITECTURES[family]
    theirs = adapter.network._from_config(configuration, attn_implementation="eager", **adapter.model_options)
    ours = random_init(configuration, 3, model_id="x").model
    assert not any(parameter.is_meta for parameter in ours.parameters())
    own = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        values = parameter.detach()
        if bool((values == values.flatten()[0]).all()):
            assert torch.equal(own[name].data, values), name
        elif values.numel() > 500:
            assert own[name].std().item() == pytest.approx(values.std().item(), rel=UNTRAINED_SPREAD), name
    assert own.keys() == dict(theirs.named_parameters()).keys()
    buffers = dict(ours.named_buffers())
    for name, buffer in theirs.named_buffers():
        torch.testing.assert_close(buffers[name], buffer, rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_untrained_network_is_the_same_drawn_whole_or_layer_by_layer(family: str) -> None:
    configuration = tiny.config(family)
    window = tiny.windows(configuration, 1)[0]
    seen: list[list[torch.Tensor]] = []
    for on_demand in (False, True):
        network = random_init(configuration, 7, model_id="x", on_demand=on_demand)
        first = network.sites[1].weights().value
        outputs: list[torch.Tensor] = []
        for _ in range(2):
            stream_layers(network, window, lambda capture, outputs=outputs: outputs.append(capture.output))
        last = network.sites[tiny.LAYERS - 1].weights().output
        seen.append([first, last, network.sites[1].weights().value, *outputs])
        drawn = sum(not parameter.is_meta for parameter in network.model.parameters())
        assert (drawn == len(list(network.model.parameters()))) != on_demand
    assert all(torch.equal(whole, single) for whole, single in zip(*seen, strict=True))


def test_a_window_that_would_not_fit_is_refused_with_the_longest_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny.loaded(tiny.config("gpt2", n_positions=700))
    monkeypatch.setattr(memory, "available_bytes", lambda: 100 * 2**20)
    with pytest.raises(UserError, match=r"600 tokens of tiny takes about 0\.\d GiB") as refusal:
        text_windows(loaded, torch.zeros(1, 600, dtype=torch.long), 1, 600)
    longest = int(refusal.value.remedy.rpartition(" ")[2])
    assert len(text_windows(loaded, torch.zeros(1, longest, dtype=torch.long), 1, longest)) == 1
    with pytest.raises(UserError, match="takes about"):
        text_windows(loaded, torch.zeros(1, longest + 1, dtype=torch.long), 1, longest + 1)
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**10)
    with pytest.raises(UserError, match="takes about"):
        image_windows(tiny.loaded(tiny.config("dinov2")), torch.zeros(1, 3, 28, 28), 1)


def test_a_long_text_through_a_middling_model_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 layers of 12 heads at 4,096 tokens under 8 GB: the maps of all layers would be 9.7 GB in float32."""
    import transformers

    gib = 2**30
    config = transformers.GPT2Config(n_positions=8192)
    monkeypatch.setattr(memory, "available_bytes", lambda: 8 * gib)
    with pytest.raises(UserError, match="4096 tokens of gpt2") as refusal:
        memory.require_memory(config, 4096, 124_000_000, "gpt2")
    longest = int(refusal.value.remedy.rpartition(" ")[2])
    assert memory.window_bytes(config, longest, 124_000_000) <= 8 * gib < memory.window_bytes(config, 4096, 124_000_000)
    assert longest > 2048


def test_free_memory_is_bounded_by_the_limit_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    free = memory.available_bytes()
    assert 0 < free < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2**20, resource.RLIM_INFINITY))
    assert memory.available_bytes() == 0


def group(folder: Path, files: dict[str, int | str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(f"{content}\n")


def test_free_memory_is_what_the_control_groups_leave_and_file_pages_that_they_can_drop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    membership = tmp_path / "cgroup"
    monkeypatch.setattr(memory, "_MEMBERSHIPS", membership)
    assert memory.available_bytes() > 10**6, "no control groups at all"
    monkeypatch.setattr(memory, "_GROUPS", tmp_path)
    second = {"memory.max": 9000, "memory.current": 8000, "memory.stat": "anon 1\ninactive_file 500"}
    group(tmp_path / "jobs", second)
    group(tmp_path / "jobs/mine", second | {"memory.max": "max"})
    membership.write_text("0::/jobs/mine\n")
    assert memory.available_bytes() == 1500
    first = {"memory.limit_in_bytes": 7000, "memory.usage_in_bytes": 6800, "memory.stat": "total_inactive_file 0"}
    group(tmp_path / "memory", first)
    membership.write_text("4:memory:/seen/only/outside/of/the/container\n3:cpuset:/\n")
    assert memory.available_bytes() == 200


def test_the_estimate_of_a_window_covers_its_peak_and_not_much_more() -> None:
    from attngeo.evaluation.timing import peak_memory_mib

    configuration = tiny.config("gpt2", heads=12, head_dim=4)
    configuration.n_positions = configuration.max_position_embeddings = 700
    loaded, window = tiny.loaded(configuration), torch.arange(307)[None] % tiny.VOCABULARY
    peak = peak_memory_mib(lambda: analyze(loaded, window, windows=1, null_draws=2, edges=2), torch.device("cpu"))
    estimate = memory.window_bytes(configuration, 307, parameters(loaded.model)) / 2**20
    assert peak <= estimate <= WINDOW_MEMORY * peak


@pytest.mark.parametrize("family", [name for name in FAMILIES if ARCHITECTURES[name].reads == "tokens"])
def test_a_padded_batch_gives_every_text_what_it_gets_alone(family: str) -> None:
    configuration = tiny.config(family)
    loaded = tiny.loaded(configuration)
    configuration.eos_token_id = configuration.pad_token_id = 3
    ids = tiny.windows(configuration, 3, 11)
    ids[0, 2:4] = ids[2, 4] = 3  # an end-of-text token inside a text is a token like any other
    windows = [ids[0, :5], ids[1], ids[2, :1]]
    alone: dict[tuple[int, int], LayerCapture] = {}
    together: dict[tuple[int, int], LayerCapture] = {}
    with working_precision_softmax():
        for index, window in enumerate(windows):
            stream_layers(loaded, window, lambda capture, index=index: alone.update({(index, capture.layer): capture}))
        stream_batch(loaded, windows, lambda index, capture: together.update({(index, capture.layer): capture}))
    assert alone.keys() == together.keys()
    for key, capture in alone.items():
        for name in ("attention", "attention_input", "head_outputs", "output"):
            torch.testing.assert_close(
                getattr(together[key], name),
                getattr(capture, name),
                rtol=PADDED_BATCH_FLOAT64,
                atol=PADDED_BATCH_FLOAT64,
            )
    assert not loaded.model._forward_pre_hooks


def words(folder: Path, family: str = "gpt2") -> Path:
    """A tiny model whose tokens are words w0 to w49 and an end of text, without a padding token."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    tiny.saved(folder, tiny.config(family))
    vocabulary = {f"w{index}": index for index in range(50)} | {"<end>": 50, "a": 51, "[UNK]": 52}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="<end>")
    fast.save_pretrained(folder)
    return folder


def test_texts_of_any_length_need_no_padding_token_and_empty_ones_are_reported(tmp_path: Path) -> None:
    loaded = load(words(tmp_path / "words"))
    assert loaded.tokenizer.pad_token_id is None
    with pytest.warns(UserWarning, match="2 of 5 texts are empty"):
        windows = whole_texts(loaded, ["w1 <end> w2", "", "w3", " \n", "w4 " * 99], 17)
    assert [len(window) for window in windows] == [3, 1, 17]
    assert windows[0].tolist() == [1, 50, 2]
    assert len(loaded.tokenizer) == loaded.model.config.vocab_size
    lengths: list[int] = []
    stream_batch(loaded, windows, lambda index, capture: lengths.append(len(capture.output)))
    assert lengths == [3, 1, 17] * tiny.LAYERS
    with pytest.warns(UserWarning, match="empty"), pytest.raises(UserError, match="holds a word"):
        whole_texts(loaded, ["", " "], 17)


def hub_cache(root: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A cache of the hub with model someone/tiny, tagged v1; its commit."""
    import huggingface_hub

    commit = "89abcdef0123456789abcdef0123456789abcdef"
    home = root / "models--someone--tiny"
    words(home / "snapshots" / commit)
    (home / "refs").mkdir()
    for name in ("main", "v1"):
        (home / "refs" / name).write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(root))
    return commit


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket, "socket", type("Refused", (socket.socket,), {"__init__": refuse}))
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("variable", [None, "HF_HUB_OFFLINE", "ATTNGEO_OFFLINE"])
def test_offline_takes_what_was_downloaded_before_and_opens_no_socket(
    variable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub_cache(tmp_path, monkeypatch)
    for name in ("HF_HUB_OFFLINE", "ATTNGEO_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "1")
    for name, revision in (("someone/tiny", None), ("someone/tiny", "v1"), (f"someone/tiny@{commit}", None)):
        opened = load(name, revision=revision, offline=variable is None)
        assert (opened.id, opened.revision, opened.precision) == ("tiny", commit, "float32")
    with pytest.raises(UserError, match="no earlier download") as refusal:
        load("someone/else", offline=variable is None)
    assert "network" in refusal.value.remedy


def test_a_revision_is_for_hub_names_only(tmp_path: Path) -> None:
    folder = tiny.saved(tmp_path / "model", tiny.config("bert"))
    for name in (folder, "someone/tiny@v2"):
        with pytest.raises(UserError, match="cannot be pinned"):
            load(name, revision="v1")


def gguf_file(path: Path, quantised: str = "Q8_0") -> dict[str, torch.Tensor]:
    """Write a tiny Llama as a GGUF file; its weights under Hugging Face names."""
    import gguf
    import numpy as np

    draw = np.random.default_rng(0)
    width, heads, groups, vocabulary, layers = 64, 4, 2, 40, 2
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(vocabulary)
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(96)
    writer.add_block_count(layers)
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(
        ["<end>", "ab"] + [chr(97 + index) for index in range(26)] + [f"x{index}" for index in range(12)]
    )
    writer.add_token_types([3] + [1] * (vocabulary - 1))
    writer.add_token_merges(["a b"])
    for name in ("bos", "eos", "unk", "pad"):
        getattr(writer, f"add_{name}_token_id")(0)
    writer.add_chat_template("{{ messages }}")
    sides = {"attn_q": (width, width), "attn_k": (width // 2, width), "attn_v": (width // 2, width)}
    sides |= {"attn_output": (width, width), "ffn_gate": (96, width), "ffn_up": (96, width), "ffn_down": (width, 96)}
    kind = gguf.GGMLQuantizationType[quantised]
    values: dict[str, torch.Tensor] = {}

    def add(name: str, array: Any) -> None:
        values[name] = torch.from_numpy(array)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(array, kind), raw_dtype=kind)

    add("token_embd", draw.normal(size=(vocabulary, width)).astype(np.float32))
    for layer in range(layers):
        for name, shape in sides.items():
            add(f"blk.{layer}.{name}", draw.normal(size=shape).astype(np.float32))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(width, dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(width, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def test_a_gguf_file_is_converted_once_and_its_quantisation_is_in_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attngeo.language_models import gguf_file as conversion

    monkeypatch.setenv("ATTNGEO_CACHE", str(tmp_path / "cache"))
    values = gguf_file(tmp_path / "small.gguf")
    opened = load(tmp_path / "small.gguf")
    assert (opened.id, opened.precision) == ("small@gguf-q8_0", "gguf-q8_0")
    torch.testing.assert_close(
        opened.model.layers[1].self_attn.v_proj.weight, values["blk.1.attn_v"], rtol=0, atol=2e-2
    )
    monkeypatch.setattr(conversion, "gguf_llama", lambda *_: pytest.fail("converted again"))
    frame = analyze_weights(tmp_path / "small.gguf")
    assert set(frame["precision"]) == {"gguf-q8_0"}
    assert load(tmp_path / "small.gguf", model_id="mine").precision == "gguf-q8_0"
    (found,) = (tmp_path / "cache" / "gguf").iterdir()
    assert [path.name for path in found.iterdir()] == ["small@gguf-q8_0"]


def test_a_gguf_file_that_cannot_be_converted_is_a_plain_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF" + struct.pack("<I", 3) + b"\x01" * 40)
    with pytest.raises(UserError, match=r"damaged\.gguf cannot be converted"):
        load(tmp_path / "damaged.gguf")
    with pytest.raises(UserError, match="there is no file"):
        load(tmp_path / "absent.gguf")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
