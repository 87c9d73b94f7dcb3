"""Nystrom attention with injective normalised rows, in time linear in the tokens, and its dense reference."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from attngeo.ops import backend as _backend
from attngeo.ops.newton_schulz import spd_inverse
from attngeo.ops.nystrom import naive
from attngeo.ops.precision import compute_dtype, without_autocast

Kernel = Callable[[Tensor, Tensor], Tensor]
Solver = Callable[[Tensor], Tensor]
Normalization = Literal["injective", "injective_row", "row_sum", "none"]
NORMALIZATIONS = ("injective", "injective_row", "row_sum", "none")


def nystrom_attention(
    q: Tensor,
    landmarks: Tensor,
    v: Tensor,
    kernel: Kernel,
    *,
    normalization: Normalization = "injective",
    solver: Solver = spd_inverse,
    scale: Tensor | None = None,
    eps_relative: float = 1e-3,
    eps_absolute: float = 1e-12,
) -> Tensor:
    """Z V without forming Z: q [B,H,N,D], landmarks [B,H,M,D], v [B,H,N,Dv] -> [B,H,N,Dv]; keys equal queries.

    Z normalises the rows of G = C W^+ C^T, C = kernel(q, landmarks), W = kernel(landmarks, landmarks), with `solver`
    giving W^+. `scale` ([H], or anything that broadcasts with it) multiplies the kernel part of Z; None is 1.
    Statistics are per image and head. Computed in at least float32; returned in the type of `v`.
    """
    _check(normalization, scale)
    _backend.resolve("nystrom_attention", "naive", q, landmarks, v)
    dtype = compute_dtype(q, landmarks, v)
    with without_autocast(q):
        C, W_inverse = _kernel_matrices(q.to(dtype), landmarks.to(dtype), kernel, solver)
        output = naive.linear_form(
            C, W_inverse, v.to(dtype), normalization, _per_head(scale, dtype), eps_relative, eps_absolute
        )
    return output.to(v.dtype)


def nystrom_matrix(
    q: Tensor,
    landmarks: Tensor,
    kernel: Kernel,
    *,
    normalization: Normalization = "injective",
    solver: Solver = spd_inverse,
    scale: Tensor | None = None,
    eps_relative: float = 1e-3,
    eps_absolute: float = 1e-12,
) -> Tensor:
    """The dense Z of `nystrom_attention`, by its definition: [B,H,N,D], [B,H,M,D] -> [B,H,N,N]; memory O(N^2)."""
    _check(normalization, scale)
    dtype = compute_dtype(q, landmarks)
    with without_autocast(q):
        C, W_inverse = _kernel_matrices(q.to(dtype), landmarks.to(dtype), kernel, solver)
        return naive.dense_form(C, W_inverse, normalization, _per_head(scale, dtype), eps_relative, eps_absolute)


def _kernel_matrices(q: Tensor, landmarks: Tensor, kernel: Kernel, solver: Solver) -> tuple[Tensor, Tensor]:
    return kernel(q, landmarks), solver(kernel(landmarks, landmarks))


def _per_head(scale: Tensor | None, dtype: torch.dtype) -> Tensor | float:
    return 1.0 if scale is None else scale.to(dtype)[..., None, None]


def _check(normalization: str, scale: Tensor | None) -> None:
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization must be one of {', '.join(NORMALIZATIONS)}, not {normalization!r}")
    if normalization == "row_sum" and scale is not None:
        raise ValueError("normalization='row_sum' fixes the scale of its rows: scale must be None")


__all__ = ["NORMALIZATIONS", "nystrom_attention", "nystrom_matrix"]
