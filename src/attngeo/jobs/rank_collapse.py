"""Job: rank collapse of every metric and wiring, at initialisation and trained."""

import shutil
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from torch import nn

from attngeo.config import Preset
from attngeo.fiber_bundle import tasks
from attngeo.fiber_bundle.rank_collapse import KEPT, RESIDUAL_FLOOR, WIDE, by_depth, cubic_bound, widen
from attngeo.fiber_bundle.tasks import Sequences, Shape
from attngeo.fiber_bundle.training import Rows, train
from attngeo.jobs.analysis import keep
from attngeo.models.fiber_bundle import Wiring
from attngeo.training.seeding import derive_seed, seeded_globals

WIRINGS: tuple[Wiring, ...] = ("pure", "skip", "skip_mlp")
MEASURED_SEQUENCES = 8
# Stacks that are trained, by the gain of their weights: the names of their phases before and after. From the usual
# start a deep stack of attention alone hands no gradient back, so that training can change nothing.
TRAINED = {1.0: ("init", "trained"), WIDE[0]: (f"wide {WIDE[0]:g}", f"wide {WIDE[0]:g} trained")}


def rank_collapse(preset: Preset, seed: int, code_digest: str, *, threads: int) -> Iterator[str]:
    """Write analyses/rank_collapse/s<seed>.json: every metric and wiring at initialisation and trained; a line each.

    Label `phase`: init, trained; "wide 8", "wide 16": at initialisation by `widen`, with weights so many times; and
    "wide 8 trained", from that start.
    """
    import pandas as pd

    started = time.monotonic()
    settings = preset.fiber_bundle_settings.collapse
    shape = Shape(settings.dim, settings.depth, settings.heads, settings.rank, settings.length, settings.symbols)
    scratch = preset.results / ".scratch" / f"rank-collapse-s{seed}-{code_digest}"
    rows: list[dict[str, Any]] = []
    for wiring in WIRINGS:
        task = tasks.sort_in_place(shape, wiring)
        inputs = task.held_out(MEASURED_SEQUENCES)[0]
        for form in settings.forms:
            found: list[dict[str, Any]] = []
            losses = []
            for gain, (start, end) in TRAINED.items():
                trained = train(
                    partial(_stack, task, form, gain, seed),
                    task,
                    settings.recipe,
                    seed=seed,
                    scratch=scratch / f"{form}-{wiring}-{start.replace(' ', '-')}",
                    identity={"digest": code_digest, "form": form, "wiring": wiring, "start": start},
                    threads=threads,
                    watch=lambda live, step, inputs=inputs: by_depth(live, inputs),  # type: ignore[misc]
                )
                found += _by_phase(trained.watched, start, end)
                loss = {"metric": "task_loss", "phase": end, "value": trained.loss, "unit": "nats", "n": trained.tested}
                found.append(loss)
                losses.append(f"{trained.loss:.3f}")
            for gain in WIDE:
                if gain not in TRAINED:
                    with seeded_globals(derive_seed(seed, "initial weights")):
                        stack = _stack(task, form, gain, seed)
                    found += [row | {"phase": f"wide {gain:g}"} for row in by_depth(stack, inputs)]
            rows += [{"form": form, "wiring": wiring, "seed": seed} | row for row in found]
            yield f"{wiring}, {form}: {_last_residuals(found)}; {' and '.join(losses)} nats"
    more = [*_bound(rows, settings.depth, seed), *_last_layers(rows, settings.depth), *_layers_kept(rows)]
    frame = pd.DataFrame([*rows, *more])
    keep(
        preset,
        frame,
        preset.results / "analyses" / "rank_collapse" / f"s{seed}.json",
        experiment="Fiber bundle",
        name=f"rank collapse, seed {seed}",
        code_digest=code_digest,
        params=settings.model_dump(mode="json") | {"seed": seed},
        metrics={
            f"residual {row['wiring']} {row['form']} {row['phase']}": row["value"]
            for row in rows
            if row["metric"] == "relative_residual" and row["depth"] == settings.depth
        },
        started=started,
    )
    shutil.rmtree(scratch, ignore_errors=True)


def _stack(task: Sequences, form: str, gain: float, seed: int) -> nn.Module:
    """A new model, widened but for a gain of 1; drawn from torch's global generator and the seed."""
    model = tasks.build(task, form)
    if gain != 1:
        widen(model, gain, seed)
    return model


def _by_phase(watched: Rows, start: str, end: str) -> list[dict[str, Any]]:
    """What was watched before the first step and after the last, labelled by phase instead of step."""
    last = max(row["step"] for row in watched)
    phases = {last: end} | {0: start}  # of a training that diverged only the start was watched
    return [
        {k: v for k, v in row.items() if k != "step"} | {"phase": phases[row["step"]]}
        for row in watched
        if row["step"] in phases
    ]


def _last_layers(rows: Iterable[dict[str, Any]], depth: int) -> list[dict[str, Any]]:
    """Metric `last_layer_relative_residual` of stacks of attention alone: rounding counts as `RESIDUAL_FLOOR`."""
    return [
        {**row, "metric": "last_layer_relative_residual", "value": max(row["value"], RESIDUAL_FLOOR)}
        for row in rows
        if row["metric"] == "relative_residual" and row["depth"] == depth and row["wiring"] == "pure"
    ]


def _layers_kept(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metric `layers_kept` of stacks of attention alone: behind how many layers the residual is at least `KEPT`."""
    counts: dict[tuple[str, str, int], int] = {}
    for row in rows:
        if row["metric"] == "relative_residual" and row["wiring"] == "pure" and row["depth"]:
            key = (row["form"], row["phase"], row["seed"])
            counts[key] = counts.get(key, 0) + (row["value"] >= KEPT)
    return [
        {"metric": "layers_kept", "wiring": "pure", "form": form, "phase": phase, "seed": seed, "value": count, "n": 1}
        for (form, phase, seed), count in counts.items()
    ]


def _bound(rows: Iterable[dict[str, Any]], depth: int, seed: int) -> list[dict[str, Any]]:
    """The doubly exponential law through the first layer of the pure stack of dot products at initialisation."""
    labels = {"form": "dot", "wiring": "pure", "phase": "init", "metric": "relative_residual"}
    measured = [row for row in rows if all(row.get(name) == value for name, value in labels.items())]
    residuals = [row["value"] for row in sorted(measured, key=lambda row: row["depth"])]
    if len(residuals) < 2:
        return []
    return [
        {
            **labels,
            "metric": "cubic_bound",
            "form": "bound",
            "seed": seed,
            "depth": place,
            "value": value,
            "n": 1,
            "origin": "derived",
        }
        for place, value in enumerate(cubic_bound(residuals, depth))
    ]


def _last_residuals(rows: list[dict[str, Any]]) -> str:
    residuals = [row for row in rows if row["metric"] == "relative_residual"]
    deepest = max(row["depth"] for row in residuals)
    return ", ".join(f"{row['phase']} {row['value']:.1e}" for row in residuals if row["depth"] == deepest)
