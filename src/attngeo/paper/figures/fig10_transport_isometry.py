"""Figure 10: how close transports are to scaled isometries, by depth: trained, shape-matched null and the excess."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attngeo.paper import records
from attngeo.paper.layers import isometry_by_layer
from attngeo.paper.render import Drawn
from attngeo.paper.results import listed, non_finite_sentence, preset_name, require_inputs, span
from attngeo.paper.style import CONTROL, legend_below, new_figure, panel_title, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

SCORES = ("trained", "null", "random_init")
MODELS_A_ROW = 3


@styled
def draw(inputs: Sequence[Path]) -> Drawn:
    """Draw connection-walk record files: scores of single heads averaged by layer, and their excess with intervals."""
    import pandas as pd
    from matplotlib.ticker import MaxNLocator

    require_inputs(inputs, "fig10", "model")
    read = [records.read(path) for path in sorted(inputs)]
    data = pd.concat([isometry_by_layer(frame) for frame in read], ignore_index=True)
    data = data[data["control"].isin(CONTROL)]
    models = sorted(data["model"].unique())
    blocks = max(1, math.ceil(len(models) / MODELS_A_ROW))
    columns = max(1, math.ceil(len(models) / blocks))
    figure, axes = new_figure(2 * blocks, columns, height_to_width=0.62 if columns > 2 else 0.42)
    for index, model in enumerate(models):
        top, bottom = axes[2 * (index // columns)][index % columns], axes[2 * (index // columns) + 1][index % columns]
        of_model = data[data["model"] == model]
        for control in SCORES:
            _draw_control(top, of_model, control)
        _draw_control(bottom, of_model, "excess")
        bottom.axhline(0.0, color="#000000", linewidth=0.5)
        panel_title(top, index, model, columns)
        bottom.set_xlabel("layer")
        for axis in (top, bottom):
            axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        if index % columns == 0:
            top.set_ylabel("isometry score")
            bottom.set_ylabel("excess")
    for spare in range(len(models), blocks * columns):
        for row in range(2):
            axes[2 * (spare // columns) + row][spare % columns].set_axis_off()
    for row in range(2):
        _share_scale([axis for block in axes[row::2] for axis in block if axis.axison])
    legend_below(figure, [axis for row in axes for axis in row])

    devices = listed(frame.attrs["provenance"].get("device", "unknown device") for frame in read)
    excess = data[data["control"] == "excess"]
    kinds = listed(kind for kind in excess["interval"])
    caption = (
        "Closeness of the transports W_V W_O to scaled isometries, by depth, two panels a model. Upper: score "
        "(sum s)^2 / (r sum s^2) of the singular values s (1 is a scaled isometry), mean over heads; the shape-matched "
        "null is a product of Gaussian matrices of the same shape. Lower: trained minus null "
        f"(shaded: {kinds}; n = {span(excess['n'])} per layer). All upper panels share one scale, and so do all lower "
        f"ones. Preset {preset_name(inputs)} on {devices}." + non_finite_sentence(int(data["non_finite"].sum()))
    )
    return Drawn(figure, data, caption)


def _share_scale(axes: "list[Axes]") -> None:
    """The same vertical limits for panels that are compared."""
    if not axes:
        return
    limits = [axis.get_ylim() for axis in axes]
    low, high = min(low for low, _ in limits), max(high for _, high in limits)
    room = 0.04 * (high - low)  # so that marks at the edge stay whole
    for axis in axes:
        axis.set_ylim(low - room, high + room)


def _draw_control(axis: "Axes", data: "pd.DataFrame", control: str) -> None:
    points = data[data["control"] == control].sort_values("layer")
    if not len(points):
        return
    series = CONTROL[control]
    axis.plot(points["layer"], points["value"], **series.line(markevery=max(1, len(points) // 8)))
    if control == "excess":
        axis.fill_between(points["layer"], points["low"], points["high"], color=series.color, alpha=0.2, linewidth=0)
