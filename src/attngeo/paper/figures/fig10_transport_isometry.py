"""Figure 10: how close transports are to scaled isometries, by depth: trained, shape-matched null and the excess."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attngeo.paper.render import Drawn
from attngeo.paper.results import listed, non_finite_sentence, preset_name, require_inputs, span
from attngeo.paper.style import CONTROL, legend_below, new_figure, panel_title, series_for, share_scale, styled
from attngeo.paper.walks import (
    isometry_by_layer,
    left_out_sentence,
    of_pretrained,
    of_runs,
    one_a_size,
    over_seeds,
    read_walks,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

SCORES = ("trained", "null", "random_init")
MODELS_A_ROW = 3


@styled
def draw(inputs: Sequence[Path]) -> Drawn:
    """Draw connection-walk record files: scores of single heads averaged by layer, and their excess with intervals.

    Two panels a pretrained model; then two a data set for the runs trained here, a line an attention kind.
    """
    import pandas as pd
    from matplotlib.ticker import MaxNLocator

    require_inputs(inputs, "fig10", "model")
    pretrained, runs = of_pretrained(inputs), of_runs(inputs)
    read = read_walks(pretrained) if pretrained else pd.DataFrame()
    shown = one_a_size(read) if pretrained else read
    data = isometry_by_layer(shown)
    data = data[data["control"].isin(CONTROL)]
    own = over_seeds(read_walks(runs)) if runs else pd.DataFrame()
    models = sorted(data["model"].unique())
    sets = sorted(own["dataset"].unique()) if runs else []
    # Rows of panels come in pairs, scores above their excess: first of the models, then of the data sets.
    columns = max(_across(len(models)), _across(len(sets)), 1)
    blocks = [models[start : start + columns] for start in range(0, len(models), columns)]
    own_blocks = [sets[start : start + columns] for start in range(0, len(sets), columns)]
    rows = 2 * (len(blocks) + len(own_blocks))
    figure, axes = new_figure(rows, columns, height_to_width=0.62 if columns > 2 else 0.42)
    letter = 0
    for row, names in enumerate([*blocks, *own_blocks]):
        of_own = row >= len(blocks)
        for column in range(columns):
            top, bottom = axes[2 * row][column], axes[2 * row + 1][column]
            if column >= len(names):
                top.set_axis_off()
                bottom.set_axis_off()
                continue
            if of_own:
                _draw_own(top, bottom, own[own["dataset"] == names[column]])
            else:
                of_model = data[data["model"] == names[column]]
                for control in SCORES:
                    _draw_control(top, of_model, control)
                _draw_control(bottom, of_model, "excess")
            bottom.axhline(0.0, color="#000000", linewidth=0.5)
            panel_title(top, letter, f"trained here: {names[column]}" if of_own else names[column], columns)
            letter += 1
            bottom.set_xlabel("block" if of_own else "layer")
            for axis in (top, bottom):
                axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes[2 * row][0].set_ylabel("isometry score")
        axes[2 * row + 1][0].set_ylabel("excess")
    for first, last in ((0, len(blocks)), (len(blocks), len(blocks) + len(own_blocks))):
        for half in range(2):
            share_scale(axis for pair in axes[2 * first + half : 2 * last : 2] for axis in pair if axis.axison)
    legend_below(figure, [axis for row in axes for axis in row])

    caption = (
        "Closeness of the transports W_V W_O to scaled isometries, by depth, two panels a model. Upper: score "
        "(sum s)^2 / (r sum s^2) of the singular values s (1 is a scaled isometry), mean over heads; the shape-matched "
        "null is a product of Gaussian matrices of the same shape. Lower: trained minus null"
    )
    if models:
        excess = data[data["control"] == "excess"]
        kinds = listed(kind for kind in excess["interval"])
        caption += (
            f" (shaded: {kinds}; n = {span(excess['n'])} per layer). All upper panels share one scale, and so do all "
            "lower ones"
        )
    caption += "."
    if runs:
        excess = own[own["control"] == "excess"]
        caption += (
            " Trained here: pyramids by attention kind on scales of their own, mean over seeds, n = "
            f"{span(excess['n'])} runs (shaded: 95 % interval of the mean over seeds); grey: the null, which differs "
            "by block with the width, not by kind."
        )
    non_finite = int(data["non_finite"].sum()) + (int(own["non_finite"].sum()) if runs else 0)
    devices = listed(frame.attrs["devices"] for frame in (read, *([own] if runs else [])) if "devices" in frame.attrs)
    caption += f" Preset {preset_name(inputs)} on {devices}."
    if pretrained:
        caption += left_out_sentence(read, shown)
    drawn = pd.concat([data, own], ignore_index=True) if runs else data
    return Drawn(figure, drawn, caption + non_finite_sentence(non_finite))


def _across(count: int) -> int:
    """Panels in a row for so many, as evenly filled as at most `MODELS_A_ROW` allow."""
    return math.ceil(count / max(1, math.ceil(count / MODELS_A_ROW)))


def _draw_own(top: "Axes", bottom: "Axes", data: "pd.DataFrame") -> None:
    """Scores and excess of the runs of one data set by block, a line an attention kind."""
    null = data[data["control"] == "null"].groupby("layer")["value"].mean()
    top.plot(null.index, null, **CONTROL["null"].line())
    for kind, series in series_for(sorted(set(data["attention"]))).items():
        of_kind = data[data["attention"] == kind].sort_values("layer")
        for axis, control in ((top, "trained"), (bottom, "excess")):
            points = of_kind[of_kind["control"] == control]
            axis.plot(points["layer"], points["value"], **series.line())
            axis.fill_between(
                points["layer"], points["low"], points["high"], color=series.color, alpha=0.2, linewidth=0
            )


def _draw_control(axis: "Axes", data: "pd.DataFrame", control: str) -> None:
    points = data[data["control"] == control].sort_values("layer")
    if not len(points):
        return
    series = CONTROL[control]
    axis.plot(points["layer"], points["value"], **series.line(markevery=max(1, len(points) // 8)))
    if control == "excess":
        axis.fill_between(points["layer"], points["low"], points["high"], color=series.color, alpha=0.2, linewidth=0)
