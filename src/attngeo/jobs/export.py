"""Job: write a finished run's model as files of its own."""

from pathlib import Path

from attngeo.config import Preset
from attngeo.errors import UserError
from attngeo.jobs.evaluate import finished_run
from attngeo.models.export import export
from attngeo.models.pyramid import Pyramid


def export_run(preset: Preset, target: str, folder: Path) -> Path:
    """Export a run, given by id or folder, with its classes and normalisation; the folder written."""
    run = finished_run(preset, target)
    model = run.build(run.image_size)
    if not isinstance(model, Pyramid):
        raise UserError(f"{run.model} is no model of this project", "only those are exported")
    return export(model, folder, classes=run.classes, mean=run.mean, std=run.std)
