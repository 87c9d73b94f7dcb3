"""The Laplacian kernel between all tokens, without landmarks."""

from typing import ClassVar

import torch
from torch import Tensor

from attngeo.layers.attention import Grid, TokenMacs, Tokens, full_precision, select_tokens
from attngeo.layers.laplacian_kernel import LaplacianKernel
from attngeo.ops.pairwise import kernel_macs, matmul_macs


class LaplacianExactAttention(LaplacianKernel):
    """Z v with Z normalised from the exact kernel K(q, k), quadratic in time: `laplacian` without Nystrom.

    With the compiled operators nothing N x N is in memory, forward or backward; the naive ones keep K.
    """

    kind: ClassVar[str] = "laplacian_exact"

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        value = self.value(x)
        query, key = self._query_and_key(x, grid)
        return self.output(self._attend(query, key, full_precision(self.split_heads(value))), value, grid)

    def attention_rows(self, x: Tensor, grid: Grid, tokens: Tokens) -> Tensor:
        query, key = self._query_and_key(x, grid)
        rows = self.kernel(select_tokens(query, tokens), key)
        if self.normalization == "row_sum":
            return rows / rows.sum(-1, keepdim=True)
        if self.normalization == "injective_row":
            rows = rows - rows.mean(-1, keepdim=True)
        elif self.normalization == "injective":
            mean, whitening = self._column_statistics(query, key)
            rows = (rows - mean.mT) * whitening.mT
        scaled = self._scaled(rows, query)
        return scaled if self.normalization == "none" else scaled + 1.0 / rows.shape[-1]

    def token_macs(self, grid: Grid) -> TokenMacs:
        tokens = grid[0] * grid[1]
        distance = kernel_macs(tokens, tokens, self.head_dim)
        statistics = 2 if self.normalization == "injective" else 0
        return TokenMacs(
            products=self.heads * (matmul_macs(tokens, tokens, self.head_dim, self.head_dim) - distance),
            nystrom=self.heads * statistics * tokens**2,
            distance=self.heads * (1 + statistics) * distance,
        )

    def _query_and_key(self, x: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        query, key = self.features(x, grid)
        return query, query if key is None else key

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.normalization in ("none", "row_sum"):
            return self.kernel_matmul(query, key, value, normalize=self.normalization == "row_sum")
        mean = value.mean(-2, keepdim=True)
        if self.normalization == "injective_row":
            # sum_j (K_ij - mean of row i) v_j = sum_j K_ij (v_j - mean v)
            return self._scaled(self.kernel_matmul(query, key, value - mean), value) + mean
        _, whitening = self._column_statistics(query, key)
        # sum_j (K_ij - mu_j) w_j v_j is K w v less its mean over i.
        mixed = self.kernel_matmul(query, key, whitening * value)
        return self._scaled(mixed - mixed.mean(-2, keepdim=True), value) + mean

    def _scaled(self, x: Tensor, like: Tensor) -> Tensor:
        scale = self.head_scale(like)
        return x if scale is None else scale[:, None, None] * x

    def _column_statistics(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Mean of each column of K and 1 / sqrt(variance + eps): [B, H, N, 1].

        K squared elementwise is the kernel at lambda / 2. E[k^2] - mean^2 cancels, therefore in float64.
        """
        tokens = query.shape[-2]
        wide_query, wide_key = query.double(), key.double()
        ones = torch.ones_like(wide_query[..., :1])
        mean = self.kernel_matmul(wide_key, wide_query, ones) / tokens
        variance = (self.kernel_matmul(wide_key, wide_query, ones, power=2) / tokens - mean.square()).clamp_min(0.0)
        whitening = torch.rsqrt(variance + self.eps_relative * variance.mean(-2, keepdim=True) + self.eps_absolute)
        return mean.to(query.dtype), whitening.to(query.dtype)
