"""Laws of attention by distance in blocks: its definition with all gradients, every mask, and linear memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from attngeo.evaluation.apart import apart
from attngeo.evaluation.timing import peak_memory_mib, return_pages
from attngeo.ops.riemannian_attention import naive, riemannian_attention, streamed
from attngeo.ops.riemannian_attention.naive import Metric
from tests.tolerances import (
    FLOAT64_RELATIVE,
    METRIC_ATTENTION_FLOAT32,
    METRIC_ATTENTION_PEAK_INPUTS,
    METRIC_ATTENTION_PEAK_RATIO,
)

METRICS: tuple[Metric, ...] = ("query", "key", "mean", "constant")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks, none of which divides the awkward sizes below; memory is measured in another process, as it is."""
    monkeypatch.setattr(streamed, "CPU_PAIRS", 60)
    monkeypatch.setattr(streamed, "CPU_COLUMNS", 4)
    monkeypatch.setattr(streamed, "LEAST_ROWS", 3)


def arguments(
    metric: Metric, queries: int, keys: int, *, rank: int = 2, width: int = 5, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """q, k, v, a, U and tau of 2 sequences with 3 heads."""
    source = torch.Generator().manual_seed(queries + 31 * keys)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    owner = {"key": (2, 3, keys, width), "constant": (1, 3, width)}.get(metric, (2, 3, queries, width))
    tensors = [draw(2, 3, queries, width), draw(2, 3, keys, width), draw(2, 3, keys, 7)]
    tensors += [0.2 + draw(*owner).square(), 0.5 * draw(*owner, rank), 0.5 + draw(3).square()]
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def assert_equal_with_gradients(given: list[Tensor], **options: Any) -> Tensor:
    found = riemannian_attention(*given, **options)
    expected = naive.riemannian_attention(*given, **options)
    torch.testing.assert_close(found, expected, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)
    direction = torch.randn(found.shape, generator=torch.Generator().manual_seed(3), dtype=found.dtype)
    wanted = torch.autograd.grad(expected, given, direction, allow_unused=True, materialize_grads=True)
    got = torch.autograd.grad(found, given, direction, allow_unused=True, materialize_grads=True)
    for name, first, second in zip(("q", "k", "v", "a", "U", "tau"), got, wanted, strict=True):
        torch.testing.assert_close(
            first, second, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE, msg=lambda text, name=name: f"{name}: {text}"
        )
    return found


MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": 1},
    {"window": 5},
    {"causal": True, "window": 6},
    {"window": 100},
]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("metric", METRICS)
def test_blocks_equal_the_definition_with_every_gradient(metric: Metric, options: dict[str, Any], padded: bool) -> None:
    key_mask = torch.rand(2, 17, generator=torch.Generator().manual_seed(1)) > 0.4 if padded else None
    assert_equal_with_gradients(arguments(metric, 17, 17), metric=metric, key_mask=key_mask, **options)


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(5, 23), (23, 5), (1, 1), (1, 13)])
@pytest.mark.parametrize("metric", ["query", "key", "constant"])
def test_rectangular_shapes_stand_at_the_end_of_the_keys(
    metric: Metric, queries: int, keys: int, options: dict[str, Any]
) -> None:
    assert_equal_with_gradients(arguments(metric, queries, keys), metric=metric, **options)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("rank", [0, 1, 6])
def test_any_rank(metric: Metric, rank: int) -> None:
    assert_equal_with_gradients(arguments(metric, 11, 11, rank=rank), metric=metric)


@pytest.mark.parametrize("metric", METRICS)
def test_rows_that_see_nothing_are_zeros_with_finite_gradients(metric: Metric) -> None:
    given = arguments(metric, 9, 9)
    key_mask = torch.ones(2, 9, dtype=torch.bool)
    key_mask[0] = False
    key_mask[1, :4] = False
    found = assert_equal_with_gradients(given, metric=metric, causal=True, key_mask=key_mask)
    assert (found[0] == 0).all()
    assert (found[1, :, :4] == 0).all()
    assert (found[1, :, 4:] != 0).all()


def test_no_queries_and_no_keys() -> None:
    assert riemannian_attention(*arguments("query", 0, 3)).shape == (2, 3, 0, 7)
    assert (riemannian_attention(*arguments("query", 3, 0)) == 0).all()


def test_what_stands_in_padding_is_never_seen() -> None:
    for metric in ("query", "key"):
        given = [tensor.detach() for tensor in arguments(metric, 6, 11)]
        key_mask = torch.arange(11).expand(2, -1) < 8
        expected = riemannian_attention(*given, metric=metric, key_mask=key_mask)
        spoiled = [tensor.clone() for tensor in given]
        for index in (1, 2) if metric == "query" else (1, 2, 3, 4):
            spoiled[index][:, :, 8:] = torch.nan
        assert torch.equal(riemannian_attention(*spoiled, metric=metric, key_mask=key_mask), expected)


def test_identity_metric_is_attention_by_euclidean_distance() -> None:
    q, k, v, *_ = arguments("query", 13, 13)
    tau = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    weights = torch.softmax(-(q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1) / (2 * tau[:, None, None]), -1)
    for metric in METRICS:
        shape = (1, 1, 5) if metric == "constant" else q.shape
        found = riemannian_attention(q, k, v, q.new_ones(shape), q.new_zeros(*shape, 2), tau, metric=metric)
        torch.testing.assert_close(found, weights @ v, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("distance", [0.0, 100.0])
def test_float32_keeps_its_digits_far_from_the_origin(metric: Metric, distance: float) -> None:
    given = arguments(metric, 33, 33, dtype=torch.float32)
    with torch.no_grad():
        given[0] += distance
        given[1] += distance
    expected = naive.riemannian_attention(*(tensor.double() for tensor in given), metric=metric)
    error = (riemannian_attention(*given, metric=metric) - expected).abs().max() / expected.abs().max()
    assert error < METRIC_ATTENTION_FLOAT32


def test_autocast_and_half_precision_are_computed_in_float32() -> None:
    given = [tensor.detach() for tensor in arguments("query", 7, 7, dtype=torch.float32)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = riemannian_attention(*given)
    assert torch.equal(inside, riemannian_attention(*given))
    assert riemannian_attention(*(tensor.bfloat16() for tensor in given)).dtype == torch.bfloat16


def test_second_derivatives_are_refused() -> None:
    given = arguments("query", 5, 5)
    (grad,) = torch.autograd.grad(riemannian_attention(*given).square().sum(), given[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("metric", METRICS)
def test_it_compiles_into_one_graph_with_its_gradient(metric: Metric) -> None:
    given = arguments(metric, 7, 7)
    compiled = torch.compile(riemannian_attention, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*given, metric=metric, causal=True).sum(), given)
    expected = torch.autograd.grad(riemannian_attention(*given, metric=metric, causal=True).sum(), given)
    for first, second in zip(found, expected, strict=True):
        torch.testing.assert_close(first, second, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)


def test_what_does_not_fit_is_named() -> None:
    q, k, v, a, U, tau = arguments("query", 5, 7)
    with pytest.raises(ValueError, match="as many queries as keys"):
        riemannian_attention(q, k, v, a, U, tau, metric="mean")
    with pytest.raises(ValueError, match="metric='key' needs a"):
        riemannian_attention(q, k, v, a, U, tau, metric="key")
    with pytest.raises(ValueError, match="tau must have one number a head"):
        riemannian_attention(q, k, v, a, U, tau[:1])
    with pytest.raises(ValueError, match="key_mask must be bool"):
        riemannian_attention(q, k, v, a, U, tau, key_mask=torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="do not fit together"):
        riemannian_attention(q, k, v[:, :, :5], a, U, tau)
    with pytest.raises(ValueError, match="window must not be negative"):
        riemannian_attention(q, k, v, a, U, tau, window=-1)


def measured_peak(tokens: int, metric: Metric, direct: bool, rank: int = 4) -> float:
    """Peak MiB of forward and backward for one head of width 8."""
    torch.set_num_threads(1)
    return_pages()
    q, k, v = (torch.randn(1, 1, tokens, 8, requires_grad=True) for _ in range(3))
    a = torch.ones(1, 1, tokens, 8, requires_grad=True)
    U = torch.zeros(1, 1, tokens, 8, rank, requires_grad=True)
    given = [q, k, v, a, U, torch.ones(1, requires_grad=True)]
    attention = naive.riemannian_attention if direct else riemannian_attention

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention(*given, metric=metric).sum(), given)

    return peak_memory_mib(call, torch.device("cpu"))


def test_peak_memory_is_linear_in_tokens_at_16384() -> None:
    """The mean metric, whose factors are those of the query's and of the key's together."""
    inputs_mib = 16384 * 8 * (4 + 2) * 4 / 2**20
    assert apart(measured_peak, 16384, "mean", False, rank=2) < METRIC_ATTENTION_PEAK_INPUTS * inputs_mib


def test_peak_memory_is_a_fraction_of_the_direct_form() -> None:
    assert apart(measured_peak, 1024, "query", True) > METRIC_ATTENTION_PEAK_RATIO * apart(
        measured_peak, 1024, "query", False
    )
