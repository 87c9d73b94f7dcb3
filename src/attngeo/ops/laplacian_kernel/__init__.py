"""The Laplacian kernel exp(-|q - k|_1 / lambda), and its product with values."""

from types import ModuleType

from torch import Tensor

from attngeo.ops import backend as _backend
from attngeo.ops.laplacian_kernel import compiled, naive
from attngeo.ops.pairwise import broadcast, check_shapes
from attngeo.ops.precision import compute_dtype, result_dtype

_FORMS: dict[str, ModuleType] = {"naive": naive, "compiled": compiled}


def laplacian_kernel(q: Tensor, k: Tensor, lambda_: float = 4.0, *, backend: str = "auto") -> Tensor:
    """exp(-|q_n - k_m|_1 / lambda) for every pair: [B,H,N,D], [B,H,M,D] -> [B,H,N,M].

    Leading axes broadcast. The gradient takes sign(0) = 0. Half precision is computed in float32 (see README.md).
    """
    _check_lambda(lambda_)
    check_shapes(q, k)
    form = _FORMS[_backend.resolve("laplacian_kernel", backend, q, k)]
    dtype = compute_dtype(q, k)
    kernel: Tensor = form.laplacian_kernel(*broadcast(q.to(dtype), k.to(dtype)), float(lambda_))
    return kernel.to(result_dtype(q, k))


def laplacian_kernel_matmul(
    q: Tensor, k: Tensor, v: Tensor, lambda_: float = 4.0, *, normalize: bool = False, backend: str = "auto"
) -> Tensor:
    """K v for K = laplacian_kernel(q, k): [B,H,N,D], [B,H,M,D], [B,H,M,V] -> [B,H,N,V]; K is symmetric in q and k.

    With `normalize` the rows of K are divided by their sums, as softmax(-|q_n - k_m|_1 / lambda) v: exact also where
    every value of a row underflows. The compiled form keeps no N x M numbers, forward or backward (see README.md).
    """
    _check_lambda(lambda_)
    check_shapes(q, k, v)
    form = _FORMS[_backend.resolve("laplacian_kernel_matmul", backend, q, k, v)]
    dtype = compute_dtype(q, k, v)
    tensors = broadcast(q.to(dtype), k.to(dtype), v.to(dtype))
    output: Tensor = form.laplacian_kernel_matmul(*tensors, float(lambda_), normalize)
    return output.to(result_dtype(q, k, v))


def _check_lambda(lambda_: float) -> None:
    if not lambda_ > 0:
        raise ValueError(f"lambda_ must be positive, not {lambda_}")


__all__ = ["laplacian_kernel", "laplacian_kernel_matmul"]
