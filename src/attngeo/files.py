"""Files that are either complete or absent: written aside, synced and renamed; JSON that survives NaN and infinity."""

import errno
import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from attngeo.errors import UserError

_REMEDIES = {
    errno.ENOSPC: "make space on that disk and run the same command again; finished work is kept",
    errno.EDQUOT: "your quota is used up: free some of it and run the same command again; finished work is kept",
    errno.EROFS: "the file system is read-only: choose a folder that can be written",
    errno.EACCES: "give yourself write permission on the folder, or choose another",
    errno.EPERM: "give yourself write permission on the folder, or choose another",
}


@contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    """Turn a full disk, a read-only folder or a missing permission into a UserError that names `path`."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0)
        if remedy is None:
            raise
        raise UserError(f"cannot write {path}: {os.strerror(error.errno or 0)}", remedy) from error


@contextmanager
def path_aside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary path in the folder of `path`; rename it there if the block succeeds, remove it if not.

    The temporary name keeps the suffix of `path`, since many writers choose their format by it.
    """
    path = Path(path)
    aside = path.with_name(f".{path.stem}.{os.getpid()}.aside{path.suffix}")
    with explain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield aside
            with aside.open("rb") as written:
                os.fsync(written.fileno())
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)


@contextmanager
def write_aside(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """Open `path` for writing so that it appears complete or not at all; UserError on a full or read-only disk."""
    with path_aside(path) as aside, aside.open(mode, encoding=None if "b" in mode else "utf-8") as stream:
        yield stream


def encode_non_finite(value: Any) -> Any:
    """Replace NaN and infinities by the strings "NaN", "Infinity", "-Infinity", at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: encode_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode_non_finite(item) for item in value]
    return value


def decode_non_finite(value: Any) -> Any:
    """Inverse of `encode_non_finite`."""
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    if isinstance(value, dict):
        return {key: decode_non_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode_non_finite(item) for item in value]
    return value


def json_line(value: Any) -> str:
    """One line of strict JSON; non-finite numbers become strings."""
    return json.dumps(encode_non_finite(value), ensure_ascii=False, allow_nan=False)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write strict, indented JSON aside and rename it to `path`."""
    text = json.dumps(encode_non_finite(value), ensure_ascii=False, allow_nan=False, indent=1)
    with write_aside(path) as stream:
        stream.write(text + "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read JSON written by `write_json`; UserError naming the file when it is missing or damaged."""
    try:
        return decode_non_finite(json.loads(Path(path).read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise UserError(
            f"{path} does not exist",
            "let snakemake make it, with all that it needs: snakemake --cores 2 --config preset=PRESET -- all",
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON ({error})", "delete the file and run snakemake again") from error


def sha256_file(path: str | os.PathLike[str]) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
