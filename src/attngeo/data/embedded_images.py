"""Turns image sets found in packages into arrays or class folders."""

import gzip
import io
import lzma
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from attngeo.data.folders import split_by_hash

AR_MAGIC = b"!<arch>\n"
AR_HEADER_BYTES = 60


def gunzip(content: bytes, size: int) -> bytes:
    """Unpack a gzip file of `size` bytes; ValueError when it holds more or less, whatever it would unpack to."""
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
        unpacked = stream.read(size + 1)
    if len(unpacked) != size:
        raise ValueError(f"unpacks to {'more' if len(unpacked) > size else 'fewer'} than {size} bytes")
    return unpacked


def parse_idx(content: bytes) -> np.ndarray:
    """An IDX file of unsigned bytes: 0, 0, type 8, number of axes, big-endian lengths, values in row order."""
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise ValueError("not an IDX file of unsigned bytes")
    axes = content[3]
    shape = tuple(int.from_bytes(content[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(axes))
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * axes)
    if values.size != int(np.prod(shape)):
        raise ValueError(f"the header promises {shape}, the file holds {values.size} values")
    return values.reshape(shape)


def idx_arrays(contents: Mapping[str, bytes], folder: Path) -> None:
    """Write the four IDX files of a set like MNIST as `arrays.npz`: images [n, H, W] and labels [n], uint8."""
    arrays = {
        f"{split}_{what}": parse_idx(contents[f"{stem}-{what}-{suffix}-ubyte"])
        for split, stem in (("train", "train"), ("val", "t10k"))
        for what, suffix in (("images", "idx3"), ("labels", "idx1"))
    }
    for split in ("train", "val"):
        if len(arrays[f"{split}_images"]) != len(arrays[f"{split}_labels"]):
            raise ValueError(f"{split}: the numbers of images and labels differ")
    np.savez(folder / "arrays.npz", **arrays)  # type: ignore[arg-type]


def class_folders(contents: Mapping[str, bytes], folder: Path) -> None:
    """Write images named CLASS/FILE below train/ and val/, where one fifth of each class goes, chosen by hash."""
    held_out = split_by_hash(list(contents))
    for name, content in contents.items():
        target = folder / ("val" if name in held_out else "train") / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def debian_members(package: Path) -> Iterator[tuple[str, bytes]]:
    """Files of a Debian package as (path, content), without installing it: an `ar` archive with a tar in it."""
    content = package.read_bytes()
    if not content.startswith(AR_MAGIC):
        raise ValueError(f"{package.name} is not an ar archive")
    position = len(AR_MAGIC)
    while position + AR_HEADER_BYTES <= len(content):
        header = content[position : position + AR_HEADER_BYTES]
        name, size = header[:16].decode("ascii").strip().rstrip("/"), int(header[48:58])
        position += AR_HEADER_BYTES
        if name in ("data.tar.xz", "data.tar.gz", "data.tar"):
            data = content[position : position + size]
            data = (
                lzma.decompress(data)
                if name.endswith(".xz")
                else gzip.decompress(data)
                if name.endswith(".gz")
                else data
            )
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
                for member in archive:
                    stream = archive.extractfile(member) if member.isfile() else None
                    if stream is not None:
                        yield member.name, stream.read()
            return
        position += size + size % 2  # members start at even offsets
    raise ValueError(f"{package.name} holds no data archive that can be read")
