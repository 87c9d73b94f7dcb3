"""What the model of a training run is: the one place that says so, for every job that makes it."""

from typing import Any

import timm

from attngeo.config import Preset, RunRow
from attngeo.models import registry  # noqa: F401  names the models to timm, and puts their code into a job's digest
from attngeo.models.pyramid import Pyramid


def model_options(preset: Preset, row: RunRow, num_classes: int) -> dict[str, Any]:
    """What `timm.create_model(row.model, ...)` makes a run's model from: its row, its options, its recipe."""
    recipe = preset.recipe_of(row)
    return {
        "num_classes": num_classes,
        "img_size": recipe.image_size,
        "attention": row.attention or None,
        "attention_options": row.attention_options,
        **row.pyramid_options,
        "drop_path_rate": recipe.drop_path,
    }


def build_model(preset: Preset, row: RunRow, num_classes: int) -> Pyramid:
    """A run's model, newly drawn; UserError for options that its layers do not have, or that exclude each other."""
    model: Pyramid = timm.create_model(row.model, **model_options(preset, row, num_classes))
    return model
