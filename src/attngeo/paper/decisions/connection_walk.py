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
    unanimous,
)
from attngeo.paper.results import listed, rows_of
from attngeo.paper.walks import (
    MINIMAL_LAYER_CHANGES,
    MINIMAL_SIZES,
    by_size,
    convergence,
    depth_trends,
    family_of,
    isometry_by_layer,
    mean_over_layers,
    one_a_size,
    seed_correlations,
    size_correlations,
    sizes_of,
    trained_here,
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
    untrained network: below it by more than both 95 % intervals over windows. Several seeds of a size trained here,
    each at its last step, are one model, which holds (is against) where all of them do (are).
    Against: a trend above 0.5 and above both controls by the same margins. A majority of models decides, either way.
    """
    sizes = sizes_of(frame)
    frame = frame[frame["model"].isin(sizes)] if len(frame) else frame
    trends = one_each(rows(frame, "graph_change_trend", control="trained"), "model")
    changes = rows(frame, "graph_change", control="trained")
    by_seed: dict[str, list[Part]] = {}
    numbers: dict[str, Number] = {}
    untrained_more = 0
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
        by_seed.setdefault(sizes[model], []).append(part(value < min(-0.5, low), value > max(0.5, high)))
        untrained_more += untrained["value"] < value
    parts = {name: unanimous(of_seeds) for name, of_seeds in by_seed.items()}
    if len(parts) < 2:
        raise Lacking(
            f"underpowered: {len(parts)} of at least 2 models with {MINIMAL_LAYER_CHANGES + 1} layers or more", numbers
        )
    rising = contradicted(parts)
    here = {sizes[model] for model in trained_here(frame)}
    pretrained = held({name: one for name, one in parts.items() if name not in here})
    reason = (
        f"change falls with depth beyond its controls in {held(parts)} of {len(parts)} models (pretrained among them: "
        f"{pretrained}), rises in {rising}; that of the untrained network falls more in {untrained_more} of "
        f"{sum(map(len, by_seed.values()))}, every seed counted"
    )
    return by_majority(parts, 2 * rising > len(parts), reason, numbers)


@decision
def isometry_excess(frame: "pd.DataFrame") -> Finding:
    """P3.e: metric `isometry_score`, control excess, by model, layer and head, with its interval.

    A model is above (below) the null if more than half of its layers are, each with its 95 % interval. A majority of
    models above meets the rule. Several seeds of a size trained here, each at its last step, are one model, of which
    holds what holds in all of them; so is each of its layers.
    Against: no model above, and over all models more than half of the layers below.
    """
    import pandas as pd

    sizes = sizes_of(frame)
    frame = frame[frame["model"].isin(sizes)] if len(frame) else frame
    layers = isometry_by_layer(rows(frame, "isometry_score", control="excess"))
    by_seed: dict[str, list[Part]] = {}
    numbers: dict[str, Number] = {}
    beside: dict[str, list[tuple[int, int]]] = {}
    for model, group in layers.groupby("model", sort=True):
        unknown = int((~group[["low", "high"]].map(math.isfinite)).any(axis=1).sum())
        if unknown:
            raise Lacking(f"{unknown} of {len(group)} layers of {model} have no 95 % interval", numbers)
        above, below = int((group["low"] > 0).sum()), int((group["high"] < 0).sum())
        numbers |= {
            f"layers above the null, {model}": f"{above} of {len(group)}",
            f"layers below the null, {model}": f"{below} of {len(group)}",
            f"mean excess, {model}": float(group["value"].mean()),
        }
        same_gain = optional_rows(frame, "isometry_score", control="excess_same_gain", model=model, head=-1)
        if len(same_gain):
            counted = isometry_by_layer(same_gain)
            below_it = int((counted["high"] < 0).sum())
            signs = f"{int((counted['low'] > 0).sum())} above, {below_it} below"
            numbers[f"layers against a null with the same norm gain, {model}"] = f"{signs}, of {len(counted)}"
            beside.setdefault("below a null with the same norm gain", []).append((below_it, len(counted)))
        for side in ("above", "below"):
            tested = optional_rows(frame, f"isometry_score_layers_{side}_null", control="excess", model=model)
            for row in rows_of(tested):
                name = f"layers {side} the null once adjusted for their number (Holm), {model}"
                numbers[name] = f"{row['value']:.0f} of {row['n']}"
                if side == "below":
                    adjusted = "once adjusted for the number of layers of a model (Holm)"
                    beside.setdefault(adjusted, []).append((int(row["value"]), int(row["n"])))
        by_seed.setdefault(sizes[str(model)], []).append(part(2 * above > len(group), 2 * below > len(group)))
    parts = {name: unanimous(of_seeds) for name, of_seeds in by_seed.items()}
    of_sizes = pd.DataFrame({"size": layers["model"].map(sizes), "layer": layers["layer"], "below": layers["high"] < 0})
    of_all_seeds = of_sizes.groupby(["size", "layer"])["below"].all()
    layers_below, count = int(of_all_seeds.sum()), len(of_all_seeds)
    reason = (
        f"models with a majority of layers above the null: {held(parts)} of {len(parts)}, below it: "
        f"{contradicted(parts)}, neither: {len(parts) - held(parts) - contradicted(parts)}; "
        f"{layers_below} of {count} layers of all models are below it"
    )
    told = [(f"{name} ", pairs) for name, pairs in beside.items()]
    if told:
        told.insert(0, ("", [(int(of_sizes["below"].sum()), len(of_sizes))]))
        reason += "; every seed counted: "
        reason += ", ".join(
            f"{name}{sum(below for below, _ in pairs)} of {sum(count for _, count in pairs)}" for name, pairs in told
        )
    return by_majority(parts, 2 * layers_below > count, reason, numbers)


@decision
def scale_trend(frame: "pd.DataFrame") -> Finding:
    """P3.f: isometry excess (mean over layers) and convergence against metric `parameters`.

    Convergence is metric `graph_change_trend` at shuffled depth minus trained. Within labels `family` and `precision`,
    without quantised models, untrained ones and earlier training steps. Each family that has both phenomena at 3 sizes
    or more gives two parts; a part holds (is against) where both the mean over seeds and every seed by itself are.
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
    texts: list[str] = []
    counts: set[int] = set()
    for phenomenon, values in (("excess", mean_over_layers(excess, "excess")), ("convergence", convergence(frame))):
        counted = values[[models[name].counts for name in values["model"]]]
        if bad := sorted(counted["model"][~counted["value"].map(math.isfinite)]):
            raise Lacking(f"the {phenomenon} of {listed(bad)} is not finite", numbers)
        sized = by_size(counted, models, sizes)
        for (family, precision), of_family in sized.groupby(["family", "precision"], sort=True):
            numbers[f"sizes, {phenomenon}, {family} {precision}"] = len(of_family)
        found, of_seeds = size_correlations(sized), seed_correlations(counted, models, sizes)
        for (family, precision), (correlation, count) in found.items():
            name = f"{phenomenon}, {family} {precision}"
            if not math.isfinite(correlation):
                raise Lacking(f"the {phenomenon} of {family} {precision} is the same at every size", numbers)
            numbers[f"Spearman, {name}"] = correlation
            counts.add(count)
            by_seed = of_seeds.get((family, precision), {})
            every = (correlation, *by_seed.values())
            parts[name] = part(all(one >= 0.9 for one in every), all(one <= -0.9 for one in every))
            single = ""
            if len(by_seed) > 1:
                numbers |= {f"Spearman, {name}, seed {seed}": value for seed, value in by_seed.items()}
                single = f" (by seed {', '.join(f'{value:+.2f}' for value in by_seed.values())})"
            texts.append(f"{name} {correlation:+.2f}{single} over {count} sizes")
        if not found:
            so_far = f"; {', '.join(texts)}" if texts else ""
            raise Lacking(
                f"underpowered: {phenomenon} at {_most_sizes(sized)} sizes of one family at one precision of at least "
                f"{MINIMAL_SIZES}{so_far}",
                numbers,
            )
    families = sorted({name.split(", ", 1)[1] for name in parts})
    both = sum(all(parts.get(f"{one}, {name}") is Part.HOLDS for one in ("excess", "convergence")) for name in families)
    chances = ", ".join(f"{count} sizes 1 in {math.factorial(count)}" for count in sorted(counts))
    reason = (
        f"both strengthen with size in {both} of {len(families)} families; Spearman with size: {', '.join(texts)}; "
        f"chance of a perfect order (one-sided): {chances}"
    )
    untrained = depth_trends(frame, "random_init")
    for row in rows_of(by_size(untrained[untrained["model"].isin(sizes)], models, sizes)):
        if f"{row['family']} {row['precision']}" in families:
            name = f"untrained trend, {row['family']} {row['precision']}, {row['parameters'] / 1e6:.3g} M parameters"
            numbers[name] = row["value"]
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
