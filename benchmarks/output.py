"""Where the benchmarks' words and numbers go."""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attngeo.files import write_aside


def say(line: str) -> None:
    """Progress goes to standard error: what is asked for stays alone on standard output."""
    print(line, file=sys.stderr, flush=True)


def goals(judged: Iterable[tuple[str, float, str]]) -> list[str]:
    """The last lines of a report: verdict, number and text of every goal."""
    lines = ["", "goals"]
    for verdict, value, text in judged:
        number = "" if math.isnan(value) else f"{value:.4g}"
        lines.append(f"  {verdict:12}  {number:>9}  {text}")
    return lines


def write(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The rows as CSV."""
    import pandas as pd

    with write_aside(path) as stream:
        pd.DataFrame(rows).to_csv(stream, index=False)
