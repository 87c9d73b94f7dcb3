"""Laws of the attention layers, in float64 unless precision is the point."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attngeo.layers.attention import Attention, pool_grid
from attngeo.layers.fiber_feed_forward import FiberFeedForward
from attngeo.layers.gaussian import GaussianAttention
from attngeo.layers.laplacian import LaplacianAttention
from attngeo.layers.riemannian import RiemannianAttention
from attngeo.layers.separate_keys import nystrom_attention_with_keys
from attngeo.layers.softmax import SoftmaxAttention, SpatialReductionAttention
from attngeo.ops import laplacian_kernel, nystrom_attention, nystrom_matrix, spd_inverse
from tests.tolerances import (
    ATTENTION_FLOAT64,
    AUTOCAST_AGREEMENT,
    EUCLIDEAN_METRIC_FLOAT64,
    INTEGER_SHIFT_FLOAT32,
    NEWTON_SCHULZ_AGAINST_CHOLESKY,
)

NORMALIZATIONS = ("injective", "injective_row", "row_sum", "none")
GRID = (5, 7)


def tokens(grid: tuple[int, int] = GRID, dim: int = 16, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, grid[0] * grid[1], dim, dtype=torch.float64)


def flatten_metric(layer: nn.Module) -> None:
    """Set every token metric of a layer to the identity: a = 1, U = 0."""
    for name, parameter in layer.named_parameters():
        if name.endswith("token_metric.factor.weight"):
            nn.init.zeros_(parameter)


def test_laplacian_attention_is_its_definition_with_scale_one_over_n() -> None:
    layer = LaplacianAttention(16, 2, landmarks=(2, 3), solver="cholesky").double()
    x = tokens()
    query = layer.rotate(layer.split_heads(layer.query(x)) * 8**-0.25, GRID)
    landmarks = pool_grid(query, GRID, (2, 3))
    scale = torch.full((2,), 1.0 / 35, dtype=torch.float64)
    Z = nystrom_matrix(query, landmarks, laplacian_kernel, scale=scale)
    value = layer.value(x)
    local = F.conv2d(
        value.mT.unflatten(2, GRID), layer.local_convolution.convolution.weight, padding=1, groups=16
    ).flatten(2)
    expected = layer.projection(layer.merge_heads(Z @ layer.split_heads(value)) + local.mT)
    torch.testing.assert_close(layer(x, GRID), expected, rtol=0, atol=ATTENTION_FLOAT64)


def test_gaussian_attention_is_its_definition() -> None:
    layer = GaussianAttention(16, 2, landmarks=(2, 3), solver="cholesky", rotary=False).double()
    x = tokens()
    query = layer.split_heads(layer.query(x)) * 8**-0.25
    landmarks = pool_grid(query, GRID, (2, 3))

    def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.exp((a.unsqueeze(-2) - b.unsqueeze(-3)).square().sum(-1) / -2)

    C, W = kernel(query, landmarks), kernel(landmarks, landmarks)
    Z = C @ torch.linalg.inv(W + 0.01 * torch.eye(6, dtype=W.dtype)) @ C.mT
    expected = layer.projection(layer.merge_heads(Z @ layer.split_heads(layer.value(x))))
    torch.testing.assert_close(layer(x, GRID), expected, rtol=0, atol=ATTENTION_FLOAT64)


def test_newton_schulz_reaches_cholesky_where_its_residual_is_small() -> None:
    x = tokens()
    direct = LaplacianAttention(16, 2, landmarks=(2, 3), solver="cholesky").double()
    iterated = LaplacianAttention(16, 2, landmarks=(2, 3), iterations=60).double()
    iterated.load_state_dict(direct.state_dict())
    torch.testing.assert_close(iterated(x, GRID), direct(x, GRID), rtol=0, atol=NEWTON_SCHULZ_AGAINST_CHOLESKY)
    assert iterated.solver_residual < NEWTON_SCHULZ_AGAINST_CHOLESKY


@pytest.mark.parametrize("solver", ["newton_schulz", "cholesky"])
def test_a_solver_that_is_stopped_early_shows_in_the_residual(solver: str) -> None:
    layer = LaplacianAttention(16, 2, landmarks=(2, 3), iterations=1, solver=solver)
    assert layer.solver_residual is None
    layer(tokens().float(), GRID)
    assert (layer.solver_residual > 0.5) == (solver == "newton_schulz")
    assert not layer.solver_residual.requires_grad


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_separate_keys_equal_to_the_queries_change_nothing(normalization: str) -> None:
    q, v = torch.randn(2, 3, 13, 8, dtype=torch.float64), torch.randn(2, 3, 13, 5, dtype=torch.float64)
    arguments = {"kernel": laplacian_kernel, "normalization": normalization, "solver": spd_inverse}
    separate = nystrom_attention_with_keys(q, q, q[:, :, :4], v, **arguments)
    torch.testing.assert_close(separate, nystrom_attention(q, q[:, :, :4], v, **arguments), rtol=0, atol=1e-10)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_separate_keys_agree_with_the_dense_definition(normalization: str) -> None:
    q, k, v = (torch.randn(2, 3, 13, 8, dtype=torch.float64) for _ in range(3))
    landmarks, scale = q[:, :, :4], torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    inverse = spd_inverse(laplacian_kernel(landmarks, landmarks))
    G = laplacian_kernel(q, landmarks) @ inverse @ laplacian_kernel(k, landmarks).mT
    if normalization == "injective":
        variance = G.var(-2, keepdim=True, correction=0)
        whitened = (G - G.mean(-2, keepdim=True)) / (variance + 1e-3 * variance.mean(-1, keepdim=True) + 1e-12).sqrt()
        Z = scale[:, None, None] * whitened + 1 / 13
    elif normalization == "injective_row":
        Z = scale[:, None, None] * (G - G.mean(-1, keepdim=True)) + 1 / 13
    elif normalization == "row_sum":
        Z = G / G.sum(-1, keepdim=True)
    else:
        Z = scale[:, None, None] * G
    found = nystrom_attention_with_keys(
        q, k, landmarks, v, laplacian_kernel, normalization=normalization, solver=spd_inverse, scale=scale
    )
    torch.testing.assert_close(found, Z @ v, rtol=0, atol=ATTENTION_FLOAT64)


@pytest.mark.parametrize("metric", ["query", "key", "mean"])
def test_riemannian_attention_with_the_identity_metric_is_euclidean(metric: str) -> None:
    layer = RiemannianAttention(16, 2, metric=metric, rank=3).double()
    flatten_metric(layer)
    x = tokens()
    query, key, value = (layer.split_heads(part) for part in layer.query_key_value(x).chunk(3, dim=-1))
    query, key = layer.rotate(query, GRID), layer.rotate(key, GRID)
    squared = (query.unsqueeze(-2) - key.unsqueeze(-3)).square().sum(-1)
    weights = torch.softmax(-squared / (2 * 8**0.5), dim=-1)
    expected = layer.projection(layer.merge_heads(weights @ value))
    torch.testing.assert_close(layer(x, GRID), expected, rtol=0, atol=EUCLIDEAN_METRIC_FLOAT64)


@pytest.mark.parametrize("metric_per_head", [False, True])
def test_riemannian_attention_is_its_definition(metric_per_head: bool) -> None:
    layer = RiemannianAttention(16, 2, rank=3, metric_per_head=metric_per_head).double()
    nn.init.normal_(layer.token_metric.factor.weight)
    nn.init.normal_(layer.token_metric.diagonal.weight)
    x = tokens(batch=1)
    query, key, value = (layer.split_heads(part) for part in layer.query_key_value(x).chunk(3, dim=-1))
    query, key = layer.rotate(query, GRID), layer.rotate(key, GRID)
    diagonal, factor = layer.token_metric(x)
    G = (
        torch.diag_embed(diagonal.unflatten(-1, (-1, 8)))
        + factor.unflatten(2, (-1, 8)) @ factor.unflatten(2, (-1, 8)).mT
    )
    G = G.transpose(1, 2).expand(1, 2, 35, 8, 8)
    step = query.unsqueeze(-2) - key.unsqueeze(-3)
    squared = torch.einsum("bhnmd,bhnde,bhnme->bhnm", step, G, step)
    expected = layer.projection(layer.merge_heads(torch.softmax(-squared / (2 * 8**0.5), dim=-1) @ value))
    torch.testing.assert_close(layer(x, GRID), expected, rtol=0, atol=ATTENTION_FLOAT64)


def test_the_metric_starts_at_a_one_and_u_small_but_not_zero() -> None:
    layer = RiemannianAttention(64, 2)
    diagonal, factor = layer.token_metric(F.layer_norm(torch.randn(2, 35, 64), (64,)))
    torch.testing.assert_close(diagonal, torch.ones_like(diagonal))
    assert 0 < factor.abs().max() < 0.2
    torch.testing.assert_close(layer.log_temperature.exp(), torch.full((2,), 32**0.5))


def test_fiber_feed_forward_solves_with_the_metric() -> None:
    layer = FiberFeedForward(7, 11, rank=2).double()
    nn.init.normal_(layer.token_metric.factor.weight)
    x = tokens(dim=7)
    diagonal, factor = layer.token_metric(x)
    G = torch.diag_embed(diagonal) + factor @ factor.mT
    expected = torch.linalg.solve(G, layer.mlp(x).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=ATTENTION_FLOAT64)
    flatten_metric(nn.ModuleList([layer]))
    torch.testing.assert_close(layer(x), layer.mlp(x), rtol=0, atol=ATTENTION_FLOAT64)


def test_softmax_scores_depend_on_relative_positions_alone() -> None:
    layer = SoftmaxAttention(16, 2)
    q, k = torch.randn(1, 2, 1, 8).expand(1, 2, 35, 8), torch.randn(1, 2, 1, 8).expand(1, 2, 35, 8)
    scores = (layer.rotate(q, GRID) @ layer.rotate(k, GRID).mT).reshape(2, 5, 7, 5, 7)
    torch.testing.assert_close(scores[:, 0, 0, 2, 3], scores[:, 2, 1, 4, 4], rtol=0, atol=INTEGER_SHIFT_FLOAT32)
    assert (scores[:, 0, 0, 2, 3] - scores[:, 0, 0, 3, 2]).abs().min() > INTEGER_SHIFT_FLOAT32


def test_rotary_positions_of_pooled_cells_are_their_centres() -> None:
    layer = SpatialReductionAttention(16, 2, landmarks=(2, 1))
    x = torch.randn(1, 2, 1, 8)
    pooled = layer.rotate(x.expand(1, 2, 3, 8), (9, 3), pooled_to=(3, 1))
    whole = layer.rotate(x.expand(1, 2, 27, 8), (9, 3)).reshape(1, 2, 9, 3, 8)
    torch.testing.assert_close(pooled, whole[:, :, [1, 4, 7], 1], rtol=0, atol=INTEGER_SHIFT_FLOAT32)


def test_pooling_averages_cells_and_never_makes_more_landmarks_than_tokens() -> None:
    x = torch.arange(24.0).reshape(1, 24, 1)
    torch.testing.assert_close(pool_grid(x, (4, 6), (2, 3)).flatten(), torch.tensor([3.5, 5.5, 7.5, 15.5, 17.5, 19.5]))
    layer = LaplacianAttention(8, 1, landmarks=(7, 7))
    assert [layer.landmark_grid(grid) for grid in [(1, 1), (3, 9), (56, 56)]] == [(1, 1), (3, 7), (7, 7)]


@pytest.mark.parametrize("grid", [(1, 1), (1, 13), (2, 2), (11, 3)])
@pytest.mark.parametrize(
    "cls", [SoftmaxAttention, SpatialReductionAttention, GaussianAttention, LaplacianAttention, RiemannianAttention]
)
def test_every_grid_is_accepted_and_gives_finite_gradients(cls: type[Attention], grid: tuple[int, int]) -> None:
    layer = cls(16, 2, landmarks=(3, 4))
    x = torch.randn(2, grid[0] * grid[1], 16, requires_grad=True)
    out = layer(x, grid)
    out.square().sum().backward()
    assert out.shape == x.shape
    assert out.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("shared_query_key", [True, False])
@pytest.mark.parametrize("cls", [GaussianAttention, LaplacianAttention])
def test_kernel_and_solver_stay_in_float32_under_autocast(
    cls: type[GaussianAttention] | type[LaplacianAttention], shared_query_key: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = cls(16, 2, landmarks=(2, 2), shared_query_key=shared_query_key)
    seen: list[torch.dtype] = []
    kernel = layer.kernel

    def spy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        values = kernel(x, y)
        seen.extend([x.dtype, values.dtype])
        return values

    monkeypatch.setattr(layer, "kernel", spy)
    x = torch.randn(2, 35, 16)
    full = layer(x, GRID)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = layer(x, GRID)
    assert set(seen) == {torch.float32}
    assert layer.solver_residual.dtype == torch.float32
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), full, rtol=AUTOCAST_AGREEMENT, atol=AUTOCAST_AGREEMENT)


def test_widths_that_heads_or_rotary_pairs_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="do not divide"):
        SoftmaxAttention(10, 3)
    with pytest.raises(ValueError, match="rotary"):
        SoftmaxAttention(12, 2)
    assert SoftmaxAttention(12, 2, rotary=False)(torch.randn(1, 6, 12), (2, 3)).shape == (1, 6, 12)
