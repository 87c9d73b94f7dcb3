"""Runs that differ from a reference in their options, compared with it seed by seed."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attngeo.errors import UserError
from attngeo.paper.intervals import mean_and_interval
from attngeo.paper.results import (
    has_diverged,
    made_from,
    preset_name,
    read_finals,
    refuse_twins,
    require_inputs,
    rows_of,
    size_of,
    span,
)
from attngeo.run_options import OptionValue, options_text, parse_options

if TYPE_CHECKING:
    import pandas as pd

BASE_KIND = "laplacian"
MATCHED = 0.05  # how far numbers of parameters may lie apart
# What happens where a number is not finite is no part of what is compared.
_NOT_COMPARED = ("recipe.non_finite",)
_EXPERIMENT = ("dataset", "recipe", "model", "attention")
_GROUP = (*_EXPERIMENT, "compared")
FORMATS = {
    "top-1 (%)": ".1f",
    "std": ".1f",
    "difference": "+.1f",
    "low": "+.1f",
    "high": "+.1f",
    "residual": ".1e",
    "params (M)": ".2f",
}
DIFFERENCE_RULE = (
    "difference: top-1 minus the reference's in points, paired by seed (same data set, recipe and model, no options), "
    "mean over the seeds; low and high: its 95 % Student interval over seeds, which one seed does not have. residual: "
    "largest ||I - P X||_F of any solver at any time, and converged, in how many runs it stayed within 0.01. diverged: "
    "in how many runs no step of the last epoch, or not the validation loss, was finite; such a run counts with the "
    "accuracy that its weights have. steps left out: non-finite ones, at most in a run. "
)


def read_ablation(inputs: Iterable[Path], target: str) -> "pd.DataFrame":
    """The final.json of the runs that feed an ablation table, a row a run, with what is compared by its text.

    UserError where none feeds it, and where two runs that differ in nothing share a seed.
    """
    paths = list(inputs)
    require_inputs(paths, target, "run")
    finals = read_finals(paths)
    finals["compared"] = [options_text(compared_options(str(text))) for text in finals["options"]]
    for name, missing in (("skipped_steps", 0), ("solver_residual_max", None), ("solver_converged", None)):
        if name not in finals:
            finals[name] = missing
    refuse_twins(finals, [*_GROUP, "seed"], target)
    return finals


def compared_options(text: str) -> dict[str, OptionValue]:
    """The options of a run that make it another experiment."""
    return {key: value for key, value in parse_options(text).items() if key not in _NOT_COMPARED}


def compare(finals: "pd.DataFrame", target: str) -> list[dict[str, Any]]:
    """Statistics of every group of runs over its seeds, the references first, each as a dictionary.

    `by_seed` holds the differences that `difference`, `low` and `high` are of.

    A run with options is compared with the same model without them; a model without options, if it is of another kind
    and the table has it, with the Laplacian one of its size. What is compared with nothing is a reference. UserError
    names the run that has no reference of its seed.
    """
    groups = []
    for key, group in finals.groupby(list(_GROUP), sort=True):
        labels = dict(zip(_GROUP, key, strict=True))
        reference = _reference_of(finals, group, labels, target)
        statistics = _statistics(group, reference)
        options = compared_options(str(labels["compared"]))
        groups.append(labels | {"options": options, "is_reference": reference is None} | statistics)
    return sorted(groups, key=lambda g: (g["dataset"], g["recipe"], g["model"], bool(g["options"])))


def columns(groups: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The columns that every ablation table ends with, from the groups of `compare`."""
    return {
        "data set": [g["dataset"] for g in groups],
        "recipe": [g["recipe"] for g in groups],
        "model": [g["model"] for g in groups],
        "top-1 (%)": [g["mean"] for g in groups],
        "std": [g["std"] for g in groups],
        "n": [g["n"] for g in groups],
        "difference": [g["difference"] for g in groups],
        "low": [g["low"] for g in groups],
        "high": [g["high"] for g in groups],
        "residual": [g["residual"] for g in groups],
        "converged": [g["converged"] for g in groups],
        "diverged": [f"{g['diverged']} of {g['n']}" for g in groups],
        "steps left out": [g["skipped_steps"] for g in groups],
        "params (M)": [g["parameters"] / 1e6 for g in groups],
        "kind": ["ours"] * len(groups),
        "source": ["this project"] * len(groups),
    }


def with_published(ours: Mapping[str, list[Any]], published: Sequence[Mapping[str, Any]]) -> "pd.DataFrame":
    """Published rows above ours; a cell that a publication does not report is missing."""
    import pandas as pd

    above = pd.DataFrame([{name: row.get(name) for name in ours} for row in published], columns=list(ours))
    frame = pd.concat([above.astype(object), pd.DataFrame(ours).astype(object)], ignore_index=True)
    numeric = [name for name in FORMATS if name in frame]
    frame[numeric] = frame[numeric].astype(float)
    others = [name for name in ours if name not in numeric]
    frame[others] = frame[others].where(frame[others].notna(), None)
    return frame


def caption_end(inputs: Sequence[Path], finals: "pd.DataFrame") -> str:
    """Caption sentences on seeds, on runs that diverged and on where everything comes from."""
    seeds = finals.groupby(list(_GROUP))["seed"].nunique()
    one = "" if (seeds > 1).any() else " With one seed there is no interval: a difference may be the seed's."
    diverged = [str(row["run_id"]) for row in rows_of(finals) if has_diverged(row)]
    lost = f" Diverged: {', '.join(diverged)}." if diverged else ""
    return f"n = {span(int(n) for n in seeds)} seeds.{one}{lost} {made_from(preset_name(inputs), finals)}"


def unlike_sentence(groups: Sequence[Mapping[str, Any]]) -> str:
    """Caption sentence on groups whose solver did not converge, and on those with other numbers of parameters."""
    names = {id(group): group["compared"] or f"{group['attention']}, no options" for group in groups}
    unsolved = [names[id(g)] for g in groups if g["converged"] and not g["converged"].startswith(f"{g['n']} of")]
    sizes = [group["parameters"] for group in groups if group["is_reference"]]
    larger = [
        f"{names[id(g)]} ({g['parameters'] / sizes[0] - 1:+.1%})"
        for g in groups
        if sizes and abs(g["parameters"] / sizes[0] - 1) > MATCHED
    ]
    text = (
        f"Solver not converged in every run, so that a difference may be its: {'; '.join(unsolved)}. "
        if unsolved
        else ""
    )
    return text + (f"More than {MATCHED:.0%} off in parameters: {'; '.join(larger)}. " if larger else "")


def _reference_of(
    finals: "pd.DataFrame", group: "pd.DataFrame", labels: Mapping[str, Any], target: str
) -> "pd.DataFrame | None":
    """The reference's runs of the group's seeds, in the group's order; None where the group is a reference."""
    wanted = {name: labels[name] for name in _EXPERIMENT}
    if not labels["compared"]:
        base = f"laplacianformer_{size_of(str(labels['model']))}"
        wanted |= {"model": base, "attention": BASE_KIND}
    reference = finals[finals["compared"] == ""]
    for name, value in wanted.items():
        reference = reference[reference[name] == value]
    if not labels["compared"] and (labels["attention"] == BASE_KIND or reference.empty):
        return None
    by_seed = reference.set_index("seed")
    for run in rows_of(group):
        if run["seed"] not in by_seed.index:
            raise UserError(
                f"{target}: run {run['run_id']} has no reference: no run of {wanted['model']} with "
                f"{wanted['attention']} attention on {wanted['dataset']}, recipe {wanted['recipe']}, seed "
                f"{run['seed']}, without options feeds {target}",
                f"add {target} to the feeds of that run in the preset's runs.tsv, or add the run",
            )
    return by_seed.loc[list(group["seed"])]


def _statistics(group: "pd.DataFrame", reference: "pd.DataFrame | None") -> dict[str, Any]:
    values = [float(value) for value in group["accuracy"]]
    mean, std, _ = mean_and_interval(values)
    difference = low = high = math.nan
    by_seed: dict[int, float] = {}
    if reference is not None:
        pairs = zip(group["seed"], values, reference["accuracy"], strict=True)
        by_seed = {int(seed): value - float(other) for seed, value, other in pairs}
        difference, _, half = mean_and_interval(list(by_seed.values()))
        low, high = difference - half, difference + half
    # A model without a solver says None to both; one whose residual is NaN has a solver, which did not converge.
    has_solver = group["solver_converged"].notna()
    residuals = [float(value) for value in group["solver_residual_max"][has_solver]]
    solved = [bool(value) for value in group["solver_converged"][has_solver]]
    return {
        "mean": mean,
        "std": std,
        "n": len(values),
        "difference": difference,
        "low": low,
        "high": high,
        "by_seed": by_seed,
        "residual": math.nan if any(map(math.isnan, residuals)) else max(residuals, default=math.nan),
        "converged": f"{sum(solved)} of {len(solved)}" if solved else None,
        "diverged": sum(has_diverged(run) for run in rows_of(group)),
        "skipped_steps": int(group["skipped_steps"].max()),
        "parameters": float(group["parameters"].iloc[0]),
    }
