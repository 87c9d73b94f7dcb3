"""One rule for turning an image file into RGB bytes, used by packing and by every loader that reads files.

The EXIF orientation is applied. Transparency is composited on white. Grey, palette, CMYK and other colour spaces
become RGB; 16-bit grey is scaled to 8 bits. Of a file with several frames the first counts. Images longer than the
bound are reduced (bicubic, antialiased). The content says what a file is, not its suffix. Files that are truncated,
damaged, of more than 178 million pixels or of floating-point values are unreadable.
"""

import io
import os
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

RULE = (
    "EXIF orientation applied; transparency on white; grey, palette and CMYK to RGB; 16-bit grey scaled to 8 bits; "
    "first frame"
)
SIXTEEN_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N", "I")


MODE_NAMES = {"L": "grey", "1": "black and white", "P": "palette"}
SUFFIXES = {
    "JPEG": (".jpg", ".jpeg"),
    "MPO": (".jpg", ".jpeg"),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm"),
}
ORIENTATION = 0x0112  # EXIF


class UnreadableImage(Exception):
    """The file is no image that the rule covers; the words say why."""


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The bytes of an image file; UnreadableImage when they cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UnreadableImage(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Examined:
    """An image as packing sees it: RGB pixels uint8 [H, W, 3], and what was repaired or is odd about it, in words."""

    pixels: np.ndarray
    repaired: str
    warning: str


def examine(source: str | os.PathLike[str] | bytes, name: str, max_resolution: int | None) -> Examined:
    """Decode an image file named `name` and say what was done to it and what is odd; raises UnreadableImage."""
    notes: list[str] = []
    pixels = decode_image(source, max_resolution, notes, name)
    height, width, _ = pixels.shape
    warning = f"{width} x {height} pixels" if min(height, width) == 1 else ""
    return Examined(pixels, "; ".join(notes), warning)


def decode_image(
    source: str | os.PathLike[str] | bytes,
    max_resolution: int | None = None,
    notes: list[str] | None = None,
    name: str | None = None,
) -> np.ndarray:
    """RGB pixels of an image file, uint8 [H, W, 3]; the longer side is at most `max_resolution` if that is given.

    Warnings of the decoder (broken EXIF, oversized tags) are appended to `notes` instead of being printed, and so are
    conversions, and a `name` whose suffix is that of another format. Raises UnreadableImage.
    """
    notes = [] if notes is None else notes
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with Image.open(io.BytesIO(source) if isinstance(source, bytes) else Path(source)) as image:
                if max_resolution is not None:
                    image.draft("RGB", (2 * max_resolution, 2 * max_resolution))
                image.load()
                _note_suffix(image, name, notes)
                upright = _upright(image, notes)
                array = np.array(_bounded(_to_rgb(upright, notes), max_resolution))
        except UnreadableImage:
            raise
        except UnidentifiedImageError as error:  # Pillow's words hold the address of an object
            raise UnreadableImage("UnidentifiedImageError: no image of a known format") from error
        except Exception as error:  # Pillow's decoders raise almost anything on damaged input
            raise UnreadableImage(f"{type(error).__name__}: {error}") from error
    notes.extend(str(warning.message) for warning in caught)
    return array


def _note_suffix(image: Image.Image, name: str | None, notes: list[str]) -> None:
    kind = image.format or ""
    suffix = Path(name or "").suffix.lower()
    if suffix and kind and suffix not in SUFFIXES.get(kind, (f".{kind.lower()}",)):
        notes.append(f"{kind} content named {suffix}")


def _upright(image: Image.Image, notes: list[str]) -> Image.Image:
    """Apply the EXIF orientation; a broken EXIF block counts as none."""
    try:
        orientation = image.getexif().get(ORIENTATION, 1)
        upright = ImageOps.exif_transpose(image)
    except (OSError, SyntaxError, ValueError, KeyError, TypeError, struct.error) as error:
        notes.append(f"EXIF ignored ({type(error).__name__}: {error})")
        return image
    if orientation in range(2, 9):
        notes.append(f"EXIF orientation {orientation} applied")
    return upright


def _to_rgb(image: Image.Image, notes: list[str]) -> Image.Image:
    if image.mode in SIXTEEN_BIT_MODES:
        notes.append("16-bit grey scaled to 8 bits")
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise UnreadableImage("grey values beyond 16 bits")
        return Image.fromarray(((values + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise UnreadableImage("floating-point values have no defined range")
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        notes.append(f"{image.mode} with transparency put on white")
        with_alpha = image.convert("RGBA")
        background = Image.new("RGBA", with_alpha.size, "white")
        return Image.alpha_composite(background, with_alpha).convert("RGB")
    if image.mode == "RGB":
        return image
    notes.append(f"{MODE_NAMES.get(image.mode, image.mode)} to RGB")
    return image.convert("RGB")


def _bounded(image: Image.Image, max_resolution: int | None) -> Image.Image:
    longest = max(image.size)
    if max_resolution is None or longest <= max_resolution:
        return image
    width, height = (max(1, round(side * max_resolution / longest)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)
