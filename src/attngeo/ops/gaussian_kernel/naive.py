"""The Gaussian kernel in plain torch."""

import torch
from torch import Tensor

from attngeo.ops.precision import without_autocast


def squared_distance(q: Tensor, k: Tensor) -> Tensor:
    """|q_n - k_m|^2 by one matrix product: [...,N,D], [...,M,D] -> [...,N,M].

    |q|^2 + |k|^2 - 2 q.k loses digits when the tokens are far from the origin, so both sides are moved by the mean of
    the keys first; distances do not depend on that mean, so it carries no gradient.
    """
    if k.shape[-2] > 0:
        centre = k.detach().mean(dim=-2, keepdim=True)
        q, k = q - centre, k - centre
    with without_autocast(q):
        products = q @ k.mT
    squares = q.square().sum(-1).unsqueeze(-1) + k.square().sum(-1).unsqueeze(-2)
    return (squares - 2.0 * products).clamp_min(0.0)


def gaussian_kernel(q: Tensor, k: Tensor) -> Tensor:
    """exp(-|q_n - k_m|^2 / 2): [...,N,D], [...,M,D] -> [...,N,M]."""
    return torch.exp(-0.5 * squared_distance(q, k))
