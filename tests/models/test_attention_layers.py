"""Laws of the attention layers, in float64 unless precision is the point."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attngeo.errors import UserError
from attngeo.layers.attention import pool_grid
from attngeo.layers.fiber_feed_forward import FiberFeedForward
from attngeo.layers.gaussian import GaussianAttention
from attngeo.layers.laplacian import LaplacianAttention
from attngeo.layers.laplacian_exact import LaplacianExactAttention
from attngeo.layers.linear_injective import LinearInjectiveAttention
from attngeo.layers.nystrom_factors import factorize
from attngeo.layers.registry import ATTENTION_KINDS, build_attention
from attngeo.layers.riemannian import RiemannianAttention
from attngeo.layers.softmax import SoftmaxAttention, SpatialReductionAttention
from attngeo.ops import backend, laplacian_kernel, nystrom_attention, nystrom_matrix, spd_inverse
from tests.tolerances import (
    ATTENTION_FLOAT64,
    AUTOCAST_AGREEMENT,
    EUCLIDEAN_METRIC_FLOAT64,
    EXACT_ATTENTION_PEAK_INPUTS,
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


def test_conjugate_gradient_reaches_cholesky_and_both_take_equal_products_by_default() -> None:
    x = tokens()
    direct = LaplacianAttention(16, 2, landmarks=(2, 3), solver="cholesky").double()
    for options in ({}, {"backward": "loop"}, {"iterations": 12}):
        iterated = LaplacianAttention(16, 2, landmarks=(2, 3), solver="conjugate_gradient", **options).double()
        iterated.load_state_dict(direct.state_dict())
        torch.testing.assert_close(iterated(x, GRID), direct(x, GRID), rtol=0, atol=NEWTON_SCHULZ_AGAINST_CHOLESKY)
        iterated(x, GRID).sum().backward()
        assert iterated.query.weight.grad.isfinite().all()
    newton_schulz, gradient = (
        LaplacianAttention(16, 2, landmarks=(2, 3), solver=solver).token_macs(GRID).solver
        for solver in ("newton_schulz", "conjugate_gradient")
    )
    assert newton_schulz == gradient > 0


@pytest.mark.parametrize("solver", ["newton_schulz", "conjugate_gradient", "cholesky"])
def test_a_solver_that_is_stopped_early_shows_in_the_residual(solver: str) -> None:
    early = {} if solver == "cholesky" else {"iterations": 1}
    layer = LaplacianAttention(16, 2, landmarks=(2, 3), solver=solver, **early)
    assert layer.solver_residual is None
    layer(tokens().float(), GRID)
    assert (layer.solver_residual > 0.1) == (solver != "cholesky")
    assert not layer.solver_residual.requires_grad


def normalised(G: Tensor, normalization: str, scale: Tensor, statistics: str = "image") -> Tensor:
    """Z by its definition: G [B, H, N, N], scale [H, 1, 1]."""
    tokens = G.shape[-1]
    if normalization == "injective":
        over = (0, -2) if statistics == "batch" else (-2,)
        mean, variance = G.mean(over, keepdim=True), G.var(over, keepdim=True, correction=0)
        whitened = (G - mean) / (variance + 1e-3 * variance.mean(-1, keepdim=True) + 1e-12).sqrt()
        return scale * whitened + 1 / tokens
    if normalization == "injective_row":
        return scale * (G - G.mean(-1, keepdim=True)) + 1 / tokens
    return G / G.sum(-1, keepdim=True) if normalization == "row_sum" else scale * G


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_factors_with_keys_equal_to_the_queries_are_the_operator(normalization: str) -> None:
    q, v = torch.randn(2, 3, 13, 8, dtype=torch.float64), torch.randn(2, 3, 13, 5, dtype=torch.float64)
    landmarks = q[:, :, :4]
    C, W_inverse = laplacian_kernel(q, landmarks), spd_inverse(laplacian_kernel(landmarks, landmarks))
    factors = factorize(C, W_inverse, C, normalization=normalization)
    expected = nystrom_attention(q, landmarks, v, laplacian_kernel, normalization=normalization, solver=spd_inverse)
    torch.testing.assert_close(factors.apply(v), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("normalization", "statistics"), [*((n, "image") for n in NORMALIZATIONS), ("injective", "batch")]
)
def test_factors_are_the_dense_definition(normalization: str, statistics: str) -> None:
    q, k, v, l_q, l_k = (torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (13, 13, 13, 4, 4))
    scale = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)[:, None, None]
    C_q, C_k = laplacian_kernel(q, l_k), laplacian_kernel(k, l_q)
    inverse = torch.linalg.inv(laplacian_kernel(l_q, l_k) + 0.01 * torch.eye(4, dtype=torch.float64))
    factors = factorize(
        C_q,
        inverse,
        C_k,
        normalization=normalization,
        scale=None if normalization == "row_sum" else scale,
        statistics=statistics,
    )
    G = C_q @ inverse @ C_k.mT
    Z = normalised(G, normalization, scale, statistics)
    torch.testing.assert_close(factors.apply(v), Z @ v, rtol=0, atol=ATTENTION_FLOAT64)
    torch.testing.assert_close(factors.attention_rows(range(13)), Z, rtol=0, atol=ATTENTION_FLOAT64)
    torch.testing.assert_close(factors.row(-2), Z[:, :, -2], rtol=0, atol=ATTENTION_FLOAT64)
    if normalization == "injective":
        mean = G.mean((0, -2) if statistics == "batch" else -2, keepdim=True).expand(2, -1, -1, -1)
        torch.testing.assert_close(factors.mean.expand(2, -1, -1, -1).mT, mean, rtol=0, atol=ATTENTION_FLOAT64)


@pytest.mark.parametrize("learn_lambda", [False, True])
@pytest.mark.parametrize("shared_query_key", [True, False])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_exact_laplacian_attention_and_its_gradients_are_their_definition(
    normalization: str, shared_query_key: bool, learn_lambda: bool
) -> None:
    layer = LaplacianExactAttention(
        16,
        2,
        lambda_=0.5,
        normalization=normalization,
        shared_query_key=shared_query_key,
        learn_lambda=learn_lambda,
        local_convolution=False,
    ).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = tokens().requires_grad_()
    query, key = layer.features(x, GRID)
    key = query if key is None else key
    lambda_ = layer.log_lambda.exp()[:, None, None] if learn_lambda else 0.5
    K = torch.exp(-(query.unsqueeze(-2) - key.unsqueeze(-3)).abs().sum(-1) / lambda_)
    scale = 1.0 if layer.scale is None else layer.scale[:, None, None] / 35
    expected = layer.projection(
        layer.merge_heads(normalised(K, normalization, scale) @ layer.split_heads(layer.value(x)))
    )
    out, given = layer(x, GRID), torch.randn(x.shape, dtype=torch.float64)
    torch.testing.assert_close(out, expected, rtol=0, atol=ATTENTION_FLOAT64)
    wanted = [x, *layer.parameters()]
    for found, derived in zip(
        torch.autograd.grad(out, wanted, given), torch.autograd.grad(expected, wanted, given), strict=True
    ):
        torch.testing.assert_close(found, derived, rtol=ATTENTION_FLOAT64, atol=ATTENTION_FLOAT64)


def test_the_landmark_form_is_the_exact_one_where_every_token_is_a_landmark() -> None:
    options = {"shared_query_key": True, "normalization": "injective"}
    exact = LaplacianExactAttention(16, 2, **options).double()
    nystrom = LaplacianAttention(16, 2, landmarks=GRID, solver="cholesky", solver_eps=0.0, **options).double()
    nystrom.load_state_dict(exact.state_dict())
    x = 20 * tokens()
    torch.testing.assert_close(nystrom(x, GRID), exact(x, GRID), rtol=0, atol=ATTENTION_FLOAT64)


@pytest.mark.parametrize("feature_map", ["identity", "relu", "exp"])
def test_linear_injective_attention_is_its_definition(feature_map: str) -> None:
    layer = LinearInjectiveAttention(16, 2, feature_map=feature_map).double()
    nn.init.normal_(layer.scale)
    x = tokens()
    query, key, value = (layer.split_heads(part) for part in layer.query_key_value(x).chunk(3, dim=-1))
    phi = {"identity": lambda t: t, "relu": torch.relu, "exp": torch.exp}[feature_map]
    scores = layer.rotate(phi(query / 8**0.25), GRID) @ layer.rotate(phi(key / 8**0.25), GRID).mT
    Z = layer.scale[:, None, None] / 35 * (scores - scores.mean(-1, keepdim=True)) + 1 / 35
    mixed = layer.merge_heads(Z @ value) + layer.local_convolution(layer.merge_heads(value), GRID)
    torch.testing.assert_close(layer(x, GRID), layer.projection(mixed), rtol=0, atol=ATTENTION_FLOAT64)
    torch.testing.assert_close(Z.sum(-1), torch.ones_like(Z[..., 0]), rtol=0, atol=ATTENTION_FLOAT64)


def test_soft_plus_plus_is_its_definition() -> None:
    layer = GaussianAttention(16, 2, landmarks=(2, 3), form="soft++", solver="cholesky").double()
    x = tokens()
    query, _ = layer.features(x, GRID)
    C, W = layer.kernel(query, pool_grid(query, GRID, (2, 3))), layer.landmark_matrix(x, GRID)
    D = torch.diag_embed(W.sum(-1) ** -0.5)
    Z = C @ D @ torch.linalg.inv(W + 0.01 * torch.eye(6, dtype=W.dtype)) @ D @ C.mT
    expected = layer.projection(layer.merge_heads(Z @ layer.split_heads(layer.value(x))))
    torch.testing.assert_close(layer(x, GRID), expected, rtol=0, atol=ATTENTION_FLOAT64)


@pytest.mark.parametrize("backward", ["implicit", "loop"])
def test_separate_landmarks_are_the_asymmetric_nystrom_form(backward: str) -> None:
    layer = LaplacianAttention(
        16,
        2,
        landmarks=(2, 2),
        shared_query_key=False,
        separate_landmarks=True,
        iterations=60,
        backward=backward,
        lambda_=0.5,
        local_convolution=False,
    ).double()
    for part in (layer.query, layer.key):
        nn.init.normal_(part.weight)
    x = tokens().requires_grad_()
    query, key = layer.features(x, GRID)
    l_q, l_k = pool_grid(query, GRID, (2, 2)), pool_grid(key, GRID, (2, 2))
    inverse = torch.linalg.inv(layer.kernel(l_q, l_k) + 0.01 * torch.eye(4, dtype=torch.float64))
    G = layer.kernel(query, l_k) @ inverse @ layer.kernel(l_q, key)
    Z = normalised(G, "injective", layer.scale[:, None, None] / 35)
    expected = layer.projection(layer.merge_heads(Z @ layer.split_heads(layer.value(x))))
    out = layer(x, GRID)
    assert layer.solver_residual < NEWTON_SCHULZ_AGAINST_CHOLESKY
    torch.testing.assert_close(out, expected, rtol=0, atol=NEWTON_SCHULZ_AGAINST_CHOLESKY)
    found, derived = (torch.autograd.grad(y.square().sum(), [x, layer.query.weight]) for y in (out, expected))
    torch.testing.assert_close(found, derived, rtol=1e-7, atol=NEWTON_SCHULZ_AGAINST_CHOLESKY)


def test_convolved_landmarks_are_soft_s_where_the_stride_divides_the_grid() -> None:
    layer = GaussianAttention(16, 2, landmarks=(2, 3), landmark_map="convolution", landmark_stride=(2, 2)).double()
    query = torch.randn(2, 2, 24, 8, dtype=torch.float64)
    weight = layer.landmark_convolution.convolution.weight
    patches = query.unflatten(2, (2, 2, 3, 2)).permute(0, 1, 2, 4, 6, 3, 5).flatten(-2).flatten(2, 3)
    expected = F.gelu(
        F.layer_norm(patches.flatten(-2) @ weight.flatten(1).mT, (8,), eps=layer.landmark_convolution.norm.eps)
    )
    found = layer.landmark_convolution(query, (4, 6), layer.landmark_grid((4, 6)))
    torch.testing.assert_close(found, expected, rtol=0, atol=ATTENTION_FLOAT64)
    assert [layer.landmark_grid(grid) for grid in [(1, 1), (3, 5), (4, 6), (9, 40)]] == [(1, 1), (2, 3), (2, 3), (2, 3)]


def test_a_learned_lambda_starts_where_a_fixed_one_stays() -> None:
    fixed = LaplacianAttention(16, 2, landmarks=(2, 2), lambda_=2.0).double()
    learned = LaplacianAttention(16, 2, landmarks=(2, 2), lambda_=2.0, learn_lambda=True).double()
    learned.load_state_dict(fixed.state_dict() | {"log_lambda": learned.log_lambda})
    x = tokens()
    torch.testing.assert_close(learned(x, GRID), fixed(x, GRID), rtol=0, atol=1e-7)  # log 2 is stored in float32
    learned(x, GRID).square().sum().backward()
    assert (learned.log_lambda.grad != 0).all()


def test_the_scale_starts_at_one_over_n_or_at_one_and_is_learned_or_not() -> None:
    x, found = tokens(), {}
    state = LaplacianAttention(16, 2, landmarks=(2, 2)).double().state_dict()
    del state["scale"]
    for start in ("1/N", "one"):
        for learn in (True, False):
            layer = LaplacianAttention(16, 2, landmarks=(2, 2), scale_start=start, learn_scale=learn).double()
            layer.load_state_dict(state, strict=False)
            assert ("scale" in dict(layer.named_parameters())) == learn
            found[start, learn] = layer(x, GRID)
            rows = layer.attention_rows(x, GRID, [3])
            torch.testing.assert_close(rows.abs().max() > 0.5, torch.tensor(start == "one"))
    for start in ("1/N", "one"):
        torch.testing.assert_close(found[start, True], found[start, False], rtol=0, atol=ATTENTION_FLOAT64)
    assert not torch.allclose(found["1/N", True], found["one", True])


@pytest.mark.parametrize("shared_query_key", [True, False])
def test_statistics_of_a_batch_are_what_makes_a_sample_depend_on_its_mates(shared_query_key: bool) -> None:
    x = tokens(batch=5)
    changed = torch.cat([x[:1], 3 * x[1:]])
    for statistics in ("image", "batch"):
        layer = LaplacianAttention(
            16, 2, landmarks=(2, 2), statistics=statistics, shared_query_key=shared_query_key
        ).double()
        nn.init.normal_(layer.query.weight)
        same = torch.allclose(layer(x, GRID)[:1], layer(changed, GRID)[:1], rtol=0, atol=ATTENTION_FLOAT64)
        assert same == (statistics == "image")


@pytest.mark.parametrize(
    "options",
    [
        {"separate_landmarks": True},
        {"separate_landmarks": True, "shared_query_key": False, "solver": "cholesky"},
        {"separate_landmarks": True, "shared_query_key": False, "start": "identity"},
        {"statistics": "batch", "normalization": "row_sum"},
        {"lambda_": 0.0},
        {"solver": "cholesky", "iterations": 5},
        {"solver": "cholesky", "backward": "loop"},
        {"solver": "conjugate_gradient", "start": "identity"},
        {"solver": "conjugate_gradient", "separate_landmarks": True, "shared_query_key": False},
        {"iterations": -1},
        {"start": "warm"},
        {"normalization": "row_sum", "scale_start": "one"},
        {"normalization": "none", "learn_scale": False},
        {"normalization": "injective_row", "eps_absolute": 1e-5},
        {"landmark_stride": (2, 2)},
    ],
)
def test_options_that_exclude_each_other_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UserError):
        LaplacianAttention(16, 2, **options)
    if options.get("separate_landmarks"):
        with pytest.raises(UserError):
            GaussianAttention(16, 2, **options | {"form": "soft++"})


LAYERS = [
    *((kind, {}) for kind in ATTENTION_KINDS if kind != "softmax_sr"),
    *((kind, {"normalization": n}) for kind in ("laplacian", "laplacian_exact") for n in NORMALIZATIONS[1:]),
    ("laplacian", {"shared_query_key": False, "separate_landmarks": True, "statistics": "batch"}),
    ("laplacian", {"landmark_map": "convolution", "learn_lambda": True, "scale_start": "one", "learn_scale": False}),
    ("gaussian", {"form": "soft++", "landmark_map": "convolution", "landmark_stride": (2, 3)}),
    ("riemannian", {"metric": "key"}),
    ("riemannian", {"metric": "mean", "metric_per_head": True}),
    ("linear_injective", {"feature_map": "relu", "local_convolution": False}),
]


@pytest.mark.parametrize(("kind", "options"), LAYERS)
def test_attention_rows_times_values_are_the_output(kind: str, options: dict[str, object]) -> None:
    layer = build_attention(kind, 16, 2, landmarks=(2, 3), **options).double()
    x, chosen = tokens(), [0, 33, 7, -1]
    value = layer.value(x) if hasattr(layer, "value") else layer.query_key_value(x).chunk(3, dim=-1)[2]
    rows = layer.attention_rows(x, GRID, chosen)
    assert rows.shape == (2, 2, 4, 35)
    mixed = layer.merge_heads(rows @ layer.split_heads(value))
    if getattr(layer, "local_convolution", None) is not None:
        mixed = mixed + layer.local_convolution(value, GRID)[:, chosen]
    torch.testing.assert_close(layer.projection(mixed), layer(x, GRID)[:, chosen], rtol=0, atol=ATTENTION_FLOAT64)


@pytest.mark.parametrize(("kind", "options"), [item for item in LAYERS if item[0] in ("laplacian", "gaussian")])
def test_factors_come_with_the_same_output(kind: str, options: dict[str, object]) -> None:
    layer = build_attention(kind, 16, 2, landmarks=(2, 3), **options).double()
    x = tokens()
    out, factors = layer(x, GRID, return_factors=True)
    torch.testing.assert_close(out, layer(x, GRID), rtol=0, atol=ATTENTION_FLOAT64)
    marks = factors.W_inverse.shape[-1]
    assert factors.C_q.shape == factors.C_k.shape == (2, 2, 35, marks)
    torch.testing.assert_close(factors.row(5), layer.attention_rows(x, GRID, torch.tensor([5]))[:, :, 0])


def test_rows_of_spatial_reduction_spread_each_cell_over_its_tokens() -> None:
    layer = SpatialReductionAttention(16, 2, landmarks=(2, 3)).double()
    rows = layer.attention_rows(tokens((4, 6)), (4, 6), [5, 2])
    torch.testing.assert_close(rows.sum(-1), torch.ones_like(rows[..., 0]), rtol=0, atol=ATTENTION_FLOAT64)
    cells = rows.unflatten(-1, (2, 2, 3, 2)).transpose(-3, -2).flatten(-2)
    torch.testing.assert_close(cells, cells[..., :1].expand_as(cells), rtol=0, atol=ATTENTION_FLOAT64)


MEMORY_SCRIPT = """
import ctypes, pathlib, torch
from attngeo.evaluation.timing import return_pages
from attngeo.layers.laplacian_exact import LaplacianExactAttention

def status(field):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024

torch.set_num_threads(1)
return_pages()
layer = LaplacianExactAttention(32, 1, backend="compiled")
for side in (16, 64):
    x = torch.randn(1, side * side, 32)
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    layer(x, (side, side)).sum().backward()
print(status("VmHWM") - before)
"""


def test_the_exact_kernel_of_all_tokens_is_never_in_memory() -> None:
    """4096 tokens: the kernel alone would be 64 MiB in float32, 128 MiB for the statistics."""
    if backend.why_not_compiled("laplacian_kernel_matmul", [torch.ones(1)]):
        pytest.skip(backend.why_not_compiled("laplacian_kernel_matmul", [torch.ones(1)]))
    result = subprocess.run([sys.executable, "-c", MEMORY_SCRIPT], capture_output=True, text=True, check=True)
    assert float(result.stdout) < EXACT_ATTENTION_PEAK_INPUTS * 4096 * 32 * 4 / 2**20


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
@pytest.mark.parametrize(("kind", "options"), [("softmax_sr", {}), *LAYERS])
def test_every_grid_is_accepted_and_gives_finite_gradients(
    kind: str, options: dict[str, object], grid: tuple[int, int]
) -> None:
    layer = build_attention(kind, 16, 2, landmarks=(3, 4), **options)
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
