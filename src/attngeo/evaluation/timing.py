"""How long calls take and how much memory they need: contestants in turn, the smallest of many repeats."""

import ctypes
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

Call = Callable[[], object]
Clock = Callable[[Call, int], float]  # seconds that so many calls take

LEAST_REPEATS = 3
SAMPLE_S = 2e-3  # a sample lasts at least this long, so that reading the clock does not count
WARMED_S = 0.1  # a call shorter than this is warmed up before each sample, to find its data where it would leave them
WARM_UP_S = 1e-2  # one call does not bring back data that nearly fill the last cache
_KEPT_BYTES = 2**31 - 1
_RETURNED_BYTES = 2**16
_NEVER_TRIMMED = -1


@dataclass(frozen=True)
class Timing:
    """What one call takes; the smallest of the repeats is the one that nothing else on the machine disturbed."""

    minimum_ms: float
    median_ms: float
    repeats: int

    @property
    def spread_ms(self) -> float:
        """How far the median lies above the smallest."""
        return self.median_ms - self.minimum_ms


def processor_time(call: Call, count: int) -> float:
    """Processor seconds of this process: a contestant that starts threads is charged for all of them."""
    start = time.process_time()
    for _ in range(count):
        call()
    return time.process_time() - start


def wall_time(call: Call, count: int) -> float:
    """Seconds on the wall."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - start


def cuda_time(call: Call, count: int) -> float:
    """Seconds between two events of the current stream; calls that the processor cannot feed fast enough count too."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def clock_of(device: torch.device) -> Clock:
    """The clock of a device: its events, or this process's processor time."""
    return cuda_time if device.type == "cuda" else processor_time


def interleaved(
    calls: Mapping[str, Call], clock: Clock, *, repeats: int, seconds: float, sample_s: float = SAMPLE_S
) -> dict[str, Timing]:
    """Time every call, one sample each in turn, so that a change of the machine's speed meets them all.

    A call is sampled `repeats` times, or less often once its samples have taken `seconds`, but `LEAST_REPEATS` times
    if one sample is not longer than that by itself. No sample is charged for what the contestant before it left in the
    caches: a short call is made, untimed, for `WARM_UP_S` before each of its samples.
    """
    counts, warm_ups = {}, dict.fromkeys(calls, 0)
    for name, call in calls.items():
        clock(call, 1)  # the first call loads code and takes memory
        once = clock(call, 1)
        counts[name] = max(1, math.ceil(sample_s / max(once, 1e-7)))
        if once < WARMED_S:
            warm_ups[name] = max(1, math.ceil(WARM_UP_S / max(once, 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            spent = sum(samples[name]) * counts[name]
            least = LEAST_REPEATS if not samples[name] or samples[name][0] * counts[name] <= seconds else 1
            if spent < seconds or len(samples[name]) < least:
                for _ in range(warm_ups[name]):
                    call()
                samples[name].append(clock(call, counts[name]) / counts[name])
    return {
        name: Timing(1e3 * min(taken), 1e3 * statistics.median(taken), len(taken)) for name, taken in samples.items()
    }


def keep_pages() -> bool:
    """Have the C library keep freed memory, so that no contestant is charged for pages that the system has to clear.

    For the rest of the process; False where the C library is not glibc.
    """
    return _keep_freed(_KEPT_BYTES, _NEVER_TRIMMED)


def return_pages() -> bool:
    """Have the C library give freed memory back at once, so that a peak is of what is in use and not of what was.

    Else it keeps blocks below 32 MiB for later, which adds up to half to the peak of a pass with such blocks. Until
    `keep_pages`; False where the C library is not glibc.
    """
    return _keep_freed(_RETURNED_BYTES, _RETURNED_BYTES)


def _keep_freed(block: int, end: int) -> bool:
    """Set from which size (bytes) a block, and the end of the heap, goes back to the system when it is freed."""
    mmap_threshold, trim_threshold = -3, -1
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(mmap_threshold, block) and mallopt(trim_threshold, end))


def peak_memory_mib(call: Call, device: torch.device) -> float:
    """Memory that a call takes at its peak beyond what was there before; NaN where the system does not tell.

    Not after `keep_pages`: memory that was freed and kept would not be seen.
    """
    call()  # what the first call alone takes (thread pools, code) is not the call's
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = status_kib("VmRSS")
        call()
        return (status_kib("VmHWM") - before) / 2**10
    except (AttributeError, OSError):
        return math.nan


def status_kib(key: str) -> int:
    """An entry of /proc/self/status in KiB: VmRSS, VmHWM, VmData."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{key}:")[2].split()[0])
