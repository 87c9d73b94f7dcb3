"""Slopes of log-log lines with their standard errors."""

import math
from collections.abc import Sequence

import pandas as pd
import torch


def fit_slope(steps: Sequence[float], values: Sequence[float], groups: Sequence[int]) -> tuple[float, float]:
    """Least-squares slope of log value on log step with an intercept a group (seed), and its standard error.

    Returns (NaN, NaN) if a value is not positive and finite, and NaN as the error if no degree of freedom is left.
    """
    data = pd.DataFrame({"step": steps, "value": values, "group": groups}, dtype="float64")
    if not ((data["value"] > 0) & (data["value"] < math.inf)).all():
        return math.nan, math.nan
    logs = torch.log(torch.tensor(data[["step", "value"]].to_numpy()))
    for group in data["group"].unique():
        members = torch.tensor((data["group"] == group).to_numpy())
        logs[members] -= logs[members].mean(dim=0)
    x, y = logs.unbind(dim=1)
    spread = float(x @ x)
    slope = float(x @ y) / spread
    freedom = len(data) - data["group"].nunique() - 1
    error = math.sqrt(float((y - slope * x).square().sum()) / freedom / spread) if freedom > 0 else math.nan
    return slope, error
