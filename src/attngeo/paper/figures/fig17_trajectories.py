"""Figure 17: hidden states by depth as paths on the sphere, trained beside their controls."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
)
from attngeo.paper.style import (
    CONTROL,
    GRAPH_CONTROL,
    Series,
    legend_below,
    new_figure,
    panel_title,
    share_scale,
    styled,
    wrapped,
)
from attngeo.paper.walks import one_a_size

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEASURES = {
    "step_size": "step size\n(rad)",
    "tangential_share": "tangential\nshare",
    "el_residual_free": "residual,\nfree",
    "el_residual_potential": "residual,\npotential",
    "geodesic_curvature": "curvature\n(1/rad)",
}
SERIES = {
    "trained": CONTROL["trained"],
    "random_init": CONTROL["random_init"],
    "random_walk": Series("random walk", "#3DB0A0", "D", (0, (4, 1.2, 1, 1.2))),
    "depth_shuffled": GRAPH_CONTROL["depth_shuffled"],
}
DIFFERENCES = {
    "el_residual_free_difference": "free Lagrangian: residual",
    "el_residual_potential_difference": "with potential: residual",
}
MODELS_A_ROW = 4
MODELS_A_GRID_ROW = 2.5  # of the panels of differences, which take as many rows of the grid as they need
NAME_LETTERS = 28  # of a model's name beside them
COLUMNS = ("model", "dataset", "attention", "stage", "layer", "metric", "control", "value", "low", "high", "n")


@styled
def draw(inputs: Sequence[Path]) -> Drawn:
    """Draw records of trajectories: a column a model (of own decoders a size), a row a measure; differences below."""
    import pandas as pd
    from matplotlib.ticker import MaxNLocator

    require_inputs(inputs, "fig17", "model")
    frames = [records.read(path) for path in sorted(inputs)]
    data = pd.concat(frames, ignore_index=True)
    data = data.reindex(columns=[*data.columns, *(name for name in COLUMNS if name not in data)])
    by_layer = data[data["dataset"].isna() & (data["layer"] >= 0) & data["metric"].isin(MEASURES)]
    by_layer = one_a_size(by_layer[by_layer["control"].isin(SERIES)])
    differences = data[data["metric"].isin(DIFFERENCES)]
    models = sorted(by_layer["model"].unique())
    blocks = math.ceil(len(models) / MODELS_A_ROW)
    columns = max(1, math.ceil(len(models) / max(1, blocks)))
    below_rows = max(1, math.ceil(differences["model"].nunique() / MODELS_A_GRID_ROW))
    rows = len(MEASURES) * blocks + below_rows
    figure, axes = new_figure(rows, columns, height_to_width=0.55 if columns > 2 else 0.25)
    for index, model in enumerate(models):
        first, column = len(MEASURES) * (index // columns), index % columns
        for row, (metric, label) in enumerate(MEASURES.items()):
            axis = axes[first + row][column]
            _draw_measure(axis, by_layer[(by_layer["model"] == model) & (by_layer["metric"] == metric)])
            axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            if column == 0:
                axis.set_ylabel(label)
        panel_title(axes[first][column], index, model, columns)
        axes[first + len(MEASURES) - 1][column].set_xlabel("layer")
    for spare in range(len(models), blocks * columns):
        for row in range(len(MEASURES)):
            axes[len(MEASURES) * (spare // columns) + row][spare % columns].set_axis_off()
    for row in range(len(MEASURES)):
        share_scale(axis for line in axes[row : -below_rows : len(MEASURES)] for axis in line if axis.axison)
    below = _wide_panels(figure, axes[-below_rows:])
    for place, (axis, (metric, label)) in enumerate(zip(below, DIFFERENCES.items(), strict=True)):
        _draw_differences(axis, differences[differences["metric"] == metric], named=place == 0)
        panel_title(axis, len(models) + place, label, 2)
        axis.set_xlabel("trained minus control")
    legend_below(figure, [axis for line in axes[:-below_rows] for axis in line] + below)

    shown = pd.concat([by_layer, differences], ignore_index=True)
    devices = listed(frame.attrs["provenance"].get("device", "unknown device") for frame in frames)
    of_windows = shown[shown["control"] != "random_init"]
    caption = (
        "Hidden states by depth as paths of tokens on the unit sphere, a column a pretrained model or, of our own "
        "decoders, a size (its lowest seed, at the last step): angle between layers; share of the layer's step in the "
        "stream that is tangent to the sphere; relative residual of the "
        "projected Euler-Lagrange equation of |xdot|^2 / 2 alone (0 on a geodesic at constant speed, about 0.71 on a "
        "random walk) and with the quadratic potential fitted on other windows; geodesic curvature. Points are means "
        f"over windows (n = {span(of_windows['n'])}; shaded: 95 % bootstrap intervals), of untrained networks over "
        "networks. Controls: networks of the same shape as initialised, random walks with the same step sizes, the "
        "same states in random order of depth. Panels of one row share a scale. Below: trained minus control, mean "
        "over layers, of all models and of our trained vision models (by half layer in each stage), with 95 % "
        "bootstrap intervals where there are six windows or more; left of 0 the trained path is closer to stationary. "
        f"Preset {preset_name(inputs)} on {devices}." + non_finite_sentence(count_non_finite(shown["value"]))
    )
    return Drawn(figure, shown[list(COLUMNS)], caption)


def _draw_measure(axis: "Axes", points: "pd.DataFrame") -> None:
    for control, series in SERIES.items():
        line = points[points["control"] == control].sort_values("layer")
        if len(line):
            axis.plot(line["layer"], line["value"], **series.line(markevery=max(1, len(line) // 6)))
            axis.fill_between(
                line["layer"],
                line["low"].astype(float),
                line["high"].astype(float),
                color=series.color,
                alpha=0.2,
                lw=0,
            )


def _draw_differences(axis: "Axes", rows: "pd.DataFrame", *, named: bool) -> None:
    """A line a model, pretrained ones first, a mark a control."""
    subjects: dict[str, str] = {}
    for row in sorted(rows_of(rows), key=lambda row: (not _is_missing(row["dataset"]), str(row["model"]))):
        subjects[str(row["model"])] = _subject(row)
    places = {model: -place for place, model in enumerate(subjects)}
    controls = [control for control in SERIES if control != "trained"]
    for shift, control in enumerate(controls):
        points = rows[rows["control"] == control]
        series = SERIES[control]
        at = [places[str(model)] + 0.22 * (1 - shift) for model in points["model"]]
        value, low, high = (points[name].astype(float) for name in ("value", "low", "high"))
        bars = [(value - low).fillna(0.0), (high - value).fillna(0.0)]
        axis.errorbar(value, at, xerr=bars, **series.points(), elinewidth=0.8)
    axis.axvline(0.0, color="#000000", linewidth=0.5)
    axis.set_yticks(list(places.values()), list(subjects.values()) if named else [""] * len(places))
    axis.tick_params(axis="y", labelsize="x-small")
    axis.set_ylim(0.5 - len(places), 0.5)
    axis.grid(axis="y", visible=False)


def _subject(row: dict[str, Any]) -> str:
    name = str(row["model"]) if _is_missing(row["dataset"]) else f"{row['attention']}, {row['dataset']}"
    return wrapped(name, NAME_LETTERS)


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _wide_panels(figure: "Figure", lines: "list[list[Axes]]") -> "list[Axes]":
    """Two panels side by side over the whole width, in place of these lines of the grid."""
    grid = lines[0][0].get_gridspec()
    assert grid is not None, "axes of a grid"
    for line in lines:
        for axis in line:
            axis.remove()
    halves = grid[grid.nrows - len(lines) :, :].subgridspec(1, 2)
    return [figure.add_subplot(halves[0, place]) for place in range(2)]
