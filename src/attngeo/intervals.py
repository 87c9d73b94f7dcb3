"""How sure a mean is: bootstrap intervals over windows, heads or draws, and p-values adjusted for many layers."""

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from attngeo.training.seeding import generator

FEWEST = 6  # n values all lie on one side of their mean's true value with probability 2^(1-n): below 6 more than 5 %
RESAMPLES = 4000
LEVEL = 0.95
_ROUNDING = 1e-9  # means of resamples that differ by less, relative to their range, are equal


def mean_intervals(samples: Tensor, subtracted: Tensor | None = None, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """95 % bootstrap interval of means over the last axis: [..., n] -> low and high [...], float64.

    With `subtracted` [..., m] the interval is that of the difference of the two means, each resampled by itself. NaN
    with fewer than `FEWEST` values in a sample, or with a NaN among them. Every sample of the same length is resampled
    in the same way. Bias and acceleration follow Efron (1987); the acceleration of a mean is known in closed form. The
    normal quantile is expanded to Student's for the smaller sample, without which few values cover too seldom
    (Hesterberg, 2015).
    """
    parts = [(samples.double(), 1.0)] + ([] if subtracted is None else [(subtracted.double(), -1.0)])
    shape = samples.shape[:-1]
    if min(values.shape[-1] for values, _ in parts) < FEWEST:
        return torch.full(shape, math.nan, dtype=torch.float64), torch.full(shape, math.nan, dtype=torch.float64)
    mean, moved, cubes, squares = (torch.zeros((), dtype=torch.float64) for _ in range(4))
    for place, (values, sign) in enumerate(parts):
        centre = values.mean(-1, keepdim=True)
        deviations = sign * (values - centre)
        influence = deviations / values.shape[-1]
        mean, moved = mean + sign * centre, moved + deviations @ _shares(values.shape[-1], seed, str(place)).T
        cubes, squares = cubes + influence.pow(3).sum(-1, True), squares + influence.square().sum(-1, True)
    acceleration = torch.nan_to_num(cubes / (6 * squares.pow(1.5)))
    rounding = _ROUNDING * moved.abs().amax(-1, True)
    below = ((moved < -rounding).double() + (moved <= rounding)).mean(-1, True) / 2  # a tie counts half
    bias = torch.special.ndtri(below.clamp(1 / RESAMPLES, 1 - 1 / RESAMPLES))
    quantile = _expanded_quantile(min(values.shape[-1] for values, _ in parts))
    tails = bias + torch.tensor([-quantile, quantile], dtype=torch.float64)
    places = torch.special.ndtr(bias + tails / (1 - acceleration * tails)) * (RESAMPLES - 1)
    ordered = (mean + moved).sort(-1).values
    first = places.nan_to_num().floor().long().clamp(0, RESAMPLES - 2)
    ends = torch.lerp(ordered.gather(-1, first), ordered.gather(-1, first + 1), places - first)
    return ends[..., 0], ends[..., 1]


def mean_interval(sample: Sequence[float] | Tensor, subtracted: Tensor | None = None) -> tuple[float, float]:
    """The same for one sample."""
    low, high = mean_intervals(torch.as_tensor(sample, dtype=torch.float64), subtracted)
    return low.item(), high.item()


def mean_interval_of_grid(values: Tensor) -> tuple[float, float]:
    """95 % percentile interval of the mean of [draws, windows], both resampled.

    NaN with fewer than `FEWEST` windows, or with a NaN among the values.
    """
    draws, windows = values.shape
    if windows < FEWEST or bool(values.isnan().any()):
        return math.nan, math.nan
    means = ((_shares(draws, 0, "over draws") @ values) * _shares(windows, 0, "over windows")).sum(dim=1)
    low, high = torch.quantile(means, torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=means.dtype)).tolist()
    return low, high


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted by Holm (1979): rejecting those below 5 % keeps the chance of any false one below 5 %.

    A NaN stays NaN and is not counted as a test.
    """
    adjusted = [math.nan] * len(p_values)
    order = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    largest = 0.0
    for rank, (p, place) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p))
        adjusted[place] = largest
    return adjusted


@cache
def _expanded_quantile(size: int) -> float:
    from scipy import stats

    return math.sqrt(size / (size - 1)) * float(stats.t.ppf((1 + LEVEL) / 2, size - 1))


@cache
def _shares(size: int, seed: int, of: str) -> Tensor:
    """Share of each of `size` values in each resample, [RESAMPLES, size]; the same for every sample of that size."""
    picks = torch.randint(size, (RESAMPLES, size), generator=generator(seed, f"bootstrap {of}", size))
    shares = torch.zeros(RESAMPLES, size, dtype=torch.float64)
    return shares.scatter_add_(1, picks, torch.full((RESAMPLES, size), 1 / size, dtype=torch.float64))
