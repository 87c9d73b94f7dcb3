"""Converters of the embedded sources, on files made here."""

import io
import tarfile

import numpy as np
import pytest

from attngeo.data.embedded_images import debian_members, idx_arrays, parse_idx
from attngeo.data.embedded_models import undo_rotary_permutation


def idx(values: np.ndarray) -> bytes:
    lengths = b"".join(int(length).to_bytes(4, "big") for length in values.shape)
    return bytes([0, 0, 8, values.ndim]) + lengths + values.astype(np.uint8).tobytes()


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
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=f"w:{compression}") as archive:
        member = tarfile.TarInfo("./usr/share/x")
        member.size = 5
        archive.addfile(member, io.BytesIO(b"hello"))
        archive.addfile(tarfile.TarInfo("./usr/share/empty"))

    def entry(name: str, content: bytes) -> bytes:
        head = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        return head + content + b"\n" * (len(content) % 2)

    name = "data.tar" + (f".{compression}" if compression else "")
    content = (
        b"!<arch>\n" + entry("debian-binary", b"2.0") + entry("control.tar", b"abc") + entry(name, data.getvalue())
    )
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
