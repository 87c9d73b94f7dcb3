"""Part of the training images set aside: which, the same for every storage, and nothing of the validation images."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from attngeo.cli import app
from attngeo.data import embedded
from attngeo.data.batches import open_batches
from attngeo.data.folders import scan
from attngeo.data.holding_out import held_out
from attngeo.data.index import read_index
from attngeo.data.manifest import read_manifest
from attngeo.data.packing import pack
from attngeo.errors import UserError
from attngeo.files import sha256_file, write_json
from tests.unit.data_support import image_folder

COUNTS = {"a": (11, 3), "b": (2, 1), "c": (7, 2)}
SHARE = 0.3


def paths(manifest: Path, split: str) -> list[str]:
    return [file.path for file in read_index(manifest.parent / f"{split}.jsonl")]


def embedded_arrays(cache: Path, monkeypatch: pytest.MonkeyPatch, **arrays: np.ndarray) -> None:
    """Stand in for Fashion-MNIST."""
    folder = cache / "fashion-mnist"
    folder.mkdir(parents=True)
    np.savez(folder / "arrays.npz", **arrays)  # type: ignore[arg-type]
    path = folder / "arrays.npz"
    record = {
        "format": embedded.FORMAT,
        "members": dict(embedded.source_of("fashion-mnist").members),
        "files": {path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)}},
    }
    write_json(folder / "source.json", record)
    monkeypatch.setenv("ATTNGEO_CACHE", str(cache))


@pytest.mark.parametrize("share", [0.001, 0.0833, 0.25, 0.499])
def test_every_class_gives_its_share_and_keeps_an_image(share):
    sizes = {0: 2, 1: 3, 2: 97, 4: 1009}  # class 3 has none
    labels = np.random.default_rng(0).permutation(np.repeat(list(sizes), list(sizes.values())))
    chosen = held_out(labels, share)
    for label, size in sizes.items():
        assert chosen[labels == label].sum() == max(1, round(share * size)) < size


def test_the_choice_in_a_class_does_not_depend_on_the_others():
    alone = held_out([5] * 41, SHARE)
    mixed = held_out([label for _ in range(41) for label in (1, 5, 7)], SHARE)
    assert np.array_equal(mixed[1::3], alone)
    assert not np.array_equal(mixed[0::3], alone)


def test_twice_the_share_holds_out_the_same_images_and_more():
    labels = [0] * 23 + [1] * 17
    assert set(np.flatnonzero(held_out(labels, 0.2))) < set(np.flatnonzero(held_out(labels, 0.4)))


def test_a_class_of_one_image_cannot_be_held_out_and_is_named(tmp_path):
    root = image_folder(tmp_path / "set", {"a": (3, 1), "lonely": (1, 1)})
    with pytest.raises(UserError, match="class lonely has one training image"):
        pack(root, tmp_path / "out", storage="folder", hold_out=SHARE)


@pytest.mark.parametrize("share", [-0.1, 0.5, 1.0])
def test_a_share_without_meaning_is_refused(tmp_path, share):
    with pytest.raises(UserError, match="hold_out"):
        pack(image_folder(tmp_path / "set", COUNTS), tmp_path / "out", storage="folder", hold_out=share)


def test_the_parts_are_disjoint_and_together_the_training_images(tmp_path):
    root = image_folder(tmp_path / "set", COUNTS)
    whole = pack(root, tmp_path / "whole", storage="folder")
    parts = pack(root, tmp_path / "parts", storage="folder", hold_out=SHARE)
    train, val = paths(parts, "train"), paths(parts, "val")
    assert (len(train), len(val)) == (14, 6)
    assert sorted(train + val) == sorted(paths(whole, "train"))
    raw = read_manifest(parts).raw
    assert (raw["hold_out"], raw["train"]["n"], raw["val"]["n"]) == (SHARE, 14, 6)
    assert raw["split_rule"].startswith("held out for validation: 30 % of the training images of each class")
    assert read_manifest(whole).raw["hold_out"] == 0


def test_the_number_of_workers_changes_nothing(tmp_path):
    root = image_folder(tmp_path / "set", COUNTS)
    first, second = (
        pack(root, tmp_path / "out", storage="folder", hold_out=SHARE, workers=workers).read_bytes()
        for workers in (1, 2)
    )
    assert first == second


@pytest.mark.parametrize("damage", ["broken files", "other classes", "flat", "absent"])
def test_validation_images_of_a_folder_are_not_read(tmp_path, damage):
    root = image_folder(tmp_path / "set", COUNTS)
    expected = scan(root, hold_out=SHARE)
    for file in sorted(root.glob("val/*/*")):
        if damage == "broken files":
            file.write_bytes(b"not an image")
        elif damage == "flat":
            file.rename(root / "val" / f"{file.parent.name}-{file.name}")
        elif damage == "absent":
            file.unlink()
    if damage == "other classes":
        (root / "val/a").rename(root / "val/z")
    elif damage == "absent":
        for folder in (*root.glob("val/*"), root / "val"):
            folder.rmdir()
    packed = pack(root, tmp_path / "out", storage="folder", hold_out=SHARE)
    assert paths(packed, "val") == [file.path for file in expected.splits["val"]]
    assert (packed.parent / "report.csv").read_text() == "path,action,reason\n"
    for split in ("train", "val"):
        assert sum(len(labels) for _, labels in opened(packed, split)) == (14 if split == "train" else 6)


def test_a_folder_of_classes_alone_keeps_its_fifth_and_holds_out_of_the_rest(tmp_path):
    root = image_folder(tmp_path / "set", {"a": (23, 0), "b": (11, 0)}) / "train"
    plain, parts = scan(root), scan(root, hold_out=SHARE)
    rest = {file.path for file in plain.splits["train"]}
    assert {file.path for split in ("train", "val") for file in parts.splits[split]} == rest
    assert len(parts.splits["val"]) == round(SHARE * 18) + round(SHARE * 9)


def opened(manifest: Path, split: str, **options):
    return open_batches(manifest, split, **({"batch_size": 7, "seed": 3, "image_size": 28, "augment": False} | options))


def test_arrays_and_files_of_the_same_images_hold_out_the_same(tmp_path, monkeypatch):
    draw = np.random.default_rng(1)
    labels = draw.permutation(np.repeat(np.arange(3, dtype=np.uint8), (11, 2, 7)))
    pixels = draw.integers(0, 256, (len(labels), 28, 28), dtype=np.uint8)
    # Arrays without any of validation: reading those would be an error.
    embedded_arrays(tmp_path / "cache", monkeypatch, train_images=pixels, train_labels=labels)
    arrays = pack("fashion-mnist", tmp_path / "arrays", hold_out=SHARE)
    for place, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        folder = tmp_path / "set/train" / "abc"[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{place:03d}.png")
    files = pack(tmp_path / "set", tmp_path / "files", storage="folder", hold_out=SHARE)
    for split in ("train", "val"):
        path = read_manifest(arrays).data_path(split)
        with np.load(path) as stored:
            held = {
                image.tobytes(): int(label)
                for image, label in zip(stored[f"{split}_images"], stored[f"{split}_labels"], strict=True)
            }
        named = [pixels[int(Path(name).stem)] for name in paths(files, split)]
        assert {image.tobytes() for image in named} == set(held)
    assert path == tmp_path / "arrays/arrays.npz"


def test_both_loaders_of_arrays_read_the_parts(tmp_path, monkeypatch):
    labels = np.arange(23, dtype=np.uint8) % 3
    pixels = np.arange(23, dtype=np.uint8)[:, None, None] * np.ones((1, 28, 28), np.uint8)
    embedded_arrays(tmp_path / "cache", monkeypatch, train_images=pixels, train_labels=labels)
    packed = pack("fashion-mnist", tmp_path / "packed", hold_out=SHARE)
    chosen = held_out(labels, SHARE)
    assert read_manifest(packed).raw["mean"][0] == pytest.approx(pixels[~chosen].mean() / 255)
    for loader in ("arrays", "torch"):
        images, found = zip(*opened(packed, "val", loader=loader), strict=True)
        assert torch.cat(found).tolist() == labels[chosen].tolist()
        order = torch.cat(images)[:, 0, 14, 14].argsort().tolist()
        assert order == list(range(int(chosen.sum())))
    assert opened(packed, "val").describe()["hold_out"] == SHARE


def test_packing_without_holding_out_takes_the_arrays_away_again(tmp_path, monkeypatch):
    arrays = {
        f"{split}_{what}": values
        for split in ("train", "val")
        for what, values in (("images", np.zeros((6, 5, 5), np.uint8)), ("labels", np.arange(6, dtype=np.uint8) % 2))
    }
    embedded_arrays(tmp_path / "cache", monkeypatch, **arrays)
    pack("fashion-mnist", tmp_path / "packed", hold_out=SHARE)
    assert (tmp_path / "packed/arrays.npz").is_file()
    manifest = pack("fashion-mnist", tmp_path / "packed")
    assert not (tmp_path / "packed/arrays.npz").exists()
    assert read_manifest(manifest).data_path("val") == tmp_path / "cache/fashion-mnist/arrays.npz"


def test_the_command_says_what_it_held_out(tmp_path):
    root = image_folder(tmp_path / "set", COUNTS)
    done = CliRunner().invoke(
        app, ["pack", str(root), str(tmp_path / "out"), "--storage", "folder", "--hold-out", str(SHARE)]
    )
    assert done.exit_code == 0, done.output
    assert "14 training and 6 held-out images of 3 classes" in done.output
