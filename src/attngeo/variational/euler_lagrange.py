"""Projected Euler-Lagrange residual of a discrete path, and direct minimisation of an action (P1.c).

Stationarity under tangent variations phi that vanish at both ends reads, after integrating by parts,

    dJ = integral of <dL/dx - d/dt dL/dxdot, phi> dt = 0  for all phi with phi_i orthogonal to x_i,

that is P_x (dL/dx - d/dt dL/dxdot) = 0, or dL/dx - d/dt dL/dxdot = lambda x with a multiplier of the constraint
|x_i| = 1 for every token. At an end that is free to move the boundary term of the parts must vanish as well: P_x
dL/dxdot = 0, with the derivative of what is added there (transversality). The projection also makes the residual
independent of how L is extended off the sphere. For L = |xdot|^2 / 2 + |grad E|^2 / 2 it says P_x xddot =
grad(|grad E|^2 / 2), which xdot = grad E satisfies: its covariant acceleration is Hess E grad E.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attngeo.variational.flow import along_path, path_times
from attngeo.variational.lagrangian import (
    Lagrangian,
    Terminal,
    central_difference,
    path_derivative,
    path_velocity,
    quadrature_weights,
)
from attngeo.variational.sphere import dot, exponential, project, tangent_basis, tangent_projection


def _terms(lagrangian: Lagrangian, t: Tensor, x: Tensor, v: Tensor, acceleration: Tensor) -> tuple[Tensor, Tensor]:
    """dL/dx and d/dt dL/dxdot at nodes [T, N, D], each [T, N, D]."""

    def terms(t: Tensor, v: Tensor, acceleration: Tensor, x: Tensor) -> Tensor:
        def total(time: Tensor, position: Tensor, velocity: Tensor) -> Tensor:
            return lagrangian(time, position, velocity).sum()

        force = torch.func.grad(total, argnums=1)(t, x, v)
        # d/dt of the momentum by the chain rule: exact in L, so only the two stencils carry a discretisation error.
        tangents = (torch.ones_like(t), v, acceleration)
        return torch.stack([force, torch.func.jvp(torch.func.grad(total, argnums=2), (t, x, v), tangents)[1]], dim=1)

    force, momentum_rate = along_path(terms, t, v, acceleration, x).unbind(dim=1)
    return force, momentum_rate


def _interior_terms(lagrangian: Lagrangian, path: Tensor, step: float, points: int) -> tuple[Tensor, Tensor, Tensor]:
    """Interior positions, dL/dx and d/dt dL/dxdot there, each [T - points + 1, N, D]."""
    inner = slice(points // 2, path.shape[0] - points // 2)
    first, second = (central_difference(path, step, derivative, points) for derivative in (1, 2))
    times = path_times(len(path), step, path)[inner]
    force, momentum_rate = _terms(lagrangian, times, path[inner], first, second)
    return path[inner], force, momentum_rate


def euler_lagrange_residual(lagrangian: Lagrangian, path: Tensor, step: float, points: int = 5) -> Tensor:
    """P_x (dL/dx - d/dt dL/dxdot) at the interior nodes: [T, N, D] -> [T - points + 1, N, D] (P1.c).

    On a path of an integrator of order p it is O(step^min(p, s)), s = 2 for 3 points and 4 for 5 points.
    """
    x, force, momentum_rate = _interior_terms(lagrangian, path, step, points)
    return tangent_projection(x, force - momentum_rate)


def multiplier(lagrangian: Lagrangian, path: Tensor, step: float, points: int = 5) -> Tensor:
    """lambda = <x, dL/dx - d/dt dL/dxdot> of every token at the interior nodes: [T, N, D] -> [T - points + 1, N].

    dL/dx - d/dt dL/dxdot - lambda x is the projected residual. As <x, xddot> = -|xdot|^2 on the sphere, a Lagrangian
    |xdot|^2 / 2 + U(x) has lambda = |xdot|^2 + <x, dU/dx>. It depends on how L is extended off the sphere.
    """
    x, force, momentum_rate = _interior_terms(lagrangian, path, step, points)
    return dot(x, force - momentum_rate).squeeze(-1)


def relative_residual(lagrangian: Lagrangian, path: Tensor, step: float, points: int = 5) -> Tensor:
    """Root mean square of the residual over that of its two terms before projection, a scalar between 0 and 1."""
    x, force, momentum_rate = _interior_terms(lagrangian, path, step, points)
    residual = tangent_projection(x, force - momentum_rate)
    return residual.square().mean().sqrt() / (force.square().mean().sqrt() + momentum_rate.square().mean().sqrt())


def end_momenta(lagrangian: Lagrangian, path: Tensor, step: float, terminal: Terminal | None = None) -> Tensor:
    """P_x dL/dxdot at the first node and P_x (dL/dxdot + d terminal / dx) at the last: [T, N, D] -> [2, N, D].

    Transversality: on a stationary path it is 0 at every end that is free. Velocities are those of the path, order 4.
    """
    ends = torch.tensor([0, -1], device=path.device)
    times, x, v = path_times(len(path), step, path)[ends], path[ends], path_velocity(path, step)[ends]
    momenta = torch.func.grad(lambda velocity: lagrangian(times, x, velocity).sum())(v)
    if terminal is not None:
        momenta = torch.stack([momenta[0], momenta[1] + torch.func.grad(terminal)(x[1])])
    return tangent_projection(x, momenta)


def first_variation_formula(
    lagrangian: Lagrangian, path: Tensor, step: float, variation: Tensor, terminal: Terminal | None = None
) -> Tensor:
    """First variation of the action plus `terminal(x(T))` by parts, a scalar; order 4 on a smooth path (P1.c).

    The integral of <residual, variation> by Simpson's rule plus <momentum, variation> at the end, minus it at the
    start. A variation [T, N, D] may move both ends; where it is 0 their momenta do not count.
    """
    velocity, acceleration = (path_derivative(path, step, derivative) for derivative in (1, 2))
    force, momentum_rate = _terms(lagrangian, path_times(len(path), step, path), path, velocity, acceleration)
    # One-sided second derivatives are of order 3, but their nodes have a weight O(step).
    density = (tangent_projection(path, force - momentum_rate) * variation).sum(dim=(-2, -1))
    start, end = end_momenta(lagrangian, path, step, terminal)
    boundary = (end * variation[-1]).sum() - (start * variation[0]).sum()
    return quadrature_weights(path.shape[0] - 1, step).to(path) @ density + boundary


def midpoint_action(lagrangian: Lagrangian, path: Tensor, step: float, terminal: Terminal | None = None) -> Tensor:
    """Action by the midpoint rule with chord velocities plus `terminal(x(T))`, a scalar; order 2.

    Unlike central differences, chords see a path that alternates from node to node, so the minimiser is unique.
    The chord is tangent at the projected midpoint.
    """
    middle = project(path[1:] + path[:-1])
    times = path_times(len(middle), step, path) + step / 2
    value = step * lagrangian(times, middle, (path[1:] - path[:-1]) / step).sum()
    return value if terminal is None else value + terminal(path[-1])


@dataclass(frozen=True)
class Minimiser:
    """What a minimisation reached: a path [T, N, D], and the norm of the functional's gradient there.

    Not converging is never raised: `converged` says whether that norm is at most the tolerance.
    """

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


def response(functional: Callable[[Tensor], Tensor], extra: Callable[[Tensor], Tensor], path: Tensor) -> Tensor:
    """d/d epsilon at 0 of the minimiser of functional + epsilon extra, tangent at the minimiser `path`: [T, N, D].

    By perturbation theory it is -H^-1 grad extra with the Hessian H of the functional, x(0) held as in `minimise`.
    """
    chart = _chart(path)
    nodes, tokens, dimension = path.shape
    block = tokens * (dimension - 1)
    zero = path.new_zeros((nodes - 1) * block)
    hessian = _block_tridiagonal_hessian(torch.func.grad(_in_chart(functional, chart)), nodes - 1, block, path)
    # A singular Hessian gives numbers that are not finite, and no exception.
    shift = -torch.linalg.solve_ex(hessian, torch.func.grad(_in_chart(extra, chart))(zero)).result
    tangent = (tangent_basis(path[1:]) @ shift.reshape(nodes - 1, tokens, dimension - 1, 1)).squeeze(-1)
    return torch.cat([torch.zeros_like(path[:1]), tangent])


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
