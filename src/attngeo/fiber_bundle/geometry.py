"""The geometry that a model carries: metrics that differ by token, curvature and torsion, with flat controls."""

from typing import Any

import torch
from torch import Tensor, nn

from attngeo.evaluation.layer_inputs import layer_inputs
from attngeo.layers.riemannian import RiemannianAttention


def heterogeneity(metrics: Tensor) -> Tensor:
    """How much metrics G [..., N, D, D] differ by token: mean of ||G_i - mean G|| / ||mean G|| (Frobenius), [...]."""
    mean = metrics.mean(-3, keepdim=True)
    away = torch.linalg.matrix_norm(metrics - mean).mean(-1)
    return away / torch.linalg.matrix_norm(mean).squeeze(-1)


def dense_metrics(diagonal: Tensor, factor: Tensor) -> Tensor:
    """diag(a) + U U^T of a [..., D] and U [..., D, R] as matrices [..., D, D], in float64: for small D."""
    diagonal, factor = diagonal.double(), factor.double()
    return torch.diag_embed(diagonal) + factor @ factor.mT


def measure(model: nn.Module, inputs: Tensor) -> list[dict[str, Any]]:
    """Rows by `layer` (from 0) of every attention layer with a metric for each token, on a batch of inputs.

    Metrics `metric_heterogeneity` and `metric_condition_p99`: the 99th percentile over tokens of the ratio of a
    metric's largest to its smallest eigenvalue.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, RiemannianAttention)]
    layers = [layer for layer in layers if hasattr(layer, "token_metric")]
    rows: list[dict[str, Any]] = []
    for number, (layer, x, *_) in enumerate(layer_inputs(model, layers, inputs)):
        with torch.inference_mode():
            metrics = dense_metrics(*layer.token_metric(x))
        count = metrics.shape[0] * metrics.shape[1]
        eigenvalues = torch.linalg.eigvalsh(metrics)
        condition = (eigenvalues[..., -1] / eigenvalues[..., 0]).flatten()
        for metric, control, value, n in (
            ("metric_heterogeneity", "none", heterogeneity(metrics).mean(), count),
            ("metric_condition_p99", "none", condition.quantile(0.99), count),
        ):
            rows.append({"metric": metric, "control": control, "layer": number, "value": value.item(), "n": n})
    return rows
