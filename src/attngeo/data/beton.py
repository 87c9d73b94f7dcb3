"""A reader of .beton files (FFCV's format, version 2; one RGB image and one integer a sample) in NumPy and Pillow
alone.

It is the fallback where FFCV is not installed, and the oracle against which FFCV's own reader is tested. Unlike that
one it refuses files that are cut short, were never finished, or whose samples point outside their data.

Layout, little-endian: header; one descriptor of 1 048 bytes a field; one row of metadata a sample; pages of data; and
the table (sample, address, size) of the regions in use, at the address that the header names and up to the end of the
file.
"""

import os
from pathlib import Path

import numpy as np

from attngeo.data.images import UnreadableImage, decode_image
from attngeo.errors import UserError

VERSION = 2
HEADER = np.dtype(
    [("version", "<u2"), ("num_fields", "<u2"), ("page_size", "<u4"), ("num_samples", "<u8"), ("table_address", "<u8")],
    align=True,
)
FIELD = np.dtype([("type", "u1"), ("name", "u1", 16), ("arguments", "u1", 1024)], align=True)
REGION = np.dtype([("sample", "<u8"), ("address", "<u8"), ("size", "<u8")])
INTEGER_FIELD, IMAGE_FIELD = 1, 2
IMAGE = np.dtype([("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("address", "<u8")])
SAMPLE = np.dtype([("image", IMAGE), ("label", "<i8")], align=True)
JPEG_MODE, RAW_MODE = 0, 1


class Beton:
    """An open .beton file; `beton[i]` is (pixels uint8 [H, W, 3], label). Raises UserError if the file is not whole."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        size = self.path.stat().st_size
        if size < HEADER.itemsize:
            raise self._damaged("shorter than its header")
        self._bytes = np.memmap(self.path, np.uint8, mode="r")
        header = self._view(HEADER, 0, 1)[0]
        if header["version"] != VERSION or header["num_fields"] != 2:
            raise self._damaged("not a .beton of version 2 with an image and a label")
        table, samples = int(header["table_address"]), int(header["num_samples"])
        start = HEADER.itemsize + 2 * FIELD.itemsize
        if not start + samples * SAMPLE.itemsize <= table <= size or (size - table) % REGION.itemsize:
            raise self._damaged("its writer did not finish, or bytes are missing")
        if self._view(FIELD, HEADER.itemsize, 2)["type"].tolist() != [IMAGE_FIELD, INTEGER_FIELD]:
            raise self._damaged("its fields are not an image and an integer")
        self._samples = self._view(SAMPLE, start, samples)
        regions = np.sort(self._view(REGION, table, (size - table) // REGION.itemsize), order="address")
        places = np.searchsorted(regions["address"], self._samples["image"]["address"])
        found = regions[np.minimum(places, len(regions) - 1)] if len(regions) else np.zeros(samples, REGION)
        self._sizes = found["size"].astype(np.int64)
        ends = found["address"].astype(np.int64) + self._sizes
        if (
            (found["address"] != self._samples["image"]["address"]).any()
            or (ends > table).any()
            or (self._sizes == 0).any()
        ):
            raise self._damaged("samples point outside its data")

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def labels(self) -> np.ndarray:
        """Labels, int64 [n]."""
        return np.array(self._samples["label"])

    @property
    def heights(self) -> np.ndarray:
        """Heights in pixels, int64 [n]."""
        return self._samples["image"]["height"].astype(np.int64)

    @property
    def widths(self) -> np.ndarray:
        """Widths in pixels, int64 [n]."""
        return self._samples["image"]["width"].astype(np.int64)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        image, label = self._samples[index]["image"], int(self._samples[index]["label"])
        address, shape = int(image["address"]), (int(image["height"]), int(image["width"]), 3)
        content = self._bytes[address : address + int(self._sizes[index])]
        if image["mode"] == RAW_MODE:
            if content.size != np.prod(shape):
                raise self._damaged(f"sample {index} has not the size that its row says")
            return np.array(content.reshape(shape)), label
        try:
            pixels = decode_image(content.tobytes())
        except UnreadableImage as error:
            raise self._damaged(f"sample {index} is no JPEG image ({error})") from error
        if pixels.shape != shape:
            raise self._damaged(f"sample {index} has not the size that its row says")
        return pixels, label

    def _view(self, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
        return np.frombuffer(self._bytes, dtype, count=count, offset=offset)

    def _damaged(self, reason: str) -> UserError:
        return UserError(f"{self.path} is not a whole .beton file: {reason}", "delete it and pack the images again")
