"""Job: the connection walk of the models that the preset has trained, by attention kind."""

import time
from functools import partial

from attngeo.config import Preset, RunRow
from attngeo.connection_walk.own_vision import analyze_pyramid
from attngeo.jobs.analysis import keep
from attngeo.jobs.run_model import build_model
from attngeo.jobs.trained import evenly_spread, load_trained
from attngeo.models.pyramid import Pyramid
from attngeo.training.seeding import derive_seed, seeded_globals

NULL_DRAWS = 4  # times those of pretrained models: scores of so small matrices scatter more


def connection_walk_runs(preset: Preset, code_digest: str) -> None:
    """Write analyses/connection_walk_runs.json: the runs that feed fig10 (label model: the run), on validation images.

    Labels `dataset`, `attention` (the run's kind) and `seed` tell runs apart besides those of a pretrained model.
    """
    import pandas as pd

    started = time.monotonic()
    settings = preset.connection_walk
    runs = preset.runs_to_look_into("fig10")
    frames = []
    for row in runs:
        model, batches = load_trained(preset, row)
        images, _ = evenly_spread(batches, settings.images)
        frame = analyze_pyramid(
            model,
            images,
            partial(_untrained, preset, row, batches.num_classes),
            model_id=row.run_id,
            null_draws=NULL_DRAWS * settings.null_draws,
            edges=settings.edges,
            inits=settings.inits,
        )
        frames.append(frame.assign(dataset=row.dataset, attention=row.attention_kind, seed=row.seed))
    walked = pd.concat(frames, ignore_index=True)
    excess = walked[(walked["metric"] == "isometry_score") & (walked["control"] == "excess") & (walked["head"] < 0)]
    keep(
        preset,
        walked,
        preset.results / "analyses" / "connection_walk_runs.json",
        experiment="Connection walk",
        name="connection walk of trained runs",
        code_digest=code_digest,
        params={
            "runs": [row.run_id for row in runs],
            **{key: getattr(settings, key) for key in ("images", "null_draws", "edges", "inits")},
        },
        metrics={
            f"isometry_excess_{kind}": float(group["value"].mean()) for kind, group in excess.groupby("attention")
        },
        started=started,
    )


def _untrained(preset: Preset, row: RunRow, num_classes: int, index: int) -> Pyramid:
    """The run's model, newly drawn, a function of the run's seed and the index."""
    with seeded_globals(derive_seed(row.seed, "untrained model", index)):
        return build_model(preset, row, num_classes).eval().requires_grad_(False)
