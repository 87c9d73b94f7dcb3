"""Time a training step on this CPU: one attention layer against softmax, the loop around a model, the operators' share.

The layers are compared with float64 before they are timed. Times are processor time of one thread; ratios are of one
run, in which all are timed in turn. Run it on an idle machine: `make bench`, or `python -m benchmarks.training_step
--help`.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # read once, when the libraries are loaded

from attngeo.evaluation import step_share, training_step
from attngeo.evaluation.training_step import GOAL_SIZE, LayerSize, Row
from attngeo.jobs import loop_overhead
from benchmarks.output import goals, write

QUICK_SIZE = LayerSize(1, 1, 49, 8)


def run(*, quick: bool, repeats: int, seconds: float) -> list[Row]:
    """Everything that is measured, as rows; the layers first, since the others leave settings of their own."""
    rows = training_step.measure(QUICK_SIZE if quick else GOAL_SIZE, repeats=repeats, seconds=seconds)
    model, images, steps = ("nano", 8, 2) if quick else ("micro", 64, 8)
    rows += loop_overhead.measure(model, images, steps, repeats=max(repeats, 2))
    return rows + step_share.measure(model, images, repeats=repeats, seconds=seconds)


def tables(rows: Sequence[Row]) -> str:
    """One line a number, then the goals."""
    lines = []
    for row in rows:
        what = [row["metric"], row.get("attention", ""), row.get("form", ""), row.get("operators", "")]
        what += [f"against {row['against']}"] if "against" in row else []
        spread = (
            f" ({row['spread_kind']} {row['spread']:.3g}, n = {row['n']})" if "spread" in row else f" (n = {row['n']})"
        )
        lines.append(f"  {' '.join(filter(None, what)):58} {row['value']:10.4g} {row['unit']}{spread}")
        lines += [f"    {row['why']}"] if "why" in row else []
    judged = (
        (verdict, value, f"{goal.text}: at most {goal.at_most:g}") for goal, value, verdict in training_step.judge(rows)
    )
    return "\n".join([*lines, *goals(judged)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Status 1 if a layer is wrong; a goal that is missed is said and is no error."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repeats", type=int, default=20, help="samples of every contestant (default 20)")
    parser.add_argument("--seconds", type=float, default=5.0, help="time for each, after which 3 samples suffice")
    parser.add_argument("--quick", action="store_true", help="sizes that say nothing but run in seconds")
    parser.add_argument("--out", type=Path, help="write every number to this CSV file")
    chosen = parser.parse_args(arguments)
    rows = run(quick=chosen.quick, repeats=chosen.repeats, seconds=chosen.seconds)
    print(tables(rows))
    if chosen.out is not None:
        write(rows, chosen.out)
    return int(any(row["metric"] == "not_timed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
