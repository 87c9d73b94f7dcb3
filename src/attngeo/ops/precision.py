"""The precision policy of the operators: half precision is computed in float32, and autocast never reaches inside.

Under autocast the result is float32 (as torch does for softmax and cdist); outside it has the inputs' type. Nor do
torch's settings for faster float32 products (TF32, `torch.set_float32_matmul_precision`) change a result.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from attngeo.ops.tracing import constant_when_traced


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any tensor is float64, else float32."""
    for tensor in tensors:  # a loop: `any` of a generator costs as much as a small kernel
        if tensor.dtype == torch.float64:
            return torch.float64
    return torch.float32


def factor_dtype(*tensors: Tensor) -> torch.dtype:
    """The compute type, or float64 where torch may round inside of a factorisation or its derivative."""
    dtype = compute_dtype(*tensors)
    return torch.float64 if dtype == torch.float32 and _products_are_rounded(tensors[0].device.type) else dtype


def result_dtype(*tensors: Tensor) -> torch.dtype:
    """What the caller gets back: the compute type under autocast, else the promoted type of the inputs."""
    device = tensors[0].device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return compute_dtype(*tensors)
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        if tensor.dtype != dtype:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def without_autocast(tensor: Tensor) -> AbstractContextManager[None]:
    """Context in which matrix products keep the type of their inputs."""
    device = tensor.device.type
    return nullcontext() if device == "meta" else torch.autocast(device_type=device, enabled=False)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in the precision of its factors, also where torch is allowed to round those of float32 first.

    There the product is taken in float64, in the backward pass too; by default torch rounds nothing.
    """
    if a.dtype == torch.float32 and _products_are_rounded(a.device.type):
        return (a.double() @ b.double()).float()
    return a @ b


# Evaluated while torch.compile traces; a graph is traced anew when one of these settings changes.
@constant_when_traced
def _products_are_rounded(device: str) -> bool:
    """Whether torch may round the float32 factors of matrix products (to TF32 or bfloat16) on this device."""
    settings = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
    return settings.matmul.fp32_precision not in ("ieee", "none")
