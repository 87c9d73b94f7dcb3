"""One GPU for one process: Snakemake counts GPUs but never says which, so the command line takes a free one itself."""

import fcntl
import os
import tempfile
import time
from pathlib import Path

from attngeo.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_held: list[int] = []  # descriptors of the locks, released by the kernel when the process ends


def gpu_indices() -> list[int]:
    """Indices of the NVIDIA GPUs of this machine, asked of the device files so that no CUDA context is made."""
    return sorted(int(f.name.removeprefix("nvidia")) for f in Path("/dev").glob("nvidia[0-9]*") if f.name[6:].isdigit())


def _lock_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"attngeo-gpus-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def lease_gpu(*, wait_s: float = 3600.0, poll_s: float = 1.0) -> str:
    """Reserve a free GPU until this process ends, set CUDA_VISIBLE_DEVICES to it and return that value.

    A value that is already set is honoured, as schedulers set it. Must run before torch is imported. Raises UserError
    if the machine has no NVIDIA GPU, or none gets free within `wait_s` seconds.
    """
    given = os.environ.get(VISIBLE)
    if given:
        return given
    indices = gpu_indices()
    if not indices:
        raise UserError(
            "the preset asks for a GPU and this machine shows none", "set resources.train.device: cpu in config.yaml"
        )
    deadline = time.monotonic() + wait_s
    told = False
    while True:
        for index in indices:
            descriptor = os.open(_lock_folder() / f"{index}.lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            _held.append(descriptor)
            os.environ[VISIBLE] = str(index)
            return str(index)
        if time.monotonic() >= deadline:
            raise UserError(
                f"no GPU of {indices} got free within {wait_s:.0f} s",
                "end the other runs, or start fewer at once: snakemake --resources gpu=N",
            )
        if not told:
            print(f"waiting for one of the GPUs {indices}", flush=True)
            told = True
        time.sleep(poll_s)
