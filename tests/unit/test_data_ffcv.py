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

from attngeo.data.beton import Beton
from tests.documents import example
from tests.tolerances import FFCV_PIXEL_DIFFERENCE, JPEG_DECODER_DIFFERENCE
from tests.unit.data_support import image_folder

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
    "loaders_agree_to_the_bit",
    "jpeg_decoders_differ_little",
    "a_set_under_a_name_of_its_own",
    "held_out_images_are_those_of_the_folder",
    "large_images_are_stored_or_reduced",
    "operations_in_the_wrong_order_are_refused",
    "damaged_files_are_refused",
    "a_silent_reader_is_given_up",
)


def run(
    names: tuple[str, ...], folder: Path, *, compiled: bool, cores: set[int] | None = None, **variables: str
) -> dict[str, dict[str, Any]]:
    environment = os.environ | {"NUMBA_DISABLE_JIT": "0" if compiled else "1", "OMP_NUM_THREADS": "2"} | variables
    command = [sys.executable, "-m", "tests.unit.data_ffcv_trials", str(folder), *names]
    finished = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    outcomes: dict[str, dict[str, Any]] = json.loads(finished.stdout.splitlines()[-1])
    return outcomes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, dict[str, Any]]:
    return run(TRIALS, tmp_path_factory.mktemp("ffcv"), compiled=False)


@pytest.fixture(scope="module")
def compiled_outcomes(tmp_path_factory) -> dict[str, dict[str, Any]]:
    names = ("augmentation_is_a_function_of_the_seed", "loaders_agree_to_the_bit")
    return run(names, tmp_path_factory.mktemp("compiled"), compiled=True)


def test_raw_pixels_written_by_ffcv_equal_those_of_pillow(outcomes):
    assert outcomes["written_pixels_are_pillows"] == {"ours": True, "theirs": True}


def test_ffcv_and_torch_loaders_agree(outcomes):
    outcome = outcomes["loaders_agree"]
    assert outcome["labels"]
    assert outcome["shapes"] == [[4], [1]]
    assert outcome["difference"] < FFCV_PIXEL_DIFFERENCE


@pytest.mark.parametrize("compiled", [False, True], ids=["interpreted", "compiled"])
def test_augmentation_depends_on_seed_and_epoch_and_nothing_else(request, compiled):
    name = "augmentation_is_a_function_of_the_seed"
    ran = request.getfixturevalue("compiled_outcomes" if compiled else "outcomes")
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


def test_every_storage_and_loader_holds_out_the_same_images(outcomes):
    assert outcomes["held_out_images_are_those_of_the_folder"] == {"train": [12, True, True], "val": [5, True, True]}


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
    assert outcome["repaired"] == 6


def test_one_worker_writes_the_same_bytes_each_time(outcomes):
    assert outcomes["one_worker_repeats_its_bytes"] == dict.fromkeys(
        ("train.beton", "val.beton", "manifest.json"), True
    )


@pytest.mark.parametrize("compiled", [False, True], ids=["interpreted", "compiled"])
def test_resized_alike_the_loaders_give_the_same_pixels_from_raw_storage(request, compiled):
    ran = request.getfixturevalue("compiled_outcomes" if compiled else "outcomes")
    cases = ("bilinear train", "bilinear val", "bicubic train", "bicubic val")
    assert ran["loaders_agree_to_the_bit"] == dict.fromkeys(cases, True)


def test_decoders_of_jpeg_differ_by_little(outcomes):
    outcome = outcomes["jpeg_decoders_differ_little"]
    assert outcome["images"] == 10
    assert 0 < outcome["mean"] < JPEG_DECODER_DIFFERENCE, outcome


def test_a_set_packed_under_a_name_lies_beside_that_file(outcomes):
    assert outcomes["a_set_under_a_name_of_its_own"] == {
        "manifest": "set.manifest.json",
        "files": [
            "set.beton",
            "set.classes.csv",
            "set.manifest.json",
            "set.report.csv",
            "set.train.jsonl",
            "set.val.beton",
            "set.val.jsonl",
        ],
        "train": [0] * 8 + [1] * 8,  # of seventeen images four batches of four
        "val": [0] * 3 + [1] * 2,
    }


def test_images_larger_than_a_page_are_stored_and_gigantic_ones_reduced(outcomes):
    assert outcomes["large_images_are_stored_or_reduced"] == {
        "sides": [[1900, 2000], [1500, 2000]],
        "n": 18,
        "read": 16,
    }


def test_operations_in_an_order_that_hangs_are_refused(outcomes):
    outcome = outcomes["operations_in_the_wrong_order_are_refused"]
    assert outcome["refused"] == ["NormalizeImage", "RandomHorizontalFlip", "ToTorchImage", "Identity"]


def test_damaged_and_cut_files_are_refused_before_ffcv_opens_them(outcomes):
    assert outcomes["damaged_files_are_refused"] == {"refused": [True] * 4}


def test_a_reader_that_gives_nothing_is_given_up(outcomes):
    outcome = outcomes["a_silent_reader_is_given_up"]
    assert "no batch within 1 s" in outcome["error"]
    assert outcome["seconds"] < 20


def test_two_readers_that_would_abort_the_process_are_refused_and_an_open_epoch_is_closed_at_the_exit(tmp_path):
    """`run` demands the exit status 0; stock FFCV ends by SIGABRT either way."""
    names = ("two_loaders_at_once", "an_unfinished_epoch_does_no_harm_at_the_exit")
    outcomes = run(names, tmp_path, compiled=True, NUMBA_THREADING_LAYER="workqueue")
    assert "workqueue" in outcomes["two_loaders_at_once"].pop("error")
    assert outcomes["two_loaders_at_once"] == {"after": 5, "one worker": [1, 1]}
    assert outcomes["an_unfinished_epoch_does_no_harm_at_the_exit"]["alive"] >= 1


def test_workers_are_no_more_than_the_cores_given(tmp_path):
    name = "workers_are_capped_by_the_cores_given"
    outcomes = run((name,), tmp_path, compiled=False, cores={min(os.sched_getaffinity(0))})
    assert outcomes[name] == {"workers": 1, "images": 16}


def test_the_guide_checks_and_packs_imagenets_layout(tmp_path):
    commands = example("packing")
    root = image_folder(tmp_path / "ilsvrc", {"n01440764": (3, 1), "n01443537": (3, 1)})
    lines = ["ImageId,PredictionString"]
    for number, name in enumerate(("n01443537", "n01440764"), start=1):
        image = f"ILSVRC2012_val_{number:08d}"
        (root / "val" / name / "000.png").rename(root / "val" / f"{image}.JPEG")
        (root / "val" / name).rmdir()
        lines.append(f"{image},{name} 1 2 3 4 ")
    (root / "LOC_val_solution.csv").write_text("\n".join(lines))
    script = f'set -e\nattngeo() {{ "{sys.executable}" -m attngeo "$@"; }}\n{commands}'
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "6 training and 2 validation images of 2 classes" in done.stdout
    assert Beton(tmp_path / "ilsvrc.val.beton").labels.tolist() == [0, 1]
    assert "PNG content named .jpeg" in (tmp_path / "ilsvrc.report.csv").read_text()
