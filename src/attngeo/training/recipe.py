"""What a training run does, apart from its model, its data and its seed."""

import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Literal, get_args

import yaml

from attngeo.errors import UserError


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of one training run; a field without a default must be written in the recipe file."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    epochs: int  # evaluations; with images_per_epoch, an epoch need not be a pass over the data
    images_per_epoch: int | None  # training images; None: the whole set
    batch_size: int  # images a step, of all processes and parts together
    eval_batch_size: int  # images, in each process
    lr: float  # peak learning rate of AdamW, for this batch_size (never rescaled behind the user's back)
    min_lr: float  # learning rate at the start of the warm-up and at the end of the cosine
    warmup_epochs: float  # epochs of linear warm-up; counted in steps, so fractions are meaningful
    weight_decay: float  # decoupled; none on biases, norms and other vectors
    clip_grad: float  # largest Euclidean norm of the whole gradient; 0: no clipping
    ema_decay: float  # per step, reached after a warm-up; 0: the average is the model itself
    label_smoothing: float  # probability mass spread over all classes
    drop_path: float  # probability of dropping a residual branch in the last block
    image_size: int  # pixels a side
    augment: bool = True  # random crops or shifts, and flips; harmful where no image is seen twice
    interpolation: Literal["auto", "bilinear", "bicubic"] = (
        "auto"  # of crops; auto: the loader's own (area or bilinear)
    )
    rand_augment: str = ""  # timm's words, such as rand-m9-mstd0.5-inc1; "": off
    color_jitter: float = 0.0  # brightness, contrast and saturation change by up to this share; 0: off
    random_erasing: float = 0.0  # probability that a rectangle of a training image becomes noise; 0: off
    autocast: Literal["none", "bfloat16", "float16"] = "none"  # float16 scales the loss, and needs a GPU
    channels_last: bool = False  # images and convolutions with the channel as the innermost axis
    accumulation: int = 1  # parts that a process cuts its share of a batch into, to hold fewer activations at a time
    activation_checkpointing: bool = False  # blocks run again in the backward pass instead of keeping activations
    max_eval_images: int | None = None  # evenly spaced over the validation set; None: all
    mixup: float = 0.0  # alpha of the Beta distribution of mixing weights; 0: off
    cutmix: float = 0.0  # alpha of the Beta distribution of kept areas; 0: off
    # A NaN or infinite loss or gradient: stop, or leave that step out; "record" also outlives an epoch of such steps.
    non_finite: Literal["stop", "skip", "record"] = "stop"

    def __post_init__(self) -> None:
        """Refuse values without meaning; UserError names the key."""
        counts = ("epochs", "images_per_epoch", "batch_size", "eval_batch_size", "max_eval_images")
        for key in (*counts, "image_size", "accumulation"):
            _require(key, getattr(self, key), lambda value: value is None or value >= 1, "at least 1")
        for key in ("min_lr", "warmup_epochs", "weight_decay", "clip_grad", "mixup", "cutmix"):
            _require(key, getattr(self, key), lambda value: value >= 0, "0 or more")
        _require("random_erasing", self.random_erasing, lambda value: 0 <= value <= 1, "in [0, 1]")
        for key in ("ema_decay", "label_smoothing", "drop_path", "color_jitter"):
            _require(key, getattr(self, key), lambda value: 0 <= value < 1, "in [0, 1)")
        _require("lr", self.lr, lambda value: value > 0 and value >= self.min_lr, "above 0 and not below min_lr")
        _require("warmup_epochs", self.warmup_epochs, lambda value: value < self.epochs, "smaller than epochs")
        _require("accumulation", self.accumulation, lambda value: value <= self.batch_size, "at most batch_size")
        precisions = ("none", "bfloat16", "float16")
        _require("autocast", self.autocast, lambda value: value in precisions, f"one of {', '.join(precisions)}")
        kinds = ("auto", "bilinear", "bicubic")
        _require("interpolation", self.interpolation, lambda value: value in kinds, f"one of {', '.join(kinds)}")
        _require("rand_augment", self.rand_augment, _is_rand_augment, "like rand-m9-mstd0.5-inc1, or empty")
        for key in ("rand_augment", "color_jitter", "random_erasing"):
            law = "off where augment is false"
            _require(key, getattr(self, key), lambda value: self.augment or not value, law)
        policies = ("stop", "skip", "record")
        _require("non_finite", self.non_finite, lambda value: value in policies, f"one of {', '.join(policies)}")


def read_recipe(path: str | Path) -> Recipe:
    """Read a recipe file (YAML); UserError names an unknown, missing or ill-typed key."""
    path = Path(path)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"recipe {path} does not exist", "name one of the files in config/recipes") from error
    except yaml.YAMLError as error:
        raise UserError(f"recipe {path} is not valid YAML: {error}", "correct that line") from error
    if not isinstance(values, dict):
        raise UserError(f"recipe {path} is not a list of `key: value` lines", "start from config/recipes/smoke.yaml")
    known = {field.name: field for field in fields(Recipe)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise UserError(f"recipe {path}: unknown key {', '.join(map(str, unknown))}", f"use only {', '.join(known)}")
    missing = [name for name, field in known.items() if field.default is MISSING and name not in values]
    if missing:
        raise UserError(f"recipe {path}: missing {', '.join(missing)}", "copy its line from config/recipes/micro.yaml")
    try:
        return Recipe(**{key: _convert(key, value, known[key].type) for key, value in values.items()})
    except UserError as error:
        raise UserError(f"recipe {path}: {error.what}", error.remedy) from error


def _convert(key: str, value: Any, annotation: Any) -> Any:
    """The number a field wants (YAML reads `1e-3` as text); words and None pass and are judged by their value."""
    kinds = get_args(annotation) or (annotation,)
    try:
        if value is None and NoneType in kinds:
            return None
        if float in kinds and not isinstance(value, bool):
            return float(value)
        if int in kinds and not isinstance(value, bool) and float(value).is_integer():
            return int(value)
    except (TypeError, ValueError):
        pass
    if value in kinds or (str in kinds and isinstance(value, str)) or (bool in kinds and isinstance(value, bool)):
        return value
    raise UserError(f"{key} is {value!r}", f"give {key} a value of type {annotation}")


def _is_rand_augment(value: Any) -> bool:
    sections = r"m\d+|n\d+|p(0?\.\d+|1)|mstd(\d+(\.\d+)?|inf)|mmax\d+|inc[01]|t\w+"
    return isinstance(value, str) and (not value or re.fullmatch(rf"rand(-({sections}))*", value) is not None)


def _require(key: str, value: Any, law: Callable[[Any], bool], words: str) -> None:
    if not law(value):
        raise UserError(f"{key} is {value!r}", f"make {key} {words}")
