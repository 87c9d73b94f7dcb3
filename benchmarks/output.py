"""Where the benchmarks' words and numbers go."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attngeo.files import write_aside


def say(line: str) -> None:
    """Progress goes to standard error: what is asked for stays alone on standard output."""
    print(line, file=sys.stderr, flush=True)


def write(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The rows as CSV."""
    import pandas as pd

    with write_aside(path) as stream:
        pd.DataFrame(rows).to_csv(stream, index=False)
