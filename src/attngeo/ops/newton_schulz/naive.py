"""Newton-Schulz and Cholesky inverses in plain torch."""

import torch
from torch import Tensor

from attngeo.ops.backend import forward_mode
from attngeo.ops.implicit_inverse import implicit_inverse
from attngeo.ops.precision import factor_dtype, product


def newton_schulz_inverse(W: Tensor, iterations: int, eps: float, start: str, backward: str) -> tuple[Tensor, Tensor]:
    """Inverse of W + eps I and the residual ||I - P X||_F of every matrix: [...,M,M] -> [...,M,M], [...]."""
    P = shifted(W, eps)
    if backward == "implicit":
        inverse = implicit_inverse(P, _iterate(P.detach(), W.detach(), iterations, start))
    else:
        inverse = _iterate(P, W, iterations, start)
    return inverse, residual(P.detach(), inverse.detach())


def spd_inverse(W: Tensor, eps: float) -> Tensor:
    """Inverse of the symmetric positive definite W + eps I: [...,M,M] -> [...,M,M]."""
    P = shifted(W.to(factor_dtype(W)), eps)
    root = torch.linalg.cholesky(P)
    if forward_mode():  # torch's rule for cholesky_inverse gives wrong numbers
        return torch.linalg.inv((P + P.mT) / 2).to(W.dtype)
    return torch.cholesky_inverse(root).to(W.dtype)


def shifted(W: Tensor, eps: float) -> Tensor:
    """P = W + eps I."""
    return W + eps * _identity_like(W)


def residual(P: Tensor, X: Tensor) -> Tensor:
    """||I - P X||_F of every matrix, infinite where it is not a number: [...,M,M], [...,M,M] -> [...]."""
    # NaN would pass every "is it above the tolerance" test: infinity does not.
    norm = torch.linalg.matrix_norm(_identity_like(P) - product(P, X))
    return torch.nan_to_num(norm, nan=torch.inf, posinf=torch.inf)


def _identity_like(W: Tensor) -> Tensor:
    return torch.eye(W.shape[-1], dtype=W.dtype, device=W.device)


def _iterate(P: Tensor, W: Tensor, iterations: int, start: str) -> Tensor:
    X = _start(P, W, start)
    for _ in range(iterations):
        X = 2.0 * X - product(X, product(P, X))
    return X


def _start(P: Tensor, W: Tensor, start: str) -> Tensor:
    """X_0; every start scales by a norm, and a zero matrix gets X_0 = 0 rather than a division by zero."""
    if P.shape[-1] == 0:
        return P
    inf_norm = P.abs().sum(-1).amax(-1)
    if start == "identity":
        return _reciprocal(inf_norm)[..., None, None] * _identity_like(P)
    if start == "printed":
        return (2.0 * _reciprocal(_spectral_norm(W)))[..., None, None] * P.mT
    # The paper's 1.8 / ||P||_inf^2 is written for symmetric P. ||P||_1 ||P||_inf is the same number there, and bounds
    # ||P||_2^2, so that the iteration converges, for every other P as well.
    one_norm = P.abs().sum(-2).amax(-1)
    return (1.8 * _reciprocal(one_norm) * _reciprocal(inf_norm))[..., None, None] * P.mT


def _spectral_norm(W: Tensor) -> Tensor:
    """||W||_2, NaN of a matrix that is not finite: LAPACK stops on such a one, and complains on the console."""
    finite = W.isfinite().all(-1).all(-1)
    norm = torch.linalg.matrix_norm(torch.where(finite[..., None, None], W, torch.zeros_like(W)), ord=2)
    return torch.where(finite, norm, torch.full_like(norm, torch.nan))


def _reciprocal(norm: Tensor) -> Tensor:
    positive = ~(norm <= 0)  # NaN stays NaN
    return torch.where(positive, 1.0 / torch.where(positive, norm, torch.ones_like(norm)), torch.zeros_like(norm))
