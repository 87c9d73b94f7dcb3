"""Tasks, the loop, rank by depth, geometry and predictions of the Fiber Bundle Transformer."""

import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from torch import Tensor, nn

from attngeo.config import load_preset
from attngeo.errors import UserError
from attngeo.evaluation.layer_inputs import layer_inputs
from attngeo.fiber_bundle import predictions, tasks
from attngeo.fiber_bundle.geometry import dense_metrics, edge_transport, heterogeneity, measure
from attngeo.fiber_bundle.gradients import gradient_errors
from attngeo.fiber_bundle.interventions import losses_without
from attngeo.fiber_bundle.predictions import CONTRADICTED, MET, OPEN, Evidence
from attngeo.fiber_bundle.rank_collapse import (
    RESIDUAL_FLOOR,
    by_depth,
    cubic_bound,
    effective_rank,
    relative_residual,
    widen,
)
from attngeo.fiber_bundle.recipe import TaskRecipe
from attngeo.fiber_bundle.significance import paired_differences, student
from attngeo.fiber_bundle.tasks import IGNORED, Shape
from attngeo.fiber_bundle.training import Trained, evaluate, train
from attngeo.layers.connection import gamma
from attngeo.training.interruption import Interrupted
from attngeo.training.seeding import generator, seeded_globals
from tests.tolerances import GRADIENT_RELATIVE, KNOWN_MATRIX_FLOAT64

ROOT = Path(__file__).parents[2]
SHAPE = Shape(dim=16, depth=2, heads=2, rank=2, length=5, symbols=11)
RECIPE = TaskRecipe(steps=7, batch=3, lr=1e-2, held_out=5)


def test_what_counts_in_copy_and_sort_is_the_second_half() -> None:
    inputs, targets = tasks.copy(SHAPE).batch(4, generator(0, "test"))
    assert inputs.shape == targets.shape == (4, 10)
    assert (inputs[:, 5] == 11).all(), "the mark"
    assert (targets[:, :5] == IGNORED).all()
    assert torch.equal(targets[:, 5:], inputs[:, :5])
    inputs, targets = tasks.sort(SHAPE).batch(4, generator(0, "test"))
    assert torch.equal(targets[:, 5:], inputs[:, :5].sort(dim=1).values)
    inputs, targets = tasks.sort_in_place(SHAPE).batch(4, generator(0, "test"))
    assert torch.equal(targets, inputs.sort(dim=1).values)


def test_recall_asks_for_values_by_their_keys_each_question_drawn_by_itself() -> None:
    inputs, targets = tasks.recall(SHAPE).batch(6, generator(0, "test"))
    assert inputs.shape == (6, 19)
    repeated = 0
    for row, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
        values = dict(zip(row[0:10:2], row[1:10:2], strict=True))
        assert set(values) == set(range(5)), "five pairs of five keys"
        asked = [place for place, target in enumerate(wanted) if target != IGNORED]
        assert asked == list(range(10, 19, 2))
        assert all(wanted[place] == values[row[place]] for place in asked)
        repeated += len({row[place] for place in asked}) < 5
    assert repeated, "or the values not yet named would tell the rest"


def test_a_guess_knows_how_often_a_target_occurs_and_nothing_else() -> None:
    assert tasks.guess(tasks.copy(SHAPE), 400) == pytest.approx(math.log(11), abs=0.02)
    assert tasks.guess(tasks.sort(SHAPE), 400) < math.log(11) - 0.2, "low symbols come first"
    assert tasks.guess(tasks.characters(SHAPE, ["a b " * 500]), 20) == pytest.approx(1.5 * math.log(2), abs=0.1)
    task = tasks.recall(SHAPE)
    inputs, targets = task.held_out(400)
    shares = [
        row[1:10:2].count(target) / 5
        for row, wanted in zip(inputs.tolist(), targets.tolist(), strict=True)
        for target in wanted
        if target != IGNORED
    ]
    assert tasks.guess(task, 400) == pytest.approx(-sum(map(math.log, shares)) / len(shares))


def test_batches_are_functions_of_their_generator_and_held_out_ones_never_change() -> None:
    for task in (tasks.copy(SHAPE), tasks.recall(SHAPE), tasks.characters(SHAPE, ["some words " * 40])):
        first, again, other = (task.batch(3, generator(0, "test", index))[0] for index in (1, 1, 2))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        assert torch.equal(task.held_out(4)[0], task.held_out(4)[0])


def test_text_that_is_held_out_is_not_trained_on() -> None:
    task = tasks.characters(SHAPE, ["a" * 85 + " " + "b" * 15])
    assert set(task.batch(50, generator(0, "test"))[0].unique().tolist()) <= {ord("a"), ord(" ")}
    assert set(task.held_out(9)[1].unique().tolist()) == {ord("b")}


def trained(folder: Path, *, watch: Callable[[nn.Module, int], Any] | None = None, **changes: Any) -> Trained:
    """A training with a checkpoint after every step."""
    task = tasks.copy(SHAPE)
    arguments: dict[str, Any] = {"recipe": RECIPE, "seed": 3, "identity": {"digest": "d1"}, "watch_at": [2, 4]}
    arguments |= changes
    recipe = arguments.pop("recipe")
    make = arguments.pop("make", lambda: tasks.build(task, "fiber"))
    return train(make, task, recipe, scratch=folder, watch=watch or weight_sum, checkpoint_every_s=0.0, **arguments)


def weight_sum(model: nn.Module, step: int) -> list[dict[str, Any]]:
    return [{"metric": "weights", "value": sum(p.double().sum().item() for p in model.parameters())}]


def test_stopped_by_a_signal_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole")
    assert [row["step"] for row in whole.watched] == [0, 2, 4, 7]

    def stop(model: nn.Module, step: int) -> list[dict[str, Any]]:
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return weight_sum(model, step)

    with pytest.raises(Interrupted):
        trained(tmp_path / "stopped", watch=stop)
    resumed = trained(tmp_path / "stopped")
    assert resumed.resumed == 1
    assert (resumed.loss, resumed.accuracy, resumed.watched) == (whole.loss, whole.accuracy, whole.watched)
    assert [point.step for point in whole.curve] == [0, 2, 4, 7]
    assert math.isnan(whole.curve[0].training)
    assert resumed.curve[1:] == whole.curve[1:]
    assert whole.curve[-1].held_out == whole.loss, "all that is held out is tested on the way, too, if it is little"
    assert whole.training_loss == whole.curve[-1].training
    assert whole.loss_on_the_way == pytest.approx(sum(point.held_out for point in whole.curve[1:]) / 3)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
    again = trained(tmp_path / "stopped")
    assert again.loss == whole.loss, "a finished training is not taken up again"
    assert again.steps == 7


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    trained(tmp_path)
    for changes, words in (
        ({"seed": 4}, "seed = 3, not 4"),
        ({"identity": {"digest": "d2"}}, "digest = d1, not d2"),
        ({"recipe": TaskRecipe(steps=8, batch=3, lr=1e-2, held_out=5)}, "steps = 7, not 8"),
    ):
        with pytest.raises(UserError, match=words):
            trained(tmp_path, **changes)


def test_the_loss_falls_and_seeds_decide_weights_and_batches(tmp_path: Path) -> None:
    longer = TaskRecipe(steps=60, batch=16, lr=1e-2, held_out=16)
    found = trained(tmp_path / "a", recipe=longer)
    assert found.finished
    assert found.loss < math.log(11) - 0.1
    assert found.tested == 16 * 5
    other = trained(tmp_path / "b", recipe=longer, seed=4)
    assert other.watched[0]["value"] != found.watched[0]["value"]


class Poisoned(nn.Module):
    """A model whose training loss is not a number from its third step on; tested, it looks as well as ever."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tasks.build(tasks.copy(SHAPE), "dot")
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.inner(tokens) * (torch.nan if self.training and self.calls >= 3 else 1.0)


def test_a_loss_that_is_not_finite_ends_the_training_and_counts_as_not_finished(tmp_path: Path) -> None:
    found = trained(tmp_path, make=Poisoned)
    assert not found.finished
    assert math.isnan(found.loss)
    assert math.isnan(found.accuracy)
    assert found.steps == 3
    assert [row["step"] for row in found.watched] == [0, 2]
    assert math.isnan(found.training_loss)


@pytest.mark.parametrize(("key", "value"), [("steps", 0), ("lr", 0.0), ("warmup", 1.0), ("clip_grad", 0.0)])
def test_values_without_meaning_are_refused(key: str, value: float) -> None:
    with pytest.raises(UserError, match=key):
        TaskRecipe(**{"steps": 3, "batch": 2, key: value})


def test_residual_and_rank_of_known_tokens() -> None:
    equal = torch.ones(3, 7, 5, dtype=torch.float64)
    assert relative_residual(equal).abs().max() <= KNOWN_MATRIX_FLOAT64
    assert (effective_rank(equal) - 1).abs().max() <= KNOWN_MATRIX_FLOAT64
    orthogonal = torch.eye(5, dtype=torch.float64)
    assert float(effective_rank(orthogonal)) == pytest.approx(5, abs=KNOWN_MATRIX_FLOAT64)
    assert float(relative_residual(orthogonal)) == pytest.approx(math.sqrt(4 / 5), abs=KNOWN_MATRIX_FLOAT64)
    assert float(relative_residual(torch.zeros(3, 2))) == 0
    assert float(relative_residual(3 * orthogonal)) == pytest.approx(float(relative_residual(orthogonal)))


def test_the_ledger_knows_what_rounding_is_recorded_as() -> None:
    from attngeo.paper.decisions.fiber_bundle import ROUNDING

    assert ROUNDING == RESIDUAL_FLOOR


def test_the_cubic_law_is_doubly_exponential() -> None:
    bound = cubic_bound([0.5, 0.05], 4)
    constant = 0.05 / 0.5**3
    for layer, value in enumerate(bound):
        power = 3**layer
        assert value == pytest.approx(constant ** ((power - 1) / 2) * 0.5**power)


@pytest.mark.parametrize("form", ["dot", "euclidean", "constant", "heterogeneous"])
def test_attention_alone_collapses_at_the_start_whatever_the_metric_and_skips_keep_it(form: str) -> None:
    last = {}
    for wiring in ("pure", "skip", "skip_mlp"):
        task = tasks.sort_in_place(Shape(16, 6, 2, 2, 7, 7), wiring)  # type: ignore[arg-type]
        rows = by_depth(tasks.build(task, form), task.held_out(3)[0])
        assert [row["depth"] for row in rows if row["metric"] == "relative_residual"] == list(range(7))
        last[wiring] = next(row["value"] for row in reversed(rows) if row["metric"] == "relative_residual")
    assert last["pure"] < 1e-9
    assert min(last["skip"], last["skip_mlp"]) > 0.1


def test_widened_stacks_attend_to_some_more_than_to_others_and_only_own_metrics_differ_by_token() -> None:
    task = tasks.sort_in_place(Shape(16, 2, 2, 2, 7, 7), "pure")
    for form in ("dot", "constant", "heterogeneous"):
        peaks = []
        for gain in (1.0, 16.0):
            with seeded_globals(5):
                model = tasks.build(task, form)
            if gain > 1:
                widen(model, gain, 5)
            layer, x, grid = layer_inputs(model, [model.trunk.blocks[0].attention], task.held_out(3)[0])[0]
            with torch.inference_mode():
                peaks.append(layer.attention_rows(x, grid, range(7)).amax(-1).mean().item())
        assert peaks[0] < 0.2 < 0.4 < peaks[1], form
        if form == "heterogeneous":
            rows = pd.DataFrame(measure(model, task.held_out(3)[0]))
            assert rows[rows["metric"] == "metric_heterogeneity"]["value"].min() > 0.2
    again = tasks.build(task, form)
    again.load_state_dict(model.state_dict())
    widen(again, 1.0, 5)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)), "by the seed"


def test_equal_metrics_are_not_heterogeneous_and_geometry_has_vanishing_controls() -> None:
    metrics = dense_metrics(torch.ones(2, 7, 3), torch.ones(2, 7, 3, 2))
    assert heterogeneity(metrics).abs().max() <= KNOWN_MATRIX_FLOAT64
    task = tasks.recall(SHAPE)
    model = tasks.build(task, "fiber")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator(0, "test")))
    rows = pd.DataFrame(measure(model, task.held_out(2)[0]))
    means = rows.groupby(["metric", "control"])["value"].mean()
    assert len(rows) == 2 * (8 + 1), "two layers, and the metrics of their feed-forwards"
    assert set(rows[rows["part"] == "feed-forward"]["metric"]) == {"metric_condition_p99"}
    assert means["curvature_proxy", "none"] > 1e-2
    assert means["torsion_proxy", "none"] > 1e-2
    assert means["transport_holonomy", "none"] > 1e-2
    assert means["transport_size", "none"] > 1e-2
    assert means["curvature_proxy", "flat"] < 1e-12
    assert means["torsion_proxy", "symmetric"] == 0
    assert not len(measure(tasks.build(task, "constant"), task.held_out(2)[0]))


def test_around_a_triangle_transports_are_multiplied_and_none_does_nothing() -> None:
    draw = generator(0, "test")
    outward, left, right = (torch.randn(5, 3, 2, generator=draw, dtype=torch.float64) for _ in range(3))
    step, value = (torch.randn(5, 3, generator=draw, dtype=torch.float64) for _ in range(2))
    found = (edge_transport(outward, left, right, step) @ value.unsqueeze(-1)).squeeze(-1)
    assert (found - (value - gamma(outward, left, right, step, value))).abs().max() <= KNOWN_MATRIX_FLOAT64
    task = tasks.copy(SHAPE)
    rows = pd.DataFrame(measure(tasks.build(task, "fiber"), task.held_out(2)[0]))
    assert not rows[rows["metric"].isin(["transport_holonomy", "transport_size"])]["value"].any(), "it starts at 0"


def test_what_is_lost_without_a_part_of_the_geometry_is_nothing_where_the_part_does_nothing() -> None:
    task = tasks.recall(SHAPE)
    with seeded_globals(5):
        model = tasks.build(task, "fiber")
    parts = {row["part"]: row["value"] for row in losses_without(model, task, 70)}
    assert set(parts) == {"attention metrics", "feed-forward metrics", "transport"}
    assert parts["transport"] == 0, "the connection starts at 0"
    before = evaluate(model, task, 70)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator(0, "test")))
    changed = {row["part"]: row["value"] for row in losses_without(model, task, 70)}
    assert all(changed.values())
    assert evaluate(model, task, 70) != before
    assert evaluate(model, task, 70) == evaluate(model, task, 70), "nothing is left of it"
    assert {row["part"] for row in losses_without(tasks.build(task, "heterogeneous"), task, 5)} == {"attention metrics"}
    assert not losses_without(tasks.build(task, "constant"), task, 5)


def test_gradients_of_every_part_are_those_of_finite_differences() -> None:
    rows = gradient_errors()
    assert {"feed-forward", "decoder", "attention with transported values"} <= {row["part"] for row in rows}
    assert max(row["value"] for row in rows) <= GRADIENT_RELATIVE


def losses(fiber: float, *, seeds: int = 3, task: str = "recall") -> list[dict[str, Any]]:
    """Records of one task where every baseline has a loss of about 1."""
    rows = []
    for seed in range(seeds):
        for model, value in (("dot", 1.0), ("more_heads", 1.0), ("constant", 1.0), ("fiber", fiber)):
            budgets = ("steps", "time") if model == "fiber" else ("steps",)
            for budget in budgets:
                shared = {"task": task, "model": model, "budget": budget, "seed": seed}
                loss = value + 0.01 * seed * (1 + (model == "dot"))
                rows += [shared | {"metric": metric, "value": loss} for metric in ("task_loss", "loss_on_the_way")]
    return rows


def differences(rows: list[dict[str, Any]]) -> pd.DataFrame:
    return paired_differences(pd.DataFrame([row for row in rows if row["metric"] == "task_loss"]))


def test_differences_are_paired_by_seed() -> None:
    frame = differences(losses(0.5))
    assert len(frame) == 4, "three baselines at equal steps, and the one whose time it is"
    against = frame[(frame["against"] == "more_heads") & (frame["budget"] == "steps")].iloc[0]
    assert against["value"] == pytest.approx(-0.5)
    assert against["spread"] == pytest.approx(0, abs=1e-12), "the seed's own share is gone"
    assert (frame["p_adjusted"] >= frame["p"]).all()
    one = differences(losses(0.5, seeds=1))
    assert one["spread"].isna().all()
    mean, half, p = student([0.1, 0.2, 0.3, 0.4, 0.5])
    assert (mean, half, p) == (pytest.approx(0.3), pytest.approx(0.19632, rel=1e-4), pytest.approx(0.01324, rel=1e-3))


NONE = [{"metric": "none", "value": 0.0}]


def judged(rows: list[dict[str, Any]], collapse: list[dict[str, Any]] | None = None) -> dict[str, float]:
    frame = pd.DataFrame(rows)
    evidence = Evidence(frame, differences(rows), pd.DataFrame(collapse or NONE))
    return {row["prediction"]: row["value"] for row in predictions.judge(evidence)}


def geometry(metric: str, start: float, end: float, control: str = "none") -> list[dict[str, Any]]:
    shared = {"metric": metric, "control": control, "task": "recall", "model": "fiber", "budget": "steps", "seed": 0}
    return [shared | {"step": step, "layer": 0, "value": value} for step, value in ((0, start), (9, end))]


def test_every_written_prediction_is_judged_and_no_other() -> None:
    text = (ROOT / "src/attngeo/fiber_bundle/PREDICTIONS.md").read_text(encoding="utf-8")
    written = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert written == list(predictions.PREDICTIONS)
    assert set(judged(losses(1.0, seeds=1)).values()) == {OPEN}, "nothing is met or contradicted without evidence"


@pytest.mark.parametrize(("fiber", "verdict"), [(0.5, MET), (1.005, OPEN), (1.5, CONTRADICTED)])
def test_losses_decide_by_their_intervals(fiber: float, verdict: float) -> None:
    found = judged(losses(fiber))
    for name in ("better_at_equal_parameters", "better_at_equal_time"):
        assert found[name] == verdict
    if verdict != OPEN:
        assert found["not_more_heads"] == found["heterogeneity_matters"] == verdict
    both = losses(fiber) + losses(1.0, task="characters")
    assert judged(both)["recall_gains_most"] == (MET if fiber < 1 else CONTRADICTED)


@pytest.mark.parametrize(("end", "verdict"), [(0.5, MET), (0.15, OPEN), (0.05, CONTRADICTED)])
def test_growth_is_judged_with_its_control(end: float, verdict: float) -> None:
    rows = geometry("curvature_proxy", 0.1, end) + geometry("curvature_proxy", 0.0, 0.0, "flat")
    assert judged(losses(1.0) + rows)["curvature_grows"] == verdict
    small = geometry("curvature_proxy", 0.001, end / 10) + geometry("curvature_proxy", 0.0, 0.0, "flat")
    assert judged(losses(1.0) + small)["curvature_grows"] == (CONTRADICTED if end < 0.1 else OPEN), "below 0.1"
    bent = geometry("curvature_proxy", 0.1, end) + geometry("curvature_proxy", 0.0, 0.1, "flat")
    assert judged(losses(1.0) + bent)["curvature_grows"] != MET
    torsion = geometry("torsion_proxy", 0.0, end / 10) + geometry("torsion_proxy", 0.0, 0.0, "symmetric")
    assert judged(losses(1.0) + torsion)["torsion_grows"] == (MET if end > 0.1 else OPEN)
    condition = geometry("metric_condition_p99", 1.0, 1e4 * end / 0.1)
    assert judged(losses(1.0) + condition)["well_conditioned"] == (CONTRADICTED if end > 0.1 else MET)


def test_what_diverged_speaks_neither_for_nor_against() -> None:
    lost = [row | {"value": math.nan} if (row["model"], row["seed"]) == ("fiber", 0) else row for row in losses(0.5)]
    assert judged(lost)["better_at_equal_parameters"] == judged(lost)["better_at_equal_time"] == OPEN
    shared = {"metric": "training_finished", "task": "recall", "model": "fiber", "budget": "steps", "seed": 0}
    ended = [shared | {"value": 0.0}]
    rows = geometry("metric_heterogeneity", 0.1, 0.5) + geometry("metric_condition_p99", 1.0, 2.0)
    rows += geometry("torsion_proxy", 0.0, 0.5) + geometry("torsion_proxy", 0.0, 0.0, "symmetric")
    names = ("metrics_differ", "well_conditioned", "torsion_grows")
    assert [judged(losses(1.0) + rows)[name] for name in names] == [MET, MET, MET]
    assert [judged(losses(1.0) + rows + ended)[name] for name in names] == [OPEN, CONTRADICTED, OPEN]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -3.0])
def test_a_metric_that_is_not_positive_is_badly_conditioned(bad: float) -> None:
    layers = [row | {"layer": 1, "value": bad} for row in geometry("metric_condition_p99", 1.0, 2.0)]
    found = judged(losses(1.0) + geometry("metric_condition_p99", 1.0, 2.0) + layers)
    assert found["well_conditioned"] == CONTRADICTED


def test_equal_time_has_to_be_equal() -> None:
    shared = {"metric": "processor_time", "task": "recall", "seed": 0}
    for ours, verdict in ((9.5, MET), (8.0, OPEN)):
        times = [shared | {"model": "dot", "budget": "steps", "value": 10.0}]
        times += [shared | {"model": "fiber", "budget": "time", "value": ours}]
        assert judged(losses(0.5) + times)["better_at_equal_time"] == verdict


def test_tasks_that_tell_nothing_are_left_out_of_comparisons() -> None:
    solved = [row | {"value": row["value"] / 1000} for row in losses(1.5, task="copy")]
    plateau = losses(1.01, task="sort")
    guess = [{"metric": "guess_loss", "task": "sort", "seed": seed, "value": 1.0} for seed in range(3)]
    rows = losses(0.5) + solved + plateau + guess
    evidence = Evidence(pd.DataFrame(rows), differences(rows), pd.DataFrame(NONE))
    found = next(row for row in predictions.judge(evidence) if row["prediction"] == "better_at_equal_parameters")
    assert (found["value"], found["n"]) == (MET, 1)
    assert "left out: copy, solved, sort, no better than a guess" in found["finding"]


def test_metrics_alone_are_told_beside_the_full_model() -> None:
    rows = losses(0.5)
    rows += [row | {"model": "heterogeneous", "value": row["value"] + 1} for row in rows if row["model"] == "constant"]
    frame = differences(rows)
    alone = frame[frame["metric"] == "metric_alone_difference"].iloc[0]
    assert (alone["value"], alone["n"]) == (pytest.approx(1), 3)
    assert math.isnan(alone["p_adjusted"])
    found = {
        row["prediction"]: row for row in predictions.judge(Evidence(pd.DataFrame(rows), frame, pd.DataFrame(NONE)))
    }
    assert found["heterogeneity_matters"]["value"] == MET
    assert "metrics alone below 0 on 0, above 0 on 1" in found["heterogeneity_matters"]["finding"]


def test_one_seed_is_open_where_seeds_are_counted() -> None:
    both = losses(0.5, seeds=1) + losses(1.0, seeds=1, task="characters")
    assert judged(both)["recall_gains_most"] == OPEN


@pytest.mark.parametrize(("residual", "verdict"), [(1e-3, MET), (3e-6, OPEN), (1e-7, CONTRADICTED)])
def test_rank_survives_by_ten_times_that_of_dot(residual: float, verdict: float) -> None:
    collapse = [
        {"metric": "last_layer_relative_residual", "phase": "trained", "form": form, "seed": seed, "value": value}
        for seed in range(3)
        for form, value in (("dot", 1e-6), ("heterogeneous", residual))
    ]
    assert judged(losses(1.0), collapse)["rank_survives_training"] == verdict
    rounding = [row | {"value": row["value"] * 1e-12} for row in collapse]
    assert judged(losses(1.0), rounding)["rank_survives_training"] == CONTRADICTED, "all of it is rounding"


@pytest.mark.parametrize(
    ("losses", "following"),
    [
        ({}, 0.1),
        ({0.1: 1.0}, 0.2),
        ({0.1: 1.0, 0.2: 0.5, 0.4: 0.7}, None),
        ({0.1: 1.0, 0.2: 0.7, 0.4: 0.5}, 0.8),
        ({0.1: 1.0, 0.2: 0.7, 0.4: 0.5, 0.8: 0.6}, None),
        ({0.1: 1.0, 0.2: 0.7, 0.4: 0.5, 0.8: math.nan}, None),
        ({0.1: 1.0, 0.2: 0.7, 0.4: 0.5, 0.8: 0.4}, 1.6),
        ({0.1: 1.0, 0.2: 0.7, 0.4: 0.5, 0.8: 0.4, 1.6: 0.3}, 3.2),
        ({0.1: 1.0, 0.2: 0.7, 0.4: 0.5, 0.8: 0.4, 1.6: 0.3, 3.2: 0.2}, None),
        ({0.1: 0.5, 0.2: 0.5, 0.4: 0.5}, 0.05),
        ({0.1: math.nan, 0.2: math.nan, 0.4: math.nan}, 0.05),
    ],
)
def test_rates_are_tried_beyond_an_end_that_is_the_best(losses: dict[float, float], following: float | None) -> None:
    from attngeo.jobs.fiber_tasks import next_rate

    assert next_rate((0.1, 0.2, 0.4), losses) == following


def test_a_rate_is_as_good_as_the_worse_of_its_seeds(tmp_path: Path) -> None:
    from attngeo.jobs import fiber_tasks
    from attngeo.paper import records

    shutil.copytree(ROOT / "config", tmp_path / "config")
    preset = load_preset(tmp_path, "smoke")
    tried = {0.1: (0.9, 0.8), 0.2: (0.1, math.nan), 0.4: (0.1, 1.0), 0.8: (0.8, 0.9)}
    rows = [
        {"metric": "training_loss", "model": model, "rate": rate, "seed": seed, "value": loss, "n": 1}
        for model in preset.fiber_bundle_settings.models
        for rate, losses in tried.items()
        for seed, loss in enumerate(losses)
    ]
    path = preset.results / "analyses/fiber_rates/recall.json"
    records.write(path, records.from_frame(pd.DataFrame(rows), source="test"))
    assert set(fiber_tasks._rates(preset, "recall").values()) == {0.1}, "of equals the lower, and no rate that fails"


def test_jobs_of_the_smallest_preset_write_what_figures_and_the_ledger_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attngeo.jobs import fiber_bundle, fiber_tasks, rank_collapse
    from attngeo.paper import claims, records
    from attngeo.paper.figures import fig14_rank_collapse, fig15_curvature_torsion
    from attngeo.paper.tables import tab08_fiber_bundle
    from attngeo.paper.targets import FIGURES, TABLES

    shutil.copytree(ROOT / "config", tmp_path / "config")
    place = tmp_path / "config/smoke/config.yaml"
    content = yaml.safe_load(place.read_text(encoding="utf-8"))
    tiny = {"copy": {"steps": 2, "batch": 2, "length": 3, "symbols": 4}, "characters": {"steps": 2, "length": 7}}
    content["fiber_bundle"] |= {"tasks": tiny, "seeds": [0, 1], "models": ["dot", "constant", "fiber"]}
    place.write_text(yaml.safe_dump(content), encoding="utf-8")
    preset = load_preset(tmp_path, "smoke")
    with pytest.raises(UserError, match="the learning rates of copy have not been chosen") as refused:
        list(fiber_tasks.train_on_task(preset, "copy-s0", "d", threads=1))
    assert refused.value.remedy == "run: attngeo analyze fiber-rates copy --preset smoke"
    for task in preset.fiber_rate_tasks:
        tried = list(fiber_tasks.choose_rates(preset, task, "d", threads=1))
        fewest, most = (3 * rates * len(fiber_tasks.RATE_SEEDS) for rates in (3, 2 + fiber_tasks.FURTHER_RATES))
        assert fewest <= len(tried) <= most, "one of two is always at an end"
    for name in preset.fiber_task_runs:
        assert len(list(fiber_tasks.train_on_task(preset, name, "d", threads=1))) == 4
    assert len(list(rank_collapse.rank_collapse(preset, 0, "d", threads=1))) == 3 * 4
    assert len(fiber_bundle.summary(preset, "d")) == len(predictions.PREDICTIONS)
    assert not list((preset.results / ".scratch").iterdir()), "nothing is left of finished trainings"
    paths = {
        name: [preset.results / path for path in target.inputs(preset)]
        for name, target in (("fig14", FIGURES["fig14"]), ("fig15", FIGURES["fig15"]), ("tab8", TABLES["tab8"]))
    }
    assert all(path.is_file() for of_target in paths.values() for path in of_target)
    assert len(fig14_rank_collapse.draw(paths["fig14"]).data)
    assert len(fig15_curvature_torsion.draw(paths["fig15"]).data)
    table = tab08_fiber_bundle.tabulate(paths["tab8"]).frame
    assert len(table) == 2 * 4
    assert set(table["rate"]) <= {1e-3 * 2.0**power for power in range(-3, 5)}
    weights = preset.results / "fiber_models/copy-s1"
    assert {path.stem for path in weights.iterdir()} == {"dot-steps", "constant-steps", "fiber-steps", "fiber-time"}
    sizes = records.read(preset.results / "analyses/fiber_tasks/copy-s0.json")
    assert {"guess_loss", "curve_held_out_loss", "loss_without"} <= set(sizes["metric"])
    assert set(sizes[sizes["metric"] == "loss_without"]["part"]) == {
        "attention metrics",
        "feed-forward metrics",
        "transport",
    }
    sizes = sizes[sizes["metric"] == "parameters"]["value"]
    assert sizes.max() <= 1.01 * sizes.min() * 1.01
    verdicts = {verdict.claim.id: verdict for verdict in claims.evaluate("smoke", preset.results)}
    assert set(predictions.PREDICTIONS) == set(verdicts["P4.d"].numbers)
    assert "gradient error" in verdicts["P4.c"].reason
    assert "1 seeds of at least 5" in verdicts["P4.e"].reason
