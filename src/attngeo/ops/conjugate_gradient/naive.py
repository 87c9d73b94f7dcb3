"""Conjugate gradients on the columns of the identity, in plain torch."""

from collections.abc import Iterator

import torch
from torch import Tensor

from attngeo.ops.implicit_inverse import implicit_inverse
from attngeo.ops.newton_schulz.naive import residual, shifted
from attngeo.ops.precision import product


def conjugate_gradient_inverse(W: Tensor, iterations: int, eps: float, backward: str) -> tuple[Tensor, Tensor]:
    """Inverse of W + eps I and the residual ||I - P X||_F of every matrix: [...,M,M] -> [...,M,M], [...]."""
    P = shifted(W, eps)
    implicit = backward == "implicit"
    inverse = _last(P.detach() if implicit else P, iterations)
    if implicit:
        inverse = implicit_inverse(P, inverse)
    return inverse, residual(P.detach(), inverse.detach())


def iterates(P: Tensor, iterations: int) -> Iterator[Tensor]:
    """The approximate inverse X [..., M, M] after each iteration, from X = 0, every column of I a system of its own.

    A column whose residual has fallen to the rounding of the type, of its start's norm 1, stays as it is: what would
    follow is noise, and its quotients end as 0 / 0.
    """
    X = torch.zeros_like(P)
    R = torch.eye(P.shape[-1], dtype=P.dtype, device=P.device).expand_as(P)
    D = R
    squares = _squares(R)
    rounding = torch.finfo(P.dtype).eps ** 2
    for _ in range(iterations):
        PD = product(P, D)
        step = _quotient(squares, (D * PD).sum(-2, keepdim=True), squares > rounding)
        X = X + step * D
        R = R - step * PD
        before, squares = squares, _squares(R)
        D = R + _quotient(squares, before, before > rounding) * D
        yield X


def _last(P: Tensor, iterations: int) -> Tensor:
    X = torch.zeros_like(P)
    for iterate in iterates(P, iterations):
        X = iterate
    return X


def _squares(R: Tensor) -> Tensor:
    """Squared norm of every column: [..., M, M] -> [..., 1, M]."""
    return R.square().sum(-2, keepdim=True)


def _quotient(a: Tensor, b: Tensor, going_on: Tensor) -> Tensor:
    """a / b of the columns that go on, 0 of the others and where b is not positive; no gradient divides by zero."""
    defined = going_on & (b > 0)
    return torch.where(defined, a / torch.where(defined, b, torch.ones_like(b)), torch.zeros_like(a))
