"""Registrations of the pairwise kernels and of their products with values, the same for every kind.

A kind's own options (lambda_ of the Laplacian) come after the tensors; the products have `normalize` after them.
"""

from typing import Any

import torch
from torch import Tensor

from attngeo_ext.registration import register_backward, register_forward

KINDS = ("laplacian_kernel", "gaussian_kernel")


def register() -> None:
    """Register all four operators of every kind."""
    for kind in KINDS:
        register_forward(kind, _kernel_fake, _kernel_gradient(kind), _kernel_context)
        register_backward(f"{kind}_backward", _kernel_backward_fake, kind)
        register_forward(f"{kind}_matmul", _matmul_fake, _matmul_gradient(kind), _matmul_context)
        # Not `{kind}_matmul_backward`: that took other numbers, and graphs that torch.compile has on disk may call it.
        register_backward(f"{kind}_relative_matmul_backward", _matmul_backward_fake, f"{kind}_matmul")


def _kernel_fake(q: Tensor, k: Tensor, *options: float) -> Tensor:
    return q.new_empty((*q.shape[:-1], k.shape[-2]))


def _kernel_backward_fake(grad: Tensor, q: Tensor, k: Tensor, kernel: Tensor, *options: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _kernel_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, *ctx.options = inputs
    ctx.save_for_backward(q, k, output)


def _kernel_gradient(kind: str) -> Any:
    operator = getattr(torch.ops.attngeo, f"{kind}_backward")

    def gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, kernel = ctx.saved_tensors
        return *operator(grad, q, k, kernel, *ctx.options), *(None for _ in ctx.options)

    return gradient


def _matmul_fake(q: Tensor, k: Tensor, v: Tensor, *options: float) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1]), q.new_empty(q.shape[:-1])


def _matmul_backward_fake(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, origin: Tensor, delta: Tensor, *options: float
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _matmul_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, *ctx.options, normalize = inputs
    product, origin, total = output
    ctx.mark_non_differentiable(origin, total)
    ctx.save_for_backward(q, k, v, origin, *((product, total) if normalize else (None, None)))


def _matmul_gradient(kind: str) -> Any:
    operator = getattr(torch.ops.attngeo, f"{kind}_relative_matmul_backward")

    def gradient(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, origin, product, total = ctx.saved_tensors
        if product is None:
            delta = torch.zeros_like(origin)
        else:
            # The operator's weights are exp(scale * (distance - origin)), those of the product that divided by `total`.
            grad = grad / total.unsqueeze(-1)
            # The mean over a row's weights of what each weight's own gradient is.
            delta = (grad * product).sum(-1)
        return *operator(grad, q, k, v, origin, delta, *ctx.options), *(None for _ in ctx.options), None

    return gradient
