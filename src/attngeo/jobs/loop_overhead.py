"""What the training loop costs beyond a bare step on the same batches, and what loading them is of it."""

import contextlib
import copy
import io
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor, nn

from attngeo.data.batches import Batches, open_batches
from attngeo.data.packing import pack
from attngeo.models import registry  # noqa: F401  names the models to timm
from attngeo.training.bare import COST_RECIPE, BareStep
from attngeo.training.loop import train
from attngeo.training.recipe import Recipe
from attngeo.training.seeding import numpy_generator, reproducible, seed_everything

Row = dict[str, Any]

CLASSES = 10


def measure(size: str, batch: int, steps: int, *, repeats: int) -> list[Row]:
    """Rows of the Laplacian pyramid of a size in batches of random 28 x 28 images; one thread from here on.

    An epoch of `steps` steps of the real loop and as many bare steps (forward, backward, clipping, update, average)
    from the same weights on the same images are taken in turn, `repeats` times; processor time, medians. The loop's
    steps include loading, which is also given alone; evaluation and checkpoints lie between epochs and are not counted.
    `loop_overhead` is the median of (loop - bare) / bare over the pairs.
    """
    torch.set_num_threads(1)
    recipe = replace(COST_RECIPE, batch_size=batch, images_per_epoch=batch * steps)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        training, validation = _batches(folder, recipe)
        seed_everything(0)
        model = timm.create_model(f"laplacianformer_{size}", num_classes=CLASSES, img_size=recipe.image_size)
        preloaded = list(training)
        samples: list[tuple[float, float, float]] = []
        for repeat in range(-1, repeats):  # the first pair loads code
            watched = _Watched(training)
            with contextlib.redirect_stdout(io.StringIO()):
                train(
                    copy.deepcopy(model),
                    watched,
                    validation,
                    recipe,
                    seed=0,
                    run_dir=folder / f"run{repeat}",
                    scratch=folder / f"scratch{repeat}",
                    threads=1,
                )
            bare = _bare_s(copy.deepcopy(model), recipe, preloaded)
            if repeat >= 0:
                samples.append((watched.total_s, bare, watched.loading_s))
    labels = {"model": f"laplacianformer_{size}", "attention": "laplacian", "batch": batch, "steps": steps}
    rows = []
    for name, seconds in zip(("loop_step_ms", "bare_step_ms", "loading_ms"), zip(*samples, strict=True), strict=True):
        rows.append(labels | _summary(name, [1e3 * each / steps for each in seconds], "ms"))
    rows.append(labels | _summary("loop_overhead", [loop / bare - 1 for loop, bare, _ in samples], "1"))
    rows.append(labels | _summary("loading_share", [loading / bare for _, bare, loading in samples], "1"))
    return rows


class _Watched:
    """Batches that note the processor time from the first to after the last step on them, and what loading takes."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self.num_classes, self.num_images, self.order = batches.num_classes, batches.num_images, batches.order
        self.set_epoch, self.describe = batches.set_epoch, batches.describe
        self.total_s = self.loading_s = 0.0

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        start = time.process_time()
        batches = iter(self._batches)
        while True:
            before = time.process_time()
            batch = next(batches, None)
            self.loading_s += time.process_time() - before
            if batch is None:
                break
            yield batch
        self.total_s += time.process_time() - start


def _bare_s(model: nn.Module, recipe: Recipe, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Processor time of a bare step on every batch, in the loop's mode of computing."""
    with reproducible(1):
        step = BareStep(model, recipe)
        start = time.process_time()
        for images, labels in batches:
            step(images, labels)
        return time.process_time() - start


def _batches(folder: Path, recipe: Recipe) -> tuple[Batches, Batches]:
    """Random grey images of Fashion-MNIST's size, packed as arrays and opened as a run opens them."""
    random = numpy_generator(0, "loop overhead")
    count = recipe.images_per_epoch or recipe.batch_size
    arrays = {}
    for split in ("train", "val"):
        arrays[f"{split}_images"] = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"{split}_labels"] = (np.arange(count) % CLASSES).astype(np.uint8)
    source = folder / "images"
    source.mkdir()
    np.savez(source / "arrays.npz", **arrays)  # type: ignore[arg-type]
    manifest = pack(source, folder / "packed", name="random images")
    opened = partial(open_batches, manifest, seed=0, image_size=recipe.image_size, augment=recipe.augment)
    training = opened("train", batch_size=recipe.batch_size, images_per_epoch=recipe.images_per_epoch)
    return training, opened("val", batch_size=recipe.eval_batch_size)


def _summary(metric: str, values: list[float], unit: str) -> Row:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    spread = {"spread": high - low, "spread_kind": "range between quartiles"}
    return {"metric": metric, "value": middle, "unit": unit, "n": len(values)} | spread
