"""Figure 2: validation accuracy and training loss of every attention kind against images seen, a column a data set."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attngeo.paper.render import Drawn
from attngeo.paper.results import made_from, non_finite_sentence, preset_name, read_epochs, read_finals, span, summarise
from attngeo.paper.style import legend_below, new_figure, panel_title, series_for, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

ROWS = (("val_top1", "validation top-1 (%)"), ("train_loss", "training loss"))
BY = ("dataset", "attention", "model", "epoch")


@styled
def draw(inputs: Sequence[Path]) -> Drawn:
    """Draw runs' metrics.jsonl, data set and kind from their final.json; bands are +-1 std over seeds."""
    import pandas as pd

    finals = read_finals(inputs)
    epochs = read_epochs(inputs).merge(
        finals[["run_id", "dataset", "attention", "model", "seed"]], on="run_id", how="inner", validate="many_to_one"
    )
    seen = epochs.groupby(list(BY))["images_seen"].mean()
    curves = []
    for metric, _ in ROWS:
        curve = summarise(epochs, BY, metric)
        curve.insert(len(BY), "images_seen", [seen[tuple(key)] for key in curve[list(BY)].itertuples(index=False)])
        curve.insert(0, "metric", metric)
        curves.append(curve)
    data = pd.concat(curves, ignore_index=True)

    datasets = sorted(finals["dataset"].unique())
    figure, axes = new_figure(len(ROWS), max(1, len(datasets)), height_to_width=0.6)
    for column, dataset in enumerate(datasets):
        for row, (metric, label) in enumerate(ROWS):
            axis = axes[row][column]
            _draw_panel(axis, data[(data["metric"] == metric) & (data["dataset"] == dataset)])
            if column == 0:
                axis.set_ylabel(label)
        panel_title(axes[0][column], column, dataset)
        axes[-1][column].set_xlabel("images seen (thousands)")
    legend_below(figure, [axis for row in axes for axis in row])
    seeds = span(finals.groupby(["dataset", "attention", "model"])["seed"].nunique())
    caption = (
        "Training curves of every attention kind: validation accuracy of the averaged weights (top) and training loss "
        f"(bottom), one column a data set. Lines are means over seeds (n = {seeds} per curve), bands plus and minus "
        f"one sample standard deviation; where n is 1 there is no band. {made_from(preset_name(inputs), finals)}"
        + non_finite_sentence(int(data["non_finite"].sum()))
    )
    return Drawn(figure, data, caption)


def _draw_panel(axis: "Axes", data: "pd.DataFrame") -> None:
    for kind, series in series_for(data["attention"]).items():
        of_kind = data[data["attention"] == kind]
        for _, curve in of_kind.groupby("model", sort=True):
            curve = curve.sort_values("epoch")
            x = curve["images_seen"] / 1000
            axis.plot(x, curve["mean"], **series.line(markevery=max(1, len(curve) // 6)))
            if (curve["n"] > 1).any():
                low, high = curve["mean"] - curve["std"], curve["mean"] + curve["std"]
                axis.fill_between(x, low, high, color=series.color, alpha=0.16, linewidth=0)
