"""softmax_j(-d_ij^2 / (2 tau)) v_j with d_ij the distance in metrics that the tokens carry, in linear memory."""

from attngeo.ops.riemannian_attention.attention import riemannian_attention
from attngeo.ops.riemannian_attention.naive import hidden_pairs, seen_pairs

__all__ = ["hidden_pairs", "riemannian_attention", "seen_pairs"]
