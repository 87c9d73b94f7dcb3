"""What every operator asks of its arguments before it does anything, in one wording; no check looks into a tensor.

Of the wrong kind is a TypeError, of the right kind but unfit a ValueError; both name the operator and the argument.
"""

import math
from typing import Any

import torch
from torch import Tensor

# Half precision is there because it is computed in float32.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# What torch's CPU allocator, its size arithmetic and C++ say; a GPU's allocator has an exception of its own.
_NO_MEMORY = ("can't allocate memory", "size calculation overflowed", "bad_alloc")


def check_tensors(op: str, **tensors: Any) -> None:
    """Dense floating-point tensors on one device."""
    first: Tensor | None = None
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, not {_kind(tensor)}")
        if tensor.dtype not in DTYPES:
            wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise TypeError(f"{op}: {name} is {tensor.dtype}: convert it to one of {wanted}")
        if tensor.layout != torch.strided or tensor.is_nested:
            what = "a nested tensor" if tensor.is_nested else f"of layout {tensor.layout}"
            raise TypeError(f"{op}: {name} is {what}: give a dense tensor")
        if first is None:
            first = tensor
        elif tensor.device != first.device:
            where = ", ".join(f"{other} on {given.device}" for other, given in tensors.items())
            raise ValueError(f"{op}: the tensors are on different devices: {where}")


def number(op: str, name: str, value: Any, dtype: torch.dtype, remedy: str = "") -> float:
    """A finite number that the compute type can hold, as a float."""
    _require_number(op, name, value, remedy)
    if not abs(value) <= torch.finfo(dtype).max:
        raise ValueError(f"{op}: {name} must be finite in {_short(dtype)}, not {value}")
    return float(value)


def positive_number(op: str, name: str, value: Any, dtype: torch.dtype, remedy: str = "") -> float:
    """A finite number above zero whose reciprocal, too, the compute type can hold, as a float."""
    _require_number(op, name, value, remedy)
    info = torch.finfo(dtype)
    if not info.tiny <= value <= info.max:
        raise ValueError(f"{op}: {name} must be positive and finite in {_short(dtype)}, not {value}")
    return float(value)


def check_count(op: str, name: str, value: Any) -> None:
    """A whole number, not negative."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a whole number, not {_kind(value)}")
    if value < 0:
        raise ValueError(f"{op}: {name} must not be negative, not {value}")


def check_square(op: str, W: Tensor) -> None:
    """Square matrices [..., M, M]."""
    if W.dim() < 2 or W.shape[-1] != W.shape[-2]:
        raise ValueError(f"{op}: expected square matrices [..., M, M], not {tuple(W.shape)}")


def leading_shape(op: str, **tensors: Tensor) -> torch.Size:
    """The common shape of all axes before the last two."""
    leading = [tensor.shape[:-2] for tensor in tensors.values()]
    if all([shape == leading[0] for shape in leading]):  # torch's own answer takes longer than a small kernel
        return leading[0]
    try:
        return torch.broadcast_shapes(*leading)
    except RuntimeError:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"{op}: the leading axes do not broadcast: {shapes}") from None


def without_frames(op: str, error: RuntimeError, shape: tuple[int, ...], dtype: torch.dtype, remedy: str) -> Exception:
    """What to raise for `error`: itself, unless there was no memory for a result of this shape."""
    if isinstance(error, torch.OutOfMemoryError) or not any(words in str(error) for words in _NO_MEMORY):
        return error
    gib = math.prod(shape) * torch.finfo(dtype).bits / 8 / 2**30
    axes = " x ".join(map(str, shape))
    return torch.OutOfMemoryError(f"{op}: no memory for the {axes} kernel values ({gib:,.1f} GiB): {remedy}")


def _require_number(op: str, name: str, value: Any, remedy: str) -> None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return
    tensor = isinstance(value, Tensor)
    raise TypeError(f"{op}: {name} must be a number, not {_kind(value)}" + (f": {remedy}" if remedy and tensor else ""))


def _kind(value: Any) -> str:
    """What was given, in few words."""
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    return "a tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
