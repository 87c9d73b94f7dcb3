"""Injective linear attention in InLine's form, the linear baseline without a kernel."""

from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from attngeo.layers.attention import (
    Attention,
    Grid,
    TokenMacs,
    Tokens,
    autocast_off,
    full_precision,
    init_linear,
    require_one_of,
    select_tokens,
)
from attngeo.layers.local_convolution import LocalConvolution
from attngeo.ops.precision import product

FeatureMap = Literal["identity", "relu", "exp"]

FEATURE_MAPS = get_args(FeatureMap)


class LinearInjectiveAttention(Attention):
    """Z v with z_ij = s (phi(q_i) . phi(k_j) - mean over j) + 1/N, linear in tokens; its rows sum to 1.

    q and k are scaled by D^(-1/4) each and turned by rotary angles after phi, so that phi . phi depends on relative
    positions. InLine's s is 1/N; here it is learned per head from there, as in the kernel kinds, and the local term
    is a depthwise 3 x 3 convolution of v where InLine predicts nine weights from the image (both ours).
    """

    kind: ClassVar[str] = "linear_injective"

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        landmarks: Grid = (7, 7),
        rotary: bool = True,
        feature_map: FeatureMap = "identity",
        local_convolution: bool = True,
    ) -> None:
        super().__init__(dim, heads, landmarks=landmarks, rotary=rotary)
        require_one_of("feature_map", feature_map, FEATURE_MAPS)
        self.feature_map = feature_map
        self.query_key_value = init_linear(nn.Linear(dim, 3 * dim))
        self.projection = init_linear(nn.Linear(dim, dim))
        self.local_convolution = LocalConvolution(dim) if local_convolution else None
        self.scale = nn.Parameter(torch.ones(heads))

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        query, key, value = self.query_key_value(x).chunk(3, dim=-1)
        query, key = self._feature(query, grid), self._feature(key, grid)
        by_head = full_precision(self.split_heads(value))
        with autocast_off(x):
            mean = by_head.mean(-2, keepdim=True)
            attended = self._head_scale(query) * product(query, product(key.mT, by_head - mean)) + mean
        out = self.merge_heads(attended).to(value.dtype)
        if self.local_convolution is not None:
            out = out + self.local_convolution(value, grid)
        projected: Tensor = self.projection(out)
        return projected

    def attention_rows(self, x: Tensor, grid: Grid, tokens: Tokens) -> Tensor:
        query, key, _ = self.query_key_value(x).chunk(3, dim=-1)
        query, key = self._feature(query, grid), self._feature(key, grid)
        with autocast_off(x):
            rows = product(select_tokens(query, tokens), key.mT)
            return self._head_scale(query) * (rows - rows.mean(-1, keepdim=True)) + 1.0 / rows.shape[-1]

    def token_macs(self, grid: Grid) -> TokenMacs:
        return TokenMacs(products=2 * grid[0] * grid[1] * self.dim * self.head_dim)

    def _head_scale(self, x: Tensor) -> Tensor:
        return full_precision(self.scale)[:, None, None] / x.shape[-2]

    def _feature(self, projected: Tensor, grid: Grid) -> Tensor:
        x = full_precision(self.split_heads(projected)) * self.head_dim**-0.25
        if self.feature_map != "identity":
            x = x.relu() if self.feature_map == "relu" else x.exp()
        return self.rotate(x, grid)
