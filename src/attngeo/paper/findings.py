"""The three questions that the project was built to answer, each answered from the records of one preset."""

import math
from collections.abc import Sequence
from pathlib import Path

from attngeo.errors import UserError
from attngeo.paper.answers import Answer
from attngeo.paper.claims import Verdict, VerdictName, evaluate
from attngeo.paper.results import preset_name, results_folder
from attngeo.paper.tables.tab04_decisions import replication_answer
from attngeo.paper.walks import (
    MINIMAL_SIZES,
    by_size,
    mean_over_layers,
    parameters_of,
    read_walks,
    size_correlations,
    walked_models,
)

UNTESTED = "untested in this preset"
QUESTIONS = {
    "replication": "What explains the failed public replication of LaplacianFormer?",
    "P3.f": "What is left of P3.f, isometry and convergence that grow with scale, once the null is taken off?",
    "P4.e": "Do heterogeneous metrics prevent rank collapse (P4.e)?",
}


def answers(inputs: Sequence[Path]) -> list[Answer]:
    """The answers, in the order of `QUESTIONS`, from result files of one preset; what has no number says so."""
    preset, folder = preset_name(inputs), results_folder(inputs)
    verdicts = {verdict.claim.id: verdict for verdict in evaluate(preset, folder, inputs)}
    scale, collapse = verdicts["P3.f"], verdicts["P4.e"]
    walks = [path for path in inputs if path.parent.name == "connection_walk"]
    return [
        Answer(QUESTIONS["replication"], _replication(inputs), "P2.f", "", "tab4"),
        Answer(QUESTIONS["P3.f"], _scale(scale, walks), "P3.f", scale.verdict.value, "fig11"),
        Answer(QUESTIONS["P4.e"], _judged(collapse), "P4.e", collapse.verdict.value, "fig14"),
    ]


def _replication(inputs: Sequence[Path]) -> str:
    finals = [path for path in inputs if path.name == "final.json"]
    try:
        found = replication_answer(finals) if finals else ""
    except UserError as error:  # of a preset that is not complete: what the runs are compared with is not there
        return f"{UNTESTED}: {error.what}"
    return found or f"{UNTESTED}: no run makes all five choices of the replication together"


def _scale(verdict: Verdict, walks: Sequence[Path]) -> str:
    """The verdict's reason, after what the score without its null would have said."""
    before = _score_trend(walks)
    return f"{before}{_judged(verdict)}" if before else _judged(verdict)


def _score_trend(walks: Sequence[Path]) -> str:
    """How the isometry score itself goes with size, the null not taken off; empty where there are too few sizes."""
    if not walks:
        return ""
    frame = read_walks(walks)
    models = walked_models(frame)
    sizes = parameters_of(frame)
    texts = []
    for control, name in (("trained", "score"), ("null", "null")):
        values = mean_over_layers(frame[frame["metric"] == "isometry_score"], control)
        found = size_correlations(by_size(values[values["model"].isin(sizes)], models, sizes))
        texts += [
            f"{name} of {family} {precision} {_correlation(value)} over {count} sizes"
            for (family, precision), (value, count) in found.items()
        ]
    if not texts:
        return ""
    return f"Spearman with size before the null is taken off (at least {MINIMAL_SIZES} sizes): {', '.join(texts)}. "


def _correlation(value: float) -> str:
    return f"{value:+.2f}" if math.isfinite(value) else "none (all equal)"


def _judged(verdict: Verdict) -> str:
    """A verdict in words."""
    return f"{UNTESTED if verdict.verdict is VerdictName.UNTESTED else verdict.verdict}: {verdict.reason}"
