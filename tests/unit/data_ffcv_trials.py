"""Trials of FFCV, each run as a program of its own by test_data_ffcv.py, since FFCV's faults are hangs and aborts.

Prints one JSON line. Run: python -m tests.unit.data_ffcv_trials NAME FOLDER.
"""

import faulthandler
import json
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attngeo.data.batches import Batches, open_batches
from attngeo.data.packing import pack
from tests.unit.data_support import image_folder, picture

COUNTS = {"a": (9, 3), "b": (8, 2)}


def packed(folder: Path, **options: Any) -> Path:
    return pack(image_folder(folder / "images", COUNTS), folder / "packed", storage="beton", **options)


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
    batches = opened(manifest, workers=999, batch_size=1)
    for stop in range(8):
        for place, _ in enumerate(batches):
            if place == stop:
                break
    alive = threading.active_count()
    kept = [(images, images.clone()) for images, _ in batches]
    return {
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
    """A worker that is killed ends the packing with an error, without leftovers."""
    import os
    import signal
    import time

    import psutil

    from attngeo.errors import UserError

    root = image_folder(folder / "images", {"a": (400, 1), "b": (1, 1)})

    def kill_a_worker() -> None:
        while True:
            for child in psutil.Process().children():
                for worker in child.children():
                    if "attngeo.data.ffcv_writer" in " ".join(worker.cmdline()):
                        os.kill(worker.pid, signal.SIGKILL)
                        return
            time.sleep(0.001)

    threading.Thread(target=kill_a_worker, daemon=True).start()
    try:
        pack(root, folder / "packed", storage="beton")
    except UserError as error:
        left = sorted(path.name for path in (folder / "packed").iterdir())
        return {"error": error.what, "left": left}
    return {"error": None}


def odd_images_are_written(folder: Path) -> dict[str, Any]:
    """Every mode is converted, unreadable files are refused, and one worker writes the same bytes each time."""
    from PIL import Image

    root = image_folder(folder / "images", COUNTS)
    for mode in ("L", "1", "P", "LA", "RGBA"):
        Image.new(mode, (5, 9)).save(root / f"train/a/{mode}.png")
    Image.new("CMYK", (700, 3)).save(root / "train/a/cmyk.jpg")
    (root / "train/a/bad.jpg").write_bytes(b"bad")
    first = pack(root, folder / "one", storage="beton", max_resolution=64)
    second = pack(root, folder / "two", storage="beton", max_resolution=64)
    labels = read(opened(first, batch_size=23))[1]
    from attngeo.files import read_json

    return {
        "same": first.read_text() == second.read_text(),
        "n": read_json(first)["train"]["n"],
        "refused": (folder / "one/refused.csv").read_text().splitlines()[1:],
        "labels": torch.bincount(labels).tolist(),
    }


if __name__ == "__main__":
    faulthandler.dump_traceback_later(200, exit=True)
    outcome = globals()[sys.argv[1]](Path(sys.argv[2]))
    print(json.dumps(outcome))
