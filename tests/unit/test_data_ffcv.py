"""FFCV behind its fences: written and read rightly, reproducible, and never a hang. Each trial is a process with a clock."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tolerances import FFCV_PIXEL_DIFFERENCE

TIMEOUT_S = 240
REASON = "ffcv is not installed (set REQUIRE_FFCV=1 to make this an error)"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ffcv") is None and os.environ.get("REQUIRE_FFCV") != "1", reason=REASON
)


def trial(name: str, folder: Path, *, compiled: bool = False) -> dict[str, Any]:
    """Run a trial; without compilation it takes seconds, and the code paths are the same."""
    environment = os.environ | {"NUMBA_DISABLE_JIT": "0" if compiled else "1", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "tests.unit.data_ffcv_trials", name, str(folder)]
    root = Path(__file__).parents[2]
    finished = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert finished.returncode == 0, finished.stderr[-3000:]
    outcome: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return outcome


def test_raw_pixels_written_by_ffcv_equal_those_of_pillow(tmp_path):
    assert trial("written_pixels_are_pillows", tmp_path) == {"ours": True, "theirs": True}


def test_ffcv_and_torch_loaders_agree(tmp_path):
    outcome = trial("loaders_agree", tmp_path)
    assert outcome["labels"]
    assert outcome["shapes"] == [[4], [1]]
    assert outcome["difference"] < FFCV_PIXEL_DIFFERENCE


@pytest.mark.parametrize("compiled", [False, True], ids=["interpreted", "compiled"])
def test_augmentation_depends_on_seed_and_epoch_and_nothing_else(tmp_path, compiled):
    assert trial("augmentation_is_a_function_of_the_seed", tmp_path, compiled=compiled) == {
        "one_worker": True,
        "two_workers": True,
        "again": True,
        "other_seed": False,
        "other_epoch": False,
        "tail": True,
    }


def test_early_breaks_threads_and_buffers_do_no_harm(tmp_path):
    outcome = trial("faults_are_fenced_in", tmp_path)
    assert outcome["threads_left"] == 0
    assert outcome["torch_threads"] == 2
    assert outcome["copies"]
    assert 1 <= outcome["workers"] <= (os.cpu_count() or 1)
    assert {"ffcv", "numba", "opencv-python"} < set(outcome["versions"])


def test_a_reader_that_dies_ends_the_loop_with_an_error(tmp_path):
    outcome = trial("a_dead_reader_is_reported", tmp_path)
    assert "reader thread died" in outcome["error"]
    assert outcome["threads_left"] == 0


def test_a_writer_whose_worker_is_killed_ends_with_an_error_and_no_leftovers(tmp_path):
    outcome = trial("a_dead_writer_is_reported", tmp_path)
    assert "ended with status" in outcome["error"]
    assert outcome["left"] == []


def test_odd_images_are_converted_bad_ones_refused_and_bytes_repeat(tmp_path):
    outcome = trial("odd_images_are_written", tmp_path)
    assert outcome["same"]
    assert outcome["n"] == 17 + 6
    assert outcome["labels"] == [15, 8]
    assert [line.split(",")[0] for line in outcome["refused"]] == ["train/a/bad.jpg"]
