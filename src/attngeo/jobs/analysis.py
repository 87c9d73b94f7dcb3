"""What every analysis job does with its numbers: records on disk first, then the tracker."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attngeo.config import Preset
from attngeo.errors import UserError
from attngeo.files import write_aside
from attngeo.ops import backend
from attngeo.paper import records
from attngeo.tracking.mlflow_run import log_job
from attngeo.tracking.provenance import provenance

if TYPE_CHECKING:
    import pandas as pd


@contextmanager
def keys_of(preset: Preset, section: str) -> Iterator[None]:
    """Where a remedy names a key of a section of the config, such as window_tokens, say where that key stands."""
    try:
        yield
    except UserError as error:
        named = next((key for key in type(getattr(preset, section)).model_fields if key in error.remedy.split()), None)
        if named is None:
            raise
        place = f"{section}.{named} in config/{preset.name}/config.yaml"
        raise UserError(error.what, error.remedy.replace(named, place)) from error


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
