"""The ledger of claims: what each paper says, judged by written rules on the files of one preset."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, model_validator

from attngeo.paper import records
from attngeo.paper.decisions import DECISIONS, Finding, Lacking, Number, Outcome, optional_rows
from attngeo.paper.results import accuracies, model_options_of, read_finals, rows_of, size_of

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["DECISIONS", "Claim", "Verdict", "VerdictName", "claims", "evaluate"]

POWERED_PRESETS = ("study", "imagenet")
UNDERPOWERED_PRESETS = ("smoke",)
WHO_CONFIRMS = (
    f"Only presets {' and '.join(POWERED_PRESETS)} can confirm, refute or find a claim partly true, and only with the "
    "seeds, windows, draws and images that its rule needs; other presets indicate, for a claim or against it. An exact "
    "identity is judged in any preset."
)


class VerdictName(StrEnum):
    """The verdicts, in the order in which they are counted."""

    CONFIRMED = "confirmed"
    INDICATED = "indicated"
    PARTLY = "partly"
    UNDECIDED = "undecided"
    INDICATED_AGAINST = "indicated against"
    REFUTED = "refuted"
    UNTESTED = "untested"

    @property
    def meaning(self) -> str:
        """When a claim gets this verdict, in a line."""
        return _MEANINGS[self]


_POWERED = " or ".join(POWERED_PRESETS)
_MEANINGS = {
    VerdictName.CONFIRMED: f"its rule is met in preset {_POWERED}, or it is an exact identity and holds",
    VerdictName.INDICATED: "its rule is met, but in another preset or on too little evidence",
    VerdictName.PARTLY: f"some parts of its rule hold, in preset {_POWERED}",
    VerdictName.UNDECIDED: "all that its rule asks for was measured, and neither meets nor contradicts it; outside "
    f"{_POWERED} also where only some parts hold",
    VerdictName.INDICATED_AGAINST: "it is contradicted, but in another preset or on too little evidence",
    VerdictName.REFUTED: f"it is contradicted in preset {_POWERED}",
    VerdictName.UNTESTED: "not run, or too little of it: fewer seeds, models, windows, draws or images than its rule "
    "asks for",
}


class Minimum(BaseModel):
    """How much a verdict has to rest on: `at_least` so many of `what`, counted in the claim's own records.

    Counted is the smallest n of the records of `metric` with these `labels`; with `distinct`, the number of different
    values of that label among them; with `setting` instead, the smallest such setting of the analyses.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    what: str
    at_least: int
    metric: str = ""
    labels: dict[str, str] = {}
    distinct: str = ""
    setting: str = ""

    @model_validator(mode="after")
    def _counts_one_thing(self) -> "Minimum":
        if bool(self.metric) == bool(self.setting):
            raise ValueError("give either metric or setting")
        return self

    def shortfall(self, evidence: "pd.DataFrame") -> str:
        """What the evidence lacks of this, in words; empty if nothing."""
        if self.setting:
            found = min((settings.get(self.setting, 0) for settings in evidence.attrs["settings"]), default=0)
        else:
            counted = optional_rows(evidence, self.metric, **self.labels)
            if self.distinct:
                found = int(counted[self.distinct].nunique()) if self.distinct in counted else 0
            else:
                found = int(counted["n"].min()) if len(counted) else 0
        return f"{found} {self.what} of at least {self.at_least}" if found < self.at_least else ""


class Claim(BaseModel):
    """A line of claims.yaml; `evidence` are patterns relative to results/<preset>."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    paper: str
    statement: str
    test: str
    rule: str
    refuted: str
    decide: str
    evidence: tuple[str, ...]
    deviations: tuple[str, ...]
    minimums: tuple[Minimum, ...] = ()
    exact: bool = False

    @model_validator(mode="after")
    def _needs_numbers_or_is_exact(self) -> "Claim":
        if self.exact and self.minimums:
            raise ValueError(f"{self.id} is an identity: no number of seeds makes it truer")
        return self


@dataclass(frozen=True)
class Verdict:
    """A claim's verdict in one preset with all that it rests on; `evidence` are files relative to results/<preset>."""

    claim: Claim
    verdict: VerdictName
    reason: str
    preset: str
    numbers: Mapping[str, Number] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()

    @property
    def deviations(self) -> tuple[str, ...]:
        """How the test differs from what the paper did or would do."""
        return self.claim.deviations


@cache
def claims() -> tuple[Claim, ...]:
    """Every claim of claims.yaml, in its order."""
    text = (files("attngeo.paper") / "claims.yaml").read_text(encoding="utf-8")
    return tuple(TypeAdapter(list[Claim]).validate_python(yaml.safe_load(text)))


def evaluate(preset_name: str, results_dir: str | Path, inputs: Iterable[str | Path] | None = None) -> list[Verdict]:
    """Judge every claim on the files in `results_dir`, which is results/<preset>.

    With `inputs`, only those files count: what an earlier state of the preset left behind is then no evidence.
    """
    results_dir = Path(results_dir)
    allowed = None if inputs is None else {Path(path).resolve() for path in inputs}
    verdicts = []
    for claim in claims():
        paths = sorted({path for pattern in claim.evidence for path in results_dir.glob(pattern)})
        if allowed is not None:
            paths = [path for path in paths if path.resolve() in allowed]
        verdicts.append(judge(claim, preset_name, results_dir, paths))
    return verdicts


def judge(claim: Claim, preset_name: str, results_dir: Path, paths: Sequence[Path]) -> Verdict:
    """The verdict on one claim: its rule applied to its evidence, then capped by what the preset can show."""
    evidence = tuple(path.relative_to(results_dir).as_posix() for path in paths)
    if not paths:
        reason = f"not run in preset {preset_name}: needs {' or '.join(claim.evidence)}"
        return Verdict(claim, VerdictName.UNTESTED, reason, preset_name)
    frame = read_evidence(paths)
    try:
        finding = DECISIONS[claim.decide](frame)
    except Lacking as lacking:
        return Verdict(claim, VerdictName.UNTESTED, lacking.reason, preset_name, lacking.numbers, evidence)
    shortfalls = list(dict.fromkeys(text for minimum in claim.minimums if (text := minimum.shortfall(frame))))
    verdict, reason = _capped(claim, finding, preset_name, shortfalls)
    return Verdict(claim, verdict, reason, preset_name, finding.numbers, evidence)


def read_evidence(paths: Sequence[Path]) -> "pd.DataFrame":
    """Record files and final.json files as one frame of records; a run gives metrics `top1` and `parameters`.

    The settings of every analysis are in `attrs["settings"]`.
    """
    import pandas as pd

    finals = [path for path in paths if path.name == "final.json"]
    frames = [records.read(path) for path in paths if path.name != "final.json"]
    settings = [frame.attrs["provenance"].get("settings", {}) for frame in frames]
    if finals:
        frames.append(_run_records(read_finals(finals)))
    evidence = pd.concat(frames, ignore_index=True)
    evidence.attrs = {"settings": settings}
    return evidence


def _capped(claim: Claim, finding: Finding, preset_name: str, shortfalls: Sequence[str]) -> tuple[VerdictName, str]:
    """The verdict that a finding allows: without power it indicates at most, for the claim or against it."""
    reason = finding.reason
    if preset_name in UNDERPOWERED_PRESETS and not claim.exact:
        return VerdictName.UNTESTED, f"preset {preset_name} is too small for a verdict; it only showed: {reason}"
    powered = preset_name in POWERED_PRESETS
    if claim.exact or (powered and not shortfalls):
        match finding.outcome:
            case Outcome.MET:
                return VerdictName.CONFIRMED, reason
            case Outcome.MIXED:
                return VerdictName.PARTLY, reason
            case Outcome.REVERSE:
                return VerdictName.REFUTED, reason
            case Outcome.NOT_MET:
                return VerdictName.UNDECIDED, f"the rule is neither met nor contradicted: {reason}"
    missed = f"; {', '.join(shortfalls)}" if shortfalls else ""
    match finding.outcome:
        case Outcome.MET:
            return VerdictName.INDICATED, f"{reason}{missed}; {_who_decides(powered, preset_name, 'confirm')}"
        case Outcome.REVERSE:
            return VerdictName.INDICATED_AGAINST, f"{reason}{missed}; {_who_decides(powered, preset_name, 'refute')}"
    stands = "only some parts hold" if finding.outcome is Outcome.MIXED else "the rule is neither met nor contradicted"
    if shortfalls:
        return VerdictName.UNTESTED, f"underpowered, {', '.join(shortfalls)}; so far {stands}: {reason}"
    return VerdictName.UNDECIDED, f"{stands}: {reason}"


def _who_decides(powered: bool, preset_name: str, what: str) -> str:
    if powered:
        return f"that is too little to {what}"
    return f"preset {preset_name} indicates, only {' and '.join(POWERED_PRESETS)} {what}"


def _run_records(finals: "pd.DataFrame") -> "pd.DataFrame":
    import pandas as pd

    rows = []
    plain = finals[finals["options"].map(model_options_of) == ""]  # another model is evidence for no kind
    for final in rows_of(plain.assign(accuracy=accuracies(plain))):
        labels = {name: final[name] for name in ("run_id", "model", "attention", "dataset", "recipe", "seed")}
        labels["size"] = size_of(str(final["model"]))
        for metric, key, n in (("top1", "accuracy", final["n_eval"]), ("parameters", "parameters", 1)):
            rows.append({"metric": metric, "value": float(final[key]), "n": n, "origin": "ours", **labels})
    return pd.DataFrame(rows, columns=None if rows else ["metric", "value", "n"])
