"""Time attention by metric beside plain softmax and the inverse of metrics beside a dense one on this CPU.

Attention is compared with its definition in float64, gradients too, and inverses with dense ones, before they are
timed. Processor times of one thread. Run it on an idle machine: `make bench`, or `python -m benchmarks.fiber_bundle
--help`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from attngeo.fiber_bundle import budgets
from attngeo.fiber_bundle.attention_budget import Row, judge
from benchmarks.output import goals, write


def tables(rows: Sequence[Row]) -> str:
    """One line a number, then the goals."""
    lines = []
    for row in rows:
        sizes = ", ".join(f"{row[name]} {name}" for name in ("heads", "tokens", "dimension", "rank") if name in row)
        label = f"  {row['metric']:26} {row['of']:10} {sizes:46}"
        lines.append(f"{label} {row['why']}" if "why" in row else f"{label} {row['value']:10.4g} {row['unit']}")
    judged = ((verdict, value, f"{goal.text}: {goal.bounds}") for goal, value, verdict in judge(rows, budgets.GOALS))
    return "\n".join([*lines, *goals(judged)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Status 1 if attention is wrong; a goal that is missed is said and is no error."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fiber_bundle",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repeats", type=int, default=10, help="samples of each, of which the fastest counts")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each contestant, after which three suffice")
    parser.add_argument("--quick", action="store_true", help="sizes that say nothing but run in seconds")
    parser.add_argument("--out", type=Path, help="write every number to this CSV file")
    chosen = parser.parse_args(arguments)
    size = budgets.QUICK if chosen.quick else budgets.FULL
    rows = budgets.measure(size, chosen.repeats, chosen.seconds)
    print(tables(rows))
    if chosen.out is not None:
        write(rows, chosen.out)
    return int(any(row["metric"] == "not_timed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
