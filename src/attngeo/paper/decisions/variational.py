"""Rules for the calculus of variations of attention on the sphere (P1)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attngeo.paper.decisions.rule import (
    BROKEN_IDENTITY,
    Finding,
    Lacking,
    Number,
    Outcome,
    Part,
    decision,
    held,
    number,
    one_each,
    optional_rows,
    part,
    rows,
    side_of_zero,
    standard_error,
    tally,
    unanimous,
)
from attngeo.paper.results import listed, rows_of
from attngeo.paper.walks import trained_here

if TYPE_CHECKING:
    import pandas as pd

CLEAR = 5.0  # standard errors beyond a tolerance from which a fitted slope contradicts the derived one
NO_POWER = 0.5  # a log-log slope below this does not fall with the step
SOFTMAX = "softmax_normalised"  # the control that is attention as it is used, and a part of its own


@decision
def tangent_flow(frame: "pd.DataFrame") -> Finding:
    """P1.a: metrics `defect` (check tangency) and `tangential_share_excess` over random walks, a record a model.

    Against: a defect of 1e-3 or more; a share below that of random walks with its interval. The claim is of pretrained
    models: those trained here are reported, not judged.
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

    Each integrator is a part on the gradient flow; softmax-normalised attention is one, by the same law.
    Against: an order below 0.5 by more than 5 standard errors (the imbalance does not fall), for softmax-normalised
    attention with every integrator. Other controls are no part of the claim: where one falls too, a rule that is met
    otherwise is mixed.
    """
    parts: dict[str, Part] = {}
    numbers: dict[str, Number] = {}
    falling: list[str] = []
    controls = 0
    found = rows(frame, "slope", check="energy_dissipation")
    expected = {row["method"]: row["expected"] for row in rows_of(optional_rows(found, "slope", control="none"))}
    softmax: list[Part] = []
    for row in rows_of(found):
        control = "flow under test" if row["control"] == "none" else str(row["control"]).replace("_", " ")
        name = f"{row['method']}, {control}"
        numbers[f"order, {name}"] = row["value"]
        if row["control"] == "none":
            parts[name] = _order(row, row["expected"], name)
        elif row["control"] == SOFTMAX:
            softmax.append(_order(row, expected[row["method"]], name))
        else:
            controls += 1
            falling += [name] * (row["value"] >= NO_POWER)
    if not controls:
        raise Lacking("the balance has been measured without controls", numbers)
    told = _with_softmax(parts, softmax, numbers)
    orders = "; ".join(
        f"{what} {', '.join(f'{value:.2f}' for key, value in numbers.items() if key.endswith(end))}"
        for what, end in (("unnormalised", "flow under test"), ("softmax-normalised", "softmax normalised"))
    )
    finding = tally(parts, f"{told}; orders at which the imbalance falls with the step: {orders}", numbers)
    if not falling:
        return finding
    outcome = Outcome.MIXED if finding.outcome is Outcome.MET else finding.outcome
    return Finding(outcome, f"{finding.reason}; it falls on controls too: {listed(falling)}", numbers)


@decision
def variation_slopes(frame: "pd.DataFrame") -> Finding:
    """P1.c: metric `slope` of checks first_variation (generic and flow path), minimiser_shift and euler_lagrange.

    Control none; softmax-normalised attention is a part of its own, with the slopes along its flow.
    Against: a slope outside its tolerance by more than 5 standard errors, of softmax-normalised attention every slope.
    """
    flow_path = {"check": "first_variation", "method": "flow_path"}
    wanted = (
        ("first variation, generic path", {"check": "first_variation", "method": "generic_path"}, 1.0, 0.05),
        ("first variation, stationary path", flow_path, 2.0, 0.1),
        ("shift of the minimiser", {"check": "minimiser_shift"}, 1.0, 0.05),
    )
    parts: dict[str, Part] = {}
    numbers: dict[str, Number] = {}
    for name, labels, expected, tolerance in wanted:
        slopes = rows_of(rows(frame, "slope", control="none", **labels))
        worst = max(slopes, key=lambda row: abs(row["value"] - expected))
        numbers[f"slope, {name}"] = worst["value"]
        parts[name] = _slope(worst, expected, tolerance, name)
    text = ", ".join(f"{name.removeprefix('slope, ')} {value:.3f}" for name, value in numbers.items())
    orders = {row["method"]: row for row in rows_of(rows(frame, "slope", check="euler_lagrange", control="none"))}
    residual: list[Part] = []
    for method, row in orders.items():
        numbers[f"order, Euler-Lagrange residual, {method}"] = row["value"]
        residual.append(_slope(row, row["expected"], 0.1 * row["expected"], f"Euler-Lagrange residual, {method}"))
    parts["Euler-Lagrange equation"] = unanimous(residual)
    fitted = [f"{row['value']:.2f} ({row['expected']:g})" for row in orders.values()]
    text += f"; Euler-Lagrange residual (derived order) {', '.join(fitted)}"
    softmax: list[Part] = []
    normalised: list[str] = []
    for row in rows_of(optional_rows(frame, "slope", control=SOFTMAX)):
        name = f"{str(row['check']).replace('_', ' ')}, {row['method']}, softmax-normalised"
        if row["check"] == "euler_lagrange":
            expected = orders[row["method"]]["expected"]
            softmax.append(_slope(row, expected, 0.1 * expected, name))
            normalised.append(f"Euler-Lagrange residual {row['value']:.2f} ({expected:g})")
        elif {key: row[key] for key in flow_path} == flow_path:
            softmax.append(_slope(row, 2.0, 0.1, name))
            normalised.append(f"first variation, stationary path {row['value']:.2f} (2)")
        else:
            continue
        numbers[f"slope, {name}"] = row["value"]
    told = _with_softmax(parts, softmax, numbers)
    return tally(parts, f"{told}; slopes: {text}; softmax-normalised: {', '.join(normalised)}", numbers)


def _order(row: Mapping[str, Any], expected: float, name: str) -> Part:
    """Within 10 % of the integrator's order holds; clearly below 0.5 is against."""
    if abs(row["value"] - expected) <= 0.1 * expected:
        return Part.HOLDS
    return part(False, NO_POWER - row["value"] > CLEAR * standard_error(row, f"the order of {name}"))


def _slope(row: Mapping[str, Any], expected: float, tolerance: float, name: str) -> Part:
    """Within its tolerance holds; clearly outside is against."""
    outside = abs(row["value"] - expected) - tolerance
    if outside <= 0:
        return Part.HOLDS
    return part(False, outside > CLEAR * standard_error(row, f"the slope of the {name}"))


def _with_softmax(parts: dict[str, Part], softmax: Sequence[Part], numbers: Mapping[str, Number]) -> str:
    """Adds softmax-normalised attention to the parts, and says for which attention the law holds."""
    if not softmax:
        raise Lacking("softmax-normalised attention has not been measured", numbers)
    unnormalised = unanimous(parts.values())
    stands = {Part.HOLDS: "holds", Part.OPEN: "is not met throughout", Part.AGAINST: "is violated"}[unnormalised]
    normalised = unanimous(softmax)
    verb = {Part.HOLDS: "obeys it too", Part.OPEN: "neither obeys nor clearly violates it", Part.AGAINST: "violates it"}
    parts["softmax-normalised attention"] = normalised
    return (
        f"{stands} for unnormalised attention with query, key and value maps equal to the identity; "
        f"softmax-normalised attention {verb[normalised]}"
    )


@decision
def norm_gain_constant(frame: "pd.DataFrame") -> Finding:
    """P1.d: metric `norm_gain_cv` by model and layer, control trained.

    Against: more than 0.25 in more than half of a model's layers. Models trained here are reported, not
    judged: gains start at exactly 1, and a short training leaves them near it.
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
    return tally(parts, f"{held(parts)} of {len(parts)} models have nearly constant gains", numbers)
