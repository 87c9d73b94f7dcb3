"""The Gaussian kernel exp(-|q - k|^2 / 2)."""

from torch import Tensor

from attngeo.ops import backend as _backend
from attngeo.ops.gaussian_kernel import naive
from attngeo.ops.precision import compute_dtype, result_dtype


def gaussian_kernel(q: Tensor, k: Tensor, *, backend: str = "auto") -> Tensor:
    """exp(-|q_n - k_m|^2 / 2) for every pair: [B,H,N,D], [B,H,M,D] -> [B,H,N,M].

    Tokens far from the origin lose no digits: both sides are centred first. Half precision is computed in float32.
    """
    if q.dim() < 2 or k.dim() < 2 or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"expected [..., N, D] and [..., M, D] with one D, not {tuple(q.shape)} and {tuple(k.shape)}")
    _backend.resolve("gaussian_kernel", backend, q, k)
    dtype = compute_dtype(q, k)
    return naive.gaussian_kernel(q.to(dtype), k.to(dtype)).to(result_dtype(q, k))


__all__ = ["gaussian_kernel"]
