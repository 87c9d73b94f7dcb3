"""Budgets of metrics: attention by metric beside plain softmax, its memory beside the direct form's, and the inverse.

Nothing is timed that is not right first: attention and its gradients against float64, the inverse against a dense one.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attngeo.evaluation.apart import apart
from attngeo.evaluation.timing import interleaved, keep_pages, peak_memory_mib, processor_time, return_pages
from attngeo.fiber_bundle import metric_costs
from attngeo.ops.riemannian_attention import naive, riemannian_attention
from attngeo.training.seeding import generator

Row = dict[str, Any]
"""metric, value, unit, n and what it is of; metric "not_timed" has `why` instead."""

# Largest error relative to the largest number, of the output and of every gradient, float32 against float64.
_AGREES = 1e-3


@dataclass(frozen=True)
class Size:
    """Attention (heads, tokens, head width, rank), and the dimensions and ranks of the inverse."""

    attention: tuple[int, int, int, int]
    dimensions: tuple[int, ...]
    ranks: tuple[int, ...]


FULL = Size((8, 1024, 32, 4), (128, 256, 512, 1024, 2048), (1, 4, 16, 32, 64))
QUICK = Size((1, 33, 8, 2), (64, 128, 256), (1, 4))


@dataclass(frozen=True)
class Goal:
    """Bounds for a metric's numbers; where there is one from above, the largest is the one shown."""

    metric: str
    text: str
    at_most: float = math.inf
    at_least: float = -math.inf


GOALS = (
    Goal("attention_ratio", "attention, forward and backward, times of plain softmax over (2 + r)", at_most=1.3),
    Goal(
        "memory_ratio", "peak memory of the direct form, which keeps N x N x r, over the streamed one's", at_least=5.0
    ),
    Goal("dense_ratio", "dense Cholesky's time over Woodbury's, from d = 128 on", at_least=1.0),
    Goal("inversion_exponent_d", "growth of the inverse's time with d", at_least=0.85, at_most=1.15),
    Goal("inversion_exponent_r", "growth of the inverse's time with r, from 16 on", at_least=1.7, at_most=2.3),
)


def measure(size: Size, repeats: int, seconds: float = 1.0) -> list[Row]:
    """All rows, from the smallest of so many processor times of one thread, contestants in turn."""
    return [*_attention(size, repeats, seconds), *_memory(size), *_inverse(size, repeats, seconds)]


def judge(rows: Sequence[Row]) -> Iterator[tuple[Goal, float, str]]:
    """Every goal with the worst number that bears on it, NaN if none, and "met", "missed" or "not measured"."""
    for goal in GOALS:
        values = [row["value"] for row in rows if row["metric"] == goal.metric]
        worst = (max if math.isfinite(goal.at_most) else min)(values, default=math.nan)
        met = all(goal.at_least <= value <= goal.at_most for value in values)
        yield goal, worst, "not measured" if math.isnan(worst) else "met" if met else "missed"


def _drawn(heads: int, tokens: int, width: int, rank: int) -> list[Tensor]:
    source = generator(0, "metric budgets", tokens)
    q, k, v = (torch.randn(1, heads, tokens, width, generator=source) for _ in range(3))
    a = 0.5 + torch.rand(1, heads, tokens, width, generator=source)
    U = 0.2 * torch.randn(1, heads, tokens, width, rank, generator=source)
    return [q, k, v, a, U, torch.full((heads,), math.sqrt(width))]


def _attention(size: Size, repeats: int, seconds: float) -> Iterator[Row]:
    heads, tokens, width, rank = size.attention
    given = [tensor.requires_grad_() for tensor in _drawn(*size.attention)]
    grad = torch.randn(1, heads, tokens, width, generator=generator(0, "metric budgets gradient", tokens))
    labels = {"of": "attention", "tokens": tokens, "dimension": width, "rank": rank, "heads": heads}

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
    timings = interleaved({"ours": ours, "plain": plain}, processor_time, repeats=repeats, seconds=seconds)
    for name, timing in timings.items():
        yield labels | {"metric": f"{name}_ms", "value": timing.minimum_ms, "unit": "ms", "n": timing.repeats}
    ratio = timings["ours"].minimum_ms / timings["plain"].minimum_ms / (2 + rank)
    yield labels | {"metric": "attention_ratio", "value": ratio, "unit": "1", "n": timings["ours"].repeats}


def _peak(heads: int, tokens: int, width: int, rank: int, direct: bool) -> float:
    """MiB of forward and backward beyond the process, in whose only thread it runs."""
    torch.set_num_threads(1)
    return_pages()
    given = [tensor.requires_grad_() for tensor in _drawn(heads, tokens, width, rank)]
    attention = naive.riemannian_attention if direct else riemannian_attention
    return peak_memory_mib(lambda: torch.autograd.grad(attention(*given).sum(), given), torch.device("cpu"))


def _memory(size: Size) -> Iterator[Row]:
    heads, tokens, width, rank = size.attention
    peaks = {name: apart(_peak, heads, tokens, width, rank, name == "direct") for name in ("direct", "streamed")}
    labels = {"of": "attention", "tokens": tokens, "dimension": width, "rank": rank, "heads": heads, "n": 1}
    for name, peak in peaks.items():
        yield labels | {"metric": f"{name}_mib", "value": peak, "unit": "MiB"}
    yield labels | {"metric": "memory_ratio", "value": peaks["direct"] / peaks["streamed"], "unit": "1"}


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
