"""Table 3: the solver of the landmark matrix, its start, iterations and gradient; the paper's ablation beside ours."""

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
from attngeo.run_options import OptionValue, options_text

# What the layers do unless an option says otherwise, and the matrix products of an iteration.
SOLVER = "newton_schulz"
DEFAULTS: dict[str, dict[str, OptionValue]] = {
    "newton_schulz": {"start": "paper", "iterations": 20, "backward": "implicit"},
    "conjugate_gradient": {"iterations": 40, "backward": "implicit"},
    "cholesky": {},
}
PRODUCTS = {"newton_schulz": 2, "conjugate_gradient": 1}
PRODUCTS_COMPARED = 40
CONJUGATE_GRADIENT = "conjugate_gradient"
_PUBLISHED = {"conjugate gradient": "conjugate_gradient", "Newton-Schulz": "newton_schulz"}
_SETTINGS = ("start", "iterations", "backward")


def tabulate(inputs: Sequence[Path]) -> Tabulated:
    """Tabulate runs' final.json under the published rows."""
    finals = read_ablation(inputs, "tab3")
    groups = compare(finals, "tab3")
    for group in groups:
        group |= _solver(group["options"])
    order = list(DEFAULTS)
    groups.sort(key=lambda g: (g["dataset"], g["recipe"], g["model"], not g["is_reference"], order.index(g["solver"])))
    ours = {
        "solver": [g["solver"] for g in groups],
        "start": [g["start"] for g in groups],
        "iterations": [g["iterations"] for g in groups],
        "products": [g["products"] for g in groups],
        "gradient": [g["backward"] for g in groups],
        "other options": [g["others"] for g in groups],
    } | columns(groups)
    published = _published()
    caption = (
        "Ablation of what stands for W^+ in landmark attention, top-1 accuracy on the validation set. All solvers "
        "invert the same W + 0.01 I; products: matrix products, two an iteration of Newton-Schulz, one of conjugate "
        "gradient (on all columns of the identity at once); Cholesky is direct. gradient: that of a converged inverse "
        "(implicit) or of the iterations taken (loop). kind: paper = as published (neither settings, n nor spread "
        "reported; difference to its Newton-Schulz), ours = measured by this project on other data at another scale: "
        f"compare the order, not the numbers. {DIFFERENCE_RULE}{_conclusion(groups, published)}"
        f"{unlike_sentence(groups)}{caption_end(inputs, finals)}"
    )
    return Tabulated(
        with_published(ours, published), caption, "solver-ablation", FORMATS, {"source": "3.5cm"}, long=True
    )


def _solver(options: Mapping[str, OptionValue]) -> dict[str, Any]:
    """The solver of a run and its settings, those by default included; what else its options change."""
    solver = str(options.get("solver", SOLVER))
    defaults = DEFAULTS[solver]
    settings: dict[str, Any] = {name: options.get(name, defaults.get(name)) for name in _SETTINGS}
    others = {key: value for key, value in options.items() if key not in ("solver", *_SETTINGS)}
    products = PRODUCTS[solver] * int(settings["iterations"]) if solver in PRODUCTS else None
    return {"solver": solver, **settings, "products": products, "others": options_text(others) or None}


def _conclusion(groups: Sequence[Mapping[str, Any]], published: Sequence[Mapping[str, Any]]) -> str:
    """Conjugate gradient against Newton-Schulz at equal matrix products, in the paper and here."""
    theirs = [row for row in published if row["solver"] == CONJUGATE_GRADIENT]
    differences = (f"{row['difference']:+.1f} ({row['model']})" for row in theirs)
    parts = [f"in the paper {', '.join(differences)}"]
    for group in groups:
        alike = group["solver"] == CONJUGATE_GRADIENT and not group["others"] and group["products"] == PRODUCTS_COMPARED
        if alike:
            known = math.isfinite(group["low"])
            interval = f" [{group['low']:+.1f}, {group['high']:+.1f}]" if known else ""
            place = f"{group['model']} on {group['dataset']}, {group['recipe']}"
            parts.append(f"here {group['difference']:+.1f}{interval} ({place})")
    return f"Conjugate gradient minus Newton-Schulz, ours at {PRODUCTS_COMPARED} products: {'; '.join(parts)}. "


def _published() -> list[dict[str, Any]]:
    rows = [row | {"solver": _PUBLISHED[row["solver"]]} for row in rows_of(read_published("solver_ablation.csv"))]
    reference = {row["size"]: row["top1_pct"] for row in rows if row["solver"] == SOLVER}
    return [
        {
            "solver": row["solver"],
            "data set": "ImageNet-1K",
            "model": f"LaplacianFormer-{row['size']}",
            "top-1 (%)": row["top1_pct"],
            "difference": math.nan if row["solver"] == SOLVER else round(row["top1_pct"] - reference[row["size"]], 2),
            "kind": row["kind"],
            "source": row["source"],
        }
        for row in rows
    ]
