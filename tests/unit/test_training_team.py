"""Several processes train what one process trains, and end together."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from attngeo import gpu_lease
from attngeo.cli.train import train
from attngeo.errors import UserError
from attngeo.training import launch
from attngeo.training.sharing import positions
from tests.tolerances import ENDS_AFTER_A_FAILURE_S, SHARED_BATCH_GRADIENT, SHARED_BATCH_LOSS
from tests.unit.test_training_resume import results, wait_for_step
from tests.unit.training_support import tiny_recipe
from tests.unit.training_team import ALIKE, Independent, alike_recipe, uneven

ROOT = Path(__file__).parents[2]
PROGRAM = ["-m", "tests.unit.training_team"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def start(*arguments: str, by: list[str] | None = None) -> subprocess.Popen[str]:
    """Two processes below one, in a process group of their own."""
    return subprocess.Popen(
        [sys.executable, *(by or []), *PROGRAM, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(parent: subprocess.Popen[str]) -> None:
    _, errors = parent.communicate(timeout=120)
    assert parent.returncode == 0, errors


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes trained."""
    folder = tmp_path_factory.mktemp("two")
    end(start(str(folder), "laws"))
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "run/weights.safetensors")


def assert_same_gradients(folder: Path, other: Path) -> None:
    """Those of the first step: later ones follow weights that AdamW moved by the sign of what was rounding."""
    ours, theirs = (safetensors.torch.load_file(path / "gradients0.safetensors") for path in (folder, other))
    assert ours.keys() == theirs.keys()
    assert "unused" not in ours
    scale = max(float(gradient.abs().max()) for gradient in ours.values())
    for name, gradient in ours.items():
        torch.testing.assert_close(theirs[name], gradient, rtol=0, atol=SHARED_BATCH_GRADIENT * scale)


@pytest.mark.parametrize("name", ALIKE)
def test_two_processes_train_what_one_trains_and_share_its_images(two: Path, tmp_path: Path, name: str) -> None:
    alone = uneven(tmp_path, alike_recipe(name), None)
    together = json.loads((two / name / "run/final.json").read_text())
    assert (alone["world_size"], together["world_size"]) == (1, 2)
    for key in ("steps", "images_seen", "n_eval"):
        assert together[key] == alone[key]
    assert_same_gradients(tmp_path, two / name)
    assert together["loss"] == pytest.approx(alone["loss"], rel=SHARED_BATCH_LOSS)
    lines = [(folder / "run/metrics.jsonl").read_text().splitlines() for folder in (tmp_path, two / name)]
    for ours, theirs in zip(*(map(json.loads, part) for part in lines), strict=True):
        assert (ours["lr"], ours["step"]) == (theirs["lr"], theirs["step"])
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=SHARED_BATCH_LOSS)
    seen, *parts = (
        json.loads(path.read_text())
        for path in (tmp_path / "seen0.json", *(two / name / f"seen{rank}.json" for rank in range(2)))
    )
    for split in ("train", "val"):
        assert sorted(parts[0][split] + parts[1][split]) == sorted(seen[split])
        assert parts[0][split]
        assert parts[1][split]


def test_recomputed_activations_give_the_same_bits_with_drop_path_in_two_processes(two: Path) -> None:
    kept, again = weights(two / "drop-path-kept"), weights(two / "drop-path-again")
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_processes_drop_different_paths(two: Path, tmp_path: Path) -> None:
    uneven(tmp_path, tiny_recipe(batch_size=4, epochs=1), None, model=Independent(drop_path=0.5))
    alone, together = weights(tmp_path), weights(two / "drop-path-kept")
    assert not all(torch.allclose(alone[name], together[name], rtol=SHARED_BATCH_LOSS) for name in alone)


def test_a_batch_too_small_for_the_processes_is_refused_by_all(two: Path) -> None:
    for rank in range(2):
        assert "a batch of 3 images, mixed in pairs, cannot be shared by 2" in (two / f"few{rank}").read_text()


def test_a_run_does_not_go_on_in_another_number_of_processes(two: Path) -> None:
    for rank in range(2):
        assert "was made with world_size = 1, not 2" in (two / f"world{rank}").read_text()


def test_a_signal_to_one_process_stops_both_before_the_same_step(two: Path) -> None:
    assert [(two / f"told/stopped{rank}").read_text() for rank in range(2)] == ["143", "143"]
    assert results(two / "told") == results(two / "uninterrupted")


def test_two_processes_killed_or_orphaned_end_with_the_same_bits(two: Path, tmp_path: Path) -> None:
    parent = start(str(tmp_path), "slowly", "0.1")
    wait_for_step(tmp_path, 3, parent)
    os.killpg(parent.pid, signal.SIGKILL)
    parent.communicate(timeout=60)

    parent = start(str(tmp_path), "slowly", "0.1")
    wait_for_step(tmp_path, 9, parent)
    parent.kill()  # as torchrun would be killed: its processes find themselves alone
    parent.communicate(timeout=60)  # returns when they have closed standard error

    end(start(str(tmp_path), "slowly"))
    assert results(tmp_path) == results(two / "uninterrupted")
    assert json.loads((tmp_path / "run/final.json").read_text())["resumed"] == 2


def test_when_one_process_fails_all_end_soon_and_the_checkpoint_stays(tmp_path: Path) -> None:
    torchrun = start(str(tmp_path), "fail", by=TORCHRUN)
    _, errors = torchrun.communicate(timeout=240)
    assert time.time() - (tmp_path / "failed").stat().st_mtime < ENDS_AFTER_A_FAILURE_S
    assert torchrun.returncode == 1
    assert "the disk of this process is gone" in errors
    assert "process 0 of 2 lost the others" in errors
    assert max((tmp_path / "scratch").glob("checkpoint-*")).name.startswith("checkpoint-0000000007")
    assert not (tmp_path / "run/final.json").exists()


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(("count", "size"), [(1, 1), (4, 2), (7, 2), (33, 3), (16, 8), (17, 8)])
def test_positions_are_dealt_once_and_pairs_stay_together(count: int, size: int, pairs: bool) -> None:
    shares = [positions(count, rank, size, pairs).tolist() for rank in range(size)]
    assert sorted(itertools.chain(*shares)) == list(range(count))
    assert all(share == sorted(share) for share in shares)
    if pairs:
        for share in shares:
            half = len(share) // 2 * 2
            partners = zip(share[:half], share[:half][::-1], strict=True)
            assert all(first + last == count // 2 * 2 - 1 for first, last in partners)
    else:
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    "given", [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "2"}, {"WORLD_SIZE": "two", "RANK": "0"}]
)
def test_an_environment_that_contradicts_itself_is_refused(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert launch.from_environment().size == 1
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="torchrun"):
        launch.from_environment()


def test_the_command_line_refuses_processes_that_nothing_planned_or_no_gpu_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"planned for 1 processes and got 2.*\n.*--nproc_per_node 1 "):
        train("fashion-softmax-s0", preset="smoke", stamp=Path("planned.txt"))
    monkeypatch.setenv("ATTNGEO_OVERRIDES", json.dumps({"resources": {"train": {"device": "cuda", "gpu": 1}}}))
    monkeypatch.setattr(gpu_lease, "visible_gpus", lambda: ["0"])
    with pytest.raises(UserError, match="torchrun started 2 processes and may use 1 GPU"):
        train("fashion-softmax-s0", preset="smoke")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("ATTNGEO_OVERRIDES", json.dumps({"resources": {"train": {"processes": 2}}}))
    with pytest.raises(UserError, match=r"planned for 2 processes and got 1.*\n.*torchrun --nproc_per_node 2 "):
        train("fashion-softmax-s0", preset="smoke")
