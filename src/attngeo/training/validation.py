"""Accuracy and loss of a model on a validation set."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from attngeo.models.pyramid import solver_residuals
from attngeo.ops.convergence import CONVERGED_RESIDUAL
from attngeo.training.arithmetic import Arithmetic
from attngeo.training.distributed import ALONE, Team
from attngeo.training.interruption import Interrupted, Interruption
from attngeo.training.protocols import Batches

NO_RESIDUAL = -1.0  # stands for None where processes exchange numbers; residuals are norms


@dataclass(frozen=True)
class Score:
    """Result on `n` images; `residual` is the largest solver residual, None if no attention solves anything."""

    accuracy: float  # percent, top 1
    loss: float  # nats, without label smoothing
    n: int
    residual: float | None


@torch.no_grad()
def validate(
    model: nn.Module, batches: Batches, *, arithmetic: Arithmetic, team: Team = ALONE, stop: Interruption
) -> Score:
    """Score `model` in evaluation mode on all images of `batches`, which are this process's share, and of the others'.

    Raises Interrupted, in every process, if a signal has come to one.
    """
    was_training = model.training
    model.eval()
    batches.set_epoch(0)
    correct, loss, n = 0, 0.0, 0
    residual: float | None = None
    for images, labels in batches:
        if stop.number:
            break
        images, labels = arithmetic.place(images, labels)
        logits = arithmetic.forward(model, images)
        loss += cross_entropy(logits, labels, reduction="sum").item()
        correct += int((logits.argmax(1) == labels).sum())
        n += len(labels)
        residual = worse(residual, solver_residuals(model))
    model.train(was_training)
    parts = team.gather([correct, loss, n, NO_RESIDUAL if residual is None else residual, stop.number])
    corrects, losses, counts, residuals, signals = zip(*parts, strict=True)
    if any(signals):
        raise Interrupted(int(max(signals)))
    total = int(sum(counts))
    if total == 0:
        return Score(math.nan, math.nan, 0, None)
    return Score(100.0 * sum(corrects) / total, sum(losses) / total, total, worst(residuals))


def worst(residuals: Iterable[float]) -> float | None:
    """The worst of residuals of which some are NO_RESIDUAL."""
    return reduce(worse, [None if residual == NO_RESIDUAL else residual for residual in residuals], None)


def worse(first: float | None, second: float | None) -> float | None:
    """The larger residual; NaN is the worst of all, None means there was none."""
    if first is None or second is None:
        return second if first is None else first
    return math.nan if math.isnan(first) or math.isnan(second) else max(first, second)


def converged(residual: float | None) -> bool | None:
    """Whether every inverse was reached, judged by the largest residual; None if there was none."""
    return None if residual is None else residual <= CONVERGED_RESIDUAL
