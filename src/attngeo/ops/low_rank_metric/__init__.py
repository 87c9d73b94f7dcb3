"""Metrics G = diag(a) + U U^T, one a token, used without ever forming a D x D matrix."""

from attngeo.ops.low_rank_metric.naive import (
    inverse_quadratic_form,
    logdet,
    pairwise_squared_distance,
    quadratic_form,
    solve,
)
from attngeo.ops.low_rank_metric.root import square_root

__all__ = [
    "inverse_quadratic_form",
    "logdet",
    "pairwise_squared_distance",
    "quadratic_form",
    "solve",
    "square_root",
]
