"""Figure 6: residual of each solver against matrix products, on random, trained and condition-50 matrices."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attngeo.paper import records
from attngeo.paper.render import Drawn
from attngeo.paper.results import listed, preset_name, rows_of
from attngeo.paper.style import Series, legend_below, new_figure, panel_title, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

PANELS = (
    ("random", "random tokens"),
    ("trained", "a trained model's"),
    ("kappa_50", "condition 50"),
)
ITERATIVE = {
    "newton_schulz": Series("Newton-Schulz, the paper's start", "#D55E00", "", "-"),
    "newton_schulz_identity": Series("Newton-Schulz from the identity", "#3DB0A0", "", (0, (4, 1.2, 1, 1.2))),
    "newton_schulz_printed": Series("Newton-Schulz, the start as printed", "#E6B800", "", (0, (1, 1.2))),
    "conjugate_gradient": Series("conjugate gradient", "#0B4F9E", "", (0, (4, 1.5))),
}
DIRECT = {
    "cholesky": Series("Cholesky", "#000000", "", "-"),
    "pinv": Series("pseudo-inverse (SVD)", "#9C9C9C", "", (0, (4, 1.5))),
}
RANGE = (1e-7, 1e3)
COLUMNS = (
    *("matrix", "solver", "products", "iterations", "residual", "lower_quartile", "upper_quartile", "largest"),
    *("n", "landmarks"),
)


@styled
def draw(inputs: Sequence[Path]) -> Drawn:
    """Draw benchmarks/solver.json: a panel a kind of matrices, a line a solver, a band from quartile to quartile."""
    (path,) = inputs
    frame = records.read(path)
    data = _table(frame)
    figure, axes = new_figure(1, len(PANELS), height_to_width=1.3)
    for index, (kind, title) in enumerate(PANELS):
        axis = axes[0][index]
        _draw_panel(axis, data[data["matrix"] == kind])
        panel_title(axis, index, title, len(PANELS))
    axes[0][0].set_ylabel(r"$\|I - P X\|_F$")
    axes[0][1].set_xlabel("matrix products")
    legend_below(figure, axes[0], columns=2)
    caption = (
        "Convergence of the solvers against matrix products (an iteration of Newton-Schulz takes two, of conjugate "
        "gradient on all columns of the identity one; direct solvers are horizontal lines). All invert the same P = "
        f"W + {frame['eps'].iloc[0]:g} I in float32; the residual is measured in float64. Lines: median over matrices, "
        f"bands: quartiles. {_kinds_sentence(frame, data)} {_printed_sentence(data)}"
        f"Preset {preset_name(inputs)} on {frame.attrs['provenance'].get('device', 'unknown device')}."
    )
    return Drawn(figure, data, caption)


def _table(frame: "pd.DataFrame") -> "pd.DataFrame":
    """A row a kind of matrices, solver and number of products, with the statistics of its residuals."""
    case = ["matrix", "solver", "products", "iterations", "n", "landmarks"]
    found = frame[frame["metric"].str.startswith("solver_residual")].copy()
    found["statistic"] = found["metric"].str.removeprefix("solver_residual").str.removeprefix("_")
    found[["products", "iterations"]] = found[["products", "iterations"]].fillna(0).astype(int)
    table = found.pivot_table(index=case, columns="statistic", values="value", dropna=False, observed=True)
    table = table.dropna(how="all").reset_index().rename(columns={"": "residual"})
    return table[list(COLUMNS)].sort_values(["matrix", "solver", "products"], kind="stable", ignore_index=True)


def _draw_panel(axis: "Axes", panel: "pd.DataFrame") -> None:
    if not len(panel):
        text = "no run with\nLaplacian attention\nin this preset"
        axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", fontsize="small")
    for solver, series in DIRECT.items():
        for row in rows_of(panel[panel["solver"] == solver]):
            axis.axhline(
                row["residual"], color=series.color, linestyle=series.dashes, linewidth=0.8, label=series.label
            )
    for solver, series in ITERATIVE.items():
        line = panel[panel["solver"] == solver]
        if not len(line):
            continue
        # Where it overflows the line leaves the panel.
        low, middle, high = (
            line[name].map(lambda value: value if math.isfinite(value) else 1e38)
            for name in ("lower_quartile", "residual", "upper_quartile")
        )
        axis.plot(line["products"], middle, **series.line(linewidth=1.2))
        axis.fill_between(line["products"], low, high, color=series.color, alpha=0.25, linewidth=0)
    axis.set_yscale("log")
    axis.set_ylim(*RANGE)


def _kinds_sentence(frame: "pd.DataFrame", data: "pd.DataFrame") -> str:
    conditions = frame[frame["metric"] == "condition"]
    parts = []
    for kind, title in PANELS:
        of_kind = data[data["matrix"] == kind]
        if not len(of_kind):
            continue
        runs = frame.attrs["provenance"].get("settings", {}).get("runs", [])
        condition = rows_of(conditions[conditions["matrix"] == kind])[0]
        seeds = int(condition["seeds"])
        source = f"runs {listed(runs)}" if kind == "trained" else f"{seeds} seed{'s' if seeds > 1 else ''}"
        parts.append(
            f"{title}: n = {int(of_kind['n'].max())} matrices of {of_kind['landmarks'].iloc[0]} landmarks from "
            f"{source}, median condition {condition['value']:.3g}"
        )
    return "; ".join(parts) + "."


def _printed_sentence(data: "pd.DataFrame") -> str:
    """Whether the start as printed diverges here."""
    printed = data[data["solver"] == "newton_schulz_printed"]
    last = printed.sort_values("products").groupby("matrix").tail(1)
    overflowed = sum(not math.isfinite(value) or value > RANGE[1] for value in last["residual"])
    if not overflowed:
        return ""
    return f"From the start as printed the iteration leaves the panel in {overflowed} of {len(last)} of them. "
