"""The Gaussian kernel exp(-|q - k|^2 / 2), and its product with values."""

from types import ModuleType

from torch import Tensor

from attngeo.ops import backend as _backend
from attngeo.ops.gaussian_kernel import compiled, naive
from attngeo.ops.pairwise import broadcast, check_shapes
from attngeo.ops.precision import compute_dtype, result_dtype

_FORMS: dict[str, ModuleType] = {"naive": naive, "compiled": compiled}


def gaussian_kernel(q: Tensor, k: Tensor, *, backend: str = "auto") -> Tensor:
    """exp(-|q_n - k_m|^2 / 2) for every pair: [B,H,N,D], [B,H,M,D] -> [B,H,N,M].

    Leading axes broadcast. Tokens far from the origin lose no digits. Half precision is computed in float32.
    """
    check_shapes(q, k)
    form = _FORMS[_backend.resolve("gaussian_kernel", backend, q, k)]
    dtype = compute_dtype(q, k)
    kernel: Tensor = form.gaussian_kernel(*broadcast(q.to(dtype), k.to(dtype)))
    return kernel.to(result_dtype(q, k))


def gaussian_kernel_matmul(
    q: Tensor, k: Tensor, v: Tensor, *, normalize: bool = False, backend: str = "auto"
) -> Tensor:
    """K v for K = gaussian_kernel(q, k): [B,H,N,D], [B,H,M,D], [B,H,M,V] -> [B,H,N,V]; K is symmetric in q and k.

    With `normalize` the rows of K are divided by their sums, as softmax(-|q_n - k_m|^2 / 2) v: exact also where every
    value of a row underflows; NaN where every |q_n - k_m|^2 of a row overflows (|q_n - k_m| above 1.8e19 in float32).
    The compiled form keeps no N x M numbers, forward or backward (see README.md).
    """
    check_shapes(q, k, v)
    form = _FORMS[_backend.resolve("gaussian_kernel_matmul", backend, q, k, v)]
    dtype = compute_dtype(q, k, v)
    output: Tensor = form.gaussian_kernel_matmul(*broadcast(q.to(dtype), k.to(dtype), v.to(dtype)), normalize)
    return output.to(result_dtype(q, k, v))


__all__ = ["gaussian_kernel", "gaussian_kernel_matmul"]
