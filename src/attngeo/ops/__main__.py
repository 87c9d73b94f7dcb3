"""`python -m attngeo.ops`: print the backend chosen for each operator, device and type, and why."""

import argparse
import os
import sys
from collections.abc import Sequence

from attngeo.ops.backend import table

HEADINGS = ("operator", "device", "types", "backend", "why")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of `attngeo.ops.backend.table`; a reader that has seen enough, such as `head`, may close it."""
    description = "Print the backend chosen for each operator, device and type, and why."
    argparse.ArgumentParser(prog="python -m attngeo.ops", description=description).parse_args(arguments)
    rows = [HEADINGS, *table()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS) - 1)]
    try:
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + f"  {row[-1]}")
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered would raise again when the interpreter closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
