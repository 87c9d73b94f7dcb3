"""Sections of config/<preset>/config.yaml: data, models, resources, and how much is measured and trained."""

import re
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from attngeo.fiber_bundle.recipe import TaskRecipe
from attngeo.training.language_recipe import LanguageRecipe

PHOTOGRAPHS = 300  # embedded ones that pretrained vision models are shown, class by class
IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9@._-]*")


def _identifier(value: str) -> str:
    if not IDENTIFIER.fullmatch(value):
        raise ValueError("use letters, digits, '.', '_', '-' and '@' only: the name becomes a file name")
    return value


Identifier = Annotated[str, AfterValidator(_identifier)]


class Strict(BaseModel):
    """A section that refuses unknown keys and stays as it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DatasetConfig(Strict):
    """Where the images of a dataset come from and how they are stored and read."""

    source: str = Field(description="'embedded', or a folder with train/CLASS/*.jpg and val/CLASS/*.jpg (or CLASS/*)")
    storage: Literal["auto", "beton", "arrays", "folder"] = "auto"
    loader: Literal["auto", "ffcv", "torch", "arrays"] = "auto"
    write_mode: Literal["jpg", "raw"] = "jpg"
    max_resolution: int = Field(500, ge=1, le=8192, description="longest stored side in pixels")
    val_labels: str = Field("", description="label file of validation images that lie flat in val/; without it, none")
    workers: int = Field(0, ge=0, description="processes (torch) or threads (FFCV) that read images; changes no pixel")
    hold_out: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="share of the training images that stands in for the validation images, which stay unread; to "
        "choose settings on",
    )


class LanguageModelConfig(Strict):
    """A pretrained model to analyse."""

    id: Identifier
    source: str = Field(description="'embedded', 'hub:NAME' or 'hub:NAME@REVISION', or a local Hugging Face folder")
    optional: bool = Field(False, description="leave it out while its folder is not there")

    @model_validator(mode="after")
    def _a_folder_may_be_away(self) -> "LanguageModelConfig":
        if self.optional and (self.source in ("embedded", "hub") or self.source.startswith("hub:")):
            raise ValueError(f"{self.id} is optional, and {self.source!r} is no folder that may be away")
        return self

    def is_away(self, root: Path) -> bool:
        """Whether it is optional and its folder is not there."""
        return self.optional and not (root / Path(self.source).expanduser() / "config.json").is_file()


class DecoderCheckpoint(LanguageModelConfig):
    """One of our own decoders as it is after `step` steps of its training `run`; made by the preset itself."""

    run: Identifier
    step: int


class DecoderSize(Strict):
    """Shape of one size of our own decoder family."""

    layers: int = Field(ge=1)
    width: int = Field(ge=2, description="of the residual stream; heads share it evenly, each an even number")
    heads: int = Field(ge=1)

    @model_validator(mode="after")
    def _even_heads(self) -> "DecoderSize":
        if self.width % (2 * self.heads):
            raise ValueError(f"{self.heads} heads do not share a width of {self.width} in even parts")
        return self


class DecoderRun(NamedTuple):
    """One training of our own decoder family."""

    size: str
    seed: int


class DecodersConfig(Strict):
    """Our own decoder family: every size trained with every seed on the preset's texts, each kept step analysed."""

    sizes: dict[Identifier, DecoderSize] = Field(min_length=1, description="by the name that stands in the models' ids")
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field((0, 1), min_length=1)
    training: LanguageRecipe

    @field_validator("seeds")
    @classmethod
    def _different(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) < len(value):
            raise ValueError("a seed is given twice")
        return value


class Resources(Strict):
    """What one job of a stage asks of the machine or the cluster."""

    threads: int = Field(1, ge=1)
    gpu: int = Field(0, ge=0)
    mem_mb: int = Field(1500, ge=100)
    runtime: int = Field(60, ge=1, description="minutes")


class TrainResources(Resources):
    """Training also says on which device it runs, and in how many processes, of `threads` threads and a GPU each."""

    device: Literal["cpu", "cuda"] = "cpu"
    processes: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _a_gpu_for_each_process(self) -> "TrainResources":
        if self.device == "cuda" and self.gpu != self.processes:
            raise ValueError(
                f"device: cuda takes one GPU for each process, and gpu is {self.gpu} where processes is "
                f"{self.processes}: set gpu: {self.processes}" + (f", or processes: {self.gpu}" if self.gpu else "")
            )
        return self


class StageResources(Strict):
    """Resources by stage."""

    prepare: Resources = Resources(mem_mb=2000, runtime=240)
    train: TrainResources = TrainResources()
    analyze: Resources = Resources(mem_mb=2500)
    benchmark: Resources = Field(
        Resources(threads=2, mem_mb=2500), description="threads are kept free for it; it is timed with one"
    )
    draw: Resources = Resources(mem_mb=700)


class ConnectionWalkConfig(Strict):
    """How much text or how many images a pretrained model is measured on."""

    windows: int = Field(8, ge=1)
    window_tokens: int = Field(128, ge=4)
    images: int = Field(8, ge=1, le=PHOTOGRAPHS)
    null_draws: int = Field(16, ge=2)
    inits: int = Field(5, ge=1, description="untrained networks of the same shape, at most 3 of large ones")
    edges: int = Field(4, ge=0, description="edges of a window and layer whose transports are measured")


class VariationalConfig(Strict):
    """Size of the checks on the sphere."""

    seeds: tuple[int, ...] = (0, 1, 2)
    tokens: int = Field(8, ge=2)
    dimension: int = Field(4, ge=2)


class TrajectoriesConfig(Strict):
    """How many hidden states are measured as paths on the sphere; the runs that feed fig17 are measured too."""

    windows: int = Field(8, ge=1, description="without 6 or more there are no intervals")
    window_tokens: int = Field(64, ge=4)
    tokens: int = Field(32, ge=2, description="tokens of a window or an image that are measured, evenly spread")
    images: int = Field(8, ge=1, le=PHOTOGRAPHS)
    inits: int = Field(3, ge=1, description="untrained networks of the same shape, each on every window")


class InjectivityConfig(Strict):
    """Size of the rank measurement on real features."""

    images: int = Field(8, ge=2, le=PHOTOGRAPHS)
    model: Identifier = "dinov2-s"
    landmark_grids: tuple[int, ...] = (2, 3, 4, 5, 7)


class ScoreRankConfig(Strict):
    """Size of the measurement of the rank of scores."""

    dimensions: tuple[Annotated[int, Field(ge=1)], ...] = Field((2, 3, 4, 5, 8, 12, 16, 24, 32), min_length=1)
    tokens: tuple[Annotated[int, Field(ge=1)], ...] = Field((64, 256, 1024, 2048), min_length=1)
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field((0,), min_length=1)


class AttentionDistanceConfig(Strict):
    """Size of the measurement of attention by distance; the runs that feed fig1 are measured too."""

    images: int = Field(16, ge=1, le=PHOTOGRAPHS)
    model: Identifier = "dinov2-s"
    layers: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (3, 7, 11), min_length=1, description="layers of the pretrained model, from 0"
    )
    queries: int = Field(64, ge=1, description="tokens of an image whose distances to all others are taken")


class AttentionMapsConfig(Strict):
    """Validation images of the attention maps; the runs that feed fig8 are looked at."""

    images: int = Field(16, ge=1, description="images that the numbers are means over")
    shown: int = Field(2, ge=1, description="images of each data set that are drawn")


FiberModel = Literal["dot", "more_heads", "gated", "euclidean", "constant", "heterogeneous", "fiber"]
FiberTaskName = Literal["copy", "sort", "recall", "characters", "fashion-mnist"]


class FiberTaskConfig(Strict):
    """Size of one task, and how many steps the models take on it."""

    steps: int = Field(ge=1, description="of every model; the full one also takes as many as fit into the time of dot")
    batch: int = Field(16, ge=1, description="sequences or images a step")
    length: int = Field(16, ge=2, description="symbols (copy, sort), pairs (recall) or bytes (characters)")
    symbols: int = Field(16, ge=2, description="different symbols; half of them are the keys of recall")


class RankCollapseConfig(Strict):
    """Size of the study of rank collapse: every form of attention alone, with skips, and with feed-forward."""

    forms: tuple[FiberModel, ...] = Field(("dot", "euclidean", "constant", "heterogeneous"), min_length=1)
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field((0,), min_length=1)
    steps: int = Field(150, ge=1)
    batch: int = Field(16, ge=1)
    length: int = Field(16, ge=2, description="symbols that are put into order, each where it belongs")
    symbols: int = Field(16, ge=2)
    depth: int = Field(12, ge=1)
    dim: int = Field(32, ge=4)
    heads: int = Field(2, ge=1)
    rank: int = Field(2, ge=1)

    @property
    def recipe(self) -> TaskRecipe:
        """How these models are trained."""
        return TaskRecipe(steps=self.steps, batch=self.batch)


class FiberTaskRun(NamedTuple):
    """One task with one seed."""

    task: str
    seed: int


class FiberBundleConfig(Strict):
    """The Fiber Bundle Transformer against others on tasks, matched in parameters and in time, and rank collapse."""

    tasks: dict[FiberTaskName, FiberTaskConfig] = Field(min_length=1)
    models: tuple[FiberModel, ...] = Field(("dot", "constant", "fiber"), min_length=1)
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field((0,), min_length=1)
    dim: int = Field(64, ge=4, description="width; four divides that of a head, and half of it with more_heads")
    depth: int = Field(3, ge=1)
    heads: int = Field(4, ge=1)
    rank: int = Field(2, ge=1, description="of the metrics")
    watches: int = Field(4, ge=1, description="parts of a training after which losses and geometry are measured")
    rates: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (2e-3,),
        min_length=1,
        description="peak learning rates; of several each model has that at which the worse of two other seeds has the "
        "lowest training loss; half the lowest or twice the highest is tried where that one is the best",
    )
    held_out: int = Field(256, ge=1, description="sequences or images that a model is tested on")
    collapse: RankCollapseConfig = RankCollapseConfig()

    @model_validator(mode="after")
    def _recall_has_keys(self) -> "FiberBundleConfig":
        recall = self.tasks.get("recall")
        if recall and recall.symbols // 2 < recall.length:
            raise ValueError(
                f"recall of {recall.length} pairs needs {2 * recall.length} symbols or more, not {recall.symbols}"
            )
        return self

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> "FiberBundleConfig":
        parts = 4 * self.heads * (2 if "more_heads" in self.models else 1)
        for width, by, where in (
            (self.dim, parts, "dim"),
            (self.collapse.dim, 4 * self.collapse.heads, "collapse.dim"),
        ):
            if width % by:
                raise ValueError(f"{where} is {width}, which {by} does not divide: heads turn by four")
        return self

    def recipe_of(self, task: str, rate: float) -> TaskRecipe:
        """How models are trained on a task of `tasks` at a peak learning rate."""
        of_task = self.tasks[task]  # type: ignore[index]
        return TaskRecipe(steps=of_task.steps, batch=of_task.batch, lr=rate, held_out=self.held_out)
