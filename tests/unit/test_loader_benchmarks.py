"""The timings of the image loaders: checked first, complete without FFCV, and judged by the goals."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from attngeo.data import ffcv_available
from attngeo.data.batches import Batches
from attngeo.evaluation import loader_benchmarks as benchmarks
from attngeo.evaluation.loader_benchmarks import GOALS, QUICK, Row
from tests.unit.data_support import picture

ROOT = Path(__file__).parents[2]
IN_PROCESS = replace(QUICK, workers=0)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("sources")
    paths = [folder / f"{number}.png" for number in range(5)]
    for number, path in enumerate(paths):
        Image.fromarray(picture(number, 250, 251)).save(path)
    return paths


@pytest.fixture
def without_ffcv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ffcv_available, "why_unavailable", lambda: "ffcv is not installed")


@pytest.mark.skipif(
    importlib.util.find_spec("ffcv") is None and os.environ.get("REQUIRE_FFCV") != "1", reason="ffcv is not installed"
)
def test_the_benchmark_checks_times_and_judges_every_loader(sources: list[Path], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.loaders", "--quick", "--images", str(sources[0].parent)]
    command += ["--out", str(tmp_path / "loaders.csv")]
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}  # compiling takes half a minute and goes the same ways
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr
    for name in (benchmarks.FFCV_RAW, benchmarks.FFCV_JPEG_BICUBIC, benchmarks.PILLOW, benchmarks.DECODE_JPEG):
        assert name in done.stdout
    assert "FFCV, raw, bicubic: mean |difference| 0.000 of 255 (at most 0)" in done.stderr
    assert "not measured" not in done.stdout.partition("goals")[2]
    assert (tmp_path / "loaders.csv").read_text().count("img_per_s") == 7


@pytest.mark.usefixtures("without_ffcv")
def test_without_ffcv_its_rows_say_why_and_the_others_are_timed(sources: list[Path], tmp_path: Path) -> None:
    rows = benchmarks.suite(tmp_path, sources, IN_PROCESS, tell=lambda line: None)
    timed = {row["contestant"] for row in rows if row["metric"] == "img_per_s"}
    assert timed == {benchmarks.PILLOW, benchmarks.DECODE_JPEG, benchmarks.OUR_TORCH}
    missing = {row["contestant"]: row["why"] for row in rows if row["metric"] == "not_timed"}
    assert missing == dict.fromkeys((benchmarks.FFCV_JPEG, benchmarks.FFCV_RAW), "ffcv is not installed")
    verdicts = [goal.verdict(rows) for goal in GOALS]
    assert verdicts[:4] == ["not measured"] * 4
    assert verdicts[4] in ("met", "missed")
    assert not [row for row in rows if row["metric"] == "wrong"]


@pytest.mark.usefixtures("without_ffcv")
def test_a_loader_that_leaves_images_out_is_not_timed(
    sources: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = benchmarks._epoch

    def short(batches: Batches, number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter(list(whole(batches, number))[:-1])

    monkeypatch.setattr(benchmarks, "_epoch", short)
    rows = benchmarks.suite(tmp_path, sources, IN_PROCESS, tell=lambda line: None)
    wrong = {row["contestant"]: row["why"] for row in rows if row["metric"] == "wrong"}
    assert wrong == {benchmarks.OUR_TORCH: "4 images in an epoch instead of 8"}
    assert benchmarks.OUR_TORCH not in {row["contestant"] for row in rows if row["metric"] == "img_per_s"}


def test_goals_are_ratios_at_least_and_shares_at_most() -> None:
    ratios: list[Row] = [
        {"metric": "ratio", "contestant": ours, "against": peer, "value": value}
        for ours, peer, value in (
            (benchmarks.FFCV_JPEG, benchmarks.PILLOW, 2.0),
            (benchmarks.FFCV_RAW, benchmarks.PILLOW, 3.9),
            (benchmarks.FFCV_JPEG, benchmarks.DECODE_JPEG, 1.4),
        )
    ]
    shares: list[Row] = [
        {"metric": "drawing_share", "contestant": benchmarks.FFCV_RAW, "value": 0.03},
        {"metric": "drawing_share", "contestant": benchmarks.OUR_TORCH, "value": 0.031},
    ]
    assert [goal.verdict(ratios + shares) for goal in GOALS] == ["met", "missed", "met", "met", "missed"]
    assert {goal.verdict([]) for goal in GOALS} == {"not measured"}
