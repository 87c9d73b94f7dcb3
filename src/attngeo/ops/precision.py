"""The precision policy of the operators: half precision is computed in float32, and autocast never reaches inside.

Under autocast the result is float32 (as torch does for softmax and cdist); outside it has the inputs' type.
"""

from contextlib import AbstractContextManager

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any tensor is float64, else float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def result_dtype(*tensors: Tensor) -> torch.dtype:
    """What the caller gets back: the compute type under autocast, else the promoted type of the inputs."""
    if torch.is_autocast_enabled(tensors[0].device.type):
        return compute_dtype(*tensors)
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def without_autocast(tensor: Tensor) -> AbstractContextManager[None]:
    """Context in which matrix products keep the type of their inputs."""
    return torch.autocast(device_type=tensor.device.type, enabled=False)
