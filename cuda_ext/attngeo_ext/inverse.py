"""Registrations of the batched inverses: one gradient, -X^T G X^T, which torch can differentiate again."""

from typing import Any

import torch
from torch import Tensor

from attngeo_ext.registration import register_forward


def register() -> None:
    """Register both operators."""
    register_forward("newton_schulz_inverse", _newton_schulz_fake, _newton_schulz_gradient, _context)
    register_forward("spd_inverse", _spd_fake, _spd_gradient, _context)


def _newton_schulz_fake(W: Tensor, iterations: int, eps: float, start: str) -> tuple[Tensor, Tensor]:
    return W.new_empty(W.shape), W.new_empty(W.shape[:-2])


def _spd_fake(W: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return W.new_empty(W.shape), W.new_empty(W.shape[:-2], dtype=torch.int32)


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    inverse, diagnosis = output
    ctx.mark_non_differentiable(diagnosis)
    ctx.save_for_backward(inverse)


def _newton_schulz_gradient(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None, None, None]:
    (X,) = ctx.saved_tensors
    return _implicit(X, grad), None, None, None


def _spd_gradient(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
    (X,) = ctx.saved_tensors
    gradient = _implicit(X, grad)
    # As torch.linalg.cholesky: of a function of symmetric matrices, only the symmetric part has a meaning.
    return (gradient + gradient.mT) / 2, None


def _implicit(X: Tensor, grad: Tensor) -> Tensor:
    # Half precision never arrives here; autocast would bring it back, and TF32 is half precision by another name.
    with torch.autocast(X.device.type, enabled=False):
        if X.dtype == torch.float32 and _products_are_rounded(X.device.type):
            return -(X.double().mT @ grad.double() @ X.double().mT).float()
        return -(X.mT @ grad @ X.mT)


def _products_are_rounded(device: str) -> bool:
    """Whether torch may round the float32 factors of matrix products (to TF32 or bfloat16) on this device."""
    backend = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
    return backend.matmul.fp32_precision not in ("ieee", "none")


# The mark of torch.compiler.assume_constant_result, which would import the whole compiler for it.
_products_are_rounded._dynamo_marked_constant = True
