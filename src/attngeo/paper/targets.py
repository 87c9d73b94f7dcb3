"""Every figure, table and page that can be made, and the result files each needs; imports neither torch nor pandas."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol


class RunRow(Protocol):
    """One training run of a preset; `feeds` names the targets that show it."""

    @property
    def run_id(self) -> str: ...
    @property
    def dataset(self) -> str: ...
    @property
    def feeds(self) -> tuple[str, ...]: ...


class Dataset(Protocol):
    """A data set of a preset; `hold_out` is the share of the training images that stands in for validation."""

    @property
    def hold_out(self) -> float: ...


class AnalysedModel(Protocol):
    """One pretrained model of a preset."""

    @property
    def id(self) -> str: ...


class Preset(Protocol):
    """What this module reads of a preset."""

    @property
    def runs(self) -> Sequence[RunRow]: ...
    @property
    def datasets(self) -> Mapping[str, Dataset]: ...
    @property
    def language_models(self) -> Sequence[AnalysedModel]: ...
    @property
    def vision_models(self) -> Sequence[AnalysedModel]: ...
    @property
    def decoder_models(self) -> Sequence[AnalysedModel]: ...
    @property
    def fiber_task_runs(self) -> Mapping[str, object]: ...
    @property
    def fiber_rate_tasks(self) -> Sequence[str]: ...
    @property
    def rank_collapse_seeds(self) -> Sequence[int]: ...
    @property
    def finished_decoders(self) -> Sequence[AnalysedModel]: ...
    @property
    def figures(self) -> Sequence[str]: ...
    @property
    def tables(self) -> Sequence[str]: ...


@dataclass(frozen=True)
class Target:
    """A figure, a table, a page or the numbers for prose of the paper.

    `inputs(preset)` lists files relative to results/<preset>/; `data_files` are read from the package's `paper` folder
    and belong, like the module, to what decides whether the target must be made again.
    """

    name: str
    number: int
    kind: str
    title: str
    module: str
    caption_file: str
    claim_ids: tuple[str, ...]
    inputs: Callable[[Preset], list[str]]
    data_files: tuple[str, ...] = ()

    @property
    def outputs(self) -> tuple[str, ...]:
        """Files that this target writes, relative to results/<preset>/."""
        if self.kind == "page":
            return (f"{self.name}.html",)
        if self.kind == "prose":
            return (f"{self.name}.tex", f"{self.name}.csv")
        endings = ("pdf", "png", "csv", "caption.txt") if self.kind == "figure" else ("csv", "md", "tex", "caption.txt")
        return tuple(f"{self.kind}s/{self.name}.{ending}" for ending in endings)


INJECTIVITY = "analyses/injectivity.json"
ATTENTION_DISTANCE = "analyses/attention_distance.json"
ATTENTION_MAPS = ("analyses/attention_maps.json", "analyses/attention_maps.npz")
RUN_WALKS = "analyses/connection_walk_runs.json"
VARIATIONAL = "analyses/variational.json"
RUN_TRAJECTORIES = "analyses/trajectories_runs.json"
FIBER_BUNDLE = "analyses/fiber_bundle.json"
PREDICTIONS = "analyses/predictions.json"
OPERATOR_BENCHMARK = "benchmarks/operators.json"
SOLVER_BENCHMARK = "benchmarks/solver.json"
EDGE_BENCHMARK = "benchmarks/edge.json"
TOKEN_BENCHMARK = "benchmarks/tokens.json"
SCORE_RANK = "analyses/score_rank.json"
METRIC_COSTS = "benchmarks/low_rank_metric.json"
GPU_TIMINGS = "benchmarks/gpu.json"
FINDINGS = "tables/findings.csv"


def connection_walk_file(model_id: str) -> str:
    """Record file of one pretrained model's connection walk."""
    return f"analyses/connection_walk/{model_id}.json"


def connection_walk_files(preset: Preset) -> list[str]:
    """Record files of every pretrained model of the preset, and of our own decoders at every step kept."""
    models = [*preset.language_models, *preset.decoder_models, *preset.vision_models]
    return [connection_walk_file(model.id) for model in models]


def walk_files(preset: Preset) -> list[str]:
    """Record files of the connection walks of pretrained models and, where runs feed fig10, of trained ones."""
    return [*connection_walk_files(preset), *([RUN_WALKS] if any("fig10" in run.feeds for run in preset.runs) else [])]


def trajectory_files(preset: Preset) -> list[str]:
    """Record files of the paths of pretrained models, our own decoders at their last step and runs that feed fig17."""
    models = [*preset.language_models, *preset.finished_decoders, *preset.vision_models]
    own = [RUN_TRAJECTORIES] if any("fig17" in run.feeds for run in preset.runs) else []
    return [*(f"analyses/trajectories/{model.id}.json" for model in models), *own]


def fiber_task_files(preset: Preset) -> list[str]:
    """Record files of the trainings on every task with every seed."""
    return [f"analyses/fiber_tasks/{name}.json" for name in preset.fiber_task_runs]


def fiber_rate_files(preset: Preset) -> list[str]:
    """Record files of the rates tried on every task, where there are several."""
    return [f"analyses/fiber_rates/{task}.json" for task in preset.fiber_rate_tasks]


def rank_collapse_files(preset: Preset) -> list[str]:
    """Record files of rank collapse, one a seed."""
    return [f"analyses/rank_collapse/s{seed}.json" for seed in preset.rank_collapse_seeds]


def run_files(preset: Preset, target: str, names: tuple[str, ...]) -> list[str]:
    """The named files of every run that feeds the target."""
    return [f"runs/{run.run_id}/{name}" for run in preset.runs if target in run.feeds for name in names]


def ledger_files(preset: Preset) -> list[str]:
    """Everything that a verdict may rest on: runs of table 1, every model's walk, each figure's records.

    Of the runs those of table 1: ablations are evidence for no claim, and one that fails must not hold up the ledger.
    Runs on data sets that hold images out are left out too: those images are there to choose settings on.
    """
    held_out = {name for name, dataset in preset.datasets.items() if dataset.hold_out}
    counted = [run for run in preset.runs if "tab1" in run.feeds and run.dataset not in held_out]
    finals = [f"runs/{run.run_id}/final.json" for run in counted]
    figures = [path for name in preset.figures for path in FIGURES[name].inputs(preset)]
    records = [path for path in figures if path.startswith(("analyses/", "benchmarks/")) and path.endswith(".json")]
    fiber = [*fiber_task_files(preset), *rank_collapse_files(preset)]
    fiber += [FIBER_BUNDLE, PREDICTIONS] if fiber else []
    return list(dict.fromkeys([*finals, *connection_walk_files(preset), *fiber, *records]))


def made_from(preset: Preset) -> dict[str, list[str]]:
    """Every figure and table of the preset with the files, relative to results/<preset>/, that it is made from."""
    return {name: TARGETS[name].inputs(preset) for name in (*preset.figures, *preset.tables)}


def _findings_inputs(preset: Preset) -> list[str]:
    """The ablations of table 4, every pretrained model's walk, and the rank collapse where the preset measures it."""
    return [
        *run_files(preset, "tab4", ("final.json",)),
        *connection_walk_files(preset),
        *rank_collapse_files(preset),
    ]


def _claims_inputs(preset: Preset) -> list[str]:
    """What the ledger rests on, and the findings that its page leads with."""
    return [*ledger_files(preset), *([FINDINGS] if "findings" in preset.tables else [])]


def _gallery_inputs(preset: Preset) -> list[str]:
    figures = [path for name in preset.figures for path in FIGURES[name].outputs if path.endswith((".png", ".txt"))]
    tables = [path for name in preset.tables for path in TABLES[name].outputs if path.endswith((".md", ".txt"))]
    return [*figures, *tables, *([FINDINGS] if "findings" in preset.tables else [])]


def _macros_inputs(preset: Preset) -> list[str]:
    return [f"tables/{name}.csv" for name in preset.tables]


def _fig2_inputs(preset: Preset) -> list[str]:
    return run_files(preset, "fig2", ("metrics.jsonl", "final.json"))


def _fig3_inputs(preset: Preset) -> list[str]:
    return run_files(preset, "fig3", ("final.json",))


def _tab1_inputs(preset: Preset) -> list[str]:
    return run_files(preset, "tab1", ("final.json",))


def _ablation_inputs(target: str) -> Callable[[Preset], list[str]]:
    return lambda preset: run_files(preset, target, ("final.json",))


def _attention_distance_inputs(preset: Preset) -> list[str]:
    return [ATTENTION_DISTANCE]


def _attention_maps_inputs(preset: Preset) -> list[str]:
    return list(ATTENTION_MAPS) if any("fig8" in run.feeds for run in preset.runs) else []


def _injectivity_inputs(preset: Preset) -> list[str]:
    return [INJECTIVITY]


def _variational_inputs(preset: Preset) -> list[str]:
    return [VARIATIONAL]


def _timing_inputs(preset: Preset) -> list[str]:
    return [OPERATOR_BENCHMARK, GPU_TIMINGS]


def _solver_inputs(preset: Preset) -> list[str]:
    return [SOLVER_BENCHMARK]


def _edge_inputs(preset: Preset) -> list[str]:
    return [EDGE_BENCHMARK]


def _tuning_inputs(preset: Preset) -> list[str]:
    return run_files(preset, "tuning", ("final.json",))


def _task_table_inputs(preset: Preset) -> list[str]:
    files = fiber_task_files(preset)
    return [*fiber_rate_files(preset), *files, FIBER_BUNDLE] if files else []


def _token_inputs(preset: Preset) -> list[str]:
    return [TOKEN_BENCHMARK]


def _score_rank_inputs(preset: Preset) -> list[str]:
    return [SCORE_RANK]


def _metric_cost_inputs(preset: Preset) -> list[str]:
    return [METRIC_COSTS]


def _numbered(
    kind: str,
    number: int,
    module: str,
    title: str,
    claim_ids: tuple[str, ...],
    inputs: Callable[[Preset], list[str]],
    data_files: tuple[str, ...] = (),
) -> Target:
    """A target of a kind that the papers number: fig10, tab1."""
    name = f"{kind[:3]}{number}"
    return Target(
        name,
        number,
        kind,
        title,
        f"attngeo.paper.{kind}s.{module}",
        f"workflow/report/{name}.rst",
        claim_ids,
        inputs,
        data_files,
    )


_figure = partial(_numbered, "figure")
_table = partial(_numbered, "table")

FIGURES: dict[str, Target] = {
    target.name: target
    for target in (
        _figure(
            1,
            "fig01_kernel_profiles",
            "Kernel profiles, and where attention lies by distance",
            ("P2.b",),
            _attention_distance_inputs,
        ),
        _figure(2, "fig02_training_curves", "Training curves of every attention kind", ("P2.f",), _fig2_inputs),
        _figure(
            3,
            "fig03_accuracy_cost",
            "Accuracy against cost, published and ours",
            ("P2.f",),
            _fig3_inputs,
            ("published/imagenet.csv",),
        ),
        _figure(4, "fig04_cost_tokens", "Time and memory against the number of tokens", ("P2.a",), _token_inputs),
        _figure(
            5,
            "fig05_kernel_timings",
            "Timings of kernel and solver, ours and published",
            ("P2.e",),
            _timing_inputs,
            ("published/kernel_timings.csv",),
        ),
        _figure(6, "fig06_solver_convergence", "Convergence of the solvers", ("P2.d",), _solver_inputs),
        _figure(
            7, "fig07_injectivity", "Injectivity of attention matrices against capacity", ("P2.c",), _injectivity_inputs
        ),
        _figure(8, "fig08_attention_maps", "Attention maps on validation images", ("P2.b",), _attention_maps_inputs),
        _figure(
            9,
            "fig09_graph_convergence",
            "Effective attention graphs by depth",
            ("P3.c", "P3.d"),
            connection_walk_files,
        ),
        _figure(10, "fig10_transport_isometry", "Transport isometry by depth", ("P3.e",), walk_files),
        _figure(11, "fig11_scale", "Isometry and convergence against size", ("P3.f",), connection_walk_files),
        _figure(12, "fig12_score_rank", "Rank of scores against head dimension", ("P4.a",), _score_rank_inputs),
        _figure(13, "fig13_metric_costs", "What metrics cost, alone and in a block", ("P4.b",), _metric_cost_inputs),
        _figure(
            14,
            "fig14_rank_collapse",
            "Rank collapse by depth: metric, wiring, training",
            ("P4.e",),
            rank_collapse_files,
        ),
        _figure(
            15,
            "fig15_curvature_torsion",
            "Curvature and torsion through depth and training",
            ("P4.c", "P4.d"),
            fiber_task_files,
        ),
        _figure(
            16,
            "fig16_variational",
            "The attention flow against its variational problem",
            ("P1.a", "P1.b", "P1.c"),
            _variational_inputs,
        ),
        _figure(
            17,
            "fig17_trajectories",
            "Hidden states by depth as paths on the sphere",
            ("P1.a", "P1.d"),
            trajectory_files,
        ),
    )
}

TABLES: dict[str, Target] = {
    target.name: target
    for target in (
        _table(
            1,
            "tab01_classification",
            "Classification: paper, public baselines, ours",
            ("P2.f",),
            _tab1_inputs,
            ("published/imagenet.csv", "published/replication.csv"),
        ),
        _table(
            2,
            "tab02_lambda",
            "Ablation of lambda, paper and ours",
            ("P2.f",),
            _ablation_inputs("tab2"),
            ("published/lambda_ablation.csv",),
        ),
        _table(
            3,
            "tab03_solver",
            "Ablation of the solver, paper and ours",
            ("P2.d",),
            _ablation_inputs("tab3"),
            ("published/solver_ablation.csv",),
        ),
        _table(
            4,
            "tab04_decisions",
            "Decisions, and why a public replication failed",
            ("P2.f",),
            _ablation_inputs("tab4"),
            ("published/replication.csv",),
        ),
        _table(
            5,
            "tab05_kernel_timings",
            "Kernel timings, ours and published",
            ("P2.e",),
            _timing_inputs,
            ("published/kernel_timings.csv",),
        ),
        _table(
            6,
            "tab06_models",
            "Models walked: size, scores, nulls, excess",
            ("P3.d", "P3.e", "P3.f"),
            walk_files,
        ),
        _table(
            7,
            "tab07_identities",
            "Exactness of the connection walk",
            ("P3.a", "P3.b", "P3.c"),
            walk_files,
        ),
        _table(
            8,
            "tab08_fiber_bundle",
            "Fiber Bundle Transformer against matched baselines",
            ("P4.c", "P4.d", "P4.e"),
            _task_table_inputs,
        ),
        _table(9, "tab09_ledger", "The ledger of claims", (), ledger_files, ("claims.yaml",)),
        # Without a number: no table of the papers' is of these kinds.
        Target(
            "findings",
            0,
            "table",
            "The three findings",
            "attngeo.paper.tables.findings",
            "workflow/report/findings.rst",
            ("P2.f", "P3.f", "P4.e"),
            _findings_inputs,
            ("claims.yaml", "published/replication.csv"),
        ),
        Target(
            "edge",
            0,
            "table",
            "One image at a time: latency and memory",
            "attngeo.paper.tables.edge",
            "workflow/report/edge.rst",
            (),
            _edge_inputs,
        ),
        Target(
            "tuning",
            0,
            "table",
            "Learning rates, chosen on held-out training images",
            "attngeo.paper.tables.tuning",
            "workflow/report/tuning.rst",
            (),
            _tuning_inputs,
        ),
    )
}

PAGES: dict[str, Target] = {
    target.name: target
    for target in (
        Target(
            "claims",
            0,
            "page",
            "The ledger of claims",
            "attngeo.paper.ledger",
            "workflow/report/claims.rst",
            (),
            _claims_inputs,
            ("claims.yaml", "ledger_page.html", "page_base.html", "page_findings.html"),
        ),
        Target(
            "index",
            0,
            "page",
            "Figures and tables",
            "attngeo.paper.gallery",
            "workflow/report/index.rst",
            (),
            _gallery_inputs,
            ("gallery_page.html", "page_base.html", "page_findings.html"),
        ),
        Target(
            "macros",
            0,
            "prose",
            "Numbers for prose",
            "attngeo.paper.macros",
            "workflow/report/macros.rst",
            (),
            _macros_inputs,
        ),
    )
}

TARGETS: dict[str, Target] = {**FIGURES, **TABLES, **PAGES}
