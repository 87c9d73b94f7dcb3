"""Rules for the calculus of variations of attention on the sphere (P1)."""

from typing import TYPE_CHECKING

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
)
from attngeo.paper.results import listed, rows_of
from attngeo.paper.walks import trained_here

if TYPE_CHECKING:
    import pandas as pd

CLEAR = 5.0  # standard errors beyond a tolerance from which a fitted slope contradicts the derived one
NO_POWER = 0.5  # a log-log slope below this does not fall with the step


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
            parts[name] = part(False, NO_POWER - row["value"] > CLEAR * standard_error(row, f"the order of {name}"))
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
            parts[name] = part(False, outside > CLEAR * standard_error(worst, f"the slope of the {name}"))
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
    return tally(parts, f"{held(parts)} of {len(parts)} models have nearly constant gains", numbers)
