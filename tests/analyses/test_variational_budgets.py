"""The timings of the flow and of the solver: checked first, complete, and judged by the goals."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attngeo.variational import budgets
from attngeo.variational.budgets import GOALS, QUICK
from attngeo.variational.flow import ORDERS

ROOT = Path(__file__).parents[2]


def test_the_benchmark_prints_every_number_and_the_goals(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.variational", "--quick", "--repeats", "1", "--threads", "1"]
    command += ["--out", str(tmp_path / "variational.csv")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for words in ("flow_s", "flow_processor_s", "solver_s", "solver_iterations", "flow_memory_mib", *ORDERS):
        assert words in done.stdout
    goals = done.stdout.partition("goals")[2]
    assert all(goal.text in goals for goal in GOALS)
    assert (tmp_path / "variational.csv").read_text().count("flow_s") == len(ORDERS)


def test_a_flow_or_a_solver_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def resting(velocity: object, start: Tensor, step: float, steps: int, method: str = "") -> Tensor:
        return start.expand(steps + 1, -1, -1)

    monkeypatch.setattr(budgets, "integrate", resting)
    flow = list(budgets._flow(QUICK, 1))
    assert {row["metric"] for row in flow} == {"not_timed"}
    assert len(flow) == len(ORDERS)
    (solver,) = budgets._solver(QUICK, 1)
    assert solver["metric"] == "not_timed"
    assert "rad from the flow" in solver["why"]


def test_goals_are_judged_by_the_worst_number_and_missing_ones_said() -> None:
    rows = [{"metric": "flow_s", "value": value, "of": "x"} for value in (1.0, 11.0)]
    rows += [{"metric": "solver_s", "value": 60.0, "of": "x"}]
    verdicts = {goal.metric: (value, verdict) for goal, value, verdict in budgets.judge(rows)}
    assert verdicts["flow_s"] == (11.0, "missed")
    assert verdicts["solver_s"] == (60.0, "met")
    assert math.isnan(verdicts["flow_memory_exponent"][0])
    assert verdicts["flow_memory_exponent"][1] == "not measured"


def test_the_adaptive_integration_keeps_two_tokens_in_their_plane_and_closes_their_angle() -> None:
    start = torch.eye(2, 5, dtype=torch.float64)
    end = budgets._reference(start, 1.0)
    assert float(end[:, 2:].abs().amax()) == 0
    assert 0 < float(end[0] @ end[1]) < 1
