"""Numbers for prose: a LaTeX macro for each headline number of a preset's tables, and where each comes from."""

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from io import StringIO
from pathlib import Path
from typing import Any

from attngeo.files import write_aside
from attngeo.paper.render import cell_text, escape_latex

NAME_RULE = (
    r"\Attngeo, the table (TabOne), for numbers that are not ours their kind (Paper, Public), the row's labels, the "
    "quantity; digits are spelled (2 is Two), a decimal point is Point, a minus before a digit Minus, + Plus, every "
    "other character only ends a word; where rows share a name, further labels follow, then Second, Third. The same "
    "name with Spread and with N holds the spread and what was averaged, -- where there is none."
)
_DIGITS = ("Zero", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine")
_ORDINALS = ("Second", "Third", "Fourth", "Fifth", "Sixth", "Seventh", "Eighth", "Ninth")


@dataclass(frozen=True)
class Quantity:
    """A column of headline numbers: its word in names, its format, and the columns that hold the spread and n."""

    column: str
    word: str
    format: str
    spread: str = ""
    n: str = "n"


@dataclass(frozen=True)
class Headlines:
    """What of a table becomes macros: columns whose cells name a row, those that do where these do not suffice."""

    labels: tuple[str, ...]
    quantities: tuple[Quantity, ...]
    further: tuple[str, ...] = ("attention", "other options", "model", "recipe")


_ACCURACY = Quantity("top-1 (%)", "Accuracy", ".1f", "std")
_DIFFERENCE = (
    Quantity("difference", "Difference", "+.1f"),
    Quantity("low", "DifferenceLow", "+.1f"),
    Quantity("high", "DifferenceHigh", "+.1f"),
)
HEADLINES: dict[str, Headlines] = {
    "tab1": Headlines(
        ("data set", "attention"),
        (_ACCURACY, Quantity("params (M)", "Parameters", ".2f"), Quantity("MACs, all (G)", "Macs", ".3g")),
        ("model", "recipe"),
    ),
    "tab2": Headlines(("data set", "lambda"), (_ACCURACY, *_DIFFERENCE)),
    "tab3": Headlines(
        ("data set", "solver"), (_ACCURACY, *_DIFFERENCE), ("start", "products", "gradient", "other options", "model")
    ),
    "tab4": Headlines(
        ("data set", "attention", "choice"),
        (_ACCURACY, *_DIFFERENCE, Quantity("share (%)", "Share", ".0f")),
        ("other options", "model", "recipe"),
    ),
    "tab5": Headlines(
        ("operation", "direction", "tokens", "implementation"),
        (Quantity("time (ms)", "Milliseconds", ".3g", "median above (ms)"), Quantity("torch / own", "Speedup", ".1f")),
        ("batch x heads", "landmarks", "head width", "device", "backend"),
    ),
    "tab6": Headlines(
        ("model",),
        (
            Quantity("score", "Score", ".4f"),
            Quantity("null", "Null", ".4f"),
            Quantity("excess", "Excess", "+.4f"),
            Quantity("low", "ExcessLow", "+.4f"),
            Quantity("high", "ExcessHigh", "+.4f"),
            Quantity("trend", "Trend", "+.2f", n="windows"),
        ),
        ("family", "precision"),
    ),
    "tab7": Headlines(
        ("model",),
        (
            Quantity("single head", "SingleHeadError", ".1e"),
            Quantity("multi head, float64 softmax", "MultiHeadError", ".1e"),
        ),
        ("family",),
    ),
    "tab8": Headlines(
        ("task", "model"),
        (
            Quantity("loss (nats)", "Loss", ".4f", "std"),
            Quantity("accuracy (%)", "Accuracy", ".1f"),
            Quantity("fiber minus", "FiberMinus", "+.4f", "±"),
        ),
        (),
    ),
    "tab9": Headlines(("claim",), (Quantity("verdict", "Verdict", ""),), ()),
    "edge": Headlines(
        ("model", "image (px)", "attention"),
        (Quantity("latency (ms)", "Milliseconds", ".3g", "quartiles (ms)"), Quantity("memory (MiB)", "Memory", ".3g")),
        (),
    ),
}


@dataclass(frozen=True)
class Macro:
    """One macro and its origin: `text` is what LaTeX prints, `row` counts the table's rows from 1."""

    macro: str
    text: str
    value: str
    n: str
    spread: str
    kind: str
    file: str
    row: int
    column: str
    labels: str


def word(text: str) -> str:
    """A text as letters alone, words capitalised, by `NAME_RULE`; empty for one without letters and digits."""
    text = re.sub(r"(?<![A-Za-z0-9])-(?=\d)", " Minus ", text)
    text = re.sub(r"(?<=\d)\.(?=\d)", " Point ", text)
    text = re.sub(r"\d", lambda digit: f" {_DIGITS[int(digit[0])]} ", text)
    text = text.replace("+", " Plus ")
    return "".join(part[0].upper() + part[1:] for part in re.split(r"[^A-Za-z]+", text) if part)


def macros(tables: Iterable[Path]) -> list[Macro]:
    """The macros of the tables' CSV files that have `HEADLINES`, in the order of the files and their rows."""
    return [macro for path in tables if path.stem in HEADLINES for macro in _of_table(path, HEADLINES[path.stem])]


def to_latex(found: Sequence[Macro], preset: str) -> str:
    """The macros as LaTeX definitions, each with its place as a comment."""
    lines = [f"% Numbers of preset {preset}; macros.csv says where each comes from. Names: {NAME_RULE}"]
    lines.append(rf"\newcommand{{\AttngeoPreset}}{{{escape_latex(preset)}}}")
    for macro in found:
        place = f"% {macro.file}, row {macro.row}, {macro.column}"
        lines.append(rf"\newcommand{{\{macro.macro}}}{{{macro.text}}} {place}")
        lines += [
            rf"\newcommand{{\{macro.macro}{ending}}}{{{text or '--'}}}"
            for ending, text in (("Spread", macro.spread), ("N", macro.n))
        ]
    return "\n".join(lines) + "\n"


def to_csv(found: Sequence[Macro]) -> str:
    """The manifest: a line a macro, `value` with all digits."""
    stream = StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([column.name for column in fields(Macro)])
    writer.writerows(astuple(macro) for macro in found)
    return stream.getvalue()


def write_macros(preset: str, tables: Sequence[Path], latex: Path, manifest: Path) -> None:
    """Write both files, each complete or not at all."""
    found = macros(tables)
    for path, text in ((latex, to_latex(found, preset)), (manifest, to_csv(found))):
        with write_aside(path) as stream:
            stream.write(text)


def _of_table(path: Path, headlines: Headlines) -> Iterator[Macro]:
    import pandas as pd

    rows = [{str(key): value for key, value in row.items()} for row in pd.read_csv(path).to_dict(orient="records")]
    names = _row_names(path.stem, rows, headlines)
    for number, (row, name) in enumerate(zip(rows, names, strict=True), start=1):
        labels = "; ".join(
            f"{label} {_plain(row[label])}" for label in _labels_of(row, (*headlines.labels, *headlines.further))
        )
        for quantity in headlines.quantities:
            value = row.get(quantity.column)
            if _is_missing(value):
                continue
            yield Macro(
                macro=name + quantity.word,
                text=escape_latex(cell_text(value, quantity.format)),
                value=str(value),
                n=_plain(row.get(quantity.n)),
                spread=escape_latex(_text_or_nothing(row.get(quantity.spread), quantity.format)),
                kind=str(row.get("kind", "ours")),
                file=f"tables/{path.name}",
                row=number,
                column=quantity.column,
                labels=labels,
            )


def _row_names(table: str, rows: Sequence[Mapping[str, Any]], headlines: Headlines) -> list[str]:
    """A name for each row, all different: further labels and then ordinals where the first ones do not suffice."""
    names = [_row_name(table, row, headlines.labels) for row in rows]
    full = [_row_name(table, row, (*headlines.labels, *headlines.further)) for row in rows]
    names = [long if names.count(short) > 1 else short for short, long in zip(names, full, strict=True)]
    taken: Counter[str] = Counter()
    unique = []
    for name in names:
        unique.append(name + _ordinal(taken[name]))
        taken[name] += 1
    return unique


def _row_name(table: str, row: Mapping[str, Any], labels: Sequence[str]) -> str:
    kind = str(row.get("kind", "ours"))
    whose = "" if kind == "ours" else word(kind)
    return "Attngeo" + word(table) + whose + "".join(word(_plain(row[label])) for label in _labels_of(row, labels))


def _labels_of(row: Mapping[str, Any], labels: Sequence[str]) -> list[str]:
    return [label for label in labels if not _is_missing(row.get(label))]


def _ordinal(before: int) -> str:
    if not before:
        return ""
    return _ORDINALS[before - 1] if before <= len(_ORDINALS) else word(f"Row {before + 1}")


def _plain(value: Any) -> str:
    """A cell without the ".0" that a column with missing cells gives its integers; empty for a missing one."""
    if _is_missing(value):
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _text_or_nothing(value: Any, specification: str) -> str:
    return "" if _is_missing(value) else cell_text(value, specification.lstrip("+"))


def _is_missing(value: Any) -> bool:
    return value is None or value != value
