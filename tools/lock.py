"""Write the lock files from what the active environment holds: every package that pyproject.toml leads to, pinned.

Use: install or upgrade what you want in `.venv`, run the tests, then `.venv/bin/python tools/lock.py`.
Packages that only torch asks for on a GPU (nvidia-*, cuda-*, triton) are left to torch, which pins them itself, so that
the same lock serves a CPU build of torch.
"""

import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
FIRST = ("torch", "torchvision")
LEFT_TO_TORCH = ("nvidia-", "cuda-", "triton")
HEADER = """\
# {what}
# Written by tools/lock.py from a tested environment; edit pyproject.toml and that environment, not this file.
"""


def closure(requirements: list[str]) -> set[str]:
    """Names of the installed packages that `requirements` lead to on any of the supported Pythons."""
    names: set[str] = set()
    for python in PYTHONS:
        environment = {"python_version": python, "python_full_version": f"{python}.0"}
        asked: dict[str, set[str]] = {}
        waiting = [Requirement(requirement) for requirement in requirements]
        while waiting:
            requirement = waiting.pop()
            name = canonicalize_name(requirement.name)
            if name in asked and requirement.extras <= asked[name]:
                continue
            extras = asked.setdefault(name, set())
            extras |= requirement.extras
            for text in metadata.distribution(name).requires or []:
                needed = Requirement(text)
                marker = needed.marker
                if marker is None or any(marker.evaluate({**environment, "extra": e}) for e in extras | {""}):
                    waiting.append(needed)
        names |= set(asked)
    return {name for name in names if not name.startswith(LEFT_TO_TORCH)}


def lock_text(what: str, names: set[str]) -> str:
    """A lock file's text: torch and torchvision first, then the alphabet."""
    ordered = sorted(names, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))
    pins = [f"{name}=={metadata.version(name).partition('+')[0]}" for name in ordered]
    return HEADER.format(what=what) + "\n".join(pins) + "\n"


def main() -> None:
    """Write the three lock files beside pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    base = closure(project["dependencies"] + extras["workflow"])
    test = closure(extras["test"]) - base
    ffcv = closure(extras["ffcv"]) - base
    for name, what, names in (
        ("requirements.lock", "What the package, the workflow and the figures need.", base),
        ("requirements-test.lock", "What the tests and checks need besides requirements.lock.", test),
        ("requirements-ffcv.lock", "What the FFCV loader needs besides requirements.lock; ffcv is built here.", ffcv),
    ):
        (ROOT / name).write_text(lock_text(what, names), encoding="utf-8")


if __name__ == "__main__":
    main()
