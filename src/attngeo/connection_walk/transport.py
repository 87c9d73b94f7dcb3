"""Transports of the connection walk and how close they come to scaled isometries.

A head transports by M_h = W_V W_O, an edge by T_ij = sum_h g^h_ij (H M_h) with the gates g of `walk.gates`. Both have a
rank fixed by shape: D for a head, min(C, K D) for an edge, where K is the number of value groups. (With grouped-query
attention the heads of one group share W_V, so that the edge's rank is K D and not H D.)
Spectra never need a C x C decomposition: with W_V = Q_V R_V and W_O^T = Q_O R_O the singular values of W_V W_O are
those of the D x D matrix R_V R_O^T, and those of an edge come from a K D x K D Gram matrix. Norms and products of
transports come from D x D products of their factors (`HeadProducts`).
"""

from dataclasses import dataclass

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


def singular_value_variation(singular_values: Tensor, rank: int) -> Tensor:
    """Coefficient of variation, standard deviation / mean, of the `rank` largest singular values: 0 for an isometry.

    With the score S it is sqrt(1/S - 1); taken from the deviations themselves it loses no digits near 0.
    """
    deviations, mean = _deviations(singular_values, rank)
    return deviations.square().mean(-1).sqrt() / mean


def polar_residual(singular_values: Tensor, rank: int) -> Tensor:
    """||T - a Q||_F / ||T||_F for the nearest scaled isometry a Q, the polar factor of T: sqrt(1 - score)."""
    deviations, mean = _deviations(singular_values, rank)
    squares = deviations.square().sum(-1)
    return (squares / (squares + rank * mean.square())).sqrt()


def _deviations(singular_values: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    if not 1 <= rank <= singular_values.shape[-1]:
        raise ValueError(f"rank {rank} does not fit {singular_values.shape[-1]} singular values")
    largest = singular_values.topk(rank, dim=-1).values
    mean = largest.mean(-1)
    return largest - mean[..., None], mean


def head_transports(weights: HeadWeights) -> Tensor:
    """M_h = W_V W_O of every head, [H, C, C]: the naive form, for one small model at a time."""
    return weights.value[weights.group] @ weights.output


def head_singular_values(weights: HeadWeights) -> Tensor:
    """Nonzero singular values of each M_h = W_V W_O, descending: [H, min(C, D)]."""
    value_factor = torch.linalg.qr(weights.value, mode="r").R[weights.group]
    output_factor = torch.linalg.qr(weights.output.transpose(-1, -2), mode="r").R
    return torch.linalg.svdvals(value_factor @ output_factor.transpose(-1, -2))


def head_reciprocity_defect(weights: HeadWeights) -> Tensor:
    """||M_h - M_h^T||_F / (sqrt(2) ||M_h||_F) of each head, [H]: 0 symmetric, 1 unrelated, sqrt(2) antisymmetric.

    <M, M^T> = tr(M M) is the trace of the square of the D x D matrix W_O W_V.
    """
    value = weights.value[weights.group]
    within = weights.output @ value
    traces = (within * within.transpose(1, 2)).sum((1, 2))
    value_gram = value.transpose(1, 2) @ value
    norms = (value_gram * (weights.output @ weights.output.transpose(1, 2))).sum((1, 2))
    return (1 - traces / norms).clamp_min(0).sqrt()


@dataclass(frozen=True)
class HeadProducts:
    """What the norms and inner products of a layer's transports need, once a layer whatever the number of edges."""

    inner: Tensor
    """<M_h, M_g>_F, [H, H]: ||T_ij||_F = H sqrt(g^T inner g)."""
    traces: Tensor
    """tr(M_h M_g) = <M_h, M_g^T>_F, [H, H]: <T_ij, T_ji^T>_F = H^2 g_ij^T traces g_ji."""
    output_gram: Tensor
    """W_O W_O^T of each head, [H, D, D]: ||v W_O||^2 = v (W_O W_O^T) v^T."""
    model_dim: int

    @classmethod
    def of(cls, weights: HeadWeights) -> "HeadProducts":
        """The products of a layer, in time H^2 D^2 C and memory H^2 D^2."""
        group, sides = weights.group, (weights.groups, weights.head_dim)
        outputs = weights.output.flatten(0, 1)
        values = weights.value.transpose(0, 1).flatten(1)
        heads = (weights.heads, weights.head_dim)
        value_products = (values.T @ values).unflatten(0, sides).unflatten(2, sides).transpose(1, 2)
        output_products = (outputs @ outputs.T).unflatten(0, heads).unflatten(2, heads).transpose(1, 2)
        across = (outputs @ values).unflatten(0, heads).unflatten(2, sides).transpose(1, 2)[:, group]
        return cls(
            inner=(value_products[group][:, group] * output_products).sum((2, 3)),
            traces=(across * across.transpose(0, 1).transpose(2, 3)).sum((2, 3)),
            output_gram=output_products.diagonal(dim1=0, dim2=1).movedim(-1, 0).contiguous(),
            model_dim=weights.model_dim,
        )

    def head_gains(self, weights: HeadWeights, states: Tensor) -> Tensor:
        """||x M_h|| / ||x|| of each head and state: [N, C] -> [H, N]; a zero state has gain NaN."""
        moved = (states @ weights.value)[weights.group]
        squares = ((moved @ self.output_gram) * moved).sum(-1)
        return squares.clamp_min(0).sqrt() / states.norm(dim=1)

    def isotropic_head_gains(self) -> Tensor:
        """||M_h||_F / sqrt(C), [H]: the root mean square gain over all directions."""
        return (self.inner.diagonal() / self.model_dim).sqrt()

    def isotropic_edge_gains(self, gates: Tensor) -> Tensor:
        """||T||_F / sqrt(C) of each edge, gates [E, H] -> [E]."""
        return gates.shape[1] * (((gates @ self.inner) * gates).sum(1) / self.model_dim).clamp_min(0).sqrt()

    def edge_reciprocity_defects(self, gates: Tensor, back: Tensor) -> Tensor:
        """||T_ji - T_ij^T||_F / sqrt(||T_ij||_F^2 + ||T_ji||_F^2): gates of edges and of their ways back, [H, ...].

        0 where T_ji = T_ij^T, 1 for unrelated transports, sqrt(2) where T_ji = -T_ij^T; NaN where both vanish.
        """
        inner, traces = self.inner.to(gates.dtype), self.traces.to(gates.dtype)
        there, again = gates.flatten(1), back.flatten(1)
        squares = ((inner @ there) * there).sum(0) + ((inner @ again) * again).sum(0)
        agreement = 2 * ((traces @ again) * there).sum(0) / squares
        return (1 - agreement).clamp_min(0).sqrt().unflatten(0, gates.shape[1:])


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
    side = weights.groups * weights.head_dim
    stacked = weights.value.transpose(0, 1).reshape(weights.model_dim, side)
    value_factor = torch.linalg.qr(stacked, mode="r").R
    values = torch.empty(len(gates), edge_rank(weights), dtype=stacked.dtype)
    for edge in range(len(gates)):
        values[edge] = product_singular_values(value_factor, _gated_output(weights, gates[edge]), values.shape[1])
    return values


def product_singular_values(left: Tensor, right: Tensor, rank: int) -> Tensor:
    """The `rank` largest singular values of left @ right, ascending, by the smaller Gram matrix."""
    core = left @ right
    gram = core @ core.T if core.shape[0] <= core.shape[1] else core.T @ core
    return torch.linalg.eigvalsh(gram)[-rank:].clamp_min(0).sqrt()


def transport_along(weights: HeadWeights, gates: Tensor, states: Tensor) -> Tensor:
    """x T for E edges without forming T: gates [E, H], states [E, C] -> [E, C]."""
    moved = torch.einsum("ec,kcd->ekd", states, weights.value)[:, weights.group]
    return torch.einsum("ehd,hdc->ec", moved * (gates * weights.heads)[:, :, None], weights.output)


def _gated_output(weights: HeadWeights, gates: Tensor) -> Tensor:
    """Z [K D, C]: W_O weighted by H g_h and added up over the heads of each value group; gates [H]."""
    summed = torch.zeros(weights.groups, weights.head_dim, weights.model_dim, dtype=weights.output.dtype)
    summed.index_add_(0, weights.group, weights.output * (gates * weights.heads)[:, None, None])
    return summed.reshape(weights.groups * weights.head_dim, weights.model_dim)
