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
    if normalization == "row_sum":
        return product(B, product(C.mT, v)) / product(B, C.sum(-2).unsqueeze(-1))
    mean_v = v.mean(-2, keepdim=True)
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
    mean_v = v.mean(-2, keepdim=True) if normalization == "injective_row" else None
    if mean_v is not None:
        v = v - mean_v
    elif normalization == "row_sum":
        v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    output = kernel_matmul(q, landmarks, product(W_inverse, kernel_matmul(landmarks, q, v)))
    if normalization == "row_sum":
        return output[..., :-1] / output[..., -1:]
    return scale * output if mean_v is None else scale * output + mean_v


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
        return G / G.sum(-1, keepdim=True)
    if normalization == "injective_row":
        return scale * (G - G.mean(-1, keepdim=True)) + 1.0 / tokens
    centred = G - G.mean(-2, keepdim=True)
    variance = centred.square().mean(-2, keepdim=True)
    eps = eps_relative * variance.mean(-1, keepdim=True) + eps_absolute
    return scale * centred / torch.sqrt(variance + eps) + 1.0 / tokens
