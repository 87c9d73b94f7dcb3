"""Action functionals of discrete paths on the sphere and their first variation (P1.b, P1.c).

A Lagrangian maps times [...], positions and velocities [..., N, D] to [...]. The energy-dissipation Lagrangian
completes a square,

    |xdot|^2 / 2 + |grad E|^2 / 2 = |xdot - grad E|^2 / 2 + <xdot, grad E> = |xdot - grad E|^2 / 2 + dE/dt,

so that A(x) - E(x(T)) + E(x(0)) = integral of |xdot - grad E|^2 / 2 >= 0, and it is 0 exactly when xdot = grad E
(P1.b): among all paths from x(0), the gradient flow alone minimises A - E(x(T)), with the value -E(x(0)). For
xdot_i = c_i grad_i E the left side is the integral of sum_i (c_i - 1)^2 |grad_i E|^2 / 2, which is why the 1 / N flow
(c = N) and softmax attention are controls.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from attngeo.variational.flow import Velocity, along_path, energy, energy_gradient, path_times
from attngeo.variational.sphere import exponential, tangent_projection

Lagrangian = Callable[[Tensor, Tensor, Tensor], Tensor]
"""L(t, x, xdot): times [...], positions and velocities [..., N, D] -> [...], any function that torch differentiates."""

Terminal = Callable[[Tensor], Tensor]
"""A function of the last node, [N, D] -> scalar, that is added to an action whose end is free."""


def kinetic(t: Tensor, x: Tensor, v: Tensor) -> Tensor:
    """|xdot|^2 / 2, whose stationary paths are great circles run at constant speed."""
    return v.square().sum(dim=(-2, -1)) / 2


def energy_dissipation(beta: float) -> Lagrangian:
    """|xdot|^2 / 2 + |grad E|^2 / 2, the nontrivial functional that gradient-flow attention satisfies (P1.b)."""
    return lambda t, x, v: (v.square() + energy_gradient(x, beta).square()).sum(dim=(-2, -1)) / 2


def deviation(velocity: Velocity) -> Lagrangian:
    """|xdot - F(x)|^2 / 2, minimised by the flow of any F with action 0: true of every flow, hence no evidence."""
    return lambda t, x, v: (v - velocity(t, x)).square().sum(dim=(-2, -1)) / 2


def stencil_weights(offsets: list[int], derivative: int) -> Tensor:
    """Weights w with sum_k w_k f(t + offsets_k h) = h^derivative f^(derivative)(t) + higher order, float64 [points]."""
    points = torch.tensor(offsets, dtype=torch.float64)
    powers = torch.stack([points**k for k in range(len(offsets))])
    right = torch.zeros(len(offsets), dtype=torch.float64)
    right[derivative] = math.factorial(derivative)
    return torch.linalg.solve(powers, right)


def central_difference(path: Tensor, step: float, derivative: int, points: int) -> Tensor:
    """First or second time derivative at the interior nodes: [T, N, D] -> [T - points + 1, N, D].

    3 points give order 2 and 5 points order 4, for both derivatives. ValueError if the path has too few nodes.
    """
    if points not in (3, 5) or derivative not in (1, 2):
        raise ValueError(f"no central stencil of {points} points for derivative {derivative}: 3 or 5 points, 1 or 2")
    nodes = path.shape[0]
    if nodes < points:
        raise ValueError(f"a path of {nodes} nodes is too short for a stencil of {points} points")
    half = points // 2
    weights = stencil_weights(list(range(-half, half + 1)), derivative).to(path) / step**derivative
    interior = nodes - points + 1
    return sum((weight * path[k : k + interior] for k, weight in enumerate(weights)), torch.zeros_like(path[:interior]))


def path_derivative(path: Tensor, step: float, derivative: int) -> Tensor:
    """First or second time derivative at every node by five-point stencils, one-sided at the ends, [T, N, D].

    The order is 4, but 3 for the second derivative at the two nodes next to each end.
    """
    interior = central_difference(path, step, derivative, points=5)
    # Read backwards in time the same weights give the derivative times (-1)^derivative.
    sign = (-1) ** derivative
    ends = {}
    for node in (0, 1):
        weights = stencil_weights([k - node for k in range(5)], derivative).to(path) / step**derivative
        ends[node] = torch.tensordot(weights, path[:5], dims=1)
        ends[-1 - node] = sign * torch.tensordot(weights, path[-5:].flip(0), dims=1)
    return torch.cat([ends[0][None], ends[1][None], interior, ends[-2][None], ends[-1][None]])


def path_velocity(path: Tensor, step: float) -> Tensor:
    """Velocity at every node, of order 4 (`path_derivative`): [T, N, D] -> [T, N, D]."""
    return path_derivative(path, step, 1)


def quadrature_weights(intervals: int, step: float) -> Tensor:
    """Composite Simpson weights of order 4, float64 [intervals + 1]; an odd count ends with Simpson's 3/8 rule."""
    if intervals < 2:
        raise ValueError(f"Simpson's rule needs two intervals or more, got {intervals}")
    weights = torch.zeros(intervals + 1, dtype=torch.float64)
    even = intervals if intervals % 2 == 0 else intervals - 3
    for k in range(0, even, 2):
        weights[k : k + 3] += torch.tensor([1.0, 4.0, 1.0], dtype=torch.float64) * (step / 3)
    if even != intervals:
        weights[even:] += torch.tensor([1.0, 3.0, 3.0, 1.0], dtype=torch.float64) * (3 * step / 8)
    return weights


def action(
    lagrangian: Lagrangian,
    path: Tensor,
    step: float,
    velocities: Tensor | None = None,
    terminal: Terminal | None = None,
) -> Tensor:
    """Integral of L over a path [T, N, D] from time 0 by Simpson's rule, plus `terminal(x(T))`; a scalar.

    Without `velocities` [T, N, D] they come from the path itself (`path_velocity`), so any path has an action.
    """
    velocities = path_velocity(path, step) if velocities is None else velocities
    weights = quadrature_weights(path.shape[0] - 1, step).to(path)
    value = weights @ along_path(lagrangian, path_times(len(path), step, path), path, velocities)
    return value if terminal is None else value + terminal(path[-1])


def energy_imbalance(path: Tensor, step: float, beta: float, velocities: Tensor | None = None) -> Tensor:
    """A - E(x(T)) + E(x(0)) for the energy-dissipation Lagrangian: 0 on the gradient flow, positive elsewhere (P1.b).

    Given the flow's own velocities the error falls at the integrator's order p. With velocities from the path it is the
    integral of |xdot - grad E|^2 / 2, quadratic in the integrator's error, so it falls at min(2 p, 4).
    """
    value = action(energy_dissipation(beta), path, step, velocities)
    return value - energy(path[-1], beta) + energy(path[0], beta)


def running_imbalance(path: Tensor, step: float, beta: float, velocities: Tensor | None = None) -> Tensor:
    """`energy_imbalance` of the path up to every second node, and up to the last: [T, N, D] -> [(T - 1) // 2 + 1].

    At one time alone the signed imbalance may pass through zero and feign another order; its maximum over time cannot.
    """
    velocities = path_velocity(path, step) if velocities is None else velocities
    density = along_path(energy_dissipation(beta), path_times(len(path), step, path), path, velocities)
    pairs = (path.shape[0] - 1) // 2
    left, middle, right = density[: 2 * pairs : 2], density[1 : 2 * pairs : 2], density[2 : 2 * pairs + 1 : 2]
    running = ((left + 4 * middle + right) * (step / 3)).cumsum(dim=0)
    gained = along_path(lambda x: energy(x, beta), path[2 : 2 * pairs + 1 : 2]) - energy(path[0], beta)
    return torch.cat([running - gained, energy_imbalance(path, step, beta, velocities)[None]])


def varied_path(path: Tensor, variation: Tensor, epsilon: float | Tensor) -> Tensor:
    """Path moved along geodesics by epsilon times a tangent variation [T, N, D]."""
    return exponential(path, epsilon * variation)


def first_variation(
    lagrangian: Lagrangian, path: Tensor, step: float, variation: Tensor, terminal: Terminal | None = None
) -> Tensor:
    """d/d epsilon at 0 of the action of `varied_path`, by forward automatic differentiation, a scalar (P1.c)."""
    return torch.func.jvp(
        lambda epsilon: action(lagrangian, varied_path(path, variation, epsilon), step, terminal=terminal),
        (path.new_zeros(()),),
        (path.new_ones(()),),
    )[1]


def smooth_variation(path: Tensor, generator: torch.Generator, modes: int = 3) -> Tensor:
    """Random tangent field along a path, zero at both ends and of unit root mean square per token, [T, N, D].

    P_x of sum_k c_k sin(k pi t / T) with Gaussian c_k [N, D], so that it is smooth in time and the same function of
    time for every step.
    """
    nodes, tokens, dimension = path.shape
    coefficients = torch.randn(modes, tokens, dimension, generator=generator, dtype=torch.float64).to(path)
    time = torch.linspace(0, math.pi, nodes, dtype=torch.float64).to(path)
    orders = torch.arange(1, modes + 1, dtype=time.dtype, device=time.device)
    field = tangent_projection(path, torch.tensordot(torch.sin(time[:, None] * orders), coefficients, dims=1))
    return field / field.square().sum(dim=-1).mean().sqrt()
