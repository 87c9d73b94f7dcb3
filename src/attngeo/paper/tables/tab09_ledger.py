"""Table 9: the ledger; every claim with its verdict, the reason, the evidence and the deviations."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from attngeo.paper.claims import WHO_CONFIRMS, Verdict, VerdictName, evaluate
from attngeo.paper.render import EN_DASH, Tabulated
from attngeo.paper.results import require_inputs, results_folder


def tabulate(inputs: Sequence[Path]) -> Tabulated:
    """Tabulate the verdicts on the inputs, which lie in one results folder."""
    import pandas as pd

    require_inputs(inputs, "tab9", "file")
    folder = results_folder(inputs)
    preset = folder.resolve().name
    verdicts = evaluate(preset, folder, inputs)
    frame = pd.DataFrame(
        {
            "claim": [verdict.claim.id for verdict in verdicts],
            "paper": [verdict.claim.paper for verdict in verdicts],
            "statement": [verdict.claim.statement for verdict in verdicts],
            "verdict": [verdict.verdict.value for verdict in verdicts],
            "reason": [verdict.reason for verdict in verdicts],
            "evidence": [_evidence(verdict) for verdict in verdicts],
            "deviations": [" ".join(verdict.deviations) or EN_DASH for verdict in verdicts],
        }
    )
    counts = Counter(verdict.verdict for verdict in verdicts)
    totals = ", ".join(f"{counts[name]} {name.value}" for name in VerdictName)
    caption = (
        f"The ledger of claims, preset {preset}: {totals}. Statements are this project's wording of what the papers' "
        "abstracts and reports on them say (kind: paper), verdicts and the numbers in the reasons are ours. "
        f"{'; '.join(f'{name}: {name.meaning}' for name in VerdictName)}. {WHO_CONFIRMS}"
    )
    widths = {"paper": "1.6cm", "statement": "3.4cm", "reason": "3.4cm", "evidence": "2.2cm", "deviations": "2.6cm"}
    return Tabulated(frame, caption, "ledger", widths=widths, long=True)


def _evidence(verdict: Verdict) -> str:
    """The files, or their pattern and count where there are many."""
    if not verdict.evidence:
        return EN_DASH
    if len(verdict.evidence) <= 3:
        return " ".join(verdict.evidence)
    return f"{' '.join(verdict.claim.evidence)} ({len(verdict.evidence)} files)"
