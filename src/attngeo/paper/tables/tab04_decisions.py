"""Table 4: decisions that no source settles, among them those that may explain a public replication's failure."""

import math
from collections.abc import Iterable, Mapping, Sequence
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
    unlike_sentence,
    with_published,
)
from attngeo.paper.intervals import mean_and_interval
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
    "no 1/N scale": {"scale_start": "one", "learn_scale": False},
    INITIALISATION: {"init": "default"},
}
TOGETHER = "all five together"
ALL_BUT = "all but "  # a choice that is left out
EXPLAINS_POINTS = 1.0
EXPLAINS_SEEDS = 3
EXPLAINS, NOT, UNDECIDED, UNDERPOWERED = "yes", "no", "undecided", "too few seeds"
_ROLES = ("reference", "other kind", "replication", "replication, all", "replication, all but one", "further")
_FORMATS = FORMATS | {"gap change": "+.1f", "gap ±": ".1f", "brings back": "+.1f", "back ±": ".1f", "share (%)": ".0f"}


def tabulate(inputs: Sequence[Path]) -> Tabulated:
    """Tabulate runs' final.json under the reports of the replication."""
    finals = read_ablation(inputs, "tab4")
    groups = _compared(finals)
    names = list(CHOICES)
    groups.sort(
        key=lambda g: (
            *(g["dataset"], g["recipe"], _ROLES.index(g["role"])),
            names.index(name) if (name := (g["choice"] or "").removeprefix(ALL_BUT)) in names else len(names),
        )
    )
    ours = {
        "choice": [g["choice"] for g in groups],
        "role": [g["role"] for g in groups],
        "attention": [g["attention"] for g in groups],
        "explains": [g["explains"] for g in groups],
        "gap change": [g["gap"] for g in groups],
        "gap ±": [g["gap_half"] for g in groups],
        "share (%)": [g["share"] for g in groups],
        "brings back": [g["back"] for g in groups],
        "back ±": [g["back_half"] for g in groups],
    } | columns(groups)
    caption = (
        "Decisions of the architecture that no source settles, each changed alone against the reference, which is the "
        "Laplacian model with this project's defaults. role: replication = a choice that a failed public replication "
        "is reported to have made (its numbers are the first rows, kind public, without n and spread), further = "
        "others, other kind = another attention kind; one with a choice is the control of that choice, compared with "
        "its own kind's defaults. gap change: what failed is a comparison with softmax, so it is the difference minus "
        "what the same choice changes in softmax, where that is a choice of the whole model (the initialisation) and "
        "the table has the control; plus and minus half its 95 % Student interval. explains: a choice explains part of "
        f"the failure if the gap falls by more than {EXPLAINS_POINTS:g} point on average and by more than 0 with the "
        f"whole interval, with at least {EXPLAINS_SEEDS} seeds; it does not (no) if the whole interval says less than "
        f"{EXPLAINS_POINTS:g} point; else it is undecided. share: gap change in per cent of that of {TOGETHER}; shares "
        f"need not add up to 100, since choices interact. brings back: the gap change of {TOGETHER} but one minus that "
        f"of {TOGETHER}. Changed when study's first runs had been seen: the gap change is judged, where it had been "
        "the difference, that is Laplacian's own accuracy; undecided was added, where all that was not yes had been "
        "no; no 1/N scale keeps a scale of 1, where it had learnt one from 1; and each choice is left out of the five. "
        "Statistics of the batch are at evaluation those of the images evaluated at once. Five iterations have the "
        "gradient of the exact inverse unless backward=loop is named. "
        f"{DIFFERENCE_RULE}{unlike_sentence(groups)}{_conclusion(groups)}{caption_end(inputs, finals)}"
    )
    frame = with_published(ours, _published())
    numeric = [name for name in _FORMATS if name in frame]
    frame[numeric] = frame[numeric].astype(float)
    return Tabulated(
        frame,
        caption,
        "decisions",
        _FORMATS,
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
        group |= _judged(group, groups)
    for group in groups:
        total = _together(group, groups)
        group["share"] = _share(group, total)
        group["back"], group["back_half"] = _brings_back(group, total)
    return groups


def _described(group: Mapping[str, Any]) -> dict[str, Any]:
    """The words for a group of runs, and its role."""
    other = group["attention"] != BASE_KIND
    if not group["options"]:
        role = "reference" if group["is_reference"] else "other kind"
        return {"choice": None if other else "this project's defaults", "role": role}
    roles = {name: "replication" for name in CHOICES} | {TOGETHER: "replication, all"}
    named = CHOICES | {TOGETHER: _options_of(CHOICES)}
    for left_out in CHOICES:
        roles[ALL_BUT + left_out] = "replication, all but one"
        named[ALL_BUT + left_out] = _options_of([name for name in CHOICES if name != left_out])
    name = next((name for name, changes in named.items() if changes == group["options"]), "")
    return {"choice": name or group["compared"], "role": "other kind" if other else roles.get(name, "further")}


def _options_of(choices: Iterable[str]) -> dict[str, OptionValue]:
    return {key: value for name in choices for key, value in CHOICES[name].items()}


def _judged(group: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How the gap to softmax changes, seed by seed and on average, and whether that explains part of the failure."""
    if not group["options"] or group["role"] == "other kind":
        return {"gap": None, "gap_half": None, "gap_by_seed": {}, "explains": None}
    shared = {key: value for key, value in group["options"].items() if key in CHOICES[INITIALISATION]}
    control = next((g for g in _softmax_beside(group, groups) if shared and g["options"] == shared), None)
    by_seed = group["by_seed"]
    if control is not None:
        theirs = control["by_seed"]
        by_seed = {seed: value - theirs[seed] for seed, value in by_seed.items() if seed in theirs}
    gap, half = _mean(by_seed)
    return {"gap": gap, "gap_half": half, "gap_by_seed": by_seed, "explains": _explains(by_seed)}


def _mean(by_seed: Mapping[int, float]) -> tuple[float, float]:
    mean, _, half = mean_and_interval(list(by_seed.values())) if by_seed else (math.nan, math.nan, math.nan)
    return mean, half


def _explains(by_seed: Mapping[int, float]) -> str:
    """The rule of the caption."""
    if len(by_seed) < EXPLAINS_SEEDS:
        return UNDERPOWERED
    gap, half = _mean(by_seed)
    if gap < -EXPLAINS_POINTS and gap + half < 0:
        return EXPLAINS
    return NOT if gap - half > -EXPLAINS_POINTS else UNDECIDED


def _share(group: Mapping[str, Any], total: Mapping[str, Any] | None) -> float | None:
    """The gap's change in per cent of that of all choices together; None where that is no fall."""
    if total is None or group["gap"] is None or not total["gap"] < 0:
        return None
    return float(100 * group["gap"] / total["gap"])


def _brings_back(group: Mapping[str, Any], total: Mapping[str, Any] | None) -> tuple[float | None, float | None]:
    """By how much the gap is better without one of the choices than with all of them."""
    if total is None or group["role"] != "replication, all but one":
        return None, None
    theirs = total["gap_by_seed"]
    return _mean({seed: value - theirs[seed] for seed, value in group["gap_by_seed"].items() if seed in theirs})


def _softmax_beside(group: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The softmax groups of the same data set, recipe and size."""
    place = (group["dataset"], group["recipe"], size_of(group["model"]))
    return [
        g for g in groups if g["attention"] == "softmax" and (g["dataset"], g["recipe"], size_of(g["model"])) == place
    ]


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
    text = f"{place}: {TOGETHER} change the gap to softmax by {_change(total['gap'], total['gap_half'])} points, "
    text += f"Laplacian's own top-1 by {_change(*_mean(total['by_seed']))} (n = {len(total['gap_by_seed'])})"
    if total["explains"] == UNDERPOWERED:
        text += ": too few seeds for the rule"
    elif total["explains"] == NOT:
        text += ": by the rule no failure, so that the replication's is not reproduced here"
    elif total["explains"] == UNDECIDED:
        text += ", which the rule leaves undecided"
    else:
        guilty = sorted((g for g in choices if g["explains"] == EXPLAINS), key=lambda g: float(g["gap"]))
        parts = [f"{g['choice']} ({g['share']:.0f} % of it alone)" for g in guilty]
        innocent = [g["choice"] for g in choices if g["explains"] == NOT]
        unknown = [name for name in CHOICES if name not in [g["choice"] for g in guilty] + innocent]
        text += ". Alone, a part of it is explained by " if parts else ". Alone, "
        text += ", ".join(parts) or "no choice is shown to explain a part of it"
        text += f"; ruled out: {', '.join(innocent)}" if innocent else ""
        text += f"; undecided: {', '.join(unknown)}" if unknown else ""
    return f"{text}. {_left_out_sentence(total, groups)}{_gap_sentence(total, groups)}"


def _left_out_sentence(total: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> str:
    """What each choice's absence from all of them brings back, the largest first."""
    left_out = [g for g in groups if g["role"] == "replication, all but one" and _together(g, groups) is total]
    left_out.sort(key=lambda g: -float(g["back"]))
    parts = [f"{g['choice'].removeprefix(ALL_BUT)} {_change(g['back'], g['back_half'])}" for g in left_out]
    if not parts:
        return ""
    needed = [
        g["choice"].removeprefix(ALL_BUT)
        for g in left_out
        if len(g["gap_by_seed"]) >= EXPLAINS_SEEDS and g["back"] > EXPLAINS_POINTS and g["back"] > g["back_half"]
    ]
    told = f"; needed for it, by the same rule: {', '.join(needed) or 'none'}"
    return f"Left out of all five, a choice brings back, in points: {', '.join(parts)}{told}. "


def _change(mean: float, half: float) -> str:
    """A change in points with half its 95 % interval, where it has one."""
    return f"{mean:+.1f}" + (f" (± {half:.1f})" if math.isfinite(half) else "")


def _gap_sentence(total: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> str:
    """How far the Laplacian kind lies from softmax, with the defaults, with all choices, and in the replication."""
    softmax = _softmax_beside(total, groups)
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
