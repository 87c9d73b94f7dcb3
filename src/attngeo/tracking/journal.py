"""What a job tells MLflow, kept as a file first: results/<preset>/.tracking/<kind>-<name>.json.

Importing MLflow takes longer than most jobs do. So the jobs of a workflow leave it at the file, and one pass at the
workflow's end sends all of them (`LATER`).
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attngeo.files import read_json, write_json
from attngeo.tracking import description

LATER = "ATTNGEO_TRACK_LATER"  # environment variable: set where `attngeo track sync` follows by itself
_FOLDER = ".tracking"


@dataclass(frozen=True)
class Job:
    """A finished analysis or drawing: what its run in MLflow holds."""

    experiment: str
    name: str
    params: dict[str, Any]
    metrics: dict[str, Any]
    artifacts: list[Path]
    tags: dict[str, str]

    @property
    def preset(self) -> str:
        """The preset that it belongs to; empty without one."""
        return self.tags.get("attngeo.preset", "")

    def claims_tag(self, root: Path) -> dict[str, str]:
        """The tag that names the claims which it shows or is evidence for."""
        results = (root / "results" / self.preset).resolve()
        claims = description.claims_of_targets([self.name])
        for path in self.artifacts:
            if path.resolve().is_relative_to(results):
                claims |= description.claims_of_file(path.resolve().relative_to(results).as_posix())
        return description.claims_tag(claims)


def write(root: Path, job: Job) -> bool:
    """Keep the job's record beside the preset's results; whether a pass that follows by itself sends it.

    A job without a preset is kept nowhere.
    """
    if not job.preset:
        return False
    name = re.sub(r"[^\w\-.]", "_", f"{job.tags.get('attngeo.kind', 'job')}-{job.name}")
    base = root.resolve()
    paths = [path.resolve() for path in job.artifacts]
    shown = [str(path.relative_to(base) if path.is_relative_to(base) else path) for path in paths]
    write_json(
        root / "results" / job.preset / _FOLDER / f"{name}.json",
        {
            "experiment": job.experiment,
            "name": job.name,
            "params": job.params,
            "metrics": job.metrics,
            "artifacts": shown,
            "tags": job.tags,
        },
    )
    is_left = bool(os.environ.get(LATER))
    if is_left:
        _unsent(root, job.preset).touch()
    return is_left


def has_unsent(root: Path, preset: str) -> bool:
    """Whether there are records of the preset that were left to a pass."""
    return _unsent(root, preset).exists()


@contextmanager
def sending(root: Path, preset: str) -> Iterator[Iterator[Job]]:
    """The preset's jobs for a pass that sends them; what is recorded meanwhile, or was not sent, stays for the next."""
    left = has_unsent(root, preset)
    _unsent(root, preset).unlink(missing_ok=True)
    try:
        yield _read(root, preset)
    except BaseException:
        if left:
            _unsent(root, preset).touch()
        raise


def _unsent(root: Path, preset: str) -> Path:
    return root / "results" / preset / _FOLDER / "unsent"


def _read(root: Path, preset: str) -> Iterator[Job]:
    """Every job of a preset, in the order of their files' names; those whose files are gone are left out."""
    for path in sorted((root / "results" / preset / _FOLDER).glob("*.json")):
        values = read_json(path)
        artifacts = [root / file for file in values.pop("artifacts")]
        if all(file.is_file() for file in artifacts):
            yield Job(artifacts=artifacts, **values)
