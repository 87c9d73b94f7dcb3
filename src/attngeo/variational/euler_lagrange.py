"""Projected Euler-Lagrange residual of a discrete path, and direct minimisation of an action (P1.c).

Stationarity under tangent variations phi that vanish at both ends reads, after integrating by parts,

    dJ = integral of <dL/dx - d/dt dL/dxdot, phi> dt = 0  for all phi with phi_i orthogonal to x_i,

that is P_x (dL/dx - d/dt dL/dxdot) = 0. The projection also makes the residual independent of how L is extended off
the sphere. For L = |xdot|^2 / 2 + |grad E|^2 / 2 it says P_x xddot = grad(|grad E|^2 / 2), which xdot = grad E
satisfies: its covariant acceleration is Hess E grad E.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attngeo.variational.lagrangian import Lagrangian, central_difference, quadrature_weights
from attngeo.variational.sphere import exponential, project, tangent_basis, tangent_projection


def _terms(lagrangian: Lagrangian, path: Tensor, step: float, points: int) -> tuple[Tensor, Tensor, Tensor]:
    """Interior positions, dL/dx and d/dt dL/dxdot there, each [T - points + 1, N, D]."""
    half = points // 2
    x = path[half : path.shape[0] - half]
    v = central_difference(path, step, 1, points)
    acceleration = central_difference(path, step, 2, points)

    def total(position: Tensor, velocity: Tensor) -> Tensor:
        return lagrangian(position, velocity).sum()

    force = torch.func.grad(total, argnums=0)(x, v)
    # d/dt of the momentum by the chain rule: exact in L, so only the two stencils carry a discretisation error.
    momentum_rate = torch.func.jvp(torch.func.grad(total, argnums=1), (x, v), (v, acceleration))[1]
    return x, force, momentum_rate


def euler_lagrange_residual(lagrangian: Lagrangian, path: Tensor, step: float, points: int = 5) -> Tensor:
    """P_x (dL/dx - d/dt dL/dxdot) at the interior nodes: [T, N, D] -> [T - points + 1, N, D] (P1.c).

    On a path of an integrator of order p it is O(step^min(p, s)), s = 2 for 3 points and 4 for 5 points.
    """
    x, force, momentum_rate = _terms(lagrangian, path, step, points)
    return tangent_projection(x, force - momentum_rate)


def relative_residual(lagrangian: Lagrangian, path: Tensor, step: float, points: int = 5) -> Tensor:
    """Root mean square of the residual over that of its two terms before projection, a scalar between 0 and 1."""
    x, force, momentum_rate = _terms(lagrangian, path, step, points)
    residual = tangent_projection(x, force - momentum_rate)
    return residual.square().mean().sqrt() / (force.square().mean().sqrt() + momentum_rate.square().mean().sqrt())


def first_variation_formula(lagrangian: Lagrangian, path: Tensor, step: float, variation: Tensor) -> Tensor:
    """Integral of <residual, variation> by Simpson's rule, for a variation that vanishes at both ends (P1.c).

    The nodes next to the ends take the 3-point residual: its error O(step^2) meets a weight and a variation that are
    O(step) each, so the whole is of order 4 on a smooth path. Paths need 5 nodes or more.
    """
    inner = euler_lagrange_residual(lagrangian, path, step, points=5)
    first = euler_lagrange_residual(lagrangian, path[:3], step, points=3)
    last = euler_lagrange_residual(lagrangian, path[-3:], step, points=3)
    weights = quadrature_weights(path.shape[0] - 1, step).to(path)[1:-1]
    return weights @ (torch.cat([first, inner, last]) * variation[1:-1]).sum(dim=(-2, -1))


def midpoint_action(
    lagrangian: Lagrangian, path: Tensor, step: float, terminal: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Action by the midpoint rule with chord velocities plus `terminal(x(T))`, a scalar; order 2.

    Unlike central differences, chords see a path that alternates from node to node, so the minimiser is unique.
    The chord is tangent at the projected midpoint.
    """
    middle = project(path[1:] + path[:-1])
    value = step * lagrangian(middle, (path[1:] - path[:-1]) / step).sum()
    return value if terminal is None else value + terminal(path[-1])


@dataclass(frozen=True)
class Minimiser:
    """What Newton's method reached: a path [T, N, D], and how well its gradient vanishes there."""

    path: Tensor
    value: float
    gradient_norm: float
    iterations: int
    converged: bool


def minimise(
    functional: Callable[[Tensor], Tensor], start: Tensor, *, tolerance: float = 1e-10, max_iterations: int = 60
) -> Minimiser:
    """Minimise a functional of a path [T, N, D] with x(0) held and all other nodes free, by damped Newton steps.

    Each step works in normal coordinates around the current path, so its Hessian is the Riemannian one. The functional
    may couple neighbouring nodes only: then the Hessian is block tridiagonal (`_block_tridiagonal_hessian`).
    Not converging is reported in the result, never raised: `converged` is gradient norm <= tolerance.
    """
    path, stuck = start, False
    for iteration in range(max_iterations + 1):
        chart = _chart(path)
        gradient_of = torch.func.grad(_in_chart(functional, chart))
        nodes, tokens, dimension = path.shape
        block = tokens * (dimension - 1)
        gradient = gradient_of(path.new_zeros((nodes - 1) * block))
        gradient_norm = float(torch.linalg.vector_norm(gradient))
        if gradient_norm <= tolerance or stuck or iteration == max_iterations:
            break
        hessian = _block_tridiagonal_hessian(gradient_of, nodes - 1, block, path)
        direction = _descent_direction(hessian, gradient)
        path, stuck = _line_search(functional, chart, direction, float(gradient @ direction), path)
    return Minimiser(path, float(functional(path)), gradient_norm, iteration, gradient_norm <= tolerance)


_Chart = Callable[[Tensor], Tensor]


def _chart(path: Tensor) -> _Chart:
    """Normal coordinates [(T - 1) N (D - 1)] around a path whose first node is held."""
    basis = tangent_basis(path[1:])

    def at(coordinates: Tensor) -> Tensor:
        tangent = (basis @ coordinates.reshape(*basis.shape[:-2], -1, 1)).squeeze(-1)
        return torch.cat([path[:1], exponential(path[1:], tangent)])

    return at


def _in_chart(functional: Callable[[Tensor], Tensor], chart: _Chart) -> Callable[[Tensor], Tensor]:
    return lambda coordinates: functional(chart(coordinates))


def _block_tridiagonal_hessian(gradient_of: _Chart, blocks: int, block: int, like: Tensor) -> Tensor:
    """Hessian at 0 from 3 x block products, [blocks x block, blocks x block].

    Blocks whose numbers agree modulo 3 have no common neighbour, so one product serves all of them.
    """
    size = blocks * block
    position = torch.arange(size, device=like.device)
    probe_of = position // block % 3 * block + position % block
    probes = torch.zeros(3 * block, size, dtype=like.dtype, device=like.device)
    probes[probe_of, position] = 1
    zero = like.new_zeros(size)
    products = torch.func.vmap(lambda probe: torch.func.jvp(gradient_of, (zero,), (probe,))[1])(probes)
    neighbours = (position[:, None] // block - position // block).abs() <= 1
    hessian = torch.where(neighbours, products[probe_of].mT, 0)
    return (hessian + hessian.mT) / 2


def _descent_direction(hessian: Tensor, gradient: Tensor) -> Tensor:
    """-(H + mu I)^-1 g, mu the first of 0 and a rising series that makes H + mu I positive definite."""
    identity = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    scale = float(hessian.abs().amax())
    for damping in (0.0, *(1e-3 * 4**k * scale for k in range(12))):
        factor, failed = torch.linalg.cholesky_ex(hessian + damping * identity)
        if not failed:
            return -torch.cholesky_solve(gradient.unsqueeze(-1), factor).squeeze(-1)
    # Only a Hessian with NaN gets here; the line search then refuses the step and the result says so.
    return torch.full_like(gradient, torch.nan)


def _line_search(
    functional: Callable[[Tensor], Tensor], chart: _Chart, direction: Tensor, slope: float, path: Tensor
) -> tuple[Tensor, bool]:
    """Halve the Newton step until the functional falls enough; returns the path, and whether no step did."""
    value = float(functional(path))
    # Close to the minimum rounding hides the fall that the step still brings.
    rounding = 1e-14 * max(abs(value), 1.0)
    for halvings in range(20):
        length = 0.5**halvings
        candidate = chart(length * direction)
        if float(functional(candidate)) <= value + 1e-4 * length * slope + rounding:
            return candidate, False
    return path, True
