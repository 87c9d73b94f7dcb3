"""What is found in an image folder, and what is said about the rest."""

import os

import pytest
from PIL import Image

from attngeo.data.folders import scan, shown, split_by_hash
from attngeo.errors import UserError
from tests.unit.data_support import image_folder


def test_classes_are_in_byte_order_and_labels_follow(tmp_path):
    found = scan(image_folder(tmp_path, {"b": (2, 1), "Z": (1, 1), "ä": (1, 1)}))
    assert found.classes == ["Z", "b", "ä"]
    assert [(file.path, file.label) for file in found.splits["train"]] == [
        ("train/Z/000.png", 0),
        ("train/b/000.png", 1),
        ("train/b/001.png", 1),
        ("train/ä/000.png", 2),
    ]
    assert found.strays == []


def test_hidden_stray_and_dangling_files_are_reported_and_links_followed(tmp_path):
    root = image_folder(tmp_path / "set", {"a": (2, 1), "b": (1, 1)})
    (root / "train/a/.hidden.png").write_bytes(b"")
    (root / "train/a/notes.txt").write_text("x")
    (root / "train/a/gone.png").symlink_to("nowhere.png")
    (root / "train/a/again").symlink_to(root / "train/a")
    os.mkfifo(root / "train/a/pipe.png")
    (root / "README").write_text("x")
    outside = tmp_path / "outside"
    outside.mkdir()
    Image.new("RGB", (2, 2)).save(outside / "linked.png")
    (root / "train/a/elsewhere").symlink_to(outside)
    found = scan(root)
    assert dict(found.strays) == {
        "train/a/.hidden.png": "hidden",
        "train/a/notes.txt": "not an image",
        "train/a/gone.png": "dangling link",
        "train/a/pipe.png": "not a regular file",
        "train/a/again": "link to a folder that contains it",
        "README": "neither train/ nor val/",
    }
    assert "train/a/elsewhere/linked.png" in {file.path for file in found.splits["train"]}


def test_class_folders_that_are_links_are_class_folders(tmp_path):
    root = image_folder(tmp_path / "set", {"a": (2, 1), "b": (2, 1)})
    for split in ("train", "val"):
        (root / split / "b").rename(tmp_path / f"{split} of b")
        (root / split / "b").symlink_to(tmp_path / f"{split} of b")
    found = scan(root)
    assert (found.classes, found.strays) == (["a", "b"], [])
    assert [[file.label for file in found.splits[split]] for split in ("train", "val")] == [[0, 0, 1, 1], [0, 1]]


@pytest.mark.parametrize("name", ["naïve", "日本", "a b%c#d'e\"f", "x,y\nz"])
def test_any_name_survives(tmp_path, name):
    found = scan(image_folder(tmp_path, {name: (1, 1), "plain": (1, 1)}))
    assert name in found.classes


def test_names_that_are_no_utf8_survive_and_are_shown_with_escapes(tmp_path):
    root = image_folder(tmp_path, {"a": (1, 1), "b": (1, 1)})
    raw = os.fsencode(root / "train/a") + b"/\xf1.png"
    Image.new("RGB", (2, 2)).save(os.fsdecode(os.fsencode(root / "train/a/x.png")))
    os.rename(root / "train/a/x.png", raw)
    names = [file.path for file in scan(root).splits["train"]]
    assert [shown(name) for name in names if not name.isascii()] == ["train/a/\\xf1.png"]


def test_a_split_by_hash_is_stratified_and_independent_of_the_order(tmp_path):
    paths = [f"{name}/{number}.png" for name in "ab" for number in range(11)]
    held_out = split_by_hash(paths)
    assert held_out == split_by_hash(paths[::-1])
    assert sum(path.startswith("a/") for path in held_out) == sum(path.startswith("b/") for path in held_out) == 2
    assert split_by_hash(["c/only.png"]) == set()


def test_class_folders_without_splits_are_split(tmp_path):
    image_folder(tmp_path / "made", {"a": (7, 1), "b": (5, 1)})
    found = scan(tmp_path / "made/train")
    assert [len(found.splits[split]) for split in ("train", "val")] == [10, 2]
    assert "SHA-256" in found.split_rule


def flat(root):
    Image.new("RGB", (2, 2)).save(root / "val/a.png")


def empty(root):
    (root / "train/c").mkdir()
    (root / "val/c").mkdir()


def other_classes(root):
    (root / "val/b").rename(root / "val/c")


def only_training(root):
    (root / "val").rename(root / "elsewhere")


@pytest.mark.parametrize(
    ("damage", "words"),
    [(flat, "1 images beside"), (empty, "holds no image"), (other_classes, "differ"), (only_training, "no val/")],
)
def test_sets_that_cannot_be_used_are_refused(tmp_path, damage, words):
    root = image_folder(tmp_path, {"a": (1, 1), "b": (1, 1)})
    damage(root)
    with pytest.raises(UserError, match=words):
        scan(root)


def test_no_classes_one_image_and_no_folder_are_refused(tmp_path):
    with pytest.raises(UserError, match="no class folders"):
        scan(tmp_path)
    with pytest.raises(UserError, match="not a folder"):
        scan(tmp_path / "missing")
    image_folder(tmp_path / "one", {"a": (1, 1)})
    with pytest.raises(UserError, match="one image"):
        scan(tmp_path / "one/train")
