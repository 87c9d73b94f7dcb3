"""Inverse, determinant, norm and pairwise distance of G = diag(a) + U U^T in O(D R^2) a token or less.

Shapes: a [...,D] with a > 0, U [...,D,R]; both are made in at least float32 and autocast does not reach inside.
"""

from typing import Literal

import torch
from torch import Tensor

from attngeo.ops import backend as _backend
from attngeo.ops.inputs import check_tensors
from attngeo.ops.precision import compute_dtype, factor_dtype, product, result_dtype, without_autocast

Metric = Literal["query", "key", "mean"]


def solve(a: Tensor, U: Tensor, x: Tensor) -> Tensor:
    """G^-1 x by Woodbury's identity: a [...,D], U [...,D,R], x [...,D] -> [...,D]."""
    check_tensors("low_rank_metric.solve", a=a, U=U, x=x)
    dtype, result = factor_dtype(a, U, x), result_dtype(a, U, x)
    a, U, x = _prepare(dtype, a, U, x)
    with without_autocast(a):
        scaled_U = U / a.unsqueeze(-1)
        projected = product(scaled_U.mT, x.unsqueeze(-1))
        inner = torch.cholesky_solve(projected, _capacitance_root(U, scaled_U))
        return (x / a - product(scaled_U, inner).squeeze(-1)).to(result)


def logdet(a: Tensor, U: Tensor) -> Tensor:
    """log det G = sum log a + log det(I + U^T diag(a)^-1 U): a [...,D], U [...,D,R] -> [...]."""
    check_tensors("low_rank_metric.logdet", a=a, U=U)
    dtype, result = factor_dtype(a, U), result_dtype(a, U)
    a, U = _prepare(dtype, a, U)
    with without_autocast(a):
        root = _capacitance_root(U, U / a.unsqueeze(-1))
        return (a.log().sum(-1) + 2.0 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)).to(result)


def quadratic_form(a: Tensor, U: Tensor, x: Tensor) -> Tensor:
    """x^T G x = sum_c a_c x_c^2 + |U^T x|^2: a [...,D], U [...,D,R], x [...,D] -> [...]."""
    check_tensors("low_rank_metric.quadratic_form", a=a, U=U, x=x)
    dtype, result = compute_dtype(a, U, x), result_dtype(a, U, x)
    a, U, x = _prepare(dtype, a, U, x)
    with without_autocast(a):
        projected = product(U.mT, x.unsqueeze(-1)).squeeze(-1)
        return ((a * x.square()).sum(-1) + projected.square().sum(-1)).to(result)


def inverse_quadratic_form(a: Tensor, U: Tensor, x: Tensor) -> Tensor:
    """x^T G^-1 x: a [...,D], U [...,D,R], x [...,D] -> [...].

    With the Cholesky root L of I + U^T diag(a)^-1 U it is sum_c x_c^2 / a_c - |L^-1 U^T diag(a)^-1 x|^2.
    """
    check_tensors("low_rank_metric.inverse_quadratic_form", a=a, U=U, x=x)
    dtype, result = factor_dtype(a, U, x), result_dtype(a, U, x)
    a, U, x = _prepare(dtype, a, U, x)
    with without_autocast(a):
        scaled_U = U / a.unsqueeze(-1)
        projected = product(scaled_U.mT, x.unsqueeze(-1))
        inner = torch.linalg.solve_triangular(_capacitance_root(U, scaled_U), projected, upper=False)
        return ((x.square() / a).sum(-1) - inner.square().sum((-2, -1))).clamp_min(0.0).to(result)


def pairwise_squared_distance(q: Tensor, k: Tensor, a: Tensor, U: Tensor, metric: Metric = "query") -> Tensor:
    """(q_n - k_m)^T G (q_n - k_m) for every pair: [B,H,N,D], [B,H,M,D] -> [B,H,N,M].

    `metric` says whose G counts: the query's (a [B,H,N,D], U [B,H,N,D,R]), the key's (a [B,H,M,D], U [B,H,M,D,R]), or
    the mean of both, where one set of tokens carries the metrics and so N = M. With a = 1 and U = 0 all three are
    the squared Euclidean distance. Takes R + 2 matrix products (twice that for the mean) and keeps R maps N x M for
    the gradient.
    """
    if metric not in ("query", "key", "mean"):
        raise ValueError(f"metric must be 'query', 'key' or 'mean', not {metric!r}")
    check_tensors("low_rank_metric.pairwise_squared_distance", q=q, k=k, a=a, U=U)
    owners = {"query": (q,), "key": (k,), "mean": (q, k)}[metric]
    for owner in owners:
        if a.shape[-2:] != owner.shape[-2:] or U.shape[-3:-1] != owner.shape[-2:]:
            raise ValueError(
                f"metric={metric!r} needs a [..., {owner.shape[-2]}, {owner.shape[-1]}] and U of that shape with R "
                f"more, not {tuple(a.shape)} and {tuple(U.shape)}"
            )
    dtype, result = compute_dtype(q, k, a, U), result_dtype(q, k, a, U)
    q, k, a, U = (tensor.to(dtype) for tensor in (q, k, a, U))
    _backend.resolve("low_rank_metric", "naive", q, k, a, U)
    with without_autocast(q):
        if metric == "query":
            distance = _query_distance(q, k, a, U)
        elif metric == "key":
            distance = _query_distance(k, q, a, U).mT
        else:
            distance = 0.5 * (_query_distance(q, k, a, U) + _query_distance(k, q, a, U).mT)
    return distance.to(result)


def _prepare(dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    _backend.resolve("low_rank_metric", "naive", *tensors)
    return [tensor.to(dtype) for tensor in tensors]


def _capacitance_root(U: Tensor, scaled_U: Tensor) -> Tensor:
    """Cholesky root of I + U^T diag(a)^-1 U, an R x R matrix that is positive definite by construction.

    It fails only on input that is not finite or that overflows: NaN then, for the caller's policy to see.
    """
    capacitance = torch.eye(U.shape[-1], dtype=U.dtype, device=U.device) + product(U.mT, scaled_U)
    root, failed = torch.linalg.cholesky_ex(capacitance)
    return root.masked_fill(failed.bool()[..., None, None], torch.nan)


def _query_distance(q: Tensor, k: Tensor, a: Tensor, U: Tensor) -> Tensor:
    """Distance in the metric of the first argument's tokens, expanded so that nothing N x M x D is formed."""
    if k.shape[-2] > 0:
        # Distances do not depend on the origin; near the tokens the expansion loses the fewest digits.
        centre = k.detach().mean(-2, keepdim=True)
        q, k = q - centre, k - centre
    squares = (a * q.square()).sum(-1).unsqueeze(-1) + product(a, k.square().mT)
    distance = (squares - 2.0 * product(a * q, k.mT)).clamp_min(0.0)
    for rank in range(U.shape[-1]):
        direction = U[..., rank]
        distance = distance + ((direction * q).sum(-1).unsqueeze(-1) - product(direction, k.mT)).square()
    return distance
