"""Our own decoder family: planned without torch, trained on checked text, read like any pretrained model."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from attngeo.config import Preset, load_preset
from attngeo.connection_walk import analyze
from attngeo.data import text
from attngeo.errors import UserError
from attngeo.jobs import sources
from attngeo.jobs.decoders import train_decoder
from attngeo.jobs.stamps import stamp_names
from attngeo.jobs.trajectories import trajectories
from attngeo.language_models import decoder
from attngeo.language_models.loading import load
from attngeo.language_models.windows import text_windows
from attngeo.paper import records
from attngeo.tracking.code_digest import CodeDigest
from attngeo.training.seeding import derive_seed
from tests.tolerances import WALK_IDENTITY_FLOAT64

ROOT = Path(__file__).resolve().parents[2]
SETTINGS: dict[str, Any] = {
    "sizes": {"tiny": {"layers": 3, "width": 18, "heads": 3}},
    "seeds": [2],
    "training": {"steps": 5, "context": 37, "batch_tokens": 74, "checkpoints": [2], "log_every": 2},
}


def preset_at(root: Path, **changes: Any) -> Preset:
    folder = root / "config/tiny"
    folder.mkdir(parents=True)
    settings = {"description": "d", "expected": "e", "decoders": SETTINGS, "figures": [], "tables": [], **changes}
    (folder / "config.yaml").write_text(json.dumps(settings))
    (folder / "runs.tsv").write_text("run_id\tmodel\tdataset\trecipe\tseed\tfeeds\n")
    return load_preset(root, "tiny")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Preset:
    preset = preset_at(tmp_path_factory.mktemp("decoders"))
    train_decoder(preset, "tiny-s2", "d1", threads=1)
    return preset


def test_every_kept_step_is_a_model_of_the_preset(trained: Preset) -> None:
    models = trained.decoder_models
    assert [model.id for model in models] == [f"decoder-tiny-s2-step{step}" for step in (0, 2, 5)]
    assert {model.id for model in models} == trained.analysed_models.keys()
    families = []
    for model in models:
        loaded = load(sources.model_folder(trained, model), model_id=model.id)
        families.append(loaded.family)
        assert loaded.precision == "float32"
        assert loaded.adapter.name == "llama"
        window = text_windows(loaded, sources.texts(trained, model), 3, trained.walk_settings(model).window_tokens)
        assert [len(tokens) for tokens in window] == [37] * 3
    assert families == ["decoder at step 0", "decoder at step 2", "decoder"]


def test_the_first_kept_step_is_the_untrained_network_of_that_seed(trained: Preset) -> None:
    untrained = decoder.build(decoder.decoder_config(3, 18, 3, 37), derive_seed(2, "initial weights"))
    stored = safetensors.torch.load_file(trained.root / trained.decoder_models[0].source / "model.safetensors")
    state = untrained.state_dict()
    assert {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}.keys() == stored.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in stored.items())


def test_a_trained_decoder_is_a_connection_walk(trained: Preset) -> None:
    model = trained.decoder_models[-1]
    frame = analyze(
        sources.model_folder(trained, model), sources.texts(trained, model), windows=2, window_tokens=37, null_draws=2
    )
    errors = frame[frame["metric"] == "identity_error"]
    assert len(errors)
    assert errors["value"].max() <= WALK_IDENTITY_FLOAT64
    assert set(frame["family"]) == {"decoder"}
    counted = frame.loc[frame["metric"] == "parameters", "value"].item()
    source = json.loads((trained.root / model.source / "source.json").read_text())
    assert counted == source["parameters"] == source["non_embedding_parameters"] + 256 * 18


def test_the_paths_of_a_trained_decoder_are_measured_on_windows_within_its_context(trained: Preset) -> None:
    longer = trained.trajectories.model_copy(update={"windows": 2, "window_tokens": 64, "tokens": 5, "inits": 1})
    preset = trained.model_copy(update={"trajectories": longer})
    (model,) = preset.finished_decoders
    assert model.id == "decoder-tiny-s2-step5"
    trajectories(preset, model.id, "d1")
    frame = records.read(preset.results / "analyses" / "trajectories" / f"{model.id}.json")
    assert set(frame["family"]) == {"decoder"}
    assert set(frame.loc[frame["metric"] == "measured_tokens", "value"]) == {5}
    assert frame.attrs["provenance"]["settings"]["window_tokens"] == 37


def test_the_curves_of_a_training_lie_at_its_steps(trained: Preset) -> None:
    with sqlite3.connect(trained.root / "results/mlflow.db") as store:
        rows = store.execute(
            "select r.name, r.status, m.step from runs r join metrics m on m.run_uuid = r.run_uuid"
            " where m.key = 'val_loss' order by m.step"
        ).fetchall()
    assert rows == [("decoder tiny-s2", "FINISHED", step) for step in (0, 2, 4, 5)]


def test_held_out_text_is_the_end_of_every_document_in_whole_words() -> None:
    documents = text.load()
    first, last = text.held_out(documents, 0.15)
    assert [a + b for a, b in zip(first, last, strict=True)] == documents
    assert all(0.13 < len(b) / len(whole) <= 0.15 for b, whole in zip(last, documents, strict=True))
    assert all(part[-1].isspace() for part in first)


def test_bytes_are_tokens_and_come_back() -> None:
    tokenizer = decoder.byte_tokenizer()
    for sample in ("Call me Ishmael.\n\t  ", "naïve – 鯨 🐳", "\x00\x7f"):
        ids = decoder.token_ids(tokenizer, sample)
        assert len(ids) == len(sample.encode())
        assert tokenizer.decode(ids) == sample
    assert sorted(tokenizer.get_vocab().values()) == list(range(decoder.BYTES))


@pytest.mark.parametrize(
    ("content", "words"), [(b"good\xff\xfe bad", "not UTF-8"), (b" \n", "holds no text"), (b"a few words", "fill")]
)
def test_a_broken_text_is_refused_before_training(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/b.txt").write_bytes(content)
    if words != "fill":
        (tmp_path / "texts/a.txt").write_text("a sound one " * 99)
    preset = preset_at(tmp_path, texts="texts")
    with pytest.raises(UserError, match=words if words != "fill" else "none of the 1 documents has 38 tokens"):
        train_decoder(preset, "tiny-s2", "d1", threads=1)
    assert not (preset.results / "decoders").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sizes": {"6k": {"heads": 3}}}, ["decoders.sizes.6k", "3 heads", "16"]),
        ({"sizes": {"6k": {"depth": 3}}}, ["decoders.sizes.6k.depth", "layers, width, heads"]),
        ({"seeds": [1, 1]}, ["decoders.seeds", "twice"]),
        ({"training": {"batch_tokens": 65}}, ["batch_tokens is 65", "multiple of context"]),
        ({"training": {"checkpoints": [7]}}, ["checkpoints is (7,)", "from 0 to 6"]),
        ({"training": {"lr": "fast"}}, ["decoders.training.lr", "fast"]),
        ({"training": {"stepz": 3}}, ["decoders.training.stepz", "did you mean 'steps'"]),
    ],
)
def test_a_wrong_family_is_explained(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        load_preset(ROOT, "smoke", {"decoders": change})
    message = str(refused.value)
    assert "config/smoke/config.yaml" in message
    assert all(word in message for word in words), message


def test_presets_name_their_decoders() -> None:
    assert not load_preset(ROOT, "demo").decoder_models
    study = load_preset(ROOT, "study")
    assert len(study.decoder_runs) == 8
    assert len(study.decoder_models) == 8 * len(study.decoder_steps) >= 8 * 5
    with pytest.raises(UserError, match=r"300k-s0[\s\S]*10m-s1"):
        study.decoder_run("300m-s0")
    with pytest.raises(UserError, match="take the preset study"):
        load_preset(ROOT, "demo").decoder_run("300k-s0")


def test_planning_decoders_imports_no_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from attngeo.config import load_preset;"
        "from attngeo.jobs.stamps import current_stamp; current_stamp(load_preset(Path('.'), 'study'), "
        "'decoders/10m-s1'); print(sorted({'torch', 'transformers', 'tokenizers', 'timm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_what_a_decoder_is_trained_by_reruns_it_and_its_analyses_and_nothing_else() -> None:
    def stamps(**changes: Any) -> dict[str, str]:
        preset = load_preset(ROOT, "smoke", {"decoders": changes})
        wanted = [(n, make) for n, make in stamp_names(preset) if n.startswith(("decoders/", "connection_walk/"))]
        return {name: make(digests)["digest"] for name, make in wanted}

    digests = CodeDigest(ROOT)
    before = stamps()
    slower = stamps(training={"lr": 5e-4})
    changed = {name for name in before if before[name] != slower[name]}
    assert changed == {"decoders/6k-s0", *(f"connection_walk/decoder-6k-s0-step{step}" for step in (0, 2, 6))}
    longer = stamps(sizes={"30k": {"layers": 3, "width": 32, "heads": 2}})
    assert before.items() < longer.items(), "another size leaves the trained ones alone"
    stamp = dict(stamp_names(load_preset(ROOT, "smoke")))["decoders/6k-s0"](digests)
    assert "attngeo.training.language" in stamp["modules"]
    assert not {"attngeo.language_models.architectures", "attngeo.connection_walk.analysis"} & stamp["modules"].keys()
