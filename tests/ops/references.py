"""Direct float64 forms that the operators are compared with, and bounds that follow from rounding alone."""

import torch
from torch import Tensor

from tests.tolerances import KERNEL_ROUNDINGS


def laplacian_reference(q: Tensor, k: Tensor, lambda_: float = 4.0) -> Tensor:
    """The definition, by broadcasting: [...,N,D], [...,M,D] -> [...,N,M] in float64."""
    return torch.exp(-(q.double().unsqueeze(-2) - k.double().unsqueeze(-3)).abs().sum(-1) / lambda_)


def laplacian_bound(kernel: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """Largest error of a kernel value computed in `dtype`: the exponent -log K is a sum of `channels` rounded terms."""
    info = torch.finfo(dtype)
    exponent = -torch.log(kernel.clamp_min(1e-300))
    return kernel * (KERNEL_ROUNDINGS + exponent * (channels + 2)) * info.eps + info.tiny


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Largest deviation over the largest reference value; 0 for empty tensors."""
    if reference.numel() == 0:
        return 0.0
    return float(((value.detach().double() - reference.detach()).abs().max() / reference.detach().abs().max()).item())
