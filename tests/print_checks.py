"""What holds for every file that goes into print: figures, tables and macros."""

import re
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from tueplots import figsizes

from attngeo.paper.render import EN_DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS_AN_INCH = 72
TALLEST_IN = 9.0  # text height of a conference page, its caption on the next one
MOST_PDF_BYTES = 600_000
MOST_PNG_BYTES = 1_200_000
SPREADS = (
    "standard deviation",
    "standard error",
    "sample std",
    "interval",
    "quartile",
    "median lies above",
    "up to the median",
    "+- ",
)
_BARE = re.compile(r"(?<!\\)[#_^~]|(?<!\\)%.+\S")


def width_points() -> float:
    """The text width that tueplots gives for the style."""
    return POINTS_AN_INCH * float(figsizes.iclr2024()["figure.figsize"][0])


def assert_pdf_is_print_ready(path: Path) -> None:
    """Fonts embedded as TrueType, the text width, no date, small."""
    raw = path.read_bytes()
    inside = b"".join(_inflated(stream) for stream in re.findall(rb"stream\r?\n(.*?)endstream", raw, re.DOTALL))
    assert b"/Type3" not in raw + inside, f"{path}: Type 3 font"
    kinds = set(re.findall(rb"/Subtype /(Type0|Type1|TrueType|MMType1|CIDFontType0|CIDFontType2)\b", raw))
    assert kinds == {b"Type0", b"CIDFontType2"}, (path, kinds)
    descriptors = len(re.findall(rb"/Type /FontDescriptor", raw))
    assert descriptors == len(re.findall(rb"/FontFile2 ", raw)) > 0, f"{path}: a font is not embedded"
    assert not re.search(rb"/(CreationDate|ModDate)", raw), f"{path}: dated"
    (box,) = re.findall(rb"/MediaBox \[ *([^\]]*?) *\]", raw)
    left, bottom, right, top = map(float, box.split())
    assert (left, bottom) == (0, 0)
    assert abs(right - width_points()) < 0.5, f"{path}: {right} points wide"
    assert top <= POINTS_AN_INCH * TALLEST_IN, f"{path}: {top} points high"
    assert len(raw) <= MOST_PDF_BYTES, f"{path}: {len(raw)} bytes"


def assert_png_is_print_ready(path: Path, dots_an_inch: int = 220) -> None:
    """The same width, no time and no program's name among its chunks, small."""
    raw = path.read_bytes()
    assert raw.startswith(b"\x89PNG\r\n\x1a\n")
    width, _ = struct.unpack(">II", raw[16:24])
    assert abs(width - width_points() / POINTS_AN_INCH * dots_an_inch) <= 1
    chunks, place = [], 8
    while place < len(raw):
        (length,) = struct.unpack(">I", raw[place : place + 4])
        chunks.append(raw[place + 4 : place + 8])
        place += 12 + length
    assert not {b"tIME", b"tEXt", b"iTXt", b"zTXt"} & set(chunks), (path, chunks)
    assert len(raw) <= MOST_PNG_BYTES, f"{path}: {len(raw)} bytes"


def assert_series_differ_without_colour(figure: "Figure", name: str) -> None:
    """Named lines of one panel differ in marker or dashes, named bars in hatch or lightness, not in colour alone."""
    for number, axis in enumerate(figure.axes):
        styles: dict[Any, str] = {}
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            look = _look_without_colour(handle)
            other = styles.setdefault(look, label)
            assert other == label, f"{name}, panel {number}: {label!r} and {other!r} look alike in grey: {look}"


def assert_caption_is_complete(caption: str, preset: str, devices: set[str], run_ids: set[str]) -> None:
    """Preset, one of the devices, n, what kind of spread, whose numbers, and runs by their ids."""
    assert re.search(rf"[Pp]reset {preset}\b", caption), caption
    assert any(device in caption for device in devices), (devices, caption)
    assert "n = " in caption, caption
    assert not run_ids or any(run in caption for run in run_ids), caption


def assert_numbers_are_marked(frame: pd.DataFrame, caption: str) -> None:
    """A column `kind` without a gap, or a caption that says whose all numbers are."""
    if "kind" in frame:
        assert set(frame["kind"]) <= {"paper", "derived", "ours", "public"}, set(frame["kind"])
    else:
        assert "kind: ours" in caption, caption


def assert_markdown_is_a_table(text: str, columns: int, rows: int) -> None:
    """As many cells in every row as there are columns, and no cell that is Python's word for nothing."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert len(lines) == rows + 2
    assert {len(row) for row in cells} == {columns}
    assert not {"nan", "NaN", "None", "<NA>", ""} & {cell for row in cells[2:] for cell in row if cell != EN_DASH}


def assert_latex_is_a_table(text: str, columns: int, rows: int) -> None:
    """Booktabs rules, braces and environments closed, every row complete, nothing that LaTeX would choke on."""
    assert all(rule in text for rule in (r"\toprule", r"\midrule", r"\bottomrule"))
    assert_latex_is_sound(text)
    body = text.rpartition(r"\endfoot" if "longtable" in text else r"\midrule")[2]
    lines = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert len(lines) == rows
    cells = [re.split(r"(?<!\\)&", line[:-2]) for line in lines]
    assert {len(row) for row in cells} == {columns}
    assert not {"nan", "NaN", "None", "<NA>"} & {cell.strip() for row in cells for cell in row}
    assert not [line for line in lines if line.lstrip().startswith(("[", "*"))]


def assert_latex_is_sound(text: str) -> None:
    """Balanced braces, dollars and environments, no bare special character, letters that LaTeX's fonts have."""
    depth = 0
    opened: list[str] = []
    for line in text.splitlines():
        code = line.partition(" % ")[0] if line.startswith(r"\newcommand") else line
        if code.startswith("% "):
            continue
        for brace in re.findall(r"(?<!\\)[{}]", code.replace(r"\\", "")):
            depth += 1 if brace == "{" else -1
            assert depth >= 0, line
        assert len(re.findall(r"(?<!\\)\$", code)) % 2 == 0, line
        assert not _BARE.search(code), line
        for begin, name in re.findall(r"\\(begin|end)\{(\w+)\}", code):
            if begin == "begin":
                opened.append(name)
            else:
                assert opened.pop() == name, line
        assert re.fullmatch(r"[ -~À-ÖØ-öø-ſ]*", code), line
    assert depth == 0
    assert not opened


def _inflated(stream: bytes) -> bytes:
    try:
        return zlib.decompress(stream.strip(b"\r\n"))
    except zlib.error:
        return b""


def _look_without_colour(handle: Any) -> Any:
    from matplotlib.container import BarContainer, ErrorbarContainer
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if isinstance(handle, ErrorbarContainer):
        return _look_without_colour(handle.lines[0])
    if isinstance(handle, BarContainer):
        return _look_without_colour(handle.patches[0])
    if isinstance(handle, Line2D):
        dashes = "" if handle.get_linestyle() in ("None", "none", "") else str(handle._unscaled_dash_pattern)
        return ("line", str(handle.get_marker()), handle.get_markerfacecolor() == "none", dashes)
    if isinstance(handle, Patch):
        red, green, blue, alpha = handle.get_facecolor()
        grey = round(alpha * (0.2126 * red + 0.7152 * green + 0.0722 * blue) + 1 - alpha, 1)
        return ("patch", handle.get_hatch(), grey)
    return ("other", repr(handle))
