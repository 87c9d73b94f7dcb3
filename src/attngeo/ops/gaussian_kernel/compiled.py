"""The Gaussian kernel through the extension's registered operators, whose gradients are one fused pass each."""

import torch
from torch import Tensor


def gaussian_kernel(q: Tensor, k: Tensor) -> Tensor:
    """exp(-|q_n - k_m|^2 / 2): [...,N,D], [...,M,D] -> [...,N,M], float32 or float64."""
    kernel: Tensor = torch.ops.attngeo.gaussian_kernel(q, k)
    return kernel


def gaussian_kernel_matmul(q: Tensor, k: Tensor, v: Tensor, normalize: bool) -> Tensor:
    """The kernel times v [...,M,V] without the kernel in memory, forward or backward: -> [...,N,V]."""
    output: Tensor = torch.ops.attngeo.gaussian_kernel_matmul(q, k, v, normalize)[0]
    return output
