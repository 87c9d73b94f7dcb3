"""Every figure and table of a preset on one page that opens from the folder, each with where it comes from."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from attngeo.paper.answers import read_answers
from attngeo.paper.pages import render_page, write_text
from attngeo.paper.targets import TARGETS, Target

EXPERIMENT = "Figures and tables"  # the one in the tracking store that holds a run of each drawing


@dataclass(frozen=True)
class Item:
    """A figure or a table on the page: its caption, the table's head and rows, and the files it is made from."""

    target: Target
    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    made_from: Sequence[str]

    @property
    def module_file(self) -> str:
        """Where the target's module lies, relative to the project."""
        return f"src/{self.target.module.replace('.', '/')}.py"

    @property
    def shown_file(self) -> str:
        """The file in paper_figures/ that stands for the target."""
        return f"paper_figures/{self.target.name}.{'pdf' if self.target.kind == 'figure' else 'tex'}"


def write_page(
    preset_name: str,
    results_dir: str | Path,
    out: str | Path,
    inputs: Iterable[str | Path] | None = None,
    made_from: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Write the page of what is in `made_from`; pictures and links are relative to results/<preset>/."""
    items = [_item(Path(results_dir), TARGETS[name], paths) for name, paths in (made_from or {}).items()]
    text = render_page(
        "gallery_page.html",
        preset=preset_name,
        items=items,
        answers=read_answers([Path(path) for path in inputs or ()]),
        experiment=EXPERIMENT,
    )
    write_text(out, text)


def _item(folder: Path, target: Target, paths: Sequence[str]) -> Item:
    stem = folder / f"{target.kind}s"
    caption = (stem / f"{target.name}.caption.txt").read_text(encoding="utf-8").strip()
    head: list[str] = []
    rows: list[list[str]] = []
    if target.kind == "table":
        head, _, *rows = _cells((stem / f"{target.name}.md").read_text(encoding="utf-8"))
    return Item(target, caption, head, rows, paths)


def _cells(markdown: str) -> list[list[str]]:
    """The cells of a pipe table, row by row."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
