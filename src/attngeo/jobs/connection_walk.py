"""Job: measure the connection walk of one pretrained model."""

import time

from attngeo.config import Preset
from attngeo.connection_walk import analyze
from attngeo.jobs import sources
from attngeo.jobs.analysis import keep


def connection_walk(preset: Preset, model_id: str, code_digest: str) -> None:
    """Write analyses/connection_walk/<model_id>.json."""
    started = time.monotonic()
    model = preset.analysed_models[model_id]
    settings = preset.walk_settings(model)
    is_vision = model in preset.vision_models
    frame = analyze(
        sources.model_folder(preset, model),
        None if is_vision else sources.texts(preset, model),
        model_id=model_id,
        images=sources.photographs(settings.images) if is_vision else None,
        windows=settings.windows,
        window_tokens=settings.window_tokens,
        null_draws=settings.null_draws,
        edges=settings.edges,
        inits=settings.inits,
        seed=0,
    )
    heads = frame[(frame["metric"] == "isometry_score") & (frame["head"] >= 0)]
    keep(
        preset,
        frame,
        preset.results / "analyses" / "connection_walk" / f"{model_id}.json",
        experiment="Connection walk",
        name=f"connection walk of {model_id}",
        code_digest=code_digest,
        params={"model": model_id, **settings.model_dump()},
        metrics={f"isometry_score_{c}": float(g["value"].mean()) for c, g in heads.groupby("control")},
        started=started,
    )
