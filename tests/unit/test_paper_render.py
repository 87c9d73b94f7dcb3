"""Tables keep their numbers and survive every character that Markdown and LaTeX treat specially."""

import math

import pandas as pd
import pytest

from attngeo.paper import render

NASTY = r"a_b & 100% of $x$ #1 {y} ~z ^w \v |u| <t> ± λ"
TABLE = render.Tabulated(
    pd.DataFrame({"name_1": [NASTY, "plain"], "top-1 (%)": [81.4, math.nan], "n": [3, None], "other": [math.inf, 0.5]}),
    "Caption with 5 % & more_",
    "label",
    formats={"top-1 (%)": ".1f"},
)


def test_latex_escapes_every_special_character():
    escaped = render.escape_latex(NASTY)
    for special in ("_", "&", "%", "#"):
        assert escaped.count(special) == escaped.count("\\" + special)
    assert escaped == (
        r"a\_b \& 100\% of \$x\$ \#1 \{y\} \textasciitilde{}z \textasciicircum{}w "
        r"\textbackslash{}v \textbar{}u\textbar{} \textless{}t\textgreater{} $\pm$ $\lambda$"
    )


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("[a] *b*", "{[}a] {*}b{*}"),
        ('say "a"', "say ''a''"),
        ("d\u00e4ns \u00e9\u0161", "d\u00e4ns \u00e9\u0161"),
        ("x\t\x00\u4e2d", "x (U+0000)(U+4E2D)"),
        ("d\u00b2 \u2212 \u03b2", r"d\textsuperscript{2} $-$ $\beta$"),
    ],
)
def test_latex_prints_any_text(text, escaped):
    assert render.escape_latex(text) == escaped


def test_caption_says_whose_numbers_are_where_no_column_does(tmp_path):
    frame = pd.DataFrame({"a": [1.0]})
    for columns, caption, expected in (
        (frame, "c.", "c. All numbers are this project's (kind: ours)."),
        (frame.assign(kind="paper"), "c.", "c."),
        (frame, "c (kind: ours).", "c (kind: ours)."),
    ):
        render.write_table(render.Tabulated(columns, caption, "l"), tmp_path / "t")
        assert (tmp_path / "t.caption.txt").read_text() == expected + "\n"
        assert expected in (tmp_path / "t.md").read_text()


def test_latex_table_is_booktabs_with_as_many_cells_in_each_row():
    lines = render.to_latex(TABLE).splitlines()
    assert {r"\toprule", r"\midrule", r"\bottomrule"} <= set(lines)
    rows = [line for line in lines if line.endswith(r"\\")]
    assert len(rows) == 3
    assert {row.replace(r"\&", "").count("&") for row in rows} == {3}
    assert r"\begin{tabular}{lrrr}" in lines
    assert r"\caption{Caption with 5 \% \& more\_}" in lines


def test_long_latex_table_repeats_its_head():
    long = render.Tabulated(TABLE.frame, "c", "l", widths={"name_1": "3cm"}, long=True)
    text = render.to_latex(long)
    assert text.startswith(r"\begin{longtable}{p{3cm}rrr}")
    assert text.count(r"name\_1") == 2


def test_missing_cells_are_an_en_dash_and_infinity_is_said():
    assert r"-- & -- & 0.5 \\" in render.to_latex(TABLE)
    assert "| – | – | 0.5 |" in render.to_markdown(TABLE)
    assert "| 81.4 | 3 | inf |" in render.to_markdown(TABLE)


def test_markdown_rows_keep_their_columns_beside_a_pipe_in_a_cell():
    lines = render.to_markdown(TABLE).splitlines()[:4]
    assert {line.replace("\\|", "").count("|") for line in lines} == {5}


def test_csv_reads_back_exactly(tmp_path):
    frame = pd.DataFrame({"a": [0.1 + 0.2, math.nan, math.inf], "b": ['comma, "quote"', "é", "line\nbreak"]})
    paths = render.write_table(render.Tabulated(frame, "c", "l"), tmp_path / "tab.7")
    assert [path.name for path in paths] == ["tab.7.csv", "tab.7.md", "tab.7.tex", "tab.7.caption.txt"]
    pd.testing.assert_frame_equal(pd.read_csv(paths[0], float_precision="round_trip"), frame)


@pytest.mark.parametrize(
    ("value", "specification", "text"),
    [
        (3, ".2f", "3"),
        (1234567, ",", "1,234,567"),
        (0.5, ".2f", "0.50"),
        (11.0, "#.3g", "11.0"),
        (True, "", "yes"),
        (None, ".1f", "–"),
        (-math.inf, ".1f", "-inf"),
        ("x", ".1f", "x"),
    ],
)
def test_cells_follow_their_format(value, specification, text):
    assert render.cell_text(value, specification) == text


def test_empty_table_keeps_its_head():
    empty = render.Tabulated(pd.DataFrame({"a": [], "b": []}), "c", "l")
    assert render.to_markdown(empty).startswith("| a | b |")
    assert "a & b" in render.to_latex(empty)
