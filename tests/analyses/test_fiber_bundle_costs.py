"""Laws of the rank of scores, and of what metrics cost: predictions, exponents of known times, gates and goals."""

import math

import pytest
import torch

from attngeo.fiber_bundle import attention_budget, budgets, metric_costs
from attngeo.fiber_bundle.score_rank import FORMS, analyze, numerical_rank, predicted_rank
from benchmarks import fiber_bundle as benchmark


def test_every_rank_is_as_derived() -> None:
    """P4.a at small sizes; the controls are the Gram-like forms, whose rank grows with d alone."""
    rows = list(analyze((2, 3, 5), (7, 48), (0, 1)))
    assert len(rows) == 2 * 3 * len(FORMS)
    assert [row["value"] for row in rows] == [row["predicted"] for row in rows]
    assert all(row["spread"] == 0 for row in rows)
    assert all(row["value"] <= row["dimension"] + 2 for row in rows if row["control"])


def test_derived_ranks_of_the_mean_metric_by_dimension() -> None:
    assert [predicted_rank("mean_same_vector", d, 1000) for d in (3, 5, 8)] == [17, 32, 62]
    assert [predicted_rank("mean", d, 1000) for d in (3, 5, 8)] == [20, 42, 90]
    assert predicted_rank("query", 8, 30) == 30


def test_a_rank_is_counted_above_rounding_alone() -> None:
    left, right = (torch.linalg.qr(torch.randn(40, 40, dtype=torch.float64)).Q for _ in range(2))
    values = torch.tensor([1.0, 1e-3, 1e-12, 1e-13, 0.0] + [0.0] * 35, dtype=torch.float64)
    rank, counted, left_out = numerical_rank(left * values @ right)
    assert rank == 4
    assert counted == pytest.approx(1e-13, rel=0.1)
    assert left_out < 40 * torch.finfo(torch.float64).eps


def made_up_times() -> list[dict[str, object]]:
    """Times that are d r^2 exactly from r = 16 on, and d r below."""
    return [
        {"metric": "time_us", "form": "low rank", "operation": operation, "dimension": d, "rank": r, "n": 3}
        | {"value": 1e-3 * d * (r**2 if r >= 16 else 16 * r)}
        for operation in ("solve", "logdet", "distance")
        for d in (64, 256, 512, 1024)
        for r in (1, 4, 16, 32, 64, 128, 256)
    ]


def test_exponents_of_known_times() -> None:
    found = {row["metric"]: row for row in metric_costs.exponents(made_up_times())}
    assert found["inversion_exponent_d"]["value"] == pytest.approx(1)
    assert (found["inversion_exponent_d"]["smallest"], found["inversion_exponent_d"]["largest"]) == (256, 1024)
    assert found["inversion_exponent_r"]["value"] == pytest.approx(2)
    assert found["inversion_exponent_small_r"]["value"] == pytest.approx(1)
    assert found["inversion_exponent_large_r"]["value"] == pytest.approx(2)
    assert (found["inversion_exponent_large_r"]["smallest"], found["inversion_exponent_large_r"]["n"]) == (128, 2)


def test_costs_of_a_small_case_hold_every_part() -> None:
    rows = [
        row
        for found in metric_costs.measure(
            (32, 64), (1, 2), (64,), (2,), tokens=9, dense_to=32, repeats=2, seconds=0.005
        )
        for row in found
    ]
    times = [row for row in rows if row["metric"] == "time_us"]
    assert {(row["operation"], row["form"]) for row in times} == {
        (operation, form) for operation in ("solve", "logdet", "distance") for form in ("low rank", "dense")
    }
    assert all("rank" in row for row in times if row["form"] == "low rank")
    assert all(row["dimension"] == 32 for row in times if row["form"] == "dense")
    parts = {row["part"] for row in rows if row["metric"] == "part_overhead"}
    assert parts == {"distance", "solve", "metric of heads", "metric of the feed-forward"}
    projected = [row for row in rows if row["metric"] == "projected_overhead"]
    for shape in metric_costs.SHAPES:
        shares = {row["part"]: row["value"] for row in projected if row["shape"] == shape}
        assert shares.pop("all") == pytest.approx(sum(shares.values()))


def test_nothing_is_timed_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_costs, "solve", lambda a, U, x: 1.01 * x / a)
    with pytest.raises(AssertionError, match="solve differs from its dense form"):
        list(metric_costs.measure((32,), (2,), (), (), tokens=1, dense_to=32, repeats=2, seconds=0.005))
    monkeypatch.setattr(
        attention_budget, "riemannian_attention", lambda q, k, v, a, U, tau: v + 0 * (q + k + a + U.sum(-1)) * tau
    )
    rows = list(attention_budget._times(budgets.QUICK.attention, torch.device("cpu"), 2, 0.01))
    assert [row["metric"] for row in rows] == ["error", "not_timed"]


def test_the_benchmark_says_every_goal(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["--quick", "--repeats", "2", "--seconds", "0.02"]) == 0
    printed = capsys.readouterr().out
    for goal in budgets.GOALS:
        assert goal.text in printed


def test_goals_are_judged_by_the_worst_number() -> None:
    rows = [
        {"metric": "attention_ratio", "value": 1.2},
        {"metric": "memory_ratio", "value": 4.0},
        {"metric": "dense_ratio", "value": 9.0},
        {"metric": "dense_ratio", "value": 0.5},
    ]
    verdicts = {goal.metric: (value, verdict) for goal, value, verdict in attention_budget.judge(rows, budgets.GOALS)}
    assert verdicts["attention_ratio"] == (1.2, "met")
    assert verdicts["memory_ratio"] == (4.0, "missed")
    assert verdicts["dense_ratio"] == (0.5, "missed")
    assert math.isnan(verdicts["inversion_exponent_d"][0])
    assert verdicts["inversion_exponent_d"][1] == "not measured"
