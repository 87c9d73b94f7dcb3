"""Jobs: the Fiber Bundle Transformer and its baselines on tasks, and which learning rate each of them gets."""

import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor, nn

from attngeo.config import Preset
from attngeo.config.settings import FiberBundleConfig
from attngeo.data import embedded, text
from attngeo.errors import UserError
from attngeo.evaluation.macs import count_macs
from attngeo.evaluation.sequence_macs import count_sequence_macs
from attngeo.fiber_bundle import tasks
from attngeo.fiber_bundle.geometry import measure
from attngeo.fiber_bundle.interventions import losses_without
from attngeo.fiber_bundle.recipe import TaskRecipe
from attngeo.fiber_bundle.tasks import Shape, Task
from attngeo.fiber_bundle.training import Trained, train
from attngeo.files import write_aside
from attngeo.jobs.analysis import keep
from attngeo.models.fiber_bundle import FiberViT
from attngeo.paper import records

EXPERIMENT = "Fiber bundle"
SUBJECT = "fiber"
REFERENCE = "dot"  # the model whose time the full one gets in the comparison at equal time
MEASURED_SEQUENCES = 8
RATE_SEEDS = (1_000_003, 1_000_033)  # no result has one of these
FURTHER_RATES = 3  # tried at most beyond those that a preset names


def choose_rates(preset: Preset, name: str, code_digest: str, *, threads: int) -> Iterator[str]:
    """Write analyses/fiber_rates/<task>.json: the training loss of every model at every rate; a line a training.

    The loss is the mean over the last part of the steps, of each of `RATE_SEEDS`: nothing held out is read. Where the
    best rate is the lowest or the highest, half or twice it is tried, too.
    """
    import pandas as pd

    started = time.monotonic()
    settings = preset.fiber_bundle_settings
    task = _task(preset, name)
    scratch = preset.results / ".scratch" / f"fiber-rates-{name}-{code_digest}"
    rows: list[dict[str, Any]] = []
    for model in settings.models:
        losses: dict[float, float] = {}
        while (rate := next_rate(settings.rates, losses)) is not None:
            recipe = settings.recipe_of(name, rate)
            of_rate: list[float] = []
            for seed in RATE_SEEDS:
                trained = train(
                    partial(tasks.build, task, model),
                    task,
                    recipe,
                    seed=seed,
                    scratch=scratch / f"{model}-{rate:g}-{seed}",
                    identity={"digest": code_digest, "model": model},
                    threads=threads,
                    watch_at=_watch_at(recipe, settings),
                )
                of_rate.append(trained.training_loss)
                labels = {"metric": "training_loss", "task": name, "model": model, "rate": rate, "seed": seed}
                rows.append(labels | {"value": trained.training_loss, "unit": "nats", "n": 1})
                yield f"{name}, {model} at {rate:g}: {trained.training_loss:.4f} nats in training"
            losses[rate] = worst(of_rate)
    frame = pd.DataFrame(rows)
    keep(
        preset,
        frame,
        preset.results / "analyses" / "fiber_rates" / f"{name}.json",
        experiment=EXPERIMENT,
        name=f"rates of {name}",
        code_digest=code_digest,
        params=settings.model_dump(mode="json") | {"task": name},
        metrics={f"training_loss {row['model']} {row['rate']:g} {row['seed']}": row["value"] for row in rows},
        started=started,
    )
    shutil.rmtree(scratch, ignore_errors=True)


def next_rate(named: Sequence[float], losses: Mapping[float, float]) -> float | None:
    """The rate to try after those in `losses` (NaN where a training diverged); None where the search is over.

    First those named; then half the lowest or twice the highest, while that end has the lowest loss of all (of equals
    the lower rate has it), `FURTHER_RATES` times at most.
    """
    left = [rate for rate in named if rate not in losses]
    if left:
        return left[0]
    best = min(losses, key=lambda rate: (math.inf if math.isnan(losses[rate]) else losses[rate], rate))
    if len(losses) >= len(set(named)) + FURTHER_RATES or min(losses) < best < max(losses):
        return None
    return best / 2 if best == min(losses) else best * 2


def worst(losses: Sequence[float]) -> float:
    """The largest loss, NaN if one is: a rate at which one seed fails is no rate to train others at."""
    return math.nan if any(map(math.isnan, losses)) else max(losses)


def train_on_task(preset: Preset, name: str, code_digest: str, *, threads: int) -> Iterator[str]:
    """Write analyses/fiber_tasks/<task>-s<seed>.json: every model on one task with one seed; a line a training.

    All models take the same number of steps; the full one is also trained with as many as fit into the time that
    `REFERENCE` took beside it. Weights are kept in fiber_models/<task>-s<seed>. Stopped, it goes on with the training
    that was under way.
    """
    import pandas as pd

    started = time.monotonic()
    settings = preset.fiber_bundle_settings
    run = preset.fiber_task_run(name)
    task = _task(preset, run.task)
    rates = _rates(preset, run.task)
    scratch = preset.results / ".scratch" / f"fiber-{name}-{code_digest}"
    watched_inputs = task.held_out(MEASURED_SEQUENCES)[0]
    rows: list[dict[str, Any]] = []
    took: dict[str, float] = {}  # seconds a step

    def one(model: str, budget: str, recipe: TaskRecipe) -> str:
        watched = model == SUBJECT and budget == "steps"
        trained = train(
            partial(tasks.build, task, model),
            task,
            recipe,
            seed=run.seed,
            scratch=scratch / f"{model}-{budget}",
            identity={"digest": code_digest, "model": model},
            threads=threads,
            watch=(lambda live, step: measure(live, watched_inputs)) if watched else None,
            watch_at=_watch_at(recipe, settings),
        )
        took[model] = trained.processor_s / trained.steps
        _keep_weights(trained.model, preset.results / "fiber_models" / name / f"{model}-{budget}.safetensors")
        found = _outcomes(trained, task, model, recipe)
        if trained.finished:
            found += losses_without(trained.model, task, recipe.held_out)
        rows.extend({"task": run.task, "model": model, "budget": budget, "seed": run.seed} | row for row in found)
        return (
            f"{run.task}, {model} ({trained.steps} steps at equal {budget}, {trained.processor_s:.0f} s): "
            f"{trained.loss:.4f} nats, {trained.accuracy:.1f} %"
        )

    for model in settings.models:
        yield one(model, "steps", settings.recipe_of(run.task, rates[model]))
    if SUBJECT in took and REFERENCE in took:
        recipe = settings.recipe_of(run.task, rates[SUBJECT])
        steps = max(1, round(recipe.steps * took[REFERENCE] / took[SUBJECT]))
        yield one(SUBJECT, "time", replace(recipe, steps=min(recipe.steps, steps)))
    floor = {"metric": "guess_loss", "task": run.task, "seed": run.seed, "n": settings.held_out, "unit": "nats"}
    rows.append(floor | {"value": tasks.guess(task, settings.held_out)})
    keep(
        preset,
        pd.DataFrame(rows),
        preset.results / "analyses" / "fiber_tasks" / f"{name}.json",
        experiment=EXPERIMENT,
        name=f"task {name}",
        code_digest=code_digest,
        params=settings.model_dump(mode="json") | {"task": run.task, "seed": run.seed},
        metrics={
            f"{row['metric']} {row['model']} {row['budget']}": row["value"]
            for row in rows
            if row["metric"] in ("task_loss", "task_accuracy")
        },
        started=started,
    )
    shutil.rmtree(scratch, ignore_errors=True)


def _task(preset: Preset, name: str) -> Task:
    settings = preset.fiber_bundle_settings
    of_task = settings.tasks[name]  # type: ignore[index]
    shape = Shape(settings.dim, settings.depth, settings.heads, settings.rank, of_task.length, of_task.symbols)
    if name == "characters":
        return tasks.characters(shape, text.documents(preset.texts, preset.root))
    if name == tasks.IMAGES:
        return tasks.images(shape, embedded.fetch(tasks.IMAGES))
    return {"copy": tasks.copy, "sort": tasks.sort, "recall": tasks.recall}[name](shape)


def _watch_at(recipe: TaskRecipe, settings: FiberBundleConfig) -> list[int]:
    return [recipe.steps * part // settings.watches for part in range(1, settings.watches)]


def _rates(preset: Preset, task: str) -> dict[str, float]:
    """The rate of every model: the only one, or that whose worst training loss is the lowest, of equals the lower."""
    settings = preset.fiber_bundle_settings
    if len(settings.rates) == 1:
        return dict.fromkeys(settings.models, settings.rates[0])
    path = preset.results / "analyses" / "fiber_rates" / f"{task}.json"
    if not path.is_file():
        raise UserError(
            f"the learning rates of {task} have not been chosen: there is no {path}",
            f"run: attngeo analyze fiber-rates {task} --preset {preset.name}",
        )
    found = records.read(path)
    rates = {}
    for model in settings.models:
        of_model = found[found["model"] == model]
        tried = {rate: worst(list(of_model["value"][of_model["rate"] == rate])) for rate in set(of_model["rate"])}
        tried = {rate: loss for rate, loss in tried.items() if not math.isnan(loss)}
        if not tried:
            raise UserError(f"{model} diverged on {task} at every rate", "give fiber_bundle lower rates")
        rates[str(model)] = float(min(tried, key=lambda rate: (tried[rate], rate)))
    return rates


def _keep_weights(model: nn.Module, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_aside(path, "wb") as stream:
        stream.write(safetensors.torch.save({name: value.contiguous() for name, value in model.state_dict().items()}))


def _outcomes(trained: Trained, task: Task, model: str, recipe: TaskRecipe) -> list[dict[str, Any]]:
    """Loss, accuracy, cost and size of a training, its curve, and what was watched during it."""
    finished = "training_finished" if model == SUBJECT else "baseline_finished"
    cost = _cost(trained.model, task)
    of_run: list[tuple[str, float, str, int]] = [
        ("task_loss", trained.loss, "nats", trained.tested),
        ("task_accuracy", trained.accuracy, "%", trained.tested),
        ("loss_on_the_way", trained.loss_on_the_way, "nats", len(trained.curve) - 1),
        (finished, float(trained.finished), "", 1),
        ("rate", recipe.lr, "", 1),
        ("steps", float(trained.steps), "", 1),
        ("processor_time", trained.processor_s, "s", trained.steps),
        ("parameters", float(cost["parameters"]), "", 1),
        ("gmac", cost["gmac_with_apart"], "10^9 multiply-accumulates", 1),
    ]
    rows = [{"metric": metric, "value": value, "unit": unit, "n": n} for metric, value, unit, n in of_run]
    for point in trained.curve:
        of_point = {"step": point.step, "unit": "nats", "n": 1}
        rows.append(of_point | {"metric": "curve_held_out_loss", "value": point.held_out})
        if point.step:  # before the first one there is no other
            rows.append(of_point | {"metric": "curve_training_loss", "value": point.training})
    return rows + trained.watched


def _cost(model: nn.Module, task: Task) -> dict[str, Any]:
    inputs: Tensor = task.held_out(1)[0]
    if isinstance(model, FiberViT):
        return count_macs(model, (inputs.shape[-2], inputs.shape[-1]), in_chans=inputs.shape[1])
    return count_sequence_macs(model, inputs.shape[1])  # type: ignore[arg-type]
