"""`attngeo analyze connection-walk MODEL` for a model outside of any preset: what it takes, writes and refuses."""

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from attngeo.cli import app
from attngeo.errors import UserError
from attngeo.jobs import connection_walk as preset_job
from attngeo.jobs import single_model
from attngeo.paper import records
from attngeo.processors import free_cores
from tests.analyses import tiny_language_models as tiny
from tests.analyses.test_model_files import gguf_file, hub_cache, no_network, words

__all__ = ["no_network"]
ROOT = Path(__file__).resolve().parents[2]
SHORT = ["--windows", "2", "--window-tokens", "7"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, outside of the project, with a model and a text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTNGEO_CACHE", str(tmp_path / "cache"))
    for name in ("HF_HUB_OFFLINE", "ATTNGEO_OFFLINE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(
            name, "0" if "OFFLINE" in name else "1"
        )  # the command sets them; afterwards they are as before
    words(tmp_path / "model")
    (tmp_path / "my.txt").write_text(" ".join(f"w{index % 50}" for index in range(40)))
    return tmp_path


def run(*arguments: str) -> str:
    """What the command prints; its UserError is raised."""
    answer = CliRunner().invoke(app, ["analyze", "connection-walk", "--threads", "1", *arguments])
    if answer.exception is not None and not isinstance(answer.exception, SystemExit):
        raise answer.exception
    assert answer.exit_code == 0, answer.output
    return answer.output


@pytest.mark.usefixtures("no_network")
def test_a_local_folder_is_measured_offline_and_its_files_are_told(folder: Path) -> None:
    printed = run("./model", "--text", "my.txt", *SHORT, "--offline")
    out = folder / "results" / "connection_walk" / "model.json"
    frame, table = records.read(out), pd.read_csv(out.with_suffix(".csv"))
    assert len(frame) == len(table) > 100
    assert frame["value"].to_numpy() == pytest.approx(table["value"].to_numpy(), rel=0, abs=0, nan_ok=True)
    settings = frame.attrs["provenance"]["settings"]
    assert settings["model"] == str(folder / "model")
    assert (settings["windows"], settings["window_tokens"], settings["text"]) == (2, 7, "my.txt")
    assert len(frame.attrs["provenance"]["code_digest"]) == 20
    for told in ("model (gpt2, float32)", "isometry_score", "null", "excess", str(out.name), "model.csv"):
        assert told in printed
    assert frame.query("metric == 'spectral_gap' and control == 'trained'")["n"].eq(2).all()


@pytest.mark.usefixtures("no_network")
def test_a_hub_name_offline_is_the_earlier_download_with_its_commit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub_cache(folder / "hub", monkeypatch)
    run("someone/tiny", "--revision", "v1", "--text", "my.txt", *SHORT, "--offline", "--out", "of/tiny.json")
    frame = records.read(folder / "of" / "tiny.json")
    assert set(frame["revision"]) == {commit}
    with pytest.raises(UserError, match="no earlier download"):
        run("someone/other", "--offline")
    with pytest.raises(UserError, match="cannot be pinned"):
        run("./model", "--revision", "v1")


def test_a_gguf_file_and_a_rounded_model_say_so_in_every_record(folder: Path) -> None:
    gguf_file(folder / "small.gguf")
    printed = run("small.gguf", "--weights-only")
    assert "gguf-q8_0 weights: not to be compared" in printed
    assert set(records.read(folder / "results/connection_walk/small@gguf-q8_0.json")["precision"]) == {"gguf-q8_0"}
    run("./model", "--text", "my.txt", *SHORT, "--dtype", "bfloat16", "--out", "rounded.json")
    assert set(records.read(folder / "rounded.json")["precision"]) == {"float32 as bfloat16"}
    with pytest.raises(UserError, match="int8"):
        run("./model", "--dtype", "int8")


def test_numbers_of_another_model_are_not_overwritten_and_those_of_the_same_are(folder: Path) -> None:
    words(folder / "other")
    run("./model", "--weights-only", "--out", "kept.json")
    before = (folder / "kept.json").read_text()
    with pytest.raises(UserError, match=r"kept\.json .* numbers of .*model"):
        run("./other", "--weights-only", "--out", "kept.json")
    assert (folder / "kept.json").read_text() == before
    run("./model", "--text", "my.txt", *SHORT, "--out", "kept.json")
    assert len(records.read(folder / "kept.json")) > before.count("\n")
    (folder / "notes.json").write_text(json.dumps({"mine": 1}))
    (folder / "sheet.csv").write_text("mine")
    for name in ("notes", "sheet"):
        with pytest.raises(UserError, match="name another file") as refusal:
            run("./model", "--weights-only", "--out", f"{name}.json")
        assert "--out" in refusal.value.remedy
    with pytest.raises(UserError, match="JSON"):
        run("./model", "--weights-only", "--out", "numbers.csv")


@pytest.mark.parametrize(("load", "threads"), [(0.1, 4), (1.6, 2), (3.4, 1), (17.0, 1)])
def test_it_computes_with_the_cores_that_are_free(monkeypatch: pytest.MonkeyPatch, load: float, threads: int) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {1, 3, 5, 7})
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 9.0))
    assert free_cores() == threads


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nothing"], "no model of preset demo, no folder, no GGUF file and no hub name"),
        (["absent.gguf"], "there is no file"),
        (["./model", "--text", "absent.txt"], "absent.txt holds no text file"),
        (["./model", "--text", "empty.txt"], "holds no text"),
        (["./model", "--text", "cache"], "holds no text file"),
        (["./model", "--text", "my.txt", "--window-tokens", "65"], "64 positions"),
        (["./cache"], "config.json"),
    ],
)
def test_what_cannot_be_measured_is_a_plain_error(folder: Path, arguments: list[str], expected: str) -> None:
    (folder / "cache").mkdir()
    (folder / "empty.txt").write_text(" \n")
    with pytest.raises(UserError) as refusal:
        run(*arguments)
    assert expected in str(refusal.value)
    assert not (folder / "results").exists()


def test_a_vision_model_is_told_apart(folder: Path) -> None:
    tiny.saved(folder / "eye", tiny.config("dinov2"))
    with pytest.raises(UserError, match="vision model"):
        run("./eye", "--text", "my.txt")


def test_a_model_of_the_preset_is_measured_as_the_preset_says_unless_asked_otherwise(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One command: an id of the preset alone is the preset's job; with any option of one's own it is not."""
    (folder / "config").symlink_to(ROOT / "config")
    preset = folder / "config" / "demo"
    assert preset.is_dir()
    asked: list[str] = []
    monkeypatch.setattr(preset_job, "connection_walk", lambda config, model, digest: asked.append(f"{model} {digest}"))
    monkeypatch.setattr("attngeo.cli.common.digest_of", lambda config, stamp, name: name)
    run("minilm-l3")
    run("minilm-l3", "--preset", "demo", "--offline")
    assert asked == ["minilm-l3 connection_walk/minilm-l3"] * 2
    monkeypatch.setattr("attngeo.jobs.sources.model_folder", lambda config, model: str(folder / "model"))
    run("minilm-l3", "--weights-only")
    assert len(asked) == 2
    frame: Any = records.read(folder / "results" / "connection_walk" / "minilm-l3.json")
    assert set(frame["model"]) == {"minilm-l3"}
    (folder / "code.txt").write_text("x")
    for arguments in (["minilm-l3", "--weights-only"], ["./model"]):
        with pytest.raises(UserError, match="--stamp"):
            run(*arguments, "--stamp", "code.txt")
    with pytest.raises(UserError, match="'absent'") as refusal:
        run("absent")
    assert "minilm-l3" in refusal.value.remedy


def test_a_speech_model_reads_features_and_nothing_else(folder: Path) -> None:
    configuration = tiny.config("whisper")
    tiny.saved(folder / "ear", configuration)
    recordings = tiny.windows(configuration, 3).numpy()
    np.save(folder / "sound.npy", recordings)
    np.save(folder / "one.npy", recordings[0].astype("float16"))
    for file in ("sound.npy", "one.npy"):
        run("./ear", "--features", file, "--out", "ear.json")
        rows = records.read(folder / "ear.json")
        assert set(rows["family"]) == {"whisper"}
        windows = rows.query("metric == 'spectral_gap' and control == 'trained'")["n"]
        assert set(windows) == {3 if file == "sound.npy" else 1}
    run("./ear", "--weights-only", "--out", "ear.json")
    np.save(folder / "words.npy", np.array(["a"]))
    (folder / "torn.npy").write_bytes((folder / "sound.npy").read_bytes()[:200])
    for arguments, expected in (
        ([], "speech model"),
        (["--text", "my.txt"], "speech model"),
        (["--features", "absent.npy"], "absent.npy cannot be read"),
        (["--features", "my.txt"], "my.txt cannot be read"),
        (["--features", "torn.npy"], "torn.npy cannot be read"),
        (["--features", "words.npy"], "floating-point"),
    ):
        with pytest.raises(UserError, match=expected) as refusal:
            run("./ear", *arguments)
        assert "text" in expected or "--text" in arguments or "--features FILE.npy" in refusal.value.remedy
    with pytest.raises(UserError, match="reads tokens"):
        run("./model", "--features", "sound.npy")


def test_numbers_have_a_place_before_anything_is_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "taken.json").mkdir()
    for out, expected in (("my.txt/numbers.json", "no folder that can be written"), ("taken.json", "is a folder")):
        with monkeypatch.context() as patched:
            patched.setattr(single_model, "analyze_weights", None)
            with pytest.raises(UserError, match=expected) as refusal:
                run("./model", "--weights-only", "--out", out)
        assert "--out" in refusal.value.remedy

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(single_model.records, "write", full)
    with pytest.raises(UserError, match=r"cannot write kept\.json and its CSV: Input/output error"):
        run("./model", "--weights-only", "--out", "kept.json")


def test_of_two_models_measured_at_once_into_one_file_the_second_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words(folder / "other")
    measured = single_model.analyze_weights

    def overtaken(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(single_model, "analyze_weights", measured)
        run("./other", "--weights-only", "--out", "kept.json")
        return measured(*arguments, **options)

    monkeypatch.setattr(single_model, "analyze_weights", overtaken)
    with pytest.raises(UserError, match=r"numbers of .*other"):
        run("./model", "--weights-only", "--out", "kept.json")
    assert set(records.read(folder / "kept.json")["model"]) == {"other"}
    assert not list(folder.glob(".*aside*"))


def test_damaged_configurations_and_tokenizers_are_named_and_no_fault_of_the_weights(folder: Path) -> None:
    stored = (folder / "model" / "config.json").read_text()
    for text, expected in (
        (json.dumps(json.loads(stored) | {"n_head": 7}), r"config\.json describes no gpt2 model"),
        (json.dumps(json.loads(stored) | {"n_layer": "three"}), r"config\.json"),
        ("[]", r"config\.json"),
        (stored[:-9], r"config\.json"),
    ):
        (folder / "model" / "config.json").write_text(text)
        with pytest.raises(UserError, match=expected) as refusal:
            run("./model", "--weights-only")
        assert "fetch" not in refusal.value.remedy
    (folder / "model" / "config.json").write_text(stored)
    for name in ("tokenizer_config.json", "tokenizer.json"):
        before = (folder / "model" / name).read_text() if (folder / "model" / name).exists() else "{}"
        (folder / "model" / name).write_text("{broken")
        with pytest.raises(UserError, match="tokenizer files in model cannot be read"):
            run("./model", "--text", "my.txt", *SHORT)
        (folder / "model" / name).write_text(before)
