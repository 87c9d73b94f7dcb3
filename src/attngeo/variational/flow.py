"""Attention as a flow of N tokens on the sphere, its energy, and integrators with known orders (P1.a, P1.b).

Sign and scale of the energy. With E(x) = 1 / (2 beta N^2) sum_ij exp(beta <x_i, x_j>) the ambient derivative is

    dE/dx_i = (1 / N^2) sum_j exp(beta <x_i, x_j>) x_j,

because x_i enters the double sum twice (the term i = j included: d/dx_i exp(beta <x_i, x_i>) = 2 beta x_i exp(...)),
which cancels the 2. Hence xdot_i = P_{x_i} (1 / N^2) sum_j exp(beta <x_i, x_j>) x_j is *exactly* xdot = grad E, an
ascent: dE/dt = |grad E|^2 >= 0 and tokens cluster. Scaling by 1 / N instead gives xdot = N grad E, and the softmax
gives xdot_i = c_i(x) grad_i E with c_i = N^2 / sum_j exp(beta <x_i, x_j>): the same curves' tangent directions token by
token, but another speed, and therefore not the gradient flow of E.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from attngeo.variational.sphere import dot, exponential, project, tangent_projection

Velocity = Callable[[Tensor], Tensor]
"""Tangent velocity of a configuration: [..., N, D] unit rows -> [..., N, D]."""


def energy(x: Tensor, beta: float) -> Tensor:
    """E(x) = 1 / (2 beta N^2) sum_ij exp(beta <x_i, x_j>), [..., N, D] -> [...]; it never decreases along the flow."""
    tokens = x.shape[-2]
    return torch.exp(beta * x @ x.mT).sum(dim=(-2, -1)) / (2 * beta * tokens**2)


def energy_gradient(x: Tensor, beta: float) -> Tensor:
    """Riemannian gradient of `energy`: P_{x_i} (1 / N^2) sum_j exp(beta <x_i, x_j>) x_j, [..., N, D]."""
    return tangent_projection(x, torch.exp(beta * x @ x.mT) @ x / x.shape[-2] ** 2)


def gradient_flow(beta: float) -> Velocity:
    """Unnormalised attention with Q = K = V = I scaled by 1 / N^2, so that xdot = grad E exactly (P1.b)."""
    return lambda x: energy_gradient(x, beta)


def one_over_n_flow(beta: float) -> Velocity:
    """Unnormalised attention scaled by 1 / N: N grad E, a control on which the energy balance must fail."""
    return lambda x: x.shape[-2] * energy_gradient(x, beta)


def attention_output(
    x: Tensor, beta: float, query: Tensor | None = None, key: Tensor | None = None, value: Tensor | None = None
) -> Tensor:
    """Softmax attention before projection, sum_j softmax_j(beta <Q x_i, K x_j>) V x_j; None is the identity [D, D]."""
    queries = x if query is None else x @ query.mT
    keys = x if key is None else x @ key.mT
    values = x if value is None else x @ value.mT
    return torch.softmax(beta * queries @ keys.mT, dim=-1) @ values


def softmax_flow(
    beta: float, query: Tensor | None = None, key: Tensor | None = None, value: Tensor | None = None
) -> Velocity:
    """Softmax attention projected to the tangent space at each token (P1.a); not grad E even for Q = K = V = I."""
    return lambda x: tangent_projection(x, attention_output(x, beta, query, key, value))


def projected_euler_step(velocity: Velocity, x: Tensor, step: float) -> Tensor:
    """Straight step, then renormalise, as a layer with a residual connection and a norm does; order 1."""
    return project(x + step * velocity(x))


def exponential_euler_step(velocity: Velocity, x: Tensor, step: float) -> Tensor:
    """Step along the geodesic; order 1, and it differs from the projected step by O(step^3)."""
    return exponential(x, step * velocity(x))


def projected_rk4_step(velocity: Velocity, x: Tensor, step: float) -> Tensor:
    """Classical Runge-Kutta step, then renormalise; order 4.

    Stages leave the sphere, so the field is extended by x -> F(x / |x|). It is orthogonal to x everywhere, the sphere
    is invariant under the extended equation, and projecting onto an invariant manifold keeps the order.
    """
    first = velocity(x)
    second = velocity(project(x + step / 2 * first))
    third = velocity(project(x + step / 2 * second))
    fourth = velocity(project(x + step * third))
    return project(x + step / 6 * (first + 2 * second + 2 * third + fourth))


def unprojected_euler_step(velocity: Velocity, x: Tensor, step: float) -> Tensor:
    """Straight step that never returns to the sphere: a control whose norms grow by O(step) over a fixed time."""
    return x + step * velocity(project(x))


STEPS: dict[str, Callable[[Velocity, Tensor, float], Tensor]] = {
    "projected_euler": projected_euler_step,
    "exponential_euler": exponential_euler_step,
    "projected_rk4": projected_rk4_step,
    "unprojected_euler": unprojected_euler_step,
}
"""Integrators by name."""

ORDERS = {"projected_euler": 1, "exponential_euler": 1, "projected_rk4": 4}
"""Order of the global error of each integrator that stays on the sphere."""


def integrate(velocity: Velocity, start: Tensor, step: float, steps: int, method: str = "projected_rk4") -> Tensor:
    """Path of the flow at times 0, step, ..., steps * step: [N, D] -> [steps + 1, N, D].

    ValueError if `method` is not in `STEPS`.
    """
    if method not in STEPS:
        raise ValueError(f"unknown integrator {method!r}; known: {', '.join(STEPS)}")
    path = [start]
    for _ in range(steps):
        path.append(STEPS[method](velocity, path[-1], step))
    return torch.stack(path)


def tangency_defect(x: Tensor, v: Tensor) -> Tensor:
    """Largest |<x_i, v_i>| over tokens, relative to the largest |v_i|; 0 for a tangent field (P1.a)."""
    return dot(x, v).abs().amax() / torch.linalg.vector_norm(v, dim=-1).amax()
