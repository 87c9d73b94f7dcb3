"""A run sheet's line, the keys of config.yaml, and both together as the preset that the workflow knows."""

from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from attngeo.config.benchmarks import BenchmarksConfig
from attngeo.config.explain import allowed, validate
from attngeo.config.settings import (
    AttentionDistanceConfig,
    AttentionMapsConfig,
    ConnectionWalkConfig,
    DatasetConfig,
    DecoderCheckpoint,
    DecoderRun,
    DecodersConfig,
    FiberBundleConfig,
    FiberTaskRun,
    Identifier,
    InjectivityConfig,
    LanguageModelConfig,
    ScoreRankConfig,
    StageResources,
    Strict,
    TrajectoriesConfig,
    VariationalConfig,
)
from attngeo.errors import UserError
from attngeo.models.names import PYRAMID_OPTIONS, attention_kind_of
from attngeo.paper.targets import FIGURES, TABLES
from attngeo.run_options import RECIPE_PREFIX, OptionValue, options_text, parse_options
from attngeo.training.recipe import Recipe

SOLVER_KIND = "laplacian"


class RunRow(Strict):
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
    options: dict[str, OptionValue] = Field({})

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


class PresetFile(Strict):
    """The keys of config/<preset>/config.yaml."""

    description: str
    expected: str = Field(description="what it costs: time and memory, on which machine")
    datasets: dict[Identifier, DatasetConfig] = Field({})
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
        changed: Recipe = validate(
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

    def vision_model(self, analysis: str) -> LanguageModelConfig:
        """The model that a key such as injectivity names as its `model`; UserError where it is no vision model."""
        model_id = getattr(self, analysis).model
        known = {model.id: model for model in self.vision_models}
        if model_id not in known:
            raise UserError(
                f"config/{self.name}/config.yaml: key '{analysis}.model': {model_id!r} is not one of the vision_models",
                allowed(list(known), model_id) if known else "add it there",
            )
        return known[model_id]

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

    @property
    def fiber_rate_tasks(self) -> tuple[str, ...]:
        """Tasks on which the models' learning rates are chosen: all, where there are several rates."""
        found = self.fiber_bundle
        return tuple(found.tasks) if found and len(found.rates) > 1 else ()

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
