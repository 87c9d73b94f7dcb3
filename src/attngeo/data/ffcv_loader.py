"""Batches from .beton files through FFCV, whose faults are fenced in here.

FFCV's reader hangs for ever when its thread dies, leaks that thread when an epoch is left early, sets the number of
torch's threads for the whole process, hands out views of buffers that it overwrites, draws augmentation from
generators that no seed controls, loops for ever over operations in the wrong order, and aborts the process when it
exits within an epoch or, with one kind of Numba's threads, when two loaders are read at once.

Here the order is given to it explicitly; the crop of every image comes from a table that is filled before each pass, a
function of (seed, pass, index); the thread is watched and always ended, at the exit too; the number of threads is
restored; what is handed out is a copy; the order of operations is checked; a second reader is refused where it must be.
"""

import atexit
import importlib.metadata
import queue
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from ffcv.fields.decoders import IntDecoder
from ffcv.fields.rgb_image import ResizedCropRGBImageDecoder
from ffcv.libffcv import imdecode, resize_crop
from ffcv.loader import Loader
from ffcv.loader.epoch_iterator import EpochIterator
from ffcv.pipeline.compiler import Compiler
from ffcv.pipeline.operation import Operation
from ffcv.transforms import Convert, Squeeze, ToDevice, ToTensor, ToTorchImage, View
from numba.np.ufunc.parallel import _launch_threads
from torch import Tensor

from attngeo.data import resampling
from attngeo.data.batches import Batches, Interpolation
from attngeo.data.beton import JPEG_MODE, Beton
from attngeo.data.ffcv_available import keep_tbb_loaded
from attngeo.data.manifest import Manifest, Split
from attngeo.data.torch_loader import crop_rule
from attngeo.data.transforms import (
    Order,
    Segment,
    central_crops,
    normalise,
    random_crops,
    random_flips,
    uniform_draws,
)
from attngeo.errors import UserError

keep_tbb_loaded()

NO_BATCH_TIMEOUT_S = 600
POLL_S = 0.2
BATCHES_AHEAD = 3
TORCH_OPERATIONS = (Squeeze, ToTorchImage, Convert, View, ToDevice)
CROP_COLUMNS = ("top", "left", "height_used", "width_used")


_open: weakref.WeakSet[EpochIterator] = weakref.WeakSet()


def ordered(operations: list[Operation]) -> list[Operation]:
    """The operations of a pipeline; ValueError unless compiled ones come first, then ToTensor, then torch's.

    FFCV's loader loops for ever over a compiled operation behind ToTensor, and its thread dies of a torch operation
    before it.
    """
    converted = False
    for operation in operations:
        on_tensors = not isinstance(operation, Operation) or type(operation) in TORCH_OPERATIONS
        if type(operation) is ToTensor and not converted:
            converted = True
        elif on_tensors != converted:
            name = type(operation).__name__
            raise ValueError(f"{name} stands {'behind' if converted else 'before'} ToTensor, where FFCV would hang")
    return operations


class TableCropDecoder(ResizedCropRGBImageDecoder):
    """Decodes an image and resizes the crop that its row of the metadata names.

    By area with OpenCV for "auto", else with the whole-number arithmetic that the torch loader's resizing has.
    """

    interpolation: Interpolation = "auto"

    @property
    def get_crop_generator(self) -> Any:
        """Unused: the crop is read, not drawn."""
        raise NotImplementedError

    def generate_code(self) -> Any:
        """The function that FFCV compiles and calls for each batch."""
        read = self.memory_read
        samples = Compiler.get_iterator()
        decode_jpeg = Compiler.compile(imdecode)
        crop_and_resize = (
            Compiler.compile(resize_crop) if self.interpolation == "auto" else _resizing(self.interpolation)
        )

        def decode(indices, memory, metadata, storage):  # numba infers the types
            output, scratch = memory
            for place in samples(len(indices)):
                row = metadata[indices[place]]
                height, width = np.uint32(row["height"]), np.uint32(row["width"])
                stored = read(row["data_ptr"], storage)
                if row["mode"] == JPEG_MODE:
                    decoded = scratch[place]
                    decode_jpeg(stored, decoded, height, width, height, width, 0, 0, 1, 1, False, False)
                    pixels = decoded[: 3 * height * width].reshape(height, width, 3)
                else:
                    pixels = stored.reshape(height, width, 3)
                top, left = row["top"], row["left"]
                crop_and_resize(pixels, top, top + row["height_used"], left, left + row["width_used"], output[place])
            return output[: len(indices)]

        decode.is_parallel = True  # type: ignore[attr-defined]
        return decode


def _resizing(interpolation: Interpolation) -> Any:
    """A compiled function of the arguments of FFCV's `resize_crop` that resizes as torch does."""
    compiled = numba.njit(nogil=True)
    resample = compiled(resampling.resample)
    turn, weighted_rows, weights_of, kernel = (compiled(part) for part in resampling.PARTS)
    cubic = interpolation == "bicubic"

    def crop_and_resize(pixels, top, bottom, left, right, output):
        resample(pixels[top:bottom, left:right], output, cubic, turn, weighted_rows, weights_of, kernel)

    return numba.njit(nogil=True)(crop_and_resize)


def _with_crop_columns(metadata: np.ndarray) -> np.ndarray:
    """A writable copy of FFCV's metadata whose image rows have four more columns: the crop box."""
    image = metadata.dtype["f0"]
    columns = [(name, image[name]) for name in image.names or ()]
    columns += [(name, np.dtype("<i4")) for name in CROP_COLUMNS]
    wider = np.zeros(metadata.shape, np.dtype([("f0", columns), ("f1", metadata.dtype["f1"])], align=True))
    for name in image.names or ():
        wider["f0"][name] = metadata["f0"][name]
    wider["f1"] = metadata["f1"]
    return wider


class FFCVBatches(Batches):
    """Batches of a .beton file; `workers` threads, at least one and no more than FFCV's compiler allows."""

    loader = "ffcv"

    def __init__(
        self, manifest: Manifest, split: Split, order: Order, *, path: Path, workers: int, **options: Any
    ) -> None:
        super().__init__(manifest, split, order, **options)
        stored = Beton(path)  # refuses a file that FFCV would open and misread
        self._heights, self._widths = stored.heights, stored.widths
        self.workers = max(1, min(workers, numba.config.NUMBA_NUM_THREADS))
        self._threads = torch.get_num_threads()
        decoder = TableCropDecoder((self.image_size, self.image_size))
        decoder.interpolation = self.interpolation
        self._loader = Loader(
            str(path),
            batch_size=order.batch_size,
            num_workers=self.workers,
            os_cache=True,
            seed=0,  # no draw of FFCV is used
            drop_last=False,
            batches_ahead=BATCHES_AHEAD,
            pipelines={
                "image": ordered([decoder, ToTensor()]),
                "label": ordered([IntDecoder(), ToTensor(), Squeeze(1)]),
            },
        )
        torch.set_num_threads(self._threads)  # Loader() sets it to its own for the whole process
        self._loader.reader.metadata = _with_crop_columns(self._loader.reader.metadata)
        self._crops = self._loader.reader.metadata["f0"]

    def _iterate(self, epoch: int, skip_batches: int) -> Iterator[tuple[Tensor, Tensor]]:
        batches = self.order.batches(epoch, skip_batches)
        segments = _merged([segment for batch in batches for segment in batch])
        pending: list[tuple[Tensor, Tensor]] = []
        sizes = iter([sum(len(segment.indices) for segment in batch) for batch in batches])
        wanted = next(sizes, 0)
        for segment in segments:
            for images, labels in self._read(segment):
                pending.append((images, labels))
                # Pieces of two passes meet in one batch; elsewhere each piece is a batch.
                while pending and sum(len(piece) for _, piece in pending) >= wanted > 0:
                    batch_images, batch_labels, pending = _take(pending, wanted)
                    wanted = next(sizes, 0)
                    yield batch_images, batch_labels

    def _read(self, segment: Segment) -> Iterator[tuple[Tensor, Tensor]]:
        """Normalised copies of what FFCV reads for one segment, in pieces of at most a batch."""
        indices = segment.indices
        flips = self._fill_table(segment)
        done = 0
        for images, labels in _guarded(self._loader, indices.astype(np.uint64), self._threads):
            mirrored = flips[done : done + len(labels)] if flips is not None else None
            piece = Segment(segment.pass_number, indices[done : done + len(labels)])
            done += len(labels)
            pixels = images.permute(0, 3, 1, 2)
            if self.augmenter.changes_pixels:
                pixels = self.augmenter.colour_and_shape(pixels, piece)
            normalised = normalise(pixels, mirrored, self.mean, self.std, self._memory.empty(pixels.shape))
            yield self.augmenter.erase(normalised, [piece]), labels.clone()

    def _fill_table(self, segment: Segment) -> Tensor | None:
        """Write the crops of a segment into the metadata; which of its images are to be mirrored."""
        indices = segment.indices
        heights, widths = self._heights[indices], self._widths[indices]
        flips = None
        if self.augment:
            draws = uniform_draws(self.order.seed, segment.pass_number, indices)
            boxes = random_crops(draws, heights, widths, self.manifest.raw["min_crop_area"])
            flips = torch.from_numpy(random_flips(draws))
        else:
            boxes = central_crops(heights, widths)
        for column, name in enumerate(CROP_COLUMNS):
            self._crops[name][indices] = boxes[:, column]
        return flips

    def _pixel_rule(self) -> str:
        stored = (
            "JPEG decoded by libjpeg-turbo (fast DCT)" if self.manifest.raw["write_mode"] != "raw" else "stored pixels"
        )
        kind = f"{self.interpolation} with antialiasing"
        if self.interpolation == "auto":
            kind = "area interpolation (OpenCV)"
        return f"{stored}; {crop_rule(self.augment, self.manifest.raw['min_crop_area'])}; {kind}"

    def _versions(self) -> dict[str, str]:
        names = ("ffcv", "numba", "opencv-python")
        return super()._versions() | {name: importlib.metadata.version(name) for name in names}

    def describe(self) -> dict[str, Any]:
        """What runs, for the record of a run."""
        return super().describe() | {"workers": self.workers}


def _merged(segments: list[Segment]) -> list[Segment]:
    """Neighbouring segments of one pass as one."""
    merged: list[Segment] = []
    for segment in segments:
        if merged and merged[-1].pass_number == segment.pass_number:
            segment = Segment(segment.pass_number, np.concatenate([merged.pop().indices, segment.indices]))
        merged.append(segment)
    return merged


def _take(pending: list[tuple[Tensor, Tensor]], count: int) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """The first `count` images and labels of `pending`, and what is left of it."""
    if len(pending) == 1 and len(pending[0][1]) == count:
        return *pending[0], []
    images = torch.cat([piece for piece, _ in pending])
    labels = torch.cat([piece for _, piece in pending])
    left = [(images[count:], labels[count:])] if len(labels) > count else []
    return images[:count], labels[:count], left


def _guarded(loader: Loader, order: np.ndarray, threads: int) -> Iterator[tuple[Tensor, Tensor]]:
    """FFCV's batches for `order`, as views that the next step overwrites; its thread is gone however this ends.

    Raises RuntimeError when the thread died and TimeoutError when it is silent for ten minutes.
    """
    Compiler.set_num_threads(loader.num_workers)
    torch.set_num_threads(threads)
    _refuse_a_second_reader(loader.num_workers)
    iterator = EpochIterator(loader, order)
    _open.add(iterator)
    last = time.monotonic()
    try:
        while True:
            try:
                item = iterator.output_queue.get(timeout=POLL_S)
            except queue.Empty:
                if not iterator.is_alive() and iterator.output_queue.empty():
                    raise RuntimeError("FFCV's reader thread died; what it met is printed above") from None
                if time.monotonic() - last > NO_BATCH_TIMEOUT_S:
                    raise TimeoutError(f"FFCV gave no batch within {NO_BATCH_TIMEOUT_S} s") from None
                continue
            torch.set_num_threads(threads)  # its thread sets it when it starts
            if item is None:
                return
            images, labels = item[1]
            yield images, labels
            last = time.monotonic()
    finally:
        _end(iterator)


def _refuse_a_second_reader(workers: int) -> None:
    """UserError where Numba would abort the process: its own threads ("workqueue") serve one reader at a time."""
    if workers == 1 or not any(iterator.is_alive() for iterator in _open) or numba.config.DISABLE_JIT:
        return
    _launch_threads()
    if numba.threading_layer() == "workqueue":
        raise UserError(
            "two FFCV loaders are read at the same time, which Numba's threads here (workqueue) do not bear",
            "install libgomp1 or tbb, finish one epoch before the other, or give the data set workers: 1",
        )


def _end(iterator: EpochIterator) -> None:
    """Stop the thread and empty its queue until it has ended: its last message would otherwise wait for room in it."""
    iterator.close()
    waiting_since = time.monotonic()
    while iterator.is_alive() and time.monotonic() - waiting_since < NO_BATCH_TIMEOUT_S:
        try:
            iterator.output_queue.get(timeout=POLL_S / 10)
        except queue.Empty:
            iterator.join(POLL_S / 10)
    _open.discard(iterator)


@atexit.register
def _end_all() -> None:
    """Before the interpreter goes: a thread that still reads then aborts the process."""
    for iterator in list(_open):
        _end(iterator)
