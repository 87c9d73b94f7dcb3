"""Job: what the trainings of the Fiber Bundle Transformer say together: differences, gradients, predictions."""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from attngeo.config import Preset
from attngeo.fiber_bundle import predictions
from attngeo.fiber_bundle.gradients import gradient_errors
from attngeo.fiber_bundle.significance import paired_differences
from attngeo.jobs.analysis import keep
from attngeo.paper import records

if TYPE_CHECKING:
    import pandas as pd


def summary(preset: Preset, code_digest: str) -> list[str]:
    """Write analyses/fiber_bundle.json and predictions.json: differences, gradient errors, every prediction judged."""
    import pandas as pd

    started = time.monotonic()
    settings = preset.fiber_bundle_settings
    trained = _read(preset, "fiber_tasks", preset.fiber_task_runs)
    differences = paired_differences(trained[trained["metric"] == "task_loss"])
    evidence = predictions.Evidence(
        trained, differences, _read(preset, "rank_collapse", [f"s{seed}" for seed in preset.rank_collapse_seeds])
    )
    judged = predictions.judge(evidence)
    checked = pd.concat([differences, pd.DataFrame(gradient_errors())], ignore_index=True)
    for frame, place, name in (
        (checked, "fiber_bundle", "fiber bundle: differences and gradients"),
        (pd.DataFrame(judged), "predictions", "fiber bundle: predictions"),
    ):
        keep(
            preset,
            frame,
            preset.results / "analyses" / f"{place}.json",
            experiment="Fiber bundle",
            name=name,
            code_digest=code_digest,
            params=settings.model_dump(mode="json"),
            metrics={row["prediction"]: row["value"] for row in judged} if place == "predictions" else {},
            started=started,
        )
    words = {predictions.MET: "met", predictions.OPEN: "open", predictions.CONTRADICTED: "contradicted"}
    return [f"{row['prediction']}: {words[row['value']]}; {row['finding']}" for row in judged]


def _read(preset: Preset, folder: str, names: Iterable[str]) -> "pd.DataFrame":
    """The records of some files of a folder below analyses/ as one frame."""
    import pandas as pd

    frames = [records.read(preset.results / "analyses" / folder / f"{name}.json") for name in names]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame({"metric": [], "value": []})
