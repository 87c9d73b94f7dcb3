"""A small training loop with a budget of steps: killed at any moment and started again it ends with the same bits."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from timm.optim import param_groups_weight_decay
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from attngeo.errors import UserError
from attngeo.fiber_bundle.recipe import TaskRecipe
from attngeo.fiber_bundle.tasks import IGNORED, Task
from attngeo.training import checkpoint
from attngeo.training.interruption import Interrupted, Interruption
from attngeo.training.seeding import derive_seed, generator, reproducible, seeded_globals

Rows = list[dict[str, Any]]
Watch = Callable[[nn.Module, int], Rows]  # what a model and the number of its steps are measured by

_TESTED_AT_ONCE = 64
_ON_THE_WAY = 256  # of what is held out, tested at each watch


@dataclass(frozen=True)
class Point:
    """Losses (nats) at a watch: mean over the training steps since the one before, and on a part of what is held out.

    Before the first step there is no training loss (NaN).
    """

    step: int
    training: float
    held_out: float


@dataclass
class Progress:
    """How far a training has come; a checkpoint holds it beside the weights and the optimizer's state."""

    step: int = 0
    processor_s: float = 0.0  # of the steps alone
    resumed: int = 0  # times
    diverged_at: int | None = None  # step whose loss or gradient was not finite: the training ends there
    loss_sum: float = 0.0  # of the steps since the last watch
    loss_count: int = 0
    curve: list[Point] = field(default_factory=list)
    watched: Rows = field(default_factory=list)


@dataclass(frozen=True)
class Trained:
    """A finished training: the model as it is then, losses on what is held out and on the way, what it took."""

    model: nn.Module
    loss: float  # nats, mean over the targets that count; NaN if it diverged
    accuracy: float  # percent of the targets that count; NaN if it diverged
    tested: int
    steps: int
    processor_s: float
    resumed: int
    finished: bool
    curve: list[Point]
    watched: Rows

    @property
    def training_loss(self) -> float:
        """Mean over the training steps behind the last watch but one (nats); NaN if it diverged."""
        return self.curve[-1].training if self.finished else math.nan

    @property
    def loss_on_the_way(self) -> float:
        """Mean held-out loss (nats) over the watches behind the start; NaN if it diverged.

        Some tasks are learnt at once or not at all, so that the loss at the end is nothing or that of a guess.
        """
        return fmean(point.held_out for point in self.curve[1:]) if self.finished else math.nan


def train(
    make: Callable[[], nn.Module],
    task: Task,
    recipe: TaskRecipe,
    *,
    seed: int,
    scratch: Path,
    identity: Mapping[str, Any],
    threads: int = 1,
    watch: Watch | None = None,
    watch_at: Sequence[int] = (),
    checkpoint_every_s: float = 20.0,
) -> Trained:
    """Train the model that `make` builds, or go on with the training whose checkpoints are in `scratch`.

    Initial weights are drawn from `seed` and batches from (seed, step), so that models with one seed see the same
    batches and an interruption changes nothing. Before the first step, after each of `watch_at` and after the last
    losses are noted and `watch` is called. The checkpoint of a finished training stays, so that a job of many trainings
    goes on with the next; the caller removes `scratch`. A loss or a gradient that is not finite ends the training,
    which then counts as not finished.

    Raises UserError for a checkpoint of another identity (code digest, recipe, seed, threads, torch), Interrupted
    (status 128 + signal) after a signal.
    """
    whole = {
        **identity,
        **asdict(recipe),
        "task": task.name,
        "seed": seed,
        "threads": threads,
        "torch": str(torch.__version__),
    }
    with checkpoint.claim(scratch), reproducible(threads), Interruption() as stop:
        with seeded_globals(derive_seed(seed, "initial weights")):
            model = make()
        run = _Run(model, task, recipe, seed, scratch, whole)
        run.resume()
        while True:
            if run.progress.diverged_at is None:
                run.watch(watch, watch_at)
            if run.is_over():
                break
            if stop.number:
                run.save()
                raise Interrupted(stop.number)
            run.step()
            if time.perf_counter() - run.last_saved >= checkpoint_every_s:
                run.save()
        run.save()
        loss, accuracy, tested = evaluate(model, task, recipe.held_out)
    progress = run.progress
    if progress.diverged_at is not None:  # the weights are those of an earlier step, at which no other model stopped
        loss = accuracy = math.nan
    return Trained(
        model=model.eval(),
        loss=loss,
        accuracy=accuracy,
        tested=tested,
        steps=progress.step,
        processor_s=progress.processor_s,
        resumed=progress.resumed,
        finished=progress.diverged_at is None and math.isfinite(loss),
        curve=progress.curve,
        watched=progress.watched,
    )


class _Run:
    def __init__(
        self, model: nn.Module, task: Task, recipe: TaskRecipe, seed: int, scratch: Path, identity: dict[str, Any]
    ) -> None:
        self.model, self.task, self.recipe, self.seed = model, task, recipe, seed
        self.scratch, self.identity = scratch, identity
        self.optimizer, self.schedule = optimizer_of(model, recipe)
        self.progress = Progress()
        self.last_saved = time.perf_counter()

    def resume(self) -> None:
        """Take up the newest checkpoint if there is one; UserError if it belongs to another training."""
        state = checkpoint.load_newest(self.scratch)
        if state is None:
            return
        for key, ours in self.identity.items():
            theirs = state["identity"].get(key)
            if theirs != ours:
                what = f"the checkpoint in {self.scratch} was made with {key} = {theirs}, not {ours}"
                raise UserError(what, f"run with the former {key}, or delete that folder to start afresh")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        progress = state["progress"]
        self.progress = Progress(**(progress | {"curve": [Point(**point) for point in progress["curve"]]}))
        self.progress.resumed += 1

    def is_over(self) -> bool:
        """Whether all steps have been taken, or one could not."""
        return self.progress.step >= self.recipe.steps or self.progress.diverged_at is not None

    def step(self) -> None:
        """One update."""
        progress, recipe = self.progress, self.recipe
        started = time.process_time()
        self.model.train()
        self.schedule.step_update(progress.step)
        batch = self.task.batch(recipe.batch, generator(self.seed, f"{self.task.name} batches", progress.step))
        loss, norm = update(self.model, self.optimizer, batch, recipe.clip_grad)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            progress.diverged_at = progress.step
        progress.loss_sum += loss
        progress.loss_count += 1
        progress.step += 1
        progress.processor_s += time.process_time() - started

    def watch(self, watch: Watch | None, watch_at: Sequence[int]) -> None:
        """Note losses and measure the model if this step asks for it and has not been measured."""
        progress, step = self.progress, self.progress.step
        if step not in {0, *watch_at, self.recipe.steps} or any(point.step == step for point in progress.curve):
            return
        training = progress.loss_sum / progress.loss_count if progress.loss_count else math.nan
        held_out, *_ = evaluate(self.model, self.task, min(self.recipe.held_out, _ON_THE_WAY))
        progress.curve.append(Point(step, training, held_out))
        progress.loss_sum, progress.loss_count = 0.0, 0
        if watch is not None:
            progress.watched += [{**row, "step": step} for row in watch(self.model.eval(), step)]

    def save(self) -> None:
        """Write a checkpoint of this moment, which must lie between two steps."""
        state = {
            "identity": self.identity,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
        }
        checkpoint.save(self.scratch, state, self.progress.step)
        self.last_saved = time.perf_counter()


def optimizer_of(model: nn.Module, recipe: TaskRecipe) -> tuple[torch.optim.AdamW, CosineLRScheduler]:
    """AdamW without decay of vectors, and its warm-up and cosine by step."""
    optimizer = torch.optim.AdamW(param_groups_weight_decay(model, recipe.weight_decay), lr=recipe.lr)
    warmup = min(round(recipe.warmup * recipe.steps), recipe.steps - 1)
    schedule = CosineLRScheduler(
        optimizer,
        t_initial=recipe.steps - warmup,
        lr_min=recipe.min_lr,
        warmup_t=warmup,
        warmup_lr_init=recipe.min_lr,
        warmup_prefix=True,
        t_in_epochs=False,
    )
    return optimizer, schedule


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], clip_grad: float
) -> tuple[float, float]:
    """One update, unless loss or gradient is not finite; both as they were before it."""
    inputs, targets = batch
    optimizer.zero_grad(set_to_none=True)
    loss = _loss(model(inputs), targets)
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), clip_grad).item()
    value = loss.item()
    if math.isfinite(value) and math.isfinite(norm):
        optimizer.step()
    return value, norm


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, count: int) -> tuple[float, float, int]:
    """Loss (nats) and accuracy (percent) over the targets that count, and their number."""
    model.eval()
    total, right, tested = 0.0, 0, 0
    inputs, targets = task.held_out(count)
    for part, wanted in zip(inputs.split(_TESTED_AT_ONCE), targets.split(_TESTED_AT_ONCE), strict=True):
        scores = model(part)
        total += _loss(scores.double(), wanted, reduction="sum").item()
        counted = wanted != IGNORED
        right += int((scores.argmax(-1) == wanted)[counted].sum())
        tested += int(counted.sum())
    return total / tested, 100 * right / tested, tested


def _loss(scores: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return cross_entropy(scores.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction=reduction)
