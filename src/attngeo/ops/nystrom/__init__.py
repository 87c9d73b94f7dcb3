"""Nystrom attention with injective normalised rows, in time linear in the tokens, and its dense reference."""

from collections.abc import Callable
from functools import partial
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

from attngeo.ops import backend as _backend
from attngeo.ops.inputs import check_tensors, leading_shape, number
from attngeo.ops.newton_schulz import IteratedInverse, spd_inverse
from attngeo.ops.nystrom import naive
from attngeo.ops.precision import compute_dtype, without_autocast

# With a backend other than "auto" they are called with `backend=` as well, which the functions of attngeo.ops take.
Kernel = Callable[..., Tensor]
Solver = Callable[..., Tensor | IteratedInverse]
Normalization = Literal["injective", "injective_row", "row_sum", "none"]
Result = TypeVar("Result")
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
    scale: Tensor | float | None = None,
    eps_relative: float = 1e-3,
    eps_absolute: float = 1e-12,
    backend: str = "auto",
) -> Tensor:
    """Z V without forming Z: q [B,H,N,D], landmarks [B,H,M,D], v [B,H,N,Dv] -> [B,H,N,Dv]; keys equal queries.

    Z normalises the rows of G = C W^+ C^T, C = kernel(q, landmarks), W = kernel(landmarks, landmarks), with `solver`
    giving W^+ (`newton_schulz_inverse` will do). `scale` ([H], or a number) multiplies the kernel part of Z; None is 1.
    Statistics are per image and head. Computed in at least float32; returned in the type of `v`.

    With `kernel_matmul` (q, k, v -> kernel(q, k) v, as `laplacian_kernel_matmul`) C is not kept either, in exchange
    for computing it twice; "injective" needs C for its variances and refuses it. `backend` is handed to the kernels
    and the solver.
    """
    check_tensors("nystrom_attention", q=q, landmarks=landmarks, v=v)
    _check("nystrom_attention", normalization, scale, q, landmarks)
    if v.dim() < 2 or v.shape[-2] != q.shape[-2]:
        raise ValueError(
            f"nystrom_attention: expected v [..., {q.shape[-2]}, Dv], one row for each token, not {tuple(v.shape)}"
        )
    leading_shape("nystrom_attention", q=q, landmarks=landmarks, v=v)
    if kernel_matmul is not None and normalization == "injective":
        raise ValueError("normalization='injective' needs every kernel value: kernel_matmul must be None")
    _backend.resolve("nystrom_attention", "naive", q, landmarks, v)
    dtype = compute_dtype(q, landmarks, v)
    q, landmarks, values, factor = (
        q.to(dtype),
        landmarks.to(dtype),
        v.to(dtype),
        _per_head("nystrom_attention", scale, dtype),
    )
    kernel, solver = _with_backend(kernel, backend), _with_backend(solver, backend)
    with without_autocast(q):
        W_inverse = _inverse_by(solver, kernel(landmarks, landmarks))
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
    scale: Tensor | float | None = None,
    eps_relative: float = 1e-3,
    eps_absolute: float = 1e-12,
    backend: str = "auto",
) -> Tensor:
    """The dense Z of `nystrom_attention`, by its definition: [B,H,N,D], [B,H,M,D] -> [B,H,N,N]; memory O(N^2)."""
    check_tensors("nystrom_matrix", q=q, landmarks=landmarks)
    _check("nystrom_matrix", normalization, scale, q, landmarks)
    leading_shape("nystrom_matrix", q=q, landmarks=landmarks)
    dtype = compute_dtype(q, landmarks)
    q, landmarks, factor = q.to(dtype), landmarks.to(dtype), _per_head("nystrom_matrix", scale, dtype)
    kernel, solver = _with_backend(kernel, backend), _with_backend(solver, backend)
    with without_autocast(q):
        C, W_inverse = kernel(q, landmarks), _inverse_by(solver, kernel(landmarks, landmarks))
        return naive.dense_form(C, W_inverse, normalization, factor, eps_relative, eps_absolute)


def _with_backend(part: Callable[..., Result], backend: str) -> Callable[..., Result]:
    return part if backend == "auto" else partial(part, backend=backend)


def _inverse_by(solver: Solver, W: Tensor) -> Tensor:
    inverse = solver(W)
    if isinstance(inverse, IteratedInverse):
        return inverse.inverse
    if not isinstance(inverse, Tensor):
        raise TypeError(f"solver must return a tensor or an IteratedInverse, not a {type(inverse).__name__}")
    return inverse


def _per_head(op: str, scale: Tensor | float | None, dtype: torch.dtype) -> Tensor | float:
    if scale is None:
        return 1.0
    return scale.to(dtype)[..., None, None] if isinstance(scale, Tensor) else number(op, "scale", scale, dtype)


def _check(op: str, normalization: str, scale: Tensor | float | None, q: Tensor, landmarks: Tensor) -> None:
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"{op}: normalization must be one of {', '.join(NORMALIZATIONS)}, not {normalization!r}")
    if normalization == "row_sum" and scale is not None:
        raise ValueError(f"{op}: normalization='row_sum' fixes the scale of its rows: scale must be None")
    if q.dim() < 2 or landmarks.dim() < 2 or q.shape[-1] != landmarks.shape[-1]:
        raise ValueError(
            f"{op}: expected q [..., N, D] and landmarks [..., M, D] with one D, not {tuple(q.shape)} and "
            f"{tuple(landmarks.shape)}"
        )


__all__ = ["NORMALIZATIONS", "nystrom_attention", "nystrom_matrix"]
