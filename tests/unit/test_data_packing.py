"""Packing an image set: what is written, what is refused, and how that is said."""

import csv
import os

import pytest
from PIL import Image

from attngeo.data import ffcv_available
from attngeo.data.index import read_index
from attngeo.data.packing import pack
from attngeo.errors import UserError
from attngeo.files import read_json, sha256_file
from tests.tolerances import STATISTICS_ABSOLUTE
from tests.unit.data_support import image_folder

COUNTS = {"a": (4, 2), "b": (3, 2)}


def packed(root, out, **options):
    manifest = pack(root, out, **({"storage": "folder"} | options))
    with (out / "refused.csv").open(encoding="utf-8", newline="") as stream:
        refused = dict(list(csv.reader(stream))[1:])
    return read_json(manifest), refused


def test_a_clean_set_is_packed_and_described(tmp_path):
    manifest, refused = packed(image_folder(tmp_path / "set", COUNTS), tmp_path / "out")
    assert refused == {}
    assert manifest["dataset"] == "set"
    assert manifest["classes"] == ["a", "b"]
    assert (manifest["train"]["n"], manifest["val"]["n"]) == (7, 4)
    assert manifest["image_shape"] == [3, 13, 17]
    assert all(0 < value < 1 for value in manifest["mean"] + manifest["std"])


def test_packing_twice_gives_the_same_manifest(tmp_path):
    root = image_folder(tmp_path / "set", COUNTS)
    first = pack(root, tmp_path / "out", storage="folder").read_bytes()
    assert pack(root, tmp_path / "out", storage="folder", workers=2).read_bytes() == first


def test_the_mean_and_spread_are_those_of_the_pixels(tmp_path):
    for name, level in (("a", 0), ("b", 255)):
        for split in ("train", "val"):
            (tmp_path / "set" / split / name).mkdir(parents=True)
            Image.new("RGB", (3, 2), (level, 51, 0)).save(tmp_path / "set" / split / name / "x.png")
    manifest, _ = packed(tmp_path / "set", tmp_path / "out")
    assert manifest["mean"] == pytest.approx([0.5, 0.2, 0.0], abs=STATISTICS_ABSOLUTE)
    assert manifest["std"] == pytest.approx([0.5, 1e-4, 1e-4], abs=STATISTICS_ABSOLUTE)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_index_of_a_folder_holds_the_hash_of_every_image(tmp_path, workers):
    root = image_folder(tmp_path / "set", COUNTS)
    packed(root, tmp_path / "out", workers=workers)
    files = [file for split in ("train", "val") for file in read_index(tmp_path / f"out/{split}.jsonl")]
    assert len(files) == 11
    assert all(file.sha256 == sha256_file(root / file.path) for file in files)


def test_unreadable_images_are_left_out_and_listed(tmp_path):
    root = image_folder(tmp_path / "set", COUNTS)
    (root / "train/a/zz.jpg").write_bytes(b"not an image")
    (root / "val/b/notes.txt").write_text("x")
    os.rename(root / "val/a/001.png", os.fsencode(root / "val/a") + b"/\xf1.png")
    (root / "val/a/bad.png").write_bytes(b"")
    manifest, refused = packed(root, tmp_path / "out")
    assert manifest["refused"] == 2
    assert manifest["train"]["n"] == 7
    assert set(refused) == {"train/a/zz.jpg", "val/a/bad.png", "val/b/notes.txt"}
    assert "Unidentified" in refused["train/a/zz.jpg"]
    assert [os.fsencode(file.path) for file in read_index(tmp_path / "out/val.jsonl")][1] == b"val/a/\xf1.png"


def test_a_class_of_unreadable_images_is_refused(tmp_path):
    root = image_folder(tmp_path / "set", COUNTS)
    for file in (root / "val/b").iterdir():
        file.write_bytes(b"broken")
    with pytest.raises(UserError, match="no image of class b"):
        packed(root, tmp_path / "out")
    assert not (tmp_path / "out/manifest.json").exists()


def test_names_in_any_script_survive_packing(tmp_path):
    from attngeo.data.batches import open_batches

    names = ["naïve", "日本", "50% #1 'q' \"d\""]
    root = image_folder(tmp_path / "sét", {name: (2, 1) for name in names})
    manifest, _ = packed(root, tmp_path / "out")
    assert sorted(manifest["classes"]) == sorted(names)
    batches = open_batches(tmp_path / "out", "train", batch_size=3, seed=0, image_size=8, augment=True)
    assert sum(len(labels) for _, labels in batches) == 6


def test_without_ffcv_auto_keeps_the_files_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(ffcv_available, "is_installed", lambda: False)
    root = image_folder(tmp_path / "set", COUNTS)
    manifest, _ = packed(root, tmp_path / "out", storage="auto")
    assert manifest["storage"] == "folder"
    assert manifest["why_storage"] == "ffcv is not installed"
    with pytest.raises(UserError, match="apt-get install"):
        packed(root, tmp_path / "out", storage="beton")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_resolution": 0}, "max_resolution"),
        ({"write_mode": "smart"}, "write_mode"),
        ({"jpeg_quality": 101}, "jpeg_quality"),
        ({"workers": 0}, "workers"),
        ({"min_crop_area": 0.0}, "min_crop_area"),
        ({"storage": "arrays"}, "not for image folders"),
    ],
)
def test_options_out_of_range_are_refused_by_name(tmp_path, options, words):
    with pytest.raises(UserError, match=words):
        packed(image_folder(tmp_path / "set", COUNTS), tmp_path / "out", **options)


def test_what_is_no_image_set_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"neither a folder nor an embedded set[\s\S]*fashion-mnist"):
        packed("imagenet", tmp_path / "out")
    with pytest.raises(UserError, match="language-model"):
        packed("minilm-l6", tmp_path / "out")
