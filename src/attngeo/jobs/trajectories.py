"""Job: hidden states by depth as paths on the sphere, of a pretrained model or of the runs that feed fig17."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from attngeo.config import Preset, RunRow, TrajectoriesConfig
from attngeo.errors import UserError
from attngeo.jobs import sources
from attngeo.jobs.analysis import keep, keys_of
from attngeo.jobs.run_model import build_model
from attngeo.jobs.stamps import digest_outside_presets
from attngeo.jobs.trained import evenly_spread, load_trained
from attngeo.language_models.loading import LoadedModel, load
from attngeo.paper import records
from attngeo.training.seeding import derive_seed, seeded_globals
from attngeo.variational.trajectories import analyze_pyramid, analyze_trajectories

if TYPE_CHECKING:
    import pandas as pd


def trajectories(preset: Preset, model_id: str, code_digest: str) -> list[str]:
    """Write analyses/trajectories/<model_id>.json; the answers in words."""
    started = time.monotonic()
    model = preset.analysed_models[model_id]
    texts = None if model in preset.vision_models else sources.texts(preset, model)
    settings = preset.trajectory_settings(model)
    with keys_of(preset, "trajectories"):
        frame = _measured(settings, sources.model_folder(preset, model), model_id, texts)
    params = {"model": model_id, **settings.model_dump(mode="json")}
    out = preset.results / "analyses" / "trajectories" / f"{model_id}.json"
    return _keep(preset, frame, out, f"trajectories of {model_id}", code_digest, params, started)


def single_trajectories(preset: Preset, model: str) -> list[str]:
    """The same of a folder or a hub name that the preset does not list, into results/trajectories/<id>.json and .csv.

    UserError where there are numbers of another model of that name.
    """
    started = time.monotonic()
    loaded = load(model, None)
    out = preset.root / "results" / "trajectories" / f"{loaded.id}.json"
    origin = str(Path(model).resolve()) if Path(model).exists() else model
    if out.exists() and (other := records.read_file(out).provenance.get("settings", {}).get("model")) != origin:
        raise UserError(f"{out} holds the numbers of {other}", "move them away, or rename the folder of the model")
    texts = None if loaded.adapter.reads == "images" else sources.texts(preset)
    with keys_of(preset, "trajectories"):
        frame = _measured(preset.trajectories, loaded, loaded.id, texts)
    settings = preset.trajectories.model_dump(mode="json")
    digest = digest_outside_presets(preset.root, __name__, settings)
    name, params = f"trajectories of {loaded.id}", {"model": origin, **settings}
    return [*_keep(preset, frame, out, name, digest, params, started, table=True), str(out)]


def trajectories_runs(preset: Preset, code_digest: str) -> list[str]:
    """Write analyses/trajectories_runs.json: the trained models of the runs that feed fig17, on validation images."""
    import pandas as pd

    started = time.monotonic()
    settings = preset.trajectories
    runs = preset.runs_to_look_into("fig17")
    frame = pd.concat([_of_run(preset, row) for row in runs], ignore_index=True)
    params = settings.model_dump(mode="json") | {"runs": [row.run_id for row in runs]}
    out = preset.results / "analyses" / "trajectories_runs.json"
    return _keep(preset, frame, out, "trajectories of trained runs", code_digest, params, started)


def _measured(
    settings: TrajectoriesConfig, model: str | LoadedModel, model_id: str, texts: list[str] | None
) -> "pd.DataFrame":
    """A model on texts, or without any on photographs."""
    reads_images = texts is None
    return analyze_trajectories(
        model,
        texts,
        model_id=model_id,
        images=sources.photographs(settings.images) if reads_images else None,
        windows=settings.images if reads_images else settings.windows,
        window_tokens=settings.window_tokens,
        tokens=settings.tokens,
        inits=settings.inits,
        seed=0,
    )


def _of_run(preset: Preset, row: RunRow) -> "pd.DataFrame":
    settings = preset.trajectories
    model, batches = load_trained(preset, row)
    images, _ = evenly_spread(batches, settings.images)

    def untrained(index: int) -> nn.Module:
        with seeded_globals(derive_seed(row.seed, "untrained model", index)):
            return build_model(preset, row, batches.num_classes).eval().requires_grad_(False)

    labels = {"model": row.run_id, "family": row.model, "dataset": row.dataset, "attention": row.attention_kind}
    return analyze_pyramid(
        model, untrained, images, labels=labels, tokens=settings.tokens, inits=settings.inits, seed=row.seed
    )


def _keep(
    preset: Preset,
    frame: "pd.DataFrame",
    out: Path,
    name: str,
    code_digest: str,
    params: dict[str, Any],
    started: float,
    *,
    table: bool = False,
) -> list[str]:
    """Write the records; a line a model and Lagrangian: is it closer to stationary than its controls?"""
    differences = frame[frame["metric"].str.endswith("_difference")].to_dict("records")
    keep(
        preset,
        frame,
        out,
        experiment="Variational",
        name=name,
        code_digest=code_digest,
        params=params,
        metrics={f"{row['model']} {row['metric']} {row['control']}": row["value"] for row in differences},
        started=started,
        table=table,
    )
    answers = frame[frame["metric"] == "closer_to_stationary"].to_dict("records")
    return [f"{row['model']}, {row['lagrangian']} Lagrangian: {row['answer']}" for row in answers]
