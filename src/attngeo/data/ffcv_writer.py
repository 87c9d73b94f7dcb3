"""Writes .beton files with FFCV, in a process of its own, so that no fault of the writer can hang or leak here.

FFCV's writer waits for ever when one of its workers dies, and a worker dies of any sample that it cannot store. Here
every sample is checked and converted before FFCV sees it; a worker that dies all the same ends the writing process at
once, and with it its workers; the kernel ends the workers when the writing process is killed; the file appears under
its name only when it is complete.

Run as a program: `python -m attngeo.data.ffcv_writer FOLDER`, which holds the job and the lists of images.
"""

import ctypes
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from attngeo.data.beton import Beton
from attngeo.data.ffcv_available import keep_tbb_loaded
from attngeo.data.folders import ImageFile
from attngeo.data.images import UnreadableImage, examine
from attngeo.data.index import read_index, write_index
from attngeo.data.manifest import path_of_uri
from attngeo.data.progress import Progress
from attngeo.errors import UserError
from attngeo.files import explain_os_errors, read_json, write_json

SMALLEST_PAGE_BYTES = 1 << 21
WATCH_S = 0.2
DEAD_WORKER_STATUS, IMPORT_STATUS = 70, 71
PROGRESS_S = 1.0
JOB, FAILURE, MESSAGES, PROGRESS = "job.json", "failure.txt", "messages.txt", "progress.txt"
PR_SET_PDEATHSIG = 1  # of prctl(2)


class FFCVMissing(Exception):
    """FFCV does not import here; the words say why."""


@dataclass(frozen=True)
class Job:
    """What the writing process is to do; the root of the images is a URI, which carries names of any bytes."""

    root_uri: str
    splits: list[str]
    write_mode: str
    max_resolution: int
    jpeg_quality: int
    workers: int
    parent: int


@dataclass(frozen=True)
class Problems:
    """Paths of images and what is said of them: `refused` ones cannot be used, others were repaired or are odd."""

    refused: dict[str, str] = field(default_factory=dict)
    repaired: dict[str, str] = field(default_factory=dict)
    warned: dict[str, str] = field(default_factory=dict)

    def update(self, other: "Problems") -> None:
        """Add what is said in `other`."""
        self.refused.update(other.refused)
        self.repaired.update(other.repaired)
        self.warned.update(other.warned)


def write_betons(
    root: Path,
    splits: Mapping[str, Sequence[ImageFile]],
    out: Path,
    *,
    write_mode: str,
    max_resolution: int,
    jpeg_quality: int,
    workers: int,
) -> dict[str, Problems]:
    """Write out/SPLIT.beton for the images (paths below `root`) of each split; returns their problems.

    A split of which any image is refused is not written: call again without it. With one worker the bytes are the same
    each time. Raises FFCVMissing if FFCV does not import, and UserError when its writer fails.
    """
    job = Job(root.absolute().as_uri(), list(splits), write_mode, max_resolution, jpeg_quality, workers, os.getpid())
    with (
        explain_os_errors(out),
        tempfile.TemporaryDirectory(dir=out, prefix=".pack-", ignore_cleanup_errors=True) as name,
    ):
        scratch = Path(name)
        write_json(scratch / JOB, asdict(job))
        for split, files in splits.items():
            write_index(scratch / f"{split}.jsonl", files)
        _run(name, sum(map(len, splits.values())))
        problems = {split: _read_problems(scratch / f"{split}.problems") for split in splits}
        for split, files in splits.items():
            if problems[split].refused:
                continue
            written = scratch / f"{split}.beton"
            if Beton(written).labels.tolist() != [file.label for file in files]:
                raise UserError(
                    f"FFCV wrote other labels to {split}.beton than given", "use storage 'folder'; report it"
                )
            with written.open("rb") as stream:
                os.fsync(stream.fileno())
            os.replace(written, out / f"{split}.beton")
    return problems


def _run(scratch: str, images: int) -> None:
    """Run the writing process of so many images to its end; FFCVMissing or UserError unless it succeeds."""
    watched = sys.stderr.isatty()  # then FFCV's progress bar goes to the terminal
    messages = Path(scratch) / MESSAGES
    with messages.open("wb") as stream:  # a pipe would be waited for until every process that inherited it has ended
        writer = subprocess.Popen(
            [sys.executable, "-m", "attngeo.data.ffcv_writer", scratch],
            env=os.environ | ({} if watched else {"TQDM_DISABLE": "1"}),
            stderr=None if watched else stream,
        )
        try:
            with Progress(images, "images written", shown=not watched) as progress:
                while not _ended(writer, PROGRESS_S):
                    progress.reach(_count(Path(scratch) / PROGRESS))
        except BaseException:
            writer.kill()  # its workers end with it
            writer.wait()
            raise
    if not writer.returncode:
        return
    message = _reason(writer.returncode, Path(scratch) / FAILURE, messages)
    if writer.returncode == IMPORT_STATUS:
        raise FFCVMissing(message)
    raise UserError(
        f"FFCV could not write the images: {message} (exit status {writer.returncode})",
        "make space in memory, on the disk and in /dev/shm; pack with one worker; or use storage 'folder'",
    )


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait so long for a process to end; whether it has."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _count(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):  # not written yet, or at this very moment
        return 0


def _reason(status: int, failure: Path, messages: Path) -> str:
    """Why the writing process ended: its own words, the signal that killed it, or its last message."""
    if failure.exists():
        return failure.read_text(encoding="utf-8")
    if status == -signal.SIGKILL:
        return "its writing process was killed, as the system does when memory runs out"
    lines = [line.strip() for line in messages.read_text("utf-8", "replace").splitlines() if line.strip()]
    return (lines or ["see the messages above"])[-1]


def _read_problems(path: Path) -> Problems:
    problems = Problems()
    if path.exists():
        for line in path.read_text(encoding="ascii").splitlines():
            kind, name, reason = json.loads(line)
            getattr(problems, kind)[name] = reason
    return problems


class _CheckedImages:
    """The set as FFCV's writer takes it: `[i]` never raises, problems go to a file that all workers append to."""

    def __init__(
        self, root: Path, files: Sequence[ImageFile], max_resolution: int, problems: Path, done: Any = None
    ) -> None:
        self.root = root
        self.done = done  # a multiprocessing.Value that counts the images read
        self.files = files
        self.max_resolution = max_resolution
        self.problems = problems

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        file = self.files[index]
        if self.done is not None:
            with self.done.get_lock():
                self.done.value += 1
        try:
            image = examine(self.root / file.path, file.path, self.max_resolution)
        except UnreadableImage as error:
            self._report("refused", file.path, str(error))
            return np.zeros((1, 1, 3), np.uint8), 0
        if image.repaired:
            self._report("repaired", file.path, image.repaired)
        if image.warning:
            self._report("warned", file.path, image.warning)
        return image.pixels, file.label

    def _report(self, kind: str, path: str, reason: str) -> None:
        line = json.dumps([kind, path, reason]) + "\n"
        descriptor = os.open(self.problems, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(descriptor, line.encode("ascii"))  # one write: lines of several workers do not mix
        finally:
            os.close(descriptor)


class _Worker(multiprocessing.Process):
    """A process of FFCV's writer, kept in sight: one that dies at once vanishes from multiprocessing's own list."""

    started: ClassVar[list["_Worker"]] = []

    def start(self) -> None:
        super().start()
        self.started.append(self)

    def run(self) -> None:
        """Work, but no longer than the writing process lives: a worker may wait for ever where no code of ours runs."""
        _end_with_parent()
        super().run()


def _end_with_parent() -> None:
    """Have the kernel kill this process, a child of multiprocessing, as soon as its parent has ended."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:  # it ended before the kernel was asked
        os._exit(DEAD_WORKER_STATUS)


def _watch(parent: int, scratch: Path, done: Any) -> None:
    """Write down how many images are done; end this process and its workers as soon as a worker failed or whoever
    started this process is gone."""
    failure, progress, told = scratch / FAILURE, scratch / PROGRESS, 0
    while True:
        if done.value != told:
            told = done.value
            with suppress(OSError):  # its folder may be gone
                progress.write_text(str(told), encoding="ascii")
        failed = [worker.exitcode for worker in _Worker.started if worker.exitcode not in (None, 0)]
        if failed or os.getppid() != parent:
            for worker in _Worker.started:
                if worker.is_alive():
                    worker.kill()
            try:
                if failed:
                    failure.write_text(f"a process of FFCV's writer ended with status {failed[0]}", encoding="utf-8")
            finally:  # its folder may be gone as well
                os._exit(DEAD_WORKER_STATUS)
        time.sleep(WATCH_S)


def _write(scratch: Path) -> None:
    job = Job(**read_json(scratch / JOB))
    done = multiprocessing.Value("Q", 0)
    threading.Thread(target=_watch, args=(job.parent, scratch, done), daemon=True).start()
    try:
        import ffcv.writer
        from ffcv.fields import IntField, RGBImageField
    except Exception as error:  # numba, OpenCV and missing libraries raise many kinds
        (scratch / FAILURE).write_text(f"{type(error).__name__}: {error}".replace("\n", " "), encoding="utf-8")
        sys.exit(IMPORT_STATUS)
    keep_tbb_loaded()
    ffcv.writer.Process = _Worker
    page_bytes = SMALLEST_PAGE_BYTES
    while page_bytes < 3 * job.max_resolution**2:  # the largest sample must fit a page
        page_bytes *= 2
    fields = {
        "image": RGBImageField(write_mode=job.write_mode, jpeg_quality=job.jpeg_quality),
        "label": IntField(),
    }
    for split in job.splits:
        files = read_index(scratch / f"{split}.jsonl")
        target = str(scratch / f"{split}.beton")
        writer = ffcv.writer.DatasetWriter(target, fields, page_size=page_bytes, num_workers=job.workers)
        problems = scratch / f"{split}.problems"
        images = _CheckedImages(path_of_uri(job.root_uri), files, job.max_resolution, problems, done)
        writer.from_indexed_dataset(images, chunksize=max(1, min(100, len(files) // (4 * job.workers))))


def versions() -> dict[str, str]:
    """Versions of what decides the bytes of a .beton file."""
    return {name: importlib.metadata.version(name) for name in ("ffcv", "opencv-python", "numpy", "pillow")}


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
