"""Converters of the embedded sources, on files made here."""

import numpy as np
import pytest

from attngeo.data.embedded_images import debian_members, idx_arrays, parse_idx
from attngeo.data.embedded_models import undo_rotary_permutation
from tests.unit.data_support import debian_package, idx


def test_idx_files_become_arrays(tmp_path):
    images, labels = np.arange(24).reshape(4, 3, 2), np.arange(4)
    contents = {
        "train-images-idx3-ubyte": idx(images),
        "train-labels-idx1-ubyte": idx(labels),
        "t10k-images-idx3-ubyte": idx(images[:1]),
        "t10k-labels-idx1-ubyte": idx(labels[:1]),
    }
    idx_arrays(contents, tmp_path)
    with np.load(tmp_path / "arrays.npz") as arrays:
        assert np.array_equal(arrays["train_images"], images)
        assert np.array_equal(arrays["val_labels"], labels[:1])
    with pytest.raises(ValueError, match="differ"):
        idx_arrays(contents | {"train-labels-idx1-ubyte": idx(labels[:3])}, tmp_path)


@pytest.mark.parametrize("content", [b"", b"\0\0\x0d\x01\0\0\0\0", idx(np.arange(5))[:-1], idx(np.arange(5)) + b"\0"])
def test_idx_files_that_are_not_whole_are_refused(content):
    with pytest.raises(ValueError, match=r"IDX|promises"):
        parse_idx(content)


@pytest.mark.parametrize("compression", ["", "gz", "xz"])
def test_a_debian_package_is_read_without_installing_it(tmp_path, compression):
    content = debian_package({"usr/share/x": b"hello", "usr/share/empty": b""}, compression)
    (tmp_path / "x.deb").write_bytes(content)
    assert dict(debian_members(tmp_path / "x.deb")) == {"./usr/share/x": b"hello", "./usr/share/empty": b""}
    (tmp_path / "x.deb").write_bytes(content[:40])
    with pytest.raises(ValueError, match="no data archive"):
        list(debian_members(tmp_path / "x.deb"))


@pytest.mark.parametrize(("heads", "dim"), [(1, 2), (3, 8)])
def test_the_rotary_permutation_is_undone(heads, dim):
    """GGUF stores component pairs (i, i + D/2) of a head side by side."""
    weight = np.arange(heads * dim * 5, dtype=np.float32).reshape(heads * dim, 5)
    interleaved = np.concatenate(
        [
            weight[head * dim + half * (dim // 2) + place][None]
            for head in range(heads)
            for place in range(dim // 2)
            for half in (0, 1)
        ]
    )
    assert np.array_equal(undo_rotary_permutation(interleaved, heads), weight)
