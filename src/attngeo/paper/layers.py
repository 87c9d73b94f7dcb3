"""Numbers by layer from records by head, with 95 % intervals that say what they are taken over."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

ISOMETRY = "isometry_score"
COLUMNS = ("model", "control", "layer", "value", "low", "high", "n", "interval", "non_finite")


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
    if (own := _own_interval(row)) is not None:
        return own
    half = half_width_95(row)
    return row["value"] - half, row["value"] + half


def _own_interval(row: Mapping[str, Any]) -> tuple[float, float] | None:
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


def isometry_by_layer(frame: "pd.DataFrame") -> "pd.DataFrame":
    """Isometry scores, one row a model, control and layer (`COLUMNS`).

    The layer's own record (head -1) is taken where there is one, with the interval that it holds, else one from its
    spread; where there is none, the mean over its heads with a Student interval over the heads. low and high are NaN
    where no interval can be had.
    """
    import pandas as pd

    rows = []
    if len(frame):
        frame = frame[frame["metric"] == ISOMETRY]
        for (model, control, layer), group in frame.groupby(["model", "control", "layer"], sort=True):
            whole = group[group["head"] == -1]
            chosen = whole if len(whole) else group
            values = chosen["value"][chosen["value"].map(math.isfinite)]
            mean = float(values.mean()) if len(values) else math.nan
            if len(whole):
                record = {str(name): value for name, value in whole.iloc[0].items()}
                (low, high), n = interval_95(record), int(record["n"])
                from_spread = f"95 % interval of the mean from the {record['spread_kind']}"
                interval = "95 % bootstrap interval of the mean" if _own_interval(record) else from_spread
            else:
                half, n = student_half_width(list(values)), len(values)
                low, high = mean - half, mean + half
                interval = "95 % interval of the mean over heads"
            rows.append((model, control, layer, mean, low, high, n, interval, len(chosen) - len(values)))
    return pd.DataFrame(rows, columns=list(COLUMNS))
