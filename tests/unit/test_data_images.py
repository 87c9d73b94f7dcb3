"""The one rule that turns image files into RGB bytes."""

import io
import warnings

import numpy as np
import pytest
from PIL import Image

from attngeo.data.images import UnreadableImage, decode_image
from tests.unit.data_support import jpeg_bytes, picture


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "RGBA", "LA", "I;16"])
def test_every_mode_becomes_three_channels_of_bytes(mode):
    grey = Image.fromarray(picture(0)).convert("L")
    image = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257) if mode == "I;16" else grey.convert(mode)
    pixels = decode_image(encoded(image))
    assert pixels.dtype == np.uint8
    assert pixels.shape == (13, 17, 3)
    if mode != "1":
        assert np.array_equal(pixels[..., 0], np.asarray(grey))


def test_cmyk_jpeg_keeps_its_colours():
    image = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    red, green, blue = decode_image(encoded(image, "JPEG", quality=95))[4, 4]
    assert red > 240
    assert green < 15
    assert blue < 15


def test_transparent_pixels_are_white_in_every_mode_that_has_them():
    rgba = Image.new("RGBA", (2, 1), (10, 20, 30, 255))
    rgba.putpixel((1, 0), (10, 20, 30, 0))
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    for content in (encoded(rgba), encoded(palette, transparency=1)):
        assert decode_image(content).tolist() == [[[10, 20, 30], [255, 255, 255]]]


def test_sixteen_bits_are_scaled_not_cut():
    values = np.array([[0, 257, 65535, 128, 129]], dtype=np.uint16)
    assert decode_image(encoded(Image.fromarray(values)))[0, :, 0].tolist() == [0, 1, 255, 0, 1]


def test_orientation_is_applied():
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned a quarter to the right
    pixels = picture(1)
    turned = decode_image(encoded(Image.fromarray(pixels), "PNG", exif=exif))
    assert np.array_equal(turned, np.rot90(pixels, -1))


@pytest.mark.parametrize("exif", [b"Exif\0\0MM\0*\0\0", b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\xff" * 40, b"Exif\0\0"])
def test_broken_exif_is_noted_and_the_image_still_read(exif):
    content = jpeg_bytes(picture(2))
    segment = b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif
    notes: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pixels = decode_image(content[:2] + segment + content[2:], None, notes)
    assert np.array_equal(pixels, decode_image(content))


def test_long_sides_are_bounded_and_nothing_vanishes():
    assert decode_image(encoded(Image.new("RGB", (300, 100))), 30).shape == (10, 30, 3)
    assert decode_image(encoded(Image.new("RGB", (500, 1))), 30).shape == (1, 30, 3)
    assert decode_image(encoded(Image.new("RGB", (1, 1))), 30).shape == (1, 1, 3)
    assert decode_image(jpeg_bytes(picture(3, 400, 600)), 100).shape == (67, 100, 3)


@pytest.mark.parametrize(
    "content",
    [b"", b"no image", jpeg_bytes(picture(4, 40, 40))[:-200], encoded(Image.new("F", (3, 3), 0.5), "TIFF")],
    ids=["empty", "text", "cut short", "floats"],
)
def test_what_cannot_be_read_is_refused_with_a_reason(content):
    with pytest.raises(UnreadableImage, match=r"\w"):
        decode_image(content)
