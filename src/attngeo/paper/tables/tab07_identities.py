"""Table 7: how exactly attention is a connection walk, by model and head layout."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attngeo.paper.render import Tabulated
from attngeo.paper.results import listed, preset_name, require_inputs, span
from attngeo.paper.walks import number_of_model, of_pretrained, of_runs, read_walks, walked_models

if TYPE_CHECKING:
    import pandas as pd

IDENTITIES = {
    "single head": ("identity_error", "trained", False),
    "multi head": ("identity_error", "trained", True),
    "multi head, float64 softmax": ("identity_error", "float64_softmax", True),
    "Laplacian identity": ("connection_laplacian_error", "conditions_hold", True),
    "Laplacian, P as it is": ("connection_laplacian_error", "trained", True),
}


def tabulate(inputs: Sequence[Path]) -> Tabulated:
    """Tabulate connection-walk record files: largest relative errors, a row a model or a kind of own runs."""
    import pandas as pd

    require_inputs(inputs, "tab7", "model")
    rows: list[dict[str, Any]] = []
    devices = []
    if pretrained := of_pretrained(inputs):
        frame = read_walks(pretrained)
        devices.append(frame.attrs["devices"])
        for model in walked_models(frame).values():
            if model.finished:
                of_model = frame[frame["model"] == model.id]
                labels = {"model": model.id, "family": model.family, "head layout": _layout(of_model)}
                rows.append(labels | _errors(of_model) | _walk(of_model))
    if runs := of_runs(inputs):
        frame = read_walks(runs)
        devices.append(frame.attrs["devices"])
        for (dataset, attention), group in frame.groupby(["dataset", "attention"], sort=True):
            labels = {"model": f"{attention} on {dataset}", "family": str(group["family"].iloc[0])}
            errors = _errors(group)
            # Everything of a pyramid trained here runs in float64, its softmax too.
            errors |= {"multi head, float64 softmax": errors["multi head"], "multi head": math.nan}
            rows.append(labels | {"head layout": _layout(group)} | errors | _walk(group) | _beside(group))
    table = pd.DataFrame(rows)
    beside = (
        " Pyramids trained here: the largest over runs and images; beside: what the block adds outside of the walk, "
        "relative to its output (a local convolution of the values, through W_O); negative: the share of negative "
        "weights in sum |A|, of kinds whose maps are signed: the walk is exact for them too, though no Markov chain."
        if runs
        else ""
    )
    caption = (
        "Relative error of attention's output recomputed as a walk with W_V, W_O and the maps taken from the model, "
        "the largest over layers, heads and windows, in float64. single head: one head as a walk with constant "
        "transport; multi head: the block as one walk with gated transports, softmax as the library computes it "
        "(float32 in some families) and in float64. Laplacian identity: |<f, L g> - energy| / (||f|| ||g||) where its "
        "conditions hold (P made reversible, random rotations as transports); P as it is: the same on the model's own "
        "walk, whose irreversibility it shows. row sums: |sum_j P_ij - 1| of the worst row, mean over windows or "
        f"images, the worst layer. n = {span(_counts(rows))} "
        f"layers.{beside} An en dash: not measured. Preset {preset_name(inputs)} on {listed(devices)}."
    )
    numbers = [*IDENTITIES, "row sums"]
    formats = {name: ".1e" for name in numbers} | {"beside": ".2f", "negative": ".2f"}
    return Tabulated(table, caption, "identities", formats=formats, long=True)


def _layout(frame: "pd.DataFrame") -> str:
    """Heads and value groups in words; "1/2/4 heads" where layers differ."""
    groups = number_of_model(frame, "value_groups")
    found = frame[(frame["metric"] == "identity_error") & (frame["head"] >= 0)]
    heads = "/".join(str(int(count)) for count in dict.fromkeys(found.groupby("layer")["head"].max() + 1))
    words = "1 head" if heads == "1" else f"{heads} heads"
    return words if groups is None or str(groups) == heads else f"{words}, {groups} value groups"


def _errors(frame: "pd.DataFrame") -> dict[str, Any]:
    """The largest error of each identity; NaN where it was not measured, or where one of them is."""
    found = {}
    for name, (metric, control, whole) in IDENTITIES.items():
        chosen = frame[(frame["metric"] == metric) & (frame["control"] == control)]
        values = chosen.loc[(chosen["head"] == -1) == whole, "value"]
        found[name] = float(values.max(skipna=False)) if len(values) else math.nan
    return found


def _walk(frame: "pd.DataFrame") -> dict[str, Any]:
    sums = frame[(frame["metric"] == "stochasticity_defect") & (frame["control"] == "trained")]["value"]
    layers = frame[(frame["metric"] == "identity_error") & (frame["head"] >= 0)]["layer"]
    return {"row sums": float(sums.max(skipna=False)) if len(sums) else math.nan, "layers": int(layers.nunique())}


def _beside(frame: "pd.DataFrame") -> dict[str, Any]:
    found = {}
    for name, metric in (("beside", "beside_share"), ("negative", "negative_share")):
        values = frame[(frame["metric"] == metric) & (frame["control"] == "trained")]["value"]
        found[name] = float(values.max(skipna=False)) if len(values) else math.nan
    return found


def _counts(rows: list[dict[str, Any]]) -> list[int]:
    return [row["layers"] for row in rows]
