"""The decision rules of the ledger: pure functions from the records that bear on a claim to a finding.

A rule that cannot be judged raises `Lacking`: nothing measured, too few seeds, or numbers that are not finite.
Metric names that no analysis writes yet are the names that it has to use.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from attngeo.paper.layers import half_width_95, isometry_by_layer
from attngeo.paper.results import rows_of

if TYPE_CHECKING:
    import pandas as pd

Number = float | int | str

ONE_SIDED_95 = 1.645  # standard deviations
MINIMAL_LAYER_CHANGES = 5  # a rank correlation of fewer numbers says nothing, whatever its value


class Outcome(StrEnum):
    """How the measured numbers stand to a rule."""

    MET = "met"
    REVERSE = "reverse"
    MIXED = "mixed"


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


def tally(verdicts: Mapping[str, bool], reason: str, numbers: Mapping[str, Number] | None = None) -> Finding:
    """Met if every part is, in reverse if none is, else mixed; the reason names the parts that fail."""
    failed = [part for part, met in verdicts.items() if not met]
    outcome = Outcome.MET if not failed else Outcome.REVERSE if len(failed) == len(verdicts) else Outcome.MIXED
    return Finding(outcome, reason + (f"; not met: {', '.join(failed)}" if failed else ""), numbers or {})


def majority(verdicts: Mapping[str, bool]) -> bool:
    """More than half of the parts hold."""
    return 2 * sum(verdicts.values()) > len(verdicts)


def number(value: float) -> str:
    """A number in a sentence."""
    return f"{value:.3g}"


@decision
def tangent_flow(frame: "pd.DataFrame") -> Finding:
    """P1.a: metrics `defect` (check tangency), `tangential_share_excess` over random walks by model."""
    largest = float(rows(frame, "defect", check="tangency", control="none")["value"].max())
    numbers: dict[str, Number] = {"largest tangency defect": largest}
    flow = f"the flow's tangency defect is at most {number(largest)}"
    shares = optional_rows(frame, "tangential_share_excess")
    if not len(shares):
        raise Lacking(f"{flow}, but the paths of pretrained models have not been measured", numbers)
    parts = {"flow": largest <= 1e-6}
    for row in rows_of(rows(frame, "tangential_share_excess")):
        parts[str(row["model"])] = row["value"] - half_width_95(row) > 0
        numbers[f"tangential share excess, {row['model']}"] = row["value"]
    return tally(parts, flow, numbers)


@decision
def energy_dissipation_balance(frame: "pd.DataFrame") -> Finding:
    """P1.b: metric `slope` (check energy_dissipation) with label `expected`, by integrator (`method`) and `control`."""
    parts: dict[str, bool] = {}
    numbers: dict[str, Number] = {}
    for row in rows_of(rows(frame, "slope", check="energy_dissipation")):
        name = f"{row['method']}, {_control(row)}"
        numbers[f"order, {name}"] = row["value"]
        if row["control"] == "none":
            parts[name] = abs(row["value"] - row["expected"]) <= 0.1 * row["expected"]
        else:
            parts[name] = row["value"] < 0.5
    if all(name.endswith("flow under test") for name in parts):
        raise Lacking("the balance has been measured without controls", numbers)
    orders = ", ".join(number(v) for k, v in numbers.items() if k.endswith("under test") and isinstance(v, float))
    return tally(parts, f"imbalance falls with the step at orders {orders} on the gradient flow", numbers)


@decision
def variation_slopes(frame: "pd.DataFrame") -> Finding:
    """P1.c: metric `slope` of checks first_variation (generic and flow path) and minimiser_shift, control none."""
    wanted = (
        ("first variation, generic path", {"check": "first_variation", "method": "generic_path"}, 1.0, 0.05),
        ("first variation, stationary path", {"check": "first_variation", "method": "flow_path"}, 2.0, 0.1),
        ("shift of the minimiser", {"check": "minimiser_shift"}, 1.0, 0.05),
    )
    parts: dict[str, bool] = {}
    numbers: dict[str, Number] = {}
    for name, labels, expected, tolerance in wanted:
        slopes = rows(frame, "slope", control="none", **labels)["value"]
        worst = max(slopes, key=lambda value: abs(value - expected))
        numbers[f"slope, {name}"] = float(worst)
        parts[name] = abs(worst - expected) <= tolerance
    text = ", ".join(f"{name.removeprefix('slope, ')} {value:.3f}" for name, value in numbers.items())
    return tally(parts, f"slopes: {text}", numbers)


@decision
def norm_gain_constant(frame: "pd.DataFrame") -> Finding:
    """P1.d: metric `norm_gain_cv` by model and layer, control trained."""
    parts: dict[str, bool] = {}
    numbers: dict[str, Number] = {}
    for model, group in rows(frame, "norm_gain_cv", control="trained").groupby("model", sort=True):
        share = float((group["value"] <= 0.25).mean())
        numbers[f"share of layers at most 0.25, {model}"] = share
        parts[str(model)] = share >= 0.8
    return tally(parts, f"{sum(parts.values())} of {len(parts)} models have nearly constant gains", numbers)


@decision
def cost_exponents(frame: "pd.DataFrame") -> Finding:
    """P2.a: metrics `time_exponent` and `memory_exponent` by `attention` (laplacian, softmax)."""
    parts: dict[str, bool] = {}
    numbers: dict[str, Number] = {}
    for metric in ("time_exponent", "memory_exponent"):
        laplacian = float(rows(frame, metric, attention="laplacian")["value"].max())
        softmax = float(rows(frame, metric, attention="softmax")["value"].min())
        word = metric.split("_")[0]
        numbers |= {f"{word} exponent, Laplacian": laplacian, f"{word} exponent, softmax": softmax}
        parts |= {f"Laplacian {word}": laplacian <= 1.15, f"softmax {word}": softmax >= 1.8}
    return tally(parts, ", ".join(f"{name} {value:.2f}" for name, value in numbers.items()), numbers)


@decision
def middle_distance_mass(frame: "pd.DataFrame") -> Finding:
    """P2.b: metric `middle_tercile_mass_excess`, Laplacian minus Gaussian, by `features` with its interval."""
    return _signs(rows(frame, "middle_tercile_mass_excess"), "features", at_least=2, what="feature sets")


@decision
def injective_features(frame: "pd.DataFrame") -> Finding:
    """P2.c: metrics `collisions` (row pairs closer than 1e-6) and `identity_recall` by `form` and `control`."""
    case = ["feature_set", "control", "tokens"]
    linear = rows(frame, "collisions", form="linear_row_sum").set_index(case)["value"]
    confused = linear[linear > 0].index
    if not len(confused):
        raise Lacking("plain linear attention had no collisions on these features, so there is nothing to compare")
    ours = rows(frame, "collisions", form="injective").set_index(case)["value"]
    there = float(ours[ours.index.isin(confused)].max())
    recall = {
        form: rows(frame, "identity_recall", form=form, control="features").set_index(
            ["feature_set", "tokens", "landmarks"]
        )
        for form in ("injective", "none")
    }
    whitened, plain = (recall[form]["value"] for form in ("injective", "none"))
    wins = int((whitened > plain).sum())
    numbers: dict[str, Number] = {
        "cases in which linear attention collides": len(confused),
        "colliding pairs an image there, linear attention (largest)": float(linear.max()),
        "colliding pairs an image there, injective (largest)": there,
        "mean identity recall, whitened": float(whitened.mean()),
        "mean identity recall, un-whitened": float(plain.mean()),
        "settings with whitened above un-whitened": f"{wins} of {len(whitened)}",
    }
    parts = {"separation": there == 0, "identity recall": float(whitened.mean()) > float(plain.mean())}
    reason = (
        f"{there:g} collisions where linear attention has some, recall {whitened.mean():.3f} against {plain.mean():.3f}"
    )
    return tally(parts, reason, numbers)


@decision
def solver_residuals(frame: "pd.DataFrame") -> Finding:
    """P2.d: metric `solver_residual` by `solver` (newton_schulz, conjugate_gradient), `matrix` and `products`."""
    found = rows(frame, "solver_residual")
    parts: dict[str, bool] = {}
    for matrix in ("trained", "kappa_50"):
        of_matrix = rows(found, "solver_residual", matrix=matrix)
        table = of_matrix.pivot_table(index="products", columns="solver", values="value", aggfunc="max")
        if not {"newton_schulz", "conjugate_gradient"} <= set(table.columns):
            raise Lacking(f"both solvers have to be measured on {matrix} matrices")
        both = table.dropna(subset=["newton_schulz", "conjugate_gradient"])
        if not len(both):
            raise Lacking(f"the solvers share no number of matrix products on {matrix} matrices")
        for products, row in zip(both.index, rows_of(both), strict=True):
            parts[f"{matrix}, {products:g} products"] = row["newton_schulz"] < row["conjugate_gradient"]
    return tally(parts, f"Newton-Schulz ahead in {sum(parts.values())} of {len(parts)} comparisons")


@decision
def gpu_speedup(frame: "pd.DataFrame") -> Finding:
    """P2.e: metric `speedup` over torch with labels `device_kind`, `operation`, `direction` and `tokens`."""
    found = rows(frame, "speedup", device_kind="cuda")
    numbers: dict[str, Number] = {}
    for operation in ("laplacian_kernel", "newton_schulz"):
        for direction in ("forward", "backward"):
            for tokens in (16, 32, 64, 128):
                labels = {"operation": operation, "direction": direction, "tokens": tokens}
                numbers[f"{operation} {direction}, N = {tokens}"] = float(
                    rows(found, "speedup", **labels)["value"].min()
                )
    parts = {name: float(value) > 1 for name, value in numbers.items()}
    return tally(parts, f"faster than torch in {sum(parts.values())} of {len(parts)} cases", numbers)


@decision
def accuracy_at_matched_parameters(frame: "pd.DataFrame") -> Finding:
    """P2.f: metrics `top1`, `parameters` of table 1's runs, paired by `dataset`, `size`, `recipe` and `seed`."""
    from scipy import stats

    accuracy = rows(frame, "top1", in_tab1=True)
    size = rows(frame, "parameters").set_index("run_id")["value"]
    parts: dict[str, bool] = {}
    clear_losses: list[str] = []
    numbers: dict[str, Number] = {}
    fewest: int | None = None
    for (dataset, model_size, recipe), group in accuracy.groupby(["dataset", "size", "recipe"], sort=True):
        name = f"{dataset} {model_size} {recipe}".rstrip()
        ours, baseline = (group[group["attention"] == kind] for kind in ("laplacian", "softmax"))
        pairs = ours.merge(baseline, on="seed", suffixes=("", "_softmax"))
        if not len(pairs):
            continue
        if pairs["seed"].duplicated().any():
            raise Lacking(f"{name}: several runs of one attention kind share a seed")
        ratios = [size[row["run_id"]] / size[row["run_id_softmax"]] for row in rows_of(pairs)]
        if max(abs(ratio - 1) for ratio in ratios) > 0.05:
            raise Lacking(f"{name}: parameters are not matched (ratio {max(ratios, key=lambda r: abs(r - 1)):.2f})")
        difference = pairs["value"] - pairs["value_softmax"]
        mean, n = float(difference.mean()), len(difference)
        numbers |= {f"Laplacian minus softmax (points), {name}": mean, f"seeds, {name}": n}
        parts[name] = mean >= -0.5
        fewest = n if fewest is None else min(n, fewest)
        if n > 1:
            half = float(stats.t.ppf(0.975, n - 1) * difference.std(ddof=1) / math.sqrt(n))
            numbers[f"95 % half-width, {name}"] = half
            if mean + half < -0.5:
                clear_losses.append(name)
    if fewest is None:
        raise Lacking("no Laplacian and softmax runs with the same data set, size and seed")
    text = "; ".join(f"{k.split(', ', 1)[1]} {v:+.2f} points" for k, v in numbers.items() if "minus" in k)
    if fewest < 5:
        raise Lacking(f"underpowered: {fewest} seeds of at least 5; so far {text} (Laplacian minus softmax)", numbers)
    finding = tally(parts, f"Laplacian minus softmax: {text}", numbers)
    if finding.outcome is Outcome.REVERSE and len(clear_losses) < len(parts):
        return Finding(Outcome.MIXED, finding.reason + " (not clear of seed noise)", numbers)
    return finding


@decision
def single_head_identity(frame: "pd.DataFrame") -> Finding:
    """P3.a: metric `identity_error` of single heads (head >= 0), by model; maps enter as the model made them."""
    found = rows(frame, "identity_error")
    return _identity(found[found["head"] >= 0], "single heads")


@decision
def multi_head_identity(frame: "pd.DataFrame") -> Finding:
    """P3.b: metric `identity_error` of whole layers (head -1) with control float64_softmax, by model."""
    found = rows(frame, "identity_error", control="float64_softmax")
    return _identity(found[found["head"] == -1], "whole layers")


@decision
def connection_laplacian(frame: "pd.DataFrame") -> Finding:
    """P3.c: metrics `connection_laplacian_error` (control conditions_hold) and `reversibility_defect` (trained)."""
    error = float(rows(frame, "connection_laplacian_error", control="conditions_hold")["value"].max())
    numbers: dict[str, Number] = {"largest identity error where the conditions hold": error}
    for model, group in rows(frame, "reversibility_defect", control="trained").groupby("model", sort=True):
        numbers[f"reversibility defect, {model} (mean over layers)"] = float(group["value"].mean())
    return tally({"identity": error <= 1e-9}, f"identity error at most {number(error)} on walks that qualify", numbers)


@decision
def graph_convergence(frame: "pd.DataFrame") -> Finding:
    """P3.d: metric `graph_change_trend` by model, controls trained, depth_shuffled and random_init.

    Beyond the shuffles: below their one-sided 95 % range (normal approximation), as in a permutation test. Beyond the
    untrained network: below it by more than both 95 % intervals over windows.
    """
    trends = rows(frame, "graph_change_trend", control="trained")
    changes = rows(frame, "graph_change", control="trained")
    parts: dict[str, bool] = {}
    rising: dict[str, bool] = {}
    numbers: dict[str, Number] = {}
    for row in rows_of(trends.sort_values("model")):
        model = str(row["model"])
        if changes.loc[changes["model"] == model, "layer"].nunique() < MINIMAL_LAYER_CHANGES:
            continue
        beyond = row["value"] < -0.5
        numbers[f"trend, {model}"] = row["value"]
        shuffled, untrained = (
            rows_of(rows(frame, "graph_change_trend", control=control, model=model))[0]
            for control in ("depth_shuffled", "random_init")
        )
        numbers[f"trend, {model}, depth shuffled"] = shuffled["value"]
        numbers[f"trend, {model}, random init"] = untrained["value"]
        beyond = beyond and row["value"] < shuffled["value"] - ONE_SIDED_95 * shuffled["spread"]
        half = math.hypot(half_width_95(row), half_width_95(untrained))
        beyond = beyond and row["value"] + half < untrained["value"]
        parts[model] = beyond
        rising[model] = row["value"] > 0.5
    if len(parts) < 2:
        raise Lacking(
            f"underpowered: {len(parts)} of at least 2 models with {MINIMAL_LAYER_CHANGES + 1} layers or more", numbers
        )
    reason = f"change falls with depth beyond its controls in {sum(parts.values())} of {len(parts)} models"
    if majority(parts):
        return Finding(Outcome.MET, reason, numbers)
    if majority(rising):
        return Finding(Outcome.REVERSE, reason + f" and rises in {sum(rising.values())}", numbers)
    return Finding(Outcome.MIXED, reason, numbers)


@decision
def isometry_excess(frame: "pd.DataFrame") -> Finding:
    """P3.e: metric `isometry_score`, control excess, by model, layer and head, with its interval."""
    layers = isometry_by_layer(rows(frame, "isometry_score", control="excess"))
    above: dict[str, bool] = {}
    below: dict[str, bool] = {}
    numbers: dict[str, Number] = {}
    for model, group in layers.groupby("model", sort=True):
        positive, negative = float((group["low"] > 0).mean()), float((group["high"] < 0).mean())
        numbers |= {
            f"share of layers above the null, {model}": positive,
            f"share of layers below the null, {model}": negative,
            f"mean excess, {model}": float(group["value"].mean()),
        }
        above[str(model)], below[str(model)] = positive > 0.5, negative > 0.5
    reason = f"above the null in a majority of layers in {sum(above.values())} of {len(above)} models"
    if all(above.values()):
        return Finding(Outcome.MET, reason, numbers)
    if all(below.values()):
        return Finding(Outcome.REVERSE, reason + ", below it in all", numbers)
    return Finding(Outcome.MIXED, reason + f", below it in {sum(below.values())}", numbers)


@decision
def scale_trend(frame: "pd.DataFrame") -> Finding:
    """P3.f: mean isometry excess against metric `parameters`, within labels `family` and `precision`."""
    from scipy import stats

    excess = rows(frame, "isometry_score", control="excess")
    if "family" not in excess:
        raise Lacking("no family of models of several sizes: needs at least 3 sizes of one family at one precision")
    sizes = rows(frame, "parameters").groupby("model")["value"].first()
    means = excess.groupby(["family", "precision", "model"], as_index=False)["value"].mean()
    numbers: dict[str, Number] = {}
    correlations: dict[str, float] = {}
    for (family, precision), group in means.groupby(["family", "precision"], sort=True):
        numbers[f"sizes, {family} {precision}"] = len(group)
        if len(group) >= 3:
            correlation = float(stats.spearmanr(sizes.loc[group["model"]].to_numpy(), group["value"]).statistic)
            correlations[f"{family} {precision}"] = correlation
            numbers[f"Spearman, {family} {precision}"] = correlation
    if not correlations:
        most = max((value for value in numbers.values() if isinstance(value, int)), default=0)
        raise Lacking(f"underpowered: {most} sizes of one family at one precision of at least 3", numbers)
    reason = ", ".join(f"{name}: {value:+.2f}" for name, value in correlations.items())
    if any(value <= -0.9 for value in correlations.values()) and all(value < 0 for value in correlations.values()):
        return Finding(Outcome.REVERSE, f"Spearman of the excess with size {reason}", numbers)
    met = all(value >= 0.9 for value in correlations.values())
    return Finding(Outcome.MET if met else Outcome.MIXED, f"Spearman of the excess with size {reason}", numbers)


@decision
def score_rank(frame: "pd.DataFrame") -> Finding:
    """P4.a: metric `score_rank` with label `predicted`, by `form`, `dimension` and `tokens`."""
    found = rows(frame, "score_rank")
    hits = int((found["value"] == found["predicted"]).sum())
    parts = {
        f"{row['form']}, d = {row['dimension']}, N = {row['tokens']}": row["value"] == row["predicted"]
        for row in rows_of(found)
    }
    return tally(parts, f"{hits} of {len(found)} ranks as predicted")


@decision
def metric_cost(frame: "pd.DataFrame") -> Finding:
    """P4.b: metrics `inversion_exponent_d`, `inversion_exponent_r`, and `block_overhead` by `dimension` and `rank`."""
    in_d = float(rows(frame, "inversion_exponent_d")["value"].iloc[0])
    in_r = float(rows(frame, "inversion_exponent_r")["value"].iloc[0])
    overheads = rows(frame, "block_overhead")
    overheads = overheads[(overheads["dimension"] >= 1024) & (overheads["rank"] <= 8)]
    if not len(overheads):
        raise Lacking("block overhead at d at least 1,024 and r at most 8 has not been measured")
    worst = float(overheads["value"].max())
    numbers: dict[str, Number] = {"exponent in d": in_d, "exponent in r": in_r, "largest block overhead": worst}
    parts = {"d": abs(in_d - 1) <= 0.15, "r": abs(in_r - 2) <= 0.3, "overhead": worst <= 0.1}
    return tally(parts, f"d^{in_d:.2f}, r^{in_r:.2f}, overhead {100 * worst:.0f} %", numbers)


@decision
def fiber_bundle_trains(frame: "pd.DataFrame") -> Finding:
    """P4.c: metrics `training_finished` (1 or 0) by seed and `gradient_error` (relative) by part."""
    finished = rows(frame, "training_finished")["value"]
    error = float(rows(frame, "gradient_error")["value"].max())
    numbers: dict[str, Number] = {
        "runs": len(finished),
        "finished": int(finished.sum()),
        "largest gradient error": error,
    }
    parts = {"training": bool((finished == 1).all()), "gradients": error <= 1e-4}
    return tally(
        parts, f"{int(finished.sum())} of {len(finished)} runs finished, gradient error {number(error)}", numbers
    )


@decision
def predictions(frame: "pd.DataFrame") -> Finding:
    """P4.d: metric `prediction_met` (1 or 0) by `prediction`."""
    parts = {str(row["prediction"]): row["value"] == 1 for row in rows_of(rows(frame, "prediction_met"))}
    return tally(parts, f"{sum(parts.values())} of {len(parts)} predictions met")


@decision
def rank_collapse(frame: "pd.DataFrame") -> Finding:
    """P4.e: metric `last_layer_relative_residual` by `form` (heterogeneous and others), `seed` and `phase`."""
    found = rows(frame, "last_layer_relative_residual")
    parts: dict[str, bool] = {}
    numbers: dict[str, Number] = {}
    for phase in ("init", "trained"):
        table = rows(found, "last_layer_relative_residual", phase=phase).pivot_table(
            index="seed", columns="form", values="value", aggfunc="mean"
        )
        if "heterogeneous" not in table or len(table.columns) < 2:
            raise Lacking(f"{phase}: the heterogeneous metric and at least one other have to be measured", numbers)
        if len(table) < 5:
            raise Lacking(f"underpowered: {phase} has {len(table)} seeds of at least 5", numbers)
        others = table.drop(columns="heterogeneous").max(axis=1)
        wins = int((table["heterogeneous"] >= 10 * others).sum())
        numbers |= {f"seeds, {phase}": len(table), f"seeds with at least 10 times, {phase}": wins}
        parts[phase] = wins >= 0.8 * len(table)
    return tally(parts, ", ".join(f"{name}: {value}" for name, value in numbers.items() if "10 times" in name), numbers)


def _control(row: Mapping[str, Any]) -> str:
    return "flow under test" if row["control"] == "none" else str(row["control"]).replace("_", " ")


def _signs(found: "pd.DataFrame", by: str, *, at_least: int, what: str) -> Finding:
    if len(found) < at_least:
        raise Lacking(f"underpowered: {len(found)} {what} of at least {at_least}")
    above, below = {}, {}
    numbers: dict[str, Number] = {}
    for row in rows_of(found):
        half = half_width_95(row)
        above[str(row[by])], below[str(row[by])] = row["value"] - half > 0, row["value"] + half < 0
        numbers[str(row[by])] = row["value"]
    reason = f"above 0 in {sum(above.values())} of {len(above)} {what}, below in {sum(below.values())}"
    if sum(above.values()) >= at_least and not any(below.values()):
        return Finding(Outcome.MET, reason, numbers)
    return Finding(Outcome.REVERSE if all(below.values()) else Outcome.MIXED, reason, numbers)


def _identity(found: "pd.DataFrame", what: str) -> Finding:
    if not len(found):
        raise Lacking(f"the identity has not been measured on {what}")
    worst = found.groupby("model")["value"].max()
    numbers: dict[str, Number] = {f"largest identity error, {m}": float(worst[m]) for m in sorted(worst.index)}
    reason = f"identity error at most {number(float(worst.max()))} on {what} of {len(worst)} models"
    if len(worst) < 2:
        raise Lacking(f"underpowered: one model only, the rule asks for every family; {reason}", numbers)
    return tally({str(model): float(worst[model]) <= 1e-9 for model in sorted(worst.index)}, reason, numbers)
