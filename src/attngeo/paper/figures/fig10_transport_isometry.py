"""Figure 10: how close transports are to scaled isometries, by depth: trained, shape-matched null and the excess."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attngeo.paper import records
from attngeo.paper.layers import isometry_by_layer
from attngeo.paper.render import Drawn
from attngeo.paper.results import listed, non_finite_sentence, preset_name, span
from attngeo.paper.style import CONTROL, legend_below, new_figure, panel_title, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

SCORES = ("trained", "null", "random_init")
MODELS_A_ROW = 4


@styled
def draw(inputs: Sequence[Path]) -> Drawn:
    """Draw connection-walk record files: scores of single heads averaged by layer, and their excess with intervals."""
    import pandas as pd
    from matplotlib.ticker import MaxNLocator

    read = [records.read(path) for path in sorted(inputs)]
    data = pd.concat([isometry_by_layer(frame) for frame in read], ignore_index=True)
    data = data[data["control"].isin(CONTROL)]
    models = sorted(data["model"].unique())
    columns = min(MODELS_A_ROW, max(1, len(models)))
    blocks = max(1, math.ceil(len(models) / columns))
    figure, axes = new_figure(2 * blocks, columns, height_to_width=0.8 if columns > 2 else 0.55)
    for index, model in enumerate(models):
        top, bottom = axes[2 * (index // columns)][index % columns], axes[2 * (index // columns) + 1][index % columns]
        of_model = data[data["model"] == model]
        for control in SCORES:
            _draw_control(top, of_model, control)
        _draw_control(bottom, of_model, "excess")
        bottom.axhline(0.0, color="#000000", linewidth=0.5)
        panel_title(top, index, model if len(model) <= 22 else f"{model[:21]}…")
        bottom.set_xlabel("layer")
        for axis in (top, bottom):
            axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        if index % columns == 0:
            top.set_ylabel("isometry score")
            bottom.set_ylabel("excess")
    for spare in range(len(models), blocks * columns):
        for row in range(2):
            axes[2 * (spare // columns) + row][spare % columns].set_axis_off()
    legend_below(figure, [axis for row in axes for axis in row])

    devices = listed(frame.attrs["provenance"].get("device", "unknown device") for frame in read)
    excess = data[data["control"] == "excess"]
    kinds = listed(kind for kind in excess["interval"])
    caption = (
        "Closeness of the transports W_V W_O to scaled isometries, by depth, one column a model. Top: score "
        "(sum s)^2 / (r sum s^2) of the singular values s (1 is a scaled isometry), mean over heads; the shape-matched "
        "null is a product of Gaussian matrices of the same shape. Bottom: trained minus null "
        f"(shaded: {kinds}; n = {span(excess['n'])} per layer). Preset {preset_name(inputs)} on {devices}."
        + non_finite_sentence(int(data["non_finite"].sum()))
    )
    return Drawn(figure, data, caption)


def _draw_control(axis: "Axes", data: "pd.DataFrame", control: str) -> None:
    points = data[data["control"] == control].sort_values("layer")
    if not len(points):
        return
    series = CONTROL[control]
    axis.plot(points["layer"], points["value"], **series.line(markevery=max(1, len(points) // 8)))
    if control == "excess":
        axis.fill_between(points["layer"], points["low"], points["high"], color=series.color, alpha=0.2, linewidth=0)
