"""Inverses of landmark matrices: Newton-Schulz (matrix products only) and Cholesky (the direct reference)."""

from typing import Literal

from torch import Tensor

from attngeo.ops import backend as _backend
from attngeo.ops.newton_schulz import naive
from attngeo.ops.precision import compute_dtype, result_dtype, without_autocast

Start = Literal["paper", "identity", "printed"]
Backward = Literal["implicit", "loop"]


def newton_schulz_inverse(
    W: Tensor,
    iterations: int = 20,
    eps: float = 0.01,
    *,
    start: Start = "paper",
    backward: Backward = "implicit",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Inverse of P = W + eps I by X <- X (2I - P X), and its residual: [B,H,M,M] -> [B,H,M,M], [B,H].

    The residual ||I - P X||_F tells for each matrix how far the iteration got; it carries no gradient and is infinite
    where the iteration overflowed. `start` is the paper's setting ("paper"), one for symmetric positive definite W
    that needs about half the iterations ("identity"), or the formula as printed, which diverges ("printed").
    `backward` is -X^T G X^T of a converged inverse ("implicit") or the exact gradient of the loop ("loop").
    """
    _check(W, iterations, start, backward)
    _backend.resolve("newton_schulz_inverse", backend, W)
    with without_autocast(W):
        inverse, residual = naive.newton_schulz_inverse(W.to(compute_dtype(W)), iterations, eps, start, backward)
    return inverse.to(result_dtype(W)), residual


def spd_inverse(W: Tensor, eps: float = 0.01, *, backend: str = "auto") -> Tensor:
    """Inverse of the symmetric positive definite W + eps I by Cholesky: [B,H,M,M] -> [B,H,M,M].

    Raises torch.linalg.LinAlgError, naming the matrix of the batch, where W + eps I is not positive definite.
    """
    _check(W)
    _backend.resolve("spd_inverse", backend, W)
    with without_autocast(W):
        inverse = naive.spd_inverse(W.to(compute_dtype(W)), eps)
    return inverse.to(result_dtype(W))


def _check(W: Tensor, iterations: int = 1, start: str = "paper", backward: str = "implicit") -> None:
    if W.dim() < 2 or W.shape[-1] != W.shape[-2]:
        raise ValueError(f"expected square matrices [..., M, M], not {tuple(W.shape)}")
    if iterations < 0:
        raise ValueError(f"iterations must not be negative, not {iterations}")
    if start not in ("paper", "identity", "printed"):
        raise ValueError(f"start must be 'paper', 'identity' or 'printed', not {start!r}")
    if backward not in ("implicit", "loop"):
        raise ValueError(f"backward must be 'implicit' or 'loop', not {backward!r}")


__all__ = ["newton_schulz_inverse", "spd_inverse"]
