"""The Laplacian kernel in plain torch."""

import torch
from torch import Tensor

from attngeo.ops.backend import functional_derivative
from attngeo.ops.pairwise import weighted_sum

# On a GPU the gradient of cdist fills a buffer of rows x M x D numbers: rows are cut so that it stays below this.
_GPU_BUFFER_ELEMENTS = 2**26


def laplacian_kernel(q: Tensor, k: Tensor, lambda_: float) -> Tensor:
    """exp(-|q_n - k_m|_1 / lambda): [...,N,D], [...,M,D] -> [...,N,M]."""
    return torch.exp(_distance(q, k) / -lambda_)


def laplacian_kernel_matmul(q: Tensor, k: Tensor, v: Tensor, lambda_: float, normalize: bool) -> Tensor:
    """The kernel times v [...,M,V], its rows divided by their sums with `normalize`: -> [...,N,V]."""
    return weighted_sum(_distance(q, k) / -lambda_, v, normalize)


def _distance(q: Tensor, k: Tensor) -> Tensor:
    """|q_n - k_m|_1; the gradient of cdist(p=1) is sign(q - k) with sign(0) = 0, as it has to be."""
    # torch's cdist has no forward-mode derivative, and its gradient is wrong where torch.func maps it, as jacrev does.
    if functional_derivative():
        return (q.unsqueeze(-2) - k.unsqueeze(-3)).abs().sum(-1)
    per_row = max(1, k.shape[-2] * k.shape[-1] * q.shape[:-2].numel())
    rows = max(1, _GPU_BUFFER_ELEMENTS // per_row)
    if not q.is_cuda or rows >= q.shape[-2]:
        return torch.cdist(q, k, p=1.0)
    return torch.cat([torch.cdist(block, k, p=1.0) for block in q.split(rows, dim=-2)], dim=-2)
