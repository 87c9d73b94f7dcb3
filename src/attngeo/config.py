"""Presets, run sheets and recipes: read, checked against their models, and explained when something is wrong."""

import ast
import csv
import difflib
import json
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from attngeo.data import embedded
from attngeo.errors import UserError
from attngeo.evaluation.operator_sizes import INVERSE_SLICES, INVERSE_TOKENS, PYRAMID_SIZES
from attngeo.evaluation.token_sizes import LAYER_KINDS, PASSES, TOKENS, Pass
from attngeo.fiber_bundle.recipe import TaskRecipe
from attngeo.files import write_json
from attngeo.layers.registry import ATTENTION_KINDS
from attngeo.models.names import FAMILIES, PYRAMID_OPTIONS, SIZES, attention_kind_of, kinds_in, model_names
from attngeo.paper.targets import FIGURES, TABLES
from attngeo.run_options import (
    RECIPE_PREFIX,
    OptionValue,
    constructor_options,
    module_file,
    options_text,
    parse_options,
)
from attngeo.training.language_recipe import LanguageRecipe
from attngeo.training.recipe import Recipe

_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9@._-]*")
SOLVER_KIND = "laplacian"
_SHOWN = {"figures": FIGURES, "tables": TABLES}  # by the key that lists them
_OPTIONAL_COLUMNS = ("attention", "options")
DISTANCE_KINDS = ("softmax", "gaussian", "laplacian", "laplacian_exact")  # they compare queries with keys
WALK_KINDS = (*DISTANCE_KINDS, "linear_injective", "riemannian")  # rows times values of the tokens, linear in them
_RESERVED = ("recipes", "embedded", "logs", "mlflow-artifacts")  # folders that are there already


def _identifier(value: str) -> str:
    if not _IDENTIFIER.fullmatch(value):
        raise ValueError("use letters, digits, '.', '_', '-' and '@' only: the name becomes a file name")
    return value


Identifier = Annotated[str, AfterValidator(_identifier)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DatasetConfig(_Strict):
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


class LanguageModelConfig(_Strict):
    """A pretrained model to analyse."""

    id: Identifier
    source: str = Field(description="'embedded', 'hub:NAME' or 'hub:NAME@REVISION', or a local Hugging Face folder")


class DecoderCheckpoint(LanguageModelConfig):
    """One of our own decoders as it is after `step` steps of its training `run`; made by the preset itself."""

    run: Identifier
    step: int


class DecoderSize(_Strict):
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


class DecodersConfig(_Strict):
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


class Resources(_Strict):
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
        if self.device == "cuda" and self.processes > max(self.gpu, 1):
            raise ValueError(f"{self.processes} processes on GPUs need gpu: {self.processes}")
        return self


class StageResources(_Strict):
    """Resources by stage."""

    prepare: Resources = Resources(mem_mb=2000, runtime=240)
    train: TrainResources = TrainResources()
    analyze: Resources = Resources(mem_mb=2500)
    benchmark: Resources = Field(
        Resources(threads=2, mem_mb=2500), description="threads are kept free for it; it is timed with one"
    )
    draw: Resources = Resources(mem_mb=700)


class ConnectionWalkConfig(_Strict):
    """How much text or how many images a pretrained model is measured on."""

    windows: int = Field(8, ge=1)
    window_tokens: int = Field(128, ge=4)
    images: int = Field(8, ge=1)
    null_draws: int = Field(16, ge=2)
    inits: int = Field(5, ge=1, description="untrained networks of the same shape, at most 3 of large ones")
    edges: int = Field(4, ge=0, description="edges of a window and layer whose transports are measured")


class VariationalConfig(_Strict):
    """Size of the checks on the sphere."""

    seeds: tuple[int, ...] = (0, 1, 2)
    tokens: int = Field(8, ge=2)
    dimension: int = Field(4, ge=2)


class TrajectoriesConfig(_Strict):
    """How many hidden states are measured as paths on the sphere; the runs that feed fig17 are measured too."""

    windows: int = Field(8, ge=1, description="without 6 or more there are no intervals")
    window_tokens: int = Field(64, ge=4)
    tokens: int = Field(32, ge=2, description="tokens of a window or an image that are measured, evenly spread")
    images: int = Field(8, ge=1)
    inits: int = Field(3, ge=1, description="untrained networks of the same shape, each on every window")


class InjectivityConfig(_Strict):
    """Size of the rank measurement on real features."""

    images: int = Field(8, ge=2)
    model: Identifier = "dinov2-s"
    landmark_grids: tuple[int, ...] = (2, 3, 4, 5, 7)


class ScoreRankConfig(_Strict):
    """Size of the measurement of the rank of scores."""

    dimensions: tuple[Annotated[int, Field(ge=1)], ...] = Field((2, 3, 4, 5, 8, 12, 16, 24, 32), min_length=1)
    tokens: tuple[Annotated[int, Field(ge=1)], ...] = Field((64, 256, 1024, 2048), min_length=1)
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field((0,), min_length=1)


class AttentionDistanceConfig(_Strict):
    """Size of the measurement of attention by distance; the runs that feed fig1 are measured too."""

    images: int = Field(16, ge=1)
    model: Identifier = "dinov2-s"
    layers: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (3, 7, 11), min_length=1, description="layers of the pretrained model, from 0"
    )
    queries: int = Field(64, ge=1, description="tokens of an image whose distances to all others are taken")


class AttentionMapsConfig(_Strict):
    """Validation images of the attention maps; the runs that feed fig8 are looked at."""

    images: int = Field(16, ge=1, description="images that the numbers are means over")
    shown: int = Field(2, ge=1, description="images of each data set that are drawn")


class OperatorTimingsConfig(_Strict):
    """Sizes and patience of the timings of the operators."""

    sizes: tuple[tuple[int, int, int, int], ...] = Field(
        PYRAMID_SIZES, description="batch times heads, tokens, landmarks and head width of the kernels"
    )
    inverse_tokens: tuple[int, ...] = Field(INVERSE_TOKENS, description="sizes of the matrices that are inverted")
    slices: int = Field(
        INVERSE_SLICES, ge=1, description="batch times heads of the inverses and at the published numbers of tokens"
    )
    channels: int = Field(32, ge=1, description="head width at the published numbers of tokens")
    repeats: int = Field(20, ge=1)
    seconds: float = Field(1.0, gt=0, description="for each contestant, after which three samples suffice")


def _square_of_landmarks(value: int) -> int:
    if math.isqrt(value) ** 2 != value:
        raise ValueError("landmarks lie on a square grid: give a square such as 16 or 49")
    return value


class SolverConfig(_Strict):
    """Size of the comparison of solvers."""

    seeds: tuple[int, ...] = Field((0, 1, 2), min_length=1)
    matrices: int = Field(16, ge=1, description="matrices a seed, and as many in all for the trained ones")
    landmarks: int = Field(49, ge=1, description="a square: landmarks lie on a grid")
    iterations: int = Field(30, ge=1)
    eps: float = Field(0.01, gt=0)
    images: int = Field(8, ge=1, description="validation images that a trained model looks at")
    runs: tuple[Identifier, ...] = Field(
        (), description="runs with Laplacian attention; without it, the first one of the sheet and its other seeds"
    )

    @field_validator("landmarks")
    @classmethod
    def _a_square(cls, value: int) -> int:
        return _square_of_landmarks(value)


class EdgeConfig(_Strict):
    """Models and patience of the timings of one image at a time."""

    image_sizes: dict[str, tuple[Annotated[int, Field(ge=1)], ...]] = Field(
        {"micro": (32, 64, 96), "tiny": (128, 224)}, description="image sizes (px) of each pyramid size"
    )
    kinds: tuple[str, ...] = Field(tuple(ATTENTION_KINDS), min_length=1, description="attention kinds")
    repeats: int = Field(50, ge=2)
    seconds: float = Field(1.0, gt=0, description="for each model, after which three passes suffice")

    @field_validator("image_sizes")
    @classmethod
    def _sizes_there_are(cls, value: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        for size in value:
            if size not in SIZES:
                raise ValueError(f"no pyramid size {size!r}: {_options(SIZES, size)}")
        return value

    @field_validator("kinds")
    @classmethod
    def _kinds_there_are(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for kind in value:
            if kind not in ATTENTION_KINDS:
                raise ValueError(f"no attention kind {kind!r}: {_options(list(ATTENTION_KINDS), kind)}")
        return value


class TokensConfig(_Strict):
    """Sizes and patience of the cost of one attention layer against the number of tokens."""

    tokens: tuple[Annotated[int, Field(ge=1)], ...] = Field(TOKENS, min_length=1, description="squares")
    kinds: tuple[str, ...] = Field(
        LAYER_KINDS, min_length=1, description="attention kinds; softmax keeps its weights, softmax_fused does not"
    )
    passes: tuple[Pass, ...] = Field(PASSES, min_length=1)
    heads: int = Field(1, ge=1)
    head_dim: int = Field(32, ge=4, multiple_of=4)
    landmarks: int = Field(49, ge=1, description="a square: landmarks lie on a grid")
    repeats: int = Field(10, ge=1)
    seconds: float = Field(1.0, gt=0, description="for each case, after which three samples suffice")
    longest_s: float = Field(4.0, gt=0, description="a kind whose pass takes longer is not tried with more tokens")
    memory_mib: int = Field(2200, ge=1, description="a pass that needs more is left out")

    @field_validator("tokens")
    @classmethod
    def _squares(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        for tokens in value:
            if math.isqrt(tokens) ** 2 != tokens:
                raise ValueError(f"tokens lie on a square grid: give squares such as 1024, not {tokens}")
        if len(set(value)) < len(value):
            raise ValueError("a number of tokens is given twice")
        return value

    @field_validator("landmarks")
    @classmethod
    def _a_square(cls, value: int) -> int:
        return _square_of_landmarks(value)

    @field_validator("kinds")
    @classmethod
    def _kinds_there_are(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for kind in value:
            if kind not in LAYER_KINDS:
                raise ValueError(f"no attention kind {kind!r}: {_options(LAYER_KINDS, kind)}")
        return value


class TrainingStepConfig(_Strict):
    """Sizes and patience of the timings of a training step: of one layer, and of a whole model in the loop."""

    batch: int = Field(2, ge=1, description="images of the single layer")
    heads: int = Field(2, ge=1)
    tokens: int = Field(3136, ge=1, description="a square")
    head_dim: int = Field(32, ge=4, multiple_of=4)
    model_size: str = "micro"
    images: int = Field(64, ge=1, description="a batch of the model")
    steps: int = Field(8, ge=1, description="that the loop takes in one sample")
    repeats: int = Field(8, ge=2)
    seconds: float = Field(1.0, gt=0, description="for each contestant, after which three samples suffice")

    @field_validator("tokens")
    @classmethod
    def _a_square(cls, value: int) -> int:
        if math.isqrt(value) ** 2 != value:
            raise ValueError("tokens lie on a square grid: give a square such as 3136")
        return value

    @field_validator("model_size")
    @classmethod
    def _a_size_there_is(cls, value: str) -> str:
        if value not in SIZES:
            raise ValueError(f"no pyramid size {value!r}: {_options(SIZES, value)}")
        return value


class MetricCostsConfig(_Strict):
    """Sizes and patience of the cost of low-rank metrics, and of their share of a transformer block."""

    dimensions: tuple[Annotated[int, Field(ge=1)], ...] = Field((128, 256, 512, 1024, 2048, 4096), min_length=2)
    ranks: tuple[Annotated[int, Field(ge=1)], ...] = Field((1, 2, 4, 8, 16, 32, 64), min_length=2)
    block_dimensions: tuple[Annotated[int, Field(ge=64, multiple_of=64)], ...] = Field(
        (1024, 2048, 4096), min_length=1, description="widths of blocks with heads of 64"
    )
    block_ranks: tuple[Annotated[int, Field(ge=1)], ...] = Field((2, 8), min_length=1)
    tokens: int = Field(256, ge=1, description="tokens of a block")
    dense_to: int = Field(4096, ge=1, description="channels up to which dense forms are timed too")
    repeats: int = Field(10, ge=2)
    seconds: float = Field(1.0, gt=0, description="for each contestant, after which three samples suffice")


class BenchmarksConfig(_Strict):
    """What is timed and compared."""

    operators: OperatorTimingsConfig = OperatorTimingsConfig()
    solver: SolverConfig = SolverConfig()
    edge: EdgeConfig = EdgeConfig()
    tokens: TokensConfig = TokensConfig()
    training_step: TrainingStepConfig = TrainingStepConfig()
    metric_costs: MetricCostsConfig = MetricCostsConfig()


FiberModel = Literal["dot", "more_heads", "euclidean", "constant", "heterogeneous", "fiber"]
FiberTaskName = Literal["copy", "sort", "recall", "characters", "fashion-mnist"]


class FiberTaskConfig(_Strict):
    """Size of one task, and how many steps the models take on it."""

    steps: int = Field(ge=1, description="of every model; the full one also takes as many as fit into the time of dot")
    batch: int = Field(16, ge=1, description="sequences or images a step")
    length: int = Field(16, ge=2, description="symbols (copy, sort), pairs (recall) or bytes (characters)")
    symbols: int = Field(16, ge=2, description="different symbols; half of them are the keys of recall")


class RankCollapseConfig(_Strict):
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


class FiberBundleConfig(_Strict):
    """The Fiber Bundle Transformer against others on tasks, matched in parameters and in time, and rank collapse."""

    tasks: dict[FiberTaskName, FiberTaskConfig] = Field(min_length=1)
    models: tuple[FiberModel, ...] = Field(("dot", "constant", "fiber"), min_length=1)
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field((0,), min_length=1)
    dim: int = Field(64, ge=4, description="width; four divides that of a head, and half of it with more_heads")
    depth: int = Field(3, ge=1)
    heads: int = Field(4, ge=1)
    rank: int = Field(2, ge=1, description="of the metrics")
    watches: int = Field(4, ge=1, description="parts of a training after which the geometry is measured")
    lr: float = Field(2e-3, gt=0)
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

    def recipe_of(self, task: str) -> TaskRecipe:
        """How models are trained on a task of `tasks`."""
        of_task = self.tasks[task]  # type: ignore[index]
        return TaskRecipe(steps=of_task.steps, batch=of_task.batch, lr=self.lr, held_out=self.held_out)


class RunRow(_Strict):
    """One training run: a line of runs.tsv."""

    run_id: Identifier
    model: str
    dataset: Identifier
    recipe: Identifier
    seed: int = Field(ge=0)
    feeds: tuple[str, ...]
    # A kind or path/to/file.py:Class instead of the kind that the model's family names; or one a stage, by commas.
    attention: str = ""
    # What this run does otherwise, by key=value: an option of the pyramid or of its attention layers, or, after
    # `recipe.`, a key of the recipe.
    options: dict[str, OptionValue] = {}

    @field_validator("options", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        return parse_options(value) if isinstance(value, str) else value

    @property
    def options_text(self) -> str:
        """The options in the one form that records and tables know a run's by; empty without options."""
        return options_text(self.options)

    @property
    def recipe_options(self) -> dict[str, OptionValue]:
        """Keys of the recipe that this run takes other values for."""
        prefix = RECIPE_PREFIX
        return {key.removeprefix(prefix): value for key, value in self.options.items() if key.startswith(prefix)}

    @property
    def attention_options(self) -> dict[str, OptionValue]:
        """Options that go to the attention layers."""
        others = PYRAMID_OPTIONS
        return {k: v for k, v in self.options.items() if k not in others and not k.startswith(RECIPE_PREFIX)}

    @property
    def pyramid_options(self) -> dict[str, OptionValue]:
        """Options that go to the pyramid itself."""
        return {key: value for key, value in self.options.items() if key in PYRAMID_OPTIONS}

    @property
    def attention_kind(self) -> str:
        """The attention kind that every stage of this run must use; kinds that differ by stage are joined by commas."""
        return attention_kind_of(self.model, {"attention": self.attention or None})


class PresetFile(_Strict):
    """The keys of config/<preset>/config.yaml."""

    description: str
    expected: str = Field(description="what it costs: time and memory, on which machine")
    datasets: dict[Identifier, DatasetConfig] = {}
    language_models: tuple[LanguageModelConfig, ...] = ()
    vision_models: tuple[LanguageModelConfig, ...] = ()
    texts: str = Field("embedded", description="'embedded', or a folder of .txt files")
    decoders: DecodersConfig | None = Field(None, description="without it, no decoders of our own are trained")
    connection_walk: ConnectionWalkConfig = ConnectionWalkConfig()
    variational: VariationalConfig = VariationalConfig()
    trajectories: TrajectoriesConfig = TrajectoriesConfig()
    injectivity: InjectivityConfig = InjectivityConfig()
    score_rank: ScoreRankConfig = ScoreRankConfig()
    attention_distance: AttentionDistanceConfig = AttentionDistanceConfig()
    attention_maps: AttentionMapsConfig = AttentionMapsConfig()
    fiber_bundle: FiberBundleConfig | None = Field(None, description="without it, none of these is trained")
    benchmarks: BenchmarksConfig = BenchmarksConfig()
    resources: StageResources = StageResources()
    figures: tuple[str, ...] = Field(tuple(FIGURES), description="without it, every one that something feeds")
    tables: tuple[str, ...] = Field(tuple(TABLES), description="without it, every one that something feeds")


class Preset(PresetFile):
    """A preset with its run sheet and recipes: everything that the workflow needs to know."""

    name: str
    root: Path
    runs: tuple[RunRow, ...]
    recipes: dict[str, Recipe]

    def run(self, run_id: str) -> RunRow:
        """The line of the run sheet with this id; UserError naming the ids there are."""
        for row in self.runs:
            if row.run_id == run_id:
                return row
        raise UserError(
            f"config/{self.name}/runs.tsv has no run {run_id!r}",
            f"use one of: {', '.join(row.run_id for row in self.runs) or 'none yet: add a line'}",
        )

    def recipe_of(self, row: RunRow) -> Recipe:
        """What a run is trained by: its recipe's file and the run's own `recipe.` options; UserError naming the run."""
        recipe = self.recipes[row.recipe]
        if not row.recipe_options:
            return recipe
        changed: Recipe = _validate(
            Recipe,
            asdict(recipe) | row.recipe_options,
            f"config/{self.name}/runs.tsv",
            f", run {row.run_id!r}, options of the recipe",
        )
        return changed

    def with_processes(self, processes: int) -> "Preset":
        """The same preset with trainings of that many processes."""
        train = self.resources.train.model_copy(update={"processes": processes})
        return self.model_copy(update={"resources": self.resources.model_copy(update={"train": train})})

    @property
    def results(self) -> Path:
        """Folder of everything this preset makes."""
        return self.root / "results" / self.name

    @property
    def solver_runs(self) -> list[RunRow]:
        """The trained models whose landmark matrices the solvers are compared on; runs with options only if named."""
        if self.benchmarks.solver.runs:
            return [self.run(run_id) for run_id in self.benchmarks.solver.runs]
        laplacian = [row for row in self.runs if row.attention_kind == SOLVER_KIND and not row.options]
        alike = ("model", "dataset", "recipe")
        return [row for row in laplacian if all(getattr(row, key) == getattr(laplacian[0], key) for key in alike)]

    @property
    def token_benchmark_mb(self) -> int:
        """Memory that the largest pass may take, beside that of the processes."""
        return max(self.resources.benchmark.mem_mb, self.benchmarks.tokens.memory_mib + 1000)

    def runs_that_feed(self, target: str) -> list[RunRow]:
        """The runs whose line of the sheet names that target, possibly none."""
        return [row for row in self.runs if target in row.feeds]

    def runs_to_look_into(self, target: str) -> list[RunRow]:
        """The same for an analysis of nothing else; UserError if there is none."""
        runs = self.runs_that_feed(target)
        if not runs:
            raise UserError(
                f"no run of preset {self.name} feeds {target}", f"add it to feeds in config/{self.name}/runs.tsv"
            )
        return runs

    @cached_property
    def decoder_runs(self) -> dict[str, DecoderRun]:
        """Trainings of our own decoders by name, <size>-s<seed>."""
        family = self.decoders
        runs = [DecoderRun(size, seed) for size in family.sizes for seed in family.seeds] if family else []
        return {f"{run.size}-s{run.seed}": run for run in runs}

    def decoder_run(self, name: str) -> DecoderRun:
        """The training of that name; UserError naming those there are."""
        if name not in self.decoder_runs:
            raise UserError(
                f"preset {self.name} trains no decoder {name!r}",
                f"use one of: {', '.join(self.decoder_runs)}"
                if self.decoder_runs
                else f"add decoders to config/{self.name}/config.yaml, or take the preset study",
            )
        return self.decoder_runs[name]

    @cached_property
    def decoder_models(self) -> tuple[DecoderCheckpoint, ...]:
        """Our own decoders at every step that their trainings keep."""
        return tuple(
            DecoderCheckpoint(
                id=f"decoder-{run}-step{step}",
                source=f"results/{self.name}/decoders/{run}/step{step}",
                run=run,
                step=step,
            )
            for run in self.decoder_runs
            for step in self.decoder_steps
        )

    @property
    def finished_decoders(self) -> tuple[DecoderCheckpoint, ...]:
        """Our own decoders at the last step of their trainings."""
        return tuple(model for model in self.decoder_models if model.step == self.decoder_steps[-1])

    @property
    def decoder_steps(self) -> tuple[int, ...]:
        """Steps that every training of our own decoders keeps."""
        return self.decoders.training.kept_steps if self.decoders else ()

    @property
    def fiber_bundle_settings(self) -> FiberBundleConfig:
        """What is trained of the Fiber Bundle Transformer; UserError where nothing is."""
        if self.fiber_bundle is None:
            raise UserError(
                f"preset {self.name} trains no Fiber Bundle Transformer",
                f"add fiber_bundle to config/{self.name}/config.yaml, or take the preset demo",
            )
        return self.fiber_bundle

    @cached_property
    def fiber_task_runs(self) -> dict[str, FiberTaskRun]:
        """Tasks with their seeds by name, <task>-s<seed>."""
        found = self.fiber_bundle
        runs = [FiberTaskRun(task, seed) for task in found.tasks for seed in found.seeds] if found else []
        return {f"{run.task}-s{run.seed}": run for run in runs}

    def fiber_task_run(self, name: str) -> FiberTaskRun:
        """The task and seed of that name; UserError naming those there are."""
        if name not in self.fiber_task_runs:
            known = ", ".join(self.fiber_task_runs) or "none: add fiber_bundle to its config.yaml"
            raise UserError(f"preset {self.name} has no task {name!r}", f"use one of: {known}")
        return self.fiber_task_runs[name]

    @property
    def rank_collapse_seeds(self) -> tuple[int, ...]:
        """Seeds of the study of rank collapse."""
        return self.fiber_bundle.collapse.seeds if self.fiber_bundle else ()

    def walk_settings(self, model: LanguageModelConfig) -> ConnectionWalkConfig:
        """How much a model is measured on; the windows of our own decoders are as long as their context."""
        if self.decoders and isinstance(model, DecoderCheckpoint):
            return self.connection_walk.model_copy(update={"window_tokens": self.decoders.training.context})
        return self.connection_walk

    def trajectory_settings(self, model: LanguageModelConfig) -> TrajectoriesConfig:
        """How much a model's paths are measured on; no window of our own decoders is longer than their context."""
        settings = self.trajectories
        if not (self.decoders and isinstance(model, DecoderCheckpoint)):
            return settings
        longest = min(settings.window_tokens, self.decoders.training.context)
        return settings.model_copy(update={"window_tokens": longest})

    @cached_property
    def analysed_models(self) -> dict[str, LanguageModelConfig]:
        """Language models, our own decoders among them, and vision models by id."""
        return {model.id: model for model in (*self.language_models, *self.decoder_models, *self.vision_models)}


def _options(values: Sequence[str], given: object = "") -> str:
    close = difflib.get_close_matches(str(given), values, n=1)
    return ("did you mean " + repr(close[0]) + "? " if close else "") + "allowed: " + ", ".join(values)


def _unwrap(annotation: Any, step: Any) -> Any:
    """The annotation one step of an error's location further down."""
    while True:
        origin = typing.get_origin(annotation)
        if origin is Annotated:
            annotation = typing.get_args(annotation)[0]
        elif origin in (typing.Union, types.UnionType):
            models = [a for a in typing.get_args(annotation) if a is not type(None)]
            annotation = models[0]
        else:
            break
    arguments = typing.get_args(annotation)
    if origin is dict:
        return arguments[1]
    if origin in (tuple, list):
        return arguments[0]
    fields = getattr(annotation, "model_fields", None) or getattr(annotation, "__dataclass_fields__", {})
    field = fields.get(step)
    return getattr(field, "annotation", None) or getattr(field, "type", None)


def _allowed_keys(model: Any, location: Sequence[Any]) -> list[str]:
    """The keys allowed at the parent of an error's location."""
    annotation: Any = model
    for step in location[:-1]:
        annotation = _unwrap(annotation, step)
    while typing.get_origin(annotation) in (Annotated, typing.Union, types.UnionType):
        annotation = typing.get_args(annotation)[0]
    fields = getattr(annotation, "model_fields", None) or getattr(annotation, "__dataclass_fields__", {})
    return list(fields)


def _explain(error: ValidationError, model: Any, file: str, where: str = "") -> UserError:
    """One message for everything wrong in a file: key, what it got, what is allowed."""
    lines = []
    for item in error.errors():
        key = ".".join(str(step) for step in item["loc"]) or "(whole file)"
        if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            lines.append(f"key {key!r} is unknown; {_options(_allowed_keys(model, item['loc']), str(item['loc'][-1]))}")
        elif item["type"] == "missing":
            lines.append(f"key {key!r} is missing")
        elif item["type"] == "literal_error":
            lines.append(f"key {key!r}: {item['input']!r} is not allowed; use {item['ctx']['expected']}")
        else:
            lines.append(f"key {key!r}: got {item['input']!r}: {item['msg'].removeprefix('Value error, ')}")
    return UserError(f"{file}{where}: " + "; ".join(lines), f"correct {file} and run the same command again")


def _validate(model: Any, data: Any, file: str, where: str = "") -> Any:
    try:
        return TypeAdapter(model).validate_python(data)
    except UserError as error:  # a check of the model's own, which does not know the file
        raise UserError(f"{file}{where}: {error.what}", error.remedy) from None
    except ValidationError as error:
        raise _explain(error, model, file, where) from None


def _read_text(path: Path, name: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 text: {error}", "save it as UTF-8") from None


def _read_yaml(path: Path, name: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(_read_text(path, name))
    except yaml.YAMLError as error:
        raise UserError(f"{name} is not valid YAML: {error}", "correct the line it names") from error
    if not isinstance(content, dict):
        raise UserError(f"{name} must be a mapping of keys to values", "see config/demo/config.yaml for an example")
    return content


def load_recipe(root: Path, name: str) -> Recipe:
    """Read config/recipes/<name>.yaml; UserError naming file, key and allowed values."""
    path = root / "config" / "recipes" / f"{name}.yaml"
    if not path.is_file():
        known = sorted(p.stem for p in path.parent.glob("*.yaml"))
        raise UserError(f"there is no recipe {name!r} (no file config/recipes/{name}.yaml)", _options(known, name))
    recipe: Recipe = _validate(Recipe, _read_yaml(path, f"config/recipes/{name}.yaml"), f"config/recipes/{name}.yaml")
    return recipe


def _load_runs(root: Path, preset: str) -> tuple[RunRow, ...]:
    name = f"config/{preset}/runs.tsv"
    path = root / name
    if not path.is_file():
        raise UserError(f"{name} does not exist", "add the run sheet; a header line alone means no training runs")
    lines = [line for line in _read_text(path, name).splitlines() if line.strip() and not line.startswith("#")]
    rows: list[RunRow] = []
    for number, row in enumerate(csv.DictReader(lines, delimiter="\t"), start=1):
        missing = [key for key, value in row.items() if value is None and key not in _OPTIONAL_COLUMNS]
        if None in row or missing:
            raise UserError(f"{name}, run {number}: it has more or fewer columns than the header", "separate by tabs")
        data: dict[str, Any] = {key: value for key, value in row.items() if value or key == "run_id"}
        data["feeds"] = tuple(item.strip() for item in (row.get("feeds") or "").split(",") if item.strip())
        rows.append(_validate(RunRow, data, name, f", run {number}"))
    ids = [row.run_id for row in rows]
    for duplicate in {run_id for run_id in ids if ids.count(run_id) > 1}:
        raise UserError(
            f"{name}: run_id {duplicate!r} appears {ids.count(duplicate)} times", "give each run its own id"
        )
    return tuple(rows)


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return merged


def preset_names(root: Path) -> list[str]:
    """Presets under config/."""
    return sorted(path.parent.name for path in (root / "config").glob("*/config.yaml"))


def load_preset(root: Path, name: str, overrides: Mapping[str, Any] | None = None) -> Preset:
    """Read and check config/<name>/config.yaml, runs.tsv and every recipe that a run names.

    `overrides` replaces keys of config.yaml. Raises UserError naming file, key and the allowed values.
    """
    root = root.resolve()
    name = str(name)
    file = f"config/{name}/config.yaml"
    if not _IDENTIFIER.fullmatch(name) or name in _RESERVED:
        raise UserError(
            f"a preset cannot be called {name!r}",
            f"use letters, digits, '.', '_', '-' and '@' only, and none of {', '.join(_RESERVED)}",
        )
    if not (root / file).is_file():
        raise UserError(f"there is no preset {name!r} (no file {file})", _options(preset_names(root), name))
    for key in overrides or {}:
        if key not in PresetFile.model_fields:
            raise UserError(
                f"key {key!r}, given to --config, is neither 'preset' nor a key of {file}",
                _options(["preset", *PresetFile.model_fields], key),
            )
    content = _merge(_read_yaml(root / file, file), overrides or {})
    checked: PresetFile = _validate(
        PresetFile, content, f"{file} with the keys given to --config" if overrides else file
    )
    runs = _load_runs(root, name)
    recipes = {recipe: load_recipe(root, recipe) for recipe in sorted({row.recipe for row in runs})}
    preset = Preset.model_construct(
        **{key: getattr(checked, key) for key in PresetFile.model_fields},
        name=name,
        root=root,
        runs=runs,
        recipes=recipes,
    )
    sheet = f"config/{name}/runs.tsv"
    _check_sources(preset, file)
    _check_runs(preset, file, sheet)
    _check_solver_runs(preset, file)
    _check_looked_into(preset, sheet)
    return _with_targets(preset, checked.model_fields_set, file, sheet)


def _check_runs(preset: Preset, file: str, sheet: str) -> None:
    """Every run names a model, a dataset, an attention kind and targets that there are."""
    targets = [*FIGURES, *TABLES]
    options_of = cache(partial(_attention_options, root=preset.root))
    for row in preset.runs:
        where = f"{sheet}, run {row.run_id!r}"
        if row.model not in model_names():
            close = f"{_options(model_names(), row.model)} " if "_" in row.model else ""
            raise UserError(
                f"{where}: unknown model {row.model!r}",
                f"{close}(names are FAMILY_SIZE: families {', '.join(FAMILIES)}; sizes {', '.join(SIZES)})",
            )
        if row.dataset not in preset.datasets:
            raise UserError(
                f"{where}: dataset {row.dataset!r} is not among the datasets of {file}",
                _options(list(preset.datasets), row.dataset),
            )
        for target in row.feeds:
            if target not in targets:
                raise UserError(f"{where}: feeds unknown {target!r}", _options(targets, target))
        if "tuning" in row.feeds and not preset.datasets[row.dataset].hold_out:
            raise UserError(
                f"{where}: it feeds tuning, but dataset {row.dataset!r} holds no training images out",
                f"set its hold_out in {file} (0.1, say): nothing is chosen on the images that score",
            )
        try:
            kinds = kinds_in(row.attention_kind)
        except UserError as error:
            raise UserError(f"{where}: {error.what}", error.remedy) from None
        for kind in kinds:
            check_attention_kind(kind, preset.root, where)
        _check_options(row, kinds, options_of, where)
        preset.recipe_of(row)


def _check_options(
    row: RunRow, kinds: Sequence[str], options_of: Callable[[str], tuple[list[str], bool]], where: str
) -> None:
    """Every option is one of the pyramid, of an attention kind of this run, or of the recipe, and of nothing else."""
    for key in [*row.attention_options, *row.recipe_options]:
        if key in RunRow.model_fields:
            raise UserError(f"{where}: option {key!r} has a column of its own", f"write it into the column {key}")
    known: list[str] = []
    for kind in dict.fromkeys(kinds) if row.attention_options else ():
        names, open_ended = options_of(kind)
        if open_ended:
            return
        known += [name for name in names if name not in known]
    for key in row.attention_options:
        if key not in (*known, "landmarks"):
            raise UserError(
                f"{where}: attention {' or '.join(map(repr, dict.fromkeys(kinds)))} has no option {key!r}",
                f"{_options([*known, 'landmarks', *PYRAMID_OPTIONS], key)}, or {RECIPE_PREFIX}KEY",
            )


def _attention_options(kind: str, root: Path) -> tuple[list[str], bool]:
    """Options of an attention kind, read from its source; whether it takes any."""
    place, _, name = ATTENTION_KINDS.get(kind, kind).rpartition(":")
    file = root / place if place.endswith(".py") else module_file(place, root)
    return constructor_options(file, name) if file else ([], True)


def _check_solver_runs(preset: Preset, file: str) -> None:
    """The solvers are compared on runs of the sheet that invert Laplacian landmark matrices."""
    laplacian = [row for row in preset.runs if row.attention_kind == SOLVER_KIND]
    known = [row.run_id for row in laplacian if not row.options.get("separate_landmarks")]
    for name in preset.benchmarks.solver.runs:
        if name not in known:
            raise UserError(
                f"{file}: key 'benchmarks.solver.runs': {name!r} is no run with {SOLVER_KIND} attention and symmetric "
                "landmark matrices",
                _options(known, name),
            )


def _check_looked_into(preset: Preset, sheet: str) -> None:
    """Runs of fig1 have queries and keys, those of fig10 a walk; fig8 has one run a data set and kind, fig10 seeds."""
    for row in preset.runs_that_feed("fig1"):
        if not set(kinds_in(row.attention_kind)) <= set(DISTANCE_KINDS):
            raise UserError(
                f"{sheet}, run {row.run_id!r}: fig1 cannot show attention {row.attention_kind!r}",
                f"let runs of these kinds feed it: {', '.join(DISTANCE_KINDS)}",
            )
    walked: dict[tuple[str, str], RunRow] = {}
    for row in preset.runs_that_feed("fig10"):
        if not set(kinds_in(row.attention_kind)) <= set(WALK_KINDS):
            raise UserError(
                f"{sheet}, run {row.run_id!r}: fig10 cannot show attention {row.attention_kind!r}",
                f"let runs of these kinds feed it: {', '.join(WALK_KINDS)}",
            )
        other = walked.setdefault((row.dataset, row.attention_kind), row)
        if any(getattr(row, key) != getattr(other, key) for key in ("model", "recipe", "options")):
            raise UserError(
                f"{sheet}: runs {other.run_id!r} and {row.run_id!r} of one data set and attention kind feed fig10 and "
                "differ in more than their seed",
                "let only one of them feed it",
            )
    shown: dict[tuple[str, str], str] = {}
    for row in preset.runs_that_feed("fig8"):
        first = shown.setdefault((row.dataset, row.attention_kind), row.run_id)
        if first != row.run_id:
            raise UserError(
                f"{sheet}: runs {first!r} and {row.run_id!r} of one data set and attention kind feed fig8",
                "let only one of them feed it",
            )


def _with_targets(preset: Preset, given: Collection[str], file: str, sheet: str) -> Preset:
    """The preset with the figures and tables that it lists, if `given` has their key, else all that something feeds.

    UserError where one that is listed does not exist or has nothing to show.
    """
    for key, known in _SHOWN.items():  # figures first: the ledger's table reads what they are made of
        fed = [name for name, target in known.items() if target.inputs(preset)]
        if key not in given:
            preset = preset.model_copy(update={key: tuple(fed)})
        for name in getattr(preset, key):
            if name not in known:
                raise UserError(f"{file}: key {key!r}: unknown target {name!r}", _options(list(known), name))
            if name not in fed:
                raise UserError(
                    f"{file}: key {key!r}: the preset has nothing to show in {name}",
                    f"let a run of {sheet} feed it, add models, or list the {key} without it",
                )
    vision_models = [model.id for model in preset.vision_models]
    for name, key, model in (
        ("fig1", "attention_distance.model", preset.attention_distance.model),
        ("fig7", "injectivity.model", preset.injectivity.model),
    ):
        if name in preset.figures and model not in vision_models:
            raise UserError(
                f"{file}: key {key!r}: {model!r} is not one of the vision_models",
                f"{_options(vision_models) if vision_models else 'add it there'}; or list the figures without {name}",
            )
    return preset


def _check_sources(preset: Preset, file: str) -> None:
    """What is called embedded is known; folders are looked at when they are needed."""
    wanted = {name: config.source for name, config in preset.datasets.items()}
    wanted |= {model.id: model.source for model in preset.analysed_models.values()}
    for name, source in wanted.items():
        if source == "embedded" and name not in embedded.sources():
            raise UserError(f"{file}: nothing embedded is called {name!r}", _options(list(embedded.sources()), name))


def _names_bound_in(file: Path) -> set[str]:
    """Classes that a Python file defines or imports, read without running it; UserError naming a syntax error."""
    try:
        tree = ast.parse(_read_text(file, file.name))
    except SyntaxError as error:
        raise UserError(f"{file}, line {error.lineno}: {error.msg}", "correct that line") from None
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom | ast.Import)]
    return names | {alias.asname or alias.name for node in imports for alias in node.names}


def check_attention_kind(kind: str, root: Path, where: str) -> None:
    """Refuse an attention kind that no class stands behind; UserError naming the allowed kinds."""
    file, colon, name = kind.rpartition(":")
    if colon and file.endswith(".py"):
        if not (root / file).is_file():
            raise UserError(f"{where}: the file of attention {kind!r} does not exist", f"create {file} or correct it")
        if name not in _names_bound_in(root / file):
            raise UserError(
                f"{where}: {file} has no class {name!r}", f"correct the name, or define the class in {file}"
            )
    elif kind not in ATTENTION_KINDS:
        raise UserError(
            f"{where}: unknown attention kind {kind!r}",
            f"{_options(list(ATTENTION_KINDS), kind)}, or path/to/file.py:Class",
        )


def write_schemas(folder: Path) -> list[Path]:
    """Write the JSON schemas of the preset file, the run sheet and the recipes, for editors that check as you type."""
    paths = []
    for name, model in (("config", PresetFile), ("runs", RunRow), ("recipe", Recipe)):
        path = folder / f"{name}.schema.json"
        content = {"$schema": "https://json-schema.org/draft/2020-12/schema", **TypeAdapter(model).json_schema()}
        if not path.is_file() or json.loads(path.read_text(encoding="utf-8")) != content:
            write_json(path, content)
        paths.append(path)
    return paths
