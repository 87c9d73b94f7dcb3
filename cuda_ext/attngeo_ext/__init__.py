"""Compiled operators of attngeo: loads the binary, refuses a stale one, and teaches torch about the operators.

`problem` is None when the operators can be used, else the reason in one line. A CPU-only torch loads it as well.
Shapes, gradients, autocast and vmap of the operators are registered by `pairwise` and `inverse`.
"""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

from attngeo_ext import inverse, pairwise, record

_FOLDER = Path(__file__).resolve().parent
_BINARY = _FOLDER / record.BINARY


def build_info() -> dict[str, Any]:
    """What the last build recorded: compilers, flags, architectures, registers; empty if there was none."""
    return record.read_record(_FOLDER)


_info = build_info()
# Importing the operators must not fail, whatever state the files are in.
problem: str | None = record.why_unusable(_info, _FOLDER, torch.__version__)


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
