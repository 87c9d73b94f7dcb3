"""Nystrom attention with injective normalised rows, in time linear in the tokens, and its dense reference."""

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from attngeo.ops import backend as _backend
from attngeo.ops.newton_schulz import spd_inverse
from attngeo.ops.nystrom import naive
from attngeo.ops.precision import compute_dtype, without_autocast

# With a backend other than "auto" they are called with `backend=` as well, which the functions of attngeo.ops take.
Kernel = Callable[..., Tensor]
Solver = Callable[..., Tensor]
Normalization = Literal["injective", "injective_row", "row_sum", "none"]
NORMALIZATIONS = get_args(Normalization)


def nystrom_attention(
    q: Tensor,
    landmarks: Tensor,
    v: Tensor,
    kernel: Kernel,
    *,
    kernel_matmul: Kernel | None = None,
    normalization: Normalization = "injective",
    solver: Solver = spd_inverse,
    scale: Tensor | None = None,
    eps_relative: float = 1e-3,
    eps_absolute: float = 1e-12,
    backend: str = "auto",
) -> Tensor:
    """Z V without forming Z: q [B,H,N,D], landmarks [B,H,M,D], v [B,H,N,Dv] -> [B,H,N,Dv]; keys equal queries.

    Z normalises the rows of G = C W^+ C^T, C = kernel(q, landmarks), W = kernel(landmarks, landmarks), with `solver`
    giving W^+. `scale` ([H], or anything that broadcasts with it) multiplies the kernel part of Z; None is 1.
    Statistics are per image and head. Computed in at least float32; returned in the type of `v`.

    With `kernel_matmul` (q, k, v -> kernel(q, k) v, as `laplacian_kernel_matmul`) C is not kept either, in exchange
    for computing it twice; "injective" needs C for its variances and refuses it. `backend` is handed to the kernels
    and the solver.
    """
    _check(normalization, scale)
    if kernel_matmul is not None and normalization == "injective":
        raise ValueError("normalization='injective' needs every kernel value: kernel_matmul must be None")
    _backend.resolve("nystrom_attention", "naive", q, landmarks, v)
    dtype = compute_dtype(q, landmarks, v)
    q, landmarks, values, factor = q.to(dtype), landmarks.to(dtype), v.to(dtype), _per_head(scale, dtype)
    kernel, solver = _with_backend(kernel, backend), _with_backend(solver, backend)
    with without_autocast(q):
        W_inverse = solver(kernel(landmarks, landmarks))
        if kernel_matmul is not None:
            matmul = _with_backend(kernel_matmul, backend)
            output = naive.products_form(q, landmarks, values, W_inverse, matmul, normalization, factor)
        else:
            C = kernel(q, landmarks)
            output = naive.linear_form(C, W_inverse, values, normalization, factor, eps_relative, eps_absolute)
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
    backend: str = "auto",
) -> Tensor:
    """The dense Z of `nystrom_attention`, by its definition: [B,H,N,D], [B,H,M,D] -> [B,H,N,N]; memory O(N^2)."""
    _check(normalization, scale)
    dtype = compute_dtype(q, landmarks)
    q, landmarks, factor = q.to(dtype), landmarks.to(dtype), _per_head(scale, dtype)
    kernel, solver = _with_backend(kernel, backend), _with_backend(solver, backend)
    with without_autocast(q):
        C, W_inverse = kernel(q, landmarks), solver(kernel(landmarks, landmarks))
        return naive.dense_form(C, W_inverse, normalization, factor, eps_relative, eps_absolute)


def _with_backend(part: Kernel, backend: str) -> Kernel:
    return part if backend == "auto" else partial(part, backend=backend)


def _per_head(scale: Tensor | None, dtype: torch.dtype) -> Tensor | float:
    return 1.0 if scale is None else scale.to(dtype)[..., None, None]


def _check(normalization: str, scale: Tensor | None) -> None:
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization must be one of {', '.join(NORMALIZATIONS)}, not {normalization!r}")
    if normalization == "row_sum" and scale is not None:
        raise ValueError("normalization='row_sum' fixes the scale of its rows: scale must be None")


__all__ = ["NORMALIZATIONS", "nystrom_attention", "nystrom_matrix"]
