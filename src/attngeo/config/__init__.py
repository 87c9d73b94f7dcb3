"""Presets, run sheets and recipes: read, checked against their models, and explained when something is wrong."""

from attngeo.config.loading import load_current, load_preset, preset_names, write_schemas
from attngeo.config.preset import Preset, RunRow
from attngeo.config.settings import (
    PHOTOGRAPHS,
    ConnectionWalkConfig,
    DecoderCheckpoint,
    LanguageModelConfig,
    TrajectoriesConfig,
)

__all__ = [
    "PHOTOGRAPHS",
    "ConnectionWalkConfig",
    "DecoderCheckpoint",
    "LanguageModelConfig",
    "Preset",
    "RunRow",
    "TrajectoriesConfig",
    "load_current",
    "load_preset",
    "preset_names",
    "write_schemas",
]
