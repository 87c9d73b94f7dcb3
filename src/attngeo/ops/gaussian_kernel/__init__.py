"""The Gaussian kernel exp(-|q - k|^2 / 2), and its product with values."""

from types import ModuleType

from torch import Tensor

from attngeo.ops.gaussian_kernel import compiled, naive
from attngeo.ops.inputs import check_tensors
from attngeo.ops.pairwise import kernel_by, product_by

_FORMS: dict[str, ModuleType] = {"naive": naive, "compiled": compiled}


def gaussian_kernel(q: Tensor, k: Tensor, *, backend: str = "auto") -> Tensor:
    """exp(-|q_n - k_m|^2 / 2) for every pair: [B,H,N,D], [B,H,M,D] -> [B,H,N,M].

    Leading axes broadcast. Tokens far from the origin lose no digits. Half precision is computed in float32.
    """
    check_tensors("gaussian_kernel", q=q, k=k)
    return kernel_by(_FORMS, "gaussian_kernel", backend, q, k)


def gaussian_kernel_matmul(
    q: Tensor, k: Tensor, v: Tensor, *, normalize: bool = False, backend: str = "auto"
) -> Tensor:
    """K v for K = gaussian_kernel(q, k): [B,H,N,D], [B,H,M,D], [B,H,M,V] -> [B,H,N,V]; K is symmetric in q and k.

    With `normalize` the rows of K are divided by their sums, as softmax(-|q_n - k_m|^2 / 2) v: exact also where every
    value of a row underflows; NaN where every |q_n - k_m|^2 of a row overflows (|q_n - k_m| above 1.8e19 in float32).
    The compiled form keeps no N x M numbers, forward or backward (see README.md).
    """
    check_tensors("gaussian_kernel_matmul", q=q, k=k, v=v)
    return product_by(_FORMS, "gaussian_kernel_matmul", backend, q, k, v, normalize)


__all__ = ["gaussian_kernel", "gaussian_kernel_matmul"]
