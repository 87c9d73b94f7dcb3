"""FFCV behind its fences: written and read rightly, reproducible, and never a hang.

The trials run in processes of their own with a clock: once without compilation, which takes seconds and goes the same
ways, and for what compilation could change once with it.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tolerances import FFCV_PIXEL_DIFFERENCE

TIMEOUT_S = 290
REASON = "ffcv is not installed (set REQUIRE_FFCV=1 to make this an error)"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ffcv") is None and os.environ.get("REQUIRE_FFCV") != "1", reason=REASON
)
TRIALS = (
    "written_pixels_are_pillows",
    "loaders_agree",
    "augmentation_is_a_function_of_the_seed",
    "faults_are_fenced_in",
    "a_dead_reader_is_reported",
    "a_dead_writer_is_reported",
    "a_killed_writer_is_reported",
    "odd_images_are_written",
    "one_worker_repeats_its_bytes",
)


def run(names: tuple[str, ...], folder: Path, *, compiled: bool) -> dict[str, dict[str, Any]]:
    environment = os.environ | {"NUMBA_DISABLE_JIT": "0" if compiled else "1", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "tests.unit.data_ffcv_trials", str(folder), *names]
    finished = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    outcomes: dict[str, dict[str, Any]] = json.loads(finished.stdout.splitlines()[-1])
    return outcomes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, dict[str, Any]]:
    return run(TRIALS, tmp_path_factory.mktemp("ffcv"), compiled=False)


def test_raw_pixels_written_by_ffcv_equal_those_of_pillow(outcomes):
    assert outcomes["written_pixels_are_pillows"] == {"ours": True, "theirs": True}


def test_ffcv_and_torch_loaders_agree(outcomes):
    outcome = outcomes["loaders_agree"]
    assert outcome["labels"]
    assert outcome["shapes"] == [[4], [1]]
    assert outcome["difference"] < FFCV_PIXEL_DIFFERENCE


@pytest.mark.parametrize("compiled", [False, True], ids=["interpreted", "compiled"])
def test_augmentation_depends_on_seed_and_epoch_and_nothing_else(request, tmp_path, compiled):
    name = "augmentation_is_a_function_of_the_seed"
    ran = run((name,), tmp_path, compiled=True) if compiled else request.getfixturevalue("outcomes")
    assert ran[name] == {
        "one_worker": True,
        "two_workers": True,
        "again": True,
        "other_seed": False,
        "other_epoch": False,
        "tail": True,
    }


def test_early_breaks_threads_and_buffers_do_no_harm(outcomes):
    outcome = outcomes["faults_are_fenced_in"]
    assert outcome["threads_left"] == 0
    assert outcome["torch_threads"] == 2
    assert outcome["copies"]
    assert outcome["generators"]
    assert 1 <= outcome["workers"] <= (os.cpu_count() or 1)
    assert {"ffcv", "numba", "opencv-python"} < set(outcome["versions"])


def test_a_reader_that_dies_ends_the_loop_with_an_error(outcomes):
    outcome = outcomes["a_dead_reader_is_reported"]
    assert "reader thread died" in outcome["error"]
    assert outcome["threads_left"] == 0


def test_a_writer_whose_worker_is_killed_ends_with_an_error_and_no_leftovers(outcomes):
    outcome = outcomes["a_dead_writer_is_reported"]
    assert "ended with status -9" in outcome["error"]
    assert outcome["left"] == []


def test_a_killed_writer_ends_with_an_error_and_takes_its_workers_along(outcomes):
    outcome = outcomes["a_killed_writer_is_reported"]
    assert "its writing process was killed" in outcome["error"]
    assert outcome["seconds"] < 10
    assert outcome["processes"] >= 3  # it, two workers, and the tracker of shared memory
    assert outcome["alive"] == []
    assert outcome["left"] == []


def test_odd_images_are_converted_and_bad_ones_refused(outcomes):
    outcome = outcomes["odd_images_are_written"]
    assert outcome["n"] == 17 + 6
    assert outcome["labels"] == [15, 8]
    assert [line.split(",")[0] for line in outcome["refused"]] == ["train/a/bad.jpg"]


def test_one_worker_writes_the_same_bytes_each_time(outcomes):
    assert outcomes["one_worker_repeats_its_bytes"] == dict.fromkeys(
        ("train.beton", "val.beton", "manifest.json"), True
    )
