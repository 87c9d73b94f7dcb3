"""What a trained model loses when a part of its geometry is taken from it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attngeo.fiber_bundle.tasks import Task
from attngeo.fiber_bundle.training import evaluate
from attngeo.layers.connection import Connection
from attngeo.layers.fiber_feed_forward import FiberFeedForward
from attngeo.layers.riemannian import RiemannianAttention
from attngeo.layers.token_metric import TokenMetric

Factors = tuple[Tensor, ...]


def losses_without(model: nn.Module, task: Task, count: int) -> list[dict[str, Any]]:
    """Rows of metric `loss_without` by `part`: what the held-out loss (nats) rises by without a part of the geometry.

    "attention metrics", "feed-forward metrics": every token has the metric of the token at its place in another
    sequence (or image), so that metrics are as usual and say nothing of their token. "transport": values arrive as they
    are. Parts that the model lacks have no row; where a token says no more than its place nothing changes.
    """
    intact, _, tested = evaluate(model, task, count)
    rows = []
    for part, (of, change) in _PARTS.items():
        modules = of(model)
        if modules:
            with _changed(modules, change):
                loss, *_ = evaluate(model, task, count)
            rows.append({"metric": "loss_without", "part": part, "value": loss - intact, "unit": "nats", "n": tested})
    return rows


def _attention_metrics(model: nn.Module) -> list[nn.Module]:
    layers = [layer.token_metric for layer in model.modules() if isinstance(layer, RiemannianAttention)]
    return [metric for metric in layers if isinstance(metric, TokenMetric)]


def _feed_forward_metrics(model: nn.Module) -> list[nn.Module]:
    return [layer.token_metric for layer in model.modules() if isinstance(layer, FiberFeedForward)]


def _connections(model: nn.Module) -> list[nn.Module]:
    return [layer for layer in model.modules() if isinstance(layer, Connection)]


def _of_another_sequence(factors: Factors) -> Factors:
    return tuple(factor.roll(1, dims=0) for factor in factors)


def _without_effect(factors: Factors) -> Factors:
    return (torch.zeros_like(factors[0]), *factors[1:])


@contextmanager
def _changed(modules: list[nn.Module], change: Callable[[Factors], Factors]) -> Iterator[None]:
    hooks = [module.register_forward_hook(lambda _module, _inputs, output: change(output)) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


_PARTS: dict[str, tuple[Callable[[nn.Module], list[nn.Module]], Callable[[Factors], Factors]]] = {
    "attention metrics": (_attention_metrics, _of_another_sequence),
    "feed-forward metrics": (_feed_forward_metrics, _of_another_sequence),
    "transport": (_connections, _without_effect),
}
