"""Attention as a flow of N tokens on the sphere, its energy, and integrators with known orders (P1.a, P1.b).

Sign and scale of the energy. With E(x) = 1 / (2 beta N^2) sum_ij exp(beta <x_i, x_j>) the ambient derivative is

    dE/dx_i = (1 / N^2) sum_j exp(beta <x_i, x_j>) x_j,

because x_i enters the double sum twice (the term i = j included: d/dx_i exp(beta <x_i, x_i>) = 2 beta x_i exp(...)),
which cancels the 2. Hence xdot_i = P_{x_i} (1 / N^2) sum_j exp(beta <x_i, x_j>) x_j is *exactly* xdot = grad E, an
ascent: dE/dt = |grad E|^2 >= 0 and tokens cluster. Scaling by 1 / N instead gives xdot = N grad E, and the softmax
gives xdot_i = c_i(x) grad_i E with c_i = N^2 / sum_j exp(beta <x_i, x_j>): the same curves' tangent directions token by
token, but another speed, and therefore not the gradient flow of E.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from attngeo.variational.sphere import dot, exponential, project, pull_back, require_points, tangent_projection

Velocity = Callable[[Tensor, Tensor], Tensor]
"""Tangent velocity F(t, x) of a configuration: times [...], unit rows [..., N, D] -> [..., N, D]."""

Weight = Tensor | Callable[[Tensor], Tensor] | None
"""Query, key or value map: [E, D] of one head, [H, E, D] of H heads, a function from a time to either, None for I."""

# Pair weights (8 MiB in float64) that are in memory at once when a function is evaluated along a path.
_PAIRS_AT_ONCE = 2**20


def along_path(function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    """function(*arguments) of tensors over the nodes of a path, the last [T, N, D], computed by blocks of nodes.

    N x N weights then exist for a few nodes at once, and memory grows with T by the size of the path alone.
    """
    nodes = max(1, _PAIRS_AT_ONCE // arguments[-1].shape[-2] ** 2)
    if len(arguments[-1]) <= nodes:
        return function(*arguments)
    return torch.cat([function(*parts) for parts in zip(*(each.split(nodes) for each in arguments), strict=True)])


def energy(x: Tensor, beta: float) -> Tensor:
    """E(x) = 1 / (2 beta N^2) sum_ij exp(beta <x_i, x_j>), [..., N, D] -> [...]; it never decreases along the flow."""
    tokens = x.shape[-2]
    return (beta * x @ x.mT).exp_().sum(dim=(-2, -1)) / (2 * beta * tokens**2)


def energy_gradient(x: Tensor, beta: float) -> Tensor:
    """Riemannian gradient of `energy`: P_{x_i} (1 / N^2) sum_j exp(beta <x_i, x_j>) x_j, [..., N, D]."""
    return tangent_projection(x, (beta * x @ x.mT).exp_() @ x / x.shape[-2] ** 2)


def gradient_flow(beta: float) -> Velocity:
    """Unnormalised attention with Q = K = V = I scaled by 1 / N^2, so that xdot = grad E exactly (P1.b)."""
    return lambda t, x: energy_gradient(x, beta)


def one_over_n_flow(beta: float) -> Velocity:
    """Unnormalised attention scaled by 1 / N: N grad E, a control on which the energy balance must fail."""
    return lambda t, x: x.shape[-2] * energy_gradient(x, beta)


def _mapped(x: Tensor, weight: Weight, t: Tensor) -> Tensor:
    """Tokens [..., N, D] under the maps of every head, [..., H, N, E]."""
    rows = x.unsqueeze(-3)
    if weight is None:
        return rows
    if callable(weight):
        heads = torch.stack([_heads(weight(time), x) for time in t.reshape(-1)])
        return rows @ heads.reshape(*t.shape, *heads.shape[1:]).mT
    return rows @ _heads(weight, x).mT


def _heads(weight: Tensor, x: Tensor) -> Tensor:
    heads = weight if weight.ndim == 3 else weight.unsqueeze(0)
    if heads.ndim != 3 or heads.shape[-1] != x.shape[-1] or heads.dtype != x.dtype:
        raise ValueError(
            f"a map must be [E, {x.shape[-1]}] or [H, E, {x.shape[-1]}] of {x.dtype}, as the tokens are, "
            f"not {list(weight.shape)} of {weight.dtype}"
        )
    return heads


def attention_output(
    x: Tensor,
    beta: float,
    query: Weight = None,
    key: Weight = None,
    value: Weight = None,
    *,
    t: Tensor | None = None,
    normalised: bool = True,
) -> Tensor:
    """Attention before projection, sum over heads and j of w_ij V x_j; [..., N, D] -> [..., N, D].

    w_ij = softmax_j(beta <Q x_i, K x_j>), or exp(beta <Q x_i, K x_j>) / N^2 if not `normalised`. It takes N x N
    numbers a head and configuration, never N x N x D. Maps that depend on time take `t` [...], 0 by default.
    """
    time = x.new_zeros(x.shape[:-2]) if t is None else t
    # In place, since a second array of all pairs goes back to the system after each call: its pages cost as much again
    # as the arithmetic. The shift cancels in the quotient, derivatives included.
    weights = _mapped(beta * x, query, time) @ _mapped(x, key, time).mT
    if normalised and x.shape[-2]:
        weights -= weights.detach().amax(dim=-1, keepdim=True)
    weights = weights.exp_()
    total = weights.sum(dim=-1, keepdim=True) if normalised else x.shape[-2] ** 2
    return (weights @ _mapped(x, value, time) / total).sum(dim=-3)


def softmax_flow(beta: float, query: Weight = None, key: Weight = None, value: Weight = None) -> Velocity:
    """Softmax attention projected to the tangent space at each token (P1.a); not grad E even for Q = K = V = I."""
    return lambda t, x: tangent_projection(x, attention_output(x, beta, query, key, value, t=t))


def unnormalised_flow(beta: float, query: Weight = None, key: Weight = None, value: Weight = None) -> Velocity:
    """Attention with weights exp(beta <Q x_i, K x_j>) / N^2, projected.

    It is the gradient of the sum over heads of 1 / (2 beta N^2) sum_ij exp(beta <Q x_i, K x_j>) where every head has
    V = K^T Q = Q^T K.
    """
    return lambda t, x: tangent_projection(x, attention_output(x, beta, query, key, value, t=t, normalised=False))


def projected_euler_step(velocity: Velocity, t: Tensor, x: Tensor, step: float) -> Tensor:
    """Straight step, then renormalise, as a layer with a residual connection and a norm does; order 1."""
    return project(x + step * velocity(t, x))


def exponential_euler_step(velocity: Velocity, t: Tensor, x: Tensor, step: float) -> Tensor:
    """Step along the geodesic; order 1, and it differs from the projected step by O(step^3)."""
    return _geodesic_end(x, step * velocity(t, x))


def _geodesic_end(x: Tensor, v: Tensor) -> Tensor:
    # Rounding of |x| makes v slightly radial, which the flow may amplify from step to step: it is taken off each time.
    return project(exponential(x, v))


def _runge_kutta(rate: Velocity, first: Tensor, t: Tensor, x: Tensor, step: float) -> Tensor:
    """Increment of one classical Runge-Kutta step of order 4 in a linear space; `first` is the rate at (t, x)."""
    second = rate(t + step / 2, x + step / 2 * first)
    third = rate(t + step / 2, x + step / 2 * second)
    fourth = rate(t + step, x + step * third)
    return step / 6 * (first + 2 * second + 2 * third + fourth)


def projected_rk4_step(velocity: Velocity, t: Tensor, x: Tensor, step: float) -> Tensor:
    """Classical Runge-Kutta step, then renormalise; order 4.

    Stages leave the sphere, so the field is extended by x -> F(x / |x|). It is orthogonal to x everywhere, the sphere
    is invariant under the extended equation, and projecting onto an invariant manifold keeps the order.
    """
    return project(x + _runge_kutta(lambda time, y: velocity(time, project(y)), velocity(t, project(x)), t, x, step))


def lie_rk4_step(velocity: Velocity, t: Tensor, x: Tensor, step: float) -> Tensor:
    """Lie-group Runge-Kutta step (Runge-Kutta-Munthe-Kaas) with the rotations of each token's sphere; order 4.

    exponential(x, u) = exp(u x^T - x u^T) x is the rotation of x by an element u of the algebra so(D), tangent at x.
    The equation of u is u' = dexp_u^-1 F, where the inverse is known in closed form (`pull_back`): the classical scheme
    solves it from u = 0 in the linear space of tangent vectors, and no stage leaves the sphere.
    """

    def rate(time: Tensor, u: Tensor) -> Tensor:
        y = exponential(x, u)
        return pull_back(x, u, y, velocity(time, y))

    # At u = 0 the differential is the identity.
    return _geodesic_end(x, _runge_kutta(rate, velocity(t, x), t, torch.zeros_like(x), step))


def unprojected_euler_step(velocity: Velocity, t: Tensor, x: Tensor, step: float) -> Tensor:
    """Straight step that never returns to the sphere: a control whose norms grow by O(step) over a fixed time."""
    return x + step * velocity(t, project(x))


STEPS: dict[str, Callable[[Velocity, Tensor, Tensor, float], Tensor]] = {
    "projected_euler": projected_euler_step,
    "exponential_euler": exponential_euler_step,
    "projected_rk4": projected_rk4_step,
    "lie_rk4": lie_rk4_step,
    "unprojected_euler": unprojected_euler_step,
}
"""Integrators by name."""

ORDERS = {"projected_euler": 1, "exponential_euler": 1, "projected_rk4": 4, "lie_rk4": 4}
"""Order of the global error of each integrator that stays on the sphere."""


def path_times(nodes: int, step: float, like: Tensor) -> Tensor:
    """Times 0, step, ... of the nodes of a path, [nodes], with the type and device of `like`."""
    return step * torch.arange(nodes, dtype=like.dtype, device=like.device)


def integrate(velocity: Velocity, start: Tensor, step: float, steps: int, method: str = "projected_rk4") -> Tensor:
    """Path of the flow at times 0, step, ..., steps * step: [N, D] -> [steps + 1, N, D].

    ValueError if `method` is not in `STEPS`, if there are fewer than 0 steps, or if `start` holds no unit vectors.
    """
    if method not in STEPS:
        raise ValueError(f"unknown integrator {method!r}; known: {', '.join(STEPS)}")
    if steps < 0 or not math.isfinite(step):
        raise ValueError(f"{steps} steps of {step} are no path: give 0 steps or more, of a finite size")
    require_points(start, "the first configuration", "N, D")
    path = [start]
    for time in path_times(steps, step, start):
        path.append(STEPS[method](velocity, time, path[-1], step))
    return torch.stack(path)


def tangency_defect(x: Tensor, v: Tensor) -> Tensor:
    """Largest |<x_i, v_i>| over tokens, relative to the largest |v_i|; 0 for a tangent field (P1.a)."""
    return dot(x, v).abs().amax() / torch.linalg.vector_norm(v, dim=-1).amax()
