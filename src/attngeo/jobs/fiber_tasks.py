"""Jobs: the Fiber Bundle Transformer and its baselines on tasks, and how long their training steps take."""

import itertools
import shutil
import time
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from attngeo.config import Preset
from attngeo.data import embedded, text
from attngeo.evaluation.macs import count_macs
from attngeo.evaluation.sequence_macs import count_sequence_macs
from attngeo.evaluation.timing import Call, interleaved, processor_time
from attngeo.fiber_bundle import tasks
from attngeo.fiber_bundle.geometry import measure
from attngeo.fiber_bundle.recipe import TaskRecipe
from attngeo.fiber_bundle.tasks import Shape, Task
from attngeo.fiber_bundle.training import Trained, optimizer_of, train, update
from attngeo.jobs.analysis import keep
from attngeo.models.fiber_bundle import FiberViT
from attngeo.paper import records
from attngeo.training.seeding import derive_seed, generator, reproducible, seeded_globals

EXPERIMENT = "Fiber bundle"
SUBJECT = "fiber"
REFERENCE = "dot"  # the model whose time the full one gets in the comparison at equal time
STEP_TIMES = "analyses/fiber_step_times.json"
MEASURED_SEQUENCES = 8

_REPEATS = 20
_SECONDS = 2.0


def step_times(preset: Preset, code_digest: str) -> list[str]:
    """Write analyses/fiber_step_times.json: processor time of a training step of every model on every task."""
    import pandas as pd

    started = time.monotonic()
    settings = preset.fiber_bundle_settings
    rows: list[dict[str, Any]] = []
    lines = []
    for name in settings.tasks:
        task, recipe = _task(preset, name), settings.recipe_of(name)
        with reproducible(1):  # as they are trained
            steps: dict[str, Call] = {model: _step(task, model, recipe) for model in settings.models}
            timings = interleaved(steps, processor_time, repeats=_REPEATS, seconds=_SECONDS)
        for model, timing in timings.items():
            rows.append(
                {
                    "metric": "step_time",
                    "task": name,
                    "model": model,
                    "value": timing.minimum_ms,
                    "unit": "ms",
                    "n": timing.repeats,
                    "spread": timing.spread_ms,
                    "spread_kind": "median minus minimum over repeats",
                }
            )
        lines.append(f"{name}: " + ", ".join(f"{model} {timings[model].minimum_ms:.1f} ms" for model in timings))
    keep(
        preset,
        pd.DataFrame(rows),
        preset.results / STEP_TIMES,
        experiment=EXPERIMENT,
        name="step times on tasks",
        code_digest=code_digest,
        params=settings.model_dump(mode="json"),
        metrics={f"step_ms {row['task']} {row['model']}": row["value"] for row in rows},
        started=started,
    )
    return lines


def train_on_task(preset: Preset, name: str, code_digest: str, *, threads: int) -> list[str]:
    """Write analyses/fiber_tasks/<task>-s<seed>.json: every model on one task with one seed; a line a training.

    All models take the same number of steps; the full one is also trained with as many as fit into the time of
    `REFERENCE`, by the step times measured before. Stopped, it goes on with the training that was under way.
    """
    import pandas as pd

    started = time.monotonic()
    settings = preset.fiber_bundle_settings
    run = preset.fiber_task_run(name)
    task, recipe = _task(preset, run.task), settings.recipe_of(run.task)
    scratch = preset.results / ".scratch" / f"fiber-{name}-{code_digest}"
    budgets = [(model, "steps", recipe) for model in settings.models]
    if SUBJECT in settings.models and REFERENCE in settings.models:
        budgets.append((SUBJECT, "time", _in_time_of_reference(preset, run.task, recipe)))
    watched_inputs = task.held_out(MEASURED_SEQUENCES)[0]
    rows: list[dict[str, Any]] = []
    lines = []
    for model, budget, own in budgets:
        watched = model == SUBJECT and budget == "steps"
        trained = train(
            partial(tasks.build, task, model),
            task,
            own,
            seed=run.seed,
            scratch=scratch / f"{model}-{budget}",
            identity={"digest": code_digest, "model": model},
            threads=threads,
            watch=(lambda live, step: measure(live, watched_inputs)) if watched else None,
            watch_at=[own.steps * part // settings.watches for part in range(1, settings.watches)],
        )
        labels = {"task": run.task, "model": model, "budget": budget, "seed": run.seed}
        rows += [labels | row for row in _outcomes(trained, task)]
        lines.append(
            f"{run.task}, {model} ({trained.steps} steps, {trained.processor_s:.0f} s): "
            f"{trained.loss:.4f} nats, {trained.accuracy:.1f} %"
        )
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
    return lines


def _task(preset: Preset, name: str) -> Task:
    settings = preset.fiber_bundle_settings
    of_task = settings.tasks[name]  # type: ignore[index]
    shape = Shape(settings.dim, settings.depth, settings.heads, settings.rank, of_task.length, of_task.symbols)
    if name == "characters":
        return tasks.characters(shape, text.documents(preset.texts, preset.root))
    if name == tasks.IMAGES:
        return tasks.images(shape, embedded.fetch(tasks.IMAGES))
    return {"copy": tasks.copy, "sort": tasks.sort, "recall": tasks.recall}[name](shape)


def _step(task: Task, variant: str, recipe: TaskRecipe) -> Call:
    """A call that takes one training step of a new model, drawing its batch included."""
    with seeded_globals(derive_seed(0, "timed model")):
        model = tasks.build(task, variant).train()
    optimizer, schedule = optimizer_of(model, recipe)
    count = itertools.count()

    def step() -> None:
        number = next(count)
        schedule.step_update(number % recipe.steps)
        update(model, optimizer, task.batch(recipe.batch, generator(0, "timed batches", number)), recipe.clip_grad)

    return step


def _in_time_of_reference(preset: Preset, name: str, recipe: TaskRecipe) -> TaskRecipe:
    """The recipe with as many steps as the full model takes in the time of the reference."""
    times = records.read(preset.results / STEP_TIMES)
    of_task = times[(times["metric"] == "step_time") & (times["task"] == name)].set_index("model")["value"]
    steps = max(1, round(recipe.steps * float(of_task[REFERENCE] / of_task[SUBJECT])))
    return replace(recipe, steps=min(recipe.steps, steps))


def _outcomes(trained: Trained, task: Task) -> list[dict[str, Any]]:
    """Loss, accuracy, cost and size of a training, and what was watched during it."""
    finished = "training_finished" if trained.watched else "baseline_finished"
    cost = _cost(trained.model, task)
    of_run: list[tuple[str, float, str, int]] = [
        ("task_loss", trained.loss, "nats", trained.tested),
        ("task_accuracy", trained.accuracy, "%", trained.tested),
        (finished, float(trained.finished), "", 1),
        ("steps", float(trained.steps), "", 1),
        ("processor_time", trained.processor_s, "s", trained.steps),
        ("parameters", float(cost["parameters"]), "", 1),
        ("gmac", cost["gmac_with_apart"], "10^9 multiply-accumulates", 1),
    ]
    rows = [{"metric": metric, "value": value, "unit": unit, "n": n} for metric, value, unit, n in of_run]
    return rows + trained.watched


def _cost(model: nn.Module, task: Task) -> dict[str, Any]:
    inputs: Tensor = task.held_out(1)[0]
    if isinstance(model, FiberViT):
        return count_macs(model, (inputs.shape[-2], inputs.shape[-1]), in_chans=inputs.shape[1])
    return count_sequence_macs(model, inputs.shape[1])  # type: ignore[arg-type]
