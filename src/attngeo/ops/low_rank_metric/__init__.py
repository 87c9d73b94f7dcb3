"""Metrics G = diag(a) + U U^T, one a token, used without ever forming a D x D matrix."""

from attngeo.ops.low_rank_metric.naive import logdet, pairwise_squared_distance, quadratic_form, solve

__all__ = ["logdet", "pairwise_squared_distance", "quadratic_form", "solve"]
