"""One GPU for one process: Snakemake counts GPUs but never says which, so the command line takes a free one itself."""

import fcntl
import os
import re
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from attngeo.errors import UserError
from attngeo.files import explain_os_errors

VISIBLE = "CUDA_VISIBLE_DEVICES"
SCHEDULED = "SLURM_JOB_ID"
NO_GPU_REMEDY = "set resources.train.device: cpu in config.yaml, or where the command has it --device cpu"
_held: dict[Path, int] = {}  # lock file -> its descriptor, released by the kernel when the process ends


def device_numbers() -> list[int]:
    """Numbers of the device files /dev/nvidiaN that this process is shown, found without making a CUDA context.

    A container shows its own GPUs under the numbers that they have on the host; CUDA counts them from zero.
    """
    return sorted(int(f.name.removeprefix("nvidia")) for f in Path("/dev").glob("nvidia[0-9]*") if f.name[6:].isdigit())


def device_uuids() -> dict[str, int]:
    """GPU UUID -> number of the device file, as far as the driver tells."""
    uuids = {}
    for file in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        with suppress(OSError):
            text = file.read_text()
            uuid, number = re.search(r"GPU UUID:\s*(\S+)", text), re.search(r"Device Minor:\s*(\d+)", text)
            if uuid and number:
                uuids[uuid[1]] = int(number[1])
    return uuids


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as entries of CUDA_VISIBLE_DEVICES."""
    given = os.environ.get(VISIBLE)
    return [str(place) for place in range(len(device_numbers()))] if given is None else _listed(given)


def lease_gpu(*, wait_s: float = 3600.0, poll_s: float = 1.0) -> str:
    """Reserve a free GPU until this process ends, set CUDA_VISIBLE_DEVICES to it and return that value.

    If the variable is set already, the GPU is one of those that it lists; the only one that Slurm gave is used at once.
    Must run before torch is imported. Raises UserError if there is no GPU, or none gets free within `wait_s` seconds.
    """
    given = os.environ.get(VISIBLE)
    scheduled = os.environ.get(SCHEDULED) if given is not None else None
    entries = visible_gpus()
    if not entries:
        seen = "this machine shows none" if given is None else f"{VISIBLE}={given!r} shows none"
        raise UserError(f"the preset asks for a GPU and {seen}", NO_GPU_REMEDY)
    if scheduled and len(entries) == 1:
        return entries[0]
    locks = _locks(entries, scheduled)
    deadline = time.monotonic() + wait_s
    told = False
    while True:
        for entry, lock in locks.items():
            if _take(lock):
                os.environ[VISIBLE] = entry
                return entry
        names = ", ".join(entries)
        if time.monotonic() >= deadline:
            raise UserError(
                f"none of the GPUs {names} got free within {wait_s:.0f} s",
                "end the other runs, or start fewer at once: snakemake --resources gpu=N mem_mb=MB (name both: a "
                "profile's limits do not hold beside it)",
            )
        if not told:
            print(f"waiting for one of the GPUs {names}", flush=True)
            told = True
        time.sleep(poll_s)


def _listed(value: str) -> list[str]:
    """The GPUs that a value of CUDA_VISIBLE_DEVICES names; as for CUDA, the first entry that names none ends it."""
    entries: list[str] = []
    for entry in map(str.strip, value.split(",")):
        if not re.fullmatch(r"\d+|(GPU|MIG)-\S+", entry):
            break
        if entry not in entries:
            entries.append(entry)
    return entries


def _locks(entries: Sequence[str], scheduled: str | None) -> dict[str, Path]:
    """The lock file of each GPU, named after its device file, so that one GPU has one lock under all of its names.

    Containers that share the folder of temporary files, where each calls another GPU 0, do not wait for each other.
    Nor do two jobs of Slurm on one node: each holds its GPUs alone, and may know them all from 0.
    """
    folder = Path(tempfile.gettempdir()) / f"attngeo-gpus-{os.getuid()}"
    with explain_os_errors(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
    numbers, uuids = device_numbers(), device_uuids()
    job = f"job{scheduled}-" if scheduled else ""
    locks = {}
    for entry in entries:
        if entry.isdigit():
            number = numbers[int(entry)] if int(entry) < len(numbers) else None
        else:
            number = next((number for uuid, number in uuids.items() if uuid.startswith(entry)), None)
        name = f"{entry}.lock" if number is None else f"nvidia{number}.lock"
        locks[entry] = folder / f"{job}{name}".replace("/", "-")
    return locks


def _take(lock: Path) -> bool:
    """Lock a file for this process, which may hold it already; False if another one does."""
    if lock in _held:
        return True
    with explain_os_errors(lock):
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    _held[lock] = descriptor
    return True
