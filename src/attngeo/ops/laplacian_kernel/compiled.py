"""The Laplacian kernel through the extension's registered operators, whose gradients are one fused pass each."""

import torch
from torch import Tensor


def laplacian_kernel(q: Tensor, k: Tensor, lambda_: float) -> Tensor:
    """exp(-|q_n - k_m|_1 / lambda): [...,N,D], [...,M,D] -> [...,N,M], float32 or float64."""
    kernel: Tensor = torch.ops.attngeo.laplacian_kernel(q, k, lambda_)
    return kernel


def laplacian_kernel_matmul(q: Tensor, k: Tensor, v: Tensor, lambda_: float, normalize: bool) -> Tensor:
    """The kernel times v [...,M,V] without the kernel in memory, forward or backward: -> [...,N,V]."""
    output: Tensor = torch.ops.attngeo.laplacian_kernel_matmul(q, k, v, lambda_, normalize)[0]
    return output
