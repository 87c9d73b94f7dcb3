"""Job: the checks of the calculus of variations on the sphere."""

import time

from attngeo.config import Preset
from attngeo.jobs.analysis import keep
from attngeo.variational import analyze_sphere


def variational(preset: Preset, code_digest: str) -> None:
    """Write analyses/variational.json."""
    started = time.monotonic()
    settings = preset.variational
    frame = analyze_sphere(seeds=settings.seeds, tokens=settings.tokens, dimension=settings.dimension)
    slopes = frame[frame["quantity"] == "slope"]
    keep(
        preset,
        frame,
        preset.results / "analyses" / "variational.json",
        experiment="Variational",
        name="variational checks on the sphere",
        code_digest=code_digest,
        params=settings.model_dump(mode="json"),
        metrics={f"slope {r['check']} {r['method']} {r['control']}": r["value"] for r in slopes.to_dict("records")},
        started=started,
    )
