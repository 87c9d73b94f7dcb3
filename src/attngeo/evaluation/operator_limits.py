"""What no implementation can beat: instruction patterns in a processor's registers, a GPU's memory and issue rate."""

import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attngeo.evaluation.operator_sizes import ITERATIONS, Size

# Flags that the extension's variants are compiled with, as far as single precision in registers is concerned.
_FLAGS = {"avx512": ("-mavx512f", "-mavx512dq", "-mfma"), "avx2": ("-mavx2", "-mfma"), "portable": ()}
_KINDS = {"laplacian_kernel": "laplacian", "gaussian_kernel": "gaussian"}
_LANES_OF_A_MULTIPROCESSOR = 128  # four schedulers, each one instruction of a warp of 32 a clock


@dataclass(frozen=True)
class PortLimit:
    """Pairs a second and thread by instruction pattern; `why` says why there is none."""

    instruction_set: str = ""
    gpair_per_s: Mapping[str, float] | None = None
    why: str = ""

    def best(self, operation: str, direction: str) -> tuple[str, float] | None:
        """The fastest pattern that does what an operator's inner loop has to do, and its rate."""
        prefix = f"{_KINDS.get(operation)} {direction}: "
        patterns = {name: rate for name, rate in (self.gpair_per_s or {}).items() if name.startswith(prefix)}
        name = max(patterns, key=lambda pattern: patterns[pattern], default=None)
        return None if name is None else (name.removeprefix(prefix), patterns[name])


def measure_port_limit(source: Path, instruction_set: str) -> PortLimit:
    """Compile benchmarks/port_limit.cpp for an instruction set ("avx512", "avx2", "portable") and run it."""
    wanted = os.environ.get("CXX")
    command = shlex.split(wanted) if wanted else next(([name] for name in ("g++", "c++") if shutil.which(name)), [])
    if not command:
        return PortLimit(why="no C++ compiler")
    if instruction_set not in _FLAGS:
        return PortLimit(why=f"no patterns for {instruction_set or 'the naive forms'}")
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/port_limit"
        flags = ["-O3", "-std=c++17", *_FLAGS[instruction_set]]
        try:
            subprocess.run([*command, *flags, str(source), "-o", program], check=True, capture_output=True, text=True)
            printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            lines = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
            return PortLimit(why=f"{source.name} does not run here: {lines[0] if lines else error}")
    found = json.loads(printed)
    return PortLimit(found["instruction_set"], found["gpair_per_s"])


def this_instruction_set() -> str:
    """The instruction set that the compiled operators use here; empty where they are not there."""
    try:
        import attngeo_ext
    except ImportError:
        return ""
    return "" if attngeo_ext.problem else str(attngeo_ext.variant("cpu")).rpartition(" ")[2]


def port_limits(limit: PortLimit) -> Callable[[str, str, Size], dict[str, float]]:
    """The port limit of a pass over all pairs, in milliseconds, by the name of its pattern."""

    def limits(operation: str, direction: str, size: Size) -> dict[str, float]:
        best = limit.best(operation, direction)
        return {} if best is None else {f"registers: {best[0]}": size.pairs / best[1] / 1e6}

    return limits


def bytes_moved(operation: str, direction: str, size: Size) -> int:
    """Bytes that have to travel between memory and processor once: inputs, outputs and nothing else, in float32."""
    if operation in ("newton_schulz_inverse", "spd_inverse"):
        return (2 if direction == "forward" else 3) * 4 * size.slices * size.tokens**2
    inputs = size.slices * (size.tokens + size.landmarks) * size.channels
    if operation.endswith("_matmul"):
        outputs = size.slices * size.tokens * size.channels
        values = size.slices * size.landmarks * size.channels
        return 4 * (inputs + values + outputs if direction == "forward" else 2 * (inputs + values) + outputs)
    scores = size.slices * size.tokens * size.landmarks
    return 4 * (inputs + scores if direction == "forward" else 2 * inputs + 2 * scores)


def gpu_limits(operation: str, direction: str, size: Size, device: torch.device) -> dict[str, float]:
    """Lower bounds in milliseconds from the device's properties: by its memory ("memory") and by its "issue rate"."""
    properties = torch.cuda.get_device_properties(device)
    limits = {}
    bandwidth = memory_bandwidth(properties)
    if bandwidth:
        limits["memory"] = 1e3 * bytes_moved(operation, direction, size) / bandwidth
    clock = getattr(properties, "clock_rate", 0) * 1e3
    if clock:
        slots = properties.multi_processor_count * _LANES_OF_A_MULTIPROCESSOR * clock
        limits["issue rate"] = 1e3 * instructions(operation, direction, size) / slots
    return limits


def instructions(operation: str, direction: str, size: Size) -> int:
    """Single-precision instructions that cannot be left out, one lane each, outside of tensor cores.

    A pair (one channel of one query and one landmark) takes a difference and its accumulation forward; backward it
    takes a difference, its sign for the Laplacian kernel, and two accumulations. A fused product with as many values
    as channels adds one multiply-add a pair forward; its backward pass measures the distance again and adds two.
    """
    if operation == "newton_schulz_inverse":
        products = 2 * ITERATIONS if direction == "forward" else 2
        return products * size.slices * size.tokens**3
    if operation == "spd_inverse":
        return (1 if direction == "forward" else 2) * size.slices * size.tokens**3
    backward = 4 if operation.startswith("laplacian") else 3
    if operation.endswith("_matmul"):
        return (3 if direction == "forward" else 2 + 2 + backward) * size.pairs
    return (2 if direction == "forward" else backward) * size.pairs


def memory_bandwidth(properties: Any) -> float:
    """Bytes a second that the device's memory clock and bus allow; 0 where torch does not tell."""
    transfers = 2 * getattr(properties, "memory_clock_rate", 0) * 1e3
    return transfers * getattr(properties, "memory_bus_width", 0) / 8
