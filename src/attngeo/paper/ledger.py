"""The ledger of claims as one page: the findings, then each claim with its rule, numbers, figures and deviations."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from attngeo.paper.answers import Answer, read_answers
from attngeo.paper.claims import WHO_CONFIRMS, Verdict, VerdictName, evaluate
from attngeo.paper.decisions import Number
from attngeo.paper.pages import render_page, write_text
from attngeo.paper.targets import TARGETS

__all__ = ["number_text", "page", "write_page"]


def page(verdicts: Sequence[Verdict], answers: Sequence[Answer] = (), made: Collection[str] = ()) -> str:
    """The ledger as HTML without any resource of its own but the pictures of `made`, figures and tables by name."""
    counts = {name: sum(v.verdict is name for v in verdicts) for name in VerdictName}
    shown = {
        verdict.claim.id: [
            target for name in made for target in [TARGETS[name]] if verdict.claim.id in target.claim_ids
        ]
        for verdict in verdicts
    }
    return render_page(
        "ledger_page.html",
        verdicts=verdicts,
        answers=answers,
        shown=shown,
        counts=counts,
        papers=list(dict.fromkeys(verdict.claim.paper for verdict in verdicts)),
        preset=", ".join(sorted({verdict.preset for verdict in verdicts})),
        who_confirms=WHO_CONFIRMS,
        number_text=number_text,
    )


def write_page(
    preset_name: str,
    results_dir: str | Path,
    out: str | Path,
    inputs: Iterable[str | Path] | None = None,
    made_from: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Judge every claim, as `evaluate` does, and write the page; `made_from` names what the preset makes."""
    counted = None if inputs is None else [Path(path) for path in inputs]
    verdicts = evaluate(preset_name, results_dir, counted)
    write_text(out, page(verdicts, read_answers(counted or []), made_from or ()))


def number_text(value: Number) -> str:
    """A number that a verdict used, as text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
