"""Figure 8: what the centre token of validation images takes of every token, by attention kind, in trained models."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attngeo.paper import records
from attngeo.paper.render import Drawn
from attngeo.paper.results import listed, preset_name, require_inputs, rows_of, span
from attngeo.paper.style import ATTENTION, new_figure, series_for, styled, wrapped

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

KINDS = ("softmax", "gaussian", "laplacian", "riemannian")
COLOURS = "PuOr_r"  # orange above 1/N, purple below; told apart by colour-blind readers
COLUMNS = (
    *("dataset", "image", "class", "run", "attention", "control", "stage", "rows", "columns", "metric", "tercile"),
    *("value", "unit", "n", "spread", "spread_kind"),
)
LABEL_LETTERS = 14


@styled
def draw(inputs: Sequence[Path]) -> Drawn:
    """Draw analyses/attention_maps.json with the arrays beside it: a row an image and stage, a column a kind.

    Every image at the first stage, the first image of each data set also at the last.
    """
    require_inputs(inputs, "fig8", "run")
    (path,) = (path for path in inputs if path.suffix == ".json")
    (arrays_path,) = (path for path in inputs if path.suffix == ".npz")
    frame = records.read(path)
    with np.load(arrays_path, allow_pickle=False) as opened:
        arrays = {name: opened[name] for name in opened.files}
    shown = frame[frame["image"] != "all"]
    kinds = list(series_for([*KINDS, *shown["attention"].unique()], {kind: ATTENTION[kind] for kind in KINDS}))
    lines = _lines(shown)
    figure, axes = new_figure(len(lines), len(kinds) + 1, height_to_width=1.12)
    for index, (dataset, image, stage) in enumerate(lines):
        of_line = shown[(shown["dataset"] == dataset) & (shown["image"] == image) & (shown["stage"] == stage)]
        cell = rows_of(of_line)[0]
        _draw_image(axes[index][0], arrays[f"{dataset}/images"][int(image)], cell)
        axes[index][0].set_ylabel(
            f"{wrapped(str(cell['class']), LABEL_LETTERS)}\nstage {stage}", fontsize="x-small", labelpad=2
        )
        for axis, kind in zip(axes[index][1:], kinds, strict=True):
            of_map = of_line[of_line["attention"] == kind]
            if len(of_map):
                _draw_map(axis, arrays[f"{of_map['run'].iloc[0]}/stage {stage}"][int(image)], of_map)
            else:
                axis.text(0.5, 0.5, "no run", transform=axis.transAxes, ha="center", va="center", fontsize="x-small")
                axis.set_axis_off()
    names = series_for(kinds)
    for axis, title in zip(axes[0], ["image", *(names[kind].label for kind in kinds)], strict=True):
        axis.set_title(wrapped(title, LABEL_LETTERS), fontsize="small")
    data = frame.reindex(columns=list(COLUMNS)).astype(dict.fromkeys(("stage", "rows", "columns"), "Int64"))
    caption = (
        "What the output of the centre token (ring; the lower right one of the four around the centre) takes of every "
        "token, in the last block of the first and of the last stage of trained models, mean over heads, each row "
        "divided by its sum (which changes the Gaussian kind alone: its rows are not normalised). "
        f"{_signed(frame)}Colours are centred at uniform attention, 1/N: orange above, purple below, each map "
        "on a scale of its own, from 1/N - s to 1/N + s, with s under the map in units of 1/N. Below it the effective "
        "number of tokens exp(entropy) of the absolute weights, of N, and the share of the third of the tokens "
        f"farthest from it on the grid (uniform: a third). One seed a kind. {_means(frame)} "
        f"Preset {preset_name(inputs)} on {frame.attrs['provenance'].get('device', 'unknown device')}; "
        f"runs {listed(shown['run'], limit=8)}."
    )
    return Drawn(figure, data, caption)


def _lines(shown: "pd.DataFrame") -> list[tuple[str, str, int]]:
    """Data set, image and stage of every line of the figure."""
    lines = []
    for dataset in shown["dataset"].unique():
        of_set = shown[shown["dataset"] == dataset]
        stages, images = sorted(of_set["stage"].unique()), list(of_set["image"].unique())
        lines += [(dataset, image, int(stages[0])) for image in images]
        lines += [(dataset, images[0], int(stage)) for stage in stages[1:]]
    return lines


def _draw_image(axis: "Axes", pixels: np.ndarray, cell: Mapping[str, Any]) -> None:
    axis.imshow(pixels, interpolation="nearest")
    height, width = pixels.shape[0] / cell["rows"], pixels.shape[1] / cell["columns"]
    at = ((cell["token_column"] + 0.5) * width - 0.5, (cell["token_row"] + 0.5) * height - 0.5)
    axis.plot(*at, marker="o", markersize=5, markerfacecolor="none", markeredgecolor="#FFFFFF", markeredgewidth=1.6)
    axis.plot(*at, marker="o", markersize=5, markerfacecolor="none", markeredgecolor="#D55E00", markeredgewidth=0.8)
    _bare(axis)


def _draw_map(axis: "Axes", weights: np.ndarray, of_map: "pd.DataFrame") -> None:
    relative = weights * weights.size
    span_of_colours = max(float(np.abs(relative - 1).max()), 1e-6)
    axis.imshow(relative, cmap=COLOURS, vmin=1 - span_of_colours, vmax=1 + span_of_colours, interpolation="nearest")
    cell = rows_of(of_map)[0]
    at = (cell["token_column"], cell["token_row"])
    axis.plot(*at, marker="o", markersize=4, markerfacecolor="none", markeredgecolor="#000000", markeredgewidth=0.6)
    numbers = of_map.set_index("metric")["value"]
    far = of_map.loc[of_map["tercile"] == "far", "value"].iloc[0]
    axis.set_xlabel(
        f"s = {span_of_colours:.2g}\n{numbers['effective_tokens']:.0f} of {weights.size}, far {100 * far:.0f} %",
        fontsize="xx-small",
        labelpad=1.5,
    )
    _bare(axis)


def _bare(axis: "Axes") -> None:
    axis.set_xticks([])
    axis.set_yticks([])
    axis.grid(False)
    for spine in axis.spines.values():
        spine.set_visible(False)


def _signed(frame: "pd.DataFrame") -> str:
    """Caption sentence on the kinds whose rows hold negative weights."""
    signed = frame.loc[(frame["metric"] == "negative_share") & (frame["value"] > 0), "attention"]
    return f"Rows of {listed(signed)} hold negative weights. " if len(signed) else ""


def _means(frame: "pd.DataFrame") -> str:
    """Caption sentence with the numbers over all images at the first stage, beside models before training."""
    texts = []
    every = frame[frame["image"] == "all"]
    for dataset in every["dataset"].unique():
        of_set = every[every["dataset"] == dataset]
        first = of_set[of_set["stage"] == of_set["stage"].min()]
        trained = first[first["control"] == "trained"]
        parts = []
        for kind in series_for(trained["attention"], {kind: ATTENTION[kind] for kind in KINDS}):
            of_kind = trained[trained["attention"] == kind].set_index("metric")
            (top1,) = of_set.loc[(of_set["attention"] == kind) & (of_set["metric"] == "top1"), "value"]
            drawn = first[(first["attention"] == kind) & (first["control"] == "random_init")].set_index("metric")
            far = of_kind[of_kind["tercile"] == "far"]
            parts.append(
                f"{kind} {_plus_minus(of_kind.loc['effective_tokens'], '.0f')} (untrained "
                f"{drawn.loc['effective_tokens', 'value']:.0f}), {_plus_minus(far.iloc[0], '.2f')}, "
                f"{of_kind.loc['negative_share', 'value']:.2f}, {top1:.1f} %"
            )
        tokens = int(trained["rows"].iloc[0] * trained["columns"].iloc[0])
        n = span(int(n) for n in trained.loc[trained["metric"] == "effective_tokens", "n"])
        texts.append(f"{dataset} (n = {n} images, N = {tokens}): {'; '.join(parts)}")
    return (
        "At the first stage, mean and sample standard deviation over images: effective tokens (those of the model as "
        f"drawn), share of the farthest third, share of negative weights, and the run's top-1. {'. '.join(texts)}."
    )


def _plus_minus(row: "pd.Series[Any]", digits: str) -> str:
    value, spread = float(row["value"]), float(row["spread"])
    return f"{value:{digits}}" + ("" if math.isnan(spread) else f" +- {spread:{digits}}")
