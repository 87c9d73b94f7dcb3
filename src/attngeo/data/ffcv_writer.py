"""Writes .beton files with FFCV, in a process of its own, so that no fault of the writer can hang or leak here.

FFCV's writer waits for ever when one of its workers dies, and a worker dies of any sample that it cannot store. Here
every sample is checked and converted before FFCV sees it; a worker that dies all the same ends the writing process at
once, and with it its workers; the file appears under its name only when it is complete.

Run as a program: `python -m attngeo.data.ffcv_writer FOLDER`, which holds the list of images and the job.
"""

import importlib.metadata
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from attngeo.data.beton import Beton
from attngeo.data.folders import ImageFile, shown
from attngeo.data.images import UnreadableImage, decode_image
from attngeo.data.index import read_index, write_index
from attngeo.data.manifest import path_of_uri
from attngeo.errors import UserError
from attngeo.files import explain_os_errors, read_json, write_json

SMALLEST_PAGE_BYTES = 1 << 21
LARGEST_RESOLUTION = 16384
WATCH_S = 0.2
DEAD_WORKER_STATUS = 70


INDEX, PROBLEMS, JOB, RESULT = "index.jsonl", "problems.jsonl", "job.json", "images.beton"


@dataclass(frozen=True)
class Job:
    """What the writing process is to do; the root of the images is a URI, which carries names of any bytes."""

    root_uri: str
    write_mode: str
    max_resolution: int
    jpeg_quality: int
    workers: int
    parent: int


def write_beton(
    root: Path,
    files: Sequence[ImageFile],
    target: Path,
    *,
    write_mode: str,
    max_resolution: int,
    jpeg_quality: int,
    workers: int,
) -> tuple[dict[str, str], dict[str, str]]:
    """Write `files` (paths below `root`) to `target`; returns (refused: path -> reason, noted: path -> remark).

    If any image is refused, `target` is not written: call again without it. With one worker the bytes are the same
    each time. Raises UserError when the writer fails.
    """
    job = Job(root.absolute().as_uri(), write_mode, max_resolution, jpeg_quality, workers, os.getpid())
    with (
        explain_os_errors(target),
        tempfile.TemporaryDirectory(dir=target.parent, prefix=".pack-", ignore_cleanup_errors=True) as name,
    ):
        scratch = Path(name)
        write_index(scratch / INDEX, files)
        write_json(scratch / JOB, asdict(job))
        watched = sys.stderr.isatty()  # then FFCV's progress bar goes to the terminal
        finished = subprocess.run(
            [sys.executable, "-m", "attngeo.data.ffcv_writer", name],
            env=os.environ | ({} if watched else {"TQDM_DISABLE": "1"}),
            stderr=None if watched else subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        if finished.returncode:
            lines = [line.strip() for line in (finished.stderr or "").splitlines() if line.strip()]
            message = lines[-1] if lines else "see the messages above"
            raise UserError(
                f"FFCV could not write {shown(target)}: {message} (exit status {finished.returncode})",
                "make space on the disk and in /dev/shm; pack with one worker; or use storage 'folder'",
            )
        refused, noted = _read_problems(scratch / PROBLEMS)
        if not refused:
            written = scratch / RESULT
            if Beton(written).labels.tolist() != [file.label for file in files]:
                raise UserError(
                    f"FFCV wrote other labels to {shown(target)} than given", "use storage 'folder'; report it"
                )
            with written.open("rb") as stream:
                os.fsync(stream.fileno())
            os.replace(written, target)
    return refused, noted


def _read_problems(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    refused: dict[str, str] = {}
    noted: dict[str, str] = {}
    if path.exists():
        for line in path.read_text(encoding="ascii").splitlines():
            kind, name, reason = json.loads(line)
            (refused if kind == "refused" else noted)[name] = reason
    return refused, noted


class _CheckedImages:
    """The set as FFCV's writer takes it: `[i]` never raises, problems go to a file that all workers append to."""

    def __init__(self, root: Path, files: Sequence[ImageFile], max_resolution: int, problems: Path) -> None:
        self.root = root
        self.files = files
        self.max_resolution = max_resolution
        self.problems = problems

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        writer = multiprocessing.parent_process()
        if writer is not None and not writer.is_alive():  # it was killed: nobody waits for this any more
            os._exit(DEAD_WORKER_STATUS)
        file = self.files[index]
        notes: list[str] = []
        try:
            pixels = decode_image(self.root / file.path, self.max_resolution, notes)
        except UnreadableImage as error:
            self._report("refused", file.path, str(error))
            return np.zeros((1, 1, 3), np.uint8), 0
        if notes:
            self._report("noted", file.path, notes[0])
        return pixels, file.label

    def _report(self, kind: str, path: str, reason: str) -> None:
        line = json.dumps([kind, path, reason]) + "\n"
        descriptor = os.open(self.problems, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(descriptor, line.encode("ascii"))  # one write: lines of several workers do not mix
        finally:
            os.close(descriptor)


def _watch(parent: int) -> None:
    """End this process and its workers as soon as a worker failed or whoever started this process is gone."""
    workers: dict[int, multiprocessing.process.BaseProcess] = {}
    while True:
        for process in multiprocessing.active_children():
            if process.pid is not None:
                workers[process.pid] = process
        failed = [process.exitcode for process in workers.values() if process.exitcode not in (None, 0)]
        if failed or os.getppid() != parent:
            for process in workers.values():
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, signal.SIGKILL)
            print(
                f"a process of FFCV's writer ended with status {failed[:1] or 'unknown'}", file=sys.stderr, flush=True
            )
            os._exit(DEAD_WORKER_STATUS)
        time.sleep(WATCH_S)


def _write(scratch: Path) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    job = Job(**read_json(scratch / JOB))
    files = read_index(scratch / INDEX)
    page_bytes = SMALLEST_PAGE_BYTES
    while page_bytes < 3 * job.max_resolution**2:  # the largest sample must fit a page
        page_bytes *= 2
    fields = {
        "image": RGBImageField(write_mode=job.write_mode, jpeg_quality=job.jpeg_quality),
        "label": IntField(),
    }
    writer = DatasetWriter(str(scratch / RESULT), fields, page_size=page_bytes, num_workers=job.workers)
    threading.Thread(target=_watch, args=(job.parent,), daemon=True).start()
    images = _CheckedImages(path_of_uri(job.root_uri), files, job.max_resolution, scratch / PROBLEMS)
    writer.from_indexed_dataset(images, chunksize=max(1, min(100, len(files) // (4 * job.workers))))


def versions() -> dict[str, str]:
    """Versions of what decides the bytes of a .beton file."""
    return {name: importlib.metadata.version(name) for name in ("ffcv", "opencv-python", "numpy", "pillow")}


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
