"""95 % intervals of means, from values or from what a record says of its spread."""

import math
from collections.abc import Mapping, Sequence
from typing import Any


def half_width_95(row: Mapping[str, Any]) -> float:
    """Half the 95 % interval of a record's mean, from its spread, spread_kind and n; NaN if it cannot be had.

    A spread that names 95 % is taken as it is; a standard deviation becomes a Student interval of the mean; a standard
    error is multiplied by the Student quantile.
    """
    from scipy import stats

    kind, spread, n = str(row["spread_kind"]).lower(), row["spread"], int(row["n"])
    if spread is None or math.isnan(spread):
        return math.nan
    if "95" in kind:
        return float(spread)
    if n < 2:
        return math.nan
    quantile = float(stats.t.ppf(0.975, n - 1))
    if "standard error" in kind:
        return quantile * float(spread)
    if "std" in kind or "standard deviation" in kind:
        return quantile * float(spread) / math.sqrt(n)
    return math.nan


def interval_95(row: Mapping[str, Any]) -> tuple[float, float]:
    """The 95 % interval of a record's mean: its own `low` and `high` where it has them, else from its spread."""
    if (own := own_interval(row)) is not None:
        return own
    half = half_width_95(row)
    return row["value"] - half, row["value"] + half


def own_interval(row: Mapping[str, Any]) -> tuple[float, float] | None:
    """A record's `low` and `high`; None where it has not both."""
    low, high = (float(row[name]) if row.get(name) is not None else math.nan for name in ("low", "high"))
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def student_half_width(values: Sequence[float]) -> float:
    """Half the 95 % Student interval of the mean of values; NaN for fewer than two."""
    from scipy import stats

    n = len(values)
    if n < 2:
        return math.nan
    mean = sum(values) / n
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    return float(stats.t.ppf(0.975, n - 1)) * deviation / math.sqrt(n)


def mean_and_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, sample standard deviation and half of the 95 % Student interval of the mean, NaN where n is too small."""
    import numpy as np

    n = len(values)
    mean = float(np.mean(values))
    if n < 2:
        return mean, math.nan, math.nan
    std = float(np.std(values, ddof=1))
    return mean, std, student_half_width(values)
