"""What augmentation draws depends on (seed, pass, index) alone, in every loader and with any number of workers."""

import random

import numpy as np
import pytest
import torch

from attngeo.data import resampling
from attngeo.data.augmentation import Augmentation, Augmenter
from attngeo.data.transforms import Segment
from attngeo.errors import UserError
from tests.tolerances import UNIFORM_MEAN_ABSOLUTE
from tests.unit.data_support import assert_same, epochs, opened, picture

ALL = Augmentation("rand-m9-mstd0.5-inc1", 0.4, 0.6)
EACH = (
    Augmentation(rand_augment="rand-m9-mstd0.5-inc1"),
    Augmentation(color_jitter=0.4),
    Augmentation(random_erasing=0.6),
)


def drawn(wanted, segment, size=24):
    augmenter = Augmenter(wanted, seed=5, size=size, mean=(0.4, 0.5, 0.6))
    images = torch.stack(
        [torch.from_numpy(picture(int(index), size, size)).permute(2, 0, 1) for index in segment.indices]
    )
    changed = augmenter.colour_and_shape(images, segment) if augmenter.changes_pixels else images
    return augmenter.erase(changed / 255.0, [segment])


@pytest.mark.parametrize("wanted", [*EACH, ALL])
def test_an_image_is_augmented_alike_alone_and_in_any_company(wanted):
    together = drawn(wanted, Segment(2, np.arange(30)))
    assert torch.equal(together[[7, 21]], drawn(wanted, Segment(2, np.array([7, 21]))))
    plain = drawn(Augmentation(), Segment(2, np.arange(30)))
    changed = [not torch.equal(*pair) for pair in zip(together, plain, strict=True)]
    assert sum(changed) >= 10
    assert not torch.equal(together, drawn(wanted, Segment(3, np.arange(30))))


def test_switching_one_kind_on_leaves_the_draws_of_the_others():
    segment = Segment(0, np.arange(40))
    turned = drawn(EACH[0], segment)
    both = drawn(Augmentation(EACH[0].rand_augment, 0.0, 0.6), segment)
    same = [torch.equal(*pair) for pair in zip(turned, both, strict=True)]
    assert 8 <= sum(same) <= 24  # four in ten are not erased
    outside = (turned - both).flatten(1).eq(0).float().mean(1)
    assert outside.min() > 0.5  # at most a third of an image is erased


def test_about_the_asked_share_is_erased():
    augmenter = Augmenter(Augmentation(random_erasing=0.25), seed=1, size=8, mean=(0.5, 0.5, 0.5))
    images = augmenter.erase(torch.zeros(2000, 3, 8, 8), [Segment(0, np.arange(1200)), Segment(1, np.arange(800))])
    assert abs(images.flatten(1).any(1).float().mean() - 0.25) < 2 * UNIFORM_MEAN_ABSOLUTE


def test_the_global_generators_are_left_as_they_were():
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    drawn(ALL, Segment(0, np.arange(5)))
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_do_not_depend_on_the_number_of_workers(folder_set, workers):
    assert_same(
        epochs(opened(folder_set, augmentation=ALL)), epochs(opened(folder_set, augmentation=ALL, workers=workers))
    )


def test_arrays_and_torch_agree_and_the_tail_is_the_tail(arrays_set):
    options = {"augmentation": ALL, "images_per_epoch": 9}
    fast, plain = opened(arrays_set, **options), opened(arrays_set, loader="torch", **options)
    assert_same(epochs(fast, 3), epochs(plain, 3))
    plain.set_epoch(1)
    straight = list(plain)
    plain.set_epoch(1, skip_batches=1)
    assert_same(straight[1:], list(plain))


def test_the_record_says_what_was_done(folder_set):
    pixels = opened(folder_set, augmentation=ALL, interpolation="bicubic").describe()["pixels"]
    assert pixels.endswith(
        "bicubic with antialiasing; RandAugment rand-m9-mstd0.5-inc1; colour jitter 0.4; erased with probability 0.6"
    )
    assert opened(folder_set).describe()["pixels"].endswith("bilinear with antialiasing")


def test_what_has_no_meaning_is_refused(folder_set, arrays_set):
    with pytest.raises(UserError, match="timm does not understand"):
        opened(folder_set, augmentation=Augmentation(rand_augment="rand-x9"))
    with pytest.raises(UserError, match="augment is false"):
        opened(folder_set, "val", augmentation=ALL)
    with pytest.raises(UserError, match="interpolation is 'nearest'"):
        opened(folder_set, interpolation="nearest")
    with pytest.raises(UserError, match="placed, not resized"):
        opened(arrays_set, interpolation="bicubic")


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("shape", [(13, 17), (1, 1), (3, 40), (24, 24), (31, 7), (50, 24), (2, 2003)])
def test_resampling_in_whole_numbers_is_that_of_torch(shape, mode):
    pixels = np.random.default_rng(3).integers(0, 256, (*shape, 3), dtype=np.uint8)
    expected = torch.nn.functional.interpolate(
        torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0), (24, 24), mode=mode, antialias=True
    )
    found = np.empty((24, 24, 3), np.uint8)
    resampling.resample(pixels, found, mode == "bicubic", *resampling.PARTS)
    assert np.array_equal(found, expected[0].permute(1, 2, 0).numpy())
