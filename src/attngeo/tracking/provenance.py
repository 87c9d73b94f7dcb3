"""Where a number comes from: git revision, environment, device and code digest, stored with every record."""

import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any


@cache
def _git(root: Path, *arguments: str) -> str:
    try:
        answer = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def device_name(device: str) -> str | None:
    """What `provenance` calls a device of torch's: a GPU by name; None, that is the processor, for "cpu"."""
    if device == "cpu":
        return None
    import torch

    return f"{device} {torch.cuda.get_device_name(device)}"


def provenance(code_digest: str, *, device: str | None = None, root: Path | None = None) -> dict[str, Any]:
    """Describe the code, the environment and the device a number was made with.

    `device` is a name such as "cpu" or "cuda:0 NVIDIA H200"; without it the name of the processor is used.
    """
    root = root or Path.cwd()
    return {
        "code_digest": code_digest,
        "git_revision": _git(root, "rev-parse", "HEAD") or "not a git checkout",
        "git_dirty": bool(_git(root, "status", "--porcelain", "--untracked-files=no")),
        "device": device or f"cpu {_cpu_name()}",
        "threads": int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)),
        "python": platform.python_version(),
        "attngeo": _version("attngeo"),
        "torch": _version("torch"),
        "numpy": _version("numpy"),
    }
