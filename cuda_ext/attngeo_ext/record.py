"""What the last build recorded, and the one judgement of whether its binary can be used, for the build and the loader.

Imports neither torch nor its own package, since the build runs this file by its path.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

SUFFIXES = (".cpp", ".h", ".cu", ".cuh")
BINARY = "_C.abi3.so"
RECORD = "build.json"
_KEYS = {"binary_sha256": str, "source_digest": str, "torch": str, "cpu_variants": list, "cuda": dict}
_CUDA_KEYS = {"built": bool, "reason": str, "version": str, "architectures": list}


def source_files(csrc: Path) -> list[Path]:
    """Every source of the binary below `csrc`, in a fixed order; the emulator serves tests only."""
    found = (path for path in csrc.rglob("*") if path.suffix in SUFFIXES)
    return sorted(path for path in found if "emulator" not in path.relative_to(csrc).parts)


def source_digest(csrc: Path) -> str:
    """SHA-256 over the relative names and bytes of the sources."""
    digest = hashlib.sha256()
    for path in source_files(csrc):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(csrc).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def read_record(package: Path) -> dict[str, Any]:
    """What the last build recorded: compilers, flags, architectures, registers; empty if that cannot be read."""
    try:
        record = json.loads((package / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def why_unusable(record: dict[str, Any], package: Path, torch: str | None) -> str | None:
    """The reason in words why the binary must not be used, whatever state the files are in; None if it may be.

    `torch` is the installed version, None if that is not known: then it does not count.
    """
    if not record:
        return "extension not built: run `make env`"
    if record.get("built") is not True:
        return f"extension not built: {record.get('reason', 'run `make env`')}"
    cuda = record.get("cuda")
    missing = [key for key, kind in _KEYS.items() if not isinstance(record.get(key), kind)]
    if isinstance(cuda, dict):
        missing += [f"cuda.{key}" for key, kind in _CUDA_KEYS.items() if not isinstance(cuda.get(key), kind)]
    if missing:
        return f"stale: run `make env` (build.json lacks {', '.join(missing)})"
    try:
        return _why_stale(record, package, torch)
    except OSError as error:
        return f"extension cannot be read: {error}"


def _why_stale(record: dict[str, Any], package: Path, torch: str | None) -> str | None:
    binary, csrc = package / BINARY, package.parent / "csrc"
    if not binary.exists() or hashlib.sha256(binary.read_bytes()).hexdigest() != record["binary_sha256"]:
        return "stale: run `make env` (the binary is not the one that build.json describes)"
    if csrc.is_dir() and source_digest(csrc) != record["source_digest"]:
        return "stale: run `make env` (the sources changed since the build)"
    # The stable ABI would let another torch load it; a binary carried to another machine has to be asked for.
    if torch not in (None, record["torch"]) and os.environ.get("ATTNGEO_EXTENSION_ANY_TORCH") != "1":
        return f"stale: run `make env` (built for torch {record['torch']}, this is {torch})"
    return None
