"""Kinds and numbers of tokens at which the cost of one attention layer is measured, without torch."""

from typing import Literal

from attngeo.layers.registry import ATTENTION_KINDS

Pass = Literal["forward", "forward and backward"]

# The registered softmax runs fused, without the N x N weights; plain softmax keeps them.
PLAIN_SOFTMAX, FUSED_SOFTMAX = "softmax", "softmax_fused"
LAYER_KINDS = (PLAIN_SOFTMAX, FUSED_SOFTMAX, *(kind for kind in ATTENTION_KINDS if kind != "softmax"))
PASSES: tuple[Pass, ...] = ("forward", "forward and backward")
# Of these, exponents are fitted from the first to the last that the ledger's rule names.
TOKENS = (64, 256, 1024, 1600, 2304, 4096, 6400, 9216, 16384)
FITTED_FROM, FITTED_TO = 1024, 16384
