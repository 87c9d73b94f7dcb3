"""Laws of the low-rank metric: every function equals its dense form, and the Euclidean case is exact."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attngeo.ops.low_rank_metric import (
    inverse_quadratic_form,
    logdet,
    pairwise_squared_distance,
    quadratic_form,
    solve,
    square_root,
)
from attngeo.ops.low_rank_metric.naive import Metric
from tests.tolerances import EUCLIDEAN_ROUNDINGS, FLOAT64_RELATIVE, METRIC_AS_FLOAT64, ROOT_ROUNDINGS


def metrics(*leading: int, channels: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    a = 0.2 + torch.rand(*leading, channels, generator=generator, dtype=torch.float64)
    U = torch.randn(*leading, channels, rank, generator=generator, dtype=torch.float64)
    return a, U


def dense(a: Tensor, U: Tensor) -> Tensor:
    return torch.diag_embed(a) + U @ U.mT


@pytest.mark.parametrize(("channels", "rank"), [(1, 1), (7, 3), (5, 5), (3, 7), (33, 2), (4, 0)])
def test_solve_logdet_and_form_equal_the_dense_metric(channels: int, rank: int) -> None:
    a, U = metrics(2, 3, 5, channels=channels, rank=rank)
    x = torch.randn(2, 3, 5, channels, dtype=torch.float64)
    G = dense(a, U)
    tolerance = {"rtol": FLOAT64_RELATIVE, "atol": FLOAT64_RELATIVE}
    torch.testing.assert_close(solve(a, U, x), torch.linalg.solve(G, x.unsqueeze(-1)).squeeze(-1), **tolerance)
    torch.testing.assert_close(logdet(a, U), torch.linalg.slogdet(G).logabsdet, **tolerance)
    torch.testing.assert_close(quadratic_form(a, U, x), torch.einsum("...c,...cd,...d->...", x, G, x), **tolerance)


@pytest.mark.parametrize("metric", ["query", "key", "mean"])
@pytest.mark.parametrize(("rows", "others", "channels", "rank"), [(5, 7, 3, 2), (1, 1, 1, 1), (7, 5, 33, 0)])
def test_pairwise_distance_equals_the_dense_metric(
    metric: Metric, rows: int, others: int, channels: int, rank: int
) -> None:
    others = rows if metric == "mean" else others
    q = 3.0 + torch.randn(2, 1, rows, channels, dtype=torch.float64)
    k = 3.0 + torch.randn(2, 1, others, channels, dtype=torch.float64)
    a, U = metrics(2, 1, others if metric == "key" else rows, channels=channels, rank=rank)
    G = dense(a, U)
    difference = q.unsqueeze(-2) - k.unsqueeze(-3)
    by_query = torch.einsum("...nmc,...ncd,...nmd->...nm", difference, G, difference) if metric != "key" else 0.0
    by_key = torch.einsum("...nmc,...mcd,...nmd->...nm", difference, G, difference) if metric != "query" else 0.0
    expected = (by_query + by_key) / (2.0 if metric == "mean" else 1.0)
    assert isinstance(expected, Tensor)
    distance = pairwise_squared_distance(q, k, a, U, metric)
    torch.testing.assert_close(distance, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("metric", ["query", "key", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unit_diagonal_and_no_low_rank_part_is_euclidean(metric: Metric, dtype: torch.dtype) -> None:
    q, k = torch.randn(1, 2, 7, 5, dtype=dtype), torch.randn(1, 2, 7, 5, dtype=dtype)
    a, U = torch.ones_like(q), torch.zeros(1, 2, 7, 5, 3, dtype=dtype)
    expected = (q.double().unsqueeze(-2) - k.double().unsqueeze(-3)).square().sum(-1)
    rounding = EUCLIDEAN_ROUNDINGS * torch.finfo(dtype).eps * float(expected.max())
    torch.testing.assert_close(pairwise_squared_distance(q, k, a, U, metric).double(), expected, rtol=0, atol=rounding)
    x = torch.randn(1, 2, 7, 5, dtype=dtype)
    assert torch.equal(solve(a, U, x), x)
    assert (logdet(a, U) == 0).all()
    assert torch.equal(quadratic_form(a, U, x), x.square().sum(-1))


@pytest.mark.parametrize("function", [solve, inverse_quadratic_form, logdet], ids=lambda function: function.__name__)
def test_torchs_faster_products_change_nothing(function: Callable[..., Tensor]) -> None:
    """On processors with products in bfloat16 they may reach the derivative of the Cholesky root."""
    leaves = [tensor.float().requires_grad_() for tensor in metrics(2, 3, channels=33, rank=7)]
    if function is not logdet:
        leaves.append(torch.randn(2, 3, 33, generator=torch.Generator().manual_seed(5)).requires_grad_())
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = function(*wide)
    exact = torch.autograd.grad(expected.square().sum(), wide)
    try:
        torch.set_float32_matmul_precision("medium")
        found = function(*leaves)
        grads = torch.autograd.grad(found.square().sum(), leaves)
    finally:
        torch.set_float32_matmul_precision("highest")
    for value, reference in zip((found, *grads), (expected, *exact), strict=True):
        assert value.dtype == torch.float32
        assert (value - reference).norm() <= METRIC_AS_FLOAT64 * reference.norm()


def test_gradcheck_of_every_function() -> None:
    a, U = metrics(1, 1, 3, channels=4, rank=2)
    x = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (a, U, x)]
    assert torch.autograd.gradcheck(solve, leaves)
    assert torch.autograd.gradcheck(logdet, leaves[:2])
    assert torch.autograd.gradcheck(quadratic_form, leaves)
    k = torch.randn(1, 1, 3, 4, dtype=torch.float64, requires_grad=True)
    for metric in ("query", "key", "mean"):
        assert torch.autograd.gradcheck(
            lambda q, k, a, U, metric=metric: pairwise_squared_distance(q, k, a, U, metric), (x, k, a, U)
        )


def test_empty_token_sets() -> None:
    a, U = metrics(1, 2, 0, channels=4, rank=2)
    q, k = torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 3, 4)
    assert pairwise_squared_distance(q, k, a, U).shape == (1, 2, 0, 3)
    assert pairwise_squared_distance(k, q, a, U, "key").shape == (1, 2, 3, 0)
    assert solve(a, U, q).shape == (1, 2, 0, 4)
    assert logdet(a, U).shape == (1, 2, 0)


def test_autocast_keeps_float32() -> None:
    a, U = (tensor.float() for tensor in metrics(1, 2, 5, channels=7, rank=3))
    q, k = torch.randn(1, 2, 5, 7), torch.randn(1, 2, 5, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = (pairwise_squared_distance(q, k, a, U, "mean"), solve(a, U, q), logdet(a, U), quadratic_form(a, U, q))
    outside = (pairwise_squared_distance(q, k, a, U, "mean"), solve(a, U, q), logdet(a, U), quadratic_form(a, U, q))
    assert all(torch.equal(first, second) for first, second in zip(inside, outside, strict=True))


def test_a_metric_that_does_not_belong_to_its_tokens_is_named() -> None:
    q, k = torch.zeros(1, 1, 5, 4), torch.zeros(1, 1, 3, 4)
    a, U = torch.ones(1, 1, 5, 4), torch.zeros(1, 1, 5, 4, 2)
    for metric in ("key", "mean"):
        with pytest.raises(ValueError, match=f"metric='{metric}' needs"):
            pairwise_squared_distance(q, k, a, U, metric)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not 'value'"):
        pairwise_squared_distance(q, k, a, U, "value")  # type: ignore[arg-type]


def dense_root(a: Tensor, U: Tensor) -> Tensor:
    """S with G = S S^T from the eigenvalues of the D x D matrix."""
    scale = a.sqrt().unsqueeze(-1)
    V = U / scale
    values, vectors = torch.linalg.eigh(torch.eye(a.shape[-1], dtype=a.dtype) + V @ V.mT)
    return scale * ((vectors * values.sqrt().unsqueeze(-2)) @ vectors.mT)


ROOTS = [(False, False), (False, True), (True, False), (True, True)]


@pytest.mark.parametrize(("inverse", "transpose"), ROOTS)
@pytest.mark.parametrize(("channels", "rank"), [(1, 1), (7, 3), (5, 5), (3, 7), (33, 2), (4, 0)])
def test_the_square_root_equals_the_dense_one(channels: int, rank: int, inverse: bool, transpose: bool) -> None:
    a, U = metrics(2, 1, 5, channels=channels, rank=rank)
    x = torch.randn(2, 1, 5, channels, dtype=torch.float64)
    S = dense_root(a, U)
    S = S.inverse() if inverse else S
    expected = ((S.mT if transpose else S) @ x.unsqueeze(-1)).squeeze(-1)
    found = square_root(a, U, x, inverse=inverse, transpose=transpose)
    torch.testing.assert_close(found, expected, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)


def test_the_root_times_its_transpose_is_the_metric_and_its_inverse_undoes_it() -> None:
    a, U = metrics(3, 11, channels=13, rank=4)
    x = torch.randn(3, 11, 13, dtype=torch.float64)
    twice = square_root(a, U, square_root(a, U, x, transpose=True))
    torch.testing.assert_close((x * twice).sum(-1), quadratic_form(a, U, x), rtol=FLOAT64_RELATIVE, atol=0)
    undone = square_root(a, U, square_root(a, U, x), inverse=True)
    torch.testing.assert_close(undone, x, rtol=0, atol=FLOAT64_RELATIVE)
    inner = square_root(a, U, square_root(a, U, x, inverse=True), inverse=True, transpose=True)
    torch.testing.assert_close(inner, solve(a, U, x), rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)
    torch.testing.assert_close(
        inverse_quadratic_form(a, U, x), (x * solve(a, U, x)).sum(-1), rtol=FLOAT64_RELATIVE, atol=0
    )


def planted(kind: str) -> tuple[Tensor, Tensor]:
    """Metrics where an eigendecomposition has no derivative or a float32 Gram matrix no value."""
    a, U = metrics(1, 2, channels=5, rank=3)
    if kind == "zero":
        U = torch.zeros_like(U)
    elif kind == "repeated":
        U = 0.7 * a.sqrt().unsqueeze(-1) * torch.linalg.qr(torch.randn(1, 2, 5, 3, dtype=torch.float64)).Q
    elif kind == "dependent":
        U[..., 2] = U[..., 0]
    return a, U


@pytest.mark.parametrize(("inverse", "transpose"), ROOTS)
@pytest.mark.parametrize("kind", ["generic", "zero", "repeated", "dependent"])
def test_gradcheck_of_the_square_root_where_eigenvalues_meet(kind: str, inverse: bool, transpose: bool) -> None:
    a, U = planted(kind)
    x = torch.randn(1, 2, 5, dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (a, U, x)]
    assert torch.autograd.gradcheck(lambda a, U, x: square_root(a, U, x, inverse=inverse, transpose=transpose), leaves)
    assert torch.autograd.gradcheck(inverse_quadratic_form, leaves)


@pytest.mark.parametrize("smallest", [1e-8, 1e-37])
def test_a_tiny_diagonal_leaves_root_and_gradients_finite_in_float32(smallest: float) -> None:
    a, U = (tensor.float() for tensor in metrics(1, 2, channels=5, rank=3))
    a[..., 1:3] = smallest
    x = torch.randn(1, 2, 5)
    S = dense_root(a.double(), U.double())
    leaves = [tensor.requires_grad_() for tensor in (U, x)]
    found = square_root(a, U, x)
    expected = (S @ x.detach().double().unsqueeze(-1)).squeeze(-1)
    assert found.isfinite().all()
    if smallest > 1e-9:
        rounding = ROOT_ROUNDINGS * torch.finfo(torch.float32).eps * float(S.abs().max())
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=rounding)
    for grad in torch.autograd.grad(found.sum() + logdet(a, U).sum(), leaves):
        assert grad.isfinite().all()


def test_a_metric_that_is_not_finite_gives_nan_for_its_token_alone() -> None:
    a, U = metrics(1, 3, channels=4, rank=2)
    U[0, 1, 0, 0] = torch.inf
    found = square_root(a, U, torch.ones(1, 3, 4, dtype=torch.float64))
    assert found[0, 1].isnan().all()
    assert found[0, [0, 2]].isfinite().all()


def test_the_square_root_in_float32_under_autocast_and_of_no_tokens() -> None:
    a, U = (tensor.float() for tensor in metrics(1, 2, 5, channels=7, rank=3))
    x = torch.randn(1, 2, 5, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = (square_root(a, U, x), inverse_quadratic_form(a, U, x))
    outside = (square_root(a, U, x), inverse_quadratic_form(a, U, x))
    assert all(torch.equal(first, second) for first, second in zip(inside, outside, strict=True))
    assert square_root(a.bfloat16(), U.bfloat16(), x.bfloat16()).dtype == torch.bfloat16
    assert square_root(a[:, :, :0], U[:, :, :0], x[:, :, :0]).shape == (1, 2, 0, 7)


def test_the_square_root_compiles_into_one_graph_with_its_gradient() -> None:
    a, U = metrics(2, 3, channels=5, rank=2)
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (a, U, x)]
    for inverse, transpose in ROOTS:
        compiled = torch.compile(
            lambda a, U, x, inverse=inverse, transpose=transpose: square_root(
                a, U, x, inverse=inverse, transpose=transpose
            ),
            fullgraph=True,
            backend="aot_eager",
        )
        found = torch.autograd.grad(compiled(*leaves).sum(), leaves)
        expected = torch.autograd.grad(square_root(*leaves, inverse=inverse, transpose=transpose).sum(), leaves)
        for got, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)
