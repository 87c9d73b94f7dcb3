"""Digest of the extension's sources, shared by the build and by the check that a binary is not stale."""

import hashlib
from pathlib import Path

SUFFIXES = (".cpp", ".h", ".cu", ".cuh")


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
