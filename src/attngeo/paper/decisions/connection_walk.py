"""Rules for the connection-walk view of attention (P3)."""

import math
from typing import TYPE_CHECKING

from attngeo.paper.decisions.rule import (
    BROKEN_IDENTITY,
    Finding,
    Lacking,
    Number,
    Part,
    by_majority,
    contradicted,
    decision,
    finite,
    half_width,
    held,
    number,
    one_each,
    optional_rows,
    part,
    rows,
    tally,
)
from attngeo.paper.layers import isometry_by_layer
from attngeo.paper.results import listed, rows_of
from attngeo.paper.walks import (
    MINIMAL_LAYER_CHANGES,
    MINIMAL_SIZES,
    by_size,
    convergence,
    family_of,
    mean_over_layers,
    one_a_size,
    size_correlations,
    walked_models,
)

if TYPE_CHECKING:
    import pandas as pd

ONE_SIDED_95 = 1.645  # standard deviations


@decision
def single_head_identity(frame: "pd.DataFrame") -> Finding:
    """P3.a: metric `identity_error` of single heads (head >= 0), by `family` and `model`, in float64.

    Against: a relative error of 1e-3 or more.
    """
    found = rows(frame, "identity_error")
    return _identity(found[found["head"] >= 0], "single heads")


@decision
def multi_head_identity(frame: "pd.DataFrame") -> Finding:
    """P3.b: metric `identity_error` of whole layers (head -1), control float64_softmax, by `family` and `model`.

    Against: a relative error of 1e-3 or more.
    """
    found = rows(frame, "identity_error", control="float64_softmax")
    return _identity(found[found["head"] == -1], "whole layers")


@decision
def connection_laplacian(frame: "pd.DataFrame") -> Finding:
    """P3.c: metrics `connection_laplacian_error` (control conditions_hold) and `reversibility_defect` (trained).

    Against: an error of 1e-3 or more.
    """
    error = float(rows(frame, "connection_laplacian_error", control="conditions_hold")["value"].max())
    numbers: dict[str, Number] = {"largest identity error where the conditions hold": error}
    for model, group in rows(one_a_size(frame), "reversibility_defect", control="trained").groupby("model", sort=True):
        by_construction = "convention" in group and group["convention"].str.startswith("one-way by construction").all()
        of = "causal: 1 by construction" if by_construction else "mean over layers"
        numbers[f"reversibility defect, {model} ({of})"] = float(group["value"].mean())
    reason = f"identity error at most {number(error)} on walks that qualify"
    return tally({"identity": part(error <= 1e-9, error >= BROKEN_IDENTITY)}, reason, numbers)


@decision
def graph_convergence(frame: "pd.DataFrame") -> Finding:
    """P3.d: metric `graph_change_trend` by model, controls trained, depth_shuffled and random_init.

    Beyond the shuffles: below their one-sided 95 % range (normal approximation), as in a permutation test. Beyond the
    untrained network: below it by more than both 95 % intervals over windows. Of a size trained here the last step of
    the lowest seed is the model.
    Against: a trend above 0.5 and above both controls by the same margins. A majority of models decides, either way.
    """
    frame = one_a_size(frame)
    trends = one_each(rows(frame, "graph_change_trend", control="trained"), "model")
    changes = rows(frame, "graph_change", control="trained")
    parts: dict[str, Part] = {}
    numbers: dict[str, Number] = {}
    for model, row in trends.items():
        if changes.loc[changes["model"] == model, "layer"].nunique() < MINIMAL_LAYER_CHANGES:
            continue
        value = row["value"]
        numbers[f"trend, {model}"] = value
        shuffled, untrained = (
            one_each(rows(frame, "graph_change_trend", control=control, model=model), "model")[model]
            for control in ("depth_shuffled", "random_init")
        )
        numbers[f"trend, {model}, depth shuffled"] = shuffled["value"]
        numbers[f"trend, {model}, random init"] = untrained["value"]
        of_shuffles = ONE_SIDED_95 * finite(shuffled["spread"], f"the trend of {model} at shuffled depth has no spread")
        of_windows = math.hypot(
            half_width(row, f"the trend of {model}"), half_width(untrained, f"the trend of {model} at random init")
        )
        low = min(shuffled["value"] - of_shuffles, untrained["value"] - of_windows)
        high = max(shuffled["value"] + of_shuffles, untrained["value"] + of_windows)
        parts[model] = part(value < min(-0.5, low), value > max(0.5, high))
    if len(parts) < 2:
        raise Lacking(
            f"underpowered: {len(parts)} of at least 2 models with {MINIMAL_LAYER_CHANGES + 1} layers or more", numbers
        )
    rising = contradicted(parts)
    reason = f"change falls with depth beyond its controls in {held(parts)} of {len(parts)} models, rises in {rising}"
    return by_majority(parts, 2 * rising > len(parts), reason, numbers)


@decision
def isometry_excess(frame: "pd.DataFrame") -> Finding:
    """P3.e: metric `isometry_score`, control excess, by model, layer and head, with its interval.

    A model is above (below) the null if more than half of its layers are, each with its 95 % interval. A majority of
    models above meets the rule. Of a size trained here the last step of the lowest seed is the model.
    Against: no model above, and over all models more than half of the layers below.
    """
    frame = one_a_size(frame)
    layers = isometry_by_layer(rows(frame, "isometry_score", control="excess"))
    parts: dict[str, Part] = {}
    numbers: dict[str, Number] = {}
    layers_below = 0
    for model, group in layers.groupby("model", sort=True):
        unknown = int((~group[["low", "high"]].map(math.isfinite)).any(axis=1).sum())
        if unknown:
            raise Lacking(f"{unknown} of {len(group)} layers of {model} have no 95 % interval", numbers)
        above, below = int((group["low"] > 0).sum()), int((group["high"] < 0).sum())
        layers_below += below
        numbers |= {
            f"layers above the null, {model}": f"{above} of {len(group)}",
            f"layers below the null, {model}": f"{below} of {len(group)}",
            f"mean excess, {model}": float(group["value"].mean()),
        }
        same_gain = optional_rows(frame, "isometry_score", control="excess_same_gain", model=model, head=-1)
        if len(same_gain):
            counted = isometry_by_layer(same_gain)
            signs = f"{int((counted['low'] > 0).sum())} above, {int((counted['high'] < 0).sum())} below"
            numbers[f"layers against a null with the same norm gain, {model}"] = f"{signs}, of {len(counted)}"
        for side in ("above", "below"):
            tested = optional_rows(frame, f"isometry_score_layers_{side}_null", control="excess", model=model)
            for row in rows_of(tested):
                name = f"layers {side} the null once adjusted for their number (Holm), {model}"
                numbers[name] = f"{row['value']:.0f} of {row['n']}"
        parts[str(model)] = part(2 * above > len(group), 2 * below > len(group))
    reason = (
        f"models with a majority of layers above the null: {held(parts)} of {len(parts)}, below it: "
        f"{contradicted(parts)}, neither: {len(parts) - held(parts) - contradicted(parts)}; "
        f"{layers_below} of {len(layers)} layers of all models are below it"
    )
    return by_majority(parts, 2 * layers_below > len(layers), reason, numbers)


@decision
def scale_trend(frame: "pd.DataFrame") -> Finding:
    """P3.f: isometry excess (mean over layers) and convergence against metric `parameters`.

    Convergence is metric `graph_change_trend` at shuffled depth minus trained. Within labels `family` and `precision`,
    seeds of one size averaged, without quantised models, untrained ones and earlier training steps. Each family that
    has both phenomena at 3 sizes or more gives two parts.
    Against: a rank correlation of -0.9 or less.
    """
    excess = rows(frame, "isometry_score", control="excess")
    _require_family(excess)
    sizes = {
        str(name): float(value) for name, value in rows(frame, "parameters").groupby("model")["value"].first().items()
    }
    unsized = sorted(set(excess["model"]) - set(sizes))
    if unsized:
        raise Lacking(f"the parameters of {listed(unsized)} have not been counted")
    models = walked_models(frame)
    numbers: dict[str, Number] = {}
    apart = [model.id for model in models.values() if model.quantised]
    if apart:
        numbers["quantised, in no trend"] = listed(apart)
    parts: dict[str, Part] = {}
    texts = []
    for phenomenon, values in (("excess", mean_over_layers(excess, "excess")), ("convergence", convergence(frame))):
        counted = values[[models[name].counts for name in values["model"]]]
        if bad := sorted(counted["model"][~counted["value"].map(math.isfinite)]):
            raise Lacking(f"the {phenomenon} of {listed(bad)} is not finite", numbers)
        sized = by_size(counted, models, sizes)
        for (family, precision), of_family in sized.groupby(["family", "precision"], sort=True):
            numbers[f"sizes, {phenomenon}, {family} {precision}"] = len(of_family)
        found = size_correlations(sized)
        for (family, precision), (correlation, count) in found.items():
            name = f"{phenomenon}, {family} {precision}"
            if not math.isfinite(correlation):
                raise Lacking(f"the {phenomenon} of {family} {precision} is the same at every size", numbers)
            numbers[f"Spearman, {name}"] = correlation
            parts[name] = part(correlation >= 0.9, correlation <= -0.9)
            texts.append(f"{name} {correlation:+.2f} over {count} sizes")
        if not found:
            so_far = f"; {', '.join(texts)}" if texts else ""
            raise Lacking(
                f"underpowered: {phenomenon} at {_most_sizes(sized)} sizes of one family at one precision of at least "
                f"{MINIMAL_SIZES}{so_far}",
                numbers,
            )
    families = sorted({name.split(", ", 1)[1] for name in parts})
    both = sum(all(parts.get(f"{one}, {name}") is Part.HOLDS for one in ("excess", "convergence")) for name in families)
    reason = f"both strengthen with size in {both} of {len(families)} families; Spearman with size: {', '.join(texts)}"
    return tally(parts, reason, numbers)


def _require_family(found: "pd.DataFrame") -> None:
    """Lacking where records do not say of which family their model is."""
    unnamed = found[found["family"].isna()]["model"] if "family" in found else found["model"]
    if len(unnamed):
        raise Lacking(f"the records of {listed(unnamed)} name no model family")


def _most_sizes(sized: "pd.DataFrame") -> int:
    """The largest number of sizes of a family at one precision."""
    return max((len(group) for _, group in sized.groupby(["family", "precision"])), default=0)


def _identity(found: "pd.DataFrame", what: str) -> Finding:
    """An identity on every model, of at least two families."""
    if not len(found):
        raise Lacking(f"the identity has not been measured on {what}")
    _require_family(found)
    numbers: dict[str, Number] = {}
    parts: dict[str, Part] = {}
    finished = sum(model.finished for model in walked_models(found).values())
    found = found.assign(family=found["family"].map(family_of))
    for (family, model), errors in found.groupby(["family", "model"], sort=True)["value"]:
        worst = float(errors.max())
        numbers[f"largest identity error, {model} ({family})"] = worst
        parts[str(model)] = part(worst <= 1e-9, worst >= BROKEN_IDENTITY)
    families = sorted(set(found["family"]))
    earlier = len(parts) - finished
    reason = (
        f"identity error at most {number(float(found['value'].max()))} on {what} of {finished} models of "
        f"{len(families)} {'family' if len(families) == 1 else 'families'} ({', '.join(families)})"
        f"{f' and of {earlier} earlier states of models trained here' if earlier else ''}"
    )
    if len(families) < 2:
        raise Lacking(f"underpowered: at least 2 families are needed; {reason}", numbers)
    return tally(parts, reason, numbers)
