"""Figure 3: accuracy against cost; the published ImageNet points, then ours on each of the preset's data sets."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attngeo.paper.render import Drawn
from attngeo.paper.results import (
    GROUP,
    listed,
    made_from,
    non_finite_sentence,
    panel_names,
    preset_name,
    read_published,
    read_seeds,
    rows_of,
    size_of,
    span,
    summarise,
)
from attngeo.paper.style import ATTENTION, Series, legend_below, name_point, new_figure, panel_title, series_for, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

FAMILIES = {
    "LaplacianFormer": Series("LaplacianFormer", ATTENTION["laplacian"].color, "^", "-"),
    "SOFT": Series("SOFT", ATTENTION["gaussian"].color, "s", (0, (4, 1.5))),
    "InLine-PVT": Series("InLine-PVT", "#7A7A7A", "o", (0, (1, 1.2))),
    "BiFormer": Series("BiFormer", "#8C4A7D", "P", "none"),
    "MLLA": Series("MLLA", "#000000", "X", "none"),
}
COLUMNS = (
    *("panel", "model", "attention", "dataset", "recipe", "top1_pct", "std", "n"),
    *("parameters_m", "gmac", "gmac_with_apart", "kind", "source"),
)


@styled
def draw(inputs: Sequence[Path]) -> Drawn:
    """Draw runs' final.json beside the published points; error bars are +-1 sample std over seeds."""
    import pandas as pd

    finals = read_seeds(inputs, "fig3")
    published = read_published("imagenet.csv")
    published = published[published["kind"] == "paper"].assign(
        panel="published", dataset="ImageNet-1K", recipe="", n=math.nan, std=math.nan, gmac_with_apart=math.nan
    )
    costed = published.dropna(subset=["gmac"])
    ours = _our_points(finals)
    data = pd.concat([published, ours], ignore_index=True)[list(COLUMNS)]

    panels = panel_names(finals)
    figure, axes = new_figure(1, 1 + len(panels), height_to_width=0.85 if len(panels) < 2 else 1.05)
    _draw_published(axes[0][0], costed)
    panel_title(axes[0][0], 0, "ImageNet-1K, published", 1 + len(panels))
    axes[0][0].set_ylabel("top-1 accuracy (%)")
    for index, ((dataset, recipe), title) in enumerate(panels.items(), start=1):
        _draw_ours(axes[0][index], ours[(ours["dataset"] == dataset) & (ours["recipe"] == recipe)])
        panel_title(axes[0][index], index, f"{title}, ours", 1 + len(panels))
        axes[0][index].set_xlabel("multiply-accumulates (M)")
    axes[0][0].set_xlabel("multiply-accumulates (G)")
    legend_below(figure, axes[0], columns=5)

    no_cost = sorted(published.loc[published["gmac"].isna(), "model"])
    seeds = span(finals.groupby(list(GROUP))["seed"].nunique())
    caption = (
        "Accuracy against cost. (a) Published ImageNet-1K points (kind: paper; neither n nor spread reported); "
        f"published without a cost and so not drawn: {', '.join(no_cost)}. Other panels: ours, mean over seeds "
        f"(n = {seeds}), bars plus and minus one sample standard deviation; the mark counts convolutions, linear "
        "layers and products with tokens, the thin line to its right adds distances, the solver, Nystrom statistics "
        "and metric inversions. The published counting rule is unknown and the data sets differ, so no panel is to be "
        f"compared with another point by point. {_without_cost(ours)}"
        f"{made_from(preset_name(inputs), finals)}" + non_finite_sentence(int(ours["non_finite"].sum()))
    )
    return Drawn(figure, data, caption)


def _our_points(finals: "pd.DataFrame") -> "pd.DataFrame":
    points = summarise(finals, GROUP, "accuracy").rename(columns={"mean": "top1_pct"})
    costs = finals.groupby(list(GROUP))[["parameters", "gmac", "gmac_with_apart"]].first().reset_index()
    points = points.merge(costs, on=list(GROUP), validate="one_to_one")
    return points.assign(
        panel="ours",
        kind="ours",
        source="this project",
        parameters_m=points["parameters"] / 1e6,
    )


def _without_cost(ours: "pd.DataFrame") -> str:
    """Caption sentence on our models whose cost could not be counted; empty if there are none."""
    models = listed(ours.loc[ours["gmac"].isna(), "model"])
    return f"Not drawn, since some of their layers give no count: {models}. " if models else ""


def _draw_published(axis: "Axes", points: "pd.DataFrame") -> None:
    for family, series in series_for(points["family"], FAMILIES).items():
        curve = points[points["family"] == family].sort_values("gmac")
        axis.plot(curve["gmac"], curve["top1_pct"], **series.line())
    axis.set_xscale("log")
    ticks = [2, 4, 8, 16]
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()


def _draw_ours(axis: "Axes", points: "pd.DataFrame") -> None:
    """A point a model; where a kind has several sizes, each point names its own."""
    for kind, series in series_for(points["attention"]).items():
        of_kind = points[points["attention"] == kind]
        for point in rows_of(of_kind):
            x, apart = 1000 * point["gmac"], 1000 * point["gmac_with_apart"]
            y, std = point["top1_pct"], point["std"]
            axis.plot([x, apart], [y, y], color=series.color, linewidth=0.6, marker="|", markevery=[1])
            axis.errorbar(x, y, yerr=None if math.isnan(std) else std, capsize=2, **series.points())
            if len(of_kind) > 1:
                name_point(axis, x, y, size_of(point["model"]), series.color)
    low, high = axis.get_xlim()
    axis.set_xlim(min(0.0, low) if low < high / 2 else low, high)
