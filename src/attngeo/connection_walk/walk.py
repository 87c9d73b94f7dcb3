"""Attention as one edge-dependent connection walk: y_i = sum_j P_ij x_j T_ij (claims P3.a and P3.b).

Row vectors; P_ij = (1/H) sum_h A^h_ij; g^h_ij = A^h_ij / sum_h' A^h'_ij; T_ij = sum_h g^h_ij (H W_V W_O). Where
P_ij = 0, as behind a causal mask, there is no edge and T_ij = 0. Biases add (row sum of A^h) b_V W_O + b_O: the row
sums are those of the maps at hand, since a float32 softmax adds up to 1 only within 1e-7.
"""

import math

import torch
from torch import Tensor

from attngeo.language_models.architectures import HeadWeights

_CHUNK_ELEMENTS = 2_000_000  # 16 MB of float64 transported states at a time, whatever the window


def effective_graph(attention: Tensor) -> Tensor:
    """P, the mean of the heads' maps: [H, N, N] -> float64 [N, N]."""
    return attention.mean(0).double()


def gates(attention: Tensor) -> Tensor:
    """g^h_ij, the share of each head in each edge, 0 where there is no edge: [H, ...] -> [H, ...]."""
    total = attention.sum(0)
    return torch.where(total != 0, attention / torch.where(total != 0, total, 1.0), 0.0)


def gate_entropy(attention: Tensor) -> tuple[float, float]:
    """Mean entropy of the gates of the edges that the walk takes, nats; the same among the tokens after the first.

    log H for equal gates, 0 where each edge is one head's; NaN where no head pays any attention. [H, N, N].
    """
    total = attention.sum(0)
    weighted = torch.special.xlogy(total, total) - torch.special.xlogy(attention, attention).sum(0)
    sums = [
        (
            weighted[start:, start:].sum(dtype=torch.float64).item(),
            total[start:, start:].sum(dtype=torch.float64).item(),
        )
        for start in (0, 1)
    ]
    whole, without_first = (entropy / taken if taken > 0 else math.nan for entropy, taken in sums)
    return whole, without_first


def uniform_attention(heads: int, tokens: int, causal: bool) -> Tensor:
    """The control in which every token attends alike to all that it may see, whatever the head: float64 [H, N, N]."""
    graph = torch.ones(tokens, tokens, dtype=torch.float64)
    graph = graph.tril() if causal else graph
    return (graph / graph.sum(1, keepdim=True)).expand(heads, -1, -1)


def edge_messages(edge_gates: Tensor, moved: Tensor) -> Tensor:
    """x_j T_ij for all edges of some rows: gates [H, I, N], the states H x_j M_h [H, N, C] -> [I, N, C]."""
    return torch.einsum("hij,hjc->ijc", edge_gates, moved)


def connection_walk(attention: Tensor, states: Tensor, weights: HeadWeights) -> Tensor:
    """The block's output as one step of the walk, edge by edge: [H, N, N], [N, C] -> [N, C]."""
    tokens, width = states.shape
    rows = max(1, _CHUNK_ELEMENTS // (tokens * width))
    moved = weights.heads * (states @ weights.value)[weights.group] @ weights.output
    steps = []
    for some in attention.split(rows, dim=1):
        messages = edge_messages(gates(some), moved)
        steps.append(torch.einsum("ij,ijc->ic", effective_graph(some), messages))
    return torch.cat(steps) + bias_term(attention, weights) + weights.output_bias


def head_walk(attention: Tensor, states: Tensor, weights: HeadWeights) -> Tensor:
    """Each head alone, a walk with constant transport M_h and its value bias: -> [H, N, C], b_O left out."""
    moved = states @ weights.value
    biases = attention.sum(-1)[:, :, None] * weights.value_bias[weights.group][:, None, :]
    return (attention @ moved[weights.group] + biases) @ weights.output


def bias_term(attention: Tensor, weights: HeadWeights) -> Tensor:
    """sum_h (row sum of A^h) b_V W_O, [N, C]."""
    carried = torch.einsum("hd,hdc->hc", weights.value_bias[weights.group], weights.output)
    return attention.sum(-1).T @ carried


def sample_edges(graph: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`count` edges (i, j) as the walk meets them, i uniform and j with probability P_ij; int64 [count] each."""
    rows = torch.randint(graph.shape[0], (count,), generator=generator)
    columns = torch.multinomial(graph[rows], 1, generator=generator).squeeze(1)
    return rows, columns
