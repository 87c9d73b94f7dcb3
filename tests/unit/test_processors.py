"""Threads: as many as were asked for, and one where more would be slower."""

import contextlib
import os
from collections.abc import Iterator

import pytest
import torch

from attngeo.processors import one_thread, use_threads
from tests.tolerances import FLOAT64_RELATIVE


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    yield
    torch.set_num_threads(threads)


def test_one_thread_ends_with_the_block_whatever_ends_it() -> None:
    use_threads(2)
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with contextlib.suppress(KeyError), one_thread():
        raise KeyError
    assert torch.get_num_threads() == 2


def test_children_compute_with_as_many_threads_and_scipy_with_one() -> None:
    use_threads(3)
    assert torch.get_num_threads() == 3
    assert (os.environ["OMP_NUM_THREADS"], os.environ["OPENBLAS_NUM_THREADS"]) == ("3", "1")


def test_systems_are_solved_right_after_any_number_of_changes() -> None:
    draw = torch.Generator().manual_seed(0)
    use_threads(2)
    for tokens in (3, 64, 257, 511):
        matrix = torch.randn(tokens, tokens, dtype=torch.float64, generator=draw) + tokens * torch.eye(tokens)
        right = torch.randn(tokens, dtype=torch.float64, generator=draw)
        for _ in range(3):
            with one_thread():
                inside = torch.linalg.solve(matrix, right)
            for found in (inside, torch.linalg.solve(matrix, right)):
                assert ((matrix @ found - right).norm() / right.norm()).item() <= FLOAT64_RELATIVE
