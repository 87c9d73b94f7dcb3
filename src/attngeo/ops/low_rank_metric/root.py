"""The square root S = A^(1/2) (I + V V^T)^(1/2), V = A^(-1/2) U, of a low-rank metric G = S S^T, as a product.

With C = V^T V, an R x R matrix, (I + V V^T)^(+-1/2) = I + V f(C) V^T. The functions f are smooth at 0, and so are their
divided differences in the form used here: no derivative divides by a gap of eigenvalues, nor by an eigenvalue.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attngeo.ops import backend as _backend
from attngeo.ops.inputs import check_tensors
from attngeo.ops.precision import result_dtype, without_autocast


def square_root(a: Tensor, U: Tensor, x: Tensor, *, inverse: bool = False, transpose: bool = False) -> Tensor:
    """S x, S^-1 x, S^T x or S^-T x, where G = S S^T: a [...,D] > 0, U [...,D,R], x [...,D] -> [...,D].

    O(D R^2 + R^3) time and O(D R + R^2) memory a token; first derivatives alone. NaN where a metric is not finite.
    Computed in float64: the Gram matrix holds U^2 / a, which overflows float32 and loses its digits long before.
    """
    check_tensors("low_rank_metric.square_root", a=a, U=U, x=x)
    result = result_dtype(a, U, x)
    _backend.resolve("low_rank_metric", "naive", a, U, x)
    a, U, x = a.double(), U.double(), x.double()
    with without_autocast(a):
        scale = a.sqrt()
        V = U / scale.unsqueeze(-1)
        middle = gram_function(V.mT @ V, inverse)

        def symmetric(y: Tensor) -> Tensor:
            return y + (V @ (middle @ (V.mT @ y.unsqueeze(-1)))).squeeze(-1)

        if inverse:
            found = symmetric(x) / scale if transpose else symmetric(x / scale)
        else:
            found = symmetric(scale * x) if transpose else scale * symmetric(x)
        return found.to(result)


def gram_function(C: Tensor, inverse: bool) -> Tensor:
    """f(C) of symmetric C >= 0 [...,R,R] with I + V f(V^T V) V^T = (I + V V^T)^(1/2), or ^(-1/2) with `inverse`.

    With s = (1 + c)^(1/2): f(c) = 1 / (1 + s), or -1 / (s (1 + s)).
    """
    found, _, _ = _GramFunction.apply(C, inverse)
    return found


class _GramFunction(torch.autograd.Function):
    """f(C) by eigenvectors, with its derivative Q (F * (Q^T . Q)) Q^T in divided differences F (Daleckii and Krein)."""

    @staticmethod
    def forward(C: Tensor, inverse: bool) -> tuple[Tensor, Tensor, Tensor]:
        finite = C.isfinite().all(-1).all(-1)[..., None, None]
        # Eigenvalues of what is not finite would be an error; NaN is for the caller's policy to see.
        values, vectors = torch.linalg.eigh(torch.where(finite, C, torch.zeros_like(C)))
        roots = (1.0 + values.clamp_min(0.0)).sqrt()
        function = -1.0 / (roots * (1.0 + roots)) if inverse else 1.0 / (1.0 + roots)
        found = (vectors * function.unsqueeze(-2)) @ vectors.mT
        return torch.where(finite, found, torch.full_like(found, torch.nan)), roots, vectors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.inverse = inputs[1]
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None]:
        roots, vectors = ctx.saved_tensors
        first, second = roots.unsqueeze(-1), roots.unsqueeze(-2)
        both = first + second
        # (f_i - f_j) / (c_i - c_j) with c = s^2 - 1 and the factor s_i - s_j divided out.
        if ctx.inverse:
            difference = (1.0 + both) / (first * (1.0 + first) * second * (1.0 + second) * both)
        else:
            difference = -1.0 / ((1.0 + first) * (1.0 + second) * both)
        return vectors @ (difference * (vectors.mT @ grad @ vectors)) @ vectors.mT, None
