"""Compiled operators of attngeo: loads the binary, refuses a stale one, and teaches torch about the operators.

`problem` is None when the operators can be used, else the reason in one line. A CPU-only torch loads it as well.
Shapes, gradients, autocast and vmap of the operators are registered by `pairwise` and `inverse`.
"""

import ctypes
import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from attngeo_ext import inverse, pairwise
from attngeo_ext.sources import source_digest

_FOLDER = Path(__file__).resolve().parent
_BINARY = _FOLDER / "_C.abi3.so"
_BUILD = _FOLDER / "build.json"
_SOURCES = _FOLDER.parent / "csrc"
_BUILD_KEYS = ("binary_sha256", "source_digest", "torch", "cpu_variants")
_CUDA_KEYS = ("built", "reason", "architectures")


def build_info() -> dict[str, Any]:
    """What the last build recorded: compilers, flags, architectures, registers; empty if there was none."""
    try:
        info = json.loads(_BUILD.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}


def _why_not_load(info: dict[str, Any]) -> str | None:
    """The reason in words, whatever state the files are in: importing the operators must not fail for them."""
    if not info:
        return "extension not built: run `make env`"
    if not info.get("built"):
        return f"extension not built: {info.get('reason', 'run `make env`')}"
    cuda = info.get("cuda")
    missing = [key for key in _BUILD_KEYS if key not in info]
    missing += [f"cuda.{key}" for key in _CUDA_KEYS if not isinstance(cuda, dict) or key not in cuda]
    if missing:
        return f"stale: run `make env` (build.json lacks {', '.join(missing)})"
    try:
        return _why_stale(info)
    except OSError as error:
        return f"extension cannot be read: {error}"


def _why_stale(info: dict[str, Any]) -> str | None:
    if not _BINARY.exists() or hashlib.sha256(_BINARY.read_bytes()).hexdigest() != info["binary_sha256"]:
        return "stale: run `make env` (the binary is not the one that build.json describes)"
    if _SOURCES.is_dir() and source_digest(_SOURCES) != info["source_digest"]:
        return "stale: run `make env` (the sources changed since the build)"
    # The stable ABI would let another torch load it; a binary carried to another machine has to be asked for.
    if info["torch"] != torch.__version__ and os.environ.get("ATTNGEO_EXTENSION_ANY_TORCH") != "1":
        return f"stale: run `make env` (built for torch {info['torch']}, this is {torch.__version__})"
    return None


_info = build_info()
problem: str | None = _why_not_load(_info)


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(_BINARY))
    library.attngeo_cpu_variant.restype = ctypes.c_char_p
    library.attngeo_use_cpu_variant.restype = ctypes.c_bool
    library.attngeo_use_cpu_variant.argtypes = [ctypes.c_char_p]
    library.attngeo_cuda_problem.restype = ctypes.c_char_p
    library.attngeo_cuda_problem.argtypes = [ctypes.c_int]
    return library


def cuda_problem(device: int) -> str:
    """Why the kernels cannot run on this CUDA device, or an empty string."""
    if not _info["cuda"]["built"]:
        return f"the extension has no CUDA kernels ({_info['cuda']['reason']})"
    reason = _library().attngeo_cuda_problem(device)
    if reason is None:
        return ""
    capability = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return f"{reason.decode()}: built for {', '.join(_info['cuda']['architectures'])}, the device is {capability}"


def variant(device: str, index: int = 0) -> str:
    """The code that runs on a device: for example "cpu avx512" or "cuda sm_90"."""
    if device == "cuda":
        return "cuda sm_{}{}".format(*torch.cuda.get_device_capability(index))
    return f"{device} {_library().attngeo_cpu_variant().decode()}"


def use_cpu_variant(name: str) -> None:
    """Run this instruction set ("portable", "avx2", "avx512") from now on, "" for the fastest; for comparisons."""
    if not _library().attngeo_use_cpu_variant(name.encode()):
        raise ValueError(f"this processor or build has no variant {name!r} (built: {', '.join(_info['cpu_variants'])})")


if problem is None:
    try:
        torch.ops.load_library(_BINARY)
    except OSError as error:
        # An older C library than the one it was linked with, or a file system that forbids execution.
        problem = f"extension cannot be loaded here: {error}"
    else:
        inverse.register()
        pairwise.register()
