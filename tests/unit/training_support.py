"""A tiny model and in-memory batches for the tests of training; as a program, a training run that can be killed.

python -m tests.unit.training_support FOLDER [SECONDS_A_BATCH [THREADS]]
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.layers import DropPath
from torch import Tensor, nn

from attngeo.training.distributed import ALONE, Team
from attngeo.training.loop import train
from attngeo.training.protocols import Observer
from attngeo.training.recipe import Recipe
from attngeo.training.seeding import generator, seed_everything

SEED = 3
CLASSES = 3


class TinyModel(nn.Module):
    """Convolution, batch norm, drop-path, dropout, linear: something of everything that resuming must restore."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.branch = nn.Conv2d(6, 6, 3, padding=1)
        self.drop_path = DropPath(dropout)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, CLASSES)
        self.solver_residual: Tensor | None = None

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.stem(images)))
        hidden = hidden + self.drop_path(self.branch(hidden))
        self.solver_residual = hidden.detach().abs().mean()
        return self.head(self.dropout(hidden.mean((2, 3))))


def tiny_model(dropout: float = 0.2) -> TinyModel:
    seed_everything(SEED)
    return TinyModel(dropout)


@dataclass(frozen=True)
class MemorySegment:
    pass_number: int
    indices: np.ndarray


@dataclass(frozen=True)
class MemoryOrder:
    """Batches of a permutation by (seed, epoch), the last incomplete one dropped; or all images in order."""

    num_images: int
    batch_size: int
    shuffle: bool

    def __len__(self) -> int:
        return self.num_images // self.batch_size if self.shuffle else -(-self.num_images // self.batch_size)

    def batches(self, epoch: int, skip_batches: int = 0) -> list[list[MemorySegment]]:
        order = torch.arange(self.num_images)
        if self.shuffle:
            order = torch.randperm(self.num_images, generator=generator(SEED, "permutation", epoch))
        starts = range(skip_batches * self.batch_size, len(self) * self.batch_size, self.batch_size)
        return [[MemorySegment(epoch, order[start : start + self.batch_size].numpy())] for start in starts]


class MemoryBatches:
    """Images whose mean colour tells their class, sorted by class; shuffled by (seed, epoch) if `shuffle`."""

    def __init__(self, n: int, batch_size: int, *, shuffle: bool, on_batch: Callable[[int, int], None] | None = None):
        self.labels = torch.arange(n) * CLASSES // max(n, 1)
        noise = torch.randn(n, 3, 8, 8, generator=generator(SEED, "images", n))
        self.images = noise + 2 * nn.functional.one_hot(self.labels, CLASSES)[:, :, None, None]
        self.num_images, self.num_classes = n, CLASSES
        self.order: Any = MemoryOrder(n, batch_size, shuffle)
        self.on_batch = on_batch
        self.about: dict[str, Any] = {"loader": "memory", "manifest_sha256": "m1", "versions": {"torch": "1"}}
        self.served: list[tuple[int, int]] = []  # (epoch, image) of every image handed out
        self.set_epoch(0)

    def __len__(self) -> int:
        return len(self.order)

    def set_epoch(self, epoch: int, skip_batches: int = 0) -> None:
        self.epoch, self.skip = epoch, skip_batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number, batch in enumerate(self.order.batches(self.epoch, self.skip), start=self.skip):
            if self.on_batch is not None:
                self.on_batch(self.epoch, number)
            chosen = torch.from_numpy(np.concatenate([segment.indices for segment in batch]))
            self.served += [(self.epoch, int(index)) for index in chosen]
            yield self.images[chosen], self.labels[chosen]

    def describe(self) -> dict[str, Any]:
        return self.about


def tiny_recipe(**changes: Any) -> Recipe:
    values: dict[str, Any] = {
        "epochs": 3,
        "images_per_epoch": None,
        "batch_size": 7,
        "eval_batch_size": 11,
        "lr": 0.02,
        "min_lr": 1e-4,
        "warmup_epochs": 0.5,
        "weight_decay": 0.05,
        "clip_grad": 1.0,
        "ema_decay": 0.9,
        "label_smoothing": 0.1,
        "drop_path": 0.0,
        "image_size": 8,
        "mixup": 0.8,
        "cutmix": 1.0,
    }
    return Recipe(**{**values, **changes})


def train_tiny(
    folder: Path,
    *,
    recipe: Recipe | None = None,
    model: nn.Module | None = None,
    on_batch: Callable[[int, int], None] | None = None,
    batches: MemoryBatches | None = None,
    val_batches: MemoryBatches | None = None,
    threads: int = 1,
    observers: Sequence[Observer] = (),
    digest: str = "d1",
    team: Team = ALONE,
    device: str = "cpu",
) -> dict[str, Any]:
    """Train the tiny model on 53 images with a checkpoint after every step, in folder/run and folder/scratch."""
    return train(
        model or tiny_model(),
        MemoryBatches(53, 7, shuffle=True, on_batch=on_batch) if batches is None else batches,
        MemoryBatches(23, 11, shuffle=False) if val_batches is None else val_batches,
        recipe or tiny_recipe(),
        seed=SEED,
        run_dir=folder / "run",
        scratch=folder / "scratch",
        threads=threads,
        observers=observers,
        info={"run_id": "tiny", "model": "tiny", "attention": "none", "digest": digest},
        checkpoint_every_s=0.0,
        team=team,
        device=device,
    )


def stop_at(epoch: int, batch: int) -> Callable[[int, int], None]:
    """Hook that sends this process SIGTERM when that batch is asked for."""

    def on_batch(at_epoch: int, at_batch: int) -> None:
        if (at_epoch, at_batch) == (epoch, batch):
            os.kill(os.getpid(), signal.SIGTERM)

    return on_batch


if __name__ == "__main__":
    pause_s = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    train_tiny(
        Path(sys.argv[1]),
        on_batch=lambda epoch, batch: time.sleep(pause_s),
        threads=int(sys.argv[3]) if len(sys.argv) > 3 else 1,
    )
