"""Every random draw of the project comes from a generator that (seed, purpose, index) determines."""

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np


def derive_seed(seed: int, purpose: str, index: int = 0) -> int:
    """A number in [0, 2^63) that depends on the three arguments and on nothing else: SHA-256 of "seed/purpose/index".

    `purpose` names the use ("mixup", "permutation"); `index` counts within it (step, epoch, image), so that draws for
    one use or step never shift those of another.
    """
    digest = hashlib.sha256(f"{int(seed)}/{purpose}/{int(index)}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(seed: int, purpose: str, index: int = 0) -> torch.Generator:
    """A fresh CPU torch generator for (seed, purpose, index)."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose, index))


def numpy_generator(seed: int, purpose: str, index: int = 0) -> "np.random.Generator":
    """A fresh NumPy generator (PCG64) for (seed, purpose, index)."""
    import numpy as np

    return np.random.Generator(np.random.PCG64(derive_seed(seed, purpose, index)))


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch (all devices), which dropout and drop-path draw from."""
    import numpy as np

    random.seed(derive_seed(seed, "global python"))
    np.random.seed(derive_seed(seed, "global numpy") % 2**32)  # noqa: NPY002  timm.data.Mixup draws from the old global generator
    torch.manual_seed(derive_seed(seed, "global torch"))


@contextmanager
def seeded_globals(seed: int) -> Iterator[None]:
    """Run a block whose code draws from the global CPU generators, seeded, and leave those as they were.

    For code of others that takes no generator; the generators of GPUs are not touched.
    """
    import numpy as np

    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])


@contextmanager
def reproducible(threads: int, device: str = "cpu") -> Iterator[None]:
    """Run a block with `threads` CPU threads and deterministic algorithms, then restore both settings.

    On a CPU an operator without a deterministic form raises; on a GPU, where many have none, torch warns and names it.
    """
    before = (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with it
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True, warn_only=on_gpu)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1], warn_only=warned_only)
