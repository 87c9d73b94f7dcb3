"""The files of a packed set: their names, the folder they are written in first, and the order of the classes."""

import csv
import fcntl
import io
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from attngeo.data.folders import SPLITS, shown
from attngeo.errors import UserError
from attngeo.files import explain_os_errors, write_aside

BETON = ".beton"
ARRAYS = "arrays.npz"  # both splits of a set of small images, packed where they are not the set's own


@dataclass(frozen=True)
class Names:
    """Where a packed set lies.

    In a folder of its own: manifest.json, train.beton, val.beton, train.jsonl, val.jsonl, arrays.npz, classes.csv,
    report.csv.
    As NAME.beton: that file with the training images, NAME.val.beton, and NAME.manifest.json and so on beside them.
    """

    folder: Path
    stem: str = ""

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> "Names":
        """The names of the set at `path`: a folder, or one that ends in .beton."""
        path = Path(path)
        return cls(path.parent, path.stem) if path.suffix == BETON else cls(path)

    @property
    def is_beton(self) -> bool:
        """Whether the set is named after its file of training images."""
        return bool(self.stem)

    def _beside(self, name: str) -> str:
        return f"{self.stem}.{name}" if self.stem else name

    @property
    def manifest(self) -> str:
        """What the set is; complete once it is there."""
        return self._beside("manifest.json")

    @property
    def classes(self) -> str:
        """Labels and the names of their classes."""
        return self._beside("classes.csv")

    @property
    def report(self) -> str:
        """Files refused, repaired or left out."""
        return self._beside("report.csv")

    def data(self, split: str) -> str:
        """The packed images of a split."""
        return f"{self.stem}{BETON}" if self.stem and split == "train" else self._beside(f"{split}{BETON}")

    def index(self, split: str) -> str:
        """The list of the images of a split."""
        return self._beside(f"{split}.jsonl")

    def all(self) -> list[str]:
        """Every file that a set may have, the manifest last."""
        return [
            *(self.data(split) for split in SPLITS),
            *(self.index(split) for split in SPLITS),
            *([] if self.is_beton else [ARRAYS]),
            self.classes,
            self.report,
            self.manifest,
        ]


@contextmanager
def working_folder(names: Names) -> Iterator[Path]:
    """A folder beside the set to write it in, empty, held by this process alone and removed in the end.

    One left by a killed process is emptied and used. UserError if another process packs the same set at this moment.
    """
    scratch = names.folder / f".{names._beside('packing')}"
    with explain_os_errors(names.folder):
        scratch.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(scratch, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"another process packs into {shown(names.folder)}", "wait for it, or end it, and try again"
                ) from None
            for left in scratch.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            try:
                yield scratch
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        finally:
            os.close(descriptor)


def publish(scratch: Path, names: Names) -> None:
    """Move the files of a set to their places; those of an earlier set go, and without its manifest it is none."""
    (names.folder / names.manifest).unlink(missing_ok=True)
    for name in names.all():
        if (scratch / name).exists():
            os.replace(scratch / name, names.folder / name)
        else:
            (names.folder / name).unlink(missing_ok=True)


def write_classes(path: Path, classes: Sequence[str]) -> None:
    """Write the order of the classes."""
    with write_aside(path) as stream:
        stream.write(_classes_text(classes))


def check_classes(path: Path, classes: Sequence[str], remedy: str) -> None:
    """UserError unless the file says the same order as the manifest."""
    if not path.is_file():
        raise UserError(f"{path} is missing: it holds the order of the classes", remedy)
    if path.read_bytes() != _classes_text(classes).encode("utf-8"):
        raise UserError(f"{path} gives the classes another order, or other names, than the manifest", remedy)


def _classes_text(classes: Sequence[str]) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["label", "class"])
    table.writerows(enumerate(classes))
    return text.getvalue()
