"""Job: gather the timings that `make gpu-check` took on GPUs and left in docs/measured."""

import time
from pathlib import Path

from attngeo.config import Preset
from attngeo.errors import UserError
from attngeo.files import read_json
from attngeo.tracking.code_digest import CodeDigest

TIMINGS, CONDITIONS = "operators.csv", "operators.json"
# What each number takes along of the conditions that it was measured under.
_LABELS = ("device", "git_revision", "torch")


def measured_files(root: Path) -> list[Path]:
    """Timings and their conditions, a pair a device."""
    tables = sorted((root / "docs" / "measured").glob(f"*/{TIMINGS}"))
    return [file for table in tables for file in (table, table.with_name(CONDITIONS)) if file.is_file()]


def gpu_timings(preset: Preset, code_digest: str) -> list[str]:
    """Write benchmarks/gpu.json, without records where no GPU has been measured; the names of the devices."""
    import pandas as pd

    # The workflow asks this module for the measured files at every parse: torch would cost it two seconds.
    from attngeo.jobs.analysis import keep

    started = time.monotonic()
    now = CodeDigest(preset.root).extension_digest()
    frames, conditions = [], {}
    for table in (file for file in measured_files(preset.root) if file.name == TIMINGS):
        if not table.with_name(CONDITIONS).is_file():
            raise UserError(f"{table} is without its {CONDITIONS}", "measure again: make gpu-check")
        known = read_json(table.with_name(CONDITIONS))
        timings = pd.read_csv(table)
        timings = timings[timings["device_kind"] == "cuda"]
        if not len(timings):  # a trial of the script on a CPU is no measurement of a GPU
            continue
        conditions[known["device"]] = known
        labels = {name: known[name] for name in _LABELS}
        frames.append(timings.assign(**labels, same_sources=known["extension_digest"] == now))
    frame = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=["metric", "value", "n"])
    keep(
        preset,
        frame,
        preset.results / "benchmarks" / "gpu.json",
        experiment="LaplacianFormer",
        name="GPU timings",
        code_digest=code_digest,
        params={"measured": conditions},
        metrics={},
        started=started,
    )
    return list(conditions)
