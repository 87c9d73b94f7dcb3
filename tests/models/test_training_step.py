"""A training step: the layers' ratios, the loop around a model, the share of the operators."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch

from attngeo.evaluation import step_share, training_step
from attngeo.evaluation.apart import apart
from attngeo.evaluation.single_layer import build
from attngeo.evaluation.token_sizes import FUSED_SOFTMAX, PLAIN_SOFTMAX
from attngeo.evaluation.training_step import GOALS, KINDS, LARGEST_ERRORS, LayerSize
from attngeo.jobs import loop_overhead
from attngeo.ops import backend
from attngeo.training.bare import COST_RECIPE, BareStep
from attngeo.training.loop import train
from attngeo.training.seeding import reproducible, seed_everything

ROOT = Path(__file__).resolve().parents[2]
SIZE = LayerSize(3, 2, 121, 8)


def found(rows: list[training_step.Row], metric: str, **labels: object) -> list[training_step.Row]:
    chosen = [row for row in rows if row["metric"] == metric]
    return [row for row in chosen if all(row.get(name) == value for name, value in labels.items())]


def test_every_layer_is_right_and_the_ratios_are_of_one_run() -> None:
    rows = apart(training_step.measure, SIZE, repeats=2, seconds=0.01)
    for kind in KINDS:
        (error,) = found(rows, "error", attention=kind)
        assert error["value"] <= LARGEST_ERRORS[kind]
    times = {row["attention"]: row["value"] for row in found(rows, "step_ms")}
    memory = {row["attention"]: row["value"] for row in found(rows, "step_memory_mib")}
    for metric, values in (("step_time_ratio", times), ("step_memory_ratio", memory)):
        ratios = {(row["attention"], row["against"]): row["value"] for row in found(rows, metric)}
        assert set(ratios) == {
            ("laplacian", PLAIN_SOFTMAX),
            ("laplacian", FUSED_SOFTMAX),
            (FUSED_SOFTMAX, PLAIN_SOFTMAX),
        }
        for (kind, against), ratio in ratios.items():
            assert ratio == pytest.approx(values[kind] / values[against], nan_ok=True)
    (laplacian,) = found(rows, "step_ms", attention="laplacian")
    assert "laplacian_kernel: " in laplacian["backend"]


def test_a_wrong_layer_is_reported_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(kind: str, **options: object) -> object:
        layer = build(kind, **options)  # type: ignore[arg-type]
        if kind == FUSED_SOFTMAX:
            torch.nn.init.constant_(layer.projection.bias, 0.5)  # type: ignore[arg-type, union-attr]
        return layer

    monkeypatch.setattr(training_step, "build", spoilt)
    monkeypatch.setattr(training_step, "apart", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(training_step, "keep_pages", lambda: None)
    rows = training_step.measure(SIZE, repeats=1, seconds=0.001)
    (refused,) = found(rows, "not_timed")
    assert refused["attention"] == FUSED_SOFTMAX
    assert refused["why"].startswith("wrong: error")
    assert {row["attention"] for row in found(rows, "step_ms")} == {"laplacian", PLAIN_SOFTMAX}
    assert [row["against"] for row in found(rows, "step_time_ratio")] == [PLAIN_SOFTMAX]


def test_goals_are_judged_at_their_sizes_alone() -> None:
    layer = training_step.GOAL_SIZE._asdict() | {"attention": "laplacian", "against": PLAIN_SOFTMAX}
    model = training_step.GOAL_MODEL
    rows = [
        layer | {"metric": "step_time_ratio", "value": 0.5},
        layer | {"metric": "step_memory_ratio", "value": 0.26},
        model | {"metric": "loop_overhead", "value": 0.01},
    ]
    assert [verdict for _, _, verdict in training_step.judge(rows)] == ["met", "missed", "met"]
    others = [
        rows[0] | {"tokens": 49},
        rows[1] | {"against": FUSED_SOFTMAX},
        rows[2] | {"batch": 8},
    ]
    judged = training_step.judge(others)
    assert [goal for goal, _, _ in judged] == list(GOALS)
    assert all(math.isnan(value) and verdict == "not measured" for _, value, verdict in judged)


def test_the_overhead_is_what_the_loop_takes_beyond_bare_steps() -> None:
    rows = {row["metric"]: row for row in apart(loop_overhead.measure, "nano", 7, 3, repeats=2)}
    assert set(rows) == {"loop_step_ms", "bare_step_ms", "loading_ms", "loop_overhead", "loading_share"}
    assert all(row["n"] == 2 and row["spread"] >= 0 for row in rows.values())
    assert 0 < rows["loading_ms"]["value"] < rows["loop_step_ms"]["value"]
    assert rows["bare_step_ms"]["value"] > 0


def test_bare_steps_do_what_the_loop_does(tmp_path: Path) -> None:
    """With a constant rate nothing else may differ: the averaged weights are the loop's, bit for bit."""
    recipe = replace(COST_RECIPE, batch_size=7, images_per_epoch=21, lr=1e-3, min_lr=1e-3, ema_decay=0.9)
    training, validation = loop_overhead._batches(tmp_path, recipe)

    def model() -> torch.nn.Module:
        seed_everything(0)
        made: torch.nn.Module = timm.create_model("laplacianformer_nano", num_classes=loop_overhead.CLASSES)
        return made

    train(
        model(), training, validation, recipe, seed=0, run_dir=tmp_path / "run", scratch=tmp_path / "scratch", threads=1
    )
    step = BareStep(model(), recipe)
    training.set_epoch(0)
    with reproducible(1):
        for images, labels in training:
            step(images, labels)
    expected = safetensors.torch.load_file(tmp_path / "run" / "weights.safetensors")
    for name, tensor in step.average.module.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_the_share_is_of_our_operators_and_softmax_has_none_of_them() -> None:
    rows = step_share.measure("nano", 3, repeats=2, seconds=0.01)
    shares = {(row["attention"], row["form"], row["operators"]): row for row in found(rows, "operator_share")}
    if not backend._extension_problem:
        for kind in step_share.KERNEL_KINDS:
            assert 0 < shares[kind, "attngeo", "attngeo::"]["value"] < 1
            assert "compiled" in shares[kind, "attngeo", "attngeo::"]["backend"]
    for kind in step_share.KERNEL_KINDS:
        assert shares[kind, "attngeo naive", "attngeo::"]["value"] == 0
        assert "compiled" not in shares[kind, "attngeo naive", "attngeo::"]["backend"]
        (ratio,) = found(rows, "step_ratio", attention=kind)
        times = {row["form"]: row["value"] for row in found(rows, "step_ms", attention=kind)}
        assert ratio["value"] == pytest.approx(times["attngeo naive"] / times["attngeo"])
    assert shares["softmax", "torch", "attngeo::"]["value"] == 0
    assert 0 < shares["softmax", "torch", "scaled_dot_product"]["value"] < 1


def test_the_benchmark_prints_every_number_and_the_goals() -> None:
    command = [sys.executable, "-m", "benchmarks.training_step", "--quick", "--repeats", "2", "--seconds", "0.01"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for words in ("step_ms laplacian", "loop_overhead laplacian", "operator_share laplacian attngeo"):
        assert words in done.stdout
    goals = done.stdout.partition("goals")[2]
    assert goals.count("not measured") == len(GOALS)
    assert "epoch" not in done.stdout
