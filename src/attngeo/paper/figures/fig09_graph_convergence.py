"""Figure 9: effective attention graphs by depth, trained against shuffled depth, untrained weights, shuffled tokens."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attngeo.paper.intervals import interval_95
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
from attngeo.paper.style import GRAPH_CONTROL, legend_below, new_figure, panel_title, share_scale, styled
from attngeo.paper.walks import left_out_sentence, one_a_size, read_walks

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

METRICS = {
    "graph_change": "graph change",
    "spectral_gap": "spectral gap",
    "subspace_angle": "angle (rad)",
    "reversibility_defect": "rev. defect",
}
MODELS_A_ROW = 4
COLUMNS = ("model", "metric", "control", "layer", "value", "low", "high", "n", "interval", "convention")


@styled
def draw(inputs: Sequence[Path]) -> Drawn:
    """Draw connection-walk record files: four statistics of the graphs by layer, a column of panels a model."""
    from matplotlib.ticker import MaxNLocator

    require_inputs(inputs, "fig9", "model")
    frame = read_walks(inputs)
    shown = one_a_size(frame)
    data = _by_layer(shown)
    models = sorted(shown["model"].unique())
    blocks = math.ceil(len(models) / MODELS_A_ROW)
    columns = math.ceil(len(models) / blocks)
    figure, axes = new_figure(len(METRICS) * blocks, columns, height_to_width=0.7 if columns > 2 else 0.4)
    for index, model in enumerate(models):
        of_model = data[data["model"] == model]
        for row, (metric, label) in enumerate(METRICS.items()):
            axis = axes[len(METRICS) * (index // columns) + row][index % columns]
            _draw_panel(axis, of_model[of_model["metric"] == metric])
            axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            if row == 0:
                panel_title(axis, index, model, columns)
            if row == len(METRICS) - 1:
                axis.set_xlabel("layer")
            if index % columns == 0:
                axis.set_ylabel(label)
    for spare in range(len(models), blocks * columns):
        for row in range(len(METRICS)):
            axes[len(METRICS) * (spare // columns) + row][spare % columns].set_axis_off()
    for row in range(len(METRICS)):
        share_scale(axis for block in axes[row :: len(METRICS)] for axis in block if axis.axison and axis.has_data())
    legend_below(figure, [axis for row in axes for axis in row])

    trained = data[data["control"] == "trained"]
    shaded = listed(kind for kind in trained["interval"] if kind != "none") or "no interval"
    causal = trained[trained["convention"].str.startswith("one-way by construction")]["model"]
    one_way = f" ({listed(causal)}: 1 by construction, attention is causal)" if len(causal) else ""
    caption = (
        "Effective attention graphs P (mean of the heads' maps) by depth, a column of panels a model, from the top: "
        "relative change from the layer before; spectral gap of the symmetrised walk; root mean square angle between "
        f"leading eigenspaces of neighbouring layers; reversibility defect{one_way}. Controls: the same model with its "
        "layers in random order (change alone; mean over all other layers), untrained networks of the same "
        "configuration, the trained model on shuffled tokens. (Uniform attention over all tokens would not change, "
        f"with gap 1 and defect 0.) Shaded: {shaded}; n = {span(trained['n'])} "
        f"windows. Rows of panels share one scale. Preset {preset_name(inputs)} on {frame.attrs['devices']}."
        + left_out_sentence(frame, shown)
        + non_finite_sentence(count_non_finite(data["value"]))
    )
    return Drawn(figure, data, caption)


def _by_layer(frame: "pd.DataFrame") -> "pd.DataFrame":
    """The drawn statistics with their 95 % intervals, a row a model, metric, control and layer."""
    import pandas as pd

    found = frame[frame["metric"].isin(METRICS) & frame["control"].isin(GRAPH_CONTROL) & (frame["layer"] >= 0)]
    rows = []
    for row in rows_of(found.sort_values(["model", "metric", "control", "layer"])):
        low, high = interval_95(row)
        known = math.isfinite(low)
        interval = f"95 % interval of the mean from the {row['spread_kind']}" if known else "none"
        convention = row.get("convention")
        rows.append(
            (
                *(row[name] for name in ("model", "metric", "control", "layer", "value")),
                *(low, high, int(row["n"]), interval, convention if isinstance(convention, str) else ""),
            )
        )
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _draw_panel(axis: "Axes", data: "pd.DataFrame") -> None:
    if not len(data):
        axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", va="center", fontsize="x-small")
        axis.set_yticks([])
        return
    for control, series in GRAPH_CONTROL.items():
        points = data[data["control"] == control].sort_values("layer")
        if not len(points):
            continue
        axis.plot(points["layer"], points["value"], **series.line(markevery=max(1, len(points) // 6)))
        if control == "trained":
            axis.fill_between(
                points["layer"], points["low"], points["high"], color=series.color, alpha=0.2, linewidth=0
            )
