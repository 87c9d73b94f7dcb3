"""How attention's tokens cluster: groups of near tokens, and the time to one cluster against beta (P1.b).

Under the softmax flow with Q = K = V = I equiangular tokens, <x_i, x_j> = c for all i != j, stay equiangular and obey

    dc/dt = 2 w (1 - c) (1 + (N - 1) c),  w = exp(beta c) / (exp(beta) + (N - 1) exp(beta c)),

so that their clustering time is an integral of one variable. From c = 0 it grows like exp(beta): tokens far apart are
metastable, they rest for a time that is exponential in beta and then join at a rate that is not.
"""

import math

import numpy as np
import torch
from scipy.integrate import quad
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from attngeo.variational.flow import STEPS, Velocity
from attngeo.variational.sphere import distance


def cluster_count(x: Tensor, angle: float) -> int:
    """Groups of tokens [N, D] that chains of neighbours closer than `angle` radians connect."""
    near = distance(x.unsqueeze(-2), x.unsqueeze(-3)) < angle
    return int(connected_components(near.cpu().numpy().astype(np.int8), directed=False)[0])


def equiangular_time(beta: float, tokens: int, start: float, end: float) -> float:
    """Time in which <x_i, x_j> of equiangular tokens rises from `start` to `end` under the softmax flow."""

    def slowness(c: float) -> float:
        return (math.exp(beta * (1 - c)) + tokens - 1) / (2 * (1 - c) * (1 + (tokens - 1) * c))

    return float(quad(slowness, start, end, epsrel=1e-12)[0])


def clustering_time(
    velocity: Velocity, start: Tensor, step: float, angle: float, longest: float, method: str = "projected_rk4"
) -> float:
    """First time at which every two tokens are within `angle` radians, infinity if none until `longest`.

    The last step is cut by bisection, so the time has the order of the integrator.
    """

    def apart(x: Tensor) -> bool:
        return bool(distance(x.unsqueeze(-2), x.unsqueeze(-3)).amax() > angle)

    x, time = start, torch.zeros((), dtype=start.dtype, device=start.device)
    while apart(x):
        if float(time) > longest:
            return math.inf
        last = x
        x = STEPS[method](velocity, time, last, step)
        time = time + step
    if float(time) == 0:
        return 0.0
    low, high = 0.0, step
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if apart(STEPS[method](velocity, time - step, last, middle)) else (low, middle)
    return float(time) - step + high
