"""Tiny image sets for the tests of attngeo.data."""

import io
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from attngeo.data.batches import Batches, open_batches
from attngeo.data.beton import FIELD, HEADER, IMAGE_FIELD, INTEGER_FIELD, JPEG_MODE, RAW_MODE, REGION, SAMPLE

PAGE_BYTES = 1 << 21
COUNTS = {"a": (6, 2), "b": (5, 3)}  # training and validation images of each class in the sets of conftest.py
Batch = tuple[torch.Tensor, torch.Tensor]


def picture(seed: int, height: int = 13, width: int = 17) -> np.ndarray:
    """A smooth random RGB picture, uint8 [H, W, 3]."""
    coarse = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return np.array(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def image_folder(root: Path, counts: dict[str, tuple[int, int]], *, size: tuple[int, int] = (13, 17)) -> Path:
    """PNG files in root/{train,val}/CLASS; `counts` gives the numbers for each class; every picture is different."""
    number = 0
    for name, both in counts.items():
        for split, count in zip(("train", "val"), both, strict=True):
            folder = root / split / name
            folder.mkdir(parents=True)
            for place in range(count):
                Image.fromarray(picture(number, *size)).save(folder / f"{place:03d}.png")
                number += 1
    return root


def opened(manifest: Path, split="train", **options) -> Batches:
    return open_batches(
        manifest, split, **({"batch_size": 4, "seed": 3, "image_size": 32, "augment": split == "train"} | options)
    )


def epochs(batches: Batches, count: int = 2) -> list[Batch]:
    found = []
    for epoch in range(count):
        batches.set_epoch(epoch)
        found += [(images.clone(), labels.clone()) for images, labels in batches]
    return found


def assert_same(first: list[Batch], second: list[Batch]) -> None:
    assert len(first) == len(second) > 0
    for (images, labels), (other_images, other_labels) in zip(first, second, strict=True):
        assert torch.equal(labels, other_labels)
        assert torch.equal(images, other_images)


def jpeg_bytes(pixels: np.ndarray) -> bytes:
    """`pixels` as a JPEG file."""
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=95)
    return stream.getvalue()


def write_beton_by_hand(path: Path, images: list[np.ndarray], labels: list[int], *, jpeg: bool = False) -> None:
    """A .beton file of one page, laid out here independently of FFCV."""
    contents = [jpeg_bytes(pixels) if jpeg else pixels.tobytes() for pixels in images]
    header = np.zeros(1, HEADER)
    fields = np.zeros(2, FIELD)
    fields["type"] = IMAGE_FIELD, INTEGER_FIELD
    for row, name in zip(fields, (b"image", b"label"), strict=True):
        row["name"][: len(name)] = np.frombuffer(name, np.uint8)
    samples = np.zeros(len(images), SAMPLE)
    regions = np.zeros(len(images), REGION)
    address = PAGE_BYTES
    for place, (pixels, content) in enumerate(zip(images, contents, strict=True)):
        mode = JPEG_MODE if jpeg else RAW_MODE
        samples[place] = ((mode, pixels.shape[1], pixels.shape[0], address), labels[place])
        regions[place] = (place, address, len(content))
        address += len(content)
    table = 2 * PAGE_BYTES
    header[0] = (2, 2, PAGE_BYTES, len(images), table)
    front = header.tobytes() + fields.tobytes() + samples.tobytes()
    page = b"".join(contents)
    path.write_bytes(front.ljust(PAGE_BYTES, b"\0") + page.ljust(PAGE_BYTES, b"\0") + regions[::-1].tobytes())


def idx(values: np.ndarray) -> bytes:
    """`values` as an IDX file of unsigned bytes."""
    lengths = b"".join(int(length).to_bytes(4, "big") for length in values.shape)
    return bytes([0, 0, 8, values.ndim]) + lengths + values.astype(np.uint8).tobytes()


def debian_package(files: dict[str, bytes], compression: str = "xz") -> bytes:
    """A Debian package that holds `files`; compression is "", "gz" or "xz"."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=f"w:{compression}") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))

    def entry(name: str, content: bytes) -> bytes:
        head = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        return head + content + b"\n" * (len(content) % 2)

    name = "data.tar" + (f".{compression}" if compression else "")
    parts = (entry("debian-binary", b"2.0"), entry("control.tar", b"abc"), entry(name, data.getvalue()))
    return b"!<arch>\n" + b"".join(parts)
