"""Injectivity of attention matrices on real features: rank, separation of rows, recall of a token's identity (P2.c)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attngeo.errors import UserError
from attngeo.layers.attention import Grid, pool_grid
from attngeo.ops import gaussian_kernel, laplacian_kernel, nystrom_matrix, spd_inverse
from attngeo.ops.nystrom import Normalization
from attngeo.training.seeding import generator

if TYPE_CHECKING:
    import pandas as pd

RANK_RULE = "singular values above the largest one x N x 2.2e-16 (float64)"
COLLISION = 1e-6  # relative distance below which two rows of the ledger's rule count as one
SOLVER_EPS = 0.01
NYSTROM_FORMS: tuple[Normalization, ...] = ("injective", "injective_row", "row_sum", "none")


@dataclass(frozen=True)
class _Form:
    """An attention matrix [B, 1, N, N] with what it is called; `landmarks` is 0 for the forms that use none."""

    form: str
    kernel: str
    landmarks: int
    matrix: Tensor


def analyze(
    features: Mapping[str, Tensor | np.ndarray],
    seed: int,
    *,
    landmark_grids: Sequence[int] = (2, 3, 4, 5, 7),
    token_grids: Sequence[int] | None = None,
    grids: Mapping[str, Grid] | None = None,
    head_dim: int = 32,
    lambda_: float = 4.0,
) -> "pd.DataFrame":
    """Measure attention matrices made of features [B, N, D] under a label each; one row a number.

    Tokens are layer-normalised and projected by one random matrix to q = k of unit variance and width `head_dim`,
    scaled by head_dim^(-1/4). Forms without landmarks: softmax, gaussian, laplacian (exact kernels) and linear_row_sum
    (plain linear attention: positive part of q, rows divided by their sum). Forms of the Nystrom Laplacian matrix, by
    normalisation: injective, injective_row, row_sum, none; landmarks are averages over a grid of side
    `landmark_grids`, and W + 0.01 I is inverted by Cholesky. The centre of the token grid is cut to each side of
    `token_grids` (default: whole, half, quarter). Everything is in float64.
    Controls: "features" as they are, "gaussian_noise" of the same mean and standard deviation by channel, and
    "collinear_copies", where the lower half of the map is the upper half times 2 (what linear attention confuses).
    Metrics, mean and standard deviation over images: numerical_rank (RANK_RULE); rank_bound = min(N, M + 1), which no
    Nystrom form can exceed; smallest_separation = smallest distance of two rows over their median norm; collisions =
    pairs of rows closer than 1e-6 of it; identity_recall = share of tokens that attend most to themselves.

    UserError for features that are not [B, N, D], not finite, or of a token number that is no square and has no
    entry in `grids`.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for index, (label, given) in enumerate(features.items()):
        tokens, grid = _checked(label, given, grids)
        sides = token_grids if token_grids is not None else _default_sides(grid)
        projection = _projection(tokens.shape[-1], head_dim, seed, index)
        for side in sorted({min(side, max(grid)) for side in sides}):
            cut, cut_grid = _centre(tokens, grid, side)
            for control, controlled in _controls(cut, cut_grid, seed, index):
                q = (controlled @ projection).unsqueeze(1) * head_dim**-0.25
                labels = {"feature_set": label, "control": control, "tokens": cut_grid[0] * cut_grid[1]}
                for form in _forms(q, cut_grid, landmark_grids, lambda_):
                    rows += _measure(form, labels)
    return pd.DataFrame(rows)


def _checked(label: str, given: Tensor | np.ndarray, grids: Mapping[str, Grid] | None) -> tuple[Tensor, Grid]:
    """Layer-normalised float64 tokens and their grid."""
    tokens = torch.as_tensor(given).detach().to(torch.float64)
    if tokens.ndim != 3 or min(tokens.shape) < 1:
        raise UserError(f"features {label!r} have shape {tuple(tokens.shape)}", "give images x tokens x channels")
    if not torch.isfinite(tokens).all():
        raise UserError(f"features {label!r} hold NaN or infinity", "look at the model or images that made them")
    count = tokens.shape[1]
    side = math.isqrt(count)
    grid = (grids or {}).get(label, (side, side))
    if grid[0] * grid[1] != count:
        raise UserError(
            f"features {label!r} have {count} tokens, which do not fill a grid of {grid[0]} x {grid[1]}",
            f"leave out class and register tokens, or give grids={{{label!r}: (rows, columns)}}",
        )
    return torch.nn.functional.layer_norm(tokens, tokens.shape[-1:]), grid


def _default_sides(grid: Grid) -> tuple[int, ...]:
    side = max(grid)
    return tuple(size for size in (side // 4, side // 2, side) if size >= 2) or (side,)


def _projection(channels: int, head_dim: int, seed: int, index: int) -> Tensor:
    """Random [D, head_dim] that keeps the variance of layer-normalised tokens."""
    draws = torch.randn(
        channels, head_dim, generator=generator(seed, "injectivity projection", index), dtype=torch.float64
    )
    return draws / math.sqrt(channels)


def _centre(tokens: Tensor, grid: Grid, side: int) -> tuple[Tensor, Grid]:
    cut = (min(grid[0], side), min(grid[1], side))
    top, left = (grid[0] - cut[0]) // 2, (grid[1] - cut[1]) // 2
    image = tokens.unflatten(1, grid)[:, top : top + cut[0], left : left + cut[1]]
    return image.flatten(1, 2), cut


def _controls(tokens: Tensor, grid: Grid, seed: int, index: int) -> Iterator[tuple[str, Tensor]]:
    yield "features", tokens
    noise = torch.randn(tokens.shape, generator=generator(seed, "injectivity noise", index), dtype=torch.float64)
    flat = tokens.flatten(0, 1)
    yield "gaussian_noise", flat.mean(0) + flat.std(0, correction=0) * noise
    half = grid[0] // 2 * grid[1]
    if half:
        copies = tokens.clone()
        copies[:, -half:] = 2.0 * tokens[:, :half]
        yield "collinear_copies", copies


def _forms(q: Tensor, grid: Grid, landmark_grids: Sequence[int], lambda_: float) -> Iterator[_Form]:
    """All matrices of one set of queries [B, 1, N, D]."""
    laplacian = partial(laplacian_kernel, lambda_=lambda_)
    products = q @ q.mT  # the two factors head_dim^(-1/4) make the usual scale
    yield _Form("softmax", "softmax", 0, torch.softmax(products, dim=-1))
    yield _Form("gaussian", "gaussian", 0, gaussian_kernel(q, q))
    yield _Form("laplacian", "laplacian", 0, laplacian(q, q))
    positive = q.clamp_min(0.0)
    linear = positive @ positive.mT
    yield _Form(
        "linear_row_sum", "linear", 0, linear / linear.sum(-1, keepdim=True).clamp_min(torch.finfo(q.dtype).tiny)
    )
    tokens = q.shape[-2]
    for side in sorted(set(landmark_grids)):
        cells = (min(side, grid[0]), min(side, grid[1]))
        if cells != (side, side):
            continue  # finer than the token grid: the same as the largest grid that fits
        landmarks = pool_grid(q, grid, cells)
        for normalization in NYSTROM_FORMS:
            scale = torch.full((1,), 1.0 / tokens, dtype=q.dtype) if normalization.startswith("injective") else None
            matrix = nystrom_matrix(
                q,
                landmarks,
                laplacian,
                normalization=normalization,
                solver=partial(spd_inverse, eps=SOLVER_EPS),
                scale=scale,
            )
            yield _Form(normalization, "laplacian_nystrom", side * side, matrix)


def _measure(form: _Form, labels: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of one form: every metric's mean and spread over images."""
    matrix = form.matrix.squeeze(1)
    images, tokens = matrix.shape[0], matrix.shape[-1]
    described = dict(labels) | {"form": form.form, "kernel": form.kernel, "landmarks": form.landmarks}

    def row(metric: str, values: Tensor, unit: str) -> dict[str, Any]:
        values = values.to(torch.float64)
        spread = float(values.std()) if images > 1 else None
        return described | {
            "metric": metric,
            "value": float(values.mean()),
            "unit": unit,
            "n": images,
            "spread": spread,
            "spread_kind": "std over images" if images > 1 else "",
        }

    singular = torch.linalg.svdvals(matrix)
    threshold = singular[:, :1] * tokens * torch.finfo(singular.dtype).eps
    yield row("numerical_rank", (singular > threshold).sum(-1), "")
    if form.landmarks:
        bound = min(tokens, form.landmarks + 1)
        yield described | {
            "metric": "rank_bound",
            "value": float(bound),
            "unit": "",
            "n": images,
            "spread": None,
            "spread_kind": "",
        }
    yield row("identity_recall", (matrix.argmax(-1) == torch.arange(tokens)).to(torch.float64).mean(-1), "")
    if tokens > 1:
        # The exact distances: the expansion |a|^2 + |b|^2 - 2 a.b would report rounding errors as separation.
        distances = torch.stack(
            [torch.cdist(one, one, compute_mode="donot_use_mm_for_euclid_dist") for one in matrix]
        ) / matrix.norm(dim=-1).median(-1).values.reshape(-1, 1, 1)
        pairs = distances[:, *torch.triu_indices(tokens, tokens, 1)]
        yield row("smallest_separation", pairs.amin(-1), "relative")
        yield row("collisions", (pairs < COLLISION).sum(-1), "pairs an image")
