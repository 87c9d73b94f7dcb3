"""Full-state checkpoints: each file is complete or absent, and a damaged one is passed over for the one before."""

import fcntl
import hashlib
import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from attngeo.errors import UserError
from attngeo.files import sha256_file, write_aside

_DIGITS = 16  # of the content's SHA-256
_KEPT = 2  # the newest, and one to fall back on if the newest turns out damaged


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Hold the folder for this process alone; UserError if another process trains the same run at this moment."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another process is training in {folder}", "wait for it, or end it, and try again"
            ) from error
        yield


def save(folder: Path, state: dict[str, Any], step: int) -> Path:
    """Write `state` as the checkpoint of `step`, then remove all but the two newest.

    The file name holds the step and the head of the content's SHA-256, by which `load_newest` knows damage.
    Serialised in memory first, so that a full disk is one failed write: UserError, and the older checkpoints stay.
    """
    serialised = io.BytesIO()
    torch.save(state, serialised)
    digest = hashlib.sha256(serialised.getbuffer()).hexdigest()
    path = folder / f"checkpoint-{step:010d}-{digest[:_DIGITS]}.pt"
    with write_aside(path, "wb") as stream:
        stream.write(serialised.getbuffer())
    _sync_folder(folder)
    for old in _oldest_first(folder)[:-_KEPT]:
        old.unlink(missing_ok=True)
    return path


def load_newest(folder: Path) -> dict[str, Any] | None:
    """The state of the newest readable checkpoint, on the CPU; None if there is no checkpoint.

    Damaged files are named in a warning. If all are damaged: UserError, since starting afresh would hide a loss.
    """
    for left_over in folder.glob(".*.aside.*"):  # of a process killed while it wrote
        left_over.unlink(missing_ok=True)
    paths = _oldest_first(folder)
    for path in reversed(paths):
        if sha256_file(path).startswith(path.stem.rpartition("-")[2]):
            return torch.load(path, map_location="cpu", weights_only=True)
        warnings.warn(f"checkpoint {path} is damaged, trying the one before", stacklevel=2)
    if paths:
        raise UserError(f"every checkpoint in {folder} is damaged", "delete that folder to start the run afresh")
    return None


def _oldest_first(folder: Path) -> list[Path]:
    """By step, then by age: an epoch's last step is saved before and after its evaluation."""
    paths = folder.glob("checkpoint-*.pt")
    return sorted(paths, key=lambda path: (path.stem.split("-")[1], path.stat().st_mtime_ns))


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
