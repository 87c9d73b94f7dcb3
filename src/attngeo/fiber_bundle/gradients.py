"""Gradients of the architecture's parts against finite differences, in float64."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attngeo.layers.fiber_feed_forward import FiberFeedForward
from attngeo.layers.riemannian import RiemannianAttention
from attngeo.models.fiber_bundle import TokenTransformer
from attngeo.training.seeding import derive_seed, generator, seeded_globals

DIRECTIONS = 8
STEP = 1e-5  # truncation about 1e-10 of the derivative, rounding 1e-11
# Parameters are moved off their start, where metrics are nearly Euclidean and much of the gradient is nearly 0.
SPREAD = 0.2

_TOKENS, _DIM, _HEADS, _SYMBOLS = 7, 16, 2, 11


def gradient_errors(seed: int = 0) -> list[dict[str, Any]]:
    """Rows of metric `gradient_error` by part: ||analytic - numerical|| / ||numerical|| of directional derivatives.

    Directions are random, in parameters and input at once; numbers are central differences.
    """
    rows = []
    for part, make in _PARTS.items():
        with seeded_globals(derive_seed(seed, f"gradients of {part}")):
            module, call = make()
        draw = generator(seed, f"directions of {part}")
        module.double()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(SPREAD * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
        x = torch.randn(2, _TOKENS, _DIM, generator=draw, dtype=torch.float64, requires_grad=True)
        rows.append(
            {
                "metric": "gradient_error",
                "part": part,
                "value": _error(lambda x=x, call=call: call(x), [x, *module.parameters()], draw),  # type: ignore[misc]
                "n": DIRECTIONS,
            }
        )
    return rows


def _error(output: Callable[[], Tensor], leaves: list[Tensor], draw: torch.Generator) -> float:
    """Relative error of directional derivatives of a fixed random functional of the output."""
    weights = torch.randn(output().shape, generator=draw, dtype=torch.float64)
    gradients = torch.autograd.grad((output() * weights).sum(), leaves, allow_unused=True)
    analytic, numerical = [], []
    for _ in range(DIRECTIONS):
        direction = [torch.randn(leaf.shape, generator=draw, dtype=torch.float64) for leaf in leaves]
        pairs = zip(gradients, direction, strict=True)
        analytic.append(sum(float((g * d).sum()) for g, d in pairs if g is not None))
        ends = []
        for sign in (1, -1, 0):  # there, the other way, and back
            with torch.no_grad():
                move = {1: STEP, -1: -2 * STEP, 0: STEP}[sign]
                for leaf, d in zip(leaves, direction, strict=True):
                    leaf += move * d
                ends.append(float((output() * weights).sum()))
        numerical.append((ends[0] - ends[1]) / (2 * STEP))
    found, wanted = torch.tensor([analytic, numerical], dtype=torch.float64)
    return float((found - wanted).norm() / wanted.norm())


def _attention(**options: Any) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    layer = RiemannianAttention(_DIM, _HEADS, geometry="heterogeneous", causal=True, **options)
    return layer, lambda x: layer(x, (1, _TOKENS))


def _feed_forward() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    layer = FiberFeedForward(_DIM, 2 * _DIM)
    return layer, layer


def _decoder() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    model = TokenTransformer(
        "fiber", vocabulary=_SYMBOLS, context=_TOKENS, dim=_DIM, depth=2, heads=_HEADS, causal=True
    )
    return model, lambda x: model.head(model.trunk(x, (1, _TOKENS)))


_PARTS: dict[str, Callable[[], tuple[nn.Module, Callable[[Tensor], Tensor]]]] = {
    "attention, metric of the query": lambda: _attention(metric="query"),
    "attention, metric of the key": lambda: _attention(metric="key"),
    "attention, mean of both": lambda: _attention(metric="mean"),
    "attention with transported values": lambda: _attention(transport=True),
    "feed-forward": _feed_forward,
    "decoder": _decoder,
}
