"""What the pairwise kernels share: checks and the call of a form, their products in plain torch, their cost."""

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attngeo.ops import backend as _backend
from attngeo.ops.inputs import leading_shape, without_frames
from attngeo.ops.precision import compute_dtype, product, result_dtype, without_autocast

# Where there is no memory for so many numbers torch prints the frames of a compiled operator; asking before it runs
# costs nothing, since pages are only taken as they are written.
_ASKED_FOR_FIRST = 2**28


def kernel_by(forms: dict[str, ModuleType], op: str, backend: str, q: Tensor, k: Tensor, *options: Any) -> Tensor:
    """The kernel `op` of a form in `forms`: [...,N,D], [...,M,D] -> [...,N,M]; the tensors were checked."""
    _check_shapes(op, q, k)
    form = forms[_backend.resolve(op, backend, q, k)]
    dtype, result = compute_dtype(q, k), result_dtype(q, k)
    rows, landmarks = _broadcast(op, q=q.to(dtype), k=k.to(dtype))
    shape = (*rows.shape[:-1], k.shape[-2])
    try:
        if not torch.compiler.is_compiling() and rows.is_cpu and math.prod(shape) >= _ASKED_FOR_FIRST:
            rows.new_empty(shape)
        kernel: Tensor = getattr(form, op)(rows, landmarks, *options)
    except RuntimeError as error:
        raise without_frames(
            op, error, shape, dtype, f"{op}_matmul multiplies it by values without forming it"
        ) from None
    return kernel if result == dtype else kernel.to(result)


def product_by(
    forms: dict[str, ModuleType], op: str, backend: str, q: Tensor, k: Tensor, v: Tensor, *options: Any
) -> Tensor:
    """The product `op` of a form in `forms`: [...,N,D], [...,M,D], [...,M,V] -> [...,N,V]; the tensors were checked."""
    _check_shapes(op, q, k)
    if v.dim() < 2 or v.shape[-2] != k.shape[-2]:
        raise ValueError(f"{op}: expected values [..., {k.shape[-2]}, V], a row for each of k, not {tuple(v.shape)}")
    choice = _backend.resolve(op, backend, q, k, v)
    dtype, result = compute_dtype(q, k, v), result_dtype(q, k, v)
    rows, landmarks, values = _broadcast(op, q=q.to(dtype), k=k.to(dtype), v=v.to(dtype))
    try:
        output: Tensor = getattr(forms[choice], op)(rows, landmarks, values, *options)
    except RuntimeError as error:
        if choice == "compiled":
            raise
        shape = (*rows.shape[:-1], k.shape[-2])
        raise without_frames(op, error, shape, dtype, "the compiled form keeps none of them") from None
    return output if result == dtype else output.to(result)


def weighted_sum(exponent: Tensor, v: Tensor, normalize: bool) -> Tensor:
    """exp(exponent) v, with `normalize` softmax(exponent) v: [...,N,M], [...,M,V] -> [...,N,V]."""
    weights = torch.softmax(exponent, dim=-1) if normalize else torch.exp(exponent)
    with without_autocast(v):
        return product(weights, v)


def kernel_macs(rows: int, landmarks: int, channels: int) -> int:
    """Multiply-accumulates of a kernel matrix: one for each coordinate's term of a distance; exponentials are free."""
    return rows * landmarks * channels


def matmul_macs(rows: int, landmarks: int, channels: int, values: int) -> int:
    """Multiply-accumulates of a kernel matrix and of its product with values."""
    return kernel_macs(rows, landmarks, channels) + rows * landmarks * values


def _check_shapes(op: str, q: Tensor, k: Tensor) -> None:
    if q.dim() < 2 or k.dim() < 2 or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"{op}: expected q [..., N, D] and k [..., M, D] with one D, not {tuple(q.shape)} and {tuple(k.shape)}"
        )


def _broadcast(op: str, **tensors: Tensor) -> list[Tensor]:
    """The tensors with all leading axes expanded to their common shape."""
    leading = leading_shape(op, **tensors)
    return [
        tensor if tensor.shape[:-2] == leading else tensor.expand(*leading, *tensor.shape[-2:])
        for tensor in tensors.values()
    ]
