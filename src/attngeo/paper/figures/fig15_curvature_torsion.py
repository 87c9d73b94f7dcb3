"""Figure 15: curvature, torsion and difference of the metrics, through training and through depth."""

from collections.abc import Sequence
from pathlib import Path
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
from attngeo.paper.style import Series, legend_below, new_figure, panel_title, series_for, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

TASKS = {
    "copy": Series("copy", "#000000", "o", "-"),
    "sort": Series("sort", "#0B4F9E", "s", (0, (4, 1.5))),
    "recall": Series("recall", "#D55E00", "^", "-"),
    "characters": Series("characters", "#3DB0A0", "D", (0, (4, 1.2, 1, 1.2))),
    "fashion-mnist": Series("Fashion-MNIST", "#E6B800", "v", "-"),
    "control": Series("control that must vanish", "#9C9C9C", "none", (0, (1, 1.2))),
}
METRICS = {
    "curvature_proxy": "curvature, metrics",
    "transport_holonomy": "curvature, transport",
    "torsion_proxy": "torsion",
    "metric_heterogeneity": "heterogeneity",
}
CONTROL = "control"
KEYS = ["metric", "control", "task", "step", "layer"]


@styled
def draw(inputs: Sequence[Path]) -> Drawn:
    """Draw analyses/fiber_tasks/*.json: left by share of the training (mean over layers), right by layer at its end."""
    import pandas as pd

    require_inputs(inputs, "fig15", "file")
    frames = [records.read(path) for path in inputs]
    frame = pd.concat(frames, ignore_index=True)
    shown = frame[frame["metric"].isin(list(METRICS))]
    figure, axes = new_figure(len(METRICS), 2, height_to_width=0.2 * len(METRICS))
    for row, (metric, words) in enumerate(METRICS.items()):
        of_metric = shown[shown["metric"] == metric]
        lines = of_metric.assign(line=of_metric["task"].where(of_metric["control"] == "none", CONTROL))
        last = lines.groupby(["task", "seed"])["step"].transform("max")
        for column, (place, chosen, title) in enumerate(
            (
                ("share", lines.assign(share=lines["step"] / last), "through training"),
                ("layer", lines[lines["step"] == last].assign(layer=lines["layer"] + 1), "by layer, trained"),
            )
        ):
            axis = axes[row][column]
            _draw_lines(axis, chosen, place)
            axis.set_ylabel(words if column == 0 else "")
            if row == len(METRICS) - 1:
                axis.set_xlabel("share of the steps" if place == "share" else "layer")
            panel_title(axis, 2 * row + column, f"{words} {title}" if row == 0 else title, columns=2)
    legend_below(figure, [axis for line in axes for axis in line], columns=3)
    data = summarise(shown, KEYS, "value").rename(columns={"mean": "value", "std": "spread"})
    devices = listed(one.attrs["provenance"].get("device", "unknown device") for one in frames)
    caption = (
        "Geometry of the Fiber Bundle Transformer on its tasks, on held-out inputs. Curvature proxy: how far three "
        "transports around a triangle of tokens are from the identity, mean over sampled triangles; of the metrics' "
        "polar transports, which the model does not use, and of the learned ones, which carry its values. Torsion "
        "proxy: the antisymmetric part of the learned connection, on random unit vectors. Heterogeneity: mean distance "
        "of the tokens' metrics from their mean, relative to it. Dotted: the curvature of metrics without their "
        "low-rank part and the torsion of a symmetric connection, which must be 0. Left: mean over layers at "
        "parts of the training; right: by layer at its end. Lines are means over seeds "
        f"(n = {span(data['n'])}), bands the range (the standard deviation is in fig15.csv). "
        f"Preset {preset_name(inputs)} on {devices}." + non_finite_sentence(count_non_finite(shown["value"]))
    )
    return Drawn(figure, data, caption)


def _draw_lines(axis: "Axes", points: "pd.DataFrame", place: str) -> None:
    for name, series in series_for(points["line"], TASKS).items():
        of_line = points[points["line"] == name]
        by_seed = of_line.groupby([place, "task", "seed"])["value"].mean().reset_index()
        lines = rows_of(by_seed.groupby(place)["value"].agg(["mean", "min", "max"]).reset_index())
        places = [line[place] for line in lines]
        axis.plot(places, [line["mean"] for line in lines], **series.line())
        if by_seed["seed"].nunique() > 1 and name != CONTROL:
            low, high = ([line[end] for line in lines] for end in ("min", "max"))
            axis.fill_between(places, low, high, color=series.color, alpha=0.15, linewidth=0)
