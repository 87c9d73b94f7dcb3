"""Budgets of metrics: attention by metric beside plain softmax, its memory beside the direct form's, and the inverse.

Nothing is timed that is not right first: attention and its gradients against float64, the inverse against a dense one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from attngeo.fiber_bundle import attention_budget, metric_costs
from attngeo.fiber_bundle.attention_budget import Goal, Row, Shape


@dataclass(frozen=True)
class Size:
    """Attention, and the dimensions and ranks of the inverse."""

    attention: Shape
    dimensions: tuple[int, ...]
    ranks: tuple[int, ...]


FULL = Size(Shape(8, 1024, 32, 4), (128, 256, 512, 1024, 2048, 4096), (1, 4, 16, 32, 64, 128, 256))
QUICK = Size(Shape(1, 33, 8, 2), (64, 128, 256), (1, 4))


GOALS = (
    *attention_budget.GOALS,
    Goal("dense_ratio", "dense Cholesky's time over Woodbury's, from d = 128 on", at_least=1.0),
    Goal("inversion_exponent_d", "growth of the inverse's time with d", at_least=0.85, at_most=1.15),
    Goal("inversion_exponent_r", "growth of the inverse's time with r, from 16 on", at_least=1.7, at_most=2.3),
    Goal("inversion_exponent_large_r", "the same from 128 on, where d r^2 dominates", at_least=1.7, at_most=2.3),
)


def measure(size: Size, repeats: int, seconds: float = 1.0) -> list[Row]:
    """All rows, from the smallest of so many processor times of one thread, contestants in turn."""
    attention = attention_budget.measure(size.attention, torch.device("cpu"), repeats=repeats, seconds=seconds)
    return [*attention, *_inverse(size, repeats, seconds)]


def _inverse(size: Size, repeats: int, seconds: float) -> Iterator[Row]:
    rows: list[Row] = []
    for found in metric_costs.measure(
        size.dimensions, size.ranks, (), (), tokens=1, dense_to=1024, repeats=repeats, seconds=seconds
    ):
        rows += found
    dense = {row["dimension"]: row["value"] for row in rows if _is_solve(row, "dense")}
    for row in rows:
        if _is_solve(row, "low rank"):
            yield row | {"metric": "solve_us", "of": "inverse"}
            if row["dimension"] in dense:
                ratio = dense[row["dimension"]] / row["value"]
                yield row | {"metric": "dense_ratio", "of": "inverse", "value": ratio, "unit": "1"}
        elif row["metric"].startswith("inversion_exponent"):
            yield row | {"of": "inverse"}


def _is_solve(row: Row, form: str) -> bool:
    return row["metric"] == "time_us" and (row["operation"], row["form"]) == ("solve", form)
