"""Job: latency and memory of one image at a time, for every attention kind."""

import time
from collections.abc import Iterator

from attngeo.config import Preset
from attngeo.evaluation import edge
from attngeo.jobs.analysis import keep
from attngeo.tracking.provenance import provenance


def edge_benchmark(preset: Preset, code_digest: str) -> Iterator[str]:
    """Write benchmarks/edge.json and .csv; a line of each model as it is measured."""
    import pandas as pd

    started = time.monotonic()
    settings = preset.benchmarks.edge
    rows = []
    for found in edge.suite(settings.image_sizes, settings.kinds, repeats=settings.repeats, seconds=settings.seconds):
        rows += found
        values = {row["metric"]: row["value"] for row in found}
        yield (
            f"{found[0]['size']} {found[0]['attention']} {found[0]['image_size']} px: "
            f"{values['latency_ms']:.2f} ms, {values['memory_mib']:.1f} MiB beside the weights"
        )
    frame = pd.DataFrame(rows).assign(device=provenance(code_digest)["device"])
    keep(
        preset,
        frame,
        preset.results / "benchmarks" / "edge.json",
        experiment="LaplacianFormer",
        name="edge timings",
        code_digest=code_digest,
        params=settings.model_dump(mode="json"),
        metrics={},
        started=started,
        table=True,
    )
