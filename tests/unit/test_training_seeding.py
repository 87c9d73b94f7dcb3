"""Random draws depend on (seed, purpose, index) and on nothing else."""

import random

import numpy as np
import torch

from attngeo.training.seeding import derive_seed, generator, numpy_generator, reproducible, seed_everything


def test_derived_seeds_are_stable_for_ever() -> None:
    assert derive_seed(0, "permutation") == 5846876956122228313
    assert derive_seed(7, "image", 12) == derive_seed(7, "image", 12)


def test_seed_purpose_and_index_each_change_the_draws() -> None:
    keys = [(0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1), (0, "a/0", 0), (10, "a", 0)]
    assert len({derive_seed(*key) for key in keys}) == len(keys)
    assert len({float(torch.rand((), generator=generator(*key))) for key in keys}) == len(keys)
    assert len({float(numpy_generator(*key).random()) for key in keys}) == len(keys)


def test_own_generators_leave_the_global_ones_alone() -> None:
    seed_everything(5)
    expected = torch.rand(3), np.random.rand(3), random.random()  # noqa: NPY002
    seed_everything(5)
    torch.rand(7, generator=generator(1, "x"))
    numpy_generator(1, "x").random(7)
    drawn = torch.rand(3), np.random.rand(3), random.random()  # noqa: NPY002
    assert torch.equal(expected[0], drawn[0])
    assert np.array_equal(expected[1], drawn[1])
    assert expected[2] == drawn[2]


def test_reproducible_sets_threads_and_determinism_and_restores_them() -> None:
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with reproducible(before[0] + 1):
        assert torch.get_num_threads() == before[0] + 1
        assert torch.are_deterministic_algorithms_enabled()
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before
