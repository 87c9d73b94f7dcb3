"""The two evaluations of Nystrom attention: linear in the tokens, and dense by definition."""

import torch
from torch import Tensor


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
    B = C @ W_inverse
    if tokens == 0:
        return v
    if normalization == "none":
        return scale * (B @ (C.mT @ v))
    if normalization == "row_sum":
        return (B @ (C.mT @ v)) / (B @ C.sum(-2).unsqueeze(-1))
    mean_v = v.mean(-2, keepdim=True)
    if normalization == "injective_row":
        return scale * (B @ (C.mT @ (v - mean_v))) + mean_v
    # Centred rows of B give G - mean directly; E[G^2] - mean^2 would cancel in float32.
    B = B - B.mean(-2, keepdim=True)
    covariance = B.mT @ B / tokens
    variance = ((C @ covariance) * C).sum(-1, keepdim=True).clamp_min(0.0)
    whitening = torch.rsqrt(variance + eps_relative * variance.mean(-2, keepdim=True) + eps_absolute)
    return scale * (B @ (C.mT @ (whitening * v))) + mean_v


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
    G = C @ W_inverse @ C.mT
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
