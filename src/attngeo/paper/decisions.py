"""The decision rules of the ledger: pure functions from the records that bear on a claim to a finding.

A rule is judged part by part (a series, a model, a data set): a part holds, speaks against the claim, or is open. What
speaks against a claim is a condition of its own, stated with each rule under "Against"; a part that merely misses its
threshold is open. A rule that cannot be judged raises `Lacking`: nothing measured, too few seeds, or a number or an
interval that is not finite.
Metric names that no analysis writes yet are the names that it has to use.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from attngeo.paper.layers import half_width_95, isometry_by_layer
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
    trained_here,
    walked_models,
)

if TYPE_CHECKING:
    import pandas as pd

Number = float | int | str

ONE_SIDED_95 = 1.645  # standard deviations
CLEAR = 5.0  # standard errors beyond a tolerance from which a fitted slope contradicts the derived one
BROKEN_IDENTITY = 1e-3  # relative error that no rounding explains: an identity that is off by this does not hold
NO_POWER = 0.5  # a log-log slope below this does not fall with the step


class Outcome(StrEnum):
    """How the measured numbers stand to a rule: met; in part; in no part, yet not contradicted; contradicted."""

    MET = "met"
    MIXED = "mixed"
    NOT_MET = "not met"
    REVERSE = "reverse"


class Part(StrEnum):
    """How one part of a rule stands."""

    HOLDS = "holds"
    OPEN = "open"
    AGAINST = "against"


@dataclass(frozen=True)
class Finding:
    """What a rule makes of its evidence; `numbers` are those that it used."""

    outcome: Outcome
    reason: str
    numbers: Mapping[str, Number] = field(default_factory=dict)


class Lacking(Exception):
    """The evidence does not suffice for the rule, whatever it says so far."""

    def __init__(self, reason: str, numbers: Mapping[str, Number] | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.numbers = dict(numbers or {})


Decision = Callable[["pd.DataFrame"], Finding]
DECISIONS: dict[str, Decision] = {}


def decision(function: Decision) -> Decision:
    """Register a rule under its function's name."""
    DECISIONS[function.__name__] = function
    return function


def rows(frame: "pd.DataFrame", metric: str, **labels: Any) -> "pd.DataFrame":
    """Records of a metric with these labels; Lacking if there are none or if a value is not finite."""
    found = optional_rows(frame, metric, **labels)
    if not len(found):
        of = f" ({', '.join(f'{name} {value}' for name, value in labels.items())})" if labels else ""
        raise Lacking(f"{metric.replace('_', ' ')}{of} has not been measured")
    bad = sum(not math.isfinite(value) for value in found["value"])
    if bad:
        raise Lacking(f"{bad} of {len(found)} values of {metric.replace('_', ' ')} are not finite")
    return found


def optional_rows(frame: "pd.DataFrame", metric: str, **labels: Any) -> "pd.DataFrame":
    """Records of a metric with these labels, possibly none."""
    found = frame[frame["metric"] == metric] if "metric" in frame else frame
    for name, value in labels.items():
        found = found[found[name] == value] if name in found else found.iloc[:0]
    return found


def one_each(found: "pd.DataFrame", label: str) -> dict[str, dict[str, Any]]:
    """The only record of each value of a label, in the order of the values; Lacking if one has several."""
    records: dict[str, dict[str, Any]] = {}
    for row in rows_of(found.sort_values(label, kind="stable")):
        name = str(row[label])
        if name in records:
            raise Lacking(f"several records of {str(row['metric']).replace('_', ' ')} for {label} {name}")
        records[name] = row
    return records


def part(holds: bool, against: bool) -> Part:
    """A part that holds, or else speaks against the claim, or else is open."""
    return Part.HOLDS if holds else Part.AGAINST if against else Part.OPEN


def half_width(row: Mapping[str, Any], of: str) -> float:
    """Half the 95 % interval of a record's mean; Lacking, never a failure, if it cannot be had."""
    half = half_width_95(row)
    if not math.isfinite(half):
        raise Lacking(f"{of} has no 95 % interval (n = {row['n']}, spread kind {row['spread_kind'] or 'none'!r})")
    return half


def side_of_zero(row: Mapping[str, Any], of: str) -> Part:
    """Above 0 with the whole 95 % interval holds, below 0 with it is against."""
    half = half_width(row, of)
    return part(row["value"] - half > 0, row["value"] + half < 0)


def tally(parts: Mapping[str, Part], reason: str, numbers: Mapping[str, Number] | None = None) -> Finding:
    """Met if every part holds and mixed if some do; in reverse only if none holds and more than half speak against."""
    if not parts:
        raise Lacking(f"nothing to judge: {reason}", numbers)
    counts = {kind: sum(one is kind for one in parts.values()) for kind in Part}
    for kind, words in ((Part.OPEN, "not met"), (Part.AGAINST, "contradicted")):
        if counts[kind]:
            reason += f"; {words}: {listed((name for name, one in parts.items() if one is kind), limit=6)}"
    if counts[Part.HOLDS] == len(parts):
        outcome = Outcome.MET
    elif counts[Part.HOLDS]:
        outcome = Outcome.MIXED
    else:
        outcome = Outcome.REVERSE if 2 * counts[Part.AGAINST] > len(parts) else Outcome.NOT_MET
    return Finding(outcome, reason, numbers or {})


def number(value: float) -> str:
    """A number in a sentence."""
    return f"{value:.3g}"


@decision
def tangent_flow(frame: "pd.DataFrame") -> Finding:
    """P1.a: metrics `defect` (check tangency) and `tangential_share_excess` over random walks, a record a model.

    Against: a defect of 1e-3 or more; a share below that of random walks with its interval. The claim is of pretrained
    models: of those trained here the numbers are told and nothing rests on them.
    """
    largest = float(rows(frame, "defect", check="tangency", control="none")["value"].max())
    numbers: dict[str, Number] = {"largest tangency defect": largest}
    flow = f"the flow's tangency defect is at most {number(largest)}"
    if not len(optional_rows(frame, "tangential_share_excess")):
        raise Lacking(f"{flow}, but the paths of pretrained models have not been measured", numbers)
    parts = {"flow": part(largest <= 1e-6, largest >= BROKEN_IDENTITY)}
    shares = rows(frame, "tangential_share_excess")
    own = trained_here(shares)
    for model, row in one_each(shares, "model").items():
        numbers[f"tangential share excess, {model}{' (trained here)' if model in own else ''}"] = row["value"]
        if model not in own:
            parts[model] = side_of_zero(row, f"the tangential share excess of {model}")
    if len(own) == len(shares):
        raise Lacking(f"{flow}, but the paths of pretrained models have not been measured", numbers)
    return tally(parts, flow, numbers)


@decision
def energy_dissipation_balance(frame: "pd.DataFrame") -> Finding:
    """P1.b: metric `slope` (check energy_dissipation) with label `expected`, by integrator (`method`) and `control`.

    Against: an order on the gradient flow below 0.5 by more than 5 standard errors (the imbalance does not fall). The
    controls are no part of the claim: where one falls too, a rule that is met otherwise is mixed.
    """
    parts: dict[str, Part] = {}
    numbers: dict[str, Number] = {}
    falling: list[str] = []
    controls = 0
    for row in rows_of(rows(frame, "slope", check="energy_dissipation")):
        control = "flow under test" if row["control"] == "none" else str(row["control"]).replace("_", " ")
        name = f"{row['method']}, {control}"
        numbers[f"order, {name}"] = row["value"]
        if row["control"] != "none":
            controls += 1
            falling += [name] * (row["value"] >= NO_POWER)
        elif abs(row["value"] - row["expected"]) <= 0.1 * row["expected"]:
            parts[name] = Part.HOLDS
        else:
            parts[name] = part(False, NO_POWER - row["value"] > CLEAR * _standard_error(row, f"the order of {name}"))
    if not controls:
        raise Lacking("the balance has been measured without controls", numbers)
    orders = ", ".join(number(v) for k, v in numbers.items() if k.endswith("under test") and isinstance(v, float))
    finding = tally(parts, f"imbalance falls with the step at orders {orders} on the gradient flow", numbers)
    if not falling:
        return finding
    outcome = Outcome.MIXED if finding.outcome is Outcome.MET else finding.outcome
    return Finding(outcome, f"{finding.reason}; it falls on controls too: {listed(falling)}", numbers)


@decision
def variation_slopes(frame: "pd.DataFrame") -> Finding:
    """P1.c: metric `slope` of checks first_variation (generic and flow path) and minimiser_shift, control none.

    Against: a slope outside its tolerance by more than 5 standard errors.
    """
    wanted = (
        ("first variation, generic path", {"check": "first_variation", "method": "generic_path"}, 1.0, 0.05),
        ("first variation, stationary path", {"check": "first_variation", "method": "flow_path"}, 2.0, 0.1),
        ("shift of the minimiser", {"check": "minimiser_shift"}, 1.0, 0.05),
    )
    parts: dict[str, Part] = {}
    numbers: dict[str, Number] = {}
    for name, labels, expected, tolerance in wanted:
        slopes = rows_of(rows(frame, "slope", control="none", **labels))
        worst = max(slopes, key=lambda row: abs(row["value"] - expected))
        numbers[f"slope, {name}"] = worst["value"]
        outside = abs(worst["value"] - expected) - tolerance
        if outside <= 0:
            parts[name] = Part.HOLDS
        else:
            parts[name] = part(False, outside > CLEAR * _standard_error(worst, f"the slope of the {name}"))
    text = ", ".join(f"{name.removeprefix('slope, ')} {value:.3f}" for name, value in numbers.items())
    return tally(parts, f"slopes: {text}", numbers)


@decision
def norm_gain_constant(frame: "pd.DataFrame") -> Finding:
    """P1.d: metric `norm_gain_cv` by model and layer, control trained.

    Against: more than 0.25 in more than half of a model's layers. Models trained here are told and not judged: gains
    start at exactly 1, and a short training leaves them near it.
    """
    parts: dict[str, Part] = {}
    numbers: dict[str, Number] = {}
    variations = rows(frame, "norm_gain_cv", control="trained")
    own = trained_here(variations)
    for model, group in variations.groupby("model", sort=True):
        share = float((group["value"] <= 0.25).mean())
        numbers[f"share of layers at most 0.25, {model}{' (trained here)' if model in own else ''}"] = share
        if model not in own:
            parts[str(model)] = part(share >= 0.8, share < 0.5)
    if not parts:
        raise Lacking("the gains of pretrained models have not been measured", numbers)
    return tally(parts, f"{_holding(parts)} of {len(parts)} models have nearly constant gains", numbers)


@decision
def cost_exponents(frame: "pd.DataFrame") -> Finding:
    """P2.a: metrics `time_exponent` and `memory_exponent` by `attention` (laplacian, softmax: the plain one).

    Of several passes the worst counts: the largest exponent of Laplacian, the smallest of softmax.
    Against: a Laplacian exponent of 1.8 or more, or one of plain softmax of at most 1.15.
    """
    parts: dict[str, Part] = {}
    numbers: dict[str, Number] = {}
    for metric in ("time_exponent", "memory_exponent"):
        laplacian = float(rows(frame, metric, attention="laplacian")["value"].max())
        softmax = float(rows(frame, metric, attention="softmax")["value"].min())
        word = metric.split("_")[0]
        numbers |= {f"{word} exponent, Laplacian": laplacian, f"{word} exponent, softmax": softmax}
        parts[f"Laplacian {word}"] = part(laplacian <= 1.15, laplacian >= 1.8)
        parts[f"softmax {word}"] = part(softmax >= 1.8, softmax <= 1.15)
    return tally(parts, ", ".join(f"{name} {value:.2f}" for name, value in numbers.items()), numbers)


@decision
def middle_distance_mass(frame: "pd.DataFrame") -> Finding:
    """P2.b: metric `middle_tercile_mass_excess`, Laplacian minus Gaussian, a record for each of `features`.

    Against: a difference below 0 with its interval. Two feature sets above and none below meet the rule. The reason
    also says how it is on Gaussian noise and at the largest mean similarity (metric `middle_mass_difference`).
    """
    found = one_each(rows(frame, "middle_tercile_mass_excess"), "features")
    if len(found) < 2:
        raise Lacking(f"underpowered: {len(found)} feature sets of at least 2")
    parts = {name: side_of_zero(row, f"the mass excess on {name}") for name, row in found.items()}
    numbers: dict[str, Number] = {name: row["value"] for name, row in found.items()}
    above, below = _holding(parts), sum(one is Part.AGAINST for one in parts.values())
    reason = f"above 0 in {above} of {len(parts)} feature sets, below in {below}"
    beside = optional_rows(frame, "middle_mass_difference", layer="mean", partition="l2", scale="matched")
    beside = beside[beside[["value", "spread"]].map(math.isfinite).all(axis=1)]
    noise = optional_rows(beside, "middle_mass_difference", control="gaussian_noise")
    features = optional_rows(beside, "middle_mass_difference", control="features")
    if len(noise) and len(features):
        most = features["matched_at"].max()
        for where, chosen in (
            ("on Gaussian noise of the same covariance", noise),
            (f"at mean similarity {most:g}", features[features["matched_at"] == most]),
        ):
            sides = [side_of_zero(row, where) for row in rows_of(chosen)]
            up, down = sides.count(Part.HOLDS), sides.count(Part.AGAINST)
            numbers[f"feature sets above and below 0 {where}"] = f"{up} and {down} of {len(sides)}"
            reason += f"; {where} above in {up}, below in {down}"
    if above >= 2 and not below:
        return Finding(Outcome.MET, reason, numbers)
    return tally(parts, reason, numbers)


@decision
def injective_features(frame: "pd.DataFrame") -> Finding:
    """P2.c: metrics `collisions` (row pairs closer than 1e-6) and `identity_recall` by `form` and `control`.

    Against: as many collisions as linear attention or more; recall below the un-whitened form both on average and in
    more than half of the settings.
    """
    case = ["feature_set", "control", "tokens"]
    linear = rows(frame, "collisions", form="linear_row_sum").set_index(case)["value"]
    confused = linear[linear > 0]
    if not len(confused):
        raise Lacking("plain linear attention had no collisions on these features, so there is nothing to compare")
    ours = rows(frame, "collisions", form="injective").set_index(case)["value"]
    missing = [index for index in confused.index if index not in ours.index]
    if missing:
        raise Lacking(
            f"the whitened form has not been measured in {len(missing)} cases where linear attention collides"
        )
    there = float(ours[ours.index.isin(confused.index)].max())
    settings = ["feature_set", "tokens", "landmarks"]
    whitened, plain = (
        rows(frame, "identity_recall", form=form, control="features")[[*settings, "value"]]
        for form in ("injective", "none")
    )
    pairs = whitened.merge(plain, on=settings, suffixes=("", "_plain"))
    if len(pairs) < max(len(whitened), len(plain)):
        raise Lacking("identity recall has not been measured in the same settings with and without whitening")
    wins, losses = (
        int((pairs["value"] > pairs["value_plain"]).sum()),
        int((pairs["value"] < pairs["value_plain"]).sum()),
    )
    ours_mean, plain_mean = float(pairs["value"].mean()), float(pairs["value_plain"].mean())
    numbers: dict[str, Number] = {
        "cases in which linear attention collides": len(confused),
        "colliding pairs an image there, linear attention (largest)": float(confused.max()),
        "colliding pairs an image there, injective (largest)": there,
        "mean identity recall, whitened": ours_mean,
        "mean identity recall, un-whitened": plain_mean,
        "settings with whitened above un-whitened": f"{wins} of {len(pairs)}",
    }
    parts = {
        "separation": part(there == 0, there >= float(confused.max())),
        "identity recall": part(ours_mean > plain_mean, ours_mean < plain_mean and 2 * losses > len(pairs)),
    }
    reason = f"{there:g} collisions where linear attention has some, recall {ours_mean:.3f} against {plain_mean:.3f}"
    return tally(parts, reason, numbers)


@decision
def solver_residuals(frame: "pd.DataFrame") -> Finding:
    """P2.d: metric `solver_residual` by `solver` (newton_schulz, conjugate_gradient), `matrix` and `products`.

    The reason also counts the comparisons in which one of the two is still above rounding, taken as twice the residual
    of a Cholesky inverse: below it, who is ahead says nothing about the solver.
    Against: a larger residual than that of conjugate gradient.
    """
    parts: dict[str, Part] = {}
    numbers: dict[str, Number] = {}
    unsettled: dict[str, Part] = {}
    for matrix in ("trained", "kappa_50"):
        ours, theirs = (
            rows(frame, "solver_residual", matrix=matrix, solver=solver).groupby("products")["value"].max()
            for solver in ("newton_schulz", "conjugate_gradient")
        )
        shared = sorted(set(ours.index) & set(theirs.index))
        if not shared:
            raise Lacking(f"the solvers share no number of matrix products on {matrix} matrices")
        direct = optional_rows(frame, "solver_residual", matrix=matrix, solver="cholesky")["value"]
        rounding = 2 * float(direct.max()) if len(direct) else 0.0
        for products in shared:
            name = f"{matrix}, {products:g} products"
            parts[name] = part(ours[products] < theirs[products], ours[products] > theirs[products])
            if max(ours[products], theirs[products]) > rounding:
                unsettled[name] = parts[name]
        for name, residuals in (("Newton-Schulz", ours), ("conjugate gradient", theirs)):
            numbers[f"products to reach 0.01, {name}, {matrix}"] = _products_to_reach(residuals, 0.01)
    reason = (
        f"Newton-Schulz ahead in {_holding(parts)} of {len(parts)} comparisons, in {_holding(unsettled)} of the "
        f"{len(unsettled)} where either is above rounding"
    )
    return tally(parts, reason, numbers)


@decision
def gpu_speedup(frame: "pd.DataFrame") -> Finding:
    """P2.e: metric `speedup` over the fastest form in torch, by `device_kind`, `operation`, `direction`, `tokens`.

    Against: slower than torch.
    """
    found = rows(frame, "speedup", device_kind="cuda")
    parts: dict[str, Part] = {}
    numbers: dict[str, Number] = {}
    for operation in ("laplacian_kernel", "newton_schulz_inverse"):
        for direction in ("forward", "backward"):
            for tokens in (16, 32, 64, 128):
                labels = {"operation": operation, "direction": direction, "tokens": tokens}
                smallest = float(rows(found, "speedup", **labels)["value"].min())
                name = f"{operation} {direction}, N = {tokens}"
                numbers[name], parts[name] = smallest, part(smallest > 1, smallest < 1)
    return tally(parts, f"faster than torch in {_holding(parts)} of {len(parts)} cases", numbers)


@decision
def accuracy_at_matched_parameters(frame: "pd.DataFrame") -> Finding:
    """P2.f: metrics `top1`, `parameters` of all runs, paired by `dataset`, `size`, `recipe` and `seed`.

    Comparisons with fewer than 5 seeds or unmatched parameters do not count; the reason names them.
    Against: more than half a point below softmax with the whole 95 % interval of the paired differences.
    """
    from scipy import stats

    size = rows(frame, "parameters").set_index("run_id")["value"]
    parts: dict[str, Part] = {}
    texts: list[str] = []
    left_out: list[str] = []
    numbers: dict[str, Number] = {}
    runs = optional_rows(frame, "top1")
    for (dataset, model_size, recipe), group in runs.groupby(["dataset", "size", "recipe"], sort=True):
        name = f"{dataset} {model_size} {recipe}"
        ours, baseline = (group[group["attention"] == kind] for kind in ("laplacian", "softmax"))
        if not len(ours) or not len(baseline):
            continue
        compared = rows(group[group["attention"].isin(["laplacian", "softmax"])], "top1")
        if compared.duplicated(["attention", "seed"]).any():
            left_out.append(f"{name} (several runs of one attention kind share a seed)")
            continue
        pairs = ours.merge(baseline, on="seed", suffixes=("", "_softmax"))
        ratios = [size[row["run_id"]] / size[row["run_id_softmax"]] for row in rows_of(pairs)]
        worst = max(ratios, key=lambda ratio: abs(ratio - 1), default=1.0)
        if abs(worst - 1) > 0.05:
            left_out.append(f"{name} (parameters are not matched, ratio {worst:.3f})")
            continue
        difference = pairs["value"] - pairs["value_softmax"]
        mean, n = float(difference.mean()), len(difference)
        if n:
            numbers |= {f"Laplacian minus softmax (points), {name}": mean, f"seeds, {name}": n}
        if n < 5:
            so_far = f", so far {mean:+.2f} points" if n else ""
            left_out.append(f"{name} ({n} seeds of at least 5{so_far})")
            continue
        half = float(stats.t.ppf(0.975, n - 1) * difference.std(ddof=1) / math.sqrt(n))
        numbers[f"95 % half-width, {name}"] = half
        parts[name] = part(mean >= -0.5, mean + half < -0.5)
        texts.append(f"{name} {mean:+.2f} points")
    if not parts and not left_out:
        raise Lacking("no Laplacian and softmax runs of the same data set, size and recipe")
    if not parts:
        raise Lacking(f"underpowered: {'; '.join(left_out)} (Laplacian minus softmax)", numbers)
    reason = f"Laplacian minus softmax: {'; '.join(texts)}"
    if left_out:
        reason += f"; not counted: {'; '.join(left_out)}"
    return tally(parts, reason, numbers)


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
        of_shuffles = ONE_SIDED_95 * _finite(
            shuffled["spread"], f"the trend of {model} at shuffled depth has no spread"
        )
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
    rising = _against(parts)
    reason = (
        f"change falls with depth beyond its controls in {_holding(parts)} of {len(parts)} models, rises in {rising}"
    )
    return _by_majority(parts, 2 * rising > len(parts), reason, numbers)


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
        f"models with a majority of layers above the null: {_holding(parts)} of {len(parts)}, below it: "
        f"{_against(parts)}, neither: {len(parts) - _holding(parts) - _against(parts)}; "
        f"{layers_below} of {len(layers)} layers of all models are below it"
    )
    return _by_majority(parts, 2 * layers_below > len(layers), reason, numbers)


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
        sized = by_size(values, models, sizes)
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


@decision
def score_rank(frame: "pd.DataFrame") -> Finding:
    """P4.a: metric `score_rank` with label `predicted`, by `form`, `dimension` and `tokens`.

    Against: a rank of at most d + 2, that of a Euclidean distance, where a larger one is predicted.
    """
    found = rows_of(rows(frame, "score_rank"))
    parts = {
        f"{row['form']}, d = {row['dimension']}, N = {row['tokens']}": part(
            row["value"] == row["predicted"], row["value"] <= row["dimension"] + 2 < row["predicted"]
        )
        for row in found
    }
    return tally(parts, f"{_holding(parts)} of {len(parts)} ranks as predicted")


@decision
def metric_cost(frame: "pd.DataFrame") -> Finding:
    """P4.b: metrics `inversion_exponent_d`, `inversion_exponent_r`, and `block_overhead` by `dimension` and `rank`.

    Against: an exponent a whole power above the claimed one; a block twice as slow or slower.
    """
    in_d = max(rows(frame, "inversion_exponent_d")["value"].tolist(), key=lambda value: abs(value - 1))
    in_r = max(rows(frame, "inversion_exponent_r")["value"].tolist(), key=lambda value: abs(value - 2))
    overheads = rows(frame, "block_overhead")
    overheads = overheads[(overheads["dimension"] >= 1024) & (overheads["rank"] <= 8)]
    if not len(overheads):
        raise Lacking("block overhead at d at least 1,024 and r at most 8 has not been measured")
    worst = float(overheads["value"].max())
    numbers: dict[str, Number] = {"exponent in d": in_d, "exponent in r": in_r, "largest block overhead": worst}
    parts = {
        "d": part(abs(in_d - 1) <= 0.15, in_d >= 2),
        "r": part(abs(in_r - 2) <= 0.3, in_r >= 3),
        "overhead": part(worst <= 0.1, worst >= 1),
    }
    return tally(parts, f"d^{in_d:.2f}, r^{in_r:.2f}, overhead {100 * worst:.0f} %", numbers)


@decision
def fiber_bundle_trains(frame: "pd.DataFrame") -> Finding:
    """P4.c: metrics `training_finished` (1 or 0) by seed and `gradient_error` (relative) by part.

    Against: no run finishes; gradients off by a tenth or more.
    """
    finished = rows(frame, "training_finished")["value"]
    error = float(rows(frame, "gradient_error")["value"].max())
    done = int((finished == 1).sum())
    numbers: dict[str, Number] = {"runs": len(finished), "finished": done, "largest gradient error": error}
    parts = {"training": part(done == len(finished), done == 0), "gradients": part(error <= 1e-4, error >= 0.1)}
    return tally(parts, f"{done} of {len(finished)} runs finished, gradient error {number(error)}", numbers)


@decision
def predictions(frame: "pd.DataFrame") -> Finding:
    """P4.d: metric `prediction_met` by `prediction`: 1 met, 0 not met, -1 contradicted, each by its own rule.

    Against: a prediction that its own rule calls contradicted.
    """
    found = one_each(rows(frame, "prediction_met"), "prediction")
    parts = {name: part(row["value"] == 1, row["value"] == -1) for name, row in found.items()}
    words = {1: "met", 0: "open", -1: "contradicted"}
    numbers: dict[str, Number] = {
        name: f"{words.get(int(row['value']), '?')} ({row['finding']})"
        if row.get("finding")
        else words[int(row["value"])]
        for name, row in found.items()
    }
    return tally(parts, f"{_holding(parts)} of {len(parts)} predictions met", numbers)


@decision
def rank_collapse(frame: "pd.DataFrame") -> Finding:
    """P4.e: metric `last_layer_relative_residual` by `form` (heterogeneous and others), `seed` and `phase`.

    Against: at most the largest residual of the other metrics in 4 of 5 seeds.
    """
    found = rows(frame, "last_layer_relative_residual")
    parts: dict[str, Part] = {}
    numbers: dict[str, Number] = {}
    for phase in ("init", "trained"):
        table = rows(found, "last_layer_relative_residual", phase=phase).pivot_table(
            index="seed", columns="form", values="value", aggfunc="mean"
        )
        if "heterogeneous" not in table or len(table.columns) < 2:
            raise Lacking(f"{phase}: the heterogeneous metric and at least one other have to be measured", numbers)
        if len(table) < 5:
            raise Lacking(f"underpowered: {phase} has {len(table)} seeds of at least 5", numbers)
        if table.isna().any(axis=None):
            raise Lacking(f"{phase}: not every metric has been measured with every seed", numbers)
        others = table.drop(columns="heterogeneous").max(axis=1)
        wins, losses = (
            int(condition.sum())
            for condition in (table["heterogeneous"] >= 10 * others, table["heterogeneous"] <= others)
        )
        numbers |= {f"seeds, {phase}": len(table), f"seeds with at least 10 times, {phase}": wins}
        parts[phase] = part(wins >= 0.8 * len(table), losses >= 0.8 * len(table))
    return tally(parts, ", ".join(f"{name}: {value}" for name, value in numbers.items() if "10 times" in name), numbers)


def _holding(parts: Mapping[str, Part]) -> int:
    return sum(one is Part.HOLDS for one in parts.values())


def _against(parts: Mapping[str, Part]) -> int:
    return sum(one is Part.AGAINST for one in parts.values())


def _by_majority(parts: Mapping[str, Part], contradicted: bool, reason: str, numbers: Mapping[str, Number]) -> Finding:
    """Met if more than half of the parts hold, mixed if some do, else in reverse if contradicted."""
    holding = _holding(parts)
    if 2 * holding > len(parts):
        return Finding(Outcome.MET, reason, numbers)
    if holding:
        return Finding(Outcome.MIXED, reason, numbers)
    return Finding(Outcome.REVERSE if contradicted else Outcome.NOT_MET, reason, numbers)


def _products_to_reach(residuals: "pd.Series[float]", level: float) -> float | str:
    """The smallest number of products from which on the residual stays at most `level`."""
    above = residuals.index[residuals > level]
    reached = residuals.index[residuals.index > above.max()] if len(above) else residuals.index
    return float(reached.min()) if len(reached) else f"more than {residuals.index.max():g}"


def _finite(value: float | None, otherwise: str) -> float:
    if value is None or not math.isfinite(value):
        raise Lacking(otherwise)
    return float(value)


def _standard_error(row: Mapping[str, Any], of: str) -> float:
    """The standard error of a fitted slope; Lacking if the record has none."""
    kind = str(row["spread_kind"])
    return _finite(row["spread"] if "standard error" in kind else None, f"{of} has no standard error")


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
    found = found.assign(family=found["family"].map(family_of))
    for (family, model), errors in found.groupby(["family", "model"], sort=True)["value"]:
        worst = float(errors.max())
        numbers[f"largest identity error, {model} ({family})"] = worst
        parts[str(model)] = part(worst <= 1e-9, worst >= BROKEN_IDENTITY)
    families = sorted(set(found["family"]))
    reason = (
        f"identity error at most {number(float(found['value'].max()))} on {what} of {len(parts)} models of "
        f"{len(families)} {'family' if len(families) == 1 else 'families'} ({', '.join(families)})"
    )
    if len(families) < 2:
        raise Lacking(f"underpowered: at least 2 families are needed; {reason}", numbers)
    return tally(parts, reason, numbers)
