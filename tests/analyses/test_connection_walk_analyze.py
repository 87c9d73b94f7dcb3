"""The whole analysis: one tidy frame a model, its controls beside every number, the same bits for the same seed."""

import math
from pathlib import Path

import pandas as pd
import pytest
import torch

from attngeo.connection_walk import COLUMNS, analyze
from attngeo.errors import UserError
from attngeo.language_models.architectures import ARCHITECTURES
from tests.analyses import tiny_language_models as tiny
from tests.tolerances import HALF_PRECISION_ANALYSIS, WALK_IDENTITY_FLOAT64

CONTROLS = {
    "first_token_share": {"trained", "random_init"},
    "graph_change": {"trained", "random_init", "depth_shuffled"},
    "graph_change_trend": {"trained", "random_init", "depth_shuffled"},
    "identity_error": {"trained", "float64_softmax"},
    "isometry_score": {"trained", "null", "excess", "random_init"},
    "connection_laplacian_error": {"trained", "conditions_hold"},
    "last_layer_similarity": {"trained", "random_init"},
    "parameters": {"trained"},
    "reversibility_defect": {"trained", "random_init"},
    "row_jensen_shannon": {"trained", "random_init"},
    "spectral_gap": {"trained", "random_init"},
    "stochasticity_defect": {"trained", "random_init"},
    "subspace_angle": {"trained", "random_init"},
    "transport_gain_variation": {"trained", "null"},
    "transport_isometry_score": {"trained", "null", "excess"},
}


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


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_metric_comes_with_its_controls_and_no_row_twice(family: str) -> None:
    frame = _analyze(family)
    assert tuple(frame.columns) == COLUMNS
    assert {metric: set(group["control"]) for metric, group in frame.groupby("metric")} == CONTROLS
    assert not frame.duplicated(["layer", "head", "metric", "control"]).any()
    assert frame["value"].map(math.isfinite).all()
    assert set(frame["layer"]) == {-1, 0, 1, 2}
    assert (frame["n"] >= 1).all()
    assert set(frame["model"]) == {"tiny"}
    assert set(frame["precision"]) == {"float32"}
    errors = frame.query("metric == 'identity_error'")
    assert errors["value"].max() <= WALK_IDENTITY_FLOAT64
    assert set(errors.query("control == 'trained'")["head"]) == {-1, 0, 1, 2}
    assert frame.query("control == 'conditions_hold'")["value"].max() <= WALK_IDENTITY_FLOAT64


def test_excess_is_trained_minus_null_for_heads_layers_and_edges() -> None:
    frame = _analyze("llama")
    for layer in range(tiny.LAYERS):
        null = _value(frame, layer, "isometry_score", "null")
        heads = [_value(frame, layer, "isometry_score", "trained", head) for head in range(3)]
        for head, trained in enumerate(heads):
            assert _value(frame, layer, "isometry_score", "excess", head) == pytest.approx(trained - null)
        assert _value(frame, layer, "isometry_score", "trained") == pytest.approx(sum(heads) / 3)
        assert _value(frame, layer, "isometry_score", "excess") == pytest.approx(sum(heads) / 3 - null)
        edges = [_value(frame, layer, "transport_isometry_score", control) for control in ("trained", "null", "excess")]
        assert edges[2] == pytest.approx(edges[0] - edges[1])


def test_the_same_seed_gives_the_same_bits_and_another_seed_other_draws_only() -> None:
    first, again, other = _analyze("bert", seed=3), _analyze("bert", seed=3), _analyze("bert", seed=4)
    pd.testing.assert_frame_equal(first, again, check_exact=True)
    keys = ["layer", "head", "metric", "control"]
    moved = first.merge(other, on=keys, suffixes=("", "_other")).query("value != value_other")
    drawn = {"null", "excess", "random_init", "depth_shuffled", "conditions_hold"}
    measured_along_edges = {"transport_isometry_score", "transport_gain_variation", "connection_laplacian_error"}
    assert len(moved)
    assert (moved["control"].isin(drawn) | moved["metric"].isin(measured_along_edges)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ARCHITECTURES)
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
    assert several.query("metric == 'transport_isometry_score'")["n"].eq(12).all()
    single = analyze(loaded, tiny.windows(configuration, 1))
    assert single.query("metric == 'spectral_gap'")["spread"].isna().all()


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
    assert not frame["metric"].str.startswith("transport").any()


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
    from attngeo.connection_walk import measurements

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
