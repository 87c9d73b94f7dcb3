"""Table 6: every model whose connection walk was measured: size, isometry scores with nulls and excess, trend."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attngeo.paper.intervals import student_half_width
from attngeo.paper.render import Tabulated
from attngeo.paper.results import listed, non_finite_sentence, preset_name, require_inputs, span
from attngeo.paper.walks import (
    TREND,
    depth_trends,
    isometry_by_layer,
    mean_over_layers,
    number_of_model,
    of_pretrained,
    of_runs,
    over_seeds,
    parameters_of,
    read_walks,
    walked_models,
)

if TYPE_CHECKING:
    import pandas as pd

SCORES = {"trained": "score", "null": "null", "random_init": "random init", "excess": "excess"}
TRENDS = {
    "trend": (TREND, "trained"),
    "trend, shuffled depth": (TREND, "depth_shuffled"),
    "trend, random init": (TREND, "random_init"),
    "trend, no first token": (f"{TREND}_without_first_token", "trained"),
}
_SHAPE = ("value_groups", "head_dim", "model_dim")


def tabulate(inputs: Sequence[Path]) -> Tabulated:
    """Tabulate connection-walk record files: a row a pretrained model, then a row a kind and data set of own runs."""
    import pandas as pd

    require_inputs(inputs, "tab6", "model")
    rows: list[dict[str, Any]] = []
    devices, quantised, earlier, lost = [], [], 0, 0
    if pretrained := of_pretrained(inputs):
        frame = read_walks(pretrained)
        devices.append(frame.attrs["devices"])
        models = walked_models(frame)
        quantised = [model.id for model in models.values() if model.quantised]
        earlier = sum(not model.finished for model in models.values())
        sizes = parameters_of(frame)
        finished = [model for model in models.values() if model.finished]
        lost += _non_finite(frame, [model.id for model in finished])
        for model in sorted(finished, key=lambda one: (one.family, one.precision, sizes.get(one.id, 0), one.id)):
            of_model = frame[frame["model"] == model.id]
            labels = {"model": model.id, "family": model.family, "precision": model.precision}
            rows.append(labels | _shape(of_model) | _scores(of_model) | _convergence(of_model))
    if runs := of_runs(inputs):
        frame = read_walks(runs)
        devices.append(frame.attrs["devices"])
        rows += _own_rows(frame)
        lost += _non_finite(frame, sorted(set(frame["model"])))
    table = pd.DataFrame(rows)
    apart = f" Quantised, in no trend: {listed(quantised)}." if quantised else ""
    before = f" {earlier} earlier steps of models trained here are in fig11.csv." if earlier else ""
    own = (
        " Rows KIND on DATA SET are pyramids trained here, n their runs, numbers means over blocks and runs, low and "
        "high a Student interval over runs."
        if runs
        else ""
    )
    caption = (
        "Models whose connection walk was measured. score: (sum s)^2 / (r sum s^2) of the singular values of W_V W_O, "
        "mean over heads and layers; null: the same of Gaussian products of the shape; excess: their difference, with "
        "the 95 % Student interval over layers; above, below: layers whose own 95 % interval (bootstrap over heads and "
        "null draws) excludes 0; adjusted: the same by a test with Holm's correction for the number of layers; edge "
        "excess: that of the transports along sampled edges; trend: Spearman correlation of the graph change with "
        "depth (6 layers or more), beside that of shuffled depth, of untrained networks and of the graph without its "
        f"first token. n = {span(int(n) for n in table['n'])} layers that excess is the mean of; windows: of text or "
        f"images.{own} An en dash: not measured.{apart}{before}"
        f"{non_finite_sentence(lost)} Preset {preset_name(inputs)} on {listed(devices)}."
    )
    shares = {name: ".4f" for name in ("score", "null", "random init")}
    signed = {name: "+.4f" for name in ("excess", "low", "high", "edge excess")}
    trends = {name: "+.2f" for name in TRENDS}
    formats = {"params (M)": ".3g", "rev. defect": ".2f", **shares, **signed, **trends}
    return Tabulated(table, caption, "models", formats=formats, long=True)


def _non_finite(frame: "pd.DataFrame", models: Sequence[str]) -> int:
    """How many layers' scores of these models are left out of the means."""
    means = [mean_over_layers(frame, control) for control in SCORES]
    return sum(int(mean.loc[mean["model"].isin(list(models)), "non_finite"].sum()) for mean in means)


def _shape(frame: "pd.DataFrame") -> dict[str, Any]:
    """Size and layout of a model; heads are counted where the records do not say them."""
    scores = frame[(frame["metric"] == "isometry_score") & (frame["control"] == "trained")]
    heads = number_of_model(frame, "heads") or int(scores["head"].max()) + 1 or None
    sizes = list(parameters_of(frame).values())
    groups, head_dim, width = (number_of_model(frame, name) for name in _SHAPE)
    return {
        "params (M)": sizes[0] / 1e6 if sizes else math.nan,
        "layers": number_of_model(frame, "layers") or int(scores["layer"].nunique()),
        "heads": str(heads) if groups in (None, heads) else f"{heads}/{groups}",
        "head dim": head_dim,
        "width": width,
    }


def _scores(frame: "pd.DataFrame") -> dict[str, Any]:
    """Scores, excess and how many layers lie above and below the null."""
    found: dict[str, Any] = {}
    for control, name in SCORES.items():
        mean = mean_over_layers(frame, control)
        found[name] = mean["value"].iloc[0] if len(mean) else math.nan
        if control == "excess":
            found |= {end: mean[end].iloc[0] if len(mean) else math.nan for end in ("low", "high")}
            found["n"] = int(mean["n"].iloc[0]) if len(mean) else 0
    layers = isometry_by_layer(frame)
    excess = layers[layers["control"] == "excess"]
    return found | _sides(excess) | _adjusted_sides(frame) | {"edge excess": _edge_excess(frame)}


def _sides(excess: "pd.DataFrame") -> dict[str, Any]:
    return {"above": int((excess["low"] > 0).sum()), "below": int((excess["high"] < 0).sum())}


def _adjusted_sides(frame: "pd.DataFrame") -> dict[str, Any]:
    """How many layers lie above and below the null once adjusted for the number of layers."""
    found: dict[str, Any] = {}
    for side in ("above", "below"):
        tested = frame[(frame["metric"] == f"isometry_score_layers_{side}_null") & (frame["control"] == "excess")]
        found[f"{side}, adjusted"] = int(tested["value"].iloc[0]) if len(tested) else None
    return found


def _edge_excess(frame: "pd.DataFrame") -> float:
    found = frame[(frame["metric"] == "transport_isometry_score") & (frame["control"] == "excess")]
    return float(found["value"].mean()) if len(found) else math.nan


def _convergence(frame: "pd.DataFrame") -> dict[str, Any]:
    """Trends of the graph change with depth, and the reversibility defect, mean over layers."""
    found: dict[str, Any] = {}
    for name, (metric, control) in TRENDS.items():
        trend = depth_trends(frame, control, metric)
        found[name] = trend["value"].iloc[0] if len(trend) else math.nan
    defect = frame[(frame["metric"] == "reversibility_defect") & (frame["control"] == "trained")]
    windows = frame[(frame["metric"].isin((TREND, "spectral_gap"))) & (frame["control"] == "trained")]
    return found | {
        "rev. defect": float(defect["value"].mean()) if len(defect) else math.nan,
        "windows": int(windows["n"].max()) if len(windows) else None,
    }


def _own_rows(frame: "pd.DataFrame") -> list[dict[str, Any]]:
    """A row an attention kind and data set of the runs trained here: means over blocks and runs."""
    means = {control: mean_over_layers(frame, control).set_index("model")["value"] for control in SCORES}
    layers = over_seeds(frame)
    rows = []
    for (dataset, attention), group in frame.groupby(["dataset", "attention"], sort=True):
        runs = sorted(set(group["model"]))
        scores = {name: float(means[c].reindex(runs).mean()) for c, name in SCORES.items()}
        excess = [float(value) for value in means["excess"].reindex(runs).dropna()]
        half = student_half_width(excess)
        name = f"{attention} on {dataset}"
        of_kind = layers[(layers["model"] == name) & (layers["control"] == "excess")]
        first = group[group["model"] == runs[0]]
        heads = first[(first["metric"] == "isometry_score") & (first["head"] >= 0)].groupby("layer")["head"].max() + 1
        rows.append(
            {
                "model": name,
                "family": str(group["family"].iloc[0]),
                "precision": str(group["precision"].iloc[0]),
                **_shape(first),
                "heads": "/".join(str(int(count)) for count in dict.fromkeys(heads)),
                **scores,
                "low": scores["excess"] - half,
                "high": scores["excess"] + half,
                **_sides(of_kind),
                "edge excess": _edge_excess(group),
                "n": len(excess),
            }
        )
    return rows
