"""Differences of the full model from others on the same task, paired by seed, with intervals and adjusted p-values."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attngeo.intervals import LEVEL, holm

if TYPE_CHECKING:
    import pandas as pd

SUBJECT = "fiber"
BASELINES = ("dot", "more_heads", "gated", "constant")  # the first is the one whose time the budget "time" is
# The full model differs from the others in more than its metrics; this one differs from constant in nothing else.
ALONE, ALONE_AGAINST = "heterogeneous", ("constant", "dot")
HALF_WIDTH = "half-width of the 95 % Student interval over seeds"


def paired_differences(losses: "pd.DataFrame") -> "pd.DataFrame":
    """Loss of `SUBJECT` minus that of each baseline: a row a task, baseline and budget.

    `losses` has a row a task, model, budget ("steps", "time") and seed, with `value` in nats; baselines are those of
    the budget "steps", and the budget "time" has one alone. Rows have value, n (seeds), spread (half the 95 % Student
    interval, NaN with one seed), p (two-sided paired t-test) and p_adjusted (Holm, over all rows); of a training that
    diverged they are NaN. Rows of metric `metric_alone_difference`, without p, are `ALONE` minus each of
    `ALONE_AGAINST`.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    ours = losses[losses["model"] == SUBJECT]
    for (task, budget), group in ours.groupby(["task", "budget"], sort=True):
        for baseline in BASELINES if budget == "steps" else BASELINES[:1]:
            chosen = (losses["task"] == task) & (losses["model"] == baseline) & (losses["budget"] == "steps")
            differences = _by_seed(group, losses[chosen])
            if differences:
                labels = {"metric": "loss_difference", "task": task, "budget": budget, "against": baseline}
                rows.append(labels | _numbers(differences) | {"p": student(differences)[2]})
    frame = pd.DataFrame(rows, columns=None if rows else ["metric", "value", "n", "p"])
    frame = frame.assign(p_adjusted=holm([float(p) for p in frame["p"]]))
    alone = []
    for task, group in losses[(losses["model"] == ALONE) & (losses["budget"] == "steps")].groupby("task", sort=True):
        for against in ALONE_AGAINST:
            other = losses[(losses["task"] == task) & (losses["model"] == against) & (losses["budget"] == "steps")]
            if differences := _by_seed(group, other):
                labels = {"metric": "metric_alone_difference", "task": task, "budget": "steps", "against": against}
                alone.append(labels | _numbers(differences))
    return pd.concat([frame, pd.DataFrame(alone)], ignore_index=True) if alone else frame


def _by_seed(own: "pd.DataFrame", other: "pd.DataFrame") -> list[float]:
    """Differences of the values of the seeds that both have."""
    ours, theirs = (frame.set_index("seed")["value"] for frame in (own, other))
    return [float(ours[seed] - theirs[seed]) for seed in sorted(set(ours.index) & set(theirs.index))]


def _numbers(differences: Sequence[float]) -> dict[str, Any]:
    mean, half, _ = student(differences)
    return {"value": mean, "unit": "nats", "n": len(differences), "spread": half, "spread_kind": HALF_WIDTH}


def student(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, half the 95 % Student interval, and the two-sided p-value of a mean of 0; NaN for fewer than two values."""
    from scipy import stats

    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan, math.nan
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1)) * error
    if error == 0:
        return mean, half, 1.0 if mean == 0 else 0.0
    return mean, half, 2 * float(stats.t.sf(abs(mean) / error, len(values) - 1))
