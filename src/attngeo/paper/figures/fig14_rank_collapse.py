"""Figure 14: whether tokens become the same with depth, by metric, wiring and training."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import TYPE_CHECKING

from attngeo.paper import records
from attngeo.paper.render import Drawn
from attngeo.paper.results import (
    count_non_finite,
    listed,
    non_finite_sentence,
    preset_name,
    require_inputs,
    rows_of,
    span,
    summarise,
)
from attngeo.paper.style import Series, legend_below, new_figure, panel_title, series_for, share_scale, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

FORMS = {
    "dot": Series("dot product", "#000000", "o", "-"),
    "euclidean": Series("Euclidean distance", "#0B4F9E", "s", (0, (4, 1.5))),
    "constant": Series("constant metric", "#E6B800", "v", (0, (1, 1.2))),
    "heterogeneous": Series("metric for each token", "#D55E00", "^", "-"),
    "bound": Series("$r \\to c\\,r^3$", "#9C9C9C", "none", (0, (1, 1.2))),
}
WIRINGS = {"pure": "attention alone", "skip": "with skips", "skip_mlp": "skips and MLP"}
ROWS = (
    ("relative_residual", "init", "residual, initial"),
    ("relative_residual", "wide 16", "residual, wide"),
    ("relative_residual", "trained", "residual, trained"),
    ("relative_residual", "wide 8 trained", "wide, trained"),
    ("effective_rank", "trained", "rank, trained"),
)
LOWEST = 1e-17  # of what is drawn: below it lies the bound alone
KEYS = ["metric", "wiring", "phase", "form", "depth"]


@styled
def draw(inputs: Sequence[Path]) -> Drawn:
    """Draw analyses/rank_collapse/s*.json: a column a wiring, a line a metric, means and range over seeds."""
    import pandas as pd

    require_inputs(inputs, "fig14", "file")
    frames = [records.read(path) for path in inputs]
    frame = pd.concat(frames, ignore_index=True)
    shown = frame[frame["metric"].isin(["relative_residual", "effective_rank", "cubic_bound"])]
    shown_rows = [row for row in ROWS if row[1] in set(shown["phase"])]
    figure, axes = new_figure(
        len(shown_rows), len(WIRINGS), height_to_width=min(0.3 * len(shown_rows), 4.8 / len(shown_rows))
    )
    for row, (metric, phase, title) in enumerate(shown_rows):
        for column, (wiring, words) in enumerate(WIRINGS.items()):
            axis = axes[row][column]
            chosen = shown[(shown["metric"] == metric) & (shown["phase"] == phase)]
            if metric == "relative_residual" and phase == "init":
                chosen = pd.concat([chosen, shown[shown["metric"] == "cubic_bound"]])
            _draw_panel(axis, chosen[chosen["wiring"] == wiring])
            if metric == "relative_residual":
                axis.set_yscale("log")
                axis.set_ylim(LOWEST, 3)
            axis.set_xlabel("layer" if row == len(shown_rows) - 1 else "")
            axis.set_ylabel(title if column == 0 else "")
            panel_title(axis, row * len(WIRINGS) + column, words, columns=3)
        if metric == "effective_rank":
            share_scale(axes[row])
    legend_below(figure, [axis for line in axes for axis in line], columns=3)
    data = summarise(shown, KEYS, "value").rename(columns={"mean": "value", "std": "spread"})
    data = data.merge(_drawn(shown, KEYS)[[*KEYS, "drawn"]], on=KEYS)
    settings = frames[0].attrs["provenance"].get("settings", {})
    devices = listed(one.attrs["provenance"].get("device", "unknown device") for one in frames)
    caption = (
        "Tokens by depth in stacks of one kind of attention (columns: attention alone; with skips; with skips and "
        "MLP), from above: ||X - 1 mean|| / ||X|| at initialisation; wide: the same with weights of queries and keys "
        "16 times as large and metrics drawn far from Euclidean, since at the usual start attention is next to uniform "
        "and metrics next to equal; after training to sort (every token has to name the symbol that belongs to its "
        "place); wide, trained: the same from weights 8 times as large, since a stack of attention alone that starts "
        "collapsed hands no gradient back; effective rank, exp of the entropy of the singular values, after training. "
        "Dotted: the doubly exponential law of Dong et al. for attention alone, r to c r^3, with c from the first "
        "layer of dot products (their own constant bounds nothing at this size). Norms stand before every layer; "
        "only stacks with MLP are matched in parameters. Float64; lines are means over seeds, of residuals geometric "
        f"ones (n = {span(data['n'])}), bands the range (the standard deviation is in fig14.csv). "
        f"Depth {settings.get('depth', '?')}, width {settings.get('dim', '?')}, "
        f"{settings.get('length', '?')} tokens, {settings.get('steps', '?')} steps. Preset {preset_name(inputs)} on "
        f"{devices}." + non_finite_sentence(count_non_finite(shown["value"]))
    )
    return Drawn(figure, data, caption)


def _drawn(points: "pd.DataFrame", keys: list[str]) -> "pd.DataFrame":
    """By group the least and the largest value and the mean, geometric for what spans decades."""
    import pandas as pd

    rows = []
    for key, group in points.groupby(keys, sort=True):
        values = [float(value) for value in group["value"] if math.isfinite(value)] or [math.nan]
        labels = dict(zip(keys, key, strict=True))
        # A bound that has underflowed to 0 stays 0.
        geometric = labels["metric"] != "effective_rank" and min(values) > 0
        mean = geometric_mean(values) if geometric else fmean(values)
        rows.append(labels | {"drawn": mean, "min": min(values), "max": max(values)})
    return pd.DataFrame(rows, columns=[*keys, "drawn", "min", "max"])


def _draw_panel(axis: "Axes", points: "pd.DataFrame") -> None:
    for form, series in series_for(points["form"], FORMS).items():
        of_form = points[points["form"] == form]
        lines = rows_of(_drawn(of_form, ["metric", "depth"]))
        depths = [line["depth"] for line in lines]
        axis.plot(depths, [max(line["drawn"], LOWEST) for line in lines], **series.line(markersize=2.4))
        if of_form["seed"].nunique() > 1:
            low, high = ([max(line[end], LOWEST) for line in lines] for end in ("min", "max"))
            axis.fill_between(depths, low, high, color=series.color, alpha=0.15, linewidth=0)
