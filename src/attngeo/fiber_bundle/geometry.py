"""The geometry that a model carries: metrics that differ by token, curvature and torsion, with flat controls."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from attngeo.evaluation.layer_inputs import layer_inputs
from attngeo.layers.attention import Grid
from attngeo.layers.connection import Connection, curvature, sample_triangles, torsion
from attngeo.layers.fiber_feed_forward import FiberFeedForward
from attngeo.layers.riemannian import RiemannianAttention
from attngeo.layers.token_metric import TokenMetric
from attngeo.training.seeding import generator

TRIANGLES = 32  # sampled in every sequence


def heterogeneity(metrics: Tensor) -> Tensor:
    """How much metrics G [..., N, D, D] differ by token: mean of ||G_i - mean G|| / ||mean G|| (Frobenius), [...]."""
    mean = metrics.mean(-3, keepdim=True)
    away = torch.linalg.matrix_norm(metrics - mean).mean(-1)
    return away / torch.linalg.matrix_norm(mean).squeeze(-1)


def dense_metrics(diagonal: Tensor, factor: Tensor) -> Tensor:
    """diag(a) + U U^T of a [..., D] and U [..., D, R] as matrices [..., D, D], in float64: for small D."""
    diagonal, factor = diagonal.double(), factor.double()
    return torch.diag_embed(diagonal) + factor @ factor.mT


def measure(model: nn.Module, inputs: Tensor, *, seed: int = 0) -> list[dict[str, Any]]:
    """Rows by `layer` (from 0) of every attention layer with a metric for each token, on a batch of inputs.

    `metric_heterogeneity`; `metric_condition_p99`, the 99th percentile over tokens of a metric's condition number, with
    label `part` also that of the metrics whose inverse a feed-forward takes ("feed-forward", its layers from 0);
    `curvature_proxy`, of the polar transports between metrics, with the control "flat", the same metrics without their
    low-rank part; and, of layers with a learned connection, what it does: `transport_holonomy` around the same
    triangles, `transport_size` along their edges, and `torsion_proxy` on random unit vectors, with the control
    "symmetric", the same connection with one factor for both arguments. Triangles and vectors are those of `seed`,
    always the same.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, RiemannianAttention)]
    layers = [layer for layer in layers if isinstance(layer.token_metric, TokenMetric)]
    rows: list[dict[str, Any]] = []
    for number, (layer, x, grid) in enumerate(layer_inputs(model, layers, inputs)):
        with torch.inference_mode():
            diagonal, factor = layer.token_metric(x)
            found = _of_metrics(diagonal, factor, seed)
            if layer.connection is not None:
                found += [*_of_transport(layer, x, grid, seed), *_of_connection(layer.connection, x, seed)]
        for metric, control, value, n in found:
            labels = {"part": "attention", "control": control, "layer": number}
            rows.append({"metric": metric, **labels, "value": value, "n": n})
    inverted = [layer for layer in model.modules() if isinstance(layer, FiberFeedForward)]
    for number, (feed_forward, x, *_) in enumerate(layer_inputs(model, inverted, inputs)):
        with torch.inference_mode():
            condition = _conditions(dense_metrics(*feed_forward.token_metric(x)))
        labels = {"part": "feed-forward", "control": "none", "layer": number}
        value = condition.quantile(0.99).item()
        rows.append({"metric": "metric_condition_p99", **labels, "value": value, "n": len(condition)})
    return rows


def _conditions(metrics: Tensor) -> Tensor:
    eigenvalues = torch.linalg.eigvalsh(metrics)
    return (eigenvalues[..., -1] / eigenvalues[..., 0]).flatten()


def _of_metrics(diagonal: Tensor, factor: Tensor, seed: int) -> list[tuple[str, str, float, int]]:
    metrics = dense_metrics(diagonal, factor)
    condition = _conditions(metrics)
    tokens = len(condition)
    triangles = sample_triangles(diagonal.shape[1], TRIANGLES, generator(seed, "triangles"))
    sampled = TRIANGLES * len(diagonal)
    return [
        ("metric_heterogeneity", "none", heterogeneity(metrics).mean().item(), tokens),
        ("metric_condition_p99", "none", condition.quantile(0.99).item(), tokens),
        ("curvature_proxy", "none", curvature(diagonal, factor, triangles).item(), sampled),
        ("curvature_proxy", "flat", curvature(diagonal, torch.zeros_like(factor), triangles).item(), sampled),
    ]


def edge_transport(outward: Tensor, left: Tensor, right: Tensor, step: Tensor) -> Tensor:
    """v -> v - Gamma(step, v) as matrices [..., F, F], for factors W and A of its end and B of its start.

    I - W diag(A^T step) B^T: W, A, B [..., F, R], step [..., F].
    """
    identity = torch.eye(step.shape[-1], dtype=step.dtype, device=step.device)
    return identity - (outward * (left.mT @ step.unsqueeze(-1)).mT) @ right.mT


def _of_transport(layer: RiemannianAttention, x: Tensor, grid: Grid, seed: int) -> list[tuple[str, str, float, int]]:
    """Holonomy of the learned transports around triangles, and how far one along an edge is from doing nothing."""
    assert layer.connection is not None
    triangles = sample_triangles(x.shape[1], TRIANGLES, generator(seed, "triangles"))
    query, key, _ = (layer.split_heads(part) for part in layer.query_key_value(x).chunk(3, dim=-1))
    query, key = (layer.rotate(part, grid).double()[:, :, triangles] for part in (query, key))
    outward, left, right = (layer._by_head(part).double()[:, :, triangles] for part in layer.connection(x))
    edges = []
    for end, start in ((0, 1), (1, 2), (2, 0)):
        step = query[..., end, :] - key[..., start, :]
        edges.append(edge_transport(outward[..., end, :, :], left[..., end, :, :], right[..., start, :, :], step))
    identity = torch.eye(query.shape[-1], dtype=torch.float64)
    around = torch.linalg.matrix_norm(edges[0] @ edges[1] @ edges[2] - identity)
    size = torch.linalg.matrix_norm(torch.stack(edges) - identity) / math.sqrt(query.shape[-1])
    return [
        ("transport_holonomy", "none", around.mean().item(), around.numel()),
        ("transport_size", "none", size.mean().item(), size.numel()),
    ]


def _of_connection(connection: Connection, x: Tensor, seed: int) -> list[tuple[str, str, float, int]]:
    outward, left, right = (part.double() for part in connection(x))
    draw = generator(seed, "directions of torsion")
    u, v = (
        nn.functional.normalize(torch.randn(left.shape[:-1], generator=draw, dtype=torch.float64), dim=-1)
        for _ in range(2)
    )
    count = u.shape[0] * u.shape[1]
    return [
        ("torsion_proxy", "none", torsion(outward, left, right, u, v).item(), count),
        ("torsion_proxy", "symmetric", torsion(outward, left, left, u, v).item(), count),
    ]
