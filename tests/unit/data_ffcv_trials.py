"""Trials of FFCV, run as a program of their own by test_data_ffcv.py, since FFCV's faults are hangs and aborts.

Prints one JSON line. Run: python -m tests.unit.data_ffcv_trials FOLDER NAME [NAME ...].
"""

import faulthandler
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image

from attngeo.data.augmentation import Augmentation
from attngeo.data.batches import Batches, open_batches
from attngeo.data.ffcv_writer import write_betons
from attngeo.data.folders import ImageFile
from attngeo.data.packing import pack
from attngeo.errors import UserError
from attngeo.files import read_json
from tests.unit.data_support import image_folder, picture

COUNTS = {"a": (9, 3), "b": (8, 2)}


_PACKED: dict[str, Path] = {}


def packed(folder: Path, write_mode: Any = "jpg") -> Path:
    """A small set, packed once for all trials of this process."""
    if write_mode not in _PACKED:
        root = folder.parent / write_mode
        images = image_folder(root / "images", COUNTS)
        _PACKED[write_mode] = pack(images, root / "packed", storage="beton", write_mode=write_mode)
    return _PACKED[write_mode]


def opened(manifest: Path, split: Any = "train", **options: Any) -> Batches:
    defaults: dict[str, Any] = {"batch_size": 4, "seed": 3, "image_size": 24, "augment": split == "train"}
    return open_batches(manifest, split, **(defaults | {"loader": "ffcv"} | options))


def read(batches: Batches, epoch: int = 0, skip: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    batches.set_epoch(epoch, skip)
    images, labels = zip(*batches, strict=True)
    return torch.cat(images), torch.cat(labels)


def written_pixels_are_pillows(folder: Path) -> dict[str, Any]:
    """A raw .beton read by FFCV's own decoder, by our reader, and the original pictures."""
    from ffcv.fields.decoders import IntDecoder, SimpleRGBImageDecoder
    from ffcv.loader import Loader
    from ffcv.transforms import ToTensor

    from attngeo.data.beton import Beton

    path = packed(folder, write_mode="raw").parent / "train.beton"
    pipelines = {"image": [SimpleRGBImageDecoder(), ToTensor()], "label": [IntDecoder(), ToTensor()]}
    theirs = [images.clone() for images, _ in Loader(str(path), 5, num_workers=1, drop_last=False, pipelines=pipelines)]
    ours = np.stack([Beton(path)[index][0] for index in range(17)])
    # The pictures are numbered through: 9 of a, 3 of them validation, 8 of b.
    original = np.stack([picture(number) for number in (*range(9), *range(12, 20))])
    return {
        "ours": bool((ours == original).all()),
        "theirs": bool((torch.cat(theirs).numpy() == original).all()),
    }


def loaders_agree(folder: Path) -> dict[str, Any]:
    """Order and labels equal those of the torch loader; pixels differ by the rules of resizing only."""
    manifest = packed(folder, write_mode="raw")
    result: dict[str, Any] = {"labels": True, "difference": 0.0}
    for split, options in (("train", {"images_per_epoch": 26}), ("train", {}), ("val", {})):
        fast, plain = opened(manifest, split, **options), opened(manifest, split, loader="torch", **options)
        for epoch in range(2):
            images, labels = read(fast, epoch)
            others, other_labels = read(plain, epoch)
            result["labels"] &= torch.equal(labels, other_labels)
            mean_difference = float((images - others).abs().mean() / others.std())
            result["difference"] = max(result["difference"], mean_difference)
    result["shapes"] = [list(labels.shape) for _, labels in opened(manifest, "val")]
    return result


def loaders_agree_to_the_bit(folder: Path) -> dict[str, Any]:
    """From raw storage, resized in whole numbers, with every augmentation."""
    manifest = packed(folder, write_mode="raw")
    everything = Augmentation("rand-m9-mstd0.5-inc1", 0.4, 0.5)
    equal = {}
    for interpolation in ("bilinear", "bicubic"):
        for split, more in (("train", {"augmentation": everything, "images_per_epoch": 26}), ("val", {})):
            options: dict[str, Any] = {"interpolation": interpolation, **more}
            fast, plain = opened(manifest, split, **options), opened(manifest, split, loader="torch", **options)
            pairs = [(read(fast, epoch, 1), read(plain, epoch, 1)) for epoch in range(2)]
            equal[f"{interpolation} {split}"] = all(
                torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1]) for ours, theirs in pairs
            )
    return equal


def held_out_images_are_those_of_the_folder(folder: Path) -> dict[str, Any]:
    """Images of each part, and whether .beton files hold those that a list of files does, by either loader."""
    images = image_folder(folder / "images", COUNTS)
    for file in images.glob("val/*/*"):
        file.write_bytes(b"not an image")
    listed = pack(images, folder / "listed", storage="folder", hold_out=0.3)
    written = pack(images, folder / "written", storage="beton", write_mode="raw", hold_out=0.3, workers=2)
    found = {}
    for split in ("train", "val"):
        options: dict[str, Any] = {"interpolation": "bilinear", "batch_size": 1, "augment": False}
        expected = read(opened(listed, split, loader="torch", **options))
        same = [
            all(map(torch.equal, expected, read(opened(written, split, loader=loader, **options))))
            for loader in ("torch", "ffcv")
        ]
        found[split] = [len(expected[1]), *same]
    return found


def jpeg_decoders_differ_little(folder: Path) -> dict[str, Any]:
    """Photographs stored as JPEG: libjpeg-turbo's fast transform beside Pillow, nothing resized."""
    from ffcv.fields.decoders import SimpleRGBImageDecoder
    from ffcv.loader import Loader
    from ffcv.transforms import ToTensor
    from sklearn.datasets import load_sample_images

    from attngeo.data.beton import Beton

    for photo, name in zip(load_sample_images().images, "ab", strict=True):
        for split in ("train", "val"):
            (folder / "images" / split / name).mkdir(parents=True)
        for place, (top, left) in enumerate((y, x) for y in (0, 200) for x in (0, 200, 400)):
            split = "val" if place == 5 else "train"
            piece = photo[top : top + 200, left : left + 200]
            Image.fromarray(piece).save(folder / "images" / split / name / f"{place}.png")
    path = pack(folder / "images", folder / "packed", storage="beton").parent / "train.beton"
    pipelines = {"image": [SimpleRGBImageDecoder(), ToTensor()], "label": None}
    loader = Loader(str(path), 10, num_workers=1, drop_last=False, pipelines=pipelines)
    theirs = torch.cat([batch[0].clone() for batch in loader]).numpy().astype(int)
    ours = np.stack([Beton(path)[index][0] for index in range(len(theirs))]).astype(int)
    difference = np.abs(ours - theirs)
    return {"images": len(theirs), "mean": float(difference.mean()), "largest": int(difference.max())}


def augmentation_is_a_function_of_the_seed(folder: Path) -> dict[str, Any]:
    """Workers change nothing; seeds and epochs do; the tail of an epoch is the tail."""
    manifest = packed(folder)
    straight, _ = read(opened(manifest, workers=0), 1)
    return {
        "one_worker": torch.equal(straight, read(opened(manifest, workers=1), 1)[0]),
        "two_workers": torch.equal(straight, read(opened(manifest, workers=2), 1)[0]),
        "again": torch.equal(straight, read(opened(manifest), 1)[0]),
        "other_seed": torch.equal(straight, read(opened(manifest, seed=4), 1)[0]),
        "other_epoch": torch.equal(straight, read(opened(manifest), 2)[0]),
        "tail": torch.equal(straight[8:], read(opened(manifest), 1, skip=2)[0]),
    }


def faults_are_fenced_in(folder: Path) -> dict[str, Any]:
    """Threads end on an early break, torch's threads are kept, batches are copies, too many workers are capped."""
    torch.set_num_threads(2)
    manifest = packed(folder)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002  the one that must stay untouched
    batches = opened(manifest, workers=999, batch_size=1)
    for stop in range(8):
        for place, _ in enumerate(batches):
            if place == stop:
                break
    alive = threading.active_count()
    kept = [(images, images.clone()) for images, _ in batches]
    after = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    return {
        "generators": torch.equal(before[0], after[0]) and before[1] == after[1],
        "threads_left": alive - 1,
        "torch_threads": torch.get_num_threads(),
        "copies": all(torch.equal(images, copy) for images, copy in kept),
        "workers": batches.describe()["workers"],
        "versions": sorted(batches.describe()["versions"]),
    }


def a_dead_reader_is_reported(folder: Path) -> dict[str, Any]:
    """What the reading thread raises ends the loop instead of hanging it."""
    batches: Any = opened(packed(folder))

    def fail(**arguments: Any) -> None:
        raise ValueError("a stage failed")

    stages, outputs = batches._loader.code
    batches._loader.code = ([(fail, stages[0][1]), *stages[1:]], outputs)
    try:
        list(batches)
    except RuntimeError as error:
        return {"error": str(error), "threads_left": threading.active_count() - 1}
    return {"error": None}


def a_dead_writer_is_reported(folder: Path) -> dict[str, Any]:
    """A worker that is killed while it reads (a pipe, which keeps it busy) ends the writing, without leftovers."""
    os.mkfifo(folder / "pipe.png")
    out = folder / "out"
    out.mkdir()

    def kill_the_worker() -> None:
        with (folder / "pipe.png").open("wb"):  # returns when the worker has opened the other end
            for process in psutil.Process().children(recursive=True):
                if any(link.resolve().name == "pipe.png" for link in Path(f"/proc/{process.pid}/fd").iterdir()):
                    process.kill()

    threading.Thread(target=kill_the_worker, daemon=True).start()
    options: Any = {"write_mode": "jpg", "max_resolution": 64, "jpeg_quality": 90, "workers": 1}
    try:
        write_betons(folder, {"train": [ImageFile("pipe.png", 0)]}, out, **options)
    except UserError as error:
        return {"error": error.what, "left": sorted(path.name for path in out.iterdir())}
    return {"error": ""}


def a_killed_writer_is_reported(folder: Path) -> dict[str, Any]:
    """The writing process is killed while both its workers wait, each for a pipe that no one writes to."""
    images = [ImageFile(f"{name}.png", 0) for name in "ab"]
    for image in images:
        os.mkfifo(folder / image.path)
    out = folder / "out"
    out.mkdir()
    processes: list[psutil.Process] = []
    killed_at: list[float] = []

    def kill_the_writer() -> None:
        for image in images:  # opening one for writing waits until a worker has opened it for reading
            streams.append((folder / image.path).open("wb"))
        (writer,) = psutil.Process().children()
        processes.extend([writer, *writer.children(recursive=True)])
        killed_at.append(time.monotonic())
        writer.kill()

    streams: list[Any] = []  # kept open: a worker would read to an end that does not come
    threading.Thread(target=kill_the_writer, daemon=True).start()
    options: Any = {"write_mode": "jpg", "max_resolution": 64, "jpeg_quality": 90, "workers": 2}
    error = ""
    try:
        write_betons(folder, {"train": images}, out, **options)
    except UserError as raised:
        error = raised.what
    seconds = time.monotonic() - killed_at[0]
    _, alive = psutil.wait_procs(processes, timeout=5)
    return {
        "error": error,
        "seconds": seconds,
        "processes": len(processes),
        "alive": [process.pid for process in alive if process.status() != psutil.STATUS_ZOMBIE],
        "left": sorted(path.name for path in out.iterdir()),
    }


def odd_images_are_written(folder: Path) -> dict[str, Any]:
    """Every mode is converted, and unreadable files are refused."""
    root = image_folder(folder / "images", COUNTS)
    for mode in ("L", "1", "P", "LA", "RGBA"):
        Image.new(mode, (5, 9)).save(root / f"train/a/{mode}.png")
    Image.new("CMYK", (700, 3)).save(root / "train/a/cmyk.jpg")
    (root / "train/a/bad.jpg").write_bytes(b"bad")
    manifest = pack(root, folder / "packed", storage="beton", max_resolution=64)
    return {
        "n": read_json(manifest)["train"]["n"],
        "refused": [line for line in (folder / "packed/report.csv").read_text().splitlines() if ",refused," in line],
        "repaired": read_json(manifest)["repaired"]["images"],
        "labels": torch.bincount(read(opened(manifest, batch_size=23))[1]).tolist(),
    }


def one_worker_repeats_its_bytes(folder: Path) -> dict[str, Any]:
    """Packed again from the same files."""
    first = packed(folder)
    again = pack(folder.parent / "jpg/images", folder / "again", storage="beton")
    names = ("train.beton", "val.beton", "manifest.json")
    return {name: (first.parent / name).read_bytes() == (again.parent / name).read_bytes() for name in names}


def a_set_under_a_name_of_its_own(folder: Path) -> dict[str, Any]:
    """`attngeo pack FOLDER NAME.beton`."""
    images = image_folder(folder / "images", COUNTS)
    manifest = pack(images, folder / "out/set.beton", workers=2)
    labels = {split: sorted(read(opened(folder / "out/set.beton", split))[1].tolist()) for split in ("train", "val")}
    return {"manifest": manifest.name, "files": sorted(path.name for path in (folder / "out").iterdir()), **labels}


def large_images_are_stored_or_reduced(folder: Path) -> dict[str, Any]:
    """A raw sample larger than FFCV's page of 8 MiB, and one image of 108 million pixels."""
    from attngeo.data.beton import Beton

    root = image_folder(folder / "images", COUNTS)
    Image.new("RGB", (2000, 1900), (1, 2, 3)).save(root / "train/a/000.png")
    Image.new("L", (12000, 9000), 90).save(root / "train/a/000.jpg")
    manifest = pack(root, folder / "packed", storage="beton", write_mode="raw", max_resolution=2000)
    stored = Beton(manifest.parent / "train.beton")
    return {
        "sides": [[int(stored.heights[place]), int(stored.widths[place])] for place in (1, 0)],
        "n": len(stored),
        "read": read(opened(manifest))[0].shape[0],
    }


def operations_in_the_wrong_order_are_refused(folder: Path) -> dict[str, Any]:
    """Both ways in which FFCV would hang: here no loader is made at all."""
    from ffcv.fields.rgb_image import SimpleRGBImageDecoder
    from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToTensor, ToTorchImage

    from attngeo.data.ffcv_loader import ordered

    ones = np.ones(3, np.float32)
    decoder, to_tensor, to_image = SimpleRGBImageDecoder(), ToTensor(), ToTorchImage()
    told = []
    for operations in (
        [decoder, to_tensor, to_image, NormalizeImage(ones, ones, np.float32)],
        [decoder, to_tensor, RandomHorizontalFlip()],
        [decoder, to_image, to_tensor],
        [decoder, torch.nn.Identity(), to_tensor],
    ):
        try:
            ordered(operations)
        except ValueError as error:
            told.append(str(error).split()[0])
    ordered([decoder, RandomHorizontalFlip(), to_tensor, to_image, torch.nn.Identity()])
    return {"refused": told}


def a_silent_reader_is_given_up(folder: Path) -> dict[str, Any]:
    """A reading thread that never gives a batch."""
    from attngeo.data import ffcv_loader

    ffcv_loader.NO_BATCH_TIMEOUT_S = 1
    batches: Any = opened(packed(folder))
    waiting = threading.Event()
    stages, outputs = batches._loader.code
    batches._loader.code = ([(lambda **arguments: waiting.wait(), stages[0][1]), *stages[1:]], outputs)
    begun = time.monotonic()
    error = ""
    try:
        list(batches)
    except TimeoutError as raised:
        error = str(raised)
    finally:
        waiting.set()
        ffcv_loader.NO_BATCH_TIMEOUT_S = 600
    return {"error": error, "seconds": time.monotonic() - begun}


def damaged_files_are_refused(folder: Path) -> dict[str, Any]:
    """Stock FFCV reads another sample's pixels from a damaged JPEG, and opens or aborts on a file cut short."""
    manifest = pack(image_folder(folder / "images", COUNTS), folder / "packed", storage="beton")
    path = manifest.parent / "train.beton"
    whole = path.read_bytes()
    address = int(whole.index(b"\xff\xd8\xff"))
    told = []
    for damaged in (
        whole[: address + 40] + bytes(40) + whole[address + 80 :],
        whole[:-24],
        whole[: len(whole) // 2],
        whole[:16] + bytes(8) + whole[24:],
    ):
        path.write_bytes(damaged)
        try:
            opened(manifest)
        except UserError as error:
            told.append("not the file that was packed" in error.what)
    return {"refused": told}


def an_unfinished_epoch_does_no_harm_at_the_exit(folder: Path) -> dict[str, Any]:
    """The exit status of this process is the result; its last trial."""
    batches = opened(packed(folder), batch_size=1, workers=2)
    iterator = iter(batches)
    globals()["_kept"] = iterator
    next(iterator)
    return {"alive": threading.active_count() - 1}


def two_loaders_at_once(folder: Path) -> dict[str, Any]:
    """Refused where Numba's threads cannot bear it, and possible with one worker."""
    manifest = packed(folder)
    first, second = (iter(opened(manifest, split, batch_size=1, workers=2)) for split in ("train", "val"))
    next(first)
    try:
        next(second)
        error = ""
    except UserError as raised:
        error = raised.what
    first.close()  # type: ignore[attr-defined]
    after = len(list(opened(manifest, "val", batch_size=1, workers=2)))
    both = [iter(opened(manifest, split, batch_size=1, workers=1)) for split in ("train", "val")]
    return {"error": error, "after": after, "one worker": [len(next(batches)[1]) for batches in both]}


def workers_are_capped_by_the_cores_given(folder: Path) -> dict[str, Any]:
    """Of two cores this process may use one."""
    batches = opened(packed(folder), workers=2)
    return {"workers": batches.describe()["workers"], "images": read(batches)[0].shape[0]}


if __name__ == "__main__":
    faulthandler.dump_traceback_later(280, exit=True)
    outcomes = {}
    for trial in sys.argv[2:]:
        own = Path(sys.argv[1]) / trial
        own.mkdir()
        outcomes[trial] = globals()[trial](own)
    print(json.dumps(outcomes))
