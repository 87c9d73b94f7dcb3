"""`attngeo analyze` variational and connection-walk with a model or --runs say what they cannot do before any work."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from attngeo.cli import app
from attngeo.config import load_preset
from attngeo.errors import UserError
from attngeo.jobs.analysis import keys_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-model"], "'no-such-model' is no model of preset smoke, no folder, no GGUF file and no hub name"),
        (["minilm-l3", "--runs"], "'minilm-l3' and --runs are two analyses"),
    ],
)
@pytest.mark.parametrize("analysis", ["variational", "connection-walk"])
def test_what_cannot_be_measured_is_refused(
    analysis: str, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    answer = CliRunner().invoke(app, ["analyze", analysis, *arguments, "--preset", "smoke"])
    assert answer.exit_code != 0
    assert message in str(answer.exception)


def test_a_stamp_of_a_model_that_the_preset_does_not_list_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "own"
    folder.mkdir()
    for analysis in ("variational", "connection-walk"):
        words = ["analyze", analysis, str(folder), "--stamp", str(tmp_path / "stamp.txt"), "--preset", "smoke"]
        assert "--stamp is of a model of preset smoke" in str(CliRunner().invoke(app, words).exception)


def test_a_walk_without_model_and_options_that_runs_do_not_take_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for arguments, message in (([], "needs a MODEL"), (["--runs", "--windows", "3"], "from --text to --out")):
        answer = CliRunner().invoke(app, ["analyze", "connection-walk", *arguments, "--preset", "smoke"])
        assert message in str(answer.exception)


@pytest.mark.parametrize("figure", ["fig8", "fig10", "fig17"])
def test_a_preset_without_runs_to_look_into_says_where_they_are_named(figure: str) -> None:
    preset = load_preset(ROOT, "smoke").model_copy(update={"runs": ()})
    with pytest.raises(UserError, match=rf"no run of preset smoke feeds {figure}[\s\S]*config/smoke/runs.tsv"):
        preset.runs_to_look_into(figure)


def test_a_remedy_that_names_a_key_says_where_it_stands() -> None:
    preset = load_preset(ROOT, "smoke")
    expected = r"too short\n  remedy: lower trajectories.window_tokens in config/smoke/config.yaml"
    with pytest.raises(UserError, match=expected), keys_of(preset, "trajectories"):
        raise UserError("too short", "lower window_tokens")
    with pytest.raises(UserError, match=r"remedy: buy more$"), keys_of(preset, "trajectories"):
        raise UserError("too little", "buy more")


@pytest.mark.parametrize("analysis", ["injectivity", "attention-distance"])
def test_a_preset_without_the_vision_model_is_refused_before_any_work(
    analysis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    answer = CliRunner().invoke(app, ["analyze", analysis, "--preset", "tuning"])
    assert isinstance(answer.exception, UserError)
    key = analysis.replace("-", "_") + ".model"
    assert f"config/tuning/config.yaml: key '{key}': 'dinov2-s' is not one of" in answer.exception.what
