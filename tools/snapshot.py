"""Keep what a preset made under docs/measured/<preset>, and bring the README's tables up to date with it.

PNG figures with their data and captions, tables, the ledger page, the record files and the decoders' curves: the only
results in git. With --unfinished the records of a preset that is not complete are kept, beside those kept before, so
that another machine can go on from there (tools/take_over.py), and the figures and tables that are made of these; the
findings and the verdicts say what they amount to so far.
"""

import argparse
import importlib
import re
import shutil
import sys
from pathlib import Path

from attngeo.config import load_preset
from attngeo.paper import render
from attngeo.paper.targets import PAGES, TARGETS

ROOT = Path(__file__).resolve().parent.parent
LEDGER_PAGE = "claims.html"
RECORD_FOLDERS = ("runs", "analyses", "benchmarks")
SO_FAR = ("findings", "tab9")  # tables that say what there is no number for
# <!-- table: PATH columns: A; B where: C = value --> ... <!-- end -->
_BLOCK = re.compile(
    r"(<!-- table: (?P<path>\S+)(?: columns: (?P<columns>.*?))?(?: where: (?P<name>[^=]+?) = (?P<value>.*?))? -->\n)"
    r".*?(<!-- end -->)",
    re.DOTALL,
)


def declared(root: Path, preset_name: str) -> list[str]:
    """What the preset makes and is worth keeping, relative to results/<preset>: no PDF, no weights."""
    preset = load_preset(root, preset_name)
    # The gallery links into the tree that it was made in.
    targets = [TARGETS[name] for name in (*preset.figures, *preset.tables, *PAGES) if name != "index"]
    made = [path for target in targets for path in (*target.inputs(preset), *target.outputs)]
    curves = [f"decoders/{name}/metrics.jsonl" for name in preset.decoder_runs]
    return sorted({path for path in [*made, *curves, "licences.md"] if not path.endswith(".pdf")})


def copy_results(root: Path, preset: str) -> list[Path]:
    """Replace docs/measured/<preset> by what results/<preset> holds now; the files written.

    Exits with a message if something that the preset makes is missing.
    """
    source = root / "results" / preset
    files = [source / path for path in declared(root, preset)]
    missing = [str(file.relative_to(root)) for file in files if not file.is_file()]
    if missing:
        raise SystemExit(
            f"not there: {', '.join(missing[:5])}: run `make reproduce PRESET={preset}` first, "
            f"or keep the records that there are: make snapshot PRESET={preset} UNFINISHED=1"
        )
    shutil.rmtree(_kept_in(root, preset), ignore_errors=True)
    return _copy(files, source, _kept_in(root, preset))


def copy_finished_records(root: Path, preset: str) -> list[Path]:
    """Add the records that an unfinished preset has, and what is made of them, to docs/measured/<preset>; the files.

    Exits with a message if docs/measured holds the preset complete: its records and tables would no longer agree.
    """
    source = root / "results" / preset
    if (_kept_in(root, preset) / LEDGER_PAGE).exists():
        raise SystemExit(f"docs/measured/{preset} is complete: finish `make reproduce PRESET={preset}` and replace it")
    kept = set(declared(root, preset))
    folders = (*RECORD_FOLDERS, "decoders")
    paths = [path for path in kept if path.split("/")[0] in folders and (source / path).is_file()]
    loaded = load_preset(root, preset)
    for target in (TARGETS[name] for name in (*loaded.figures, *loaded.tables)):
        made, of = ([source / path for path in listed] for listed in (target.outputs, target.inputs(loaded)))
        if all(file.is_file() for file in (*made, *of)) and max(map(_time, of)) <= min(map(_time, made)):
            paths += kept.intersection(target.outputs)
    for folder in ("figures", "tables"):  # those kept before may be of fewer records
        shutil.rmtree(_kept_in(root, preset) / folder, ignore_errors=True)
    return _copy([source / path for path in sorted(set(paths))], source, _kept_in(root, preset))


def _time(file: Path) -> int:
    return file.stat().st_mtime_ns


def judge_so_far(root: Path, preset_name: str) -> list[Path]:
    """Write the tables of `SO_FAR` from the records under docs/measured/<preset>; the files written."""
    preset, kept = load_preset(root, preset_name), _kept_in(root, preset_name)
    written = []
    for name in SO_FAR:
        target = TARGETS[name]
        there = [kept / path for path in target.inputs(preset) if (kept / path).is_file()]
        if there:
            table = importlib.import_module(target.module).tabulate(there)
            written += render.write_table(table, kept / "tables" / name)
    return written


def _kept_in(root: Path, preset: str) -> Path:
    return root / "docs" / "measured" / preset


def _copy(files: list[Path], source: Path, target: Path) -> list[Path]:
    for file in files:
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    return files


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def chosen(markdown: str, columns: str | None, name: str | None, value: str | None) -> str:
    """The table with these columns (separated by ";") and the rows whose column `name` holds `value`."""
    header, rule, *rows = [_cells(line) for line in markdown.splitlines() if line.startswith("|")]
    kept = [header.index(column.strip()) for column in columns.split(";")] if columns else range(len(header))
    if name is not None:
        rows = [row for row in rows if row[header.index(name.strip())] == value]
    return "\n".join("| " + " | ".join(row[index] for index in kept) + " |" for row in [header, rule, *rows])


def with_tables(readme: str, root: Path) -> str:
    """The README with each block `<!-- table: PATH ... -->` ... `<!-- end -->` filled from its file, if any."""

    def filled(match: re.Match[str]) -> str:
        if not (root / match["path"]).is_file():
            return match[0]
        markdown = (root / match["path"]).read_text(encoding="utf-8")
        table = chosen(markdown, match["columns"], match["name"], match["value"])
        return f"{match[1]}\n{table}\n\n{match[6]}"

    return _BLOCK.sub(filled, readme)


def main() -> None:
    """Take the snapshot of one preset."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="demo")
    parser.add_argument("--unfinished", action="store_true", help="keep what there is")
    arguments = parser.parse_args()
    preset = arguments.preset
    if arguments.unfinished:
        files = copy_finished_records(ROOT, preset) + judge_so_far(ROOT, preset)
    else:
        files = copy_results(ROOT, preset)
    size = sum(file.stat().st_size for file in files) / 2**20
    sys.stdout.write(f"{len(files)} files, {size:.1f} MiB, kept in docs/measured/{preset}\n")
    readme = ROOT / "README.md"
    readme.write_text(with_tables(readme.read_text(encoding="utf-8"), ROOT), encoding="utf-8")
    sys.stdout.write("README tables refreshed\n")


if __name__ == "__main__":
    main()
