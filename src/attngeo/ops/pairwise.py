"""What the pairwise kernels share: their shapes, their products with values in plain torch, their cost."""

import torch
from torch import Tensor

from attngeo.ops.precision import product, without_autocast


def check_shapes(q: Tensor, k: Tensor, v: Tensor | None = None) -> None:
    """ValueError unless q is [..., N, D], k [..., M, D] and v [..., M, V]; leading axes may broadcast."""
    if q.dim() < 2 or k.dim() < 2 or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"expected [..., N, D] and [..., M, D] with one D, not {tuple(q.shape)} and {tuple(k.shape)}")
    if v is not None and (v.dim() < 2 or v.shape[-2] != k.shape[-2]):
        raise ValueError(f"expected values [..., {k.shape[-2]}, V], one row for each row of k, not {tuple(v.shape)}")


def broadcast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors with all leading axes, those before the last two, expanded to their common shape."""
    leading = torch.broadcast_shapes(*(tensor.shape[:-2] for tensor in tensors))
    return tuple(tensor.expand(*leading, *tensor.shape[-2:]) for tensor in tensors)


def weighted_sum(exponent: Tensor, v: Tensor, normalize: bool) -> Tensor:
    """exp(exponent) v, with `normalize` softmax(exponent) v: [...,N,M], [...,M,V] -> [...,N,V]."""
    weights = torch.softmax(exponent, dim=-1) if normalize else torch.exp(exponent)
    with without_autocast(v):
        return product(weights, v)


def kernel_macs(rows: int, landmarks: int, channels: int) -> int:
    """Multiply-accumulates of a kernel matrix: one for each coordinate's term of a distance; exponentials are free."""
    return rows * landmarks * channels


def matmul_macs(rows: int, landmarks: int, channels: int, values: int) -> int:
    """Multiply-accumulates of a kernel matrix and of its product with values."""
    return kernel_macs(rows, landmarks, channels) + rows * landmarks * values
