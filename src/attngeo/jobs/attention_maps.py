"""Job: attention maps of the trained models on validation images, as arrays to draw and as numbers."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from attngeo.config import Preset
from attngeo.data.batches import Batches
from attngeo.evaluation.attention_maps import StageMap, stage_maps, statistics, uniform_map
from attngeo.files import read_json, write_aside
from attngeo.jobs.analysis import keep
from attngeo.jobs.run_model import build_model
from attngeo.jobs.trained import evenly_spread, load_trained
from attngeo.training.seeding import derive_seed, seeded_globals

STAGES = (1, -1)


def attention_maps(preset: Preset, code_digest: str) -> None:
    """Write analyses/attention_maps.json, and .npz with the maps and the images of those that are shown.

    Arrays: "DATASET/images" uint8 [shown, H, W, 3]; "RUN/stage S" float32 [shown, rows, columns], 1/N on average.
    Numbers of every image shown (label image, from 0) and, label image "all", means over all images.
    """
    import pandas as pd

    started = time.monotonic()
    settings = preset.attention_maps
    arrays: dict[str, np.ndarray] = {}
    rows: list[dict[str, Any]] = []
    runs = preset.runs_to_look_into("fig8")
    for row in runs:
        model, batches = load_trained(preset, row)
        images, labels = evenly_spread(batches, settings.images)
        shown = np.unique(np.linspace(0, len(images) - 1, min(settings.shown, len(images))).round().astype(int))
        names = {int(place): str(batches.manifest.raw["classes"][int(labels[place])]) for place in shown}
        arrays[f"{row.dataset}/images"] = _pixels(batches, images[shown])
        described = {"dataset": row.dataset, "run": row.run_id, "attention": row.attention_kind}
        final = read_json(preset.results / "runs" / row.run_id / "final.json")
        top1 = {"metric": "top1", "unit": "%", "value": final["accuracy"], "n": final["n_eval"]}
        rows.append(described | {"control": "trained", "image": "all"} | top1)
        with seeded_globals(derive_seed(row.seed, "untrained model")):
            drawn = build_model(preset, row, batches.num_classes).eval().requires_grad_(False)
        for control, subject in (("trained", model), ("random_init", drawn)):
            for of in stage_maps(subject, images, STAGES):
                rows += _rows(described | {"control": control}, of, names if control == "trained" else {})
                if control == "trained":
                    arrays[f"{row.run_id}/stage {of.stage}"] = of.images()[shown].float().numpy()
                    uniform = described | {"run": "", "attention": "uniform", "control": "uniform"}
                    rows += _rows(uniform, uniform_map(of), {})
    out = preset.results / "analyses" / "attention_maps.json"
    with write_aside(out.with_suffix(".npz"), "wb") as stream:
        np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]
    keep(
        preset,
        pd.DataFrame(rows).drop_duplicates(ignore_index=True),  # uniform attention is the same for every run of a set
        out,
        experiment="LaplacianFormer",
        name="attention maps",
        code_digest=code_digest,
        params=settings.model_dump(mode="json") | {"runs": [row.run_id for row in runs]},
        metrics={},
        started=started,
    )


def _rows(described: dict[str, Any], of: StageMap, shown: Mapping[int, str]) -> list[dict[str, Any]]:
    """Means over all images, and the numbers of those shown: place among the images -> class."""
    labels = described | {"stage": of.stage, "rows": of.grid[0], "columns": of.grid[1], "heads": of.heads}
    labels |= {"token_row": of.token[0], "token_column": of.token[1]}
    rows = []
    for metric, values in statistics(of):
        several = len(values) > 1
        spread = {"spread": float(values.std()), "spread_kind": "std over images"} if several else {"spread": None}
        rows.append(labels | metric | {"image": "all", "value": float(values.mean()), "n": len(values)} | spread)
        rows += [
            labels | metric | {"image": str(index), "class": name, "value": float(values[place]), "n": 1}
            for index, (place, name) in enumerate(shown.items())
        ]
    return rows


def _pixels(batches: Batches, images: Tensor) -> np.ndarray:
    """Normalised images [B, 3, H, W] as they were, uint8 [B, H, W, 3]."""
    pixels = images * batches.std.view(1, -1, 1, 1) + batches.mean.view(1, -1, 1, 1)
    return (pixels.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).contiguous().numpy()
