"""Table 1: image classification; what the paper and the public baselines report beside what this project measured."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attngeo.paper.render import Tabulated
from attngeo.paper.results import (
    GROUP,
    made_from,
    non_finite_sentence,
    preset_name,
    read_published,
    read_seeds,
    rows_of,
    span,
    summarise,
)

if TYPE_CHECKING:
    import pandas as pd

KIND_ORDER = {"paper": 0, "derived": 1, "ours": 2}


def tabulate(inputs: Sequence[Path]) -> Tabulated:
    """Tabulate runs' final.json under the published rows; the column `kind` says whose every number is."""
    import pandas as pd

    finals = read_seeds(inputs, "tab1")
    published = read_published("imagenet.csv").assign(dataset="ImageNet-1K")
    published[["n", "std"]] = math.nan
    published[["recipe", "evaluated"]] = None
    ours = summarise(finals, GROUP, "accuracy").rename(columns={"mean": "top1_pct"})
    costs = finals.groupby(list(GROUP))[["parameters", "gmac", "gmac_with_apart"]].first().reset_index()
    evaluated = finals.groupby(list(GROUP))["n_eval"].agg(_count_or_span).rename("evaluated").reset_index()
    for more in (costs, evaluated):
        ours = ours.merge(more, on=list(GROUP), validate="one_to_one")
    ours = ours.assign(kind="ours", source="this project")
    ours["parameters_m"] = ours["parameters"] / 1e6
    rows = pd.concat([published, ours], ignore_index=True)
    rows["order"] = rows["kind"].map(KIND_ORDER)
    rows = rows.sort_values(["order"], kind="stable", ignore_index=True)
    table = pd.DataFrame(
        {
            "data set": rows["dataset"],
            "recipe": rows["recipe"],
            "model": rows["model"],
            "attention": rows["attention"],
            "params (M)": rows["parameters_m"].astype(float),
            "MACs (G)": rows["gmac"].astype(float),
            "MACs, all (G)": rows["gmac_with_apart"].astype(float),
            "top-1 (%)": rows["top1_pct"].astype(float),
            "std": rows["std"].astype(float),
            "n": [None if n is None or n != n else int(n) for n in rows["n"]],
            "images": rows["evaluated"],
            "kind": rows["kind"],
            "source": rows["source"],
        }
    )
    for column in ("recipe", "n", "images"):
        table[column] = table[column].astype(object).where(table[column].notna(), None)
    caption = (
        "Image classification, top-1 accuracy on the validation set. kind: paper = as published (neither "
        "n nor spread reported), derived = counted by this project from its reading of the architecture, ours = "
        f"measured by this project: mean, sample standard deviation and n = {span(ours['n'])} over seeds, each on so "
        "many images of the validation set (images). MACs (ours) count "
        "convolutions, linear layers and products with tokens; the next column adds distances, the solver, Nystrom "
        "statistics and metric inversions; the published counting rule is unknown. The data sets and the scale differ "
        "from ImageNet's: compare within one data set only. Ours differ in more than the kernel: the Laplacian kind "
        "whitens its rows and adds a local convolution of its values, softmax and Gaussian have neither; the "
        "Riemannian one also changes the feed-forward and has more parameters. "
        f"{_rates_sentence(finals)} "
        f"{_replication_sentence()} "
        f"{made_from(preset_name(inputs), finals)}" + non_finite_sentence(int(ours["non_finite"].sum()))
    )
    return Tabulated(
        table,
        caption,
        "classification",
        formats={
            "params (M)": ".2f",
            "MACs (G)": "#.3g",
            "MACs, all (G)": "#.3g",
            "top-1 (%)": ".1f",
            "std": ".1f",
        },
        widths={"source": "4.2cm"},
        long=True,
    )


def _count_or_span(counts: "pd.Series[int]") -> int | str:
    """The count that all runs share, else the range of theirs."""
    distinct = set(counts)
    return int(distinct.pop()) if len(distinct) == 1 else span(distinct)


def _rates_sentence(finals: "pd.DataFrame") -> str:
    parts = []
    for dataset, group in finals.groupby("dataset", sort=True):
        rates = [f"{values['lr']:g}" for values in group["recipe_values"]]
        by_kind = sorted(set(zip(group["attention"], rates, strict=True)))
        one_for_all = f"{rates[0]} for every kind"
        parts.append(f"{dataset} {one_for_all if len(set(rates)) == 1 else ', '.join(map(' '.join, by_kind))}")
    return f"Peak learning rates: {'; '.join(parts)} (the recipes say how they were chosen)."


def _replication_sentence() -> str:
    reports = read_published("replication.csv")
    parts = []
    for dataset, group in reports.groupby("dataset", sort=True):
        accuracy = {row["attention"]: _range(row["top1_low_pct"], row["top1_high_pct"]) for row in rows_of(group)}
        parts.append(f"{dataset}: softmax {accuracy['softmax']}, Laplacian {accuracy['laplacian']}")
    return (
        f"An independent public replication reported softmax ahead of Laplacian ({'; '.join(parts)}); the paper's own "
        "rows hold no softmax model."
    )


def _range(low: float, high: float) -> str:
    return f"{low:.1f} to {high:.1f}" if high > low else f"{low:.1f}"
