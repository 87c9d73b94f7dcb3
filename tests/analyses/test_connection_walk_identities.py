"""P3.a, P3.b: attention of every supported family is one connection walk. P3.c: the Laplacian identity, its limits."""

import pytest
import torch
from torch import Tensor

from attngeo.connection_walk import identities, stationarity, transport, walk
from attngeo.language_models.architectures import ARCHITECTURES, HeadWeights
from attngeo.language_models.capture import LayerCapture, in_float64, stream_layers, working_precision_softmax
from tests.analyses import tiny_language_models as tiny
from tests.tolerances import WALK_IDENTITY_FLOAT64, WALK_SUM_FLOAT64

LAYOUTS = {
    "one head": {"heads": 1, "head_dim": 7},
    "three heads": {"heads": 3},
    "wide heads": {"heads": 2, "head_dim": 11},
}
NETWORKS = [
    *((family, layout) for family in ARCHITECTURES for layout in LAYOUTS.values()),
    ("llama", {"heads": 6, "groups": 2}),
    ("llama", {"heads": 5, "groups": 1}),
]


def _captures(family: str, layout: dict[str, int], dtype: torch.dtype, exact: bool) -> list[tuple[LayerCapture, float]]:
    loaded = tiny.loaded(tiny.config(family, **layout), dtype)
    errors: list[tuple[LayerCapture, float]] = []

    def on_layer(capture: LayerCapture) -> None:
        site = loaded.sites[capture.layer]
        errors.append((capture, identities.walk_error(capture, site, site.weights())))

    window = tiny.windows(loaded.model.config)[0]
    with in_float64(loaded):
        if exact:
            with working_precision_softmax():
                stream_layers(loaded, window, on_layer)
        else:
            stream_layers(loaded, window, on_layer)
    return errors


@pytest.mark.parametrize(("family", "layout"), NETWORKS)
@pytest.mark.parametrize("exact", [False, True], ids=["library softmax", "float64 softmax"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_attention_output_is_the_connection_walk(
    family: str, layout: dict[str, int], exact: bool, dtype: torch.dtype
) -> None:
    found = _captures(family, layout, dtype, exact)
    assert len(found) == tiny.LAYERS
    for capture, error in found:
        assert capture.output.dtype == torch.float64
        assert capture.output.norm() > 0
        assert error <= WALK_IDENTITY_FLOAT64


def test_a_float32_softmax_needs_its_actual_row_sums() -> None:
    """Llama's softmax is float32 in a float64 model: with row sums of exactly 1 the identity would fail at 1e-8."""
    loaded = tiny.loaded(tiny.config("llama"))
    captured: list[LayerCapture] = []
    stream_layers(loaded, tiny.windows(loaded.model.config)[0], captured.append)
    capture, site = captured[0], loaded.sites[0]
    weights = site.weights()
    defect = (capture.attention.sum(-1) - 1).abs().max().item()
    assert defect > 1e-9
    walked = walk.connection_walk(capture.attention, site.states(capture.attention_input), weights)
    ones = torch.ones_like(capture.attention) / capture.attention.shape[-1]
    pretending = walked - walk.bias_term(capture.attention, weights) + walk.bias_term(ones, weights)
    assert identities.relative_error(walked, capture.output) <= WALK_IDENTITY_FLOAT64
    assert identities.relative_error(pretending, capture.output) > WALK_IDENTITY_FLOAT64


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_each_head_alone_is_a_walk_with_constant_transport(family: str) -> None:
    loaded = tiny.loaded(tiny.config(family))

    def on_layer(capture: LayerCapture) -> None:
        site = loaded.sites[capture.layer]
        errors = identities.head_walk_errors(capture, site, site.weights())
        assert len(errors) == 3
        assert max(errors) <= WALK_IDENTITY_FLOAT64

    stream_layers(loaded, tiny.windows(loaded.model.config)[0], on_layer)


@pytest.mark.parametrize("wrong", ["value bias", "output bias", "gain", "head map", "transposed value"])
def test_the_identity_notices_a_wrong_adapter(wrong: str) -> None:
    loaded = tiny.loaded(tiny.config("llama", heads=6, groups=3))
    captured: list[LayerCapture] = []
    stream_layers(loaded, tiny.windows(loaded.model.config)[0], captured.append)
    site = loaded.sites[0]
    right = site.weights()
    replaced = {
        "value bias": {"value_bias": torch.zeros_like(right.value_bias)},
        "output bias": {"output_bias": torch.zeros_like(right.output_bias)},
        "gain": {"value": right.value / site.gain[:, None]},
        "head map": {"group": torch.arange(6) % 3},
        "transposed value": {"value": right.value.transpose(0, 2).reshape(right.value.shape)},
    }[wrong]
    assert identities.walk_error(captured[0], site, HeadWeights(**(vars(right) | replaced))) > 1e-3


def _random_weights(heads: int, groups: int, width: int, head_dim: int, seed: int = 0) -> HeadWeights:
    draw = torch.Generator().manual_seed(seed)
    return HeadWeights(
        value=torch.randn(groups, width, head_dim, dtype=torch.float64, generator=draw),
        output=torch.randn(heads, head_dim, width, dtype=torch.float64, generator=draw),
        value_bias=torch.zeros(groups, head_dim, dtype=torch.float64),
        output_bias=torch.zeros(width, dtype=torch.float64),
        group=torch.arange(heads) // (heads // groups),
    )


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_the_walk_is_the_sum_over_edges_of_states_times_transports(tokens: int) -> None:
    weights = _random_weights(heads=4, groups=2, width=9, head_dim=3)
    draw = torch.Generator().manual_seed(1)
    attention = torch.randn(4, tokens, tokens, dtype=torch.float64, generator=draw)
    attention = attention.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf).softmax(-1)
    states = torch.randn(tokens, 9, dtype=torch.float64, generator=draw)
    graph, edge_gates = walk.effective_graph(attention), walk.gates(attention)
    expected = torch.zeros(tokens, 9, dtype=torch.float64)
    for i in range(tokens):
        for j in range(tokens):
            edge = transport.edge_transports(weights, edge_gates[None, :, i, j])[0]
            if graph[i, j] == 0:
                assert j > i
                assert torch.equal(edge, torch.zeros_like(edge)), "no edge, no transport"
            expected[i] += graph[i, j] * states[j] @ edge
    walked = walk.connection_walk(attention, states, weights)
    assert identities.relative_error(walked, expected) <= WALK_SUM_FLOAT64


def test_rows_cut_in_chunks_give_the_same_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = _random_weights(heads=3, groups=3, width=6, head_dim=2)
    draw = torch.Generator().manual_seed(1)
    attention = torch.randn(3, 13, 13, dtype=torch.float64, generator=draw).softmax(-1)
    states = torch.randn(13, 6, dtype=torch.float64, generator=draw)
    whole = walk.connection_walk(attention, states, weights)
    monkeypatch.setattr(walk, "_CHUNK_ELEMENTS", 4 * 13 * 6)
    assert identities.relative_error(walk.connection_walk(attention, states, weights), whole) <= WALK_SUM_FLOAT64


def test_gates_are_shares_that_add_up_to_one_on_every_edge_and_to_none_elsewhere() -> None:
    draw = torch.Generator().manual_seed(0)
    attention = torch.rand(5, 7, 7, dtype=torch.float64, generator=draw).tril()
    totals = walk.gates(attention).sum(0)
    torch.testing.assert_close(totals, torch.ones(7, 7, dtype=torch.float64).tril())


def test_sampled_edges_are_edges_and_follow_the_walk() -> None:
    graph = torch.tensor([[1.0, 0.0, 0.0], [0.25, 0.75, 0.0], [0.5, 0.0, 0.5]], dtype=torch.float64)
    rows, columns = walk.sample_edges(graph, 6000, torch.Generator().manual_seed(3))
    assert bool((graph[rows, columns] > 0).all())
    drawn = torch.zeros(3, 3, dtype=torch.float64).index_put(
        (rows, columns), torch.tensor(1.0).double(), accumulate=True
    )
    # 6 000 draws: the standard deviation of a frequency is below 0.006, five of them below 0.03.
    assert (drawn / 6000 - graph / 3).abs().max() < 0.03


def _reversible(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    weights = torch.rand(tokens, tokens, dtype=torch.float64, generator=draw)
    weights = weights + weights.T
    return weights / weights.sum(1, keepdim=True), weights.sum(1) / weights.sum()


def _laplacian_case(tokens: int = 11, dim: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    graph, law = _reversible(tokens)
    transports = identities.paired_rotations(tokens, dim, torch.Generator().manual_seed(1))
    f, g = torch.randn(2, tokens, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return graph, law, transports, f, g


@pytest.mark.parametrize(("tokens", "dim"), [(1, 1), (2, 5), (13, 1), (11, 3)])
def test_the_generator_is_a_connection_laplacian_where_the_conditions_hold(tokens: int, dim: int) -> None:
    assert identities.connection_laplacian_error(*_laplacian_case(tokens, dim)) <= WALK_SUM_FLOAT64


@pytest.mark.parametrize("broken", ["stochastic", "reversible", "inverse pairs", "isometric", "law"])
def test_each_condition_of_the_laplacian_identity_is_needed(broken: str) -> None:
    graph, law, transports, f, g = _laplacian_case()
    if broken == "stochastic":
        graph = 1.1 * graph
    elif broken == "reversible":
        graph = torch.rand(11, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        graph = graph / graph.sum(1, keepdim=True)
        law = stationarity.stationary_law(graph)
    elif broken == "inverse pairs":
        transports = transports.clone()
        transports[3, 1] = transports[1, 3]
    elif broken == "isometric":
        transports = 1.1 * transports
    else:
        law = torch.full_like(law, 1 / 11)
    assert identities.connection_laplacian_error(graph, law, transports, f, g) > 1e-4


def test_one_test_function_would_not_notice_a_walk_that_cannot_be_reversed() -> None:
    """With f = g the identity needs a stationary law only: why two functions are used."""
    graph = torch.rand(11, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    graph = graph / graph.sum(1, keepdim=True)
    law = stationarity.stationary_law(graph)
    _, _, transports, f, _ = _laplacian_case()
    assert stationarity.detailed_balance_defect(graph, law) > 0.1
    assert identities.connection_laplacian_error(graph, law, transports, f, f) <= WALK_SUM_FLOAT64


def test_paired_rotations_are_orthogonal_inverse_to_each_other_and_not_flat() -> None:
    transports = identities.paired_rotations(5, 3, torch.Generator().manual_seed(0))
    identity = torch.eye(3, dtype=torch.float64).expand(5, 5, 3, 3)
    torch.testing.assert_close(transports @ transports.transpose(2, 3), identity)
    torch.testing.assert_close(transports @ transports.transpose(0, 1), identity)
    around = transports[0, 1] @ transports[1, 2] @ transports[2, 0]
    assert (around - identity[0, 0]).norm() > 0.1
