"""A copy of the project in a temporary folder, so that no test touches a user's results."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("config", "workflow", "profiles", "src", "tools", "benchmarks")
_FILES = ("Snakefile", "Makefile", "pyproject.toml", "environment.yml", "README.md")


@dataclass
class ProjectCopy:
    """A copy and the commands a user types in it."""

    root: Path

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The user's environment, without what pytest or an outer workflow may have set."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SNAKEMAKE", "PYTEST", "ATTNGEO_OVERRIDES"))}
        kept["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
        kept["PYTHONPATH"] = f"{self.root / 'src'}{os.pathsep}{self.root / 'cuda_ext'}"
        kept.pop("OMP_NUM_THREADS", None)
        return kept | dict(extra or {})

    def run(self, command: str, *, timeout: float = 600, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command line exactly as written and return it with its output; fails the test if it fails."""
        done = subprocess.run(
            command, shell=True, cwd=self.root, env=self.environment(), capture_output=True, text=True, timeout=timeout
        )
        assert not check or done.returncode == 0, f"{command}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        return done

    def planned(self, arguments: str = "") -> list[str]:
        """Names of the rules that a dry run would execute, with their outputs' names."""
        done = self.run(f"snakemake -n --cores 2 all {arguments}")
        text = done.stdout + done.stderr
        jobs: list[str] = []
        rule = ""
        for line in text.splitlines():
            if line.startswith(("rule ", "localrule ")):
                rule = line.split()[1].rstrip(":")
            elif line.strip().startswith("output:") and rule:
                jobs.append(f"{rule} {line.split('output:')[1].strip()}")
                rule = ""
        return jobs


def copy_project(destination: Path) -> ProjectCopy:
    """Copy what the workflow needs; the compiled extension stays where it was built."""
    destination.mkdir(parents=True)
    for part in (*_FOLDERS, *_FILES):
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, destination / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        elif source.exists():
            shutil.copy2(source, destination / part)
    for lock in ROOT.glob("requirements*.lock"):
        shutil.copy2(lock, destination / lock.name)
    shutil.copytree(ROOT / "cuda_ext", destination / "cuda_ext", ignore=shutil.ignore_patterns("__pycache__", "build"))
    return ProjectCopy(destination)
