"""Job: what metrics cost, and their share of a transformer block."""

import time
from collections.abc import Iterator

from attngeo.config import Preset
from attngeo.fiber_bundle import metric_costs as costs
from attngeo.jobs.analysis import keep
from attngeo.tracking.provenance import provenance


def metric_costs(preset: Preset, code_digest: str) -> Iterator[str]:
    """Write benchmarks/low_rank_metric.json and .csv; a line of each exponent and block."""
    import pandas as pd

    started = time.monotonic()
    settings = preset.benchmarks.metric_costs
    rows = []
    for found in costs.measure(**settings.model_dump()):
        rows += found
        for row in found:
            if "exponent" in row["metric"]:
                yield f"{row['metric'].replace('_', ' ')}: {row['value']:.2f} ({row['smallest']} to {row['largest']})"
            elif row["metric"] == "block_overhead":
                yield f"block of {row['dimension']} channels, rank {row['rank']}: {100 * row['value']:+.0f} %"
            elif row["metric"] == "projected_overhead" and row["part"] == "all":
                where = f"{row['shape']}, rank {row['rank']}, {row['tokens']} tokens"
                yield f"{where}: {100 * row['value']:+.0f} % (projected)"
    summary = {row["metric"]: row["value"] for row in rows if "exponent" in row["metric"]}
    overheads = [row for row in rows if row["metric"] == "block_overhead"]
    summary |= {f"block overhead d {row['dimension']} r {row['rank']}": row["value"] for row in overheads}
    keep(
        preset,
        pd.DataFrame(rows).convert_dtypes().assign(device=provenance(code_digest)["device"]),
        preset.results / "benchmarks" / "low_rank_metric.json",
        experiment="Fiber bundle",
        name="cost of metrics",
        code_digest=code_digest,
        params=settings.model_dump(mode="json"),
        metrics=summary,
        started=started,
        table=True,
    )
