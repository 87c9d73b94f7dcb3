"""Job: rank of the attention matrix of each kernel on features of a pretrained vision transformer."""

import time

import torch

from attngeo.config import Preset
from attngeo.evaluation import injectivity as measurement
from attngeo.jobs import sources
from attngeo.jobs.analysis import keep
from attngeo.language_models.loading import load


def injectivity(preset: Preset, code_digest: str) -> None:
    """Write analyses/injectivity.json."""
    started = time.monotonic()
    settings = preset.injectivity
    model = load(sources.model_folder(preset, preset.analysed_models[settings.model])).model
    with torch.inference_mode():
        hidden = model(sources.photographs(settings.images), output_hidden_states=True).hidden_states
    middle = hidden[len(hidden) // 2][:, 1:]  # without the class token: the patches form a grid
    frame = measurement.analyze(
        {f"{settings.model} middle layer": middle, f"{settings.model} last layer": hidden[-1][:, 1:]},
        landmark_grids=settings.landmark_grids,
        seed=0,
    )
    keep(
        preset,
        frame,
        preset.results / "analyses" / "injectivity.json",
        experiment="LaplacianFormer",
        name="rank of attention matrices",
        code_digest=code_digest,
        params=settings.model_dump(mode="json"),
        metrics={},
        started=started,
    )
