"""How many threads compute."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


def use_threads(threads: int) -> int:
    """Have every library of this process and its children compute with that many threads."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # what numpy and scipy are given here is small: see `one_thread`
    import torch

    torch.set_num_threads(threads)
    return threads


def free_cores() -> int:
    """Usable cores less those at work over the last minute, at least one."""
    return max(1, len(os.sched_getaffinity(0)) - round(os.getloadavg()[0]))


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, this thread's operations of torch are not shared with others.

    Decompositions and statistics of small matrices meet at a barrier every few microseconds: there a second thread
    costs more than it does, and on a busy machine, where it waits for its turn, many times more.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
