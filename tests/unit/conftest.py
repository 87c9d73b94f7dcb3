"""Image sets that the tests of several loaders open."""

from pathlib import Path

import numpy as np
import pytest

from attngeo.data import embedded
from attngeo.data.packing import pack
from attngeo.files import sha256_file, write_json
from tests.unit.data_support import COUNTS, image_folder


@pytest.fixture(scope="module")
def folder_set(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("folder")
    return pack(image_folder(root / "images", COUNTS), root / "packed", storage="folder")


@pytest.fixture
def arrays_set(tmp_path, monkeypatch) -> Path:
    """A small embedded set of grey arrays."""
    cache = tmp_path / "cache"
    (cache / "fashion-mnist").mkdir(parents=True)
    draw = np.random.default_rng(0)
    arrays = {
        f"{split}_images": draw.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        for split, n in (("train", 11), ("val", 5))
    }
    labels = {f"{split}_labels": np.arange(n, dtype=np.uint8) % 3 for split, n in (("train", 11), ("val", 5))}
    np.savez(cache / "fashion-mnist/arrays.npz", **arrays, **labels)
    path = cache / "fashion-mnist/arrays.npz"
    record = {
        "format": embedded.FORMAT,
        "members": dict(embedded.source_of("fashion-mnist").members),
        "files": {path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)}},
    }
    write_json(path.with_name("source.json"), record)
    monkeypatch.setenv("ATTNGEO_CACHE", str(cache))
    return pack("fashion-mnist", tmp_path / "packed")
