"""Time the operators against torch, SciPy, scikit-learn and KeOps on this CPU, and against what its registers allow.

Every contestant's output and gradients are compared with float64 before it is timed. Times are processor time of one
thread, the smallest of many repeats taken in turn with the others; memory that a contestant freed is kept for the next
call. Run it on an idle machine: `make bench`, or `python -m benchmarks.operators --help`.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read once, when the libraries are loaded

import torch

from attngeo.evaluation import operator_benchmarks, timing
from attngeo.evaluation.operator_benchmarks import OPERATIONS, Row
from attngeo.evaluation.operator_goals import judge
from attngeo.evaluation.operator_limits import measure_port_limit, port_limits, this_instruction_set
from attngeo.evaluation.operator_sizes import INVERSE_SLICES, INVERSE_TOKENS, MEMORY_SIZES, PYRAMID_SIZES, Size, square
from benchmarks.output import goals, say, write

PORT_LIMIT = Path(__file__).with_name("port_limit.cpp")
QUICK = {"kernel": (Size(3, 67, 13, 9),), "inverse": (square(5, 17),)}
FULL = {"kernel": PYRAMID_SIZES, "inverse": tuple(square(INVERSE_SLICES, tokens) for tokens in INVERSE_TOKENS)}


def run(operations: Sequence[str], *, quick: bool, repeats: int, seconds: float) -> list[Row]:
    """Everything that is measured, as rows."""
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    sizes = QUICK if quick else FULL
    rows: list[Row] = []
    fused = "laplacian_kernel_matmul" in operations
    if fused:  # before freed memory is kept, which would hide what a call takes
        for size in sizes["kernel"] if quick else MEMORY_SIZES:
            rows += operator_benchmarks.memory(size, cpu)
    timing.keep_pages()
    instruction_set = this_instruction_set()
    limit = measure_port_limit(PORT_LIMIT, instruction_set)
    say(f"limit in registers ({limit.instruction_set or instruction_set}), Gpair/s a thread: {limit.why or ''}")
    for name, rate in (limit.gpair_per_s or {}).items():
        say(f"  {name}: {rate:.1f}")
    rows += operator_benchmarks.suite(
        {name: sizes["inverse" if name.endswith("_inverse") else "kernel"] for name in operations},
        cpu,
        repeats=repeats,
        seconds=seconds,
        limits=port_limits(limit),
        tell=say,
    )
    if fused and (os.cpu_count() or 1) > 1:
        size = sizes["kernel"][0] if quick else PYRAMID_SIZES[1]
        rows += operator_benchmarks.threads_ratio("laplacian_kernel_matmul", size, repeats=repeats)
    return rows


def tables(rows: Sequence[Row]) -> str:
    """One table an operator, size and direction, and one of the goals.

    Ratios are to the fastest peer; what computes something else or in another way is shown beside and marked as none.
    """
    lines = ["no peer: computes something else, or in another way"]
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        size = Size(row["slices"], row["tokens"], row["landmarks"], row["channels"])
        groups.setdefault((row["operation"], size, row.get("direction", "")), []).append(row)
    for (operation, size, direction), group in groups.items():
        found = {(row["metric"], row.get("contestant")): row for row in group}
        timed = sorted((row for row in group if row["metric"] == "time_ms"), key=lambda row: row["value"])
        peers = [row["value"] for row in timed if row["role"] == "peer"]
        lines += ["", f"{operation} {direction}, {size.label}".replace(" ,", ",")]
        for row in timed:
            rate, share = (found.get((metric, row["contestant"])) for metric in ("gpair_per_s", "limit_share"))
            cells = [f"{row['value']:10.3f} ms (median +{row['spread']:.3f}, n = {row['n']})"]
            cells.append(f"{rate['value']:6.2f} Gpair/s" if rate else "")
            cells.append(f"{peers[0] / row['value']:6.2f} x the best peer" if peers else "")
            cells.append(f"{100 * share['value']:.0f} % of the limit" if share else "")
            name = row["contestant"] + (f" ({row['backend']})" if row["backend"] else "")
            if row["role"] == "shown":
                name += ", no peer"
            lines.append(f"  {name:45} " + "  ".join(cell for cell in cells if cell))
        for row in group:
            if row["metric"] == "not_timed":
                lines.append(f"  {row['contestant']:45} not timed: {row['why']}")
            elif row["metric"] in ("peak_memory_mib", "two_thread_ratio"):
                lines.append(f"  {row['contestant']:45} {row['metric']}: {row['value']:.2f}")
    judged = ((one.verdict, one.value, one.goal.text) for one in judge(rows))
    return "\n".join([*lines, *goals(judged)])


def _operation(name: str) -> str:
    if name not in OPERATIONS:
        raise argparse.ArgumentTypeError(f"no operator {name!r} (choose from {', '.join(OPERATIONS)})")
    return name


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _duration(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, not {text!r}")
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Status 1 if a result of this project's own is wrong; a goal that is missed is said and is no error."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.operators",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "operations", nargs="*", type=_operation, metavar="operator", help=f"of {', '.join(OPERATIONS)}; all if none"
    )
    parser.add_argument("--repeats", type=_count, default=30, help="samples of every contestant (default 30)")
    parser.add_argument("--seconds", type=_duration, default=3.0, help="time for each, after which 3 samples suffice")
    parser.add_argument("--quick", action="store_true", help="sizes that say nothing but run in seconds")
    parser.add_argument("--out", type=Path, help="write every number to this CSV file")
    chosen = parser.parse_args(arguments)
    rows = run(chosen.operations or OPERATIONS, quick=chosen.quick, repeats=chosen.repeats, seconds=chosen.seconds)
    print(tables(rows))
    if chosen.out is not None:
        write(rows, chosen.out)
    wrong = [row for row in rows if row["metric"] == "not_timed" and row.get("role") == "ours"]
    for row in wrong:
        say(f"WRONG: {row['operation']} {row['direction']}: {row['why']}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
