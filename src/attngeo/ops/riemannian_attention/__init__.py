"""softmax_j(-d_ij^2 / (2 tau)) v_j with d_ij the distance in metrics that the tokens carry, in linear memory."""

from attngeo.ops.riemannian_attention.attention import riemannian_attention

__all__ = ["riemannian_attention"]
