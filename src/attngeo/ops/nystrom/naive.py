"""The evaluations of Nystrom attention: linear in the tokens, linear without the kernel, and dense by definition."""

from collections.abc import Callable

import torch
from torch import Tensor

from attngeo.ops.precision import product


def linear_form(
    C: Tensor,
    W_inverse: Tensor,
    v: Tensor,
    normalization: str,
    scale: Tensor | float,
    eps_relative: float,
    eps_absolute: float,
) -> Tensor:
    """Z V in O(N M^2 + N M D): C [...,N,M], W_inverse [...,M,M], v [...,N,D] -> [...,N,D] (README.md derives it)."""
    tokens = C.shape[-2]
    B = product(C, W_inverse)
    if tokens == 0:
        return v
    if normalization == "none":
        return scale * product(B, product(C.mT, v))
    mean_v = v.mean(-2, keepdim=True)
    if normalization == "row_sum":
        return over_row_sum(product(B, product(C.mT, v)), product(B, C.sum(-2).unsqueeze(-1)), mean_v)
    if normalization == "injective_row":
        return scale * product(B, product(C.mT, v - mean_v)) + mean_v
    # Centred rows of B give G - mean directly; E[G^2] - mean^2 would cancel in float32.
    B = B - B.mean(-2, keepdim=True)
    covariance = product(B.mT, B) / tokens
    variance = (product(C, covariance) * C).sum(-1, keepdim=True).clamp_min(0.0)
    whitening = torch.rsqrt(variance + eps_relative * variance.mean(-2, keepdim=True) + eps_absolute)
    return scale * product(B, product(C.mT, whitening * v)) + mean_v


def products_form(
    q: Tensor,
    landmarks: Tensor,
    v: Tensor,
    W_inverse: Tensor,
    kernel_matmul: Callable[[Tensor, Tensor, Tensor], Tensor],
    normalization: str,
    scale: Tensor | float,
) -> Tensor:
    """Z V from products with C and C^T alone, which `kernel_matmul` gives: v [...,N,D] -> [...,N,D]."""

    def through_landmarks(values: Tensor) -> Tensor:
        return kernel_matmul(q, landmarks, product(W_inverse, kernel_matmul(landmarks, q, values)))

    if normalization == "none":
        return scale * through_landmarks(v)
    mean_v = v.mean(-2, keepdim=True)
    if normalization == "injective_row":
        return scale * through_landmarks(v - mean_v) + mean_v
    output = through_landmarks(torch.cat([v, torch.ones_like(v[..., :1])], dim=-1))
    return over_row_sum(output[..., :-1], output[..., -1:], mean_v)


def over_row_sum(weighted: Tensor, total: Tensor, uniform: Tensor | float) -> Tensor:
    """weighted / total by row, and `uniform`, what equal weights give, where a row's sum has underflowed.

    Below the smallest normal number over the type's rounding a sum has lost digits, and its reciprocal would overflow
    in a gradient: a token that far from every landmark attends to all tokens alike.
    """
    info = torch.finfo(total.dtype)
    lost = total.abs() <= info.tiny / info.eps
    return torch.where(lost, uniform, weighted / torch.where(lost, torch.ones_like(total), total))


def dense_form(
    C: Tensor,
    W_inverse: Tensor,
    normalization: str,
    scale: Tensor | float,
    eps_relative: float,
    eps_absolute: float,
) -> Tensor:
    """Z by its definition: C [...,N,M], W_inverse [...,M,M] -> [...,N,N]."""
    tokens = C.shape[-2]
    G = product(product(C, W_inverse), C.mT)
    if tokens == 0 or normalization == "none":
        return scale * G
    if normalization == "row_sum":
        return over_row_sum(G, G.sum(-1, keepdim=True), 1.0 / tokens)
    if normalization == "injective_row":
        return scale * (G - G.mean(-1, keepdim=True)) + 1.0 / tokens
    centred = G - G.mean(-2, keepdim=True)
    variance = centred.square().mean(-2, keepdim=True)
    eps = eps_relative * variance.mean(-1, keepdim=True) + eps_absolute
    return scale * centred / torch.sqrt(variance + eps) + 1.0 / tokens
