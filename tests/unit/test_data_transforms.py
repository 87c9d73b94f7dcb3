"""Order and augmentation as functions of (seed, pass, index)."""

import numpy as np
import pytest
import torch

from attngeo.data import transforms
from attngeo.data.transforms import (
    Order,
    central_crops,
    normalise,
    random_crops,
    random_flips,
    random_shifts,
    uniform_draws,
)
from tests.tolerances import NORMALISED_PIXEL_ABSOLUTE, UNIFORM_MEAN_ABSOLUTE


def stream(order: Order, epochs: int) -> list[int]:
    batches = [batch for epoch in range(epochs) for batch in order.batches(epoch)]
    return [int(index) for batch in batches for segment in batch for index in segment.indices]


def test_each_pass_visits_every_image_once_and_passes_differ():
    order = Order(21, 7, seed=5, shuffled=True)
    first, second = stream(order, 1), [int(i) for batch in order.batches(1) for s in batch for i in s.indices]
    assert sorted(first) == sorted(second) == list(range(21))
    assert first != second


def test_replicates_do_not_share_orders():
    orders = [tuple(stream(Order(50, 50, seed, True), 1)) for seed in range(5)]
    later = [
        tuple(int(i) for s in Order(50, 50, 0, True).batches(epoch)[0] for i in s.indices) for epoch in range(1, 5)
    ]
    assert len({*orders, *later}) == 9


@pytest.mark.parametrize("images_per_epoch", [6, 14, 35])
def test_short_and_long_epochs_are_pieces_of_one_stream(images_per_epoch):
    whole = stream(Order(7, 7, 1, True), 20)
    pieces = stream(Order(7, 1, 1, True, images_per_epoch), 70 // images_per_epoch)
    assert pieces == whole[: len(pieces)]


def test_a_batch_across_passes_knows_both():
    batch = Order(5, 4, 1, True, 8).batches(0)[1]
    assert [(segment.pass_number, len(segment.indices)) for segment in batch] == [(0, 1), (1, 3)]


def test_skipping_batches_gives_the_tail():
    order = Order(23, 4, 2, True, 31)
    full, tail = order.batches(3), order.batches(3, 5)
    assert len(full) == len(order) == 7
    flat = [[s.indices.tolist() for s in batch] for batch in full]
    assert [[s.indices.tolist() for s in batch] for batch in tail] == flat[5:]


def test_validation_is_in_order_and_drops_nothing():
    order = Order(9, 4, 2, False)
    assert stream(order, 1) == list(range(9))
    assert len(order) == 3
    assert len(Order(0, 4, 2, False).batches(0)) == 0


def test_draws_of_an_image_do_not_depend_on_its_neighbours():
    together = uniform_draws(3, 4, np.arange(100))
    alone = np.concatenate([uniform_draws(3, 4, np.array([index])) for index in range(100)])
    assert np.array_equal(together, alone)
    assert not np.array_equal(together, uniform_draws(3, 5, np.arange(100)))
    assert not np.array_equal(together, uniform_draws(4, 4, np.arange(100)))


def test_draws_are_uniform_and_columns_uncorrelated():
    draws = uniform_draws(0, 0, np.arange(4000))
    assert 0 <= draws.min() < draws.max() < 1
    assert np.abs(draws.mean(axis=0) - 0.5).max() < UNIFORM_MEAN_ABSOLUTE
    correlation = np.corrcoef(draws.T) - np.eye(draws.shape[1])
    assert np.abs(correlation).max() < 4 * UNIFORM_MEAN_ABSOLUTE


@pytest.mark.parametrize("shape", [(1, 1), (3, 500), (500, 3), (64, 48), (250, 250)])
@pytest.mark.parametrize("min_area", [0.08, 0.5, 1.0])
def test_crops_lie_inside_the_image(shape, min_area):
    draws = uniform_draws(1, 2, np.arange(500))
    heights, widths = (np.full(500, side) for side in shape)
    for boxes in (random_crops(draws, heights, widths, min_area), central_crops(heights, widths)):
        top, left, height, width = boxes.T
        assert (boxes[:, 2:] >= 1).all()
        assert (boxes[:, :2] >= 0).all()
        assert (top + height <= heights).all()
        assert (left + width <= widths).all()


def test_crops_have_the_areas_asked_for():
    draws = uniform_draws(1, 2, np.arange(500))
    boxes = random_crops(draws, np.full(500, 1000), np.full(500, 1000), 0.25)
    share = boxes[:, 2].astype(float) * boxes[:, 3] / 1e6
    assert share.min() > 0.249
    assert share.max() > 0.9


def test_half_are_mirrored_and_shifts_reach_both_ends():
    draws = uniform_draws(1, 2, np.arange(2000))
    assert abs(random_flips(draws).mean() - 0.5) < UNIFORM_MEAN_ABSOLUTE
    assert np.unique(random_shifts(draws, 2)).tolist() == [-2, -1, 0, 1, 2]


def test_normalising_is_the_formula_and_mirrors_only_what_it_is_told():
    images = torch.randint(0, 256, (3, 3, 5, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 0.6, 0.7])
    expected = (images.double() / 255 - mean.double().view(3, 1, 1)) / std.double().view(3, 1, 1)
    expected[1] = expected[1].flip(-1)
    found = normalise(images, torch.tensor([False, True, False]), mean, std)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=NORMALISED_PIXEL_ABSOLUTE)


@pytest.mark.parametrize("at_once", [1, 3 * 5 * 4, 7 * 5 * 4 * 3, 2**17])
def test_normalising_in_pieces_gives_the_same_bits(monkeypatch, at_once):
    random = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (7, 5, 4, 3), dtype=torch.uint8, generator=random).permute(0, 3, 1, 2)
    flips = torch.tensor([False, True, True, False, False, True, False])
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 0.6, 0.7])
    mirrored = torch.where(flips.view(-1, 1, 1, 1), images.flip(-1), images).float()
    expected = mirrored * (1 / (255 * std)).view(-1, 1, 1) - (mean / std).view(-1, 1, 1)
    monkeypatch.setattr(transforms, "NORMALISED_AT_ONCE", at_once)
    assert torch.equal(normalise(images, flips, mean, std), expected)
    assert normalise(images[:0], flips[:0], mean, std).shape == (0, 3, 5, 4)
