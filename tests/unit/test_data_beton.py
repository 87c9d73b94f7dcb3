"""The reader of .beton files that needs no FFCV."""

import numpy as np
import pytest

from attngeo.data.beton import HEADER, Beton
from attngeo.errors import UserError
from tests.unit.data_support import PAGE_BYTES, jpeg_bytes, picture, write_beton_by_hand

IMAGES = [picture(0), picture(1, 1, 1), picture(2, 31, 7)]


def test_raw_pixels_and_labels_come_back(tmp_path):
    write_beton_by_hand(tmp_path / "a.beton", IMAGES, [3, 0, 3])
    opened = Beton(tmp_path / "a.beton")
    assert len(opened) == 3
    assert opened.labels.tolist() == [3, 0, 3]
    assert (opened.heights.tolist(), opened.widths.tolist()) == ([13, 1, 31], [17, 1, 7])
    for place, pixels in enumerate(IMAGES):
        found, label = opened[place]
        assert np.array_equal(found, pixels)
        assert label == opened.labels[place]


def test_jpeg_pixels_are_those_of_pillow(tmp_path):
    from attngeo.data.images import decode_image

    write_beton_by_hand(tmp_path / "a.beton", IMAGES, [0, 1, 2], jpeg=True)
    for place, pixels in enumerate(IMAGES):
        assert np.array_equal(Beton(tmp_path / "a.beton")[place][0], decode_image(jpeg_bytes(pixels)))


@pytest.mark.parametrize("keep", [0, 10, 100, PAGE_BYTES, 2 * PAGE_BYTES, -24, -1])
def test_a_file_cut_short_is_refused(tmp_path, keep):
    path = tmp_path / "a.beton"
    write_beton_by_hand(path, IMAGES, [0, 1, 2])
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match="not a whole"):
        Beton(path)


def test_a_file_whose_writer_was_killed_is_refused(tmp_path):
    path = tmp_path / "a.beton"
    write_beton_by_hand(path, IMAGES, [0, 1, 2])
    content = bytearray(path.read_bytes())
    place = HEADER.fields["table_address"][1]
    content[place : place + 8] = bytes(8)
    path.write_bytes(content)
    with pytest.raises(UserError, match="did not finish"):
        Beton(path)


def test_a_damaged_jpeg_is_refused_and_not_replaced_by_another(tmp_path):
    path = tmp_path / "a.beton"
    write_beton_by_hand(path, IMAGES, [0, 1, 2], jpeg=True)
    content = bytearray(path.read_bytes())
    content[PAGE_BYTES : PAGE_BYTES + 20] = bytes(20)
    path.write_bytes(content)
    with pytest.raises(UserError, match="sample 0"):
        Beton(path)[0]
