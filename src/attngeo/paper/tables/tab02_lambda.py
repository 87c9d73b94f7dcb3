"""Table 2: the width lambda of the Laplacian kernel; the paper's ablation beside ours."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attngeo.paper.ablations import (
    DIFFERENCE_RULE,
    FORMATS,
    caption_end,
    columns,
    compare,
    read_ablation,
    unlike_sentence,
    with_published,
)
from attngeo.paper.render import Tabulated
from attngeo.paper.results import read_published, rows_of
from attngeo.run_options import options_text

LAMBDA = 4.0  # the layers' default, which is the paper's


def tabulate(inputs: Sequence[Path]) -> Tabulated:
    """Tabulate runs' final.json under the published rows."""
    finals = read_ablation(inputs, "tab2")
    groups = compare(finals, "tab2")
    for group in groups:
        others = {key: value for key, value in group["options"].items() if key != "lambda_"}
        group |= {"lambda": float(group["options"].get("lambda_", LAMBDA)), "others": options_text(others) or None}
    groups.sort(key=lambda g: (g["dataset"], g["recipe"], g["model"], g["others"] or "", g["lambda"]))
    published = _published()
    ours = {"lambda": [g["lambda"] for g in groups], "other options": [g["others"] for g in groups]} | columns(groups)
    caption = (
        "Ablation of lambda in exp(-||q - k||_1 / lambda), top-1 accuracy on the validation set. kind: paper = as "
        f"published (neither n nor spread reported; difference to its lambda = {LAMBDA:g}), ours = measured by this "
        f"project on other data at another scale: compare the order, not the numbers. {DIFFERENCE_RULE}"
        f"{_conclusion(groups, published)}{unlike_sentence(groups)}{caption_end(inputs, finals)}"
    )
    return Tabulated(
        with_published(ours, published), caption, "lambda", FORMATS | {"lambda": "g"}, {"source": "3.5cm"}, long=True
    )


def _published() -> list[dict[str, Any]]:
    rows = rows_of(read_published("lambda_ablation.csv"))
    (reference,) = (row["top1_pct"] for row in rows if row["lambda"] == LAMBDA)
    return [
        {
            "lambda": row["lambda"],
            "data set": "ImageNet-1K",
            "model": f"LaplacianFormer-{row['size']}",
            "top-1 (%)": row["top1_pct"],
            "difference": round(row["top1_pct"] - reference, 2) if row["lambda"] != LAMBDA else math.nan,
            "kind": row["kind"],
            "source": row["source"],
        }
        for row in rows
    ]


def _conclusion(groups: Sequence[Mapping[str, Any]], published: Sequence[Mapping[str, Any]]) -> str:
    """Where accuracy is largest, and whether that differs from the reference by more than seeds do."""
    theirs = max(published, key=lambda row: float(row["top-1 (%)"]))["lambda"]
    sentences = [f"Largest at lambda = {theirs:g} in the paper"]
    plain = [group for group in groups if not group["others"]]
    for place in dict.fromkeys((g["dataset"], g["recipe"], g["model"]) for g in plain):
        here = [g for g in plain if (g["dataset"], g["recipe"], g["model"]) == place]
        if len(here) < 2:
            continue
        best = max(here, key=lambda g: (float(g["mean"]), g["is_reference"]))
        apart = [g for g in here if not g["is_reference"] and (g["low"] > 0 or g["high"] < 0)]
        differing = ", ".join(f"{g['lambda']:g}" for g in apart)
        told = f"different from {LAMBDA:g} by its interval: {differing or 'none'}"
        sentences.append(f"at {best['lambda']:g} for {place[2]} on {place[0]} ({place[1]}; {told})")
    return "; ".join(sentences) + ". "
