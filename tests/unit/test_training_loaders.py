"""The loaders of the project, as training uses them: shared by processes, resumed in the middle, with workers."""

import hashlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from attngeo.data import ffcv_available
from attngeo.data.batches import open_batches
from attngeo.data.packing import pack
from attngeo.training.distributed import Team
from attngeo.training.launch import Launch
from attngeo.training.sharing import evaluation_share, training_share
from tests.unit.data_support import image_folder
from tests.unit.training_support import tiny_recipe

needs_ffcv = pytest.mark.skipif(bool(ffcv_available.why_unavailable()), reason="FFCV is not installed")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """33 training and 21 validation images, stored for each loader."""
    folder = tmp_path_factory.mktemp("sets")
    image_folder(folder / "images", {"a": (11, 7), "b": (11, 7), "c": (11, 7)})
    sets = {"torch": pack(folder / "images", folder / "files", storage="folder")}
    if not ffcv_available.why_unavailable():
        sets["ffcv"] = pack(folder / "images", folder / "beton", storage="beton", write_mode="raw")
    return sets


def opened(packed: dict[str, Path], loader: Any, split: Any, **options: Any) -> Any:
    options = {"batch_size": 4, "seed": 3, "image_size": 8, "augment": split == "train", **options}
    return open_batches(packed[loader], split, loader=loader, **options)


def prints(batches: Any) -> list[list[str]]:
    """A hash of each image, batch by batch."""
    return [[hashlib.sha256(image.numpy().tobytes()).hexdigest() for image in images] for images, _ in batches]


def member(rank: int, size: int) -> Team:
    return Team(Launch(rank, size))


@pytest.mark.parametrize(
    ("loader", "size", "mixup"),
    [("torch", 2, 0.8), ("torch", 3, 0.0), pytest.param("ffcv", 2, 0.8, marks=needs_ffcv)],
)
def test_processes_read_every_batch_once_between_them(
    packed: dict[str, Path], loader: str, size: int, mixup: float
) -> None:
    whole = opened(packed, loader, "train", images_per_epoch=30)
    whole.set_epoch(2, skip_batches=3)  # it reaches into the third pass
    expected = prints(whole)
    shares = []
    for rank in range(size):
        recipe = tiny_recipe(batch_size=4, mixup=mixup, cutmix=0.0)
        share = training_share(whole, recipe, member(rank, size))
        share.set_epoch(2, skip_batches=3)
        shares.append(prints(share))
    assert [len(share) for share in shares] == [4] * size
    for batch, *parts in zip(expected, *shares, strict=True):
        assert sorted(itertools.chain(*parts)) == sorted(batch)
        assert all(parts)


@pytest.mark.parametrize(
    ("loader", "size", "max_images"),
    [
        ("torch", 2, None),
        ("torch", 3, 5),
        ("torch", 4, 3),
        ("torch", 1, 4),
        pytest.param("ffcv", 2, 5, marks=needs_ffcv),
    ],
)
def test_processes_evaluate_every_image_once_between_them(
    packed: dict[str, Path], loader: str, size: int, max_images: int | None
) -> None:
    whole = opened(packed, loader, "val")
    everything = list(itertools.chain(*prints(whole)))
    assert len(everything) == len(set(everything)) == 21
    found = []
    for rank in range(size):
        share = evaluation_share(whole, max_images, member(rank, size))
        share.set_epoch(0)
        found += itertools.chain(*prints(share))
    assert len(found) == len(set(found)) == (max_images or 21)
    assert set(found) <= set(everything)


def test_four_workers_augment_copies_of_one_image_differently_and_again_the_same(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "images", {"a": (2, 1), "b": (1, 1)})
    original = (folder / "train/b/000.png").read_bytes()
    for copy in range(1, 16):
        (folder / f"train/b/{copy:03d}.png").write_bytes(original)
    for name in ("000", "001"):
        (folder / f"train/a/{name}.png").write_bytes(original)
    sets = {"torch": pack(folder, tmp_path / "packed", storage="folder")}

    def seen(seed: int, workers: int) -> list[list[str]]:
        batches = opened(sets, "torch", "train", batch_size=9, seed=seed, workers=workers)
        epochs = []
        for epoch in range(2):
            batches.set_epoch(epoch)
            epochs.append(list(itertools.chain(*prints(batches))))
        return epochs

    first = seen(3, workers=4)
    assert len({*first[0], *first[1]}) == 36
    assert seen(3, workers=0) == first
    assert not {*itertools.chain(*seen(4, workers=0))} & {*itertools.chain(*first)}


def test_a_share_leaves_the_loader_it_was_taken_from_alone(packed: dict[str, Path]) -> None:
    batches = opened(packed, "torch", "val")
    evaluation_share(batches, 3, member(0, 2))
    assert sum(len(labels) for _, labels in batches) == 21
    assert training_share(batches, tiny_recipe(), Team()) is batches
    assert torch.equal(next(iter(batches))[1], torch.zeros(4, dtype=torch.int64))
