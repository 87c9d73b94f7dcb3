"""Symmetric positive definite metrics G = diag(a) + U U^T: one for every token, or one for all."""

import math
from typing import ClassVar

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

# Standard deviation at which entries of U start on layer-normalised tokens; at exactly 0 their gradient vanishes.
FACTOR_START = 0.02
_SOFTPLUS_START = math.log(math.expm1(1.0))  # softplus takes it to 1


class TokenMetric(nn.Module):
    """Map tokens [B, N, C] to a [B, N, F] > 0 and U [B, N, F, R], both linear in the token up to a's softplus.

    a starts at exactly 1 and U small but not 0, so that the metric starts next to the Euclidean one.
    """

    keeps_its_start: ClassVar[bool] = True

    def __init__(self, dim: int, features: int, rank: int) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"the metric rank must be at least 1, not {rank}")
        self.rank = rank
        self.diagonal = nn.Linear(dim, features)
        self.factor = nn.Linear(dim, features * rank, bias=False)
        nn.init.zeros_(self.diagonal.weight)
        nn.init.constant_(self.diagonal.bias, _SOFTPLUS_START)
        std = FACTOR_START / math.sqrt(dim)
        trunc_normal_(self.factor.weight, std=std, a=-2 * std, b=2 * std)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return _positive(self.diagonal(x)), self.factor(x).unflatten(-1, (-1, self.rank))


class ConstantMetric(nn.Module):
    """A metric a [F] > 0 and U [F, R] of its own for all tokens: what a metric for every token is compared with.

    It starts as `TokenMetric` does on layer-normalised tokens.
    """

    keeps_its_start: ClassVar[bool] = True

    def __init__(self, features: int, rank: int) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"the metric rank must be at least 1, not {rank}")
        self.rank = rank
        self.diagonal = nn.Parameter(torch.full((features,), _SOFTPLUS_START))
        self.factor = nn.Parameter(torch.empty(features, rank))
        trunc_normal_(self.factor, std=FACTOR_START, a=-2 * FACTOR_START, b=2 * FACTOR_START)

    def forward(self) -> tuple[Tensor, Tensor]:
        return _positive(self.diagonal), self.factor


def _positive(x: Tensor) -> Tensor:
    diagonal = nn.functional.softplus(x)
    # softplus underflows to 0 far below; the smallest normal number keeps the metric definite.
    return diagonal.clamp_min(torch.finfo(diagonal.dtype).tiny)
