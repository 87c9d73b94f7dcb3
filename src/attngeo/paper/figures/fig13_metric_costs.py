"""Figure 13: what metrics cost by dimension and rank, beside dense forms, and their share of a block (P4.b)."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attngeo.paper import records
from attngeo.paper.render import Drawn
from attngeo.paper.results import preset_name, rows_of, span
from attngeo.paper.style import Series, legend_below, new_figure, panel_title, series_for, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

OPERATIONS = {
    "solve": Series("inverse", "#0B4F9E", "o", "-"),
    "logdet": Series("log-determinant", "#3DB0A0", "D", (0, (4, 1.2, 1, 1.2))),
    "distance": Series("distance of a pair", "#D55E00", "s", (0, (4, 1.5))),
}
DENSE = Series("", "#7A7A7A", "^", (0, (1, 1.2)))
PARTS = {
    "distance": ("distances", "#D55E00"),
    "solve": ("applying the inverse", "#0B4F9E"),
    "metric of heads": ("making the heads' metric", "#7FA7D9"),
    "metric of the feed-forward": ("making the feed-forward's metric", "#B9B9B9"),
}
COLUMNS = (
    *("metric", "operation", "form", "part", "shape", "dimension", "rank", "tokens", "value", "unit", "n"),
    *("spread", "spread_kind", "smallest", "largest", "measured_at", "of"),
)
_D_RANK = 16


@styled
def draw(inputs: Sequence[Path]) -> Drawn:
    """Draw benchmarks/low_rank_metric.json: time against d and against r, and overheads of blocks by part."""
    (path,) = inputs
    frame = records.read(path)
    data = frame.reindex(columns=list(COLUMNS)).sort_values(list(COLUMNS[:8]), kind="stable", ignore_index=True)
    times = data[data["metric"] == "time_us"]
    rank = max((int(r) for r in times["rank"].dropna() if r <= _D_RANK), default=int(times["rank"].min()))
    largest = times.loc[times["form"] == "low rank", "dimension"].max()
    figure, axes = new_figure(2, 2, height_to_width=0.85)
    _lines(axes[0][0], times[(times["rank"] == rank) | (times["form"] == "dense")], "dimension")
    panel_title(axes[0][0], 0, f"by dimension, r = {rank}", 2)
    axes[0][0].set_xlabel("dimension $d$")
    _lines(axes[0][1], times[(times["dimension"] == largest) & (times["form"] == "low rank")], "rank")
    panel_title(axes[0][1], 1, f"by rank, d = {largest:g}", 2)
    axes[0][1].set_xlabel("rank $r$")
    measured = data[data["metric"] == "part_overhead"]
    _bars(axes[1][0], measured, [f"{row['dimension']:g}, {row['rank']:g}" for row in _cases(measured)], "dimension")
    panel_title(axes[1][0], 2, "block, measured", 2)
    axes[1][0].set_xlabel("$d$, $r$")
    projected = data[(data["metric"] == "projected_overhead") & (data["part"] != "all")]
    _bars(axes[1][1], projected, [f"{row['shape']}, {row['rank']:g}" for row in _cases(projected)], "shape")
    panel_title(axes[1][1], 3, "model, projected", 2)
    axes[1][1].set_xlabel("parameters, $r$")
    legend_below(figure, [axes[0][0], axes[1][0]], columns=3)
    return Drawn(figure, data, _caption(inputs, frame, data))


def _lines(axis: "Axes", times: "pd.DataFrame", along: str) -> None:
    for form in ("low rank", "dense"):
        for operation, series in series_for(times["operation"], OPERATIONS).items():
            line = times[(times["operation"] == operation) & (times["form"] == form)].sort_values(along)
            if not len(line):
                continue
            style = series.line(label=series.label)
            if form == "dense":
                style |= {"label": f"{series.label}, dense", "linestyle": DENSE.dashes, "markerfacecolor": "none"}
            axis.plot(line[along], line["value"], **style)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_ylabel("time (us)")


def _cases(rows: "pd.DataFrame") -> "list[dict[str, object]]":
    return rows_of(rows[rows["part"] == "solve"].sort_values(["dimension", "rank"], kind="stable"))


def _bars(axis: "Axes", rows: "pd.DataFrame", labels: list[str], by: str) -> None:
    """Stacked shares (%) of the plain block's time; what is below 0 is drawn as nothing."""
    bottoms = [0.0] * len(labels)
    for part, (label, color) in PARTS.items():
        values = rows[rows["part"] == part].sort_values(["dimension", "rank"], kind="stable")["value"]
        heights = [100.0 * max(0.0, float(value)) for value in values]
        axis.bar(range(len(heights)), heights, bottom=bottoms[: len(heights)], color=color, label=label, width=0.7)
        bottoms = [low + high for low, high in zip(bottoms, heights, strict=True)]
    axis.axhline(10.0, color="#555555", linestyle=":", linewidth=0.7)
    axis.set_xticks(range(len(labels)), labels, rotation=45)
    axis.set_ylabel("overhead (%)")


def _caption(inputs: Sequence[Path], frame: "pd.DataFrame", data: "pd.DataFrame") -> str:
    slopes = [
        f"{re.sub('_exponent_(small_|large_)?', ' in ', row['metric'])} {row['value']:.2f}"
        f" ({row['smallest']:g} to {row['largest']:g})"
        for row in rows_of(data[data["metric"].str.contains("_exponent_")])
    ]
    blocks = [
        f"d = {row['dimension']:g}, r = {row['rank']:g}: {100 * row['value']:.0f} %"
        for row in rows_of(data[data["metric"] == "block_overhead"])
    ]
    tokens = sorted({int(row["tokens"]) for row in rows_of(data[data["metric"] == "block_overhead"])})
    return (
        "Cost of low-rank metrics. (a) Time for a token, or for a pair of tokens, against the dimension, low rank and "
        "dense (Cholesky; a product with G), and (b) against the rank. Fitted exponents, with the sizes fitted: "
        f"{'; '.join(slopes)}. (c) What a block with metrics takes longer than one of softmax attention (weights in "
        f"memory) and an MLP of ratio 4, {span(tokens)} tokens, by part measured alone; of whole blocks: "
        f"{'; '.join(blocks)}. (d) The same at shapes of models with 1 and 8 billion parameters at contexts of 2,048 "
        "and 8,192 tokens, projected from the rates of the largest block measured. Dotted: the 10 % of the ledger's "
        "rule. Smallest processor time of n = "
        f"{span(int(n) for n in data.loc[data['metric'] == 'time_us', 'n'])} repeats (how far the median lies above "
        "it is in fig13.csv), one thread, float32, forward "
        f"passes. Preset {preset_name(inputs)} on {frame.attrs['provenance'].get('device', 'unknown device')}."
    )
