"""The speeds that this project set out to reach on a CPU, in one table, and whether a run of the benchmarks has."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from attngeo.evaluation.operator_benchmarks import BMM_LOOP, CDIST, LINALG_INV, OURS, Row
from attngeo.evaluation.operator_sizes import (
    INVERSE_SLICES,
    INVERSE_TOKENS,
    MEMORY_SIZES,
    PYRAMID_SIZES,
    Size,
    square,
)

Measure = Literal["time of a peer", "share of the port limit", "two threads", "linear memory"]


@dataclass(frozen=True)
class Goal:
    """A number that has to be reached: `measure` at least `at_least`.

    Times are ratios to the peer `against` in the same run; two threads are compared with one by the wall, which needs
    an idle machine; linear memory is twice the peak at the smaller of `MEMORY_SIZES` over the peak at the larger, which
    has twice its tokens and landmarks: 1 where memory is linear in them, 1/2 where the kernel's values are kept.
    """

    measure: Measure
    operation: str
    direction: str
    size: Size
    at_least: float
    against: str = ""

    @property
    def text(self) -> str:
        """The goal in words."""
        what = f"{self.against} / {OURS}" if self.against else self.measure
        return f"{self.operation} {self.direction}, {self.size.label}: {what} at least {self.at_least:g}"


def _goals() -> Iterator[Goal]:
    for direction, ratio, share in (("forward", 8.0, 0.45), ("backward", 14.0, 0.65)):
        for size in PYRAMID_SIZES:
            yield Goal("time of a peer", "laplacian_kernel", direction, size, ratio, CDIST)
        yield Goal("share of the port limit", "laplacian_kernel", direction, PYRAMID_SIZES[1], share)
        yield Goal("two threads", "laplacian_kernel_matmul", direction, PYRAMID_SIZES[1], 1.7)
    for direction in ("forward", "forward and backward"):
        yield Goal("linear memory", "laplacian_kernel_matmul", direction, MEMORY_SIZES[1], 0.9)
    for tokens in INVERSE_TOKENS:
        size = square(INVERSE_SLICES, tokens)
        yield Goal("time of a peer", "spd_inverse", "forward", size, 1.0 if tokens == 128 else 3.0, LINALG_INV)
        yield Goal("time of a peer", "newton_schulz_inverse", "forward", size, 1.5, BMM_LOOP)


GOALS = tuple(_goals())


@dataclass(frozen=True)
class Judged:
    """A goal and what a run measured; NaN where it did not."""

    goal: Goal
    value: float

    @property
    def verdict(self) -> str:
        """met, missed or not measured."""
        if math.isnan(self.value):
            return "not measured"
        return "met" if self.value >= self.goal.at_least else "missed"


def judge(rows: Sequence[Row], goals: Sequence[Goal] = GOALS) -> list[Judged]:
    """What a run measured of each goal."""
    return [Judged(goal, _value(rows, goal)) for goal in goals]


def _value(rows: Sequence[Row], goal: Goal) -> float:
    if goal.measure == "time of a peer":
        return _find(rows, goal, "time_ms", goal.against) / _find(rows, goal, "time_ms", OURS)
    if goal.measure == "share of the port limit":
        return _find(rows, goal, "limit_share", OURS)
    if goal.measure == "two threads":
        return _find(rows, goal, "two_thread_ratio", OURS)
    small, large = (_find(rows, goal, "peak_memory_mib", OURS, size) for size in MEMORY_SIZES)
    return 2 * small / large


def _find(rows: Sequence[Row], goal: Goal, metric: str, contestant: str, size: Size | None = None) -> float:
    slices, tokens, landmarks, channels = size or goal.size
    wanted = {
        "metric": metric,
        "operation": goal.operation,
        "direction": goal.direction,
        "contestant": contestant,
        "slices": slices,
        "tokens": tokens,
        "landmarks": landmarks,
        "channels": channels,
    }
    found = [row["value"] for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    return float(found[0]) if found else math.nan
