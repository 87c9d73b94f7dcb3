"""Isometry scores, spectra, nulls and graph statistics against cases whose answer is known."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attngeo.connection_walk import nulls, stationarity, transport, walk
from attngeo.language_models.architectures import HeadWeights
from tests.tolerances import (
    FLOAT32_GRAPHS,
    GAUSSIAN_HEAD_SCORE,
    GRAM_ISOMETRY_SCORE,
    GRAM_SINGULAR_VALUES,
    KNOWN_CHAIN_FLOAT64,
    LAZY_CHAIN_RELATIVE,
    QR_SINGULAR_VALUES,
    ROTATED_SPECTRUM,
    SAMPLED_MEAN_ERRORS,
    STATIONARY_LAW,
)

SHAPES = [(4, 4, 12, 3), (6, 2, 19, 3), (5, 5, 7, 3), (1, 1, 8, 3), (4, 2, 5, 4)]
"""Heads, value groups, model width, head width: groups of one and of several heads, edges of full rank and below."""


def _weights(heads: int, groups: int, width: int, head_dim: int) -> HeadWeights:
    empty = HeadWeights(
        value=torch.empty(groups, width, head_dim),
        output=torch.empty(heads, head_dim, width),
        value_bias=torch.zeros(groups, head_dim, dtype=torch.float64),
        output_bias=torch.zeros(width, dtype=torch.float64),
        group=torch.arange(heads) // (heads // groups),
    )
    return nulls.gaussian_like(empty, torch.Generator().manual_seed(0))


def _of(value: Tensor, output: Tensor) -> HeadWeights:
    """Heads from W_V and W_O, each with a value group of its own."""
    heads, width = len(value), value.shape[1]
    return HeadWeights(
        value=value,
        output=output,
        value_bias=torch.zeros(heads, value.shape[2], dtype=torch.float64),
        output_bias=torch.zeros(width, dtype=torch.float64),
        group=torch.arange(heads),
    )


def _rotation(size: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=draw)).Q


def test_scaled_isometries_score_one_and_a_single_direction_one_over_the_rank() -> None:
    assert transport.isometry_score(torch.full((7,), 0.3), 7).item() == pytest.approx(1)
    assert transport.isometry_score(torch.tensor([2.0, 0, 0, 0, 0]), 5).item() == pytest.approx(1 / 5)
    assert transport.isometry_score(torch.tensor([1.0, 1, 1, 0, 0]), 3).item() == pytest.approx(1)
    assert math.isnan(transport.isometry_score(torch.zeros(4), 4).item())
    with pytest.raises(ValueError, match="rank 5"):
        transport.isometry_score(torch.ones(4), 5)


def test_the_score_measures_the_distance_to_the_nearest_scaled_isometry() -> None:
    matrix = torch.randn(13, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    left, singular_values, right = torch.linalg.svd(matrix)
    nearest = singular_values.mean() * left @ right
    residual = ((matrix - nearest).norm() / matrix.norm()).item()
    score = transport.isometry_score(singular_values, 13).item()
    assert residual == pytest.approx(math.sqrt(1 - score), rel=1e-10)


@pytest.mark.parametrize(("width", "head_dim"), [(17, 5), (5, 5), (3, 7), (11, 1)])
def test_head_spectra_from_thin_factors_equal_the_full_decomposition(width: int, head_dim: int) -> None:
    draw = torch.Generator().manual_seed(0)
    value = torch.randn(2, width, head_dim, dtype=torch.float64, generator=draw)
    output = torch.randn(2, head_dim, width, dtype=torch.float64, generator=draw)
    rank = min(width, head_dim)
    full = torch.linalg.svdvals(value @ output)
    thin = transport.head_singular_values(_of(value, output))
    torch.testing.assert_close(thin[:, :rank], full[:, :rank], rtol=0, atol=QR_SINGULAR_VALUES * full.max().item())


@settings(deadline=None)  # a busy machine is no fault
@given(
    st.integers(1, 9),
    st.floats(1e-3, 1e3),
    st.lists(st.floats(1e-3, 1e3), min_size=9, max_size=9),
)
def test_score_variation_and_residual_of_any_spectrum_say_the_same_and_know_no_scale(
    rank: int, scale: float, drawn: list[float]
) -> None:
    values = torch.tensor(drawn[:rank] + [0.0] * (9 - rank), dtype=torch.float64)
    score = transport.isometry_score(values, rank).item()
    variation = transport.singular_value_variation(values, rank).item()
    residual = transport.polar_residual(values, rank).item()
    assert 0 <= residual < 1
    assert 1 / (1 + variation**2) == pytest.approx(score, rel=1e-12)
    assert 1 - residual**2 == pytest.approx(score, rel=1e-12)
    for measure in (transport.isometry_score, transport.singular_value_variation, transport.polar_residual):
        assert measure(scale * values, rank).item() == pytest.approx(measure(values, rank).item(), abs=ROTATED_SPECTRUM)


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_a_scaled_isometry_has_no_variation_and_no_polar_residual(rank: int) -> None:
    isometry = 0.3 * _rotation(13, 0)[:, :rank] @ _rotation(11, 1)[:rank]
    values = torch.linalg.svdvals(isometry)
    assert transport.isometry_score(values, rank).item() == pytest.approx(1)
    assert transport.singular_value_variation(values, rank).item() <= ROTATED_SPECTRUM
    assert transport.polar_residual(values, rank).item() <= ROTATED_SPECTRUM
    with pytest.raises(ValueError, match="rank 12"):
        transport.polar_residual(values, 12)


def test_the_polar_residual_is_the_distance_to_the_scaled_polar_factor() -> None:
    matrix = torch.randn(13, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    polar = left @ right
    scale = (matrix * polar).sum() / polar.square().sum()
    distance = ((matrix - scale * polar).norm() / matrix.norm()).item()
    assert transport.polar_residual(values, 7).item() == pytest.approx(distance, rel=1e-12)


def test_rotated_states_see_the_same_spectra_and_gains() -> None:
    weights = _weights(heads=6, groups=2, width=19, head_dim=3)
    before, after = _rotation(19, 1), _rotation(19, 2)
    rotated = HeadWeights(**(vars(weights) | {"value": before.T @ weights.value, "output": weights.output @ after}))
    for spectrum in (transport.head_singular_values, lambda w: transport.edge_singular_values(w, torch.ones(1, 6))):
        torch.testing.assert_close(spectrum(rotated), spectrum(weights), rtol=0, atol=1e-10)
    states = torch.randn(5, 19, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    gains = [transport.HeadProducts.of(w).head_gains(w, x) for w, x in ((weights, states), (rotated, states @ before))]
    torch.testing.assert_close(gains[0], gains[1], rtol=1e-10, atol=0)


@pytest.mark.parametrize(("heads", "groups", "width", "head_dim"), SHAPES)
def test_edge_spectra_from_gram_matrices_equal_the_full_decomposition(
    heads: int, groups: int, width: int, head_dim: int
) -> None:
    weights = _weights(heads, groups, width, head_dim)
    gates = torch.rand(3, heads, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).softmax(-1)
    gates[0] = torch.eye(heads, dtype=torch.float64)[0]  # one head only: the transport has its rank
    rank = transport.edge_rank(weights)
    full = torch.linalg.svdvals(transport.edge_transports(weights, gates))
    assert full[:, rank:].abs().max().item() < 1e-10 if rank < width else True
    fast = transport.edge_singular_values(weights, gates).flip(-1)
    assert fast.shape == (3, rank)
    torch.testing.assert_close(fast, full[:, :rank], rtol=0, atol=GRAM_SINGULAR_VALUES * full.max().item())
    score = transport.isometry_score(full[:, :rank], rank)
    torch.testing.assert_close(transport.isometry_score(fast, rank), score, rtol=0, atol=GRAM_ISOMETRY_SCORE)


@pytest.mark.parametrize(("heads", "groups", "width", "head_dim"), SHAPES)
def test_products_of_factors_equal_those_of_dense_transports(
    heads: int, groups: int, width: int, head_dim: int
) -> None:
    weights = _weights(heads, groups, width, head_dim)
    products = transport.HeadProducts.of(weights)
    dense = transport.head_transports(weights)
    torch.testing.assert_close(products.inner, torch.einsum("hcd,gcd->hg", dense, dense))
    torch.testing.assert_close(products.traces, torch.einsum("hcd,gdc->hg", dense, dense))
    draw = torch.Generator().manual_seed(1)
    states = torch.randn(7, width, dtype=torch.float64, generator=draw)
    gains = torch.einsum("nc,hcd->hnd", states, dense).norm(dim=2) / states.norm(dim=1)
    torch.testing.assert_close(products.head_gains(weights, states), gains)
    torch.testing.assert_close(products.isotropic_head_gains(), dense.norm(dim=(1, 2)) / math.sqrt(width))
    there, back = torch.rand(2, 5, heads, dtype=torch.float64, generator=draw)
    out, home = transport.edge_transports(weights, there), transport.edge_transports(weights, back)
    torch.testing.assert_close(products.isotropic_edge_gains(there), out.norm(dim=(1, 2)) / math.sqrt(width))
    scale = (out.square().sum((1, 2)) + home.square().sum((1, 2))).sqrt()
    expected = (home - out.transpose(1, 2)).norm(dim=(1, 2)) / scale
    torch.testing.assert_close(products.edge_reciprocity_defects(there.T, back.T), expected)
    own = (dense - dense.transpose(1, 2)).norm(dim=(1, 2)) / (math.sqrt(2) * dense.norm(dim=(1, 2)))
    torch.testing.assert_close(transport.head_reciprocity_defect(weights), own)


def test_a_way_back_by_the_transposed_transport_has_no_defect_and_an_antisymmetric_one_the_largest() -> None:
    draw = torch.Generator().manual_seed(0)
    value, output = torch.randn(2, 9, 3, dtype=torch.float64, generator=draw), torch.randn(2, 3, 9, generator=draw)
    there_and_back = _of(value, torch.stack([output[0].double(), value[0].T]))
    there_and_back.value[1] = output[0].T
    dense = transport.head_transports(there_and_back)
    torch.testing.assert_close(dense[1], dense[0].T)
    gates = torch.tensor([[0.8], [0.2]], dtype=torch.float64)
    products = transport.HeadProducts.of(there_and_back)
    assert products.edge_reciprocity_defects(gates, gates.flip(0)).item() <= ROTATED_SPECTRUM
    assert products.edge_reciprocity_defects(gates, gates).item() > 0.5
    symmetric = _of(value, value.transpose(1, 2).contiguous())
    assert transport.head_reciprocity_defect(symmetric).max().item() <= ROTATED_SPECTRUM
    turn = torch.tensor([[0.0, 1, 0], [-1, 0, 0], [0, 0, 0]], dtype=torch.float64)
    antisymmetric = transport.head_reciprocity_defect(_of(value, turn @ value.transpose(1, 2)))
    assert antisymmetric.tolist() == pytest.approx([math.sqrt(2)] * 2)


def test_gaussian_transports_are_unrelated_to_their_ways_back_as_derived() -> None:
    weights = nulls.gaussian_heads(12, 5, 400, torch.Generator().manual_seed(0))
    squares = transport.head_reciprocity_defect(weights).square()
    error = squares.std().item() / math.sqrt(len(squares))
    derived = nulls.gaussian_reciprocity_defect(12) ** 2
    assert squares.mean().item() == pytest.approx(derived, abs=SAMPLED_MEAN_ERRORS * error)


def test_a_token_of_a_thousand_times_the_norm_weighs_as_any_other_in_the_gains() -> None:
    weights = _weights(heads=3, groups=3, width=11, head_dim=2)
    products = transport.HeadProducts.of(weights)
    states = torch.randn(7, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    planted = states.clone()
    planted[2] *= 1000
    torch.testing.assert_close(products.head_gains(weights, planted), products.head_gains(weights, states))


def test_transport_along_an_edge_is_the_state_times_its_transport() -> None:
    weights = _weights(heads=6, groups=2, width=7, head_dim=3)
    draw = torch.Generator().manual_seed(1)
    gates = torch.rand(4, 6, dtype=torch.float64, generator=draw)
    states = torch.randn(4, 7, dtype=torch.float64, generator=draw)
    expected = torch.einsum("ec,ecd->ed", states, transport.edge_transports(weights, gates))
    torch.testing.assert_close(transport.transport_along(weights, gates, states), expected)


def _scores(weights: HeadWeights) -> Tensor:
    return transport.isometry_score(transport.head_singular_values(weights), weights.head_dim)


@pytest.mark.parametrize(("width", "head_dim", "derived"), [(512, 64, 0.938), (768, 64, 0.9575), (1024, 64, 0.968)])
def test_gaussian_heads_score_what_was_derived_for_their_shape(width: int, head_dim: int, derived: float) -> None:
    scores = _scores(nulls.gaussian_heads(width, head_dim, 8, torch.Generator().manual_seed(0)))
    assert scores.mean().item() == pytest.approx(derived, abs=GAUSSIAN_HEAD_SCORE)
    estimate = nulls.gaussian_head_score_estimate(width, head_dim)
    assert scores.mean().item() == pytest.approx(estimate, abs=GAUSSIAN_HEAD_SCORE)


def test_the_same_gain_null_is_the_null_with_its_matrices_scaled_and_matches_gaussian_weights_under_that_gain() -> None:
    draw = torch.Generator().manual_seed(5)
    gain, scale = torch.rand(2, 40, dtype=torch.float64, generator=draw).pow(3)
    plain, ones, folded = (
        _scores(
            nulls.gaussian_heads(40, 8, 64, torch.Generator().manual_seed(7), gain=of_value, output_scale=of_output)
        )
        for of_value, of_output in ((None, None), (torch.ones(40), torch.ones(40)), (gain, scale))
    )
    assert torch.equal(plain, ones)
    value = gain[:, None] * torch.randn(64, 40, 8, dtype=torch.float64, generator=draw)
    output = torch.randn(64, 8, 40, dtype=torch.float64, generator=draw) * scale
    scores = _scores(_of(value, output))
    error = math.hypot(scores.std().item(), folded.std().item()) / 8
    assert plain.mean() - folded.mean() > 5 * error, "the gain alone lowers the score"
    assert scores.mean().item() == pytest.approx(folded.mean().item(), abs=3 * error), "Gaussian weights have no excess"


@pytest.mark.parametrize(("heads", "groups", "width", "head_dim"), SHAPES)
@pytest.mark.parametrize("scaled", [(), ("gain",), ("output_scale",), ("gain", "output_scale")])
def test_null_edges_have_the_law_of_dense_gaussian_weights_under_the_same_gates(
    heads: int, groups: int, width: int, head_dim: int, scaled: tuple[str, ...]
) -> None:
    weights = _weights(heads, groups, width, head_dim)
    rank, count = transport.edge_rank(weights), 200
    draw = torch.Generator().manual_seed(3)
    scales = {name: torch.rand(width, dtype=torch.float64, generator=draw).pow(2) for name in scaled}
    gates = torch.rand(heads, dtype=torch.float64, generator=draw).softmax(0).expand(count, heads)
    states = torch.randn(width, dtype=torch.float64, generator=draw).expand(count, width)
    spectra, gains = nulls.gaussian_edges(weights, gates, states, np.random.default_rng(0), **scales)
    dense = []
    for _ in range(count):
        drawn = nulls.gaussian_like(weights, draw, **scales)
        spectrum = transport.edge_singular_values(drawn, gates[:1])[0]
        gain = transport.transport_along(drawn, gates[:1], states[:1]).norm() / states[0].norm()
        dense.append(torch.stack([transport.isometry_score(spectrum, rank), spectrum.norm(), gain]))
    found = torch.stack([transport.isometry_score(spectra, rank), spectra.norm(dim=1), gains], 1)
    expected = torch.stack(dense)
    errors = (found.var(0) + expected.var(0)).div(count).sqrt()
    assert bool(((found.mean(0) - expected.mean(0)).abs() <= SAMPLED_MEAN_ERRORS * errors + 1e-12).all())
    assert bool((found.std(0) <= 1.5 * expected.std(0) + 1e-9).all())
    assert bool((expected.std(0) <= 1.5 * found.std(0) + 1e-9).all())


def test_null_edges_keep_gates_and_sharing_and_repeat_with_their_generator() -> None:
    weights = _weights(heads=4, groups=2, width=15, head_dim=3)
    gates = torch.eye(4, dtype=torch.float64)[[0, 2]]
    states = torch.randn(2, 15, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    rank = transport.edge_rank(weights)
    first = nulls.gaussian_edges(weights, gates, states, np.random.default_rng(7))
    again = nulls.gaussian_edges(weights, gates, states, np.random.default_rng(7))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    # One head of rank 3 under a rank of 6 cannot score above a half, trained or not: the gates do that.
    assert rank == 6
    assert bool((transport.isometry_score(first[0], rank) <= 0.5).all())


def test_shuffled_depth_visits_every_layer_once() -> None:
    graphs = torch.rand(5, 7, 7, generator=torch.Generator().manual_seed(0))
    changes = nulls.pairwise_changes(nulls.graph_products(list(graphs)))
    for before in range(5):
        for after in range(5):
            direct = stationarity.relative_change(graphs[before].double(), graphs[after].double())
            assert changes[before, after].item() == pytest.approx(direct, abs=FLOAT32_GRAPHS)
    steps = torch.arange(25.0, dtype=torch.float64).reshape(5, 5)
    shuffled = nulls.shuffled_changes(steps, torch.Generator().manual_seed(1))
    before, after = (shuffled // 5).long().tolist(), (shuffled % 5).long().tolist()
    assert before[1:] == after[:-1]
    assert sorted([before[0], *after]) == list(range(5))


def _cycle(tokens: int) -> Tensor:
    return torch.eye(tokens, dtype=torch.float64).roll(1, dims=1)


def test_known_chains_have_their_known_laws_and_defects() -> None:
    birth_death = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.5, 0.25], [0.0, 0.5, 0.5]], dtype=torch.float64)
    law = stationarity.stationary_law(birth_death)
    torch.testing.assert_close(law, torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64))
    assert stationarity.detailed_balance_defect(birth_death, law) <= KNOWN_CHAIN_FLOAT64
    cycle = _cycle(5)
    assert stationarity.detailed_balance_defect(cycle, stationarity.stationary_law(cycle)) == pytest.approx(1)
    assert stationarity.reversibility_defect(cycle, causal=False) == pytest.approx(1)


def _reversible(tokens: int) -> Tensor:
    weights = torch.rand(tokens, tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return (weights + weights.T) / (weights + weights.T).sum(1, keepdim=True)


@pytest.mark.parametrize("tokens", [2, 3, 13])
def test_a_reversible_chain_has_no_defect_with_or_without_its_first_token(tokens: int) -> None:
    graph = _reversible(tokens)
    assert stationarity.reversibility_defect(graph, causal=False) <= KNOWN_CHAIN_FLOAT64
    without = stationarity.reversibility_defect(graph, causal=False, sink_tokens=1)
    assert math.isnan(without) if tokens == 2 else without <= KNOWN_CHAIN_FLOAT64


@pytest.mark.parametrize("loop", [0.5, 0.9, 0.999])
def test_strong_self_loops_do_not_change_the_defect(loop: float) -> None:
    """Staying longer at every token, (1 - s) P + s I, changes neither the law nor the order of what passes between."""
    graph = torch.rand(7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    graph = graph / graph.sum(1, keepdim=True)
    plain = stationarity.reversibility_defect(graph, causal=False)
    assert plain > 0.1
    lazy = (1 - loop) * graph + loop * torch.eye(7, dtype=torch.float64)
    assert stationarity.reversibility_defect(lazy, causal=False) == pytest.approx(plain, rel=LAZY_CHAIN_RELATIVE)
    sink = graph.clone()  # one token alone holds on to the walk: its law grows, the others' flows all shrink alike
    sink[0] *= 1 - loop
    sink[0, 0] += loop
    assert stationarity.reversibility_defect(sink, causal=False) == pytest.approx(plain, rel=LAZY_CHAIN_RELATIVE)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_triangular_walk_is_one_way_whatever_its_weights(causal: bool, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    graph = torch.rand(9, 9, dtype=torch.float64, generator=draw).tril()
    graph = graph + 10 * torch.rand(9, dtype=torch.float64, generator=draw).diag()
    if causal:
        assert stationarity.reversibility_defect(graph, True, 2) == pytest.approx(1, abs=KNOWN_CHAIN_FLOAT64)
    law = torch.rand(9, dtype=torch.float64, generator=draw)
    assert stationarity.detailed_balance_defect(graph, law) == pytest.approx(1, abs=KNOWN_CHAIN_FLOAT64)


def test_a_causal_walk_ends_on_the_first_token_so_its_defect_is_taken_otherwise() -> None:
    draw = torch.Generator().manual_seed(0)
    graph = torch.rand(9, 9, dtype=torch.float64, generator=draw).tril()
    graph = graph / graph.sum(1, keepdim=True)
    law = stationarity.stationary_law(graph)
    assert law[0].item() == pytest.approx(1)
    point = torch.eye(9, dtype=torch.float64)[0]
    assert math.isnan(stationarity.detailed_balance_defect(graph, point)), "nothing flows between different tokens"
    assert math.isnan(stationarity.reversibility_defect(graph, causal=True, sink_tokens=8))
    assert "one-way by construction" in stationarity.reversibility_convention(True, 2)
    assert "without the first 2 tokens" in stationarity.reversibility_convention(True, 2)
    assert "without the first token" in stationarity.reversibility_convention(False, 1)
    assert "all tokens" in stationarity.reversibility_convention(False)


def test_a_walk_with_two_closed_classes_has_no_law_and_says_so() -> None:
    graph = torch.block_diag(_cycle(2), _cycle(3))
    assert bool(stationarity.stationary_law(graph).isnan().all())
    assert math.isnan(stationarity.reversibility_defect(graph, causal=False, sink_tokens=0))


def test_spectral_gap_of_a_complete_graph_is_one_and_of_two_islands_zero() -> None:
    complete = torch.full((6, 6), 1 / 6, dtype=torch.float64)
    eigenvalues, _ = stationarity.symmetrised_spectrum(complete)
    assert stationarity.spectral_gap(eigenvalues) == pytest.approx(1)
    islands, _ = stationarity.symmetrised_spectrum(torch.block_diag(complete, complete))
    assert stationarity.spectral_gap(islands) == pytest.approx(0, abs=KNOWN_CHAIN_FLOAT64)
    alone, _ = stationarity.symmetrised_spectrum(torch.ones(1, 1, dtype=torch.float64))
    assert math.isnan(stationarity.spectral_gap(alone))


@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_the_leading_part_of_a_spectrum_is_that_of_the_whole(tokens: int) -> None:
    graph = _random_walk(tokens, 0)
    values, vectors = stationarity.symmetrised_spectrum(graph)
    leading, spanned = stationarity.symmetrised_spectrum(graph, 4)
    assert len(leading) == min(tokens, 4)
    torch.testing.assert_close(leading, values[-4:], rtol=0, atol=KNOWN_CHAIN_FLOAT64)
    assert stationarity.subspace_angle(vectors[:, -4:], spanned) == pytest.approx(0, abs=1e-6)


def test_a_graph_with_a_token_of_no_weight_has_no_spectrum_and_no_angle() -> None:
    graph = torch.zeros(3, 3, dtype=torch.float64)
    values, vectors = stationarity.symmetrised_spectrum(graph, 2)
    assert bool(values.isnan().all())
    assert math.isnan(stationarity.spectral_gap(values))
    assert math.isnan(stationarity.subspace_angle(vectors, vectors))


def _random_walk(tokens: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    graph = torch.randn(tokens, tokens, dtype=torch.float64, generator=draw).mul(3).softmax(1)
    return graph


@settings(deadline=None)  # a busy machine is no fault
@given(st.integers(2, 23), st.integers(0, 99))
def test_a_walk_leaves_its_stationary_law_as_it_is(tokens: int, seed: int) -> None:
    graph = _random_walk(tokens, seed)
    law = stationarity.reference_law(graph, causal=False)
    assert law.sum().item() == pytest.approx(1)
    torch.testing.assert_close(law @ graph, law, rtol=0, atol=STATIONARY_LAW)
    assert 0 <= stationarity.entropy(law) <= math.log(tokens) + KNOWN_CHAIN_FLOAT64


@pytest.mark.parametrize("causal", [False, True])
def test_uniform_attention_has_the_largest_entropies_and_no_sink(causal: bool) -> None:
    attention = walk.uniform_attention(5, 7, causal)
    torch.testing.assert_close(attention.sum(2), torch.ones(5, 7, dtype=torch.float64))
    assert walk.gate_entropy(attention) == pytest.approx((math.log(5), math.log(5)))
    graph = walk.effective_graph(attention)
    assert bool((graph.triu(1) == 0).all()) == causal
    law = stationarity.reference_law(graph, causal)
    if not causal:
        assert stationarity.entropy(law) == pytest.approx(math.log(7))
        assert stationarity.reversibility_defect(graph, causal) <= KNOWN_CHAIN_FLOAT64
        assert stationarity.first_token_share(graph) == pytest.approx(1 / 7)
    assert stationarity.entropy(torch.eye(7)[0]) == 0


def test_gates_that_leave_each_edge_to_one_head_have_no_entropy() -> None:
    graph = _random_walk(7, 0)
    choice = torch.randint(3, (7, 7), generator=torch.Generator().manual_seed(1))
    attention = torch.stack([torch.where(choice == head, graph, 0.0) for head in range(3)])
    assert walk.gate_entropy(attention) == pytest.approx((0, 0), abs=KNOWN_CHAIN_FLOAT64)
    assert all(map(math.isnan, walk.gate_entropy(torch.zeros(3, 2, 2))))
    attention[:, :, 0] = 0.2  # equal gates, on edges to the first token alone
    whole, without_first = walk.gate_entropy(attention)
    assert (whole > 0.1, without_first) == (True, pytest.approx(0, abs=KNOWN_CHAIN_FLOAT64))


@settings(deadline=None)  # a busy machine is no fault
@given(st.floats(0, 0.999), st.integers(0, 9))
def test_what_is_left_without_the_first_token_does_not_know_how_much_attention_it_drew(share: float, seed: int) -> None:
    graph = _random_walk(9, seed)
    sunk = (1 - share) * graph
    sunk[:, 0] += share
    torch.testing.assert_close(
        stationarity.without_first_token(sunk), stationarity.without_first_token(graph), rtol=1e-9, atol=1e-12
    )


def test_a_token_that_saw_the_first_one_alone_stays_where_it_is() -> None:
    graph = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.5, 0.25, 0.25]], dtype=torch.float64)
    expected = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(stationarity.without_first_token(graph), expected)


def test_distances_between_graphs_run_from_equal_to_disjoint() -> None:
    first, second = torch.eye(5, dtype=torch.float64), _cycle(5)
    assert stationarity.row_jensen_shannon(first, first) == 0
    assert stationarity.row_jensen_shannon(first, second) == pytest.approx(1)
    assert stationarity.relative_change(first, first) == 0
    assert stationarity.relative_change(first, second) == pytest.approx(math.sqrt(2))
    basis = torch.eye(5, dtype=torch.float64)
    assert stationarity.subspace_angle(basis[:, :2], basis[:, :2]) == pytest.approx(0, abs=1e-7)
    assert stationarity.subspace_angle(basis[:, :2], basis[:, 2:4]) == pytest.approx(math.pi / 2)


def test_sink_share_and_stochasticity_defect_leave_nothing_out() -> None:
    graph = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.25, 0.25, 0.4]], dtype=torch.float64)
    assert stationarity.first_token_share(graph) == pytest.approx(0.375)
    assert stationarity.stochasticity_defect(graph) == pytest.approx(0.1)
    assert math.isnan(stationarity.first_token_share(torch.ones(1, 1)))
