"""The derivative of an inverse that an iteration has found, without going back through the iteration."""

from typing import Any

import torch
from torch import Tensor

from attngeo.ops.backend import forward_mode
from attngeo.ops.precision import product


def implicit_inverse(P: Tensor, X: Tensor) -> Tensor:
    """X, found as the inverse of P, with the derivatives of P^-1: exact once X has converged. [..., M, M] each.

    dP = -X^T G X^T for a gradient G, and the tangent is -X dP X; nothing flows into how X was found.
    """
    function = _ForwardModeInverse if forward_mode() else _Inverse
    inverse: Tensor = function.apply(P, X)
    return inverse


class _Inverse(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(P: Tensor, X: Tensor) -> Tensor:
        return X.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (X,) = ctx.saved_tensors
        return -product(product(X.mT, gradient), X.mT), None


class _ForwardModeInverse(_Inverse):
    """The same with its forward-mode derivative; apart, since torch.compile takes no function with one."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        (X,) = ctx.saved_tensors
        return -product(product(X, tangent), X)
