"""Figure 5: time of kernel and solver, forward and backward, against torch, beside the published bars."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from attngeo.paper.kernel_timings import NOT_MEASURED, OWN, PUBLISHED_TOKENS, TORCH, older_sources, published, read
from attngeo.paper.render import Drawn
from attngeo.paper.results import count_non_finite, listed, non_finite_sentence, preset_name, span
from attngeo.paper.style import legend_below, new_figure, panel_title, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

PANELS = (
    ("laplacian_kernel", "forward", "Laplacian kernel, forward"),
    ("laplacian_kernel", "backward", "Laplacian kernel, backward"),
    ("newton_schulz_inverse", "forward", "Newton-Schulz, forward"),
    ("newton_schulz_inverse", "backward", "Newton-Schulz, backward"),
)
PUBLISHED_COLORS = {TORCH: "#B8B8B8", OWN: "#000000"}
CPU_COLORS = {TORCH: "#9DBBE3", OWN: "#0B4F9E"}
# By whose they are: in grey the light bars of torch are alike, and so are the dark ones of the kernels.
PAPER_HATCH, CPU_HATCH, GPU_HATCHES = "", "////", ("....", "xxxx")
GPU_COLORS = ({TORCH: "#F2BF9B", OWN: "#D55E00"}, {TORCH: "#A9DDD5", OWN: "#1E8477"})
RESOLUTION_MS = 0.005  # published times have two decimals: 0.00 is anything below


@dataclass(frozen=True)
class Bars:
    """One series of bars and where it comes from; `hatch` tells it apart in grey print."""

    label: str
    color: str
    hatch: str
    times: "pd.DataFrame"


@styled
def draw(inputs: Sequence[Path]) -> Drawn:
    """Draw benchmarks/operators.json and benchmarks/gpu.json beside the published timings, a panel an operation."""
    import pandas as pd

    cpu, gpu = (frame[frame["tokens"].eq(frame["landmarks"])] for frame in read(inputs))
    shown = {operation for operation, _, _ in PANELS}
    frames = [
        frame[frame["operation"].isin(shown) & frame["tokens"].isin(PUBLISHED_TOKENS)]
        for frame in (published(), _at_published_sizes(cpu), _at_published_sizes(gpu))
    ]
    series = _series(*frames)
    figure, axes = new_figure(2, 2, height_to_width=0.7)
    for index, (operation, direction, title) in enumerate(PANELS):
        axis = axes[index // 2][index % 2]
        _draw_panel(axis, series, operation, direction, measured=bool(len(frames[2])))
        panel_title(axis, index, title, 2)
    legend_below(figure, [axis for row in axes for axis in row], columns=2)
    data = pd.concat([frame for frame in frames if len(frame)], ignore_index=True)
    ours = data[data["kind"] == "ours"]
    caption = (
        "Time of the Laplacian kernel and of the Newton-Schulz inverse for N tokens and as many landmarks, forward and "
        "backward. Published (kind: paper): an A100, its batch, heads and head width not stated, distances without "
        f"their exponential; 0.00 ms as published is drawn hollow up to {RESOLUTION_MS} ms. Ours (kind: ours): "
        f"batch times heads {span(ours['slices'])}, head width {span(ours.loc[ours['channels'] > 0, 'channels'])}, "
        f"exponential included, 20 iterations, against the fastest form in torch; smallest of n = {span(ours['n'])} "
        "repeats, bars up to the median. Since sizes and devices differ, compare the two bars of one pair. The "
        "solver's backward pass in torch differentiates through the iterations, ours is -X^T G X^T. CPU: one thread "
        f"of {listed(set(cpu['device']))}. {_gpu_sentence(gpu, inputs)} Preset {preset_name(inputs)}."
        + non_finite_sentence(count_non_finite(data["time_ms"]))
    )
    return Drawn(figure, data, caption)


def _at_published_sizes(frame: "pd.DataFrame") -> "pd.DataFrame":
    """Of several batches at one number of tokens, the largest."""
    case = ["device", "operation", "direction", "tokens", "form"]
    return frame.sort_values("slices", ascending=False, kind="stable").drop_duplicates(case).sort_values(case)


def _series(paper: "pd.DataFrame", cpu: "pd.DataFrame", gpu: "pd.DataFrame") -> list[Bars]:
    series = []
    for form, color in PUBLISHED_COLORS.items():
        name = "torch" if form == TORCH else "CUDA"
        series.append(Bars(f"{name}, A100 (paper)", color, PAPER_HATCH, paper[paper["form"] == form]))
    for form, color in CPU_COLORS.items():
        name = "torch" if form == TORCH else "attngeo"
        series.append(Bars(f"{name}, one CPU thread (ours)", color, CPU_HATCH, cpu[cpu["form"] == form]))
    for index, (device, times) in enumerate(gpu.groupby("device", sort=True)):
        for form, color in GPU_COLORS[index % len(GPU_COLORS)].items():
            name = "torch" if form == TORCH else "attngeo"
            hatch = GPU_HATCHES[index % len(GPU_HATCHES)]
            series.append(Bars(f"{name}, {device} (ours)", color, hatch, times[times["form"] == form]))
    return series


def _draw_panel(axis: "Axes", series: Sequence[Bars], operation: str, direction: str, *, measured: bool) -> None:
    width = 0.86 / len(series)
    for place, bars in enumerate(series):
        times = bars.times
        times = times[(times["operation"] == operation) & (times["direction"] == direction)]
        centre = [PUBLISHED_TOKENS.index(tokens) + (place + 0.5) * width - 0.43 for tokens in times["tokens"]]
        values = [max(float(value), RESOLUTION_MS) for value in times["time_ms"]]
        drawn = axis.bar(centre, values, 0.92 * width, color=bars.color, edgecolor=bars.color, linewidth=0.5)
        for bar, value in zip(drawn, times["time_ms"], strict=True):
            bar.set_fill(value > 0)
            bar.set_hatch(bars.hatch)
            bar.set_hatchcolor("#FFFFFF")
        drawn.set_label(bars.label)
        spread = times["spread_ms"].astype(float).fillna(0.0)
        if spread.any():
            above = [[0.0] * len(values), list(spread)]
            axis.errorbar(centre, values, yerr=above, linestyle="none", color="#555555", elinewidth=0.5)
    if not measured:
        axis.text(0.02, 0.97, NOT_MEASURED, transform=axis.transAxes, va="top", fontsize="small", style="italic")
    axis.set_yscale("log")
    top = max((bar.get_height() for bar in axis.patches), default=1.0)  # type: ignore[attr-defined]
    axis.set_ylim(RESOLUTION_MS / 2, (2.0 if measured else 10.0) * top)
    axis.set_xticks(range(len(PUBLISHED_TOKENS)), [str(tokens) for tokens in PUBLISHED_TOKENS])
    axis.set_xlabel("tokens $N$")
    axis.set_ylabel("time (ms)")
    axis.grid(visible=False, axis="x")


def _gpu_sentence(gpu: "pd.DataFrame", inputs: Sequence[Path]) -> str:
    if not len(gpu):
        return "GPU: not measured by this project."
    older = older_sources(inputs)
    warning = f" ({listed(older)}: with earlier sources of the operators)" if older else ""
    return f"GPU: {listed(set(gpu['device']))}{warning}."
