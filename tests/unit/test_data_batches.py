"""Loaders agree on order and labels, and give the same pixels whatever does the work."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from attngeo.data import ffcv_available
from attngeo.data import manifest as manifests
from attngeo.data.layout import write_classes
from attngeo.data.packing import pack
from attngeo.errors import UserError
from attngeo.files import read_json, write_json
from tests.unit.data_support import COUNTS, assert_same, epochs, image_folder, opened, write_beton_by_hand


@pytest.fixture(scope="module")
def beton_set(folder_set, tmp_path_factory) -> Path:
    """The images of `folder_set` as .beton files written here, with their manifest."""
    from attngeo.data.images import decode_image
    from attngeo.data.index import read_index
    from attngeo.data.manifest import file_entry, read_manifest

    out = tmp_path_factory.mktemp("beton")
    manifest = read_manifest(folder_set)
    raw = manifest.raw | {"storage": "beton", "write_mode": "raw"}
    for split in ("train", "val"):
        files = read_index(folder_set.parent / f"{split}.jsonl")
        images = [decode_image(manifest.source_root() / file.path) for file in files]
        write_beton_by_hand(out / f"{split}.beton", images, [file.label for file in files])
        raw[split] = file_entry(out / f"{split}.beton", count=len(files), relative_to=out)
    write_classes(out / "classes.csv", raw["classes"])
    write_json(out / "manifest.json", raw)
    return out / "manifest.json"


@pytest.mark.parametrize("images_per_epoch", [None, 9])
def test_arrays_and_torch_give_the_same_batches(arrays_set, images_per_epoch):
    options = {"images_per_epoch": images_per_epoch}
    fast, plain = opened(arrays_set, **options), opened(arrays_set, loader="torch", **options)
    assert (fast.loader, plain.loader) == ("arrays", "torch")
    assert_same(epochs(fast, 3), epochs(plain, 3))
    assert_same(epochs(opened(arrays_set, "val"), 1), epochs(opened(arrays_set, "val", loader="torch"), 1))


def test_a_beton_file_and_its_original_files_give_the_same_batches(folder_set, beton_set):
    assert_same(epochs(opened(folder_set)), epochs(opened(beton_set, loader="torch")))


def test_all_loaders_share_one_order(arrays_set, folder_set):
    """Both sets have 11 training images; labels differ, places must not."""
    from attngeo.data.index import read_index

    by_array = np.arange(11) % 3
    by_folder = np.array([file.label for file in read_index(folder_set.parent / "train.jsonl")])
    order = np.concatenate([segment.indices for batch in opened(folder_set).order.batches(0) for segment in batch])
    assert torch.cat([labels for _, labels in opened(arrays_set)]).tolist() == by_array[order].tolist()
    assert torch.cat([labels for _, labels in opened(folder_set)]).tolist() == by_folder[order].tolist()


@pytest.mark.parametrize("workers", [1, 2])
def test_pixels_do_not_depend_on_the_number_of_workers(folder_set, workers):
    assert_same(epochs(opened(folder_set)), epochs(opened(folder_set, workers=workers)))


def test_epochs_and_seeds_differ(folder_set):
    first, again = epochs(opened(folder_set), 1), epochs(opened(folder_set), 1)
    assert_same(first, again)
    other_seed = epochs(opened(folder_set, seed=4), 1)
    second_epoch = epochs(opened(folder_set), 2)[len(first) :]
    for other in (other_seed, second_epoch):
        assert not torch.equal(first[0][0], other[0][0])


@pytest.mark.parametrize("fixture", ["folder_set", "arrays_set"])
def test_skipping_batches_gives_the_tail_of_the_straight_epoch(fixture, request):
    manifest = request.getfixturevalue(fixture)
    batches = opened(manifest, batch_size=2, images_per_epoch=9)
    batches.set_epoch(1)
    straight = list(batches)
    assert len(batches) == len(straight) == 4
    batches.set_epoch(1, skip_batches=3)
    assert_same(straight[3:], list(batches))
    batches.set_epoch(1, skip_batches=4)
    assert list(batches) == []
    with pytest.raises(ValueError, match="batches 0 to 4"):
        batches.set_epoch(1, skip_batches=5)


def test_the_last_validation_batch_may_be_one_image(folder_set, arrays_set):
    for manifest, size in ((folder_set, 5), (arrays_set, 5)):
        for loader in ("auto", "torch"):
            batches = opened(manifest, "val", batch_size=size - 1, loader=loader)
            shapes = [(tuple(images.shape), tuple(labels.shape)) for images, labels in batches]
            assert shapes == [((4, 3, 32, 32), (4,)), ((1, 3, 32, 32), (1,))]
            assert batches.num_images == size


def test_batches_are_normalised_float32_of_the_asked_size(folder_set):
    batches = opened(folder_set, batch_size=11, image_size=20, augment=False)
    (images, labels), *_ = batches
    assert (images.dtype, labels.dtype, tuple(images.shape)) == (torch.float32, torch.int64, (11, 3, 20, 20))
    assert images.is_contiguous()
    assert batches.num_classes == 2


@pytest.mark.parametrize("loader", ["auto", "torch"])
def test_loading_leaves_the_global_generator_alone(folder_set, arrays_set, loader):
    before = torch.get_rng_state()
    for manifest in (folder_set, arrays_set):
        list(opened(manifest, loader=loader, workers=1 if manifest == folder_set else 0))
    assert torch.equal(before, torch.get_rng_state())


def test_grey_images_are_centred_on_black_with_three_equal_channels(arrays_set):
    batches = opened(arrays_set, "val", image_size=33)
    images, _ = next(iter(batches))
    assert torch.equal(images[:, 0], images[:, 1])
    assert torch.equal(images[:, 0], images[:, 2])
    black = -batches.mean[0] / batches.std[0]
    assert torch.allclose(images[:, :, :2], black)
    assert torch.allclose(images[:, :, -3:], black)
    assert images[:, :, 2:-3, 2:-3].std() > 0.5


def test_arrays_larger_than_the_model_are_reduced(arrays_set):
    images, _ = next(iter(opened(arrays_set, image_size=16)))
    assert tuple(images.shape) == (4, 3, 16, 16)


def test_one_pixel_images_are_enlarged(tmp_path):
    manifest = pack(
        image_folder(tmp_path / "images", {"a": (3, 1), "b": (3, 1)}, size=(1, 1)),
        tmp_path / "packed",
        storage="folder",
    )
    assert tuple(next(iter(opened(manifest)))[0].shape) == (4, 3, 32, 32)


@pytest.mark.parametrize("size", [(3, 500), (500, 3)])
def test_narrow_images_are_cropped_and_resized(tmp_path, size):
    folder = image_folder(tmp_path / "images", {"a": (3, 1), "b": (3, 1)}, size=size)
    batches = opened(pack(folder, tmp_path / "packed", storage="folder", min_crop_area=0.08))
    for images, _ in epochs(batches):
        assert tuple(images.shape) == (4, 3, 32, 32)
        assert images.isfinite().all()


def test_the_record_says_what_ran(folder_set, beton_set):
    described = opened(folder_set).describe()
    assert described["loader"] == "torch"
    assert described["manifest_sha256"]
    assert "mirrored" in described["pixels"]
    assert "central" in opened(folder_set, "val").describe()["pixels"]


def test_without_ffcv_a_beton_file_is_read_by_pillow_and_the_record_says_so(beton_set, monkeypatch):
    monkeypatch.setattr(ffcv_available, "why_unavailable", lambda: "ffcv is not installed")
    batches = opened(beton_set)
    assert batches.loader == "torch"
    assert "ffcv is not installed" in batches.describe()["why"]
    with pytest.raises(UserError, match="apt-get install"):
        opened(beton_set, loader="ffcv")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 12}, "no full batch of 12"),
        ({"images_per_epoch": 3}, "no full batch"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"loader": "fast"}, "'fast' does not exist"),
        ({"loader": "arrays"}, "cannot read storage"),
        ({"loader": "ffcv"}, "reads .beton"),
        ({"split": "test"}, "'test' does not exist"),
        ({"split": "val", "images_per_epoch": 3}, "validation uses every image"),
    ],
)
def test_what_cannot_be_done_is_refused(folder_set, options, words):
    with pytest.raises(UserError, match=words):
        opened(folder_set, **options)


def test_a_changed_file_is_refused_before_anything_is_read(beton_set):
    path = beton_set.parent / "train.beton"
    content = path.read_bytes()
    try:
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(UserError, match="not the file that was packed"):
            opened(beton_set, loader="torch")
        path.unlink()
        with pytest.raises(UserError, match="missing"):
            opened(beton_set, loader="torch")
    finally:
        path.write_bytes(content)


def test_an_image_lost_after_packing_is_named(tmp_path):
    root = image_folder(tmp_path / "images", COUNTS)
    manifest = pack(root, tmp_path / "packed", storage="folder")
    (root / "train/a/000.png").unlink()
    with pytest.raises(UserError, match=r"train/a/000.png"):
        epochs(opened(manifest, batch_size=1), 1)


def test_a_manifest_of_another_kind_is_refused(tmp_path):
    write_json(tmp_path / "manifest.json", {"format": 0})
    with pytest.raises(UserError, match="not a manifest"):
        opened(tmp_path)
    assert read_json(tmp_path / "manifest.json") == {"format": 0}


@pytest.fixture
def changeable_set(tmp_path) -> Path:
    return pack(image_folder(tmp_path / "images", COUNTS), tmp_path / "packed", storage="folder")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_replaced_since_it_was_packed_is_refused(changeable_set, workers):
    replaced = changeable_set.parent.parent / "images/val/b/002.png"
    times = replaced.stat()
    content = bytearray(replaced.read_bytes())
    content[len(content) // 2] ^= 1
    replaced.write_bytes(content)
    os.utime(replaced, ns=(times.st_atime_ns, times.st_mtime_ns))  # neither its size nor its time tell
    with pytest.raises(UserError, match=r"val/b/002.png has changed since it was packed[\s\S]*pack the images again"):
        epochs(opened(changeable_set, "val", workers=workers), 1)


def test_an_image_copied_anew_is_the_same_image(changeable_set):
    before = epochs(opened(changeable_set, "val"), 1)
    for path in (changeable_set.parent.parent / "images").rglob("*.png"):
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    assert_same(before, epochs(opened(changeable_set, "val"), 1))


def test_hashing_a_large_file_is_announced(beton_set, monkeypatch, caplog):
    opened(beton_set, loader="torch")
    assert "verifying" not in caplog.text
    monkeypatch.setattr(manifests, "ANNOUNCED_BYTES", 1)
    opened(beton_set, loader="torch")
    assert "verifying" in caplog.text
    assert "train.beton" in caplog.text
