"""Attention by metric beside plain softmax, and its memory beside the direct form's, at one shape on any device."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngeo.evaluation.apart import apart
from attngeo.evaluation.timing import clock_of, interleaved, keep_pages, peak_memory_mib, return_pages
from attngeo.ops.riemannian_attention import naive, riemannian_attention
from attngeo.training.seeding import generator

Row = dict[str, Any]
"""metric, value, unit, n and what it is of; metric "not_timed" has `why` instead."""

# Largest error relative to the largest number, of the output and of every gradient, float32 against float64.
_AGREES = 1e-3


class Shape(NamedTuple):
    """Of one attention."""

    heads: int
    tokens: int
    dimension: int
    rank: int


@dataclass(frozen=True)
class Goal:
    """Bounds for a metric's numbers; where there is one from above, the largest is the one shown."""

    metric: str
    text: str
    at_most: float = math.inf
    at_least: float = -math.inf

    @property
    def bounds(self) -> str:
        """In words."""
        bounds = (("at least", self.at_least), ("at most", self.at_most))
        return ", ".join(f"{words} {limit:g}" for words, limit in bounds if math.isfinite(limit))


GOALS = (
    Goal("attention_ratio", "attention, forward and backward, times of plain softmax over (2 + r)", at_most=1.3),
    Goal(
        "memory_ratio", "peak memory of the direct form, which keeps N x N x r, over the streamed one's", at_least=5.0
    ),
)


def judge(rows: Sequence[Row], goals: Sequence[Goal]) -> Iterator[tuple[Goal, float, str]]:
    """Each goal with the worst number that bears on it, NaN if none, and "met", "missed" or "not measured"."""
    for goal in goals:
        values = [row["value"] for row in rows if row["metric"] == goal.metric]
        worst = (max if math.isfinite(goal.at_most) else min)(values, default=math.nan)
        met = all(goal.at_least <= value <= goal.at_most for value in values)
        yield goal, worst, "not measured" if math.isnan(worst) else "met" if met else "missed"


def measure(shape: Shape, device: torch.device, *, repeats: int, seconds: float) -> Iterator[Row]:
    """Time, forward and backward, over (2 + r) times plain softmax's, and peak memory, each with what it is made of.

    Times are of one thread, or of the device's own clock. Nothing is timed that differs from float64.
    """
    yield from _times(shape, device, repeats, seconds)
    yield from _memory(shape, device)


def _drawn(shape: Shape, device: torch.device) -> list[Tensor]:
    heads, tokens, width, rank = shape
    source = generator(0, "metric budgets", tokens)
    q, k, v = (torch.randn(1, heads, tokens, width, generator=source) for _ in range(3))
    a = 0.5 + torch.rand(1, heads, tokens, width, generator=source)
    U = 0.2 * torch.randn(1, heads, tokens, width, rank, generator=source)
    given = [q, k, v, a, U, torch.full((heads,), math.sqrt(width))]
    return [tensor.to(device).requires_grad_() for tensor in given]


def _times(shape: Shape, device: torch.device, repeats: int, seconds: float) -> Iterator[Row]:
    heads, tokens, width, rank = shape
    given = _drawn(shape, device)
    grad = torch.randn(1, heads, tokens, width, generator=generator(0, "metric budgets gradient", tokens)).to(device)
    labels = {"of": "attention", **shape._asdict()}

    def ours() -> tuple[Tensor, ...]:
        output = riemannian_attention(*given)
        return output, *torch.autograd.grad(output, given, grad)

    def plain() -> tuple[Tensor, ...]:
        q, k, v = given[:3]
        return torch.autograd.grad(torch.softmax(q @ k.mT * width**-0.5, -1) @ v, given[:3], grad)

    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    output = naive.riemannian_attention(*exact)
    expected = (output, *torch.autograd.grad(output, exact, grad.double()))
    error = max(
        float((found - wanted).detach().abs().max() / wanted.detach().abs().max())
        for found, wanted in zip(ours(), expected, strict=True)
    )
    yield labels | {"metric": "error", "value": error, "unit": "1", "n": 1}
    if not error < _AGREES:
        yield labels | {"metric": "not_timed", "why": f"output or gradients are off by {error:.1e}"}
        return
    torch.set_num_threads(1)
    keep_pages()
    timings = interleaved({"ours": ours, "plain": plain}, clock_of(device), repeats=repeats, seconds=seconds)
    for name, timing in timings.items():
        yield labels | {"metric": f"{name}_ms", "value": timing.minimum_ms, "unit": "ms", "n": timing.repeats}
    ratio = timings["ours"].minimum_ms / timings["plain"].minimum_ms / (2 + rank)
    yield labels | {"metric": "attention_ratio", "value": ratio, "unit": "1", "n": timings["ours"].repeats}


def _memory(shape: Shape, device: torch.device) -> Iterator[Row]:
    """In processes of their own where the device is this machine's processor, whose memory keeps what is freed."""
    peaks = {
        name: apart(_peak, shape, "cpu", name == "direct")
        if device.type == "cpu"
        else _peak(shape, str(device), name == "direct")
        for name in ("direct", "streamed")
    }
    labels = {"of": "attention", **shape._asdict(), "n": 1}
    for name, peak in peaks.items():
        yield labels | {"metric": f"{name}_mib", "value": peak, "unit": "MiB"}
    yield labels | {"metric": "memory_ratio", "value": peaks["direct"] / peaks["streamed"], "unit": "1"}


def _peak(shape: Shape, device: str, direct: bool) -> float:
    """MiB of forward and backward beyond what was there."""
    torch.set_num_threads(1)
    return_pages()
    given = _drawn(shape, torch.device(device))
    attention = naive.riemannian_attention if direct else riemannian_attention
    return peak_memory_mib(lambda: torch.autograd.grad(attention(*given).sum(), given), torch.device(device))
