"""A trained model as two files, weights (safetensors) and what builds it again (JSON), checked by reading them back."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from safetensors import SafetensorError
from torch import Tensor

from attngeo.errors import UserError
from attngeo.files import explain_os_errors, read_json, sha256_file, write_json
from attngeo.models import registry  # noqa: F401  names the models to timm
from attngeo.models.pyramid import Pyramid
from attngeo.training.seeding import generator

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
FORMAT = 1


def export(
    model: Pyramid,
    folder: Path,
    *,
    classes: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Path:
    """Write `model` to a new folder, read it back and compare the logits of drawn images bit by bit; the folder.

    `classes` are the names of the outputs, `mean` and `std` (a number a channel) what images are normalised with; both
    are only kept with the model. An attention kind of the user's own stays where it is and is named by its place.
    UserError if the folder exists, if the weights are not finite or if the logits differ: nothing is left then.
    """
    folder = Path(folder).absolute()
    if folder.exists():
        raise UserError(f"{folder} exists already", "name a folder that does not exist yet")
    if classes is not None and len(classes) != model.num_classes:
        raise UserError(
            f"{len(classes)} names for a model of {model.num_classes} classes", "give a name for each class, in order"
        )
    config = {
        "format": FORMAT,
        "model": model.pretrained_cfg["architecture"],
        "options": model.options | {"num_classes": model.num_classes, "global_pool": model.global_pool},
        "classes": None if classes is None else list(classes),
        "normalisation": None if mean is None or std is None else {"mean": list(mean), "std": list(std)},
    }
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    broken = [name for name, tensor in weights.items() if not tensor.isfinite().all()]
    if broken:
        raise UserError(f"weights are not finite: {', '.join(broken[:3])}", "export an earlier state of the model")
    with explain_os_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            safetensors.torch.save_file(weights, aside / WEIGHTS)
            write_json(aside / CONFIG, config | {"weights_sha256": sha256_file(aside / WEIGHTS)})
            _compare(model, load_exported(aside))
            aside.chmod(0o755)  # mkdtemp's folders are for their owner alone
            aside.rename(folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return folder


def load_exported(folder: Path) -> Pyramid:
    """The model that `export` wrote, in evaluation mode and in the type of its weights; UserError if it is damaged."""
    folder = Path(folder)
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder} holds no exported model", f"name a folder with {CONFIG} and {WEIGHTS}")
    config: dict[str, Any] = read_json(folder / CONFIG)
    if config.get("format") != FORMAT:
        raise UserError(
            f"{folder / CONFIG} is of format {config.get('format')}, not {FORMAT}",
            "read it with the version that wrote it",
        )
    if sha256_file(folder / WEIGHTS) != config["weights_sha256"]:
        raise UserError(f"{folder / WEIGHTS} is not the file that was exported", "export or copy it again")
    try:
        weights = safetensors.torch.load_file(folder / WEIGHTS)
        model: Pyramid = timm.create_model(config["model"], **config["options"])
        model.to(next(iter(weights.values())).dtype).load_state_dict(weights)
    except (RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{folder} does not hold the weights of its model: {reason}", "export it again") from error
    return model.eval()


def _compare(model: Pyramid, reloaded: Pyramid) -> None:
    """UserError unless both give the same bits for the same images."""
    weight = next(model.parameters())
    shape = (2, model.options["in_chans"], *model.img_size)
    images = torch.randn(shape, generator=generator(0, "images that an exported model is compared on")).to(weight)
    training = model.training
    try:
        expected, found = (_logits(each, images) for each in (model.eval(), reloaded.to(weight.device)))
    finally:
        model.train(training)
    if not torch.equal(expected, found):
        worst = (expected - found).abs().max() if expected.shape == found.shape else "shape"
        raise UserError(
            f"the model that was read back answers differently (by {worst})",
            "change a model's options when it is made, not afterwards: what is exported is how it was made",
        )


def _logits(model: Pyramid, images: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(images)
    return logits
