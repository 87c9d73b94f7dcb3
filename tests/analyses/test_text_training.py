"""Training on text: it learns, and killed at any moment it ends with the bits of a training left alone."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from attngeo.errors import UserError
from attngeo.training.interruption import Interrupted
from attngeo.training.language import TokenWindows
from attngeo.training.seeding import generator
from tests.analyses.text_training import recipe, train_tiny

ROOT = Path(__file__).parents[2]
TIMES = {"wall_s", "tokens_per_s", "peak_memory_mib", "resumed"}


def results(folder: Path) -> tuple[dict[str, bytes], list[dict[str, Any]], dict[str, Any]]:
    """Files of every kept step, metrics and final values of a training, without times."""
    run = folder / "run"
    kept = {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.glob("step*/*"))}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    final = json.loads((run / "final.json").read_text())
    timeless = [{key: value for key, value in line.items() if key not in TIMES} for line in [*lines, final]]
    return kept, timeless[:-1], timeless[-1]


class At:
    """Hook that acts when a training is about to take a step, counted from 0 in this process."""

    def __init__(self, step: int, act: Any) -> None:
        self.left, self.act = step, act

    def __call__(self, model: torch.nn.Module) -> None:
        if self.left == 0:
            self.act(model)
        self.left -= 1


def terminate(model: torch.nn.Module) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("uninterrupted")
    train_tiny(folder)
    return results(folder)


def test_the_loss_falls_and_every_kept_step_is_a_model_folder(uninterrupted: Any) -> None:
    kept, lines, final = uninterrupted
    assert [line["step"] for line in lines] == [0, 3, 5, 7, 10, 15, 20, 23]
    assert lines[0]["val_loss"] == pytest.approx(math.log(256), rel=0.05), "untrained, all bytes are about as likely"
    losses = [line["val_loss"] for line in lines]
    assert losses == sorted(losses, reverse=True), "held-out text of the same kind"
    assert final["loss"] == losses[-1] < losses[0] - 1, "a nat a byte at least"
    assert final["kept_steps"] == [0, 3, 7, 23]
    for step in final["kept_steps"]:
        source = json.loads(kept[f"step{step}/source.json"])
        line = next(line for line in lines if line["step"] == step)
        assert (source["step"], source["seed"], source["validation_loss"]) == (step, 5, line["val_loss"])
        assert source["tokens_seen"] == step * 55
        assert {f"step{step}/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")} <= kept.keys()
    assert kept["step0/model.safetensors"] != kept["step3/model.safetensors"]


def test_killed_with_sigkill_it_ends_with_the_same_bits(tmp_path: Path, uninterrupted: Any) -> None:
    for reached in (2, 8):
        command = [sys.executable, "-m", "tests.analyses.text_training", str(tmp_path), "0.1"]
        child = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 120
        while max([int(p.stem.split("-")[1]) for p in (tmp_path / "scratch").glob("check*.pt")], default=0) < reached:
            assert child.poll() is None, child.communicate()[1]
            assert time.monotonic() < deadline, f"step {reached} was not reached"
            time.sleep(0.005)
        child.kill()
        assert child.wait() == -signal.SIGKILL
    final = train_tiny(tmp_path)
    assert results(tmp_path) == uninterrupted
    assert final["resumed"] == 2
    assert not (tmp_path / "scratch").exists()


@pytest.mark.parametrize("step", [0, 2, 22])  # of which 2 and 22 lead to steps that are kept
def test_stopped_by_a_signal_it_goes_on_there(tmp_path: Path, uninterrupted: Any, step: int) -> None:
    with pytest.raises(Interrupted) as stopped:
        train_tiny(tmp_path, on_step=At(step, terminate))
    assert stopped.value.code == 143
    train_tiny(tmp_path)
    assert results(tmp_path) == uninterrupted


def test_killed_while_it_copied_what_it_kept_it_copies_again(
    tmp_path: Path, uninterrupted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copyfile

    def killed(source: Any, target: Any) -> None:
        if "step7" in str(target):
            raise KeyboardInterrupt
        copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", killed)
    with pytest.raises(KeyboardInterrupt):
        train_tiny(tmp_path)
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "run")  # as the workflow does before it runs a job again
    train_tiny(tmp_path)
    assert results(tmp_path) == uninterrupted


def test_a_loss_that_is_not_finite_stops_it_and_names_the_step(tmp_path: Path, uninterrupted: Any) -> None:
    def poison(model: torch.nn.Module) -> None:
        with torch.no_grad():
            next(model.parameters()).fill_(torch.nan)

    with pytest.raises(UserError, match=r"loss nan .* at step 9"):
        train_tiny(tmp_path, on_step=At(9, poison))
    assert not (tmp_path / "run/final.json").exists()
    train_tiny(tmp_path)
    assert results(tmp_path) == uninterrupted


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"threads": 2}, "threads = 1, not 2"),
        ({"digest": "d2"}, "digest = d1, not d2"),
        ({"of": recipe(lr=0.02)}, r"lr = 0\.01, not 0\.02"),
        ({"documents": ["another text of the same kind " * 9]}, "text = "),
    ],
)
def test_a_checkpoint_of_other_conditions_is_refused(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    with pytest.raises(Interrupted):
        train_tiny(tmp_path, on_step=At(2, terminate))
    with pytest.raises(UserError, match=named):
        train_tiny(tmp_path, **change)


def test_windows_lie_within_one_document_and_side_by_side_they_predict_each_token_once() -> None:
    documents = [torch.arange(0, 23), torch.arange(100, 104), torch.arange(200, 211)]
    windows = TokenWindows(documents, 5, "text")
    drawn = windows.drawn(1000, generator(0, "test"))
    assert drawn.shape == (1000, 5)
    assert torch.equal(drawn - drawn[:, :1], torch.arange(5).expand(1000, 5)), "consecutive tokens of one document"
    assert set(drawn[:, 0].tolist()) == {*range(19), *range(200, 207)}, "any place, and none of the short document"
    predicted = windows.consecutive()[:, 1:].flatten().tolist()
    assert predicted == [*range(1, 21), *range(201, 209)]
    assert len(windows.consecutive(3)) == 3
    with pytest.raises(UserError, match="none of the 3 documents has 24 tokens of text"):
        TokenWindows(documents, 24, "text")
