"""What every analysis job does with its numbers: records on disk first, then the tracker."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attngeo.config import Preset
from attngeo.files import write_aside
from attngeo.ops import backend
from attngeo.paper import records
from attngeo.tracking.mlflow_run import log_job
from attngeo.tracking.provenance import provenance

if TYPE_CHECKING:
    import pandas as pd


def keep(
    preset: Preset,
    frame: "pd.DataFrame",
    out: Path,
    *,
    experiment: str,
    name: str,
    code_digest: str,
    params: dict[str, Any],
    metrics: dict[str, float],
    started: float,
    table: bool = False,
) -> None:
    """Write an analysis' numbers as records and log the job with its parameters and summary metrics.

    With `table` the numbers are also written beside the records as CSV.
    """
    origin = provenance(code_digest, root=preset.root)
    origin |= {"preset": preset.name, "settings": params, "ran": backend.ran()}
    records.write(out, records.from_frame(frame, provenance=origin, source=name))
    if table:
        with write_aside(out.with_suffix(".csv")) as stream:
            frame.to_csv(stream, index=False)
    log_job(
        preset.root,
        experiment,
        name,
        params=params,
        metrics=metrics | {"wall_s": time.monotonic() - started},
        artifacts=[out],
        tags={
            "attngeo.kind": "analysis",
            "attngeo.preset": preset.name,
            "attngeo.code_digest": code_digest,
            "attngeo.git_revision": origin["git_revision"],
        },
    )
