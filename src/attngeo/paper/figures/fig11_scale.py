"""Figure 11: isometry excess and convergence of the graphs against size, and over the training of own models."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attngeo.paper.render import Drawn
from attngeo.paper.results import listed, non_finite_sentence, preset_name, require_inputs, rows_of, span
from attngeo.paper.style import GRAPH_CONTROL, Series, legend_below, new_figure, panel_title, series_for, styled
from attngeo.paper.walks import (
    MINIMAL_LAYER_CHANGES,
    MINIMAL_SIZES,
    WalkedModel,
    by_size,
    depth_trends,
    mean_over_layers,
    parameters_of,
    read_walks,
    size_correlations,
    walked_models,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

EXCESS, TREND, SHUFFLED = "isometry excess", "depth trend", "depth trend, shuffled depth"
COLUMNS = ("quantity", "family", "precision", "quantised", "size", "step", "parameters")
NUMBERS = ("value", "low", "high", "n", "interval", "non_finite")


@styled
def draw(inputs: Sequence[Path]) -> Drawn:
    """Draw connection-walk record files: both quantities against parameters and, of own models, against their steps."""
    require_inputs(inputs, "fig11", "model")
    frame = read_walks(inputs)
    models = walked_models(frame)
    data = _points(frame, models)
    last = data[data["finished"]]
    over_steps = data[data["step"].notna()]
    steps = over_steps["step"].nunique() > 1
    figure, axes = new_figure(2 if steps else 1, 2, height_to_width=0.8)
    families = series_for(sorted(set(data["family"])), {})
    for column, quantity in enumerate((EXCESS, TREND)):
        _draw_against_size(axes[0][column], last, quantity, families)
        panel_title(axes[0][column], column, f"{quantity} by size", 2)
        if steps:
            _draw_against_steps(axes[1][column], over_steps[over_steps["quantity"] == quantity])
            panel_title(axes[1][column], 2 + column, f"{quantity} in training", 2)
        for row in axes:
            row[column].axhline(0.0, color="#000000", linewidth=0.5)
            row[column].set_ylabel(quantity)
    if steps:
        axes[1][0].legend(fontsize="x-small")  # its lines are sizes, those above are families
    legend_below(figure, axes[0], columns=3)

    quantised = sorted(model.id for model in models.values() if model.quantised)
    marked = f" Hollow, and in no line or correlation: {listed(quantised)}, quantised." if quantised else ""
    shallow = sorted(set(models) - set(depth_trends(frame)["model"]))
    too_few = f" Not measured for {listed(shallow)}: fewer than {MINIMAL_LAYER_CHANGES + 1} layers." if shallow else ""
    in_training = (
        " Lower: the same over the training of the models trained here, by size, mean over seeds." if steps else ""
    )
    seeds = span(last[last["quantity"] == EXCESS]["seeds"])
    caption = (
        f"Both phenomena against the number of parameters, a point a model (seeds of one size averaged, n = {seeds}). "
        "(a) isometry score minus its shape-matched null, mean over layers. (b) Spearman correlation of the graph "
        "change with depth, below 0 where it falls; grey: the same layers in random order."
        f"{too_few} Bars: {listed(data['interval'])}. Lines join the sizes of a family at one precision.{marked} "
        f"{_correlations(frame, models)}{in_training} Preset {preset_name(inputs)} on {frame.attrs['devices']}."
        + non_finite_sentence(int(data["non_finite"].sum()))
    )
    return Drawn(figure, data, caption)


def _points(frame: "pd.DataFrame", models: dict[str, WalkedModel]) -> "pd.DataFrame":
    """One point a quantity, family, precision, size and step: the mean over seeds, with the smallest and largest.

    Of one seed low and high are the 95 % interval of its mean over layers (excess) or over windows (trend).
    """
    import pandas as pd

    sizes = parameters_of(frame)
    rows = []
    for quantity, values, over in (
        (EXCESS, mean_over_layers(frame, "excess"), "layers"),
        (TREND, depth_trends(frame), "windows"),
        (SHUFFLED, depth_trends(frame, "depth_shuffled"), "windows and shuffles"),
    ):
        of_size: dict[tuple[object, ...], list[dict[str, object]]] = {}
        for row in rows_of(values):
            model = models[row["model"]]
            key = (
                *(quantity, model.family, model.precision, model.quantised, model.size),
                *(math.nan if model.step is None else model.step, sizes.get(model.id, math.nan), model.finished),
            )
            of_size.setdefault(tuple(map(str, key)), []).append({"key": key, **row})
        for seeds in of_size.values():
            numbers = [float(str(seed["value"])) for seed in seeds]
            finite = [number for number in numbers if math.isfinite(number)]
            mean = sum(finite) / len(finite) if finite else math.nan
            if len(seeds) > 1:
                low, high = min(finite, default=math.nan), max(finite, default=math.nan)
                interval = "smallest and largest seed"  # an interval of the mean of two would say nothing
            else:
                low, high = (float(str(seeds[0][name])) for name in ("low", "high"))
                interval = f"95 % interval of the mean over {over}"
            n = len(seeds) if len(seeds) > 1 else seeds[0]["n"]
            rows.append((*seeds[0]["key"], len(seeds), mean, low, high, n, interval, len(numbers) - len(finite)))  # type: ignore[misc]
    return pd.DataFrame(rows, columns=[*COLUMNS, "finished", "seeds", *NUMBERS])


def _draw_against_size(axis: "Axes", data: "pd.DataFrame", quantity: str, families: dict[str, Series]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_xscale("log")
    axis.set_xlabel("parameters (M)")
    # Models within a decade would have one tick or overlapping ones.
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1e6:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    if quantity == TREND:
        shuffled = data[data["quantity"] == SHUFFLED]
        if len(shuffled):
            series = GRAPH_CONTROL["depth_shuffled"]
            axis.plot(shuffled["parameters"], shuffled["value"], **series.points())
    found = data[data["quantity"] == quantity]
    for (family, precision, quantised), group in found.groupby(["family", "precision", "quantised"], sort=True):
        series, points = families[str(family)], group.sort_values("parameters")
        style = series.points(markerfacecolor="none") if quantised else series.line()
        label = f"{family or 'no family'}, {precision}"
        _with_bars(axis, points["parameters"], points, style | {"label": label})


def _draw_against_steps(axis: "Axes", data: "pd.DataFrame") -> None:
    axis.set_xscale("symlog", linthresh=10)
    axis.set_xlabel("training step")
    order = data.groupby("size")["parameters"].first().sort_values()
    sizes = series_for([str(size) for size in order.index], {})
    for size in order.index:
        points = data[data["size"] == size].sort_values("step")
        _with_bars(axis, points["step"], points, sizes[str(size)].line())


def _with_bars(axis: "Axes", x: "pd.Series[float]", points: "pd.DataFrame", style: dict[str, object]) -> None:
    bars = [(points["value"] - points["low"]).fillna(0.0), (points["high"] - points["value"]).fillna(0.0)]
    axis.errorbar(x, points["value"], yerr=bars, elinewidth=0.6, capsize=1.5, **style)  # type: ignore[arg-type]


def _correlations(frame: "pd.DataFrame", models: dict[str, WalkedModel]) -> str:
    """Caption sentences: rank correlations with size within families and, of one size each, across them."""
    from scipy import stats

    sizes = parameters_of(frame)
    texts = []
    for name, values in (("excess", mean_over_layers(frame, "excess")), ("trend", depth_trends(frame))):
        sized = by_size(values[values["model"].isin(sizes)], models, sizes)
        within = [
            f"{family} {precision} {correlation:+.2f} (n = {count} sizes)"
            for (family, precision), (correlation, count) in size_correlations(sized).items()
        ]
        across = ""
        if len(sized) >= MINIMAL_SIZES and sized["value"].nunique() > 1:
            correlation = float(stats.spearmanr(sized["parameters"], sized["value"]).statistic)
            across = f", across families {correlation:+.2f} (n = {len(sized)})"
        texts.append(f"{name} within families {'; '.join(within) or f'none has {MINIMAL_SIZES} sizes'}{across}")
    return f"Spearman correlation with size: {'. Of the '.join(texts)}."
