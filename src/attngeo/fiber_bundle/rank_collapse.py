"""Whether tokens become the same with depth: relative residual and effective rank behind every layer."""

import math
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from attngeo.layers.attention import Attention
from attngeo.layers.token_metric import ConstantMetric, TokenMetric
from attngeo.training.seeding import generator

# Relative residuals below this are rounding, in float64 over a dozen layers: they count as this, so that no form of
# attention wins by the noise of another.
RESIDUAL_FLOOR = 1e-12


KEPT = 1e-6  # a relative residual from which on tokens count as different
# At the usual start queries and keys are so short that attention is next to uniform, and metrics next to equal: stacks
# collapse whatever their attention. So they are looked at with longer ones, and with metrics that differ, too.
WIDE = (8.0, 16.0)  # times the usual weights: scores of standard deviation about 1 and 3
_APART = 0.5  # standard deviation of the logarithm of a metric's diagonal, about, and of the entries of its factor


class HasStates(Protocol):
    """A model that gives its residual stream by depth."""

    def states(self, x: Tensor) -> list[Tensor]:
        """What goes into the first block and what comes out of each; [B, N, C]."""
        ...


def relative_residual(x: Tensor) -> Tensor:
    """||X - 1 mean|| / ||X|| (Frobenius) of tokens X [..., N, C], the mean over tokens: 0 where all are the same.

    [..., N, C] -> [...]; 0 for tokens that are all zero.
    """
    norm = torch.linalg.matrix_norm(x)
    return torch.linalg.matrix_norm(x - x.mean(-2, keepdim=True)) / norm.clamp_min(torch.finfo(x.dtype).tiny)


def effective_rank(x: Tensor) -> Tensor:
    """exp of the entropy of the singular values of X [..., N, C], divided by their sum (Roy and Vetterli, 2007).

    Between 1 and min(N, C); 1 for tokens that are all zero.
    """
    values = torch.linalg.svdvals(x)
    shares = values / values.sum(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    return torch.special.entr(shares).sum(-1).exp()


def cubic_bound(residuals: Sequence[float], layers: int) -> list[float]:
    """Doubly exponential decay r_(l+1) = c r_l^3 of stacks of attention alone (Dong et al., 2021), by depth.

    Their constant bounds weights and entries of attention and says nothing at these sizes (it exceeds 1): c is the one
    that the first layer of `residuals` shows, and from there the law is theirs, r_l = c^((3^l - 1) / 2) r_0^(3^l).
    """
    first, second = residuals[:2]
    constant = second / first**3
    bound = [first]
    for _ in range(layers):
        bound.append(constant * bound[-1] ** 3)
    return bound


@torch.no_grad()
def widen(model: nn.Module, gain: float, seed: int) -> None:
    """Make the attention of a new model far from uniform and its metrics far from Euclidean; drawn from the seed.

    Weights of queries, keys and values are multiplied by `gain`; metrics are drawn anew, one a token or one for all.
    """
    for number, layer in enumerate(module for module in model.modules() if isinstance(module, Attention)):
        layer.query_key_value.weight.mul_(gain)  # type: ignore[union-attr, operator]
        draw = generator(seed, "wide metrics", number)
        metric = getattr(layer, "token_metric", None)
        if isinstance(metric, TokenMetric):
            dim = metric.diagonal.in_features
            for weight in (metric.diagonal.weight, metric.factor.weight):
                weight.copy_(torch.randn(weight.shape, generator=draw) * _APART / math.sqrt(dim))
        elif isinstance(metric, ConstantMetric):
            metric.diagonal.add_(torch.randn(metric.diagonal.shape, generator=draw) * _APART)
            metric.factor.copy_(torch.randn(metric.factor.shape, generator=draw) * _APART)


@torch.no_grad()
def by_depth(model: nn.Module, inputs: Tensor) -> list[dict[str, Any]]:
    """Rows with `depth` (0: what goes in), `metric`, `value` and `n` (sequences), means over sequences, in float64.

    The model is turned to float64 and back.
    """
    kept = {parameter.dtype for parameter in model.parameters()}
    model.double().eval()
    try:
        states = cast(HasStates, model).states(inputs.double() if inputs.is_floating_point() else inputs)
    finally:
        model.to(kept.pop())
    rows = []
    for depth, x in enumerate(states):
        for metric, values in (("relative_residual", relative_residual(x)), ("effective_rank", effective_rank(x))):
            rows.append({"depth": depth, "metric": metric, "value": values.mean().item(), "n": len(values)})
    return rows
