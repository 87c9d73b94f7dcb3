"""Table findings: the three questions that the project was built to answer, and what this preset says to each."""

from collections.abc import Sequence
from pathlib import Path

from attngeo.paper.claims import WHO_CONFIRMS
from attngeo.paper.findings import UNTESTED, answers
from attngeo.paper.render import Tabulated
from attngeo.paper.results import preset_name, require_inputs


def tabulate(inputs: Sequence[Path]) -> Tabulated:
    """Tabulate result files of one preset: runs of table 4, walks of pretrained models, and the rank collapse."""
    import pandas as pd

    require_inputs(inputs, "findings", "file")
    found = answers(inputs)
    frame = pd.DataFrame(
        {
            "question": [answer.question for answer in found],
            "answer": [answer.answer for answer in found],
            "claim": [answer.claim for answer in found],
            "verdict": [answer.verdict or None for answer in found],
            "shown in": [answer.shown_in for answer in found],
        }
    )
    caption = (
        f"What the project was built to find out, as far as preset {preset_name(inputs)} says it; all numbers are ours "
        f'(kind: ours), their n, spread and devices stand in the table or figure named. "{UNTESTED}": not '
        "run in it, or too little of it. The first question has the rule of table 4, the others that of their claim. "
        f"{WHO_CONFIRMS}"
    )
    return Tabulated(frame, caption, "findings", widths={"question": "3.5cm", "answer": "7cm"}, long=True)
