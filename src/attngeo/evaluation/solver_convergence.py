"""How far each solver gets with an equal number of matrix products, on landmark matrices and at condition 50.

All invert the same P = W + eps I in float32; residuals ||I - P X||_F are measured in float64. Newton-Schulz takes two
products an iteration; conjugate gradient, on all columns of the identity at once, one.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attngeo.evaluation.layer_inputs import layer_inputs
from attngeo.layers.attention import pool_grid
from attngeo.ops import laplacian_kernel, newton_schulz_inverse, spd_inverse
from attngeo.ops.conjugate_gradient.naive import iterates
from attngeo.ops.newton_schulz import Start
from attngeo.training.seeding import generator

Row = dict[str, Any]

NEWTON_SCHULZ: dict[str, Start] = {
    "newton_schulz": "paper",
    "newton_schulz_identity": "identity",
    "newton_schulz_printed": "printed",
}
CONJUGATE_GRADIENT, CHOLESKY, PINV = "conjugate_gradient", "cholesky", "pinv"
RANDOM, TRAINED, KAPPA = "random", "trained", "kappa_50"
CONDITION = 50.0
LAMBDA = 4.0
_HEAD_DIM = 32
_POOLED = 8  # tokens along each side of a landmark's cell


def random_landmark_matrices(count: int, landmarks: int, seed: int) -> Tensor:
    """Landmark matrices [count, M, M] of normal tokens, scaled and pooled as the layers do; `landmarks` a square."""
    side = math.isqrt(landmarks)
    if side * side != landmarks:
        raise ValueError(f"landmarks form a square grid: {landmarks} is no square")
    grid = (_POOLED * side, _POOLED * side)
    tokens = torch.randn(count, grid[0] * grid[1], _HEAD_DIM, generator=generator(seed, "random landmark matrices"))
    pooled = pool_grid(tokens * _HEAD_DIM**-0.25, grid, (side, side))
    return laplacian_kernel(pooled, pooled, LAMBDA)


def matrices_of_condition(count: int, size: int, seed: int, eps: float, condition: float = CONDITION) -> Tensor:
    """W [count, M, M] for which P = W + eps I has eigenvalues from 1 down to 1/condition, evenly in the logarithm."""
    draws = torch.randn(count, size, size, generator=generator(seed, "matrices of a condition"), dtype=torch.float64)
    basis, _ = torch.linalg.qr(draws)
    eigenvalues = torch.logspace(0, -math.log10(condition), size, dtype=torch.float64)
    P = basis * eigenvalues @ basis.mT
    P = (P + P.mT) / 2
    return (P - eps * torch.eye(size, dtype=torch.float64)).float()


def trained_landmark_matrices(model: nn.Module, images: Tensor) -> list[Tensor]:
    """The matrices that a model's solvers invert for these images, one tensor [count, M, M] a layer."""
    layers = [layer for layer in model.modules() if hasattr(layer, "landmark_matrix")]
    with torch.inference_mode():
        found = [
            layer.landmark_matrix(x, grid).flatten(0, -3) for layer, x, grid in layer_inputs(model, layers, images)
        ]
    return [matrix.clone() for matrix in found]


def evenly_chosen(matrices: Sequence[Tensor], count: int) -> list[Tensor]:
    """At most `count` matrices in all, as many from each tensor, spread evenly over it."""
    each = max(1, count // max(1, len(matrices)))
    return [matrix[torch.linspace(0, len(matrix) - 1, min(each, len(matrix))).round().long()] for matrix in matrices]


def analyze(kinds: Mapping[str, Sequence[Tensor]], *, iterations: int, eps: float) -> list[Row]:
    """Residuals of every solver against matrix products, on matrices W by kind; each kind may hold several sizes.

    The value is the median over all matrices of a kind, with quartiles and the largest as metrics of their own;
    infinite where an iteration has overflowed.
    """
    rows: list[Row] = []
    for kind, tensors in kinds.items():
        shared = {"matrix": kind, "landmarks": _span(tensors), "eps": eps}
        conditions = torch.cat([torch.linalg.cond(_shifted(W, eps)) for W in tensors])
        rows += [shared | row for row in _statistics("condition", conditions, {})]
        residuals: dict[tuple[str, int], list[Tensor]] = {}
        for W in tensors:
            for solver, products, residual in _runs(W, iterations, eps):
                residuals.setdefault((solver, products), []).append(residual)
        for (solver, products), parts in residuals.items():
            labels: Row = {"solver": solver}
            if products:
                labels |= {"products": products, "iterations": products // _products_an_iteration(solver)}
            rows += [shared | row for row in _statistics("solver_residual", torch.cat(parts), labels)]
    return rows


def residual(P: Tensor, X: Tensor) -> Tensor:
    """||I - P X||_F of every matrix in float64, infinite where it is not finite."""
    identity = torch.eye(P.shape[-1], dtype=torch.float64)
    norm = torch.linalg.matrix_norm(identity - P.double() @ X.double())
    return torch.nan_to_num(norm, nan=math.inf, posinf=math.inf)


def _runs(W: Tensor, iterations: int, eps: float) -> Iterator[tuple[str, int, Tensor]]:
    """(solver, matrix products, residuals) of every solver; 0 products where a solver takes none to be compared by."""
    P = _shifted(W, eps)
    exact = P.double()
    for solver, start in NEWTON_SCHULZ.items():
        for count in range(1, iterations + 1):
            X, _ = newton_schulz_inverse(W, count, eps, start=start)
            yield solver, _products_an_iteration(solver) * count, residual(exact, X)
    for count, X in enumerate(iterates(P, 2 * iterations), start=1):
        yield CONJUGATE_GRADIENT, count, residual(exact, X)
    yield CHOLESKY, 0, residual(exact, spd_inverse(W, eps))
    yield PINV, 0, residual(exact, torch.linalg.pinv(P))


def _products_an_iteration(solver: str) -> int:
    return 2 if solver in NEWTON_SCHULZ else 1


def _shifted(W: Tensor, eps: float) -> Tensor:
    return W + eps * torch.eye(W.shape[-1], dtype=W.dtype)


def _span(tensors: Sequence[Tensor]) -> str:
    sizes = sorted({W.shape[-1] for W in tensors})
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"


def _statistics(metric: str, values: Tensor, labels: Row) -> Iterator[Row]:
    low, middle, high = (
        torch.quantile(values.double(), level, interpolation="lower").item() for level in (0.25, 0.5, 0.75)
    )
    shared = {"unit": "1", "n": len(values)} | labels
    spread = high - low if math.isfinite(high) else None
    yield shared | {
        "metric": metric,
        "value": middle,
        "spread": spread,
        "spread_kind": "interquartile range over matrices",
    }
    for name, value in (("lower_quartile", low), ("upper_quartile", high), ("largest", float(values.max()))):
        yield shared | {"metric": f"{metric}_{name}", "value": value}
