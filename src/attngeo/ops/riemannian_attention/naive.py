"""Attention by distance in the tokens' metrics as its definition reads, with every N x M map in memory."""

from typing import Literal

import torch
from torch import Tensor

from attngeo.ops.low_rank_metric import pairwise_squared_distance

Metric = Literal["query", "key", "mean", "constant"]


def riemannian_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    U: Tensor,
    tau: Tensor,
    *,
    metric: Metric = "query",
    causal: bool = False,
    window: int | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """softmax_j(-d_ij^2 / (2 tau)) v_j with the arguments of the streamed form, which it checks in float64."""
    queries, keys = q.shape[-2], k.shape[-2]
    if metric == "constant":
        a = a.unsqueeze(-2).expand(*q.shape[:-2], queries, -1)
        U = U.unsqueeze(-3).expand(*q.shape[:-2], queries, -1, -1)
    distance = pairwise_squared_distance(q, k, a, U, "query" if metric == "constant" else metric)
    scores = -distance / (2.0 * tau[:, None, None])
    position = torch.arange(queries, device=q.device) + keys - queries
    hidden = hidden_pairs(position, keys, causal, window, key_mask)
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    # A row that sees nothing is 0 / 0: its weights are zeros.
    return weights.masked_fill(hidden.all(-1, keepdim=True), 0.0) @ v


def hidden_pairs(
    position: Tensor, keys: int, causal: bool, window: int | None, key_mask: Tensor | None = None
) -> Tensor:
    """[B or 1, 1, N, M], True where queries at `position` [N] among M keys do not see a key."""
    ahead = torch.arange(keys, device=position.device) - position[:, None]
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if causal:
        hidden |= ahead > 0
    if window is not None:
        hidden |= ahead.abs() >= window
    return hidden[None, None] if key_mask is None else hidden | ~key_mask[:, None, None, :]


def seen_pairs(tokens: int, causal: bool, window: int | None) -> int:
    """Pairs of a token with one that it sees (window >= 1), among as many keys as queries, without padding."""
    reach = tokens if window is None else min(window, tokens)
    behind = reach * tokens - reach * (reach - 1) // 2  # the token itself among them
    return behind if causal else 2 * behind - tokens
