"""Job: compile the extension; quick when nothing changed, and safe beside another build."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from attngeo.errors import UserError

EXIT_CANNOT_BEGIN = 2  # of setup.py: a setting or a permission has to be put right first


def build(root: Path) -> dict[str, Any]:
    """Compile cuda_ext if its sources, torch or the compilers changed; return what the build recorded.

    Must run before the operators are imported. Without a compiler a current binary stays; otherwise nothing is built
    and the record says why. Raises UserError if a setting has no meaning, a due build cannot be written, or the
    compiler fails on the sources; an earlier binary stays, refused as stale if the sources differ.
    """
    folder = root / "cuda_ext"
    command = [sys.executable, str(folder / "setup.py"), "build_ext", "--inplace"]
    status = subprocess.run(command, cwd=folder).returncode
    if status == EXIT_CANNOT_BEGIN:
        raise UserError("the build of the extension could not begin", "do what its ERROR line above says")
    if status:
        raise UserError("the extension did not compile", "read the compiler's message above; `attngeo doctor` helps")
    recorded: dict[str, Any] = json.loads((folder / "attngeo_ext" / "build.json").read_text(encoding="utf-8"))
    return recorded


def uses_extension(stamp: dict[str, Any]) -> bool:
    """Whether a digest stamp covers compiled operators."""
    return bool(stamp.get("extension"))
