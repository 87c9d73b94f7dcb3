"""One rule for turning an image file into RGB bytes, used by packing and by every loader that reads files.

The EXIF orientation is applied. Transparency is composited on white. Grey, palette, CMYK and other colour spaces
become RGB; 16-bit grey is scaled to 8 bits. Of a file with several frames the first counts. Images longer than the
bound are reduced (bicubic, antialiased). Files that are truncated, damaged, of more than 178 million pixels or of
floating-point values are unreadable.
"""

import io
import os
import struct
import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

RULE = (
    "EXIF orientation applied; transparency on white; grey, palette and CMYK to RGB; 16-bit grey scaled to 8 bits; "
    "first frame"
)
SIXTEEN_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N", "I")


class UnreadableImage(Exception):
    """The file is no image that the rule covers; the words say why."""


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The bytes of an image file; UnreadableImage when they cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UnreadableImage(f"{type(error).__name__}: {error}") from error


def decode_image(
    source: str | os.PathLike[str] | bytes, max_resolution: int | None = None, notes: list[str] | None = None
) -> np.ndarray:
    """RGB pixels of an image file, uint8 [H, W, 3]; the longer side is at most `max_resolution` if that is given.

    Warnings of the decoder (broken EXIF, oversized tags) are appended to `notes` instead of being printed. Raises
    UnreadableImage.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with Image.open(io.BytesIO(source) if isinstance(source, bytes) else Path(source)) as image:
                if max_resolution is not None:
                    image.draft("RGB", (2 * max_resolution, 2 * max_resolution))
                image.load()
                upright = _upright(image, notes)
                array = np.array(_bounded(_to_rgb(upright), max_resolution))
        except UnreadableImage:
            raise
        except Exception as error:  # Pillow's decoders raise almost anything on damaged input
            raise UnreadableImage(f"{type(error).__name__}: {error}") from error
    if notes is not None:
        notes.extend(str(warning.message) for warning in caught)
    return array


def _upright(image: Image.Image, notes: list[str] | None) -> Image.Image:
    """Apply the EXIF orientation; a broken EXIF block counts as none."""
    try:
        return ImageOps.exif_transpose(image)
    except (OSError, SyntaxError, ValueError, KeyError, TypeError, struct.error) as error:
        if notes is not None:
            notes.append(f"EXIF ignored ({type(error).__name__}: {error})")
        return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in SIXTEEN_BIT_MODES:
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise UnreadableImage("grey values beyond 16 bits")
        return Image.fromarray(((values + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise UnreadableImage("floating-point values have no defined range")
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        with_alpha = image.convert("RGBA")
        background = Image.new("RGBA", with_alpha.size, "white")
        return Image.alpha_composite(background, with_alpha).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _bounded(image: Image.Image, max_resolution: int | None) -> Image.Image:
    longest = max(image.size)
    if max_resolution is None or longest <= max_resolution:
        return image
    width, height = (max(1, round(side * max_resolution / longest)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)
