"""The Laplacian kernel exp(-|q - k|_1 / lambda), and its product with values."""

from types import ModuleType

from torch import Tensor

from attngeo.ops.inputs import check_tensors, positive_number
from attngeo.ops.laplacian_kernel import compiled, naive
from attngeo.ops.pairwise import kernel_by, product_by
from attngeo.ops.precision import compute_dtype

_FORMS: dict[str, ModuleType] = {"naive": naive, "compiled": compiled}
_RESCALE = "divide q and k by it and leave lambda_ at 1, as the layers do with learn_lambda"


def laplacian_kernel(q: Tensor, k: Tensor, lambda_: float = 4.0, *, backend: str = "auto") -> Tensor:
    """exp(-|q_n - k_m|_1 / lambda) for every pair: [B,H,N,D], [B,H,M,D] -> [B,H,N,M].

    Leading axes broadcast; lambda is a number. The gradient takes sign(0) = 0. Half precision is computed in float32
    (see README.md).
    """
    check_tensors("laplacian_kernel", q=q, k=k)
    lambda_ = positive_number("laplacian_kernel", "lambda_", lambda_, compute_dtype(q, k), _RESCALE)
    return kernel_by(_FORMS, "laplacian_kernel", backend, q, k, lambda_)


def laplacian_kernel_matmul(
    q: Tensor, k: Tensor, v: Tensor, lambda_: float = 4.0, *, normalize: bool = False, backend: str = "auto"
) -> Tensor:
    """K v for K = laplacian_kernel(q, k): [B,H,N,D], [B,H,M,D], [B,H,M,V] -> [B,H,N,V]; K is symmetric in q and k.

    With `normalize` the rows of K are divided by their sums, as softmax(-|q_n - k_m|_1 / lambda) v: exact also where
    every value of a row underflows. The compiled form keeps no N x M numbers, forward or backward (see README.md).
    """
    op = "laplacian_kernel_matmul"
    check_tensors(op, q=q, k=k, v=v)
    lambda_ = positive_number(op, "lambda_", lambda_, compute_dtype(q, k, v), _RESCALE)
    return product_by(_FORMS, op, backend, q, k, v, lambda_, normalize)


__all__ = ["laplacian_kernel", "laplacian_kernel_matmul"]
