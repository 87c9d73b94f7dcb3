"""The Laplacian kernel exp(-|q - k|_1 / lambda)."""

from torch import Tensor

from attngeo.ops import backend as _backend
from attngeo.ops.laplacian_kernel import compiled, naive
from attngeo.ops.precision import compute_dtype, result_dtype


def laplacian_kernel(q: Tensor, k: Tensor, lambda_: float = 4.0, *, backend: str = "auto") -> Tensor:
    """exp(-|q_n - k_m|_1 / lambda) for every pair: [B,H,N,D], [B,H,M,D] -> [B,H,N,M].

    Leading axes broadcast. The gradient takes sign(0) = 0. Half precision is computed in float32 (see README.md).
    """
    if not lambda_ > 0:
        raise ValueError(f"lambda_ must be positive, not {lambda_}")
    if q.dim() < 2 or k.dim() < 2 or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"expected [..., N, D] and [..., M, D] with one D, not {tuple(q.shape)} and {tuple(k.shape)}")
    function = {"naive": naive, "compiled": compiled}[_backend.resolve("laplacian_kernel", backend, q, k)]
    dtype = compute_dtype(q, k)
    return function.laplacian_kernel(q.to(dtype), k.to(dtype), float(lambda_)).to(result_dtype(q, k))


__all__ = ["laplacian_kernel"]
