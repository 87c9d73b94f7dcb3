"""Rank of matrices of unnormalised scores against the head dimension, measured and predicted (P4.a)."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attngeo.ops.low_rank_metric import pairwise_squared_distance
from attngeo.training.seeding import generator

Row = dict[str, Any]

RANK_RULE = "singular values above N times the float64 epsilon times the largest"
METRIC_RANK = 2  # R: from 1 on it changes no predicted rank
_STREAM = 3  # the residual stream is so many times as wide as a head: what the metrics are made of
# Metrics made of the residual stream, of the very vector that enters the distance, one for all tokens, and no metric.
FORMS = ("dot", "euclidean", "constant", "query", "query_same_vector", "mean", "mean_same_vector")
CONTROLS = ("dot", "euclidean", "constant")


def predicted_rank(form: str, dimension: int, tokens: int) -> int:
    """The derived rank of the N x N scores of a form.

    With d the dimension and p = 1 + d + d (d + 1) / 2 the polynomials of degree 2 or less: d for dot products, d + 2
    for one metric, p for the query's, 2 p for the mean of both; where U is linear in the vector that enters the
    distance, U U^T lies in the span of x x^T, which the mean then counts twice: 2 p - d (d - 1) / 2. At most N.
    """
    d = dimension
    polynomials = 1 + d + d * (d + 1) // 2
    ranks = {
        "dot": d,
        "euclidean": d + 2,
        "constant": d + 2,
        "query": polynomials,
        "query_same_vector": polynomials,
        "mean": 2 * polynomials,
        "mean_same_vector": 2 * polynomials - d * (d - 1) // 2,
    }
    return min(tokens, ranks[form])


def numerical_rank(matrix: Tensor) -> tuple[int, float, float]:
    """The rank of a square float64 matrix by `RANK_RULE`, and the last singular value counted and the first not.

    Both are relative to the largest; the first not counted is 0 where all are.
    """
    values = torch.linalg.svdvals(matrix)
    floor = matrix.shape[-1] * torch.finfo(matrix.dtype).eps * values[0]
    rank = int((values > floor).sum())
    relative = (values / values[0]).tolist()
    return rank, relative[rank - 1], relative[rank] if rank < len(relative) else 0.0


def scores(form: str, dimension: int, tokens: int, seed: int) -> Tensor:
    """Squared distances (or products) [N,N] in float64 of drawn tokens, with independent projections q, k, a and U."""
    source = generator(seed, f"score rank {form} {dimension}", tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    same = form.endswith("_same_vector")
    width = dimension if same else _STREAM * dimension
    x = draw(tokens, width)

    def project(features: int) -> Tensor:
        return x @ draw(width, features) / math.sqrt(width)

    q, k = project(dimension), project(dimension)
    if form == "dot":
        return q @ k.mT
    a = torch.nn.functional.softplus(project(dimension))
    U = project(dimension * METRIC_RANK).unflatten(-1, (dimension, METRIC_RANK))
    if form == "euclidean":
        a, U = torch.ones_like(a), torch.zeros_like(U)
    elif form == "constant":
        a, U = a[:1].expand_as(a), U[:1].expand_as(U)
    metric = "mean" if form.startswith("mean") else "query"
    q, k, a, U = (tensor[None, None] for tensor in (q, k, a, U))
    return pairwise_squared_distance(q, k, a, U, metric=metric)[0, 0]  # type: ignore[arg-type]


def analyze(dimensions: Sequence[int], tokens: Sequence[int], seeds: Sequence[int]) -> Iterator[Row]:
    """Rows `score_rank` of every form, dimension and number of tokens, with what was `predicted`.

    The value is the measured rank that lies furthest from the prediction over the seeds (n of them), its spread the
    range over them. `smallest_counted` and `largest_left_out` are singular values relative to the largest, over seeds.
    """
    for dimension in dimensions:
        for count in tokens:
            for form in FORMS:
                predicted = predicted_rank(form, dimension, count)
                found = [numerical_rank(scores(form, dimension, count, seed)) for seed in seeds]
                ranks = [rank for rank, _, _ in found]
                yield {
                    "metric": "score_rank",
                    "form": form,
                    "dimension": dimension,
                    "tokens": count,
                    "control": form in CONTROLS,
                    "value": float(max(ranks, key=lambda rank: abs(rank - predicted))),
                    "unit": "1",
                    "n": len(seeds),
                    "spread": float(max(ranks) - min(ranks)),
                    "spread_kind": "range over seeds",
                    "predicted": predicted,
                    "smallest_counted": min(counted for _, counted, _ in found),
                    "largest_left_out": max(left_out for _, _, left_out in found),
                }
