"""Inverse of symmetric positive definite landmark matrices by conjugate gradients, the peer of Newton-Schulz."""

from typing import get_args

from torch import Tensor

from attngeo.ops import backend as _backend
from attngeo.ops.conjugate_gradient import naive
from attngeo.ops.inputs import check_count, check_square, check_tensors, number
from attngeo.ops.newton_schulz import Backward, IteratedInverse
from attngeo.ops.precision import compute_dtype, result_dtype, without_autocast


def conjugate_gradient_inverse(
    W: Tensor,
    iterations: int = 40,
    eps: float = 0.01,
    *,
    backward: Backward = "implicit",
    backend: str = "auto",
) -> IteratedInverse:
    """Inverse of the symmetric P = W + eps I, column by column, and its residual: [B,H,M,M] -> [B,H,M,M], [B,H].

    One matrix product an iteration where Newton-Schulz takes two. The residual ||I - P X||_F tells how far each matrix
    got. Nothing checks that W is symmetric: the residual does. `backward` is -X^T G X^T of a converged inverse
    ("implicit") or the exact gradient of the loop ("loop"). There is no compiled form.
    """
    op = "conjugate_gradient_inverse"
    check_tensors(op, W=W)
    check_square(op, W)
    check_count(op, "iterations", iterations)
    eps = number(op, "eps", eps, compute_dtype(W))
    if backward not in get_args(Backward):
        raise ValueError(f"backward must be 'implicit' or 'loop', not {backward!r}")
    _backend.resolve(op, backend, W)
    with without_autocast(W):
        inverse, residual = naive.conjugate_gradient_inverse(W.to(compute_dtype(W)), iterations, eps, backward)
    return IteratedInverse(inverse, residual).returned_as(result_dtype(W))


__all__ = ["conjugate_gradient_inverse"]
