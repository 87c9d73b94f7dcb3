"""Check and time every operator on this machine's GPU: `make gpu-check`, or `python tools/gpu_check.py`.

Needs Python, torch (2.11 or later), nvcc and g++, and nothing else. Builds the extension in place with this machine's
torch, checks outputs and gradients against float64, then times the operators forward and backward against torch, the
naive forms and the limits of memory and issue rate that follow from the device's properties, and attention by metric
against softmax by plain products. Writes docs/measured/<device>/operators.csv and .json, from which figure 5 and table
5 take their GPU series, and attention_by_metric.csv. Status 1 if a check fails (nothing is written then) or if there is
no GPU.
"""

import argparse
import csv
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COVERED = (8, 9, 12)  # major compute capabilities that the extension is built for unless told otherwise


def say(line: str) -> None:
    """One line of the report, at once."""
    print(f"gpu-check: {line}", flush=True)


class CannotCheckError(Exception):
    """There is nothing to check on; one line says why."""


def device_of(name: str) -> Any:
    """The torch device, or CannotCheckError in one line."""
    # A torch without NumPy warns when it is loaded; nothing here needs it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    try:
        import torch
    except ImportError:
        raise CannotCheckError("torch is not installed") from None
    if name == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda
        why = "no NVIDIA GPU or driver is seen" if built else f"torch {torch.__version__} has no CUDA"
        raise CannotCheckError(f"no GPU that torch can use: {why}")
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def build(device: Any) -> None:
    """Compile the extension for this torch and, where the usual architectures do not cover it, for this device."""
    import torch

    environment = os.environ | {"ATTNGEO_REQUIRE_EXTENSION": "1"}
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major not in COVERED:
            environment.setdefault("TORCH_CUDA_ARCH_LIST", f"{major}.{minor}")
    command = [sys.executable, str(ROOT / "cuda_ext" / "setup.py"), "build_ext", "--inplace"]
    if subprocess.run(command, cwd=ROOT / "cuda_ext", env=environment).returncode:
        raise CannotCheckError("the extension was not built: see above")


def require_compiled(device: Any) -> Any:
    """The loaded extension, or CannotCheckError with why it has nothing for the device."""
    import attngeo_ext

    problem = attngeo_ext.problem or (attngeo_ext.cuda_problem(device.index or 0) if device.type == "cuda" else "")
    if problem:
        raise CannotCheckError(f"the compiled operators cannot run here: {problem}")
    return attngeo_ext


def output_of(command: Sequence[str]) -> str:
    """What a command prints, empty if it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def check(device: Any, *, quick: bool) -> int:
    """Run every check; the number of those that failed, each on a line of its own."""
    from attngeo.evaluation.operator_checks import check_operators

    failed = passed = 0
    for one in check_operators(device, quick=quick):
        if one.passed:
            passed += 1
        else:
            failed += 1
            say(f"FAILED {one.name}: {one.detail}")
    say(f"{passed} checks against float64 passed, {failed} failed")
    return failed


def timings(device: Any, *, quick: bool) -> list[dict[str, Any]]:
    """Every number, as rows."""
    from attngeo.evaluation import operator_benchmarks as benchmarks
    from attngeo.evaluation.operator_limits import gpu_limits
    from attngeo.evaluation.operator_sizes import (
        INVERSE_SLICES,
        INVERSE_TOKENS,
        MEMORY_SIZES,
        PUBLISHED_TOKENS,
        PYRAMID_SIZES,
        Size,
        square,
    )

    kernels, inverses, slices = list(PYRAMID_SIZES), list(INVERSE_TOKENS), INVERSE_SLICES
    kernels.append(Size(64, 3136, 49, 64))  # one that fills a large device
    memory_sizes = list(MEMORY_SIZES)
    published = [square(slices, tokens) for tokens in PUBLISHED_TOKENS]
    if quick:
        kernels, inverses, slices = [Size(2, 67, 13, 9)], [17], 2
        published, memory_sizes = [square(2, 16)], []
    of_inverses = [square(slices, tokens) for tokens in inverses]
    sizes = {
        "laplacian_kernel": [*kernels, *(size._replace(channels=32) for size in published)],
        "laplacian_kernel_matmul": kernels,
        "gaussian_kernel": kernels,
        "gaussian_kernel_matmul": kernels,
        "newton_schulz_inverse": list(dict.fromkeys([*of_inverses, *published])),
        "spd_inverse": of_inverses,
    }
    rows = [row for size in memory_sizes for row in benchmarks.memory(size, device)]
    limits = partial(gpu_limits, device=device) if device.type == "cuda" else None
    patience = {"repeats": 3, "seconds": 0.02} if quick else {"repeats": 20, "seconds": 0.25}
    return rows + benchmarks.suite(sizes, device, limits=limits, tell=say, **patience)


def attention_by_metric(device: Any, *, quick: bool) -> list[dict[str, Any]]:
    """Every number of attention by metric against softmax by plain products and against the direct form."""
    from attngeo.fiber_bundle.attention_budget import Shape, measure

    shape = Shape(1, 33, 8, 2) if quick else Shape(8, 1024, 32, 4)
    return [*measure(shape, device, repeats=3 if quick else 20, seconds=0.02 if quick else 1.0)]


def copy_rate(device: Any) -> float:
    """Bytes a second that this device's memory really moves, read plus written, copying 1 GiB."""
    import torch

    from attngeo.evaluation.timing import cuda_time

    source = torch.empty(2**28, device=device)
    target = torch.empty_like(source)
    copy = partial(target.copy_, source)
    cuda_time(copy, 3)
    return 2 * source.nbytes / min(cuda_time(copy, 1) for _ in range(10))


def conditions(device: Any, extension: Any, seconds: float) -> dict[str, Any]:
    """What the numbers were measured under."""
    import torch

    from attngeo.evaluation.operator_limits import memory_bandwidth
    from attngeo.tracking.code_digest import CodeDigest

    cuda = extension.build_info()["cuda"]
    known: dict[str, Any] = {
        "device": "cpu",
        "backend": extension.variant(device.type, device.index or 0),
        "torch": torch.__version__,
        "nvcc": cuda["version"],
        "architectures": cuda["architectures"],
        "git_revision": os.environ.get("GIT_REVISION") or output_of(["git", "rev-parse", "HEAD"]) or "unknown",
        "git_dirty": bool(output_of(["git", "status", "--porcelain", "--untracked-files=no"])),
        "extension_digest": CodeDigest(ROOT).extension_digest(),
        "measured": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": round(seconds, 1),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", f"--id={device.index}"]
        known |= {
            "device": properties.name,
            "driver": output_of(query),
            "cuda_of_torch": torch.version.cuda,
            "multiprocessors": properties.multi_processor_count,
            "clock_mhz": getattr(properties, "clock_rate", 0) / 1e3,
            "memory_gb_per_s_by_properties": memory_bandwidth(properties) / 1e9,
            "memory_gb_per_s_copying": copy_rate(device) / 1e9,
        }
    return known


def write_table(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Rows as CSV, a column a key, complete or not at all."""
    from attngeo.files import write_aside

    rows = list(rows)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with write_aside(path) as stream:
        writer = csv.DictWriter(stream, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def run(device_name: str, *, quick: bool, may_build: bool, out: Path | None) -> int:
    """Build, check, time and write; the exit status."""
    started = time.monotonic()
    device = device_of(device_name)
    if may_build:
        build(device)
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "cuda_ext")]
    extension = require_compiled(device)
    say(f"ready after {time.monotonic() - started:.0f} s: {extension.variant(device.type, device.index or 0)}")
    if check(device, quick=quick):
        return 1
    rows = timings(device, quick=quick)
    by_metric = attention_by_metric(device, quick=quick)
    wrong = [row for row in rows if row["metric"] == "not_timed" and row.get("role") == "ours"]
    failed = [f"{row['operation']} {row['direction']}: {row['why']}" for row in wrong]
    failed += [f"attention by metric: {row['why']}" for row in by_metric if row["metric"] == "not_timed"]
    for line in failed:
        say(f"FAILED {line}")
    if failed:
        return 1
    known = conditions(device, extension, time.monotonic() - started)
    if out is None and device.type == "cuda":
        out = ROOT / "docs" / "measured" / re.sub(r"[^a-z0-9]+", "-", known["device"].lower()).strip("-")
    for row in (row for row in rows if row["metric"] == "speedup"):
        size = f"({row['slices']}, {row['tokens']}, {row['landmarks']}, {row['channels']})"
        say(f"{row['value']:8.2f} x {row['against']}: {row['operation']} {row['direction']} {size}")
    from attngeo.fiber_bundle import attention_budget

    for goal, value, verdict in attention_budget.judge(by_metric, attention_budget.GOALS):
        say(f"{verdict} {value:8.2f}  {goal.text}: {goal.bounds}")
    if out is not None:
        from attngeo.files import write_json

        (out / "operators.json").unlink(missing_ok=True)  # written last: it says of what revision the tables are
        write_table(rows, out / "operators.csv")
        write_table(by_metric, out / "attention_by_metric.csv")
        write_json(out / "operators.json", known)
        say(f"written: {out}/operators.csv")
    say(f"done in {time.monotonic() - started:.0f} s")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries the script itself")
    parser.add_argument("--quick", action="store_true", help="fewer checks, sizes that say nothing about speed")
    parser.add_argument("--no-build", action="store_true", help="take the extension as it is")
    parser.add_argument("--out", type=Path, help="folder to write to; without it docs/measured/<name of the GPU>")
    chosen = parser.parse_args(arguments)
    try:
        return run(chosen.device, quick=chosen.quick, may_build=not chosen.no_build, out=chosen.out)
    except CannotCheckError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
