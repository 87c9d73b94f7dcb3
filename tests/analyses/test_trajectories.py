"""Paths of hidden states on the sphere: exact where the path is known, and one tidy frame with controls for models."""

import math

import pandas as pd
import pytest
import timm
import torch
from torch import Tensor

import attngeo.models.registry  # noqa: F401  names our models to timm
from attngeo.errors import UserError
from attngeo.language_models.architectures import ARCHITECTURES
from attngeo.language_models.capture import in_float64
from attngeo.language_models.residual_stream import residual_stream
from attngeo.variational import analyze_trajectories, paths, trajectories
from attngeo.variational.paths import (
    QuadraticPotential,
    TokenPath,
    acceleration,
    bend_measures,
    depth_shuffled,
    fit_potential,
    potential_residuals,
    random_walk,
    sphere_coordinates,
    step_measures,
    token_path,
)
from attngeo.variational.sphere import distance, exponential, project, random_points, tangent_projection
from attngeo.variational.trajectories import COLUMNS, analyze_pyramid
from tests.analyses import tiny_language_models as tiny
from tests.tolerances import (
    FITTED_PATH,
    FLOAT32_STREAM,
    HALF_PRECISION_ANALYSIS,
    NO_WORSE_THAN_FREE,
    RANDOM_WALK_MEAN,
    SPHERE_ROUNDING,
)

METRICS = {
    *("step_size", "kinetic_energy", "tangential_share", "norm_growth", "turning_angle", "geodesic_curvature"),
    *("el_residual_free", "el_residual_potential"),
}


def _source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _great_circle(steps: list[float], tokens: int = 5, dimension: int = 11, seed: int = 0) -> Tensor:
    """Points [T, N, D] on a great circle for each token, at the sums of these angles."""
    source = _source(seed)
    start = random_points(tokens, dimension, generator=source)
    velocity = project(tangent_projection(start, random_points(tokens, dimension, generator=source)))
    times = torch.tensor([0.0, *steps], dtype=torch.float64).cumsum(0)
    return exponential(start, times[:, None, None] * velocity)


def _path(points: Tensor) -> TokenPath:
    return token_path(points, points[:-1, None], points.diff(dim=0)[:, None], centred=False)


def test_a_great_circle_at_constant_speed_is_stationary_however_large_its_steps() -> None:
    measured = bend_measures(acceleration(_great_circle([0.7] * 6)))
    for metric in ("el_residual_free", "geodesic_curvature", "turning_angle"):
        assert measured[metric].abs().max() <= 10 * SPHERE_ROUNDING
    steps = step_measures(_path(_great_circle([0.7] * 6)))
    assert steps["step_size"].tolist() == pytest.approx([0.7] * 6)
    assert steps["kinetic_energy"].tolist() == pytest.approx([0.245] * 6)


def test_uneven_speed_along_a_great_circle_bends_nothing_but_is_not_stationary() -> None:
    measured = bend_measures(acceleration(_great_circle([0.2, 0.6, 0.1])))
    assert measured["geodesic_curvature"].abs().max() <= 10 * SPHERE_ROUNDING
    assert measured["el_residual_free"].tolist() == pytest.approx([0.4 / 0.8, 0.5 / 0.7])


def test_a_step_that_is_taken_back_has_residual_one_and_a_half_turn() -> None:
    there = _great_circle([0.3])
    measured = bend_measures(acceleration(torch.stack([there[0], there[1], there[0]])))
    assert measured["el_residual_free"].item() == pytest.approx(1)
    assert measured["turning_angle"].item() == pytest.approx(math.pi)


def test_the_curvature_of_a_circle_of_latitude_is_the_tangent_of_the_latitude() -> None:
    latitude, angles = 0.6, 1e-3 * torch.arange(7, dtype=torch.float64)
    ring = torch.stack([angles.cos() * math.cos(latitude), angles.sin() * math.cos(latitude)], dim=-1)
    points = torch.cat([ring, torch.full((7, 1), math.sin(latitude), dtype=torch.float64)], dim=1)[:, None]
    found = bend_measures(acceleration(points))["geodesic_curvature"]
    assert found.tolist() == pytest.approx([math.tan(latitude)] * 5, rel=1e-5)


def _potential_path(potential: QuadraticPotential, seed: int, nodes: int = 9, tokens: int = 7) -> Tensor:
    """A path on which the discrete Euler-Lagrange equation holds: each logarithm forward is made from it."""
    points = list(_great_circle([0.3], tokens, len(potential.directions), seed))
    while len(points) < nodes:
        x, before = points[-1], points[-2]
        backward = acceleration(torch.stack([before, x, x + 0 * before])).backward[0]
        points.append(project(exponential(x, -backward - tangent_projection(x, potential.gradient(x)))))
    return torch.stack(points)


def test_a_path_in_a_quadratic_potential_is_stationary_under_the_fitted_one_and_not_under_the_free_lagrangian() -> None:
    dimension, source = 13, _source(3)
    root = torch.randn(dimension, dimension, generator=source, dtype=torch.float64)
    planted = QuadraticPotential(
        torch.linalg.qr(root).Q,
        0.1 * torch.randn(dimension, generator=source, dtype=torch.float64),
        0.01 * (root + root.T),
    )
    bends = [acceleration(_potential_path(planted, seed, tokens=17)) for seed in range(6)]
    residuals = potential_residuals(bends, _source())
    assert residuals.shape == (6, 7)
    assert residuals.max() <= FITTED_PATH
    assert min(bend_measures(bend)["el_residual_free"].min() for bend in bends) > 0.05


def test_the_fitted_potential_is_the_best_of_its_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "RIDGES", (1e-12,))
    bends = [acceleration(random_points(8, 6, 21, generator=_source(seed))) for seed in range(2)]
    fitted = fit_potential(bends, _source())

    def loss(potential: QuadraticPotential) -> float:
        return sum(bend.relative(potential.residual(bend)).square().sum().item() for bend in bends)

    least, source = loss(fitted), _source(1)
    assert least < sum(bend.relative(bend.value).square().sum().item() for bend in bends)
    for _ in range(5):
        noise = torch.randn(16, 17, generator=source, dtype=torch.float64)
        moved = QuadraticPotential(
            fitted.directions,
            fitted.linear + 1e-2 * noise[:, 0],
            fitted.quadratic + 1e-2 * (noise[:, 1:] + noise[:, 1:].T),
        )
        assert loss(moved) > least


def test_a_potential_fitted_to_noise_is_nearly_flat_and_predicts_no_worse_than_none() -> None:
    walks = [random_walk(_path(_great_circle([0.2] * 5, 6, 40)), _source(seed)) for seed in range(8)]
    bends = [acceleration(walk.points) for walk in walks]
    free = torch.stack([bend.relative(bend.value) for bend in bends])
    assert (potential_residuals(bends, _source()).mean() / free.mean()).item() <= NO_WORSE_THAN_FREE


def test_one_path_alone_is_not_measured_by_a_potential_fitted_to_itself() -> None:
    assert potential_residuals([acceleration(_great_circle([0.3] * 4))], _source()).isnan().all()


def test_a_random_walk_has_the_steps_of_its_path_and_the_share_of_isotropic_steps() -> None:
    tokens, dimension = 400, 9
    path = _path(_great_circle([0.1, 0.4, 0.2, 0.3], tokens, dimension))
    walk = random_walk(path, _source(1))
    assert torch.equal(walk.points[0], path.points[0])
    angles = distance(walk.points[:-1], walk.points[1:])
    assert angles[:, 0].tolist() == pytest.approx([0.1, 0.4, 0.2, 0.3], abs=10 * SPHERE_ROUNDING)
    lengths = torch.linalg.vector_norm(walk.steps, dim=-1)
    assert torch.allclose(lengths, torch.linalg.vector_norm(path.steps, dim=-1), rtol=0, atol=10 * SPHERE_ROUNDING)
    assert step_measures(walk)["tangential_share"].mean().item() == pytest.approx(1 - 1 / 9, abs=RANDOM_WALK_MEAN)
    even = random_walk(_path(_great_circle([0.2] * 4, tokens, dimension)), _source(2))
    assert bend_measures(acceleration(even.points))["el_residual_free"].mean().item() == pytest.approx(
        math.sqrt(0.5), abs=RANDOM_WALK_MEAN
    )


def test_shuffled_depth_keeps_points_and_steps() -> None:
    path = _path(_great_circle([0.1, 0.4, 0.2, 0.3]))
    shuffled = depth_shuffled(path, _source(5))
    for before, after in ((path.points, shuffled.points), (path.steps, shuffled.steps)):
        assert not torch.equal(before, after)
        assert torch.equal(before.flatten(1).sort(dim=0).values, after.flatten(1).sort(dim=0).values)


def test_coordinates_of_centred_states_are_an_isometry_that_forgets_the_mean() -> None:
    states = torch.randn(3, 5, 7, generator=_source(), dtype=torch.float64)
    found = sphere_coordinates(states, centred=True)
    assert found.shape == (3, 5, 6)
    centred = states - states.mean(-1, keepdim=True)
    assert torch.allclose(found @ found.mT, centred @ centred.mT, rtol=0, atol=10 * SPHERE_ROUNDING)
    assert torch.allclose(found, sphere_coordinates(states + 2.5, centred=True), rtol=0, atol=10 * SPHERE_ROUNDING)
    assert sphere_coordinates(states, centred=False) is states


RMS_NORM = {"gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3", "t5"}


@pytest.mark.parametrize("family", [name for name, family in ARCHITECTURES.items() if family.norm == "pre"])
def test_states_of_a_pre_norm_family_are_the_librarys_hidden_states_and_steps_lead_from_one_to_the_next(
    family: str,
) -> None:
    configuration = tiny.config(family)
    loaded, window = tiny.loaded(configuration), tiny.windows(configuration, 1)[0]
    positions = [1, 4, 9]
    with in_float64(loaded):
        stream = residual_stream(loaded, window, positions)
        read = window if loaded.adapter.reads == "tokens" else window.double()
        given = {loaded.adapter.input_name: read[None], **loaded.adapter.call_options}
        with torch.no_grad():
            hidden = loaded.model(**given, output_hidden_states=True).hidden_states
    assert stream.centred == (family not in RMS_NORM)
    assert stream.states.shape == (tiny.LAYERS + 1, 3, loaded.sites[0].weights().model_dim)
    for layer, layer_steps in enumerate(stream.layers):
        state = hidden[layer][0, positions].double()
        assert torch.allclose(stream.states[layer], state, rtol=0, atol=FLOAT32_STREAM)
        (step,) = layer_steps.steps
        assert torch.equal(step.start, stream.states[layer])
        assert torch.allclose(step.start + step.step, stream.states[layer + 1], rtol=0, atol=SPHERE_ROUNDING * 100)


def test_states_of_a_post_norm_family_are_the_librarys_without_gain_and_bias_of_the_norm() -> None:
    configuration = tiny.config("bert")
    loaded, window = tiny.loaded(configuration), tiny.windows(configuration, 1)[0]
    with torch.no_grad():
        hidden = loaded.model(window[None], output_hidden_states=True).hidden_states
    stream = residual_stream(loaded, window, [1, 4, 9])
    norms = [loaded.model.embeddings.LayerNorm, *(layer.output.LayerNorm for layer in loaded.model.encoder.layer)]
    for state, normalised, norm in zip(stream.states, hidden, norms, strict=True):
        folded = (normalised[0, [1, 4, 9]] - norm.bias) / norm.weight
        found, expected = (project(sphere_coordinates(tensor, centred=True)) for tensor in (state, folded))
        assert torch.allclose(found, expected, rtol=0, atol=FLOAT32_STREAM)
    assert [len(layer.steps) for layer in stream.layers] == [2] * tiny.LAYERS


@pytest.mark.parametrize("family", ["bert", "dinov2", "gpt2", "llama"])
def test_gains_are_read_off_the_norms_of_each_half(family: str) -> None:
    configuration = tiny.config(family)
    loaded, window = tiny.loaded(configuration), tiny.windows(configuration, 1)[0]
    named = {
        "bert": ("attention.output.LayerNorm", "output.LayerNorm"),
        "dinov2": ("norm1", "norm2"),
        "gpt2": ("ln_1", "ln_2"),
        "llama": ("input_layernorm", "post_attention_layernorm"),
    }[family]
    layers = {"bert": "encoder.layer", "dinov2": "encoder.layer", "gpt2": "h", "llama": "layers"}[family]
    with in_float64(loaded):
        stream = residual_stream(loaded, window, range(1, 11))
    for block, layer in zip(loaded.model.get_submodule(layers), stream.layers, strict=True):
        assert [half for half, _ in layer.gains] == ["attention", "feed_forward"]
        for name, (_, gain) in zip(named, layer.gains, strict=True):
            weight = block.get_submodule(name).weight
            # The norm's own epsilon makes it a little smaller for tokens of little variance.
            assert torch.allclose(gain, weight, rtol=1e-3, atol=1e-4)


def _analyze(family: str, windows: int = 3, **options: object) -> pd.DataFrame:
    configuration = tiny.config(family)
    given = tiny.windows(configuration, windows)
    inputs = {"images": given} if family == "dinov2" else {"texts": given}
    loaded = tiny.loaded(configuration, torch.float32)
    return analyze_trajectories(loaded, windows=windows, tokens=7, inits=2, **inputs, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["bert", "dinov2", "gpt2", "llama"])
def test_every_metric_comes_with_its_controls_and_no_row_twice(family: str) -> None:
    frame = _analyze(family)
    assert list(frame.columns) == COLUMNS
    assert not frame.duplicated(["metric", "control", "layer", "stage", "lagrangian"]).any()
    assert frame["value"].map(math.isfinite).all()
    networks = {"trained", "random_init", "random_walk", "depth_shuffled"}
    for metric in METRICS:
        rows = frame[(frame["metric"] == metric) & (frame["control"] != "isotropic")]
        inner = metric in ("turning_angle", "geodesic_curvature", "el_residual_free", "el_residual_potential")
        assert set(rows["control"]) == networks
        assert set(rows["layer"]) == ({-1, 1, 2} if inner else {-1, 0, 1, 2})
        differences = frame[frame["metric"] == f"{metric}_difference"]
        assert list(differences["control"]) == ["random_init", "random_walk", "depth_shuffled"]
        whole = rows[rows["layer"] == -1].set_index("control")["value"]
        for control, value in zip(differences["control"], differences["value"], strict=True):
            assert value == pytest.approx(whole["trained"] - whole[control], abs=1e-9)
    assert len(frame[frame["metric"] == "tangential_share_excess"]) == 1
    assert list(frame[frame["metric"] == "norm_gain_cv"]["layer"]) == [0, 1, 2]
    assert set(frame[frame["control"] == "random_init"].query("layer >= 0")["n"]) == {2}


def test_a_layers_gain_is_judged_by_the_less_constant_of_its_norms() -> None:
    gains = _analyze("gpt2").query("layer == 1 and metric.str.endswith('norm_gain_cv')").set_index("metric")["value"]
    assert gains["norm_gain_cv"] == max(gains["attention_norm_gain_cv"], gains["feed_forward_norm_gain_cv"])
    assert len(gains) == 3


def test_the_answer_counts_controls_and_says_it_in_words() -> None:
    frame = _analyze("gpt2", windows=6)
    for lagrangian, metric in (("free", "el_residual_free"), ("potential", "el_residual_potential")):
        chosen = (frame["metric"] == "closer_to_stationary") & (frame["lagrangian"] == lagrangian)
        (answer,) = frame[chosen].to_dict("records")
        differences = frame[frame["metric"] == f"{metric}_difference"]
        assert answer["value"] == (differences["high"] < 0).sum()
        assert answer["answer"].count("95 % interval") == 3
        for row in differences.to_dict("records"):
            side = "closer" if row["high"] < 0 else "farther" if row["low"] > 0 else "neither closer nor farther"
            assert f"{side} than {row['control'].replace('_', ' ')} ({row['value']:+.3g}" in answer["answer"]
    few = _analyze("gpt2", windows=2).query("metric == 'closer_to_stationary'")
    assert (few["value"] == 0).all()
    assert few["answer"].str.contains("undecided").all()


def test_the_same_seed_gives_the_same_numbers_and_another_one_other_controls() -> None:
    frames = [
        _analyze("gpt2", seed=seed).set_index(["metric", "control", "layer"])["value"].sort_index()
        for seed in (1, 1, 2)
    ]
    assert frames[0].equals(frames[1])
    for control in ("trained", "random_walk", "random_init", "depth_shuffled"):
        first, other = (frame.xs(("turning_angle", control)) for frame in (frames[0], frames[2]))
        assert first.equals(other) == (control == "trained")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_are_measured_in_float64(dtype: torch.dtype) -> None:
    configuration = tiny.config("llama")
    inputs = tiny.windows(configuration, 2)
    full, half = tiny.loaded(configuration), tiny.loaded(configuration, dtype)
    frames = [analyze_trajectories(one, inputs, windows=2, tokens=7, inits=1) for one in (full, half)]
    assert next(half.model.parameters()).dtype == dtype
    values = [frame.query("metric == 'step_size' and control == 'trained'")["value"] for frame in frames]
    assert values[1].to_numpy() == pytest.approx(values[0].to_numpy(), rel=HALF_PRECISION_ANALYSIS)


@pytest.mark.parametrize("model", ["softmaxformer", "gaussianformer", "laplacianformer", "fiberformer"])
def test_our_vision_models_have_a_path_in_every_stage(model: str) -> None:
    def drawn(seed: int) -> torch.nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return timm.create_model(f"{model}_nano", num_classes=3).eval().requires_grad_(False)

    images = torch.randn(7, 3, 12, 20, generator=_source())
    labels = {"model": "run", "family": f"{model}_nano", "dataset": "noise", "attention": model}
    frame = analyze_pyramid(drawn(0), lambda index: drawn(index + 1), images, labels=labels, tokens=5, inits=2)
    rows = frame.query("metric == 'el_residual_free' and control == 'trained' and layer >= 0")
    assert list(rows["stage"]) == ["1", "2"]
    assert list(rows["layer"]) == [1, 1]
    assert list(frame.query("metric == 'dimension'")["value"]) == [15, 31]
    assert set(frame["nodes"]) == {"half layers"}
    assert set(frame["dataset"]) == {"noise"}
    assert frame["value"].map(math.isfinite).all()
    assert len(frame.query("metric == 'closer_to_stationary'")) == 2


def test_a_single_layer_is_no_path() -> None:
    configuration = tiny.config("gpt2")
    configuration.n_layer = 1
    loaded = tiny.loaded(configuration)
    with pytest.raises(UserError, match=f"{loaded.id} has 2 states by depth"):
        analyze_trajectories(loaded, tiny.windows(configuration), windows=2, inits=1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_named_by_model_and_layer(value: float) -> None:
    configuration = tiny.config("gpt2")
    loaded = tiny.loaded(configuration)
    loaded.model.h[1].mlp.c_fc.weight[0, 0] = value
    words = f"{loaded.id}: the states after 2 of {tiny.LAYERS} layers[\\s\\S]*weights up to that layer"
    with pytest.raises(UserError, match=words):
        analyze_trajectories(loaded, tiny.windows(configuration), windows=2, inits=1)


def test_text_is_for_language_models_and_images_are_for_vision_models() -> None:
    with pytest.raises(UserError, match="is a language model"):
        analyze_trajectories(tiny.loaded(tiny.config("gpt2")))
    with pytest.raises(UserError, match="is a vision model"):
        analyze_trajectories(tiny.loaded(tiny.config("dinov2")))


@pytest.mark.parametrize(("length", "wanted", "first"), [(7, 3, 1), (4, 9, 1), (5, 5, 0), (100, 32, 1)])
def test_tokens_are_spread_over_all_but_the_first(length: int, wanted: int, first: int) -> None:
    found = trajectories.spread_evenly(length, wanted, first)
    assert len(set(found)) == len(found) == min(wanted, length - first)
    assert found == sorted(found)
    assert found[0] >= first
    assert found[-1] < length
