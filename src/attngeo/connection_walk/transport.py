"""Transports of the connection walk and how close they come to scaled isometries.

A head transports by M_h = W_V W_O, an edge by T_ij = sum_h g^h_ij (H M_h) with the gates g of `walk.gates`. Both have a
rank fixed by shape: D for a head, min(C, K D) for an edge, where K is the number of value groups. (With grouped-query
attention the heads of one group share W_V, so that the edge's rank is K D and not H D.)
Spectra never need a C x C decomposition: with W_V = Q_V R_V and W_O^T = Q_O R_O the singular values of W_V W_O are
those of the D x D matrix R_V R_O^T, and those of an edge come from a K D x K D Gram matrix.
"""

import torch
from torch import Tensor

from attngeo.language_models.architectures import HeadWeights


def isometry_score(singular_values: Tensor, rank: int) -> Tensor:
    """(sum s)^2 / (r sum s^2) over the last axis: 1 for a scaled isometry of rank r, NaN for the zero map.

    The best scaled isometry leaves the relative Frobenius residual sqrt(1 - score). `rank` is fixed by shape and may be
    below the number of singular values given (the others are then zero by construction), never above.
    """
    if not 1 <= rank <= singular_values.shape[-1]:
        raise ValueError(f"rank {rank} does not fit {singular_values.shape[-1]} singular values")
    return singular_values.sum(-1).square() / (rank * singular_values.square().sum(-1))


def head_transports(weights: HeadWeights) -> Tensor:
    """M_h = W_V W_O of every head, [H, C, C]: the naive form, for one small model at a time."""
    return weights.value[weights.group] @ weights.output


def head_singular_values(value: Tensor, output: Tensor) -> Tensor:
    """Nonzero singular values of value @ output, descending: [..., C, D] and [..., D, C] -> [..., min(C, D)]."""
    value_factor = torch.linalg.qr(value, mode="r").R
    output_factor = torch.linalg.qr(output.transpose(-1, -2), mode="r").R
    return torch.linalg.svdvals(value_factor @ output_factor.transpose(-1, -2))


def edge_rank(weights: HeadWeights) -> int:
    """Rank that the shapes allow an edge's transport, min(C, K D)."""
    return min(weights.model_dim, weights.groups * weights.head_dim)


def edge_transports(weights: HeadWeights, gates: Tensor) -> Tensor:
    """T = sum_h g_h (H M_h) for gates [E, H] -> [E, C, C]: the naive form."""
    return torch.einsum("eh,hcd->ecd", gates * weights.heads, head_transports(weights))


def edge_singular_values(weights: HeadWeights, gates: Tensor) -> Tensor:
    """Singular values of the transports of E edges, ascending: gates [E, H] -> [E, edge_rank].

    T = W_V Z with W_V [C, K D] side by side and Z [K D, C] the gated sum of W_O over each group's heads. The squared
    values are the eigenvalues of R_V Z Z^T R_V^T, so that the values are exact to 1e-8 of the largest.
    """
    edges, side = gates.shape[0], weights.groups * weights.head_dim
    rank = edge_rank(weights)
    stacked = weights.value.transpose(0, 1).reshape(weights.model_dim, side)
    value_factor = torch.linalg.qr(stacked, mode="r").R
    values = torch.empty(edges, rank, dtype=stacked.dtype)
    for edge in range(edges):
        gated = _gated_output(weights, gates[edge])
        core = value_factor @ gated
        gram = core @ core.T if core.shape[0] <= core.shape[1] else core.T @ core
        values[edge] = torch.linalg.eigvalsh(gram)[-rank:].clamp_min(0).sqrt()
    return values


def transport_along(weights: HeadWeights, gates: Tensor, states: Tensor) -> Tensor:
    """x T for E edges without forming T: gates [E, H], states [E, C] -> [E, C]."""
    moved = torch.einsum("ec,kcd->ekd", states, weights.value)[:, weights.group]
    return torch.einsum("ehd,hdc->ec", moved * (gates * weights.heads)[:, :, None], weights.output)


def _gated_output(weights: HeadWeights, gates: Tensor) -> Tensor:
    """Z [K D, C]: W_O weighted by H g_h and added up over the heads of each value group; gates [H]."""
    summed = torch.zeros(weights.groups, weights.head_dim, weights.model_dim, dtype=weights.output.dtype)
    summed.index_add_(0, weights.group, weights.output * (gates * weights.heads)[:, None, None])
    return summed.reshape(weights.groups * weights.head_dim, weights.model_dim)
