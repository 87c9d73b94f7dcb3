"""The whole analysis: one tidy frame a model, its controls beside every number, the same bits for the same seed."""

import math
import statistics
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from attngeo.connection_walk import COLUMNS, analysis, analyze, measurements
from attngeo.connection_walk.stationarity import first_token_share
from attngeo.connection_walk.transport import isometry_score
from attngeo.errors import UserError
from attngeo.language_models.architectures import ARCHITECTURES
from attngeo.language_models.capture import LayerCapture, stream_layers
from attngeo.language_models.loading import LoadedModel, load, random_init
from attngeo.training.seeding import derive_seed
from tests.analyses import tiny_language_models as tiny
from tests.tolerances import (
    FLOAT32_GRAPHS,
    GRAM_ISOMETRY_SCORE,
    HALF_PRECISION_ANALYSIS,
    KNOWN_CHAIN_FLOAT64,
    WALK_IDENTITY_FLOAT64,
)

NETWORKS = {"trained", "random_init", "shuffled_tokens"}
NULLS = {"null", "excess", "null_same_gain", "excess_same_gain"}
UNTRAINED = {"trained", "random_init"}
CHANGES = {
    "graph_change": NETWORKS | {"depth_shuffled"},
    "graph_change_trend": NETWORKS | {"depth_shuffled"},
    "row_jensen_shannon": NETWORKS,
    "subspace_angle": NETWORKS,
}
GRAPHS = CHANGES | {
    "gate_entropy": NETWORKS | {"uniform_attention"},
    "last_layer_similarity": NETWORKS | {"uniform_attention"},
    "spectral_gap": NETWORKS | {"uniform_attention"},
    "stationary_entropy": NETWORKS | {"uniform_attention"},
}
ON_STATES = {
    "directional_gain": {"trained", "null", "excess"},
    "transport_directional_gain": {"trained", "null", "excess"},
    "transport_gain_variation": {"trained", "null", "null_same_gain"},
    "transport_reciprocity_defect": {"trained", "null"},
}
SPECTRAL = ("isometry_score", "singular_value_variation", "polar_residual")
ALONG_EDGES = {f"transport_{metric}": {"trained"} | NULLS for metric in SPECTRAL}
WITHOUT_FIRST = {f"{metric}_without_first_token": c for metric, c in (GRAPHS | ON_STATES | ALONG_EDGES).items()}
TESTS = {
    f"{metric}_{name}": {"excess", "excess_same_gain"}
    for metric in ("isometry_score", "transport_isometry_score")
    for name in ("p_value", "layers_above_null", "layers_below_null")
}
SIZES = {name: {"trained"} for name in ("parameters", "layers", "heads", "value_groups", "head_dim", "model_dim")}
CONTROLS = (
    GRAPHS
    | ON_STATES
    | WITHOUT_FIRST
    | TESTS
    | SIZES
    | {metric: UNTRAINED | NULLS for metric in (*SPECTRAL, "reciprocity_defect")}
    | {metric: controls | {"uniform_attention"} for metric, controls in ALONG_EDGES.items()}
    | {
        "connection_laplacian_error": {"trained", "conditions_hold"},
        "first_token_share": NETWORKS | {"uniform_attention"},
        "identity_error": {"trained", "float64_softmax"},
        "reversibility_defect": NETWORKS | {"uniform_attention"},
        "stochasticity_defect": NETWORKS | {"uniform_attention"},
    }
)
CONTROLS_OF_DECODERS = CONTROLS | {"reversibility_defect": NETWORKS | {"symmetrised", "uniform_attention"}}
CONTROLS_OF_ENCODERS = CONTROLS | {"reversibility_defect_without_first_token": NETWORKS | {"uniform_attention"}}


def _analyze(family: str, **options: object) -> pd.DataFrame:
    configuration = tiny.config(family)
    given = tiny.windows(configuration)
    loaded = tiny.loaded(configuration, torch.float32)
    if family == "dinov2":
        return analyze(loaded, images=given, **options)  # type: ignore[arg-type]
    return analyze(loaded, given, **options)  # type: ignore[arg-type]


def _value(frame: pd.DataFrame, layer: int, metric: str, control: str, head: int = -1) -> float:
    chosen = frame.query("layer == @layer and head == @head and metric == @metric and control == @control")
    assert len(chosen) == 1
    return float(chosen["value"].iloc[0])


@pytest.mark.parametrize("family", tiny.EVERYDAY)
def test_every_metric_comes_with_its_controls_and_no_row_twice(family: str) -> None:
    frame = _analyze(family)
    assert tuple(frame.columns) == COLUMNS
    expected = CONTROLS_OF_DECODERS if ARCHITECTURES[family].causal else CONTROLS_OF_ENCODERS
    assert {metric: set(group["control"]) for metric, group in frame.groupby("metric")} == expected
    assert not frame.duplicated(["layer", "head", "metric", "control"]).any()
    assert frame["value"].map(math.isfinite).all()
    assert set(frame["layer"]) == {-1, 0, 1, 2}
    assert (frame["n"] >= 1).all()
    assert set(frame["model"]) == {"tiny"}
    assert set(frame["precision"]) == {"float32"}
    assert set(frame["family"]) == {family}
    assert set(frame["revision"]) == {""}
    errors = frame.query("metric == 'identity_error'")
    assert errors["value"].max() <= WALK_IDENTITY_FLOAT64
    assert set(errors.query("control == 'trained'")["head"]) == {-1, 0, 1, 2}
    assert frame.query("control == 'conditions_hold'")["value"].max() <= WALK_IDENTITY_FLOAT64


@pytest.mark.parametrize("suffix", ["", "_same_gain"])
def test_excess_is_trained_minus_null_for_heads_layers_and_edges(suffix: str) -> None:
    frame = _analyze("llama")
    for layer in range(tiny.LAYERS):
        null = _value(frame, layer, "isometry_score", f"null{suffix}")
        heads = [_value(frame, layer, "isometry_score", "trained", head) for head in range(3)]
        for head, trained in enumerate(heads):
            assert _value(frame, layer, "isometry_score", f"excess{suffix}", head) == pytest.approx(trained - null)
        assert _value(frame, layer, "isometry_score", "trained") == pytest.approx(sum(heads) / 3)
        assert _value(frame, layer, "isometry_score", f"excess{suffix}") == pytest.approx(sum(heads) / 3 - null)
        controls = ("trained", f"null{suffix}", f"excess{suffix}")
        edges = [_value(frame, layer, "transport_isometry_score", control) for control in controls]
        assert edges[2] == pytest.approx(edges[0] - edges[1])


@pytest.mark.parametrize("family", tiny.EVERYDAY)
def test_a_gain_that_spoils_isometries_lowers_the_same_gain_null_and_leaves_the_other(family: str) -> None:
    """With one loud component the shape-matched null blames the weights for what the norm or the output scale did."""
    configuration = tiny.config(family)
    loaded, inputs = tiny.loaded(configuration), tiny.windows(configuration, 1)
    folded = False
    for site in loaded.sites:
        for scale in (site.gain, site.output_scale):
            if scale is not None:
                folded = True
                scale.data.fill_(1)[2] = 50
    given = {"images": inputs} if family == "dinov2" else {"texts": inputs}
    frame = analyze(loaded, **given)  # type: ignore[arg-type]
    for metric in ("isometry_score", "transport_isometry_score"):
        null, same_gain = (_value(frame, 1, metric, control) for control in ("null", "null_same_gain"))
        if folded:
            assert same_gain < 0.75 * null
        else:
            assert same_gain == null, "a post-norm family folds nothing"


def test_a_decoder_is_one_way_by_construction_and_its_rows_say_so() -> None:
    frame = _analyze("gpt2").query("metric == 'reversibility_defect'")
    own = frame[frame["control"].isin(NETWORKS | {"uniform_attention"})]
    assert own["value"].to_numpy() == pytest.approx(1, abs=KNOWN_CHAIN_FLOAT64)
    assert own["convention"].str.contains("one-way by construction").all()
    either_way = frame[frame["control"] == "symmetrised"]
    assert either_way["value"].to_numpy() == pytest.approx(0, abs=KNOWN_CHAIN_FLOAT64)
    assert either_way["convention"].str.contains("reversible by construction").all()
    encoder = _analyze("bert").query("metric.str.startswith('reversibility')")
    assert not encoder["convention"].str.contains("by construction").any()
    own = encoder[encoder["control"] != "uniform_attention"]
    assert own["value"].between(1e-3, 1 - 1e-3).all()
    assert encoder.query("control == 'uniform_attention'")["value"].max() <= KNOWN_CHAIN_FLOAT64


def test_random_init_is_a_sample_of_networks_with_their_spread() -> None:
    configuration = tiny.config("gpt2")
    inputs = tiny.windows(configuration, 5)
    frame = analyze(tiny.loaded(configuration), inputs, windows=5, seed=7)
    untrained = frame.query("control == 'random_init'")
    assert set(untrained["n"]) == {5}
    assert untrained["spread_kind"].str.contains("initialisations").all()
    assert (untrained.query("metric == 'graph_change'")["spread"] > 0).all()
    means = []
    for index in range(5):
        network = random_init(configuration, derive_seed(7, "random-init", index), model_id="tiny")
        shares: list[float] = []

        def on_layer(capture: LayerCapture, shares: list[float] = shares) -> None:
            if capture.layer == 1:
                shares.append(first_token_share(capture.attention.mean(0)))

        for window in inputs[: analysis.INIT_WINDOWS]:
            stream_layers(network, window, on_layer)
        means.append(sum(shares) / len(shares))
    row = untrained.query("metric == 'first_token_share' and layer == 1").iloc[0]
    assert row["value"] == pytest.approx(statistics.mean(means), rel=FLOAT32_GRAPHS)
    assert row["spread"] == pytest.approx(statistics.stdev(means), rel=1e-2)
    assert f"over {analysis.INIT_WINDOWS} windows" in row["spread_kind"]


def test_a_large_model_is_compared_with_fewer_untrained_networks_and_n_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analysis, "LARGE", 10)
    frame = _analyze("bert")
    assert set(frame.query("control == 'random_init'")["n"]) == {3}


def test_of_a_single_untrained_network_no_spread_is_claimed() -> None:
    configuration = tiny.config("bert")
    frame = analyze(tiny.loaded(configuration), tiny.windows(configuration, 1), windows=1, seed=7, inits=1)
    untrained = frame.query("control == 'random_init'")
    assert set(untrained["n"]) == {1}
    assert untrained["spread"].isna().all()


def test_beside_a_model_that_is_held_one_layer_of_its_control_is_drawn_and_the_bits_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration = tiny.config("llama")
    folder = tiny.saved(tmp_path / "tiny", configuration)
    drawn: list[bool] = []

    def spied(*arguments: Any, **options: Any) -> LoadedModel:
        untrained = random_init(*arguments, **options)
        drawn.append(not any(parameter.is_meta for parameter in untrained.model.parameters()))
        return untrained

    monkeypatch.setattr(analysis, "random_init", spied)
    inputs = tiny.windows(configuration, 2)
    whole, held = (analyze(model, inputs, windows=2, seed=7) for model in (folder, load(folder, None)))
    assert drawn == [True] * 5 + [False] * 5
    pd.testing.assert_frame_equal(whole, held, check_exact=True)


def test_uniform_attention_gives_every_edge_the_mean_of_the_heads() -> None:
    configuration = tiny.config("gpt2")
    loaded = tiny.loaded(configuration)
    frame = analyze(loaded, tiny.windows(configuration))
    weights = loaded.sites[1].weights()
    total = torch.linalg.svdvals((weights.value[weights.group] @ weights.output).sum(0))
    expected = isometry_score(total, min(weights.model_dim, weights.groups * weights.head_dim)).item()
    value = _value(frame, 1, "transport_isometry_score", "uniform_attention")
    assert value == pytest.approx(expected, abs=GRAM_ISOMETRY_SCORE)


def test_the_same_seed_gives_the_same_bits_and_another_seed_other_draws_only() -> None:
    first, again, other = _analyze("bert", seed=3), _analyze("bert", seed=3), _analyze("bert", seed=4)
    pd.testing.assert_frame_equal(first, again, check_exact=True)
    keys = ["layer", "head", "metric", "control"]
    moved = first.merge(other, on=keys, suffixes=("", "_other")).query("value != value_other")
    drawn = NULLS | {"random_init", "shuffled_tokens", "depth_shuffled", "conditions_hold"}
    along_edges = moved["metric"].str.startswith("transport_") | (moved["metric"] == "connection_laplacian_error")
    assert len(moved)
    assert (moved["control"].isin(drawn) | along_edges).all()
    assert not moved["metric"].str.startswith("transport_reciprocity").any(), "taken over all edges"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", tiny.EVERYDAY)
def test_half_precision_folders_are_upcast_and_recorded(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    configuration = tiny.config(family)
    given = tiny.windows(configuration)
    frames = [
        analyze(
            tiny.saved(tmp_path / str(stored), configuration, stored),
            None if family == "dinov2" else given,
            images=given if family == "dinov2" else None,
            model_id="tiny",
        )
        for stored in (torch.float32, dtype)
    ]
    assert set(frames[1]["precision"]) == {str(dtype).removeprefix("torch.")}
    assert frames[1].query("metric == 'identity_error'")["value"].max() <= WALK_IDENTITY_FLOAT64
    keys = ["layer", "head", "metric", "control"]
    both = frames[0].merge(frames[1], on=keys, suffixes=("", "_half"))
    assert len(both) == len(frames[0])
    smooth = both[both["metric"].isin(["isometry_score", "spectral_gap", "first_token_share", "reversibility_defect"])]
    assert (smooth["value"] - smooth["value_half"]).abs().max() <= HALF_PRECISION_ANALYSIS


def test_a_loaded_model_is_left_as_it_was() -> None:
    loaded = tiny.loaded(tiny.config("gpt2"), torch.float16)
    before = {name: parameter.clone() for name, parameter in loaded.model.named_parameters()}
    analyze(loaded, tiny.windows(loaded.model.config), windows=1)
    for name, parameter in loaded.model.named_parameters():
        assert parameter.dtype == torch.float16
        assert torch.equal(parameter, before[name])


def test_windows_are_counted_and_one_window_has_no_spread() -> None:
    configuration = tiny.config("bert")
    loaded = tiny.loaded(configuration)
    several = analyze(loaded, tiny.windows(configuration, 5), windows=4, edges=3)
    gap = several.query("metric == 'spectral_gap' and control == 'trained' and layer == 0").iloc[0]
    assert (gap["n"], gap["spread"] > 0) == (4, True)
    assert "windows" in gap["spread_kind"]
    assert several.query("metric == 'transport_isometry_score' and control == 'trained'")["n"].eq(12).all()
    single = analyze(loaded, tiny.windows(configuration, 1))
    assert single.query("metric == 'spectral_gap' and control == 'trained'")["spread"].isna().all()


def test_a_network_of_one_layer_and_windows_of_one_token_are_measured_as_far_as_they_go() -> None:
    configuration = tiny.config("llama")
    configuration.num_hidden_layers = 1
    frame = analyze(tiny.loaded(configuration), tiny.windows(configuration))
    assert not frame["metric"].isin(["graph_change", "graph_change_trend"]).any()
    alone = analyze(tiny.loaded(tiny.config("llama")), tiny.windows(configuration, tokens=1))
    assert alone.query("metric == 'spectral_gap'")["value"].isna().all(), "no second eigenvalue, and it shows"
    assert alone.query("metric == 'identity_error'")["value"].max() <= WALK_IDENTITY_FLOAT64


def test_edges_can_be_left_out() -> None:
    frame = _analyze("bert", edges=0)
    left = set(frame.query("metric.str.startswith('transport')")["metric"])
    assert left == {"transport_reciprocity_defect", "transport_reciprocity_defect_without_first_token"}


def test_means_over_enough_windows_have_an_interval_and_other_numbers_none() -> None:
    configuration = tiny.config("llama", heads=6, groups=2)
    frame = analyze(tiny.loaded(configuration), tiny.windows(configuration, 7), windows=7)
    found = frame[frame["low"].notna()]
    assert ((found["low"] <= found["value"]) & (found["value"] <= found["high"])).all()
    assert found["high"].notna().all()
    with_interval = {control: set(group["metric"]) for control, group in found[found["layer"] >= 0].groupby("control")}
    assert {"spectral_gap", "graph_change", "gate_entropy", "directional_gain"} < with_interval["trained"]
    assert {"transport_isometry_score", "transport_polar_residual"} < with_interval["trained"]
    assert {"isometry_score", "transport_isometry_score", "directional_gain"} < with_interval["excess"]
    assert "spectral_gap" in with_interval["shuffled_tokens"]
    assert not {"random_init", "uniform_attention"} & set(with_interval)
    heads = frame.query("metric == 'isometry_score' and control == 'trained'")
    assert heads["low"].isna().all(), "weights know no windows"
    few = analyze(tiny.loaded(configuration), tiny.windows(configuration, 5), windows=5)
    assert few.query("metric == 'spectral_gap'")["low"].isna().all(), "five windows cannot give 95 %"


def test_layers_are_counted_as_above_the_null_only_after_holms_correction() -> None:
    frame = _analyze("bert")
    for metric in ("isometry_score", "transport_isometry_score"):
        adjusted = frame.query(f"metric == '{metric}_p_value' and control == 'excess'").set_index("layer")
        excess = frame.query("metric == @metric and control == 'excess' and head == -1").set_index("layer")["value"]
        assert set(adjusted["n"]) == {tiny.LAYERS}
        assert adjusted["convention"].str.contains("adjusted for 3 layers").all()
        for side, beyond in (("above", excess > 0), ("below", excess < 0)):
            counted = frame.query(f"metric == '{metric}_layers_{side}_null' and control == 'excess'").iloc[0]
            assert counted["value"] == (beyond & (adjusted["value"] < 0.05)).sum()
            assert counted["layer"] == -1


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_one_token_of_a_thousand_times_the_size_moves_means_by_no_more_than_its_share(family: str) -> None:
    """A state of huge norm and an attention sink: means over tokens are of ratios, and rows of a graph add up to 1."""
    configuration = tiny.config(family)
    inputs = torch.arange(11).expand(2, 11)
    frames = []
    for size in (1, 1000):
        loaded = tiny.loaded(configuration)
        loaded.model.get_input_embeddings().weight.data[5] *= size
        frames.append(analyze(loaded, inputs, seed=1))
    assert frames[1]["value"].map(math.isfinite).all()
    assert frames[1].query("metric == 'identity_error'")["value"].max() <= WALK_IDENTITY_FLOAT64
    sites = tiny.loaded(configuration).sites
    for suffix, tokens in (("", 11), ("_without_first_token", 10)):
        for head in range(3):
            plain, planted = (_value(frame, 0, f"directional_gain{suffix}", "trained", head) for frame in frames)
            weights = sites[0].weights()
            largest = torch.linalg.matrix_norm(weights.value[weights.group[head]] @ weights.output[head], 2).item()
            assert abs(plain - planted) <= largest / tokens


def test_numbers_without_the_first_token_do_not_see_a_sink_there() -> None:
    """Attention piled on the first token decides the plain numbers; the others are those of a graph without it."""
    graphs = torch.rand(3, 2, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tril()
    graphs = graphs / graphs.sum(-1, keepdim=True)
    sunk = 0.02 * graphs
    sunk[..., 0] += 0.98
    found = []
    for attention in (graphs, sunk):
        measured = measurements.GraphMeasurements("trained", 3, causal=True, seed=0)
        for layer in range(3):
            measured.add(layer, attention[layer])
        rows = measurements.Rows(tiny.loaded(tiny.config("gpt2")))
        measured.write(rows)
        found.append({(r["layer"], r["metric"], r["control"]): r["value"] for r in rows.rows})
    kept = [key for key in found[0] if key[1].endswith("_without_first_token") and not key[1].startswith("gate")]
    assert len(kept) > 15
    for key in kept:
        assert found[1][key] == pytest.approx(found[0][key], abs=FLOAT32_GRAPHS, nan_ok=True), key
    assert found[1][1, "graph_change", "trained"] < 0.1 * found[0][1, "graph_change", "trained"]


def test_layers_of_a_pyramid_are_compared_within_a_stage() -> None:
    draw = torch.Generator().manual_seed(0)
    measured = measurements.GraphMeasurements("trained", 5, causal=False, seed=0)
    for layer, tokens in enumerate((12, 12, 7, 7, 7)):
        measured.add(layer, torch.rand(2, tokens, tokens, dtype=torch.float64, generator=draw).softmax(-1))
    rows = measurements.Rows(tiny.loaded(tiny.config("bert")))
    measured.write(rows)
    layers = {
        metric: {row["layer"] for row in rows.rows if row["metric"] == metric and row["control"] == "trained"}
        for metric in ("spectral_gap", "graph_change", "last_layer_similarity", "graph_change_trend")
    }
    assert layers == {
        "spectral_gap": {0, 1, 2, 3, 4},
        "graph_change": {1, 3, 4},
        "last_layer_similarity": {2, 3, 4},
        "graph_change_trend": {-1},
    }


def test_input_of_the_wrong_kind_and_too_few_draws_are_refused() -> None:
    language, vision = tiny.loaded(tiny.config("bert")), tiny.loaded(tiny.config("dinov2"))
    ids, images = tiny.windows(language.model.config), tiny.windows(vision.model.config)
    with pytest.raises(UserError, match="vision model"):
        analyze(vision, ids)
    with pytest.raises(UserError, match="language model"):
        analyze(language, images=images)
    with pytest.raises(UserError, match="language model"):
        analyze(language, [])
    with pytest.raises(UserError, match="null_draws = 1"):
        analyze(language, ids, null_draws=1)


def test_graphs_too_large_to_keep_are_refused_before_the_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "GRAPH_BYTES", 3 * 4 * 10 * 10)
    loaded = tiny.loaded(tiny.config("bert"))
    analyze(loaded, tiny.windows(loaded.model.config, tokens=10), windows=1, edges=1)
    with pytest.raises(UserError, match="at most 10 tokens"):
        analyze(loaded, tiny.windows(loaded.model.config, tokens=11), windows=1, edges=1)


@pytest.mark.network
def test_a_pretrained_encoder_on_real_text_is_a_connection_walk() -> None:
    from attngeo.data import text
    from attngeo.data.embedded import fetch

    frame = analyze(fetch("minilm-l3"), text.load(), model_id="minilm-l3", windows=2, edges=1)
    assert frame.query("metric == 'identity_error'")["value"].max() <= WALK_IDENTITY_FLOAT64
    untrained = frame.query("metric == 'isometry_score' and control == 'random_init'")["value"]
    null = frame.query("metric == 'isometry_score' and control == 'null'")["value"]
    assert (untrained.mean() - null.mean()) == pytest.approx(0, abs=0.005), (
        "an untrained network scores as the null does"
    )
    assert frame.query("metric == 'graph_change' and control == 'trained'")["value"].min() > 0.2
