"""Isometry scores, spectra, nulls and graph statistics against cases whose answer is known."""

import math

import pytest
import torch
from torch import Tensor

from attngeo.connection_walk import nulls, stationarity, transport
from attngeo.language_models.architectures import HeadWeights
from tests.tolerances import (
    FLOAT32_GRAPHS,
    GAUSSIAN_HEAD_SCORE,
    GRAM_ISOMETRY_SCORE,
    GRAM_SINGULAR_VALUES,
    KNOWN_CHAIN_FLOAT64,
    LAZY_CHAIN_RELATIVE,
    QR_SINGULAR_VALUES,
)


def _weights(heads: int, groups: int, width: int, head_dim: int) -> HeadWeights:
    empty = HeadWeights(
        value=torch.empty(groups, width, head_dim),
        output=torch.empty(heads, head_dim, width),
        value_bias=torch.zeros(groups, head_dim, dtype=torch.float64),
        output_bias=torch.zeros(width, dtype=torch.float64),
        group=torch.arange(heads) // (heads // groups),
    )
    return nulls.gaussian_like(empty, torch.Generator().manual_seed(0))


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
    thin = transport.head_singular_values(value, output)
    torch.testing.assert_close(thin[:, :rank], full[:, :rank], rtol=0, atol=QR_SINGULAR_VALUES * full.max().item())


@pytest.mark.parametrize(
    ("heads", "groups", "width", "head_dim"), [(4, 4, 12, 3), (6, 2, 19, 3), (5, 5, 7, 3), (1, 1, 8, 3), (4, 2, 5, 4)]
)
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


def test_transport_along_an_edge_is_the_state_times_its_transport() -> None:
    weights = _weights(heads=6, groups=2, width=7, head_dim=3)
    draw = torch.Generator().manual_seed(1)
    gates = torch.rand(4, 6, dtype=torch.float64, generator=draw)
    states = torch.randn(4, 7, dtype=torch.float64, generator=draw)
    expected = torch.einsum("ec,ecd->ed", states, transport.edge_transports(weights, gates))
    torch.testing.assert_close(transport.transport_along(weights, gates, states), expected)


@pytest.mark.parametrize(("width", "head_dim", "derived"), [(512, 64, 0.938), (768, 64, 0.9575), (1024, 64, 0.968)])
def test_gaussian_heads_score_what_was_derived_for_their_shape(width: int, head_dim: int, derived: float) -> None:
    scores = nulls.gaussian_head_scores(width, head_dim, 8, torch.Generator().manual_seed(0))
    assert scores.mean().item() == pytest.approx(derived, abs=GAUSSIAN_HEAD_SCORE)
    estimate = nulls.gaussian_head_score_estimate(width, head_dim)
    assert scores.mean().item() == pytest.approx(estimate, abs=GAUSSIAN_HEAD_SCORE)


def test_the_same_gain_null_is_the_null_with_its_matrices_scaled_and_matches_gaussian_weights_under_that_gain() -> None:
    draw = torch.Generator().manual_seed(5)
    gain, scale = torch.rand(2, 40, dtype=torch.float64, generator=draw).pow(3)
    plain, ones, folded = (
        nulls.gaussian_head_scores(40, 8, 64, torch.Generator().manual_seed(7), gain=of_value, output_scale=of_output)
        for of_value, of_output in ((None, None), (torch.ones(40), torch.ones(40)), (gain, scale))
    )
    assert torch.equal(plain, ones)
    value = gain[:, None] * torch.randn(64, 40, 8, dtype=torch.float64, generator=draw)
    output = torch.randn(64, 8, 40, dtype=torch.float64, generator=draw) * scale
    scores = transport.isometry_score(transport.head_singular_values(value, output), 8)
    error = math.hypot(scores.std().item(), folded.std().item()) / 8
    assert plain.mean() - folded.mean() > 5 * error, "the gain alone lowers the score"
    assert scores.mean().item() == pytest.approx(folded.mean().item(), abs=3 * error), "Gaussian weights have no excess"


def test_null_edges_keep_gates_and_sharing_and_repeat_with_their_generator() -> None:
    weights = _weights(heads=4, groups=2, width=15, head_dim=3)
    gates = torch.eye(4, dtype=torch.float64)[[0, 2]]
    states = torch.randn(2, 15, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    rank = transport.edge_rank(weights)
    first = nulls.gaussian_edges(weights, gates, states, rank, torch.Generator().manual_seed(7))
    again = nulls.gaussian_edges(weights, gates, states, rank, torch.Generator().manual_seed(7))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    # One head of rank 3 under a rank of 6 cannot score above a half, trained or not: the gates do that.
    assert rank == 6
    assert bool((first[0] <= 0.5).all())


def test_shuffled_depth_visits_every_layer_once() -> None:
    graphs = torch.rand(5, 7, 7, generator=torch.Generator().manual_seed(0))
    changes = nulls.pairwise_changes(graphs)
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
