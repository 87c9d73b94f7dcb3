"""Nystrom attention whose keys differ from its queries; with equal ones it is `attngeo.ops.nystrom_attention`."""

from collections.abc import Callable

import torch
from torch import Tensor

from attngeo.ops.precision import product


def nystrom_attention_with_keys(
    q: Tensor,
    k: Tensor,
    landmarks: Tensor,
    v: Tensor,
    kernel: Callable[[Tensor, Tensor], Tensor],
    *,
    normalization: str,
    solver: Callable[[Tensor], Tensor],
    scale: Tensor | None = None,
    eps_relative: float = 1e-3,
    eps_absolute: float = 1e-12,
) -> Tensor:
    """Z v in time linear in the tokens: q and k [B,H,N,D], landmarks [B,H,M,D], v [B,H,N,Dv] -> [B,H,N,Dv].

    Z normalises the rows of G = C_q W^+ C_k^T with C_q = kernel(q, landmarks), C_k = kernel(k, landmarks) and
    W = kernel(landmarks, landmarks); `scale` [H] multiplies its whitened part. Statistics are per image and head.
    """
    left = product(kernel(q, landmarks), solver(kernel(landmarks, landmarks)))
    right = kernel(k, landmarks)
    factor = 1.0 if scale is None else scale[:, None, None]
    if normalization == "none":
        return factor * product(left, product(right.mT, v))
    if normalization == "row_sum":
        return product(left, product(right.mT, v)) / product(left, right.sum(-2).unsqueeze(-1))
    mean = v.mean(-2, keepdim=True)
    if normalization == "injective_row":
        return factor * product(left, product(right.mT, v - mean)) + mean
    # Centring before squaring: E[g^2] - mean^2 cancels in float32.
    left = left - left.mean(-2, keepdim=True)
    variance = (product(right, product(left.mT, left) / q.shape[-2]) * right).sum(-1, keepdim=True).clamp_min(0.0)
    whitening = torch.rsqrt(variance + eps_relative * variance.mean(-2, keepdim=True) + eps_absolute)
    return factor * product(left, product(right.mT, whitening * v)) + mean
