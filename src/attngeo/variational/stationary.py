"""Stationary paths: a discrete action minimised by L-BFGS on the product of spheres, for many tokens and nodes (P1.b).

The metric is that of the product of spheres; L-BFGS keeps its pairs tangent by carrying them along each step by
parallel transport. Its first guess of the inverse Hessian is that of the kinetic energy |xdot|^2 / 2, tridiagonal in
time: the condition number of an action grows with the square of the number of nodes, the preconditioned one does not.
"""

import math
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from scipy.linalg import cho_solve_banded, cholesky_banded
from torch import Tensor

from attngeo.variational.euler_lagrange import Minimiser, midpoint_action
from attngeo.variational.lagrangian import Lagrangian, Terminal
from attngeo.variational.sphere import exponential, parallel_transport, require_points, tangent_projection

# Steps and gradients that are remembered, each the size of the path.
_PAIRS = 12
# Longest move of a token in one iteration, radians: far from antipodes, which have no transport.
_LONGEST_MOVE = 1.0


def stationary_path(
    lagrangian: Lagrangian,
    start: Tensor,
    step: float,
    *,
    terminal: Terminal | None = None,
    free: tuple[bool, bool] = (False, True),
    tolerance: float = 1e-8,
    max_iterations: int = 1000,
) -> Minimiser:
    """Minimise the midpoint action plus `terminal(x(T))` from a first path `start` [T, N, D].

    `free` says whether x(0) and x(T) may move; an end that may then meets its transversality condition. Converged means
    that the norm of the Riemannian gradient is at most `tolerance`. Memory is linear in T.
    """
    if start.shape[0] < 3:
        raise ValueError(f"a path of {start.shape[0]} nodes has no interior to move; give 3 nodes or more")
    if not 0 < step < math.inf:
        raise ValueError(f"a step of {step} is no time between two nodes; give a positive one")
    require_points(start, "the first path", "T, N, D")
    moving = torch.ones(start.shape[0], 1, 1, dtype=start.dtype, device=start.device)
    moving[0], moving[-1] = float(free[0]), float(free[1])
    functional = partial(midpoint_action, lagrangian, step=step, terminal=terminal)
    precondition = _kinetic_inverse(start.shape[0], step, free)

    def evaluate(path: Tensor) -> tuple[float, Tensor]:
        leaf = path.detach().requires_grad_()
        with torch.enable_grad():
            value = functional(leaf)
            (ambient,) = torch.autograd.grad(value, leaf)
        return float(value.detach()), moving * tangent_projection(path, ambient)

    path = start
    value, gradient = evaluate(path)
    pairs: deque[tuple[Tensor, Tensor]] = deque(maxlen=_PAIRS)
    iteration = 0
    for iteration in range(max_iterations + 1):
        norm = float(torch.linalg.vector_norm(gradient))
        if norm <= tolerance or iteration == max_iterations:
            break
        direction = -moving * _two_loops(gradient, pairs, partial(_tangent_solve, precondition, path))
        found = _backtrack(evaluate, path, value, gradient, direction)
        if found is None and not pairs:
            break
        if found is None:
            pairs.clear()  # a stale model of the Hessian: once more from the preconditioned gradient
            continue
        move, next_path, value, next_gradient = found
        carry = partial(parallel_transport, path, next_path)
        pairs = deque(((carry(s), carry(y)) for s, y in pairs), maxlen=_PAIRS)
        s, y = carry(move), next_gradient - carry(gradient)
        # Only a positive curvature keeps the model positive definite; where it is not, the pair is left out.
        if float((s * y).sum()) > 1e-12 * float(torch.linalg.vector_norm(s) * torch.linalg.vector_norm(y)):
            pairs.append((s, y))
        path, gradient = next_path, next_gradient
    return Minimiser(path, value, norm, iteration, norm <= tolerance)


def _tangent_solve(solve: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> Tensor:
    return tangent_projection(x, solve(v))


def _kinetic_inverse(nodes: int, step: float, free: tuple[bool, bool]) -> Callable[[Tensor], Tensor]:
    """Solve with the Hessian of the chords' kinetic energy in a flat space, node by node over time, [T, N, D]."""
    first, last = (0 if free[0] else 1), (nodes if free[1] else nodes - 1)
    diagonal = np.full(nodes, 2.0)
    diagonal[[0, -1]] = 1.0
    bands = np.zeros((2, last - first))
    bands[0, 1:] = -1 / step
    # The term of the mean position makes the matrix regular where both ends are free.
    bands[1] = diagonal[first:last] / step + step / (step * (nodes - 1)) ** 2
    factor = cholesky_banded(bands)

    def solve(v: Tensor) -> Tensor:
        inner = v[first:last]
        right = inner.reshape(last - first, -1).double().cpu().numpy()
        found = torch.from_numpy(cho_solve_banded((factor, False), right, check_finite=False))
        solved = torch.zeros_like(v)
        solved[first:last] = found.to(v).reshape(inner.shape)
        return solved

    return solve


def _two_loops(
    gradient: Tensor, pairs: deque[tuple[Tensor, Tensor]], precondition: Callable[[Tensor], Tensor]
) -> Tensor:
    """Inverse Hessian times gradient by the pairs (step, change of the gradient), oldest first."""
    right, shares = gradient, []
    for s, y in reversed(pairs):
        shares.append((s * right).sum() / (s * y).sum())
        right = right - shares[-1] * y
    result = precondition(right)
    if pairs:
        s, y = pairs[-1]
        result = result * ((s * y).sum() / (y * precondition(y)).sum())
    for (s, y), share in zip(pairs, reversed(shares), strict=True):
        result = result + (share - (y * result).sum() / (s * y).sum()) * s
    return result


def _backtrack(
    evaluate: Callable[[Tensor], tuple[float, Tensor]], path: Tensor, value: float, gradient: Tensor, direction: Tensor
) -> tuple[Tensor, Tensor, float, Tensor] | None:
    """Halve the step until the functional falls enough: (move, path, value, gradient), or None if no step did."""
    slope = float((gradient * direction).sum())
    longest = float(torch.linalg.vector_norm(direction, dim=-1).amax())
    if not slope < 0:
        return None
    length = min(1.0, _LONGEST_MOVE / longest)
    # Close to the minimum rounding hides the fall that the step still brings.
    rounding = 1e-14 * max(abs(value), 1.0)
    for _ in range(30):
        move = length * direction
        candidate = exponential(path, move)
        reached, at = evaluate(candidate)
        if reached <= value + 1e-4 * length * slope + rounding:
            return move, candidate, reached, at
        length /= 2
    return None
