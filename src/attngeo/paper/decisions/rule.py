"""What every rule of the ledger is made of: its outcome, its parts, and the records that it reads.

A rule is judged part by part (a series, a model, a data set): a part holds, speaks against the claim, or is open. What
speaks against a claim is a condition of its own, stated with each rule under "Against"; a part that merely misses its
threshold is open. A rule that cannot be judged raises `Lacking`: nothing measured, too few seeds, or a number or an
interval that is not finite.
Metric names that no analysis writes yet are the names that it has to use.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from attngeo.paper.intervals import half_width_95
from attngeo.paper.results import listed, rows_of

if TYPE_CHECKING:
    import pandas as pd

Number = float | int | str
BROKEN_IDENTITY = 1e-3  # relative error that no rounding explains: an identity that is off by this does not hold


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


def unanimous(parts: Iterable[Part]) -> Part:
    """One part of several that have to agree: it holds, or speaks against the claim, where all of them do."""
    found = set(parts)
    return found.pop() if len(found) == 1 else Part.OPEN


def held(parts: Mapping[str, Part]) -> int:
    """How many parts hold."""
    return sum(one is Part.HOLDS for one in parts.values())


def contradicted(parts: Mapping[str, Part]) -> int:
    """How many parts speak against the claim."""
    return sum(one is Part.AGAINST for one in parts.values())


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


def by_majority(parts: Mapping[str, Part], reverse: bool, reason: str, numbers: Mapping[str, Number]) -> Finding:
    """Met if more than half of the parts hold, mixed if some do, else in reverse if `reverse`."""
    holding = held(parts)
    if 2 * holding > len(parts):
        return Finding(Outcome.MET, reason, numbers)
    if holding:
        return Finding(Outcome.MIXED, reason, numbers)
    return Finding(Outcome.REVERSE if reverse else Outcome.NOT_MET, reason, numbers)


def number(value: float) -> str:
    """A number in a sentence."""
    return f"{value:.3g}"


def finite(value: float | None, otherwise: str) -> float:
    """The value; Lacking with the reason `otherwise` if there is none or it is not finite."""
    if value is None or not math.isfinite(value):
        raise Lacking(otherwise)
    return float(value)


def standard_error(row: Mapping[str, Any], of: str) -> float:
    """The standard error of a fitted slope; Lacking if the record has none."""
    kind = str(row["spread_kind"])
    return finite(row["spread"] if "standard error" in kind else None, f"{of} has no standard error")
