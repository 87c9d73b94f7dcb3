"""Softmax attention, and the pyramid vision transformer's form of it on pooled keys and values."""

from typing import ClassVar

import torch
from timm.layers import LayerNorm
from torch import Tensor, nn
from torch.nn import functional as F

from attngeo.layers.attention import Attention, Grid, TokenMacs, Tokens, full_precision, init_linear, select_tokens


class SoftmaxAttention(Attention):
    """softmax(q k^T / sqrt(D)) v, quadratic in tokens."""

    kind: ClassVar[str] = "softmax"

    def __init__(self, dim: int, heads: int, *, landmarks: Grid = (7, 7), rotary: bool = True) -> None:
        super().__init__(dim, heads, landmarks=landmarks, rotary=rotary)
        self.query_key_value = init_linear(nn.Linear(dim, 3 * dim))
        self.projection = init_linear(nn.Linear(dim, dim))

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        query, key, value = (self.split_heads(part) for part in self.query_key_value(x).chunk(3, dim=-1))
        query, key = self.rotate(query, grid), self.rotate(key, grid)
        return self.projection(self.merge_heads(F.scaled_dot_product_attention(query, key, value)))

    def attention_rows(self, x: Tensor, grid: Grid, tokens: Tokens) -> Tensor:
        query, key, _ = (self.split_heads(part) for part in self.query_key_value(x).chunk(3, dim=-1))
        return _softmax_rows(select_tokens(self.rotate(query, grid), tokens), self.rotate(key, grid))

    def token_macs(self, grid: Grid) -> TokenMacs:
        tokens = grid[0] * grid[1]
        return TokenMacs(products=2 * tokens * tokens * self.dim)


class SpatialReductionAttention(Attention):
    """Softmax attention of all tokens to keys and values taken from the pooled landmark grid, linear in tokens.

    The reduction is average pooling to a fixed grid, a linear layer, a norm and GELU, so that any image size works
    (PVTv2's linear form); the first PVT's strided convolution is refused by sizes that its stride does not divide.
    """

    kind: ClassVar[str] = "softmax_sr"
    uses_landmarks: ClassVar[bool] = True

    def __init__(self, dim: int, heads: int, *, landmarks: Grid = (7, 7), rotary: bool = True) -> None:
        super().__init__(dim, heads, landmarks=landmarks, rotary=rotary)
        self.query = init_linear(nn.Linear(dim, dim))
        self.reduction = init_linear(nn.Linear(dim, dim))
        self.norm = LayerNorm(dim)
        self.key_value = init_linear(nn.Linear(dim, 2 * dim))
        self.projection = init_linear(nn.Linear(dim, dim))

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        query = self.rotate(self.split_heads(self.query(x)), grid)
        key, value = self._key_value(x, grid)
        return self.projection(self.merge_heads(F.scaled_dot_product_attention(query, key, value)))

    def attention_rows(self, x: Tensor, grid: Grid, tokens: Tokens) -> Tensor:
        """Each cell's weight, spread over the tokens as its average takes them.

        What lies between the average and the values is not linear, so that these rows times values are not the output.
        """
        query = select_tokens(self.rotate(self.split_heads(self.query(x)), grid), tokens)
        weights = _softmax_rows(query, self._key_value(x, grid)[0])
        down, across = (
            F.adaptive_avg_pool1d(torch.eye(size, dtype=weights.dtype, device=weights.device), cells).mT
            for size, cells in zip(grid, self.landmark_grid(grid), strict=True)
        )
        return (down.mT @ weights.unflatten(-1, self.landmark_grid(grid)) @ across).flatten(-2)

    def _key_value(self, x: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        reduced = F.gelu(self.norm(self.reduction(self.pool(x, grid))))
        key, value = (self.split_heads(part) for part in self.key_value(reduced).chunk(2, dim=-1))
        return self.rotate(key, grid, pooled_to=self.landmark_grid(grid)), value

    def token_macs(self, grid: Grid) -> TokenMacs:
        cells = self.landmark_grid(grid)
        return TokenMacs(products=2 * grid[0] * grid[1] * cells[0] * cells[1] * self.dim)


def _softmax_rows(query: Tensor, key: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) of rows q [B, H, T, D] and k [B, H, M, D] in full precision: [B, H, T, M]."""
    scores = full_precision(query) @ full_precision(key).mT
    return torch.softmax(scores * query.shape[-1] ** -0.5, dim=-1)
