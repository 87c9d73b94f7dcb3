"""Attention by distance in a metric that every token carries."""

import math
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from attngeo.errors import UserError
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
from attngeo.layers.connection import Connection, extended_values, mixed_with_transport
from attngeo.layers.token_metric import ConstantMetric, TokenMetric
from attngeo.ops import low_rank_metric
from attngeo.ops.low_rank_metric.macs import pairwise_macs
from attngeo.ops.riemannian_attention import hidden_pairs, riemannian_attention, seen_pairs

Metric = Literal["query", "key", "mean"]
METRICS = get_args(Metric)
Geometry = Literal["heterogeneous", "constant", "euclidean"]
GEOMETRIES = get_args(Geometry)


class RiemannianAttention(Attention):
    """softmax_j(-d_ij^2 / (2 tau)) v with d_ij^2 = (q_i - k_j)^T G (q_i - k_j), quadratic in tokens (P4).

    G_i = diag(a_i) + U_i U_i^T is the metric of the query's token, of the key's, or the mean of both; it is made from
    the layer's input, never from q, since a factor linear in q spans fewer score matrices. tau is learned per head
    and starts at sqrt(D). Geodesics are straight lines (metric taken constant along each), which is ours.
    By default one metric a token serves all heads (`metric_per_head=False`, ours: few parameters more than softmax).
    `geometry` "constant" has one learned metric for all tokens, "euclidean" G = I and none to learn.
    `causal` hides later tokens and `window` those so many tokens or more away, in the order of x. With `transport` a
    value reaches a token changed by a learned connection (`layers.connection`), which starts without effect.
    Distances run in float32 under autocast; memory is linear in tokens.
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
        geometry: Geometry = "heterogeneous",
        causal: bool = False,
        window: int | None = None,
        transport: bool = False,
    ) -> None:
        super().__init__(dim, heads, landmarks=landmarks, rotary=rotary)
        require_one_of("metric", metric, METRICS)
        require_one_of("geometry", geometry, GEOMETRIES)
        if window is not None and window < 1:
            raise UserError(f"attention option window is {window}", "give 1 or more tokens, or leave it out")
        self.rank = rank
        self.metric = metric
        self.geometry = geometry
        self.causal = causal
        self.window = window
        self.query_key_value = init_linear(nn.Linear(dim, 3 * dim))
        features = dim if metric_per_head else self.head_dim
        self.token_metric: TokenMetric | ConstantMetric | None = None
        if geometry == "heterogeneous":
            self.token_metric = TokenMetric(dim, features, rank)
        elif geometry == "constant":
            self.token_metric = ConstantMetric(features, rank)
        self.connection = Connection(dim, features, rank) if transport else None
        self.log_temperature = nn.Parameter(torch.full((heads,), math.log(self.head_dim) / 2))
        self.projection = init_linear(nn.Linear(dim, dim))

    def forward(self, x: Tensor, grid: Grid, *, key_mask: Tensor | None = None) -> Tensor:
        """[B, N, C] -> [B, N, C]; tokens where `key_mask` [B, N] is False are padding that none attends to."""
        query, key, value = self._query_key_value(x, grid)
        diagonal, factor = self._metric(x)
        given = value
        if self.connection is not None:
            maps = [self._by_head(part) for part in self.connection(x)]
            given = extended_values(full_precision(value), key, maps[2])
        mixed = riemannian_attention(
            query,
            key,
            given,
            diagonal,
            factor,
            self._temperature(),
            metric=self.metric if self.geometry == "heterogeneous" else "constant",
            causal=self.causal,
            window=self.window,
            key_mask=key_mask,
        )
        if self.connection is not None:
            mixed = mixed_with_transport(mixed, query, *maps[:2])
        return self.projection(self.merge_heads(mixed.to(value.dtype)))

    def attention_rows(self, x: Tensor, grid: Grid, tokens: Tokens, *, key_mask: Tensor | None = None) -> Tensor:
        if self.connection is not None:
            raise UserError(
                "values that a connection transports do not arrive as rows of weights times values",
                "leave the attention option transport out",
            )
        query, key, _ = self._query_key_value(x, grid)
        query = select_tokens(query, tokens)
        diagonal, factor = self._metric(x)
        if self.geometry != "heterogeneous":
            diagonal = diagonal.unsqueeze(-2).expand_as(key)
            factor = factor.unsqueeze(-3).expand(*key.shape, -1)
        # The mean metric asks for the same tokens as queries and keys: it is taken by its halves.
        found = []
        if self.metric != "key":
            own = select_tokens(diagonal, tokens)
            own_factor = select_tokens(factor.flatten(-2), tokens).unflatten(-1, factor.shape[-2:])
            found.append(low_rank_metric.pairwise_squared_distance(query, key, own, own_factor, metric="query"))
        if self.metric != "query":
            found.append(low_rank_metric.pairwise_squared_distance(query, key, diagonal, factor, metric="key"))
        scores = torch.stack(found).mean(0) / (-2.0 * self._temperature()[:, None, None])
        position = torch.as_tensor(tokens, device=x.device) % x.shape[1]
        hidden = hidden_pairs(position, x.shape[1], self.causal, self.window, key_mask)
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
        return weights.masked_fill(hidden.all(-1, keepdim=True), 0.0)

    def token_macs(self, grid: Grid) -> TokenMacs:
        """Of the pairs of tokens that are seen."""
        tokens = grid[0] * grid[1]
        pairs = seen_pairs(tokens, self.causal, self.window)
        if self.geometry == "heterogeneous":
            products = pairwise_macs(pairs, 1, self.dim, self.rank, self.metric)
        else:
            products = pairs * self.dim
        values = self.dim if self.connection is None else self.dim + self.rank * (self.dim + self.heads)
        return TokenMacs(products=products + pairs * values)

    def _query_key_value(self, x: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (self.split_heads(part) for part in self.query_key_value(x).chunk(3, dim=-1))
        return self.rotate(full_precision(query), grid), self.rotate(full_precision(key), grid), value

    def _metric(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """a [B, H, N, D] and U [B, H, N, D, R], or a [1, H or 1, D] and U [1, H or 1, D, R] for all tokens."""
        if isinstance(self.token_metric, TokenMetric):
            diagonal, factor = self.token_metric(x)
            return self._by_head(diagonal), self._by_head(factor)
        if self.token_metric is None:
            wide = full_precision(self.log_temperature)
            return wide.new_ones(1, 1, self.head_dim), wide.new_zeros(1, 1, self.head_dim, 0)
        diagonal, factor = (full_precision(part) for part in self.token_metric())
        return diagonal.reshape(1, -1, self.head_dim), factor.reshape(1, -1, self.head_dim, self.rank)

    def _temperature(self) -> Tensor:
        return full_precision(self.log_temperature).exp()

    def _by_head(self, x: Tensor) -> Tensor:
        """[B, N, F, ...] -> [B, H, N, D, ...] in full precision; what the heads share is expanded."""
        x = full_precision(x)
        if x.shape[2] == self.dim:
            return x.unflatten(2, (self.heads, self.head_dim)).transpose(1, 2)
        return x.unsqueeze(1).expand(-1, self.heads, *x.shape[1:])
