"""Time attention's flow on the sphere and the solver of stationary paths on this CPU, and measure memory by time steps.

The flow is compared with an adaptive integration of its definition, the solver's path with the flow, before either is
timed. Times are of the wall with as many threads as given. Run it on an idle machine: `make bench`, or `python -m
benchmarks.variational --help`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from attngeo.variational import budgets
from attngeo.variational.budgets import Row
from benchmarks.output import goals, write


def tables(rows: Sequence[Row]) -> str:
    """One line a number, then the goals."""
    lines = []
    for row in rows:
        sizes = ", ".join(f"{row[name]} {name}" for name in ("tokens", "dimension", "steps") if name in row)
        label = f"  {row['metric']:24} {row['of']:18} {sizes:38}"
        lines.append(f"{label} {row['why']}" if "why" in row else f"{label} {row['value']:10.4g} {row['unit']}")
    judged = (
        (verdict, value, f"{goal.text}: at most {goal.at_most:g}") for goal, value, verdict in budgets.judge(rows)
    )
    return "\n".join([*lines, *goals(judged)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Status 1 if a path is wrong; a goal that is missed is said and is no error."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.variational",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default 2, as in the goals)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of every contestant, of which the fastest counts")
    parser.add_argument("--quick", action="store_true", help="sizes that say nothing but run in seconds")
    parser.add_argument("--out", type=Path, help="write every number to this CSV file")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    rows = budgets.measure(budgets.QUICK if chosen.quick else budgets.FULL, chosen.repeats)
    print(tables(rows))
    if chosen.out is not None:
        write(rows, chosen.out)
    return int(any(row["metric"] == "not_timed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
