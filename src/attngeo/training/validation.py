"""Accuracy and loss of a model on a validation set."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attngeo.models.pyramid import solver_residuals
from attngeo.training.interruption import Interruption
from attngeo.training.protocols import Batches


@dataclass(frozen=True)
class Score:
    """Result on `n` images; `residual` is the largest solver residual, None if no attention solves anything."""

    accuracy: float  # percent, top 1
    loss: float  # nats, without label smoothing
    n: int
    residual: float | None


@torch.no_grad()
def validate(
    model: nn.Module, batches: Batches, *, device: str, max_images: int | None, autocast: bool, stop: Interruption
) -> Score:
    """Score `model` in evaluation mode on all images, or on `max_images` evenly spaced ones (sets are sorted by class).

    Raises Interrupted between two batches if a signal has come.
    """
    was_training = model.training
    model.eval()
    total = batches.num_images
    wanted = total if max_images is None else min(max_images, total)
    batches.set_epoch(0)
    correct, loss, n, position = 0, 0.0, 0, 0
    residual: float | None = None
    for images, labels in batches:
        stop.check()
        index = torch.arange(position, position + len(labels))
        position += len(labels)
        keep = (index + 1) * wanted // total > index * wanted // total
        if not keep.any():
            continue
        images, labels = images[keep].to(device), labels[keep].to(device)
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
            logits: Tensor = model(images)
        loss += cross_entropy(logits.float(), labels, reduction="sum").item()
        correct += int((logits.argmax(1) == labels).sum())
        n += len(labels)
        residual = worse(residual, solver_residuals(model))
    model.train(was_training)
    if n == 0:
        return Score(math.nan, math.nan, 0, None)
    return Score(100.0 * correct / n, loss / n, n, residual)


def worse(first: float | None, second: float | None) -> float | None:
    """The larger residual; NaN is the worst of all, None means there was none."""
    if first is None or second is None:
        return second if first is None else first
    return math.nan if math.isnan(first) or math.isnan(second) else max(first, second)
