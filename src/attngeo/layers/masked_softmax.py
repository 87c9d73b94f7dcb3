"""Softmax attention that may look back only, for sequences; the registered kind sees every token."""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from attngeo.layers.attention import Grid, TokenMacs, Tokens, full_precision, select_tokens
from attngeo.layers.softmax import SoftmaxAttention
from attngeo.ops.riemannian_attention import seen_pairs


class MaskedSoftmaxAttention(SoftmaxAttention):
    """softmax(q k^T / sqrt(D)) v over the keys that a token may see: of x [B, N, C] with `causal` itself and earlier.

    `key_mask` [B, N] is True where a key is a token and False where it is padding; a query without keys gets zeros.
    """

    kind: ClassVar[str] = "softmax"

    def __init__(
        self, dim: int, heads: int, *, landmarks: Grid = (7, 7), rotary: bool = True, causal: bool = False
    ) -> None:
        super().__init__(dim, heads, landmarks=landmarks, rotary=rotary)
        self.causal = causal

    def forward(self, x: Tensor, grid: Grid, *, key_mask: Tensor | None = None) -> Tensor:
        query, key, value = (self.split_heads(part) for part in self.query_key_value(x).chunk(3, dim=-1))
        query, key = self.rotate(query, grid), self.rotate(key, grid)
        if key_mask is None:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        else:
            seen = key_mask[:, None, None] & self._seen(torch.arange(x.shape[1], device=x.device), x.shape[1])
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
            mixed = torch.where(seen.any(-1, keepdim=True), mixed, 0.0)
        return self.projection(self.merge_heads(mixed))

    def attention_rows(self, x: Tensor, grid: Grid, tokens: Tokens) -> Tensor:
        query, key, _ = (self.split_heads(part) for part in self.query_key_value(x).chunk(3, dim=-1))
        query, key = self.rotate(query, grid), self.rotate(key, grid)
        scores = full_precision(select_tokens(query, tokens)) @ full_precision(key).mT * self.head_dim**-0.5
        places = select_tokens(torch.arange(x.shape[1], device=x.device)[:, None], tokens)[:, 0]
        return torch.softmax(scores.masked_fill(~self._seen(places, x.shape[1]), -torch.inf), dim=-1)

    def token_macs(self, grid: Grid) -> TokenMacs:
        """Of the pairs of tokens that are seen."""
        return TokenMacs(products=2 * seen_pairs(grid[0] * grid[1], self.causal, None) * self.dim)

    def _seen(self, places: Tensor, tokens: int) -> Tensor:
        """Bool [T, N]: which keys the tokens at `places` may see."""
        keys = torch.arange(tokens, device=places.device)
        return (places[:, None] >= keys) if self.causal else torch.ones_like(places[:, None] >= keys)
