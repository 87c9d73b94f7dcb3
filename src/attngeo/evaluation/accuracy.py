"""How good the class probabilities of a model are: accuracy, calibration, and which classes it takes for which.

Formulas, for n images with labels y_i and probabilities p_i = softmax(logits_i), in float64:
negative log-likelihood (nats) -1/n sum log p_i[y_i]; Brier score 1/n sum_i sum_c (p_i[c] - [c = y_i])^2, in [0, 2];
expected calibration error sum_b n_b/n |accuracy_b - confidence_b| over bins b of equal width of the confidence
max_c p_i[c] (Guo et al. 2017, arXiv 1706.04599).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attngeo.errors import UserError
from attngeo.models.pyramid import solver_residuals

BINS = 15  # the number that Guo et al. use
TOP = 5


@dataclass(frozen=True)
class Bin:
    """Images whose confidence lies in (low, high]; accuracy and mean confidence in [0, 1], NaN where there is none."""

    low: float
    high: float
    n: int
    accuracy: float
    confidence: float


@dataclass(frozen=True)
class Accuracy:
    """Result on `n` images; `confusion[i, j]` counts images of class i taken for class j."""

    n: int
    top1: float  # percent
    top5: float | None  # percent; None below five classes
    nll: float  # nats
    brier: float
    ece: float  # in [0, 1]
    bins: tuple[Bin, ...]
    confusion: Tensor  # int64 [classes, classes]
    residual: float | None  # the largest of any solver; None if no attention solves anything


class Tally:
    """Sums over images from which an Accuracy follows; the order and size of batches do not matter."""

    def __init__(self, classes: int, bins: int = BINS) -> None:
        self.classes, self.bins = classes, bins
        self._confusion = torch.zeros(classes, classes, dtype=torch.int64)
        self._in_top = 0
        self._nll = self._brier = 0.0
        # Of each bin: images, correct ones, and the sum of their confidences.
        self._binned = torch.zeros(bins, 3, dtype=torch.float64)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch: logits [B, classes], labels [B]; UserError if a label is none of the classes."""
        logits, labels = logits.detach().double().cpu(), labels.cpu()
        if logits.shape[1] != self.classes or (len(labels) and int(labels.max()) >= self.classes):
            raise UserError(
                f"the model tells {logits.shape[1]} classes apart, and the images have {self.classes}",
                "evaluate on images of the classes that it was trained on",
            )
        log_probabilities = logits.log_softmax(1)
        probabilities = log_probabilities.exp()
        confidence, taken_for = probabilities.max(1)
        rows = torch.arange(len(labels))
        self._confusion.view(-1).index_add_(0, labels * self.classes + taken_for, torch.ones_like(labels))
        self._in_top += int((logits.topk(min(TOP, self.classes), 1).indices == labels[:, None]).sum())
        self._nll -= float(log_probabilities[rows, labels].sum())
        # sum_c (p_c - [c = y])^2 = sum_c p_c^2 - 2 p_y + 1
        self._brier += float(probabilities.square().sum() - 2 * probabilities[rows, labels].sum()) + len(labels)
        place = (confidence * self.bins).ceil().long().clamp(1, self.bins) - 1
        counted = torch.stack([torch.ones_like(confidence), (taken_for == labels).double(), confidence], 1)
        self._binned.index_add_(0, place, counted)

    def result(self, residual: float | None = None) -> Accuracy:
        """What the sums say; UserError if no image was counted."""
        n = int(self._confusion.sum())
        if n == 0:
            raise UserError("there is no image to evaluate", "give a data set with images in that split")
        counts, correct, confidence = self._binned.unbind(1)
        return Accuracy(
            n=n,
            top1=100.0 * int(self._confusion.diagonal().sum()) / n,
            top5=100.0 * self._in_top / n if self.classes >= TOP else None,
            nll=self._nll / n,
            brier=self._brier / n,
            ece=float((correct - confidence).abs().sum()) / n,
            bins=tuple(
                Bin(place / self.bins, (place + 1) / self.bins, int(count), float(hit / count), float(sure / count))
                for place, (count, hit, sure) in enumerate(zip(counts, correct, confidence, strict=True))
            ),
            confusion=self._confusion.clone(),
            residual=residual,
        )


@torch.no_grad()
def measure(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    classes: int,
    *,
    predict: Callable[[Tensor], Tensor],
    bins: int = BINS,
) -> Accuracy:
    """Accuracy of `model` (set to evaluation mode) on every image of `batches`: images [B, 3, H, W], labels [B].

    `predict` turns images into logits [B, classes] by the model, on whatever device and in whatever precision.
    """
    model.eval()
    tally = Tally(classes, bins)
    residuals = []
    for images, labels in batches:
        tally.add(predict(images), labels)
        residual = solver_residuals(model)
        if residual is not None:
            residuals.append(residual)
    worst = float(torch.tensor(residuals).max()) if residuals else None  # NaN is the worst
    return tally.result(worst)
