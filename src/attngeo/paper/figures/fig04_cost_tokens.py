"""Figure 4: time and peak memory of one attention layer against the number of tokens, with fitted exponents (P2.a)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from attngeo.paper import records
from attngeo.paper.render import Drawn
from attngeo.paper.results import preset_name, rows_of, span
from attngeo.paper.style import ATTENTION, Series, legend_below, new_figure, panel_title, series_for, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

PANELS = (
    ("time_ms", "time_exponent", "time", "ms"),
    ("peak_memory_mib", "memory_exponent", "peak memory", "MiB"),
)
KINDS = {
    "softmax": replace(ATTENTION["softmax"], label="softmax, plain"),
    "softmax_fused": Series("softmax, fused", "#9C9C9C", "X", (0, (4, 1.5))),
    "softmax_sr": ATTENTION["softmax_sr"],
    "gaussian": ATTENTION["gaussian"],
    "laplacian": ATTENTION["laplacian"],
    "laplacian_exact": Series("Laplacian, exact", "#8C4A7D", "P", (0, (1, 1.2))),
    "linear_injective": Series("linear, injective", "#7FA7D9", "<", "-"),
    "riemannian": ATTENTION["riemannian"],
}
COLUMNS = (
    *("attention", "pass", "metric", "tokens", "value", "unit", "n", "spread", "spread_kind"),
    *("from_tokens", "to_tokens", "why"),
)


@styled
def draw(inputs: Sequence[Path]) -> Drawn:
    """Draw the largest pass of benchmarks/tokens.json, a line a kind; the other passes are in the data."""
    (path,) = inputs
    frame = records.read(path)
    shown = [*(metric for panel in PANELS for metric in panel[:2]), "left_out"]
    data = frame[frame["metric"].isin(shown)].reindex(columns=list(COLUMNS))
    data = data.sort_values(list(COLUMNS[:4]), kind="stable", ignore_index=True)
    drawn_pass = str(frame.loc[frame["metric"] == "time_ms", "pass"].iloc[-1])
    panel = data[data["pass"] == drawn_pass]
    exponents = {(row["attention"], row["metric"]): row for row in rows_of(panel[panel["metric"].isin(shown[1::2])])}

    figure, axes = new_figure(1, len(PANELS), height_to_width=0.95)
    for index, (metric, _, title, unit) in enumerate(PANELS):
        axis = axes[0][index]
        _draw_panel(axis, panel[panel["metric"] == metric], exponents)
        panel_title(axis, index, f"{title}, {drawn_pass}", len(PANELS))
        axis.set_xlabel("tokens $N$")
        axis.set_ylabel(f"{title} ({unit})")
    legend_below(figure, axes[0], columns=2)
    layer = rows_of(frame[frame["metric"] == "time_ms"])[0]
    times = data[data["metric"] == "time_ms"]
    caption = (
        f"Cost of one attention layer against the number of tokens, {drawn_pass}: one image, heads {layer['heads']:g}, "
        f"head width {layer['head_dim']:g}, {layer['landmarks']:g} landmarks at most, float32, one thread, each point "
        "in a process of its own. Time: the smallest processor time of n = "
        f"{span(int(n) for n in times['n'])} repeats, memory reused between them (how far the "
        "median lies above it is in fig4.csv); peak memory: in use at once by one pass, beyond the "
        "process before it. Plain softmax keeps its N x N weights, the fused one does not. Dotted: "
        f"slopes 1 and 2. {_exponents_sentence(data)}{_left_out_sentence(data)}Preset {preset_name(inputs)} on "
        f"{frame.attrs['provenance'].get('device', 'unknown device')}."
    )
    return Drawn(figure, data, caption)


def _draw_panel(axis: "Axes", points: "pd.DataFrame", exponents: Mapping[tuple[str, str], Mapping[str, float]]) -> None:
    for kind, series in series_for(points["attention"], KINDS).items():
        line = points[points["attention"] == kind].sort_values("tokens")
        axis.plot(line["tokens"], line["value"], **series.line(label=series.label + _in_legend(kind, exponents)))
    axis.set_xscale("log")
    axis.set_yscale("log", nonpositive="clip")
    found = points[points["value"] > 0]
    if len(found):
        _draw_slopes(axis, found)


def _draw_slopes(axis: "Axes", points: "pd.DataFrame") -> None:
    """Lines of slope 1 and 2 through the middle of the measured sizes, below everything that was measured there."""
    bottom, top = axis.get_ylim()
    sizes = sorted(points["tokens"].unique())
    middle = sizes[len(sizes) // 2]
    through = 0.35 * float(points.loc[points["tokens"] == middle, "value"].min())
    for slope in (1, 2):
        ends = [through * (tokens / middle) ** slope for tokens in (middle, sizes[-1])]
        axis.plot([middle, sizes[-1]], ends, color="#555555", linestyle=":", linewidth=0.7)
        if bottom < ends[-1] < top:
            axis.annotate(
                f"{slope}", (sizes[-1], ends[-1]), xytext=(2, -2), textcoords="offset points", fontsize="x-small"
            )
    axis.set_ylim(bottom, top)


def _in_legend(kind: str, exponents: Mapping[tuple[str, str], Mapping[str, float]]) -> str:
    """The exponents of a kind, time and memory, as far as there are any."""
    found = [exponents[kind, metric]["value"] for _, metric, _, _ in PANELS if (kind, metric) in exponents]
    return f" ({', '.join(f'{value:.2f}' for value in found)})" if found else ""


def _label(kind: str) -> str:
    return KINDS[kind].label if kind in KINDS else kind


def _exponents_sentence(data: "pd.DataFrame") -> str:
    """Every fitted exponent that the ledger's rule looks at, and how they were fitted."""
    fitted = data[data["metric"].isin([panel[1] for panel in PANELS])]
    if not len(fitted):
        return "No exponent was fitted: that takes three sizes from 1,024 tokens on. "
    parts = []
    for kind in ("laplacian", "softmax"):
        for row in rows_of(fitted[fitted["attention"] == kind]):
            word = row["metric"].split("_")[0]
            parts.append(f"{KINDS[kind].label}, {row['pass']}, {word} {row['value']:.2f} ± {row['spread']:.2f}")
    sizes = span(int(n) for n in fitted["n"])
    return (
        f"In brackets: exponents of time and memory, least squares on logarithms of {sizes} sizes from "
        f"{int(fitted['from_tokens'].min()):,} to {int(fitted['to_tokens'].max()):,} tokens, ± one standard error. "
        "Below 1 a part of the cost does not grow with the tokens. "
        f"The ledger takes the worst of each kind's passes: {'; '.join(parts)}. "
    )


def _left_out_sentence(data: "pd.DataFrame") -> str:
    """Which cases were not measured; the reasons are in the data."""
    missing = data[data["metric"] == "left_out"]
    if not len(missing):
        return ""
    cases = [
        f"{_label(str(kind))}, {direction}, from {int(group['tokens'].min()):,}"
        for (kind, direction), group in missing.groupby(["attention", "pass"], sort=True)
    ]
    return f"Left out for time or memory (tokens): {'; '.join(cases)}. "
