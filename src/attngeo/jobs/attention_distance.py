"""Job: where Laplacian and Gaussian attention lie by distance, on features of pretrained and of trained models."""

import time

from attngeo.config import Preset
from attngeo.evaluation import attention_distance as measurement
from attngeo.evaluation.token_features import TokenLayer, pretrained_layers, trained_layers
from attngeo.jobs import sources
from attngeo.jobs.analysis import keep
from attngeo.jobs.trained import evenly_spread, load_trained
from attngeo.language_models.loading import load


def attention_distance(preset: Preset, code_digest: str) -> None:
    """Write analyses/attention_distance.json."""
    started = time.monotonic()
    settings = preset.attention_distance
    loaded = load(sources.model_folder(preset, preset.analysed_models[settings.model]))
    attended, states = pretrained_layers(loaded, sources.photographs(settings.images), settings.layers)
    features: dict[str, list[TokenLayer]] = {
        f"{settings.model} queries and keys": attended,
        f"{settings.model} hidden states": states,
    }
    runs = preset.runs_that_feed("fig1")
    for row in runs:
        model, batches = load_trained(preset, row)
        images, _ = evenly_spread(batches, settings.images)
        features[row.run_id] = trained_layers(model, images)
    frame = measurement.analyze(features, seed=0, queries=settings.queries)
    rule = frame[frame["metric"] == measurement.RULE_METRIC]
    keep(
        preset,
        frame,
        preset.results / "analyses" / "attention_distance.json",
        experiment="LaplacianFormer",
        name="attention by distance",
        code_digest=code_digest,
        params=settings.model_dump(mode="json") | {"runs": [row.run_id for row in runs]},
        metrics={f"middle mass excess {row['features']}": row["value"] for row in rule.to_dict("records")},
        started=started,
    )
