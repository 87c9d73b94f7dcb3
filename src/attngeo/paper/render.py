"""Drawn figures and tabulated tables, and how they become files with the same bytes for the same data."""

import math
import numbers
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attngeo.files import path_aside, write_aside

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

EN_DASH = "–"
OURS = "kind: ours"

# Without the creation date, and without the library's version: a new matplotlib alone must not change a figure.
_PDF_METADATA: dict[str, Any] = {"CreationDate": None, "ModDate": None, "Creator": "attngeo", "Producer": "attngeo"}
_PNG_METADATA: dict[str, Any] = {"Software": None}

_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    "[": "{[}",  # after the end of a row it would open an argument
    "*": "{*}",
    "–": "--",
    "—": "---",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "²": r"\textsuperscript{2}",
    "·": r"$\cdot$",
    "−": "$-$",
    "→": r"$\rightarrow$",
    "∞": r"$\infty$",
    "κ": r"$\kappa$",
    "β": r"$\beta$",
    "λ": r"$\lambda$",
    "ε": r"$\varepsilon$",
}
_LATIN = re.compile(r"[ -~À-ÖØ-öø-ſ]")  # what LaTeX's own UTF-8 tables and fonts know


@dataclass(frozen=True)
class Drawn:
    """A figure, the numbers in it and its caption."""

    figure: "Figure"
    data: "pd.DataFrame"
    caption: str


@dataclass(frozen=True)
class Tabulated:
    """A table and its caption.

    `formats` gives a format specification for a column's numbers (default: shortest that reads back); `widths` makes a
    text column wrap at that width in LaTeX; `long` lets the LaTeX table run over pages.
    """

    frame: "pd.DataFrame"
    caption: str
    label: str
    formats: Mapping[str, str] = field(default_factory=dict)
    widths: Mapping[str, str] = field(default_factory=dict)
    long: bool = False


def write_figure(drawn: Drawn, out_stem: str | Path) -> list[Path]:
    """Write out_stem.{pdf,png,csv,caption.txt}, each complete or not at all; returns the paths."""
    from attngeo.paper.style import paper_style, spell_out

    paths = [_with_ending(out_stem, ending) for ending in ("pdf", "png", "csv", "caption.txt")]
    with paper_style():
        spell_out(drawn.figure)
        with path_aside(paths[0]) as aside:
            drawn.figure.savefig(aside, format="pdf", metadata=_PDF_METADATA)
        with path_aside(paths[1]) as aside:
            drawn.figure.savefig(aside, format="png", metadata=_PNG_METADATA)
    _write_text(paths[2], to_csv(drawn.data))
    _write_text(paths[3], with_kind(drawn.caption, drawn.data.columns) + "\n")
    return paths


def write_table(table: Tabulated, out_stem: str | Path) -> list[Path]:
    """Write out_stem.{csv,md,tex,caption.txt}, each complete or not at all; returns the paths."""
    table = replace(table, caption=with_kind(table.caption, table.frame.columns))
    texts = {
        "csv": to_csv(table.frame),
        "md": to_markdown(table),
        "tex": to_latex(table),
        "caption.txt": table.caption.strip() + "\n",
    }
    paths = []
    for ending, text in texts.items():
        paths.append(_with_ending(out_stem, ending))
        _write_text(paths[-1], text)
    return paths


def to_csv(frame: "pd.DataFrame") -> str:
    """All digits of every number, so that the file reads back exactly; missing cells are "NaN"."""
    return frame.to_csv(index=False, na_rep="NaN", lineterminator="\n")


def to_markdown(table: Tabulated) -> str:
    """A pipe table followed by the caption; numbers right-aligned, missing cells an en dash."""
    columns = [str(name) for name in table.frame.columns]
    rules = ["---:" if _is_numeric(table.frame[name]) else "---" for name in table.frame.columns]
    lines = [_markdown_row(columns), _markdown_row(rules)]
    for row in cell_texts(table):
        lines.append(_markdown_row([cell.replace("|", "\\|").replace("\n", " ") for cell in row]))
    return "\n".join(lines) + f"\n\n{table.caption.strip()}\n"


def to_latex(table: Tabulated) -> str:
    """A booktabs table (longtable if `long`); needs packages booktabs, and longtable for long ones."""
    columns = [str(name) for name in table.frame.columns]
    alignment = "".join(
        f"p{{{table.widths[name]}}}" if name in table.widths else "r" if _is_numeric(table.frame[name]) else "l"
        for name in columns
    )
    head = " & ".join(escape_latex(name) for name in columns) + r" \\"
    body = [" & ".join(escape_latex(cell) for cell in row) + r" \\" for row in cell_texts(table)]
    caption = rf"\caption{{{escape_latex(table.caption.strip())}}}"
    label = rf"\label{{tab:{table.label}}}"
    if table.long:
        lines = [
            rf"\begin{{longtable}}{{{alignment}}}",
            rf"{caption}{label} \\",
            *(r"\toprule", head, r"\midrule", r"\endfirsthead"),
            *(r"\toprule", head, r"\midrule", r"\endhead"),
            *(r"\bottomrule", r"\endfoot"),
            *body,
            r"\end{longtable}",
        ]
    else:
        lines = [
            r"\begin{table}[t]",
            r"\centering",
            caption,
            label,
            rf"\begin{{tabular}}{{{alignment}}}",
            *(r"\toprule", head, r"\midrule"),
            *body,
            *(r"\bottomrule", r"\end{tabular}", r"\end{table}"),
        ]
    return "\n".join(lines) + "\n"


def escape_latex(text: str) -> str:
    """The text as LaTeX prints it in any font; white space becomes a space, a letter that LaTeX lacks its code."""
    return "".join(_escaped(character) for character in re.sub(r"\s", " ", text))


def _escaped(character: str) -> str:
    known = _LATEX.get(character, character)
    return known if character in _LATEX or _LATIN.match(character) else f"(U+{ord(character):04X})"


def with_kind(caption: str, columns: Iterable[object]) -> str:
    """The caption, and whose the numbers are where no column `kind` says so of each."""
    said = "kind" in [str(name) for name in columns] or OURS in caption
    return caption.strip() if said else f"{caption.strip()} All numbers are this project's ({OURS})."


def cell_texts(table: Tabulated) -> list[list[str]]:
    """Every cell as text: numbers by their column's format, missing ones as an en dash."""
    names = [str(name) for name in table.frame.columns]
    return [
        [cell_text(value, table.formats.get(name, "")) for name, value in zip(names, row, strict=True)]
        for row in table.frame.itertuples(index=False, name=None)
    ]


def cell_text(value: Any, specification: str = "") -> str:
    """One cell as text; None and NaN become an en dash, infinities the words "inf" and "-inf"."""
    if value is None or value != value:
        return EN_DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, numbers.Integral):
        # An integer in a column of reals is exact: it takes only the grouping of its format.
        return format(int(value), "," if "," in specification else "")
    if isinstance(value, numbers.Real):
        number = float(value)
        if math.isinf(number):
            return "inf" if number > 0 else "-inf"
        return format(number, specification or "g")
    return str(value)


def _is_numeric(column: "pd.Series[Any]") -> bool:
    present = [value for value in column if value is not None and value == value]
    return bool(present) and all(isinstance(value, numbers.Real) and not isinstance(value, bool) for value in present)


def _markdown_row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _with_ending(stem: str | Path, ending: str) -> Path:
    stem = Path(stem)
    return stem.with_name(f"{stem.name}.{ending}")


def _write_text(path: Path, text: str) -> None:
    with write_aside(path) as stream:
        stream.write(text)
