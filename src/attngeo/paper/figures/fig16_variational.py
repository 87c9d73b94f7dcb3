"""Figure 16: attention's flow on the sphere as a stationary path: how errors fall with the step or with epsilon."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attngeo.paper import records
from attngeo.paper.render import Drawn
from attngeo.paper.results import count_non_finite, non_finite_sentence, preset_name, rows_of, span
from attngeo.paper.style import new_figure, panel_title, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

METHODS = {
    "projected_rk4": "RK4",
    "projected_euler": "Euler",
    "projected_rk4+5_points": "RK4, 5 points",
    "projected_rk4+3_points": "RK4, 3 points",
    "projected_euler+5_points": "Euler, 5 points",
    "flow_path": "gradient flow",
    "generic_path": "generic path",
    "free_end": "L-BFGS, free end",
    "held_ends": "L-BFGS, both ends held",
    "beta_0": r"$\beta$ = 0",
    "beta_4": r"$\beta$ = 4",
    "beta_9": r"$\beta$ = 9",
    "beta_16": r"$\beta$ = 16",
    "softmax_flow": "softmax flow",
    "quadrature": "derived",
}
CONTROLS = {
    "perturbed_path": "bent path",
    "one_over_n": "1/n flow",
    "softmax_normalised": "softmax flow",
    "uniform_weights": r"$\beta$ = 0 (uniform weights)",
}
FLOW_STYLES = (("#D55E00", "o", "-"), ("#0B4F9E", "s", (0, (4, 1.5))), ("#3DB0A0", "D", (0, (4, 1.2, 1, 1.2))))
CONTROL_STYLES = (("#000000", "^", (0, (1, 1.2))), ("#7A7A7A", "v", (0, (1, 1.2))), ("#ADADAD", "P", (0, (1, 1.2))))
NO_CONTROL = "none"
KEYS = ["check", "method", "control", "metric", "step"]


@dataclass(frozen=True)
class Panel:
    """Which series a panel shows: checks and metrics, and names of series that are told apart by check."""

    title: str
    xlabel: str
    ylabel: str
    metrics: Mapping[str, str]
    methods: tuple[str, ...] | None = None
    linear: bool = False
    names: Mapping[str, str] = field(default_factory=dict)


PANELS = (
    Panel(
        "projected Euler-Lagrange residual",
        "step $h$",
        "relative residual",
        {"euler_lagrange": "relative_residual"},
        ("projected_rk4+5_points", "projected_rk4+3_points", "projected_euler+5_points"),
    ),
    Panel(
        "energy-dissipation balance",
        "step $h$",
        "relative imbalance",
        {"energy_dissipation": "relative_imbalance"},
        ("projected_rk4", "projected_euler"),
    ),
    Panel(
        "first variation", r"variation size $\varepsilon$", "change of the action", {"first_variation": "action_change"}
    ),
    Panel(
        "perturbed functional",
        r"perturbation $\varepsilon$",
        "response",
        {"minimiser_shift": "shift", "minimum_change": "change", "minimiser_excess": "excess"},
        names={
            "minimiser_shift": "shift of the minimiser (rad)",
            "minimum_change": "change of the minimum",
            "minimiser_excess": "excess of $J_0$",
        },
    ),
    Panel(
        "perturbation theory",
        r"perturbation $\varepsilon$",
        "relative error",
        {f"{response}_predicted": "error" for response in ("minimiser_shift", "minimum_change", "minimiser_excess")},
        names={
            "minimiser_shift_predicted": "predicted shift",
            "minimum_change_predicted": "predicted change",
            "minimiser_excess_predicted": "predicted excess",
        },
    ),
    Panel(
        "stationary paths against the flow",
        "step $h$",
        "distance (rad)",
        {"stationary_path": "distance"},
        ("free_end", "held_ends"),
    ),
    Panel(
        "clusters of random tokens",
        "time $t$",
        "clusters",
        {"clusters": "clusters"},
        ("beta_0", "beta_4", "beta_9", "beta_16"),
    ),
    Panel(
        "time to one cluster", r"$\beta$", "time $t$", {"clustering_time": "time"}, ("quadrature", "softmax_flow"), True
    ),
)


@styled
def draw(inputs: Sequence[Path]) -> Drawn:
    """Draw analyses/variational.json: log-log panels, each series with its fitted slope, if any, in the legend."""
    (path,) = inputs
    frame = records.read(path)
    figure, axes = new_figure(len(PANELS) // 2, 2, height_to_width=0.8)
    shown = []
    for index, panel in enumerate(PANELS):
        axis = axes[index // 2][index % 2]
        chosen = frame["check"].map(panel.metrics.get).eq(frame["metric"])
        if panel.methods is not None:
            chosen &= frame["method"].isin(panel.methods)
        points = frame[chosen].sort_values(KEYS, kind="stable")
        _draw_panel(axis, panel, points, frame[frame["metric"] == "slope"])
        panel_title(axis, index, panel.title)
        shown.append(points)
    slopes = frame[(frame["metric"] == "slope") & frame["check"].isin([c for p in PANELS for c in p.metrics])]
    data = _concatenate([*shown, slopes.sort_values(KEYS[:-1], kind="stable")])
    points = data[data["metric"] != "slope"]
    caption = (
        "The attention flow on the sphere against its variational problem. (a) Residual of the projected "
        "Euler-Lagrange equation of the energy-dissipation functional and (b) energy-dissipation imbalance along "
        "integrated paths of the gradient flow, against the step. (c) Change of the action under a variation of size "
        "epsilon, along the gradient flow's path and along a bent (generic) one. (d) Response of minimiser and minimum "
        "to epsilon times another functional, (e) what first-order perturbation theory leaves of it. (f) Distance from "
        "the flow's path to the paths that minimise the action minus the final energy (free end) or the action alone "
        "(ends held). (g) Clusters of 32 random tokens in three dimensions, chains of neighbours closer than 0.1 rad, "
        "under the softmax flow. (h) Time until 4 orthogonal tokens are within "
        "0.1 rad of one another under that flow, and the derived integral. Dotted: controls (other flows, a bent path, "
        "uniform weights). Points are means over seeds "
        f"(n = {span(points['n'])}), bars plus and minus one sample standard deviation (left out where they would "
        f"reach 0); numbers in the legends are fitted log-log slopes. {_derived(shown, slopes)}"
        f"Preset {preset_name(inputs)} on {frame.attrs['provenance'].get('device', 'unknown device')}, float64."
        + non_finite_sentence(count_non_finite(points["value"]))
    )
    return Drawn(figure, data, caption)


def _concatenate(parts: "list[pd.DataFrame]") -> "pd.DataFrame":
    import pandas as pd

    columns = [*KEYS, "value", "unit", "n", "spread", "spread_kind", "expected"]
    return pd.concat(parts, ignore_index=True)[columns]


def _draw_panel(axis: "Axes", panel: Panel, points: "pd.DataFrame", slopes: "pd.DataFrame") -> None:
    styles = {True: iter(FLOW_STYLES * 3), False: iter(CONTROL_STYLES * 3)}
    for check, method, control in _series_order(panel, points):
        labels = {"check": check, "method": method, "control": control}
        series, slope = _having(points, labels), _having(slopes, labels)
        color, marker, dashes = next(styles[control == NO_CONTROL])
        label = _label(panel, check, method, control)
        if len(slope):
            label += f": {slope['value'].iloc[0]:.2f}".replace("-0.00", "0.00")
        axis.errorbar(
            series["step"],
            series["value"].where(series["value"] > 0),
            yerr=_bars(series),
            color=color,
            marker=marker,
            linestyle=dashes,
            label=label,
            elinewidth=0.6,
        )
    axis.set_xscale("linear" if panel.linear else "log")
    axis.set_yscale("log")
    steps = sorted(points["step"].unique())
    axis.set_xticks(steps, [f"{step:.3g}" for step in steps])
    axis.minorticks_off()
    axis.set_xlabel(panel.xlabel)
    axis.set_ylabel(panel.ylabel)
    axis.legend(loc="upper center", bbox_to_anchor=(0.45, -0.3), ncols=2, borderaxespad=0.0, handlelength=2.2)


def _series_order(panel: Panel, points: "pd.DataFrame") -> list[tuple[str, str, str]]:
    """(check, method, control) of every line: those under test first; of several methods a control shows one."""
    checks = list(panel.metrics)
    methods = list(panel.methods or METHODS)
    lines = set(points[["check", "method", "control"]].itertuples(index=False, name=None))
    if panel.methods is not None:
        lines = {line for line in lines if line[2] == NO_CONTROL or line[1] == methods[0]}

    def rank(line: tuple[str, str, str]) -> tuple[bool, int, int, str, str]:
        check, method, control = line
        known = methods.index(method) if method in methods else len(methods)
        return control != NO_CONTROL, checks.index(check), known, method, control

    return sorted(lines, key=rank)


def _having(frame: "pd.DataFrame", labels: Mapping[str, str]) -> "pd.DataFrame":
    for name, value in labels.items():
        frame = frame[frame[name] == value]
    return frame


def _bars(series: "pd.DataFrame") -> list[float]:
    """Half bars; none where they would reach 0 on the logarithmic axis."""
    rows: list[dict[str, Any]] = rows_of(series)
    return [row["spread"] if 0 < row["spread"] < row["value"] else 0.0 for row in rows]


def _label(panel: Panel, check: str, method: str, control: str) -> str:
    if control != NO_CONTROL:
        return CONTROLS.get(control, control.replace("_", " "))
    return panel.names.get(check) or METHODS.get(method, method)


def _derived(shown: "Sequence[pd.DataFrame]", slopes: "pd.DataFrame") -> str:
    """Caption sentence with the slope that the derivation gives for every line."""
    texts = []
    for index, (panel, points) in enumerate(zip(PANELS, shown, strict=True)):
        lines: dict[float, list[str]] = {}
        for check, method, control in _series_order(panel, points):
            slope = _having(slopes, {"check": check, "method": method, "control": control})
            if len(slope):
                label = _label(panel, check, method, control).replace("$J_0$", "J_0")
                lines.setdefault(float(slope["expected"].iloc[0]), []).append(label)
        if lines:
            orders = ", ".join(f"{order:g} ({', '.join(labels)})" for order, labels in lines.items())
            texts.append(f"({chr(ord('a') + index)}) {orders}")
    return f"The derivation gives the slopes {'; '.join(texts)}. " if texts else ""
