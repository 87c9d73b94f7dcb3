"""The Laplacian kernel through the extension's registered operator, whose gradient is one fused pass."""

import torch
from torch import Tensor


def laplacian_kernel(q: Tensor, k: Tensor, lambda_: float) -> Tensor:
    """exp(-|q_n - k_m|_1 / lambda): [...,N,D], [...,M,D] -> [...,N,M], float32 or float64."""
    leading = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    q = q.expand(*leading, *q.shape[-2:])
    k = k.expand(*leading, *k.shape[-2:])
    kernel: Tensor = torch.ops.attngeo.laplacian_kernel(q, k, lambda_)
    return kernel
