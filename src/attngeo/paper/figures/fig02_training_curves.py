"""Figure 2: validation accuracy and training loss of every attention kind against images seen, a column a data set."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attngeo.paper.render import Drawn
from attngeo.paper.results import (
    GROUP,
    made_from,
    non_finite_sentence,
    panel_names,
    preset_name,
    read_epochs,
    read_seeds,
    size_of,
    span,
    summarise,
)
from attngeo.paper.style import legend_below, name_point, new_figure, panel_title, series_for, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

ROWS = (("val_top1", "validation top-1 (%)"), ("train_loss", "training loss"))
BY = (*GROUP, "epoch")


@styled
def draw(inputs: Sequence[Path]) -> Drawn:
    """Draw runs' metrics.jsonl, data set and kind from their final.json; bands are +-1 std over seeds."""
    import pandas as pd

    finals = read_seeds(inputs, "fig2")
    epochs = read_epochs(inputs).merge(
        finals[["run_id", *GROUP, "seed"]], on="run_id", how="inner", validate="many_to_one"
    )
    seen = epochs.groupby(list(BY))["images_seen"].mean()
    curves = []
    for metric, _ in ROWS:
        curve = summarise(epochs, BY, metric)
        curve.insert(len(BY), "images_seen", [seen[tuple(key)] for key in curve[list(BY)].itertuples(index=False)])
        curve.insert(0, "metric", metric)
        curves.append(curve)
    data = pd.concat(curves, ignore_index=True)

    panels = panel_names(finals)
    figure, axes = new_figure(len(ROWS), len(panels), height_to_width=0.6 if len(panels) > 1 else 0.38)
    for column, ((dataset, recipe), title) in enumerate(panels.items()):
        of_panel = data[(data["dataset"] == dataset) & (data["recipe"] == recipe)]
        for row, (metric, label) in enumerate(ROWS):
            axis = axes[row][column]
            _draw_panel(axis, of_panel[of_panel["metric"] == metric])
            if column == 0:
                axis.set_ylabel(label)
        panel_title(axes[0][column], column, title, len(panels))
        axes[-1][column].set_xlabel("images seen (thousands)")
    legend_below(figure, [axis for row in axes for axis in row])
    seeds = span(finals.groupby(list(GROUP))["seed"].nunique())
    caption = (
        "Training curves of every attention kind: validation accuracy of the averaged weights (top) and training loss "
        f"(bottom), one column a data set and recipe. Lines are means over seeds (n = {seeds} per curve), bands "
        "plus and minus one sample standard deviation; where n is 1 there is no band. "
        f"{made_from(preset_name(inputs), finals)}" + non_finite_sentence(int(data["non_finite"].sum()))
    )
    return Drawn(figure, data, caption)


def _draw_panel(axis: "Axes", data: "pd.DataFrame") -> None:
    """A line a model; where a kind has several sizes, each line ends in its size."""
    for kind, series in series_for(data["attention"]).items():
        of_kind = data[data["attention"] == kind]
        for model, curve in of_kind.groupby("model", sort=True):
            curve = curve.sort_values("epoch")
            x = curve["images_seen"] / 1000
            axis.plot(x, curve["mean"], **series.line(markevery=max(1, len(curve) // 6)))
            if of_kind["model"].nunique() > 1:
                name_point(axis, x.iloc[-1], curve["mean"].iloc[-1], size_of(str(model)), series.color)
            if (curve["n"] > 1).any():
                low, high = curve["mean"] - curve["std"], curve["mean"] + curve["std"]
                axis.fill_between(x, low, high, color=series.color, alpha=0.16, linewidth=0)
