"""What the flow and the solver of stationary paths cost: time of a long path, time to converge, memory by steps.

Nothing is timed that is not right first: the flow against an adaptive integration of its definition by SciPy, the
solver's path against the flow. Times are of the wall, beside the processor time of all threads, which other programs
disturb less; memory is measured in a process of its own.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from attngeo.evaluation.apart import apart
from attngeo.evaluation.slopes import fit_slope
from attngeo.evaluation.timing import peak_memory_mib, return_pages
from attngeo.training.seeding import generator
from attngeo.variational.euler_lagrange import Minimiser
from attngeo.variational.flow import ORDERS, energy, gradient_flow, integrate, softmax_flow
from attngeo.variational.lagrangian import energy_dissipation
from attngeo.variational.sphere import distance, random_points
from attngeo.variational.stationary import stationary_path

Row = dict[str, Any]
"""metric, value, unit, n and what it is of; metric "not_timed" has `why` instead."""

_BETA = 1.0
_STEP = 0.1
# Largest error of a token, radians, before it is timed: the order-1 integrators over 4 steps of 0.1, and the solver's
# midpoint rule at a step of half a unit, are 10 times better.
_FLOW_ERROR = 0.05
_FLOW_ERROR_ORDER_4 = 1e-5
_SOLVER_ERROR = 1e-3


@dataclass(frozen=True)
class Size:
    """Tokens, dimension and steps of the flow, the same of the solver, and the steps at which memory is measured."""

    flow: tuple[int, int, int]
    solver: tuple[int, int, int]
    memory_steps: tuple[int, ...]


FULL = Size((512, 64, 1000), (32, 64, 64), (64, 128, 256, 512))
QUICK = Size((17, 5, 20), (5, 3, 8), (8, 16, 32))


@dataclass(frozen=True)
class Goal:
    """An upper bound for a metric, or for the worst of several."""

    metric: str
    text: str
    at_most: float


GOALS = (
    Goal("flow_s", "1,000 steps of the flow, 512 tokens, d = 64, slowest integrator, s on 2 cores", 10.0),
    Goal("solver_s", "stationary path of 32 tokens over 64 steps, d = 64, s on 2 cores", 60.0),
    Goal("flow_memory_exponent", "memory of a path against its number of steps, exponent", 1.05),
    Goal("solver_memory_exponent", "memory of the solver against the number of steps, exponent", 1.05),
)


def measure(size: Size, repeats: int) -> list[Row]:
    """All rows: the smallest of so many times of each contestant, and peaks of memory with their exponents."""
    return [*_flow(size, repeats), *_solver(size, repeats), *_memory(size)]


def judge(rows: Sequence[Row]) -> Iterator[tuple[Goal, float, str]]:
    """Every goal with the worst number that bears on it, NaN if none, and "met", "missed" or "not measured"."""
    for goal in GOALS:
        value = max((row["value"] for row in rows if row["metric"] == goal.metric), default=math.nan)
        yield goal, value, "not measured" if math.isnan(value) else "met" if value <= goal.at_most else "missed"


def _tokens(tokens: int, dimension: int) -> Tensor:
    return random_points(tokens, dimension, generator=generator(0, "variational budgets"))


def _flow(size: Size, repeats: int) -> Iterator[Row]:
    tokens, dimension, steps = size.flow
    start = _tokens(tokens, dimension)
    expected = _reference(start, 4 * _STEP)
    for method, order in ORDERS.items():
        what = {"of": method, "tokens": tokens, "dimension": dimension, "steps": steps}
        error = float(distance(integrate(softmax_flow(_BETA), start, _STEP, 4, method)[-1], expected).amax())
        if not error <= (_FLOW_ERROR_ORDER_4 if order == 4 else _FLOW_ERROR):
            yield {"metric": "not_timed", **what, "why": f"{error:.2g} rad from the adaptive integration"}
            continue
        run = partial(integrate, softmax_flow(_BETA), start, _STEP, steps, method)
        for clock, seconds in _times(run, repeats).items():
            yield {"metric": f"flow_{clock}", **what, "value": seconds, "unit": "s", "n": repeats}
        yield {"metric": "flow_error", **what, "value": error, "unit": "rad", "n": tokens}


def _times(call: Callable[[], object], repeats: int) -> dict[str, float]:
    """Smallest time of the wall and of the processor, each of so many runs, seconds."""
    found = []
    for _ in range(repeats):
        began = time.perf_counter(), time.process_time()
        call()
        found.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    wall, processor = zip(*found, strict=True)
    return {"s": min(wall), "processor_s": min(processor)}


def _reference(start: Tensor, end: float) -> Tensor:
    """The softmax flow's tokens at time `end`, written out in NumPy and integrated with errors of 1e-10 a step."""
    shape = start.shape

    def velocity(_: float, flat: np.ndarray) -> np.ndarray:
        x = flat.reshape(shape)
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
        weights = np.exp(_BETA * (x @ x.T))
        mean = weights @ x / weights.sum(axis=1, keepdims=True)
        return (mean - np.sum(mean * x, axis=1, keepdims=True) * x).ravel()

    found = solve_ivp(velocity, (0.0, end), start.numpy().ravel(), method="DOP853", rtol=1e-10, atol=1e-12)
    return torch.from_numpy(found.y[:, -1].reshape(shape).copy())


def _solve(tokens: int, dimension: int, steps: int) -> Minimiser:
    """From tokens at rest to the path of the gradient flow over a time of one unit a token."""
    resting = _tokens(tokens, dimension).expand(steps + 1, -1, -1)
    return stationary_path(
        energy_dissipation(_BETA), resting, tokens / steps, terminal=lambda x: -energy(x, _BETA), tolerance=1e-8
    )


def _solver(size: Size, repeats: int) -> Iterator[Row]:
    tokens, dimension, steps = size.solver
    what = {"of": "stationary_path", "tokens": tokens, "dimension": dimension, "steps": steps}
    found = _solve(*size.solver)
    expected = integrate(gradient_flow(_BETA), found.path[0], tokens / steps, steps)
    error = float(distance(found.path, expected).amax())
    if not (found.converged and error <= _SOLVER_ERROR):
        why = f"gradient {found.gradient_norm:.2g} after {found.iterations} iterations, {error:.2g} rad from the flow"
        yield {"metric": "not_timed", **what, "why": why}
        return
    for clock, seconds in _times(partial(_solve, *size.solver), repeats).items():
        yield {"metric": f"solver_{clock}", **what, "value": seconds, "unit": "s", "n": repeats}
    yield {"metric": "solver_iterations", **what, "value": found.iterations, "unit": "iterations", "n": 1}
    yield {"metric": "solver_error", **what, "value": error, "unit": "rad", "n": tokens * steps}


def _memory(size: Size) -> Iterator[Row]:
    for name, (tokens, dimension, _) in (("flow", size.flow), ("solver", size.solver)):
        what = {"of": name, "tokens": tokens, "dimension": dimension}
        peaks = [apart(peak_mib, name, tokens, dimension, steps) for steps in size.memory_steps]
        for steps, peak in zip(size.memory_steps, peaks, strict=True):
            yield {"metric": f"{name}_memory_mib", **what, "steps": steps, "value": peak, "unit": "MiB", "n": 1}
        exponent, _ = fit_slope(size.memory_steps, peaks, [0] * len(peaks))
        yield {"metric": f"{name}_memory_exponent", **what, "value": exponent, "unit": "1", "n": len(peaks)}


def peak_mib(name: str, tokens: int, dimension: int, steps: int) -> float:
    """Memory that a path of the flow, or the solver, takes at its peak; to be called in a process of its own."""
    return_pages()
    start = _tokens(tokens, dimension)

    def call() -> None:
        if name == "flow":
            integrate(softmax_flow(_BETA), start, _STEP, steps, "projected_euler")
        else:
            _solve(tokens, dimension, steps)

    return peak_memory_mib(call, start.device)
