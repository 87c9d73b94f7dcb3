"""`attngeo analyze variational` with a model or --runs says what it cannot do before any work."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from attngeo.cli import app

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-model"], "'no-such-model' is no model of preset smoke, no folder and no hub name"),
        (["minilm-l3", "--runs"], "'minilm-l3' and --runs are two analyses"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    answer = CliRunner().invoke(app, ["analyze", "variational", *arguments, "--preset", "smoke"])
    assert answer.exit_code != 0
    assert message in str(answer.exception)
