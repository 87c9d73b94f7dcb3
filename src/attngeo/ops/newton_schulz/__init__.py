"""Inverses of landmark matrices: Newton-Schulz (matrix products only) and the direct one for positive matrices."""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from attngeo.ops import backend as _backend
from attngeo.ops.convergence import CONVERGED_RESIDUAL
from attngeo.ops.inputs import check_count, check_square, check_tensors, number
from attngeo.ops.newton_schulz import compiled, naive
from attngeo.ops.precision import compute_dtype, result_dtype, without_autocast

Start = Literal["paper", "identity", "printed"]
Backward = Literal["implicit", "loop"]


class IteratedInverse(NamedTuple):
    """What an iteration reached, and the residual ||I - P X||_F of every matrix, without gradient."""

    inverse: Tensor
    residual: Tensor

    @property
    def converged(self) -> Tensor:
        """A flag a matrix: whether its residual is at most CONVERGED_RESIDUAL."""
        return self.residual <= CONVERGED_RESIDUAL

    def returned_as(self, dtype: torch.dtype) -> "IteratedInverse":
        """The same in the type that the caller gets; the residual is infinite where a number overflows it."""
        if self.inverse.dtype == dtype:
            return self
        inverse = self.inverse.to(dtype)
        finite = inverse.detach().isfinite().all(-1).all(-1)
        return IteratedInverse(inverse, torch.where(finite, self.residual, torch.full_like(self.residual, torch.inf)))


def newton_schulz_inverse(
    W: Tensor,
    iterations: int = 20,
    eps: float = 0.01,
    *,
    start: Start = "paper",
    backward: Backward = "implicit",
    backend: str = "auto",
) -> IteratedInverse:
    """Inverse of P = W + eps I by X <- X (2I - P X), and its residual: [B,H,M,M] -> [B,H,M,M], [B,H].

    The residual ||I - P X||_F tells for each matrix how far the iteration got, and `converged` of the result whether
    that was far enough; it is infinite where the iteration overflowed. `start` is the paper's setting ("paper"), one
    for symmetric positive definite W that needs about half the iterations ("identity"), or the formula as printed,
    which diverges ("printed"). `backward` is -X^T G X^T of a converged inverse ("implicit") or the exact gradient of
    the loop ("loop"). "printed" and "loop" have a naive form alone.
    """
    check_tensors("newton_schulz_inverse", W=W)
    check_square("newton_schulz_inverse", W)
    check_count("newton_schulz_inverse", "iterations", iterations)
    eps = number("newton_schulz_inverse", "eps", eps, compute_dtype(W))
    if start not in get_args(Start):
        raise ValueError(f"start must be 'paper', 'identity' or 'printed', not {start!r}")
    if backward not in get_args(Backward):
        raise ValueError(f"backward must be 'implicit' or 'loop', not {backward!r}")
    naive_only = "start='printed'" if start == "printed" else "backward='loop'" if backward == "loop" else ""
    choice = _backend.resolve("newton_schulz_inverse", backend, W, naive_only=naive_only)
    wide = W.to(compute_dtype(W))
    if choice == "compiled":
        inverse, residual = compiled.newton_schulz_inverse(wide, iterations, eps, start)
    else:
        with without_autocast(W):
            inverse, residual = naive.newton_schulz_inverse(wide, iterations, eps, start, backward)
    return IteratedInverse(inverse, residual).returned_as(result_dtype(W))


def spd_inverse(W: Tensor, eps: float = 0.01, *, backend: str = "auto") -> Tensor:
    """Inverse of the symmetric positive definite W + eps I, directly: [B,H,M,M] -> [B,H,M,M].

    Raises torch.linalg.LinAlgError, naming the matrix of the batch, where W + eps I is not positive definite; under
    torch.compile it is a RuntimeError. W must be symmetric: one triangle of it is read, and which is not promised. The
    gradient is symmetric. A half type that cannot hold the inverse gives infinities, which `inverse_residual` tells of.
    """
    check_tensors("spd_inverse", W=W)
    check_square("spd_inverse", W)
    eps = number("spd_inverse", "eps", eps, compute_dtype(W))
    choice = _backend.resolve("spd_inverse", backend, W)
    wide = W.to(compute_dtype(W))
    if choice == "compiled":
        inverse = compiled.spd_inverse(wide, eps)
    else:
        with without_autocast(W):
            inverse = naive.spd_inverse(wide, eps)
    return inverse.to(result_dtype(W))


def inverse_residual(W: Tensor, inverse: Tensor, eps: float = 0.01) -> Tensor:
    """||I - P X||_F of every matrix for P = W + eps I and X = `inverse`, without gradient: [...,M,M] -> [...]."""
    check_tensors("inverse_residual", W=W, inverse=inverse)
    eps = number("inverse_residual", "eps", eps, compute_dtype(W, inverse))
    with torch.no_grad(), without_autocast(W):
        X = inverse.to(compute_dtype(W, inverse))
        return naive.residual(naive.shifted(W.to(X.dtype), eps), X)


__all__ = ["CONVERGED_RESIDUAL", "IteratedInverse", "inverse_residual", "newton_schulz_inverse", "spd_inverse"]
