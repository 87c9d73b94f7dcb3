"""A run that is killed at any moment and started again ends with the bits of a run left alone."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from attngeo.data.batches import open_batches
from attngeo.data.packing import pack
from attngeo.errors import UserError
from attngeo.training import checkpoint
from attngeo.training.interruption import Interrupted
from attngeo.training.run import _DATA_IDENTITY
from attngeo.training.seeding import numpy_generator
from tests.tolerances import CHECKPOINT_AFTER_SIGTERM_S
from tests.unit.data_support import image_folder
from tests.unit.training_support import MemoryBatches, TinyModel, stop_at, tiny_model, tiny_recipe, train_tiny

ROOT = Path(__file__).parents[2]
# What may differ between two runs that are otherwise the same.
TIMES = {"wall_s", "img_per_s", "peak_memory_mib", "resumed"}


def results(folder: Path) -> tuple[bytes, list[dict[str, Any]], dict[str, Any]]:
    """Weights, metrics and final values of a run, without times."""
    run = folder / "run"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timeless = [{key: value for key, value in line.items() if key not in TIMES} for line in metrics]
    final = {key: value for key, value in json.loads((run / "final.json").read_text()).items() if key not in TIMES}
    return (run / "weights.safetensors").read_bytes(), timeless, final


def start_child(folder: Path, pause_s: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.unit.training_support", str(folder), str(pause_s)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def wait_for_step(folder: Path, step: int, child: subprocess.Popen[str]) -> None:
    """Return when the child has written the checkpoint of `step` or of a later one."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        steps = [int(path.stem.split("-")[1]) for path in (folder / "scratch").glob("checkpoint-*.pt")]
        if steps and max(steps) >= step:
            return
        assert child.poll() is None, child.communicate()[1]
        time.sleep(0.005)
    raise AssertionError(f"the child did not reach step {step}")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[dict[str, Any]], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    train_tiny(folder)
    return results(folder)


def test_a_run_killed_with_sigkill_ends_with_the_same_bits(tmp_path: Path, uninterrupted: Any) -> None:
    random = numpy_generator(int(time.time()), "moments of the kills")
    for first_step in (2, 9):
        child = start_child(tmp_path, 0.1)
        wait_for_step(tmp_path, first_step, child)
        time.sleep(random.uniform(0, 0.4))  # at most four steps of 0.1 s, so that epoch 1 and epoch 2 are hit
        child.kill()
        assert child.wait() == -signal.SIGKILL
    child = start_child(tmp_path, 0.0)
    assert child.wait(timeout=120) == 0, child.communicate()[1]
    assert results(tmp_path) == uninterrupted
    assert json.loads((tmp_path / "run/final.json").read_text())["resumed"] == 2
    assert not (tmp_path / "scratch").exists()


def test_sigterm_saves_at_once_and_exits_with_143(tmp_path: Path, uninterrupted: Any) -> None:
    child = start_child(tmp_path, 0.3)
    wait_for_step(tmp_path, 3, child)
    begin = time.time()
    child.terminate()
    assert child.wait(timeout=60) == 128 + signal.SIGTERM
    written = max(path.stat().st_mtime for path in (tmp_path / "scratch").glob("checkpoint-*.pt"))
    assert written - begin < CHECKPOINT_AFTER_SIGTERM_S
    train_tiny(tmp_path)
    assert results(tmp_path) == uninterrupted


class Told:
    """Observer that keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def on_start(self, params: dict[str, Any], resumed: bool) -> None:
        self.calls.append(("start", resumed))

    def on_epoch(self, metrics: dict[str, Any]) -> None:
        self.calls.append(("epoch", metrics["epoch"]))

    def on_end(self, final: dict[str, Any]) -> None:
        self.calls.append(("end", final["status"]))

    def on_stop(self, status: str, reason: str) -> None:
        self.calls.append(("stop", status, reason))


@pytest.mark.parametrize(("epoch", "batch"), [(0, 0), (0, 6), (1, 3), (2, 0), (2, 6)])
def test_stopped_before_any_step_the_run_goes_on_there(
    tmp_path: Path, uninterrupted: Any, epoch: int, batch: int
) -> None:
    before, after = Told(), Told()
    with pytest.raises(Interrupted) as stopped:
        train_tiny(tmp_path, on_batch=stop_at(epoch, batch), observers=[before])
    assert stopped.value.code == 143
    assert before.calls[-1] == ("stop", "KILLED", "stopped by SIGTERM")
    train_tiny(tmp_path, observers=[after])
    assert results(tmp_path) == uninterrupted
    assert after.calls[0] == ("start", True)
    epochs = [call for call in before.calls + after.calls if call[0] == "epoch"]
    assert epochs == [("epoch", 1), ("epoch", 2), ("epoch", 3)]


def test_signals_are_handled_as_before_when_training_is_over(tmp_path: Path) -> None:
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    train_tiny(tmp_path)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers


def test_every_image_is_seen_once_an_epoch_across_an_interruption(tmp_path: Path) -> None:
    whole = MemoryBatches(53, 7, shuffle=True)
    train_tiny(tmp_path / "whole", batches=whole)
    first = MemoryBatches(53, 7, shuffle=True, on_batch=stop_at(1, 4))
    with pytest.raises(Interrupted):
        train_tiny(tmp_path / "parts", batches=first)
    second = MemoryBatches(53, 7, shuffle=True)
    train_tiny(tmp_path / "parts", batches=second)
    trained = first.served[:-7]  # the last batch was handed out, and left untrained because of the signal
    assert trained + second.served == whole.served
    assert len(set(whole.served)) == len(whole.served)


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped"])
def test_a_damaged_newest_checkpoint_is_passed_over_for_the_one_before(
    tmp_path: Path, uninterrupted: Any, damage: str
) -> None:
    with pytest.raises(Interrupted):
        train_tiny(tmp_path, on_batch=stop_at(1, 2))
    older, newest = sorted((tmp_path / "scratch").glob("checkpoint-*.pt"))
    content = bytearray(newest.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 0xFF
    newest.write_bytes({"truncated": content[: len(content) // 2], "empty": b"", "flipped": content}[damage])
    with pytest.warns(UserWarning, match="is damaged"):
        train_tiny(tmp_path)
    assert older.name < newest.name
    assert results(tmp_path) == uninterrupted


def test_when_all_checkpoints_are_damaged_the_user_decides(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"step": 1}, 1)
    next(tmp_path.glob("checkpoint-*.pt")).write_bytes(b"PK")
    with pytest.warns(UserWarning, match="is damaged"), pytest.raises(UserError, match="every checkpoint"):
        checkpoint.load_newest(tmp_path)


def test_two_checkpoints_are_kept_and_left_overs_removed(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        checkpoint.save(tmp_path, {"value": torch.tensor(step)}, step)
    (tmp_path / ".checkpoint-0000000101.77.aside.pt").write_bytes(b"half")
    state = checkpoint.load_newest(tmp_path)
    assert state is not None
    assert state["value"] == 100
    assert [path.name[18:21] for path in sorted(tmp_path.iterdir())] == ["010", "100"]


def test_a_full_disk_keeps_the_checkpoint_there_is(
    tmp_path: Path, uninterrupted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, told = os.replace, Told()

    def full_disk(source: Any, target: Any) -> None:
        if "checkpoint-0000000005" in str(target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(UserError, match=r"checkpoint-0000000005.*No space left"):
        train_tiny(tmp_path, observers=[told])
    monkeypatch.undo()
    assert told.calls[-1][:2] == ("stop", "FAILED")
    left = sorted(path.name[:21] for path in (tmp_path / "scratch").iterdir())
    assert left == ["checkpoint-0000000003", "checkpoint-0000000004", "lock"]
    train_tiny(tmp_path)
    assert results(tmp_path) == uninterrupted


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"threads": 2}, "threads = 1, not 2"),
        ({"digest": "d2"}, "digest = d1, not d2"),
        ({"recipe": tiny_recipe(lr=0.03)}, "lr = 0.02, not 0.03"),
    ],
)
def test_a_checkpoint_of_other_conditions_is_refused(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    with pytest.raises(Interrupted):
        train_tiny(tmp_path, on_batch=stop_at(0, 2))
    with pytest.raises(UserError, match=named):
        train_tiny(tmp_path, **change)
    train_tiny(tmp_path)


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"manifest_sha256": "m2"}, "manifest_sha256 = m1, not m2"),
        ({"storage": "beton"}, "storage = None, not beton"),
        ({"pixels": "cropped"}, "pixels = None, not cropped"),
        ({"versions": {"torch": "2"}}, "versions = {'torch': '1'}, not {'torch': '2'}"),
        ({"loader": "ffcv"}, "loader = memory, not ffcv"),
    ],
)
def test_a_run_does_not_go_on_with_other_pixels(tmp_path: Path, split: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(Interrupted):
        train_tiny(tmp_path, on_batch=stop_at(0, 2))
    training, validation = MemoryBatches(53, 7, shuffle=True), MemoryBatches(23, 11, shuffle=False)
    {"train": training, "val": validation}[split].about |= change
    with pytest.raises(UserError, match=re.escape(f"made with {split} {named}")):
        train_tiny(tmp_path, batches=training, val_batches=validation)


def test_a_run_does_not_go_on_with_another_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Interrupted):
        train_tiny(tmp_path, on_batch=stop_at(0, 2))
    monkeypatch.setattr(torch, "__version__", "0.4.1")
    with pytest.raises(UserError, match=r"made with torch = .*, not 0\.4\.1"):
        train_tiny(tmp_path)


def test_the_facts_that_a_resumed_run_compares_are_stated_by_the_real_loaders(tmp_path: Path) -> None:
    packed = pack(image_folder(tmp_path / "images", {"a": (2, 1), "b": (2, 1)}), tmp_path / "packed", storage="folder")
    batches = open_batches(packed, "train", batch_size=2, seed=0, image_size=8, augment=False)
    assert set(_DATA_IDENTITY) <= batches.describe().keys()


def test_a_run_in_work_is_not_trained_twice_at_a_time(tmp_path: Path) -> None:
    with checkpoint.claim(tmp_path / "scratch"), pytest.raises(UserError, match="another process is training"):
        train_tiny(tmp_path)


def test_nan_stops_the_run_names_the_step_and_keeps_the_last_good_state(tmp_path: Path, uninterrupted: Any) -> None:
    told = Told()

    def poison(epoch: int, batch: int) -> None:
        if (epoch, batch) == (1, 3):
            with torch.no_grad():
                model.head.bias.fill_(torch.nan)

    model: TinyModel = tiny_model()
    with pytest.raises(UserError, match=r"loss nan .* step 10 \(epoch 2\)"):
        train_tiny(tmp_path, model=model, on_batch=poison, observers=[told])
    assert told.calls[-1][:2] == ("stop", "FAILED")
    assert "step 10" in told.calls[-1][2]
    assert not (tmp_path / "run/final.json").exists()
    train_tiny(tmp_path)
    assert results(tmp_path) == uninterrupted
