"""One attention layer by itself, by the name of its kind, and tokens to run it on."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from attngeo.evaluation.timing import Call
from attngeo.evaluation.token_sizes import FUSED_SOFTMAX, PLAIN_SOFTMAX, Pass
from attngeo.layers.attention import Attention, Grid
from attngeo.layers.registry import build_attention
from attngeo.layers.softmax import SoftmaxAttention
from attngeo.training.seeding import derive_seed, generator, seeded_globals


class PlainSoftmaxAttention(SoftmaxAttention):
    """softmax(q k^T / sqrt(D)) v with the N x N weights in memory, which the fused kernel avoids."""

    kind: ClassVar[str] = PLAIN_SOFTMAX

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        query, key, value = (self.split_heads(part) for part in self.query_key_value(x).chunk(3, dim=-1))
        scores = (self.rotate(query, grid) * self.head_dim**-0.5) @ self.rotate(key, grid).mT
        return self.projection(self.merge_heads(torch.softmax(scores, dim=-1) @ value))


def build(kind: str, *, heads: int, head_dim: int, landmarks: Grid, **options: Any) -> Attention:
    """A layer of one of `token_sizes.LAYER_KINDS` with its default options but these.

    Layers of one kind and size have the same weights, and plain softmax those of the fused one.
    """
    family = "softmax" if kind in (PLAIN_SOFTMAX, FUSED_SOFTMAX) else kind
    with seeded_globals(derive_seed(0, f"single layer {family}")):
        if kind == PLAIN_SOFTMAX:
            return PlainSoftmaxAttention(heads * head_dim, heads, landmarks=landmarks, **options)
        layer: Attention = build_attention(family, heads * head_dim, heads, landmarks=landmarks, **options)
        return layer


def square_grid(tokens: int) -> Grid:
    """The grid of a square number of tokens."""
    side = math.isqrt(tokens)
    if side * side != tokens:
        raise ValueError(f"{tokens} tokens fill no square grid")
    return side, side


def draw_tokens(purpose: str, batch: int, tokens: int, width: int) -> Tensor:
    """Normal tokens [B, N, C], as behind a layer norm, by purpose and number of tokens."""
    return torch.randn(batch, tokens, width, generator=generator(0, f"single layer {purpose}", tokens))


def pass_of(layer: Attention, x: Tensor, direction: Pass) -> Call:
    """A forward pass without gradients, or one with the gradients of every weight and of x [B, N, C]."""
    grid = square_grid(x.shape[1])
    parameters = list(layer.parameters())
    grad = draw_tokens("gradients", *x.shape)

    def forward() -> Tensor:
        with torch.no_grad():
            output: Tensor = layer(x, grid)
        return output

    def forward_and_backward() -> tuple[Tensor, ...]:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(layer(leaf, grid), [leaf, *parameters], grad)

    return forward if direction == "forward" else forward_and_backward
