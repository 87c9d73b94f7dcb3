"""What jobs that look into finished runs have in common: the trained model again, and validation images for it."""

import safetensors.torch
import torch
from torch import Tensor

from attngeo.config import Preset, RunRow
from attngeo.data.batches import Batches, open_batches
from attngeo.errors import UserError
from attngeo.jobs.run_model import build_model
from attngeo.models.pyramid import Pyramid

_BATCH = 64


def load_trained(preset: Preset, row: RunRow, *, batch_size: int = _BATCH) -> tuple[Pyramid, Batches]:
    """The model of a finished run with its weights, in evaluation mode, and the validation images of its data set.

    UserError if the weights do not fit the model.
    """
    recipe = preset.recipe_of(row)
    batches = open_batches(
        preset.results / "data" / row.dataset / "manifest.json",
        "val",
        batch_size=batch_size,
        seed=row.seed,
        image_size=recipe.image_size,
        augment=False,
        interpolation=recipe.interpolation,
        loader=preset.datasets[row.dataset].loader,
    )
    model = build_model(preset, row, batches.num_classes)
    weights = preset.results / "runs" / row.run_id / "weights.safetensors"
    try:
        model.load_state_dict(safetensors.torch.load_file(weights))
    except RuntimeError as error:
        what = f"{weights} is not of the model that the run sheet names now: {error}"
        raise UserError(what, f"train it again: attngeo train {row.run_id} --preset {preset.name}") from None
    return model.eval().requires_grad_(False), batches


def evenly_spread(batches: Batches, count: int) -> tuple[Tensor, Tensor]:
    """`count` images [count, 3, S, S] and their labels, spread evenly over a validation set, which may be sorted."""
    number = min(count, batches.num_images)
    places = set(torch.linspace(0, batches.num_images - 1, number, dtype=torch.float64).round().long().tolist())
    images, labels, start = [], [], 0
    for batch, classes in batches:
        inside = [place - start for place in sorted(places) if start <= place < start + len(batch)]
        images.append(batch[inside])
        labels.append(classes[inside])
        start += len(batch)
    return torch.cat(images), torch.cat(labels)
