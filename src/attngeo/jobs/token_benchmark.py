"""Job: the cost of one attention layer against tokens, and the budgets of a training step."""

import math
import time
from collections.abc import Iterator

from attngeo.config import Preset
from attngeo.evaluation import tokens, training_step
from attngeo.jobs import loop_overhead
from attngeo.jobs.analysis import keep
from attngeo.tracking.provenance import provenance


def token_benchmark(preset: Preset, code_digest: str) -> Iterator[str]:
    """Write benchmarks/tokens.json and .csv; a line of each case as it is measured, then the exponents and budgets."""
    import pandas as pd

    started = time.monotonic()
    settings, step = preset.benchmarks.tokens, preset.benchmarks.training_step
    side = math.isqrt(settings.landmarks)
    rows = []
    for found in tokens.suite(
        settings.tokens,
        settings.kinds,
        settings.passes,
        heads=settings.heads,
        head_dim=settings.head_dim,
        landmarks=(side, side),
        repeats=settings.repeats,
        seconds=settings.seconds,
        longest_s=settings.longest_s,
        memory_mib=settings.memory_mib,
    ):
        rows += found
        values = {row["metric"]: row["value"] for row in found}
        said = f"left out: {found[0].get('why')}"
        if "time_ms" in values:
            said = f"{values['time_ms']:.2f} ms, {values['peak_memory_mib']:.1f} MiB"
        yield f"{found[0]['attention']} {found[0]['pass']}, {found[0]['tokens']} tokens: {said}"
    fitted = tokens.exponents(rows)
    for row in fitted:
        yield (
            f"{row['attention']} {row['pass']}: {row['metric'].replace('_', ' ')} {row['value']:.3f} +- "
            f"{row['spread']:.3f} over {row['from_tokens']} to {row['to_tokens']} tokens"
        )
    size = training_step.LayerSize(step.batch, step.heads, step.tokens, step.head_dim)
    budgets = training_step.measure(size, repeats=step.repeats, seconds=step.seconds)
    budgets += loop_overhead.measure(step.model_size, step.images, step.steps, repeats=step.repeats)
    for goal, value, verdict in training_step.judge(budgets):
        said = f"{value:.3f}, {verdict}" if math.isfinite(value) else verdict
        yield f"{goal.text}: {said} (goal: at most {goal.at_most:g})"
    frame = pd.DataFrame([*rows, *fitted, *budgets]).convert_dtypes()
    keep(
        preset,
        frame.assign(device=provenance(code_digest)["device"]),
        preset.results / "benchmarks" / "tokens.json",
        experiment="LaplacianFormer",
        name="cost against tokens",
        code_digest=code_digest,
        params={"tokens": settings.model_dump(mode="json"), "training_step": step.model_dump(mode="json")},
        metrics={f"{row['metric']} {row['attention']} {row['pass']}": row["value"] for row in fitted},
        started=started,
        table=True,
    )
