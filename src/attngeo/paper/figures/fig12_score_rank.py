"""Figure 12: rank of matrices of scores against head dimension, with the derived lines (P4.a)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attngeo.paper import records
from attngeo.paper.render import Drawn
from attngeo.paper.results import listed, preset_name, rows_of, span
from attngeo.paper.style import Series, legend_below, new_figure, panel_title, series_for, styled

if TYPE_CHECKING:
    import pandas as pd

FORMS = {
    "dot": Series("dot product: $d$", "#7A7A7A", "o", "-"),
    "euclidean": Series("Euclidean: $d + 2$", "#000000", "v", (0, (1, 1.2))),
    "constant": Series("one metric: $d + 2$", "#ADADAD", "P", (0, (4, 1.5))),
    "query": Series("query's metric: $p$", "#0B4F9E", "s", "-"),
    "query_same_vector": Series("query's, $U$ of the same vector: $p$", "#7FA7D9", "<", (0, (4, 1.5))),
    "mean": Series("mean metric: $2p$", "#D55E00", "D", "-"),
    "mean_same_vector": Series("mean, $U$ of the same vector: $2p - d(d-1)/2$", "#3DB0A0", "^", (0, (4, 1.2, 1, 1.2))),
}
COLUMNS = ("form", "tokens", "dimension", "value", "predicted", "n", "spread", "smallest_counted", "largest_left_out")


@styled
def draw(inputs: Sequence[Path]) -> Drawn:
    """Draw analyses/score_rank.json: a panel for the fewest tokens and one for the most, points on derived lines."""
    (path,) = inputs
    frame = records.read(path)
    data = frame[frame["metric"] == "score_rank"]
    data = data.sort_values(list(COLUMNS[:3]), kind="stable", ignore_index=True)[["metric", *COLUMNS]]
    counts = sorted(data["tokens"].unique())
    shown = list(dict.fromkeys((counts[0], counts[-1])))
    figure, axes = new_figure(1, len(shown), height_to_width=0.95)
    for index, tokens in enumerate(shown):
        axis = axes[0][index]
        panel = data[data["tokens"] == tokens]
        for form, series in series_for(panel["form"], FORMS).items():
            line = panel[panel["form"] == form].sort_values("dimension")
            axis.plot(line["dimension"], line["predicted"], color=series.color, linestyle=series.dashes, linewidth=0.9)
            axis.plot(line["dimension"], line["value"], **(series.line(label=series.label) | {"linestyle": "none"}))
        axis.axhline(tokens, color="#555555", linestyle=":", linewidth=0.7)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xlabel("head dimension $d$")
        axis.set_ylabel("rank of the scores")
        panel_title(axis, index, f"{tokens:g} tokens", len(shown))
    legend_below(figure, axes[0], columns=2)
    return Drawn(figure, data, _caption(inputs, frame, data))


def _caption(inputs: Sequence[Path], frame: "pd.DataFrame", data: "pd.DataFrame") -> str:
    rows = rows_of(data)
    off = [row for row in rows if row["value"] != row["predicted"]]
    names = listed(f"{row['form']}, d = {row['dimension']:g}, N = {row['tokens']:g}: {row['value']:g}" for row in off)
    said = f"Off the prediction: {names}. " if off else ""
    rule = frame.attrs["provenance"].get("settings", {}).get("rule", "singular values above a floor of rounding")
    low = min(row["smallest_counted"] for row in rows)
    high = max(row["largest_left_out"] for row in rows)
    widest = frame.loc[frame["metric"] == "score_rank", "spread"].max()
    return (
        "Rank of the N x N matrix of scores before the softmax against the head dimension d: points measured in "
        "float64, lines derived, with p = 1 + d + d(d + 1)/2 and at most N (dotted). Metrics are made of a residual "
        "stream wider than a head, or of the very vector that enters the distance. Dot products, the Euclidean "
        "distance and one metric for all tokens are the controls. "
        f"Rank counts {rule}: the smallest counted is {low:.0e}, the largest left out {high:.0e} "
        f"of the largest. {len(rows) - len(off)} of {len(rows)} ranks are as derived (all "
        f"numbers of tokens). {said}Points are the rank furthest from the line over seeds (n = "
        f"{span(int(n) for n in data['n'])}; the interval that the seeds span is at most {widest:g} wide). "
        f"Preset {preset_name(inputs)} on "
        f"{frame.attrs['provenance'].get('device', 'unknown device')}."
    )
