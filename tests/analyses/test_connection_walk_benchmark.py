"""The benchmark of the connection walk: right numbers first, then times; wrong numbers are an error."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from benchmarks import connection_walk as benchmark

ROOT = Path(__file__).parents[2]


def test_the_quick_benchmark_agrees_with_the_straightforward_implementation(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    command = [sys.executable, "-m", "benchmarks.connection_walk", "--quick", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "goals" in done.stdout
    rows = pd.read_csv(out).set_index("metric")["value"]
    assert 0 < rows["disagreement"] <= benchmark.AGREEMENT
    assert 0 < rows["memory_disagreement"] <= benchmark.AGREEMENT
    assert set(benchmark.GOALS) <= set(rows.index)
    assert rows[[metric for metric in benchmark.GOALS if metric != "memory_ratio"]].min() > 0


@pytest.mark.parametrize(
    ("metric", "limit"),
    [
        ("disagreement", benchmark.AGREEMENT),
        ("memory_disagreement", benchmark.AGREEMENT),
        ("edge_spectra_error", benchmark.SPECTRA_AGREEMENT),
    ],
)
def test_wrong_numbers_are_named_and_nan_is_wrong(metric: str, limit: float) -> None:
    for value, is_wrong in ((limit / 2, False), (2 * limit, True), (float("nan"), True)):
        found = benchmark.wrong([{"metric": metric, "form": "", "value": value, "unit": "1"}])
        assert bool(found) == is_wrong
        assert all(metric in line for line in found)


def test_disagreement_names_the_number() -> None:
    expected = {(2, 1, "isometry_score", "trained"): 0.9, (0, -1, "isometry_score", "null"): 0.5}
    found = {(2, 1, "isometry_score", "trained"): 0.99, (0, -1, "isometry_score", "null"): 0.7}
    worst, where = benchmark.disagreement(expected, found)
    assert worst == pytest.approx(0.1)
    assert where == "isometry_score of layer 2, head 1"
