"""The ledger of claims: what each paper says, judged by rules fixed before the runs on the files of one preset."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter

from attngeo.files import write_aside
from attngeo.paper import records
from attngeo.paper.decisions import DECISIONS, Lacking, Number, Outcome
from attngeo.paper.results import read_finals, rows_of

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["DECISIONS", "Claim", "Verdict", "VerdictName", "claims", "evaluate", "page", "write_page"]

POWERED_PRESETS = frozenset({"study"})
UNDERPOWERED_PRESETS = frozenset({"smoke"})


class VerdictName(StrEnum):
    """The five verdicts, in the order in which they are counted."""

    CONFIRMED = "confirmed"
    INDICATED = "indicated"
    PARTLY = "partly"
    REFUTED = "refuted"
    UNTESTED = "untested"


class Claim(BaseModel):
    """A line of claims.yaml; `evidence` are patterns relative to results/<preset>."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    paper: str
    statement: str
    test: str
    rule: str
    decide: str
    evidence: tuple[str, ...]
    deviations: tuple[str, ...]
    exact: bool = False


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
    try:
        finding = DECISIONS[claim.decide](read_evidence(paths))
    except Lacking as lacking:
        return Verdict(claim, VerdictName.UNTESTED, lacking.reason, preset_name, lacking.numbers, evidence)
    verdict, reason = _capped(claim, finding.outcome, preset_name, finding.reason)
    return Verdict(claim, verdict, reason, preset_name, finding.numbers, evidence)


def read_evidence(paths: Sequence[Path]) -> "pd.DataFrame":
    """Record files and final.json files as one frame of records; a run gives metrics `top1` and `parameters`."""
    import pandas as pd

    finals = [path for path in paths if path.name == "final.json"]
    frames = [records.read(path) for path in paths if path.name != "final.json"]
    if finals:
        frames.append(_run_records(read_finals(finals)))
    return pd.concat(frames, ignore_index=True)


def page(verdicts: Sequence[Verdict]) -> str:
    """The ledger as one self-contained HTML page."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((files("attngeo.paper") / "ledger_page.html").read_text(encoding="utf-8"))
    counts = {name.value: sum(v.verdict is name for v in verdicts) for name in VerdictName}
    papers = list(dict.fromkeys(verdict.claim.paper for verdict in verdicts))
    presets = sorted({verdict.preset for verdict in verdicts})
    return template.render(
        verdicts=verdicts, counts=counts, papers=papers, preset=", ".join(presets), number_text=number_text
    )


def write_page(
    preset_name: str, results_dir: str | Path, out: str | Path, inputs: Iterable[str | Path] | None = None
) -> None:
    """Judge every claim, as `evaluate` does, and write the ledger page to `out`."""
    text = page(evaluate(preset_name, results_dir, inputs))
    with write_aside(out) as stream:
        stream.write(text)


def number_text(value: Number) -> str:
    """A number that a verdict used, as text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _capped(claim: Claim, outcome: Outcome, preset_name: str, reason: str) -> tuple[VerdictName, str]:
    if preset_name in UNDERPOWERED_PRESETS and not claim.exact:
        return VerdictName.UNTESTED, f"preset {preset_name} is too small for a verdict; it only showed: {reason}"
    if outcome is Outcome.MIXED:
        return VerdictName.PARTLY, reason
    if outcome is Outcome.REVERSE:
        return VerdictName.REFUTED, reason
    if claim.exact or preset_name in POWERED_PRESETS:
        return VerdictName.CONFIRMED, reason
    return VerdictName.INDICATED, f"{reason}; preset {preset_name} indicates, only preset study confirms"


def _run_records(finals: "pd.DataFrame") -> "pd.DataFrame":
    import pandas as pd

    rows = []
    for final in rows_of(finals):
        labels = {name: final[name] for name in ("run_id", "model", "attention", "dataset", "seed")}
        labels["size"] = str(final["model"]).rsplit("_", 1)[-1]
        labels["recipe"] = final.get("recipe", "")
        labels["in_tab1"] = "tab1" in final["feeds"]
        for metric, key, n in (("top1", "accuracy", final["n_eval"]), ("parameters", "parameters", 1)):
            rows.append({"metric": metric, "value": float(final[key]), "n": n, "origin": "ours", **labels})
    return pd.DataFrame(rows)
