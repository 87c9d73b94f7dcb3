"""The Gaussian kernel in plain torch."""

from typing import Any

import torch
from torch import Tensor

from attngeo.ops.backend import forward_mode
from attngeo.ops.pairwise import weighted_sum
from attngeo.ops.precision import product, without_autocast


def gaussian_kernel(q: Tensor, k: Tensor) -> Tensor:
    """exp(-|q_n - k_m|^2 / 2): [...,N,D], [...,M,D] -> [...,N,M]."""
    return torch.exp(-0.5 * squared_distance(q, k))


def gaussian_kernel_matmul(q: Tensor, k: Tensor, v: Tensor, normalize: bool) -> Tensor:
    """The kernel times v [...,M,V], its rows divided by their sums with `normalize`: -> [...,N,V]."""
    return weighted_sum(-0.5 * squared_distance(q, k), v, normalize)


def squared_distance(q: Tensor, k: Tensor) -> Tensor:
    """|q_n - k_m|^2 from the differences: [...,N,D], [...,M,D] with equal leading axes -> [...,N,M].

    |q|^2 + |k|^2 - 2 q.k, one matrix product, would lose the digits that all tokens have in common.
    """
    if forward_mode():  # which torch's cdist has no rule for: the differences take N x M x D numbers
        return (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)
    distance: Tensor = _SquaredDistance.apply(q, k)
    return distance


class _SquaredDistance(torch.autograd.Function):
    """The square of torch.cdist with its gradient written out: torch's own second derivative fails where q = k."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor) -> Tensor:
        return torch.cdist(q, k, p=2.0, compute_mode="donot_use_mm_for_euclid_dist").square()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        # sum_m grad[n,m] 2 (q_n - k_m) as sum and product, both about the mean of the keys: differences do not depend
        # on the origin, and near the tokens the fewest digits cancel.
        q, k = ctx.saved_tensors
        if k.shape[-2] > 0:
            centre = k.detach().mean(dim=-2, keepdim=True)
            q, k = q - centre, k - centre
        with without_autocast(grad):
            grad_q = q * grad.sum(-1).unsqueeze(-1) - product(grad, k)
            grad_k = k * grad.sum(-2).unsqueeze(-1) - product(grad.mT, q)
        return 2.0 * grad_q, 2.0 * grad_k
