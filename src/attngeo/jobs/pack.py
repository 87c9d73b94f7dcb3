"""Job: pack one dataset of a preset into results/<preset>/data/<dataset>/."""

from pathlib import Path

from attngeo.config import Preset
from attngeo.data import packing


def pack(preset: Preset, dataset: str, *, workers: int = 1) -> Path:
    """Store the images of a dataset as its config says and return the manifest's path."""
    config = preset.datasets[dataset]
    source = dataset if config.source == "embedded" else preset.root / Path(config.source).expanduser()
    out = preset.results / "data" / dataset
    packing.pack(
        source,
        out,
        storage=config.storage,
        max_resolution=config.max_resolution,
        write_mode=config.write_mode,
        workers=workers,
        val_labels=preset.root / Path(config.val_labels).expanduser() if config.val_labels else None,
        hold_out=config.hold_out,
    )
    return out / "manifest.json"
