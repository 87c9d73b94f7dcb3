"""`attngeo doctor --data` finds mistakes of a folder's layout without reading it all."""

import os
import time

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from attngeo.cli import app
from attngeo.data import checkup
from attngeo.data.checkup import check_folder
from tests.unit.data_support import image_folder

WNIDS = {"n01440764": (3, 1), "n01443537": (2, 1), "n01484850": (2, 1)}


def found(root, labels=None):
    return {check.name: check for check in check_folder(root, labels)}


def test_a_right_folder_passes_and_says_what_packing_takes(tmp_path):
    checks = found(image_folder(tmp_path, WNIDS))
    assert {check.status for check in checks.values()} == {"ok"}
    assert checks["train"].detail == "7 images of 3 classes, 2 to 3 a class"
    assert "GB free here" in checks["space"].detail


def flatten(root):
    for number, folder in enumerate(sorted((root / "val").iterdir())):
        os.rename(folder / "000.png", root / f"val/ILSVRC2012_val_{number:08d}.png")
        folder.rmdir()


def by_kit_numbers(root):
    for number, folder in enumerate(sorted((root / "val").iterdir()), start=1):
        folder.rename(root / f"val/{number}")


def rename_a_class(root):
    (root / "val/n01443537").rename(root / "val/n09999999")


def empty_a_class(root):
    for path in (root / "train/n01443537").iterdir():
        path.unlink()


def lose_a_class(root):
    (root / "val/n01443537/000.png").unlink()


def break_an_image(root):
    (root / "train/n01443537/000.png").write_bytes(b"broken")


def call_it_validation(root):
    (root / "val").rename(root / "validation")


@pytest.mark.parametrize(
    ("damage", "check", "status", "words"),
    [
        (flatten, "val", "missing", "lie flat, without labels"),
        (by_kit_numbers, "classes", "missing", "sorted by numbers"),
        (rename_a_class, "classes", "missing", "n09999999"),
        (empty_a_class, "train", "missing", "1 of 3 class folders are empty: n01443537"),
        (lose_a_class, "classes", "warn", "1 classes have no validation image: n01443537"),
        (break_an_image, "images", "warn", "train/n01443537/000.png"),
        (call_it_validation, "folder", "missing", "no val/"),
    ],
)
def test_each_mistake_is_named_with_a_remedy(tmp_path, damage, check, status, words):
    root = image_folder(tmp_path, WNIDS)
    damage(root)
    met = found(root)[check]
    assert (met.status, words in met.detail, bool(met.remedy)) == (status, True, True), met


def test_flat_images_with_labels_beside_them_are_a_matter_of_one_option(tmp_path):
    root = image_folder(tmp_path, WNIDS)
    flatten(root)
    labels = root / "imagenet_2012_validation_synset_labels.txt"
    labels.write_text("\n".join(["n01484850", "n01440764", "n01443537"]))
    assert found(root)["val"].remedy == f"pack with --val-labels {labels}"
    assert found(root, labels)["val"].status == "ok"
    labels.write_text("n01484850\n")
    assert "1 labels for 3" in found(root, labels)["val"].detail


def test_it_takes_class_folders_alone_and_points_into_nested_ones(tmp_path):
    root = image_folder(tmp_path / "outer/inner", WNIDS)
    assert "a fifth is kept" in found(root / "train")["folder"].detail
    assert found(tmp_path / "outer")["folder"].remedy == f"give {root}"
    assert found(tmp_path / "nowhere")["folder"].status == "missing"
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/ILSVRC2012_img_train.tar").write_bytes(b"")
    assert "unpack ILSVRC2012_img_train.tar" in found(tmp_path / "empty")["folder"].remedy


def test_many_images_are_listed_and_few_read(tmp_path, monkeypatch):
    root = image_folder(tmp_path, WNIDS)
    for number in range(20000):
        os.link(root / "train/n01440764/000.png", root / f"train/n01440764/link{number}.png")
    read = []
    monkeypatch.setattr(checkup, "decode_image", lambda path, side: read.append(path) or image)
    image = np.zeros((4, 4, 3), np.uint8)
    begun = time.monotonic()
    checks = found(root)
    assert time.monotonic() - begun < 10
    assert len(read) <= checkup.SAMPLED_IMAGES + 2
    assert checks["train"].detail.startswith("20007 images")


def test_the_command_prints_the_report_and_its_status_tells(tmp_path):
    root = image_folder(tmp_path, WNIDS)
    answer = CliRunner().invoke(app, ["doctor", "--data", str(root)])
    assert answer.exit_code == 0
    assert "7 images of 3 classes" in answer.output
    Image.new("RGB", (2, 2)).save(root / "val/stray.png")
    assert CliRunner().invoke(app, ["doctor", "--data", str(root)]).exit_code == 1
