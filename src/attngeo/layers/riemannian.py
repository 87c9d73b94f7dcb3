"""Attention by distance in a metric that every token carries."""

import math
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from attngeo.layers.attention import (
    Attention,
    Grid,
    TokenMacs,
    Tokens,
    full_precision,
    init_linear,
    require_one_of,
    select_tokens,
)
from attngeo.layers.token_metric import TokenMetric
from attngeo.ops import low_rank_metric
from attngeo.ops.low_rank_metric.macs import pairwise_macs

Metric = Literal["query", "key", "mean"]
METRICS = get_args(Metric)


class RiemannianAttention(Attention):
    """softmax_j(-d_ij^2 / (2 tau)) v with d_ij^2 = (q_i - k_j)^T G (q_i - k_j), quadratic in tokens (P4).

    G_i = diag(a_i) + U_i U_i^T is the metric of the query's token, of the key's, or the mean of both; it is made from
    the layer's input, never from q, since a factor linear in q spans fewer score matrices. tau is learned per head
    and starts at sqrt(D). Geodesics are straight lines (metric taken constant along each), which is ours.
    By default one metric a token serves all heads (`metric_per_head=False`, ours: few parameters more than softmax).
    Distances run in float32 under autocast.
    """

    kind: ClassVar[str] = "riemannian"

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        landmarks: Grid = (7, 7),
        rotary: bool = True,
        rank: int = 2,
        metric: Metric = "query",
        metric_per_head: bool = False,
    ) -> None:
        super().__init__(dim, heads, landmarks=landmarks, rotary=rotary)
        require_one_of("metric", metric, METRICS)
        self.rank = rank
        self.metric = metric
        self.query_key_value = init_linear(nn.Linear(dim, 3 * dim))
        self.token_metric = TokenMetric(dim, dim if metric_per_head else self.head_dim, rank)
        self.log_temperature = nn.Parameter(torch.full((heads,), math.log(self.head_dim) / 2))
        self.projection = init_linear(nn.Linear(dim, dim))

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        query, key, value = self._query_key_value(x, grid)
        diagonal, factor = self._metric(x)
        weights = self._weights(
            low_rank_metric.pairwise_squared_distance(query, key, diagonal, factor, metric=self.metric)
        )
        return self.projection(self.merge_heads(weights.to(value.dtype) @ value))

    def attention_rows(self, x: Tensor, grid: Grid, tokens: Tokens) -> Tensor:
        query, key, _ = self._query_key_value(x, grid)
        query = select_tokens(query, tokens)
        diagonal, factor = self._metric(x)
        # The mean metric asks for the same tokens as queries and keys: it is taken by its halves.
        found = []
        if self.metric != "key":
            own = select_tokens(diagonal, tokens)
            own_factor = select_tokens(factor.flatten(-2), tokens).unflatten(-1, (-1, self.rank))
            found.append(low_rank_metric.pairwise_squared_distance(query, key, own, own_factor, metric="query"))
        if self.metric != "query":
            found.append(low_rank_metric.pairwise_squared_distance(query, key, diagonal, factor, metric="key"))
        return self._weights(torch.stack(found).mean(0))

    def token_macs(self, grid: Grid) -> TokenMacs:
        tokens = grid[0] * grid[1]
        distances = pairwise_macs(tokens, tokens, self.dim, self.rank, self.metric)
        return TokenMacs(products=distances + tokens * tokens * self.dim)

    def _query_key_value(self, x: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (self.split_heads(part) for part in self.query_key_value(x).chunk(3, dim=-1))
        return self.rotate(full_precision(query), grid), self.rotate(full_precision(key), grid), value

    def _metric(self, x: Tensor) -> tuple[Tensor, Tensor]:
        diagonal, factor = self.token_metric(x)
        return self._by_head(diagonal), self._by_head(factor)

    def _weights(self, squared_distance: Tensor) -> Tensor:
        temperature = full_precision(self.log_temperature).exp()[:, None, None]
        return torch.softmax(squared_distance / (-2 * temperature), dim=-1)

    def _by_head(self, x: Tensor) -> Tensor:
        """[B, N, F, ...] -> [B, H, N, D, ...] in full precision; a metric shared by the heads is expanded."""
        x = full_precision(x)
        if x.shape[2] == self.dim:
            return x.unflatten(2, (self.heads, self.head_dim)).transpose(1, 2)
        return x.unsqueeze(1).expand(-1, self.heads, *x.shape[1:])
