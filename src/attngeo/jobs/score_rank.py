"""Job: the rank of matrices of scores against head dimension."""

import time
from collections.abc import Iterator

from attngeo.config import Preset
from attngeo.fiber_bundle import score_rank as ranks
from attngeo.jobs.analysis import keep


def score_rank(preset: Preset, code_digest: str) -> Iterator[str]:
    """Write analyses/score_rank.json; a line of each head dimension, then how many ranks are as predicted."""
    import pandas as pd

    started = time.monotonic()
    settings = preset.score_rank
    rows: list[ranks.Row] = []
    for row in ranks.analyze(settings.dimensions, settings.tokens, settings.seeds):
        if rows and rows[-1]["dimension"] != row["dimension"]:
            yield f"d = {rows[-1]['dimension']} done after {time.monotonic() - started:.0f} s"
        rows.append(row)
    agreeing = sum(row["value"] == row["predicted"] for row in rows)
    yield f"{agreeing} of {len(rows)} ranks as predicted ({ranks.RANK_RULE})"
    keep(
        preset,
        pd.DataFrame(rows),
        preset.results / "analyses" / "score_rank.json",
        experiment="Fiber bundle",
        name="rank of scores",
        code_digest=code_digest,
        params=settings.model_dump(mode="json") | {"rule": ranks.RANK_RULE},
        metrics={"ranks as predicted": agreeing / len(rows)},
        started=started,
    )
