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
    op = "nystrom_attention"
    _check(op, normalization, scale, q=q, landmarks=landmarks, v=v)
    if v.dim() < 2 or v.shape[-2] != q.shape[-2]:
        raise ValueError(f"{op}: expected v [..., {q.shape[-2]}, Dv], one row for each token, not {tuple(v.shape)}")
    leading = leading_shape(op, q=q, landmarks=landmarks, v=v)
    if kernel_matmul is not None and normalization == "injective":
        raise ValueError("normalization='injective' needs every kernel value: kernel_matmul must be None")
    _backend.resolve(op, "naive", q, landmarks, v)
    dtype = compute_dtype(q, landmarks, v)
    factor, *eps = _numbers(op, scale, leading, dtype, eps_relative, eps_absolute)
    q, landmarks, values = q.to(dtype), landmarks.to(dtype), v.to(dtype)
    kernel, solver = _with_backend(kernel, backend), _with_backend(solver, backend)
    with without_autocast(q):
        W_inverse = _inverse_by(solver, kernel(landmarks, landmarks))
        if kernel_matmul is not None:
            matmul = _with_backend(kernel_matmul, backend)
            output = naive.products_form(q, landmarks, values, W_inverse, matmul, normalization, factor)
        else:
            C = kernel(q, landmarks)
            output = naive.linear_form(C, W_inverse, values, normalization, factor, *eps)
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
    op = "nystrom_matrix"
    _check(op, normalization, scale, q=q, landmarks=landmarks)
    leading = leading_shape(op, q=q, landmarks=landmarks)
    dtype = compute_dtype(q, landmarks)
    factor, *eps = _numbers(op, scale, leading, dtype, eps_relative, eps_absolute)
    q, landmarks = q.to(dtype), landmarks.to(dtype)
    kernel, solver = _with_backend(kernel, backend), _with_backend(solver, backend)
    with without_autocast(q):
        C, W_inverse = kernel(q, landmarks), _inverse_by(solver, kernel(landmarks, landmarks))
        return naive.dense_form(C, W_inverse, normalization, factor, *eps)


def _with_backend(part: Callable[..., Result], backend: str) -> Callable[..., Result]:
    return part if backend == "auto" else partial(part, backend=backend)


def _inverse_by(solver: Solver, W: Tensor) -> Tensor:
    inverse = solver(W)
    if isinstance(inverse, IteratedInverse):
        return inverse.inverse
    if not isinstance(inverse, Tensor):
        raise TypeError(f"solver must return a tensor or an IteratedInverse, not a {type(inverse).__name__}")
    return inverse


def _numbers(
    op: str,
    scale: Tensor | float | None,
    leading: torch.Size,
    dtype: torch.dtype,
    eps_relative: float,
    eps_absolute: float,
) -> tuple[Tensor | float, float, float]:
    """The factor of the kernel part, as it broadcasts with [..., N, Dv], and the two numbers of the eps rule."""
    factor: Tensor | float
    if isinstance(scale, Tensor):
        if scale.dim() > len(leading) or any(
            given not in (1, wanted) for given, wanted in zip(reversed(scale.shape), reversed(leading), strict=False)
        ):
            raise ValueError(f"{op}: scale {tuple(scale.shape)} does not broadcast to the heads {tuple(leading)}")
        factor = scale.to(dtype)[..., None, None]
    else:
        factor = 1.0 if scale is None else number(op, "scale", scale, dtype)
    eps_relative = number(op, "eps_relative", eps_relative, dtype)
    return factor, eps_relative, number(op, "eps_absolute", eps_absolute, dtype)


def _check(op: str, normalization: str, scale: Tensor | float | None, **tensors: Tensor) -> None:
    check_tensors(op, **tensors, **({"scale": scale} if isinstance(scale, Tensor) else {}))
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"{op}: normalization must be one of {', '.join(NORMALIZATIONS)}, not {normalization!r}")
    if normalization == "row_sum" and scale is not None:
        raise ValueError(f"{op}: normalization='row_sum' fixes the scale of its rows: scale must be None")
    q, landmarks = tensors["q"], tensors["landmarks"]
    if q.dim() < 2 or landmarks.dim() < 2 or q.shape[-1] != landmarks.shape[-1]:
        raise ValueError(
            f"{op}: expected q [..., N, D] and landmarks [..., M, D] with one D, not {tuple(q.shape)} and "
            f"{tuple(landmarks.shape)}"
        )


__all__ = ["NORMALIZATIONS", "nystrom_attention", "nystrom_matrix"]
