"""What must fit together across run sheet, config.yaml and the kinds and targets that there are."""

import ast
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from pathlib import Path

from attngeo.config.explain import allowed, read_text
from attngeo.config.preset import SOLVER_KIND, Preset, RunRow
from attngeo.data import embedded
from attngeo.errors import UserError
from attngeo.layers.registry import ATTENTION_KINDS
from attngeo.models.names import FAMILIES, PYRAMID_OPTIONS, SIZES, kinds_in, model_names
from attngeo.paper.ablations import compared_options
from attngeo.paper.targets import FIGURES, TABLES
from attngeo.run_options import RECIPE_PREFIX, constructor_options, module_file, options_text

DISTANCE_KINDS = ("softmax", "gaussian", "laplacian", "laplacian_exact")  # they compare queries with keys
WALK_KINDS = (*DISTANCE_KINDS, "linear_injective", "riemannian")  # rows times values of the tokens, linear in them
_BY_KIND = ("tab1", "fig2", "fig3")  # runs go by model and its options, whatever their recipe's options
_COMPARED = ("tab2", "tab3", "tab4")
_SHOWN = {"figures": FIGURES, "tables": TABLES}  # by the key that lists them


def check_runs(preset: Preset, file: str, sheet: str) -> None:
    """Every run names a model, a dataset, an attention kind and targets that there are."""
    targets = [*FIGURES, *TABLES]
    options_of = cache(partial(_attention_options, root=preset.root))
    for row in preset.runs:
        where = f"{sheet}, run {row.run_id!r}"
        if row.model not in model_names():
            close = f"{allowed(model_names(), row.model)} " if "_" in row.model else ""
            raise UserError(
                f"{where}: unknown model {row.model!r}",
                f"{close}(names are FAMILY_SIZE: families {', '.join(FAMILIES)}; sizes {', '.join(SIZES)})",
            )
        if row.dataset not in preset.datasets:
            raise UserError(
                f"{where}: dataset {row.dataset!r} is not among the datasets of {file}",
                allowed(list(preset.datasets), row.dataset),
            )
        for target in row.feeds:
            if target not in targets:
                raise UserError(f"{where}: feeds unknown {target!r}", allowed(targets, target))
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
                f"{allowed([*known, 'landmarks', *PYRAMID_OPTIONS], key)}, or {RECIPE_PREFIX}KEY",
            )


def _attention_options(kind: str, root: Path) -> tuple[list[str], bool]:
    """Options of an attention kind, read from its source; whether it takes any."""
    place, _, name = ATTENTION_KINDS.get(kind, kind).rpartition(":")
    file = root / place if place.endswith(".py") else module_file(place, root)
    return constructor_options(file, name) if file else ([], True)


def check_solver_runs(preset: Preset, file: str) -> None:
    """The solvers are compared on runs of the sheet that invert Laplacian landmark matrices."""
    laplacian = [row for row in preset.runs if row.attention_kind == SOLVER_KIND]
    known = [row.run_id for row in laplacian if not row.options.get("separate_landmarks")]
    for name in preset.benchmarks.solver.runs:
        if name not in known:
            raise UserError(
                f"{file}: key 'benchmarks.solver.runs': {name!r} is no run with {SOLVER_KIND} attention and symmetric "
                "landmark matrices",
                allowed(known, name),
            )


def check_looked_into(preset: Preset, sheet: str) -> None:
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


def check_compared(preset: Preset, sheet: str) -> None:
    """No training feeds a target twice; one with options has, in tables 2 to 4, one without to be compared with."""
    for target in sorted({target for row in preset.runs for target in row.feeds}):
        rows = preset.runs_that_feed(target)
        references = {_experiment(row) for row in rows if not compared_options(row.options_text)}
        seen: dict[tuple[object, ...], RunRow] = {}
        for row in rows:
            options = row.pyramid_options | row.attention_options if target in _BY_KIND else row.options
            other = seen.setdefault((*_experiment(row), options_text(options)), row)
            if other is not row:
                but = ", but for its recipe's options" if other.options != row.options else ""
                raise UserError(
                    f"{sheet}: runs {other.run_id!r} and {row.run_id!r} are the same training{but}, and both feed "
                    f"{target}",
                    "let only one of them feed it, or give them different seeds",
                )
            if target in _COMPARED and _experiment(row) not in references:
                raise UserError(
                    f"{sheet}, run {row.run_id!r}: it feeds {target}, where it is compared with the same run "
                    f"without options, and none of {row.model} with seed {row.seed} feeds that",
                    f"add {target} to the feeds of that run, or add the run",
                )


def _experiment(row: RunRow) -> tuple[object, ...]:
    return row.dataset, row.recipe, row.model, row.attention_kind, row.seed


def with_targets(preset: Preset, given: Collection[str], file: str, sheet: str) -> Preset:
    """The preset with the figures and tables that it lists, if `given` has their key, else all that something feeds.

    UserError where one that is listed does not exist or has nothing to show.
    """
    for key, known in _SHOWN.items():  # figures first: the ledger's table reads what they are made of
        fed = [name for name, target in known.items() if target.inputs(preset)]
        if key not in given:
            preset = preset.model_copy(update={key: tuple(fed)})
        for name in getattr(preset, key):
            if name not in known:
                raise UserError(f"{file}: key {key!r}: unknown target {name!r}", allowed(list(known), name))
            if name not in fed:
                raise UserError(
                    f"{file}: key {key!r}: the preset has nothing to show in {name}",
                    f"let a run of {sheet} feed it, add models, or list the {key} without it",
                )
    for name, analysis in (("fig1", "attention_distance"), ("fig7", "injectivity")):
        if name in preset.figures:
            try:
                preset.vision_model(analysis)
            except UserError as error:
                raise UserError(error.what, f"{error.remedy}; or list the figures without {name}") from None
    return preset


def check_sources(preset: Preset, file: str) -> None:
    """What is called embedded is known; folders are looked at when they are needed."""
    wanted = {name: config.source for name, config in preset.datasets.items()}
    wanted |= {model.id: model.source for model in preset.analysed_models.values()}
    for name, source in wanted.items():
        if source == "embedded" and name not in embedded.sources():
            raise UserError(f"{file}: nothing embedded is called {name!r}", allowed(list(embedded.sources()), name))


def _names_bound_in(file: Path) -> set[str]:
    """Classes that a Python file defines or imports, read without running it; UserError naming a syntax error."""
    try:
        tree = ast.parse(read_text(file, file.name))
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
            f"{allowed(list(ATTENTION_KINDS), kind)}, or path/to/file.py:Class",
        )
