"""Table 4: decisions that no source settles, among them those that may explain a public replication's failure."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attngeo.paper.ablations import (
    BASE_KIND,
    DIFFERENCE_RULE,
    FORMATS,
    caption_end,
    columns,
    compare,
    read_ablation,
    with_published,
)
from attngeo.paper.render import Tabulated
from attngeo.paper.results import read_published, rows_of, size_of
from attngeo.run_options import OptionValue

if TYPE_CHECKING:
    import pandas as pd

INITIALISATION = "default initialisation"
# What the failed replication did, as far as readers of it report, in the words of the layers' options.
CHOICES: dict[str, dict[str, OptionValue]] = {
    "5 solver iterations": {"iterations": 5},
    "separate queries, keys and landmarks": {"shared_query_key": False, "separate_landmarks": True},
    "statistics of the batch": {"statistics": "batch"},
    "no 1/N scale": {"scale_start": "one"},
    INITIALISATION: {"init": "default"},
}
TOGETHER = "all five together"
EXPLAINS_POINTS = 1.0
EXPLAINS_SEEDS = 3
EXPLAINS, NOT, UNDECIDED, UNDERPOWERED = "yes", "no", "undecided", "too few seeds"
_ROLES = ("reference", "other kind", "replication", "replication, all", "further")


def tabulate(inputs: Sequence[Path]) -> Tabulated:
    """Tabulate runs' final.json under the reports of the replication."""
    finals = read_ablation(inputs, "tab4")
    groups = _compared(finals)
    names = list(CHOICES)
    groups.sort(
        key=lambda g: (
            *(g["dataset"], g["recipe"], _ROLES.index(g["role"])),
            names.index(g["choice"]) if g["choice"] in names else len(names),
        )
    )
    ours = {
        "choice": [g["choice"] for g in groups],
        "role": [g["role"] for g in groups],
        "attention": [g["attention"] for g in groups],
        "explains": [g["explains"] for g in groups],
        "share (%)": [g["share"] for g in groups],
    } | columns(groups)
    caption = (
        "Decisions of the architecture that no source settles, each changed alone against the reference, which is the "
        "Laplacian model with this project's defaults. role: replication = a choice that a failed public replication "
        "is reported to have made (its numbers are the first rows, kind public, without n and spread), further = "
        "others, other kind = another attention kind; one with a choice is the control of that choice, compared with "
        "its own kind's defaults. explains: a choice explains part of the failure if the mean paired "
        f"drop exceeds {EXPLAINS_POINTS:g} point and its 95 % interval lies above 0, with at least {EXPLAINS_SEEDS} "
        f"seeds; it does not (no) if the whole interval lies below {EXPLAINS_POINTS:g} point; else it is undecided. "
        f"share: the drop in per cent of that of {TOGETHER}; shares need not add up to 100, since choices interact. "
        f"{DIFFERENCE_RULE}{_conclusion(groups)}{caption_end(inputs, finals)}"
    )
    frame = with_published(ours, _published())
    frame["share (%)"] = frame["share (%)"].astype(float)
    return Tabulated(
        frame,
        caption,
        "decisions",
        FORMATS | {"share (%)": ".0f"},
        {"choice": "3.5cm", "source": "3cm"},
        long=True,
    )


def replication_answer(finals: Sequence[Path]) -> str:
    """What runs say to the question what explains the replication's failure; empty where none makes all its choices."""
    return _conclusion(_compared(read_ablation(finals, "tab4"))).strip()


def _compared(finals: "pd.DataFrame") -> list[dict[str, Any]]:
    """The groups of `compare` with their words, roles and shares."""
    groups = compare(finals, "tab4")
    for group in groups:
        group |= _described(group)
    for group in groups:
        group["share"] = _share(group, groups)
    return groups


def _described(group: Mapping[str, Any]) -> dict[str, Any]:
    """The words for a group of runs, its role, and whether it explains part of the failure."""
    other = group["attention"] != BASE_KIND
    if not group["options"]:
        role = "reference" if group["is_reference"] else "other kind"
        return {"choice": None if other else "this project's defaults", "role": role, "explains": None}
    together = {key: value for changes in CHOICES.values() for key, value in changes.items()}
    named = {TOGETHER: together, **CHOICES}
    name = next((name for name, changes in named.items() if changes == group["options"]), "")
    choice = name or group["compared"]
    if other:
        return {"choice": choice, "role": "other kind", "explains": None}
    role = "further" if not name else "replication, all" if name == TOGETHER else "replication"
    return {"choice": choice, "role": role, "explains": _explains(group)}


def _explains(group: Mapping[str, Any]) -> str:
    """The rule of the caption, fixed before the runs."""
    if group["n"] < EXPLAINS_SEEDS:
        return UNDERPOWERED
    if group["difference"] < -EXPLAINS_POINTS and group["high"] < 0:
        return EXPLAINS
    return NOT if group["low"] > -EXPLAINS_POINTS else UNDECIDED


def _share(group: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> float | None:
    """The drop of a choice in per cent of that of all together; None where that is no drop."""
    if group["role"] not in ("replication", "replication, all", "further"):
        return None
    total = _together(group, groups)
    return None if total is None or total["difference"] >= 0 else 100 * group["difference"] / total["difference"]


def _together(group: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    place = [group[name] for name in ("dataset", "recipe", "model")]
    found = (g for g in groups if g["role"] == "replication, all")
    return next((g for g in found if [g[name] for name in ("dataset", "recipe", "model")] == place), None)


def _conclusion(groups: Sequence[Mapping[str, Any]]) -> str:
    """What the numbers say about the failed replication, a sentence a data set, recipe and model."""
    sentences = [_conclusion_of(total, groups) for total in groups if total["role"] == "replication, all"]
    return "".join(sentences)


def _conclusion_of(total: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> str:
    choices = [g for g in groups if g["role"] == "replication" and _together(g, groups) is total]
    place = f"{total['model']} on {total['dataset']} ({total['recipe']})"
    text = f"{place}: {TOGETHER} change top-1 by {total['difference']:+.1f} points"
    if total["n"] < EXPLAINS_SEEDS:
        text += f" with n = {total['n']}, too few seeds for the rule"
    elif total["explains"] == NOT:
        text += ", by the rule no failure: the replication's is not reproduced here"
    elif total["explains"] == UNDECIDED:
        text += f" ({total['low']:+.1f} to {total['high']:+.1f}), which the rule leaves undecided"
    else:
        guilty = sorted((g for g in choices if g["explains"] == EXPLAINS), key=lambda g: float(g["difference"]))
        parts = [f"{g['choice']} ({g['share']:.0f} % of it alone)" for g in guilty]
        innocent = [g["choice"] for g in choices if g["explains"] == NOT]
        unknown = [name for name in CHOICES if name not in [g["choice"] for g in guilty] + innocent]
        text += f"; by the rule this is explained in part by {', '.join(parts) or 'no single choice'}"
        text += f", not by {', '.join(innocent)}" if innocent else ""
        text += f"; not decided: {', '.join(unknown)}" if unknown else ""
    return f"{text}. {_gap_sentence(total, groups)}"


def _gap_sentence(total: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> str:
    """How far the Laplacian kind lies from softmax, with the defaults, with all choices, and in the replication."""
    place = (total["dataset"], total["recipe"], size_of(total["model"]))
    beside = [g for g in groups if (g["dataset"], g["recipe"], size_of(g["model"])) == place]
    softmax = [g for g in beside if g["attention"] == "softmax"]
    plain = next((g for g in softmax if not g["options"]), None)
    if plain is None:
        return ""
    # The choice of the initialisation changes the whole model, so that softmax is compared under it, too.
    control = next((g for g in softmax if g["options"] == CHOICES[INITIALISATION]), None)
    gap = total["mean"] - (control or plain)["mean"]
    whose = f"softmax with the {INITIALISATION}" if control else "softmax with this project's initialisation"
    reports = rows_of(read_published("replication.csv"))
    baseline = {row["dataset"]: row["top1_high_pct"] for row in reports if row["attention"] == "softmax"}
    theirs = []
    for row in reports:
        if row["attention"] == BASE_KIND:
            ends = " to ".join(f"{value - baseline[row['dataset']]:+.1f}" for value in _ends(row))
            theirs.append(f"{ends} on {row['dataset']}")
    return (
        f"Laplacian minus softmax: {-plain['difference']:+.1f} points with the defaults (n = {plain['n']}), {gap:+.1f} "
        f"with {TOGETHER} (n = {total['n']}; {whose}); in the replication {', '.join(theirs)}. "
    )


def _ends(row: Mapping[str, Any]) -> list[float]:
    """The lowest and the highest number of a report, once where they are the same."""
    return sorted({float(row["top1_low_pct"]), float(row["top1_high_pct"])})


def _published() -> list[dict[str, Any]]:
    rows = []
    for row in rows_of(read_published("replication.csv")):
        ends = _ends(row)
        for value, which in zip(ends, ("",) if len(ends) == 1 else (", lowest", ", highest"), strict=True):
            rows.append(
                {
                    "choice": f"as replicated{which}" if row["attention"] == BASE_KIND else None,
                    "role": "replication, all" if row["attention"] == BASE_KIND else "other kind",
                    "attention": row["attention"],
                    "data set": row["dataset"],
                    "top-1 (%)": value,
                    "kind": row["kind"],
                    "source": row["source"],
                }
            )
    return rows
