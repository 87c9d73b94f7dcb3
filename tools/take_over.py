"""Take finished results of a preset from docs/measured/<preset>, so that `make reproduce` goes on from there.

A result is taken only where its record's digest is that of this tree (code, values, data and versions), so that this
tree would make the same. Weights are not kept in git: what needs the weights of a run, and is not itself finished,
trains that run again. Results that are here already are left alone.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from snapshot import RECORD_FOLDERS

from attngeo.config import Preset, load_preset
from attngeo.errors import UserError
from attngeo.files import path_aside
from attngeo.jobs.planned import refuse_to_change
from attngeo.jobs.stamps import FIBER_IMAGES, stamp_names, stamp_path, write_stamps
from attngeo.tracking.code_digest import read_stamp

ROOT = Path(__file__).resolve().parent.parent
SUMMARIES = ("fiber_bundle", "predictions")  # of the trainings whose records lie beside them
# Records whose stamp has another name than they.
NAMED_OTHERWISE = {"benchmarks/low_rank_metric": "benchmarks/metric_costs", "predictions": "fiber_bundle"}


@dataclass(frozen=True)
class Kept:
    """One finished job: its stamp's name, the digest in its record, and its files relative to the preset's results."""

    stamp: str
    digest: str
    files: tuple[PurePosixPath, ...]


def kept(snapshot: Path) -> Iterator[Kept]:
    """The jobs whose records a snapshot holds; UserError names a record that cannot be read."""
    # In the order in which results are made of each other, summaries last: Snakemake compares times.
    for kind in RECORD_FOLDERS:
        for record in sorted((snapshot / kind).rglob("*.json"), key=lambda file: (file.stem in SUMMARIES, file)):
            path = PurePosixPath(record.relative_to(snapshot).as_posix())
            in_own_folder = path.name == "final.json"
            stamp = str(path.parent if in_own_folder else path.with_suffix("")).removeprefix("analyses/")
            stamp = NAMED_OTHERWISE.get(stamp, stamp)
            beside = sorted(record.parent.iterdir())
            mine = beside if in_own_folder else [file for file in beside if file.stem == record.stem]
            try:
                content = json.loads(record.read_text(encoding="utf-8"))
                digest = content["digest"] if in_own_folder else content["provenance"]["code_digest"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise UserError(f"{record} is no record ({error!r})", f"git checkout -- {record}") from error
            yield Kept(stamp, digest, tuple(PurePosixPath(file.relative_to(snapshot).as_posix()) for file in mine))


def takeable(jobs: Iterator[Kept], digests: Mapping[str, str], results: Path) -> tuple[list[Kept], list[str]]:
    """The jobs to take, and the stamps of those that another tree made; what `results` has is neither."""
    wanted, others = [], []
    for job in jobs:
        if digests.get(job.stamp) != job.digest:
            others.append(job.stamp)
        elif not all((results / file).exists() for file in job.files):
            wanted.append(job)
    return wanted, others


def made_first(preset: Preset) -> list[str]:
    """What taken results are made from and must not be younger than they: data, embedded models, the tracker."""
    folder = preset.results.relative_to(preset.root)
    datasets = {row.dataset for row in preset.runs}
    models = [model.id for model in preset.analysed_models.values() if model.source == "embedded"]
    images = ["textile"] if preset.vision_models else []
    images += [FIBER_IMAGES] if preset.fiber_bundle and FIBER_IMAGES in preset.fiber_bundle.tasks else []
    embedded = {f"results/embedded/{name}.json" for name in (*models, *images)}
    return [
        "results/tracking.json",
        *sorted(f"{folder}/data/{name}/manifest.json" for name in datasets),
        *sorted(embedded),
    ]


def take(root: Path, preset_name: str, cores: int) -> int:
    """Copy what can be taken into results/<preset>; the number of jobs taken."""
    preset = load_preset(root, preset_name)
    refuse_to_change(preset)
    write_stamps(preset)
    digests = {name: read_stamp(stamp_path(preset, name))["digest"] for name, _ in stamp_names(preset)}
    snapshot = root / "docs" / "measured" / preset_name
    wanted, others = takeable(kept(snapshot), digests, preset.results)
    if wanted:
        command = [sys.executable, "-m", "snakemake", "--cores", str(cores), "--config", f"preset={preset_name}", "--"]
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
        subprocess.run([*command, *made_first(preset)], cwd=root, env=environment, check=True)
    for job in wanted:
        for file in job.files:
            with path_aside(preset.results / file) as aside:
                shutil.copyfile(snapshot / file, aside)
    if others:
        shown = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
        sys.stdout.write(f"{len(others)} results were made by other code, values or data and are left: {shown}\n")
    sys.stdout.write(f"{len(wanted)} results taken; go on with: make reproduce PRESET={preset_name}\n")
    return len(wanted)


def main() -> int:
    """Take over one preset."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="study")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    try:
        take(ROOT, arguments.preset, arguments.cores)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except subprocess.CalledProcessError as error:
        return int(error.returncode)
    return 0


if __name__ == "__main__":
    sys.exit(main())
