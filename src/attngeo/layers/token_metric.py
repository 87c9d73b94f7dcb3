"""A symmetric positive definite metric for every token: G_i = diag(a_i) + U_i U_i^T."""

import math
from typing import ClassVar

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

# Standard deviation at which entries of U start on layer-normalised tokens; at exactly 0 their gradient vanishes.
FACTOR_START = 0.02


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
        nn.init.constant_(self.diagonal.bias, math.log(math.expm1(1.0)))
        std = FACTOR_START / math.sqrt(dim)
        trunc_normal_(self.factor.weight, std=std, a=-2 * std, b=2 * std)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        diagonal = nn.functional.softplus(self.diagonal(x))
        # softplus underflows to 0 far below; the smallest normal number keeps the metric definite.
        diagonal = diagonal.clamp_min(torch.finfo(diagonal.dtype).tiny)
        return diagonal, self.factor(x).unflatten(-1, (-1, self.rank))
