"""Figure 1: kernel profiles over real distances, attention mass by distance, and statistics of the distances."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attngeo.paper import records
from attngeo.paper.render import Drawn
from attngeo.paper.results import count_non_finite, non_finite_sentence, preset_name, rows_of, span
from attngeo.paper.style import ATTENTION, Series, legend_below, new_figure, panel_title, series_for, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

RULE, DIFFERENCE = "middle_tercile_mass_excess", "middle_mass_difference"
TERCILES = ("near", "middle", "far")
KERNELS = {kind: ATTENTION[kind] for kind in ("laplacian", "gaussian")}
NOISE = Series("Gaussian noise of the same covariance", "#7A7A7A", "D", (0, (1, 1.2)))
UNIFORM = Series("uniform attention", "#000000", "", (0, (1, 1.2)))
SHUFFLED = Series("tokens shuffled", "#7A7A7A", "x", "none")
PARTITIONS = {
    "l2": Series("terciles by l2 distance", "#8C4A7D", "o", "none"),
    "l1": Series("terciles by l1 distance", "#8C4A7D", "v", "none"),
}
COLUMNS = (
    *("panel", "features", "control", "metric", "kernel", "scale", "matched_at", "partition", "tercile", "distance"),
    *("in", "at", "value", "unit", "n", "spread", "spread_kind"),
)


@styled
def draw(inputs: Sequence[Path]) -> Drawn:
    """Draw analyses/attention_distance.json: upper panels of its first feature set, lower ones of all sets."""
    import pandas as pd

    (path,) = inputs
    frame = records.read(path)
    frame = frame[frame["layer"] == "mean"]
    sets = list(frame["features"].unique())
    rule = frame[frame["metric"] == RULE].set_index("features")
    at = _rule_similarity(frame)
    matched = frame[(frame["matched_at"] == at) | frame["matched_at"].isna() & (frame["scale"] != "fixed")]
    first = matched[matched["features"] == sets[0]]
    features, noise = (matched[matched["control"] == control] for control in ("features", "gaussian_noise"))

    figure, axes = new_figure(2, 3, height_to_width=0.95)
    (profile, mass, density), (difference, distance, similarity) = axes
    parts = {
        "a": _draw_profiles(profile, first[first["control"] == "features"]),
        "b": _draw_masses(mass, first),
        "c": _draw_densities(density, first),
        "d": _draw_differences(difference, sets, features, noise),
        "e": _draw_spatial(distance, sets, matched),
        "f": _draw_similarities(similarity, sets, frame),
    }
    for index, (axis, title) in enumerate(
        zip(
            (axis for row in axes for axis in row),
            ("profiles", "mass by distance", "distances", "middle third", "reach", "by similarity"),
            strict=True,
        )
    ):
        panel_title(axis, index, title, 3)
    legend_below(figure, [axis for row in axes for axis in row], columns=3)
    data = pd.concat([part.assign(panel=panel) for panel, part in parts.items()], ignore_index=True)
    data = data.reindex(columns=list(COLUMNS))
    caption = (
        "Exact Laplacian kernel exp(-|q - k|_1 / lambda) and Gaussian kernel exp(-|q - k|^2 / (2 sigma^2)), each with "
        f"the bandwidth of every head at which its mean over pairs of different tokens is {at:.3g}; rows divided by "
        f"their sum, a token's weight on itself left out. (a) to (c): {sets[0]}. (a) Profiles against distance in "
        "units of its median, l1 for the Laplacian and l2 for the Gaussian kernel, over the distributions of both. (b) "
        "Mass on the nearest, middle and farthest third of the other tokens, ranked for each query by its l2 distances "
        "(dots) and l1 distances (triangles). (c) Densities of l1 and of squared l2 distances in standard deviations "
        "from their mean. (d) Mass of the middle third, Laplacian minus Gaussian, of every feature set, with normal "
        "noise of each head's mean and covariance as control. (e) Mean distance of the attention in patches over that "
        "of uniform attention; crosses: tokens shuffled over the grid. (f) As (d), against the mean similarity at "
        "which the kernels are matched, by l2; vertical line: that of the other panels and of the ledger. "
        f"{_statistics(first)} {_controls(features, noise, parts['f'])} {_fixed(frame)} {_ledger(rule)} "
        f"Means over n = {span(rule['n'])} images (photographs of textures for the pretrained model, validation images "
        "for the runs) of means over layers, heads and queries; bars: 95 % bootstrap intervals over images. "
        f"Preset {preset_name(inputs)} on "
        f"{frame.attrs['provenance'].get('device', 'unknown device')}."
        + non_finite_sentence(count_non_finite(data["value"]))
    )
    return Drawn(figure, data, caption)


def _rule_similarity(frame: "pd.DataFrame") -> float:
    """The mean similarity at which the noise control was matched, which is that of the ledger."""
    return float(frame.loc[(frame["control"] == "gaussian_noise") & frame["matched_at"].notna(), "matched_at"].iloc[0])


def _draw_profiles(axis: "Axes", rows: "pd.DataFrame") -> "pd.DataFrame":
    import numpy as np

    x = np.linspace(0, 2.5, 126)
    scales = rows[rows["metric"] == "median_over_bandwidth"].set_index("kernel")["value"]
    exponents = {"laplacian": x * scales["laplacian"], "gaussian": (x * scales["gaussian"]) ** 2 / 2}
    shown = rows[(rows["metric"] == "distance_density") & (rows["in"] == "medians")]
    behind = axis.twinx()
    behind.set_axis_off()
    behind.set_ylim(0, 1.15 * shown["value"].max())
    for distance, kind in (("l1", "laplacian"), ("l2", "gaussian")):
        line = shown[shown["distance"] == distance].sort_values("at")
        behind.fill_between(
            line["at"], line["value"], step="mid", color=KERNELS[kind].color, alpha=0.22, linewidth=0, zorder=0
        )
    axis.set_zorder(behind.get_zorder() + 1)
    axis.patch.set_visible(False)
    for kind, series in KERNELS.items():
        axis.plot(x, np.exp(-exponents[kind]), **series.line(marker="", linewidth=1.2))
    axis.set_xlabel("distance / median")
    axis.set_ylabel("kernel")
    axis.set_ylim(0, 1.02)
    axis.set_xlim(0, 2.5)
    return rows[rows["metric"].isin(["median_over_bandwidth", "bandwidth"])].pipe(_with, shown)


def _draw_masses(axis: "Axes", rows: "pd.DataFrame") -> "pd.DataFrame":
    masses = rows[(rows["metric"] == "tercile_mass") & (rows["control"] != "gaussian_noise")]
    for kind, series in KERNELS.items():
        for partition, marker, side in (("l2", "o", -0.5), ("l1", "v", 0.5)):
            line = masses[(masses["kernel"] == kind) & (masses["partition"] == partition)].set_index("tercile")
            line = line.loc[list(TERCILES)]
            shift = (-0.14 if kind == "laplacian" else 0.14) + 0.12 * side
            style = series.points(marker=marker, label="", markersize=3.4, elinewidth=0.8)
            axis.errorbar([place + shift for place in range(3)], line["value"], yerr=line["spread"], **style)
    uniform = masses[masses["kernel"] == "uniform"].set_index("tercile").loc[list(TERCILES), "value"]
    axis.plot(range(3), uniform, **UNIFORM.line())
    axis.set_xticks(range(3), TERCILES)
    axis.set_xlim(-0.5, 2.5)
    axis.margins(y=0.12)
    axis.set_ylabel("attention mass")
    axis.set_xlabel("third of the other tokens")
    return masses


def _draw_densities(axis: "Axes", rows: "pd.DataFrame") -> "pd.DataFrame":
    shown = rows[(rows["metric"] == "distance_density") & (rows["in"] == "standard deviations")]
    for distance, label, kind in (("l1", "l1 distance", "laplacian"), ("squared_l2", "squared l2", "gaussian")):
        line = shown[shown["distance"] == distance].sort_values("at")
        axis.plot(line["at"], line["value"], **KERNELS[kind].line(marker="", label="", linewidth=1.1))
        # Named in the panel: the legend's colours stand for the kernels.
        height = (0.92 if distance == "l1" else 0.78) * float(line["value"].max())
        axis.text(1.4, height, label, color=KERNELS[kind].color, fontsize="x-small")
    axis.set_xlabel("standard deviations")
    axis.set_ylabel("density")
    axis.set_ylim(bottom=0)
    statistics = rows["metric"].str.startswith("distance_") & (rows["metric"] != "distance_density")
    return shown.pipe(_with, rows[statistics])


def _draw_differences(
    axis: "Axes", sets: Sequence[str], features: "pd.DataFrame", noise: "pd.DataFrame"
) -> "pd.DataFrame":
    shown = []
    for rows, partitions in ((features, PARTITIONS), (noise, {"l2": NOISE})):
        for partition, series in partitions.items():
            line = rows[(rows["metric"] == DIFFERENCE) & (rows["partition"] == partition)]
            line = line.set_index("features", drop=False).loc[list(sets)]
            shift = {"o": -0.2, "v": 0.0, "D": 0.2}[series.marker]
            places = [place + shift for place in range(len(sets))]
            style = series.points(markersize=3.0, elinewidth=0.8)
            axis.errorbar(line["value"], places, xerr=line["spread"], **style)
            shown.append(line.reset_index(drop=True))
    axis.axvline(0.0, color="#000000", linewidth=0.6)
    _number_sets(axis, sets)
    axis.set_ylabel("feature set")
    axis.set_xlabel("Laplacian minus Gaussian")
    return _with(*shown)


def _draw_spatial(axis: "Axes", sets: Sequence[str], rows: "pd.DataFrame") -> "pd.DataFrame":
    shown = rows[(rows["metric"] == "mean_attention_distance") & (rows["control"] != "gaussian_noise")]
    for place, name in enumerate(sets):
        of_set = shown[shown["features"] == name]
        uniform = float(of_set.loc[of_set["kernel"] == "uniform", "value"].iloc[0])
        for kind, series in KERNELS.items():
            shift = -0.12 if kind == "laplacian" else 0.12
            for row in rows_of(of_set[of_set["kernel"] == kind]):
                shuffled = row["control"] == "shuffled_tokens"
                style = SHUFFLED.points(label="") if shuffled else series.points(label="", elinewidth=0.8)
                spread = None if shuffled else [row["spread"] / uniform]
                axis.errorbar([row["value"] / uniform], [place + shift], xerr=spread, **style)
    axis.axvline(1.0, **UNIFORM.line(label=""))
    _number_sets(axis, sets)
    axis.set_xlabel("mean distance / uniform")
    return shown


def _draw_similarities(axis: "Axes", sets: Sequence[str], frame: "pd.DataFrame") -> "pd.DataFrame":
    shown = frame[(frame["metric"] == DIFFERENCE) & (frame["control"] == "features") & (frame["partition"] == "l2")]
    shown = shown[shown["scale"] == "matched"]
    styles = series_for(sets, {})
    for number, name in enumerate(sets, start=1):
        line = shown[shown["features"] == name].sort_values("matched_at")
        style = styles[name].line(markersize=2.4, linewidth=0.9, label=f"{number}  {name}")
        axis.plot(line["matched_at"], line["value"], **style)
    axis.axhline(0.0, color="#000000", linewidth=0.6)
    axis.axvline(_rule_similarity(frame), color="#7A7A7A", linewidth=0.6)
    axis.set_xlim(0, 1)
    axis.set_xlabel("mean similarity of both")
    axis.set_ylabel("difference in (d)")
    return shown


def _number_sets(axis: "Axes", sets: Sequence[str]) -> None:
    axis.set_yticks(range(len(sets)), [str(place + 1) for place in range(len(sets))])
    axis.set_ylim(len(sets) - 0.5, -0.5)


def _with(*frames: "pd.DataFrame") -> "pd.DataFrame":
    import pandas as pd

    return pd.concat(frames, ignore_index=True)


def _statistics(rows: "pd.DataFrame") -> str:
    """Caption sentence on the two distances in (c)."""
    texts = []
    for distance, name in (("l1", "l1"), ("squared_l2", "squared l2")):
        of = rows[(rows["distance"] == distance) & (rows["control"] == "features")].set_index("metric")["value"]
        texts.append(
            f"{name}: coefficient of variation {of['distance_cv']:.2f}, skewness {of['distance_skewness']:.2f}, excess "
            f"kurtosis {of['distance_excess_kurtosis']:.2f}, 99 % over 1 % quantile {of['distance_dynamic_range']:.1f}"
        )
    return f"In (c), {'; '.join(texts)}."


def _fixed(frame: "pd.DataFrame") -> str:
    """Caption sentence on the bandwidths that models have, which are not matched."""
    fixed = frame[(frame["scale"] == "fixed") & (frame["metric"] == "mean_similarity")]
    ranges = {
        kind: (float(group["value"].min()), float(group["value"].max())) for kind, group in fixed.groupby("kernel")
    }
    texts = [
        f"{name} {ranges[kind][0]:.2g} to {ranges[kind][1]:.2g}"
        for kind, name in (("laplacian", "lambda = 4 (paper)"), ("gaussian", "sigma = 1 (SOFT)"))
        if kind in ranges
    ]
    difference = frame[(frame["scale"] == "fixed") & (frame["metric"] == DIFFERENCE) & (frame["partition"] == "l2")][
        "value"
    ]
    return (
        f"Not matched, mean similarities would be, by feature set: {', '.join(texts)}, and the difference in (d) "
        f"{difference.min():+.3f} to {difference.max():+.3f}."
    )


def _controls(features: "pd.DataFrame", noise: "pd.DataFrame", similarities: "pd.DataFrame") -> str:
    """Caption sentence: on which side of 0 the differences lie, beside those on noise and at other similarities."""
    parts = [("features", features), ("noise", noise)]
    parts += [
        (f"features at mean similarity {at:g}", similarities[similarities["matched_at"] == at])
        for at in (similarities["matched_at"].min(), similarities["matched_at"].max())
    ]
    texts = []
    for name, rows in parts:
        found = rows[(rows["metric"] == DIFFERENCE) & (rows["partition"] == "l2")]
        above, below = (found["value"] - found["spread"] > 0).sum(), (found["value"] + found["spread"] < 0).sum()
        texts.append(f"{name} {above} and {below}")
    return f"Of {len(found)} feature sets, above and below 0 with the interval by l2: {'; '.join(texts)}."


def _ledger(rule: "pd.DataFrame") -> str:
    """Caption sentence on the numbers of the ledger: hulls of the intervals by l2 and by l1."""
    texts = [
        f"{name} {row['value']:+.4f}" + ("" if row["spread"] != row["spread"] else f" +- {row['spread']:.4f}")
        for name, row in rule.iterrows()
    ]
    return f"The ledger's numbers, centre and half-width of the hull of (d)'s two intervals: {'; '.join(texts)}."
