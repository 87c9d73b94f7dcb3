"""An answer to one of the questions that the project was built for, and the answers of a finished preset."""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from attngeo.paper.targets import FINDINGS


@dataclass(frozen=True)
class Answer:
    """A question with what a preset says to it; `claim` names the ledger's row, `shown_in` a figure or a table."""

    question: str
    answer: str
    claim: str
    verdict: str
    shown_in: str


def read_answers(inputs: Iterable[Path]) -> list[Answer]:
    """The answers in the file of findings among the inputs; none if it is not there."""
    place = next((path for path in inputs if path.name == Path(FINDINGS).name), None)
    if place is None:
        return []
    with place.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    return [Answer(r["question"], r["answer"], r["claim"], r["verdict"], r["shown in"]) for r in rows]
