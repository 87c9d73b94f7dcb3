"""What the models are trained on: sequences to copy, sort and recall from, text, and images.

A task gives batches that (generator) alone determines, and held-out ones that never change. Targets of -100 do not
count, as in torch's cross entropy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from attngeo.data import text
from attngeo.models.fiber_bundle import FiberViT, TokenTransformer, Wiring, matched_hidden, parameters_at
from attngeo.models.fiber_bundle_sizes import ViTSize
from attngeo.training.language import TokenWindows
from attngeo.training.seeding import generator

IGNORED = -100
IMAGES = "fashion-mnist"
HOLD_OUT = 0.15  # of each text, its end, as for the decoders
_IMAGE_PATCH = 4
_IMAGE_CLASSES = 10
_BYTES = 256
_COUNTED = 2048  # sequences or images whose targets are counted for a guess


@dataclass(frozen=True)
class Shape:
    """What all models of a comparison share; `length` counts symbols (copy, sort), pairs (recall) or bytes."""

    dim: int
    depth: int
    heads: int
    rank: int
    length: int
    symbols: int


class Task(Protocol):
    """One task: models for it, batches to train on, and what is held out."""

    @property
    def name(self) -> str:
        """By which records and generators know it."""
        ...

    def model(self, variant: str, hidden: int | None) -> nn.Module:
        """A new model, drawn from torch's global generator."""
        ...

    def batch(self, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and targets to train on."""
        ...

    def held_out(self, count: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets to test on: the same at every call."""
        ...


def build(task: Task, variant: str) -> nn.Module:
    """A new model of a variant with as many parameters as the variant dot has, within 1 %, by its hidden width.

    A wiring without feed-forward has no such width: its variants keep the parameters that they have.

    The reference has a feed-forward four times as wide as the model.
    """
    if getattr(task, "wiring", "skip_mlp") != "skip_mlp":
        return task.model(variant, None)
    reference = parameters_at(lambda hidden: task.model("dot", None), 0)
    return task.model(variant, matched_hidden(lambda hidden: task.model(variant, hidden), reference))


def guess(task: Task, count: int) -> float:
    """Loss (nats) on what is held out of a model that binds nothing: what is left to learn when it is reached.

    It knows how often every target occurs at its place; of `recall` that the answer is one of the values shown.
    """
    inputs, targets = task.held_out(count)
    told = getattr(task, "guessed", None)
    if told is not None:
        return float(told(inputs, targets))
    seen = task.batch(_COUNTED, generator(0, f"counted {task.name}"))[1].reshape(_COUNTED, -1)
    targets = targets.reshape(len(targets), -1)
    total, counted = 0.0, 0
    for place in range(targets.shape[1]):
        ours, theirs = (all_of[:, place][all_of[:, place] != IGNORED] for all_of in (seen, targets))
        if len(theirs):
            # One more of each class, so that one never counted does not cost everything.
            times = torch.bincount(ours, minlength=int(torch.cat((ours, theirs)).max()) + 1).double() + 1
            total -= (times / times.sum()).log()[theirs].sum().item()
            counted += len(theirs)
    return total / counted


@dataclass(frozen=True)
class Sequences:
    """A task of made-up symbols 0 .. symbols - 1 for a decoder; `make` gives inputs and targets from a generator."""

    name: str
    shape: Shape
    vocabulary: int
    context: int
    make: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    causal: bool = True
    wiring: Wiring = "skip_mlp"
    rotary: bool = True
    guessed: Callable[[Tensor, Tensor], float] | None = None  # see `guess`, where places do not say enough

    def model(self, variant: str, hidden: int | None) -> nn.Module:
        """A decoder, or an encoder where the task is not causal."""
        return _token_transformer(
            self.shape,
            variant,
            hidden,
            self.vocabulary,
            self.context,
            causal=self.causal,
            wiring=self.wiring,
            rotary=self.rotary,
        )

    def batch(self, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """New sequences."""
        return self.make(count, draw)

    def held_out(self, count: int) -> tuple[Tensor, Tensor]:
        """Sequences of a generator of their own."""
        return self.make(count, generator(0, f"held out {self.name}"))


def copy(shape: Shape) -> Sequences:
    """Symbols, a mark, then the same symbols again, which count."""
    return _transformed("copy", shape, lambda symbols: symbols)


def sort(shape: Shape) -> Sequences:
    """Symbols, a mark, then the same in rising order, which counts."""
    return _transformed("sort", shape, lambda symbols: symbols.sort(dim=1).values)


def sort_in_place(shape: Shape, wiring: Wiring = "skip_mlp") -> Sequences:
    """For an encoder: the n-th output is the n-th smallest symbol, so that every token has to keep something.

    Without rotary positions, which make the attention of equal tokens differ and are in no bound on their collapse.
    """

    def make(count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        symbols = torch.randint(shape.symbols, (count, shape.length), generator=draw)
        return symbols, symbols.sort(dim=1).values

    return Sequences(
        "sort_in_place", shape, shape.symbols, shape.length, make, causal=False, wiring=wiring, rotary=False
    )


def recall(shape: Shape) -> Sequences:
    """Pairs of a key and a value, then as many keys drawn from them: at each the value that went with it counts.

    `length` pairs of different keys; keys are the first half of the symbols, values the second. Each question is drawn
    by itself: were every key asked once, the values not yet named would tell the rest. UserError is left to the config:
    half the symbols must suffice for the keys.
    """
    keys = shape.symbols // 2

    def make(count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        order = torch.rand(count, keys, generator=draw).argsort(dim=1)[:, : shape.length]
        values = keys + torch.randint(shape.symbols - keys, (count, shape.length), generator=draw)
        asked = torch.randint(shape.length, (count, shape.length), generator=draw)
        pairs = torch.stack((order, values), dim=2).flatten(1)
        questions = torch.stack((order.gather(1, asked), values.gather(1, asked)), dim=2).flatten(1)
        row = torch.cat((pairs, questions), dim=1)
        targets = torch.full_like(row[:, :-1], IGNORED)
        first = 2 * shape.length
        targets[:, first::2] = row[:, first + 1 :: 2]
        return row[:, :-1], targets

    def guessed(inputs: Tensor, targets: Tensor) -> float:
        shown = inputs[:, 1 : 2 * shape.length : 2]
        shares = (shown[:, None] == targets[:, 2 * shape.length :: 2, None]).double().mean(-1)
        return -shares.log().mean().item()

    return Sequences("recall", shape, shape.symbols, 4 * shape.length - 1, make, guessed=guessed)


@dataclass(frozen=True)
class Characters:
    """The next byte of English prose; the end of every document is held out."""

    shape: Shape
    training: TokenWindows
    testing: TokenWindows
    name: str = "characters"

    def model(self, variant: str, hidden: int | None) -> nn.Module:
        """A decoder over bytes."""
        return _token_transformer(self.shape, variant, hidden, _BYTES, self.shape.length, causal=True)

    def batch(self, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """Windows at random places."""
        return _shifted(self.training.drawn(count, draw))

    def held_out(self, count: int) -> tuple[Tensor, Tensor]:
        """Windows side by side, spread evenly over the held-out text."""
        return _shifted(self.testing.consecutive(count))


def characters(shape: Shape, documents: Sequence[str]) -> Characters:
    """The task on these documents, as UTF-8; UserError where none fills a window."""
    parts = text.held_out(documents, HOLD_OUT)
    first, last = ([torch.tensor(list(one.encode())) for one in part] for part in parts)
    window = shape.length + 1
    return Characters(shape, TokenWindows(first, window, "training text"), TokenWindows(last, window, "held-out text"))


@dataclass(frozen=True)
class Images:
    """Classes of grey images [n, 28, 28], uint8, for the plain vision transformer; `length` is not used."""

    shape: Shape
    arrays: Mapping[str, np.ndarray]
    name: str = IMAGES

    def model(self, variant: str, hidden: int | None) -> nn.Module:
        """A plain vision transformer of patches of 4 px."""
        size = ViTSize(self.shape.dim, self.shape.depth, self.shape.heads, _IMAGE_PATCH, 28)
        return FiberViT(size, variant, num_classes=_IMAGE_CLASSES, in_chans=1, hidden=hidden, rank=self.shape.rank)

    def batch(self, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """Training images, each drawn by itself."""
        return self._at("train", torch.randint(len(self.arrays["train_labels"]), (count,), generator=draw))

    def held_out(self, count: int) -> tuple[Tensor, Tensor]:
        """Validation images, spread evenly."""
        there = len(self.arrays["val_labels"])
        return self._at("val", (torch.arange(min(count, there)) * there) // min(count, there))

    def _at(self, split: str, places: Tensor) -> tuple[Tensor, Tensor]:
        pixels = torch.from_numpy(self.arrays[f"{split}_images"][places.numpy()]).float()[:, None]
        # Half of the pixels are 0: mean and deviation of the training images, in round numbers.
        return (pixels / 255 - 0.29) / 0.35, torch.from_numpy(self.arrays[f"{split}_labels"][places.numpy()]).long()


def images(shape: Shape, folder: Path) -> Images:
    """The task on the arrays that `attngeo fetch fashion-mnist` left in a folder."""
    with np.load(folder / "arrays.npz") as arrays:
        return Images(shape, dict(arrays))


def _transformed(name: str, shape: Shape, transform: Callable[[Tensor], Tensor]) -> Sequences:
    mark = shape.symbols

    def make(count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        symbols = torch.randint(shape.symbols, (count, shape.length), generator=draw)
        row = torch.cat((symbols, torch.full((count, 1), mark), transform(symbols)), dim=1)
        targets = row[:, 1:].clone()
        targets[:, : shape.length] = IGNORED
        return row[:, :-1], targets

    return Sequences(name, shape, shape.symbols + 1, 2 * shape.length, make)


def _shifted(windows: Tensor) -> tuple[Tensor, Tensor]:
    return windows[:, :-1], windows[:, 1:]


def _token_transformer(
    shape: Shape,
    variant: str,
    hidden: int | None,
    vocabulary: int,
    context: int,
    *,
    causal: bool,
    wiring: Wiring = "skip_mlp",
    rotary: bool = True,
) -> nn.Module:
    return TokenTransformer(
        variant,
        vocabulary=vocabulary,
        context=context,
        dim=shape.dim,
        depth=shape.depth,
        heads=shape.heads,
        hidden=hidden,
        causal=causal,
        wiring=wiring,
        options={"rotary": rotary},
        rank=shape.rank,
    )
