"""Figure 7: rank, separation of rows and identity recall of attention matrices against the number of landmarks."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attngeo.paper import records
from attngeo.paper.render import Drawn
from attngeo.paper.results import count_non_finite, listed, non_finite_sentence, preset_name, span
from attngeo.paper.style import ATTENTION, Series, legend_below, new_figure, panel_title, series_for, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

METRICS = (
    ("numerical_rank", "rank", "log"),
    ("smallest_separation", "smallest separation", "log"),
    ("identity_recall", "identity recall", "linear"),
)
FEATURES, NOISE, COPIES = "features", "gaussian_noise", "collinear_copies"
NYSTROM = {
    "injective": Series("Nystrom, column mean and variance", "#D55E00", "^", "-"),
    "injective_row": Series("Nystrom, row mean", "#8C4A7D", "P", (0, (4, 1.5))),
    "row_sum": Series("Nystrom, row sum", "#0B4F9E", "s", (0, (4, 1.2, 1, 1.2))),
    "none": Series("Nystrom, not normalised", "#A9B8CC", "o", "-"),
}
EXACT = {
    "softmax": Series("softmax", ATTENTION["softmax"].color, "", "-"),
    "gaussian": Series("exact Gaussian", ATTENTION["gaussian"].color, "", (0, (4, 1.5))),
    "laplacian": Series("exact Laplacian", ATTENTION["laplacian"].color, "", (0, (4, 1.2, 1, 1.2))),
    "linear_row_sum": Series("linear attention", "#7A7A7A", "", (0, (1, 1.2))),
}
COLUMNS = (
    *("feature_set", "control", "form", "tokens", "landmarks", "metric"),
    *("value", "unit", "n", "spread", "spread_kind"),
)


@styled
def draw(inputs: Sequence[Path]) -> Drawn:
    """Draw analyses/injectivity.json: a row a metric, a column a set of features, last its noise control."""
    import pandas as pd

    (path,) = inputs
    frame = records.read(path)
    frame = frame[frame["tokens"] == frame["tokens"].max()]
    feature_sets = list(frame.loc[frame["control"] == FEATURES, "feature_set"].unique())
    columns = [(name, FEATURES, name) for name in feature_sets]
    columns += [(name, NOISE, "Gaussian noise") for name in feature_sets[:1]]
    wanted = [metric for metric, _, _ in METRICS]
    shown = [
        frame[
            (frame["feature_set"] == name)
            & (frame["control"] == control)
            & frame["metric"].isin([*wanted, "rank_bound"])
        ]
        for name, control, _ in columns
    ]
    data = pd.concat(shown, ignore_index=True)[list(COLUMNS)]
    data = data.sort_values(list(COLUMNS[:6]), kind="stable", ignore_index=True)

    figure, axes = new_figure(len(METRICS), len(columns), height_to_width=0.78)
    for column, (name, control, title) in enumerate(columns):
        panel = data[(data["feature_set"] == name) & (data["control"] == control)]
        for row, (metric, label, scale) in enumerate(METRICS):
            _draw_panel(axes[row][column], panel, metric, scale)
            if column == 0:
                axes[row][0].set_ylabel(label)
        panel_title(axes[0][column], column, title, len(columns))
        axes[-1][column].set_xlabel("landmarks")
    legend_below(figure, [axis for row in axes for axis in row], columns=3)

    images = data.loc[data["metric"] != "rank_bound", "n"]
    caption = (
        "Injectivity of attention matrices against capacity: numerical rank, smallest distance of two rows relative to "
        "their median norm, and share of tokens that attend most to themselves, for the Nystrom Laplacian matrix with "
        "each normalisation; horizontal lines need no landmarks. The matrices are made for this figure: "
        f"layer-normalised features ({listed(feature_sets)}) under one random projection are queries and keys at once, "
        "and the landmark matrix is inverted exactly; they are not that model's own attention. Black dots: "
        "min(N, m + 1), which the rank of no Nystrom form can exceed. "
        f"N = {frame['tokens'].max()} tokens; mean over images (n = {span(images)}), bars "
        f"plus and minus one sample standard deviation. Last column: noise of the same channel "
        f"statistics. {_copies(frame)}"
        f"Preset {preset_name(inputs)} on {frame.attrs['provenance'].get('device', 'unknown device')}, float64."
        + non_finite_sentence(count_non_finite(data["value"]))
    )
    return Drawn(figure, data, caption)


def _draw_panel(axis: "Axes", panel: "pd.DataFrame", metric: str, scale: str) -> None:
    points = panel[panel["metric"] == metric]
    exact = points[points["landmarks"] == 0]
    for form, series in series_for(exact["form"], EXACT).items():
        level = exact.loc[exact["form"] == form, "value"].iloc[0]
        axis.axhline(level, color=series.color, linestyle=series.dashes, linewidth=0.8, label=series.label)
    nystrom = points[points["landmarks"] > 0]
    for size, (form, series) in enumerate(series_for(nystrom["form"], NYSTROM).items()):
        line = nystrom[nystrom["form"] == form].sort_values("landmarks")
        # Lines often coincide here: hollow marks of different sizes keep those below visible.
        axis.errorbar(
            line["landmarks"],
            line["value"],
            yerr=line["spread"].fillna(0.0),
            elinewidth=0.5,
            **series.line(markerfacecolor="none", markeredgewidth=0.7, markersize=2.6 + 1.1 * size),
        )
    if metric == "numerical_rank":
        bound = panel[panel["metric"] == "rank_bound"].drop_duplicates("landmarks").sort_values("landmarks")
        axis.plot(bound["landmarks"], bound["value"], "k.", markersize=1.8, zorder=5, label="bound min(N, m + 1)")
    axis.set_xscale("log")
    ticks = sorted(nystrom["landmarks"].unique())
    axis.set_xticks(ticks, [str(int(tick)) for tick in ticks])
    axis.minorticks_off()
    axis.set_yscale(scale, **({"nonpositive": "clip"} if scale == "log" else {}))


def _copies(frame: "pd.DataFrame") -> str:
    """Caption sentence on the control in which half the tokens are scaled copies of the others."""
    pairs = frame[(frame["control"] == COPIES) & (frame["metric"] == "collisions")].groupby("form")["value"].max()
    if not {"linear_row_sum", "injective"} <= set(pairs.index):
        return ""
    return (
        f"Where half the tokens are the others times 2, linear attention has up to {pairs['linear_row_sum']:g} "
        f"colliding pairs of rows an image, the column-normalised form {pairs['injective']:g}. "
    )
