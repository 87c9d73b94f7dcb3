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
    ahead = torch.arange(keys, device=q.device) - position[:, None]
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if causal:
        hidden |= ahead > 0
    if window is not None:
        hidden |= ahead.abs() >= window
    hidden = hidden.expand_as(scores)
    if key_mask is not None:
        hidden = hidden | ~key_mask[:, None, None, :]
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    # A row that sees nothing is 0 / 0: its weights are zeros.
    return weights.masked_fill(hidden.all(-1, keepdim=True), 0.0) @ v
