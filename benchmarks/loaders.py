"""Time this project's loaders of training images against torchvision's, in one run, and print which goals are met.

JPEG files of about 500 px are made of the embedded textile images in a temporary folder (1 GB), packed, and read with
two workers at 224 px by everyone in turn. Order, labels, shapes and pixels are checked first: the status is 1 if one
of this project's loaders is wrong. Run it on an idle machine: `make bench`, or `python -m benchmarks.loaders --help`.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from attngeo.data import embedded
from attngeo.errors import UserError
from attngeo.evaluation import loader_benchmarks
from attngeo.evaluation.loader_benchmarks import GOALS, QUICK, Row, Setting
from benchmarks.output import goals, say, write


def table(rows: Sequence[Row]) -> str:
    """One line a loader, and one a goal."""
    found = {(row["metric"], row["contestant"], row.get("against")): row for row in rows}
    timed = sorted((row for row in rows if row["metric"] == "img_per_s"), key=lambda row: -row["value"])
    peers = [row["contestant"] for row in timed if row["role"] == "peer"]
    lines = [
        f"{row['images']} images of {row['file_kb']:.0f} kB, read at {row['image_size']} px by {row['workers']} workers"
        for row in rows[:1]
    ]
    for row in timed:
        name = row["contestant"]
        cells = [f"{row['value']:7.0f} img/s (range {row['spread']:.0f}, n = {row['n']})"]
        cells.append(f"{found['cpu_ms_per_image', name, None]['value']:5.2f} ms of processor time an image")
        cells.append(f"first epoch {found['first_epoch_s', name, None]['value']:5.1f} s")
        ratios = [(peer, found.get(("ratio", name, peer))) for peer in peers]
        cells += [f"{ratio['value']:.2f} x {peer}" for peer, ratio in ratios if ratio]
        lines.append(f"  {name:33} " + "  ".join(cells))
    lines += [
        f"  {row['contestant']:33} not timed: {row['why']}" for row in rows if row["metric"] in ("not_timed", "wrong")
    ]
    return "\n".join([*lines, *goals((goal.verdict(rows), goal.value(rows), goal.text) for goal in GOALS)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Status 1 if a loader of this project's own is wrong; a goal that is missed is said and is no error."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loaders", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=Path, help="a folder whose images to use instead, each at least 250 x 250 px")
    parser.add_argument("--repeats", type=int, help=f"epochs of every loader (default {Setting.repeats})")
    parser.add_argument("--quick", action="store_true", help="sizes that say nothing but run in seconds")
    parser.add_argument("--out", type=Path, help="write every number to this CSV file")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    setting = QUICK if chosen.quick else Setting()
    if chosen.repeats is not None:
        setting = replace(setting, repeats=max(1, chosen.repeats))
    try:
        folder = chosen.images or embedded.fetch("textile")
        sources = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
        if not sources:
            raise UserError(f"{folder} holds no images", "give a folder with JPEG or PNG files")
        with tempfile.TemporaryDirectory() as scratch:
            rows = loader_benchmarks.suite(Path(scratch), sources, setting, tell=say)
    except UserError as error:
        say(f"error: {error}")
        return 2
    print(table(rows))
    if chosen.out is not None:
        write(rows, chosen.out)
    wrong = [row for row in rows if row["metric"] == "wrong" and row["role"] == "ours"]
    for row in wrong:
        say(f"WRONG: {row['contestant']}: {row['why']}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
