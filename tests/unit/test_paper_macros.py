"""Macros for prose: safe and distinct names, the numbers of the tables, and a manifest that leads back to them."""

import csv
import io
import re

import pandas as pd
import pytest

from attngeo.paper import macros
from attngeo.paper.macros import HEADLINES

PUBLISHED = {"data set": "ImageNet-1K", "attention": "laplacian", "model": "LaplacianFormer-T", "kind": "paper"}
OURS = {"data set": "fashion-mnist", "attention": "laplacian", "model": "laplacianformer_micro", "kind": "ours"}


def tab1(tmp_path, *rows):
    """A table 1 of these rows."""
    frame = pd.DataFrame([{"std": None, "n": None, "recipe": "micro", "top-1 (%)": 70.26} | row for row in rows])
    frame.to_csv(tmp_path / "tab1.csv", index=False, na_rep="NaN")
    return macros.macros([tmp_path / "tab1.csv"])


def test_a_name_says_table_labels_and_quantity_and_that_a_number_is_not_ours(tmp_path):
    found = tab1(tmp_path, PUBLISHED | {"top-1 (%)": 81.4}, OURS | {"std": 1.04, "n": 3})
    assert [(one.macro, one.text, one.spread, one.n, one.kind, one.row) for one in found] == [
        ("AttngeoTabOnePaperImageNetOneKLaplacianAccuracy", "81.4", "", "", "paper", 1),
        ("AttngeoTabOneFashionMnistLaplacianAccuracy", "70.3", "1.0", "3", "ours", 2),
    ]
    assert found[1].value == "70.26"
    assert found[1].file == "tables/tab1.csv"
    assert found[1].labels == "data set fashion-mnist; attention laplacian; model laplacianformer_micro; recipe micro"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("top-1", "TopOne"),
        ("0.5", "ZeroPointFive"),
        ("a -2", "AMinusTwo"),
        ("fashion-mnist", "FashionMnist"),
        ("SOFT++-T", "SOFTPlusPlusT"),
        ("smollm2-135m@gguf-q4_1", "SmollmTwoOneThreeFiveMGgufQFourOne"),
        ("shared_query_key=false; x", "SharedQueryKeyFalseX"),
        ("é % & \\ {", ""),
        ("", ""),
    ],
)
def test_words_are_letters_alone(text, name):
    assert macros.word(text) == name


def test_rows_that_share_a_name_take_further_labels_and_then_ordinals(tmp_path):
    found = tab1(tmp_path, OURS, OURS | {"recipe": "long"}, OURS | {"recipe": "long"}, OURS | {"attention": "softmax"})
    assert [one.macro.removeprefix("AttngeoTabOneFashionMnist") for one in found] == [
        "LaplacianLaplacianformerMicroMicroAccuracy",
        "LaplacianLaplacianformerMicroLongAccuracy",
        "LaplacianLaplacianformerMicroLongSecondAccuracy",
        "SoftmaxAccuracy",
    ]


def test_latex_defines_each_name_once_and_has_no_bare_special_character(tmp_path):
    found = tab1(
        tmp_path, OURS | {"std": 0.5, "n": 3}, OURS | {"data set": "50% & more_#", "top-1 (%)": -1.0}, PUBLISHED
    )
    text = macros.to_latex(found, "a_b")
    defined = re.findall(r"(?m)^\\newcommand\{\\([A-Za-z]+)\}\{([^{}]*)\}(?: %.*)?$", text)
    assert len(defined) == text.count("\n") - 1 == 3 * len(found) + 1
    names = [name for name, _ in defined]
    assert len(set(names)) == len(names)
    assert ("AttngeoPreset", r"a\_b") in defined
    values = dict(defined)
    assert values["AttngeoTabOneFashionMnistLaplacianAccuracySpread"] == "0.5"
    assert values["AttngeoTabOneFiveZeroMoreLaplacianAccuracy"] == "-1.0"
    assert values["AttngeoTabOneFiveZeroMoreLaplacianAccuracyN"] == "--"


def test_missing_numbers_have_no_macro_and_infinite_ones_say_so(tmp_path):
    found = tab1(
        tmp_path, OURS | {"top-1 (%)": float("nan")}, OURS | {"attention": "softmax", "top-1 (%)": float("inf")}
    )
    assert [(one.macro, one.text) for one in found] == [("AttngeoTabOneFashionMnistSoftmaxAccuracy", "inf")]


def test_manifest_leads_back_to_the_cell(tmp_path):
    tab1(tmp_path, PUBLISHED, OURS)
    (tmp_path / "unknown.csv").write_text("a\n1\n")
    macros.write_macros(
        "demo", [tmp_path / "tab1.csv", tmp_path / "unknown.csv"], tmp_path / "m.tex", tmp_path / "m.csv"
    )
    table = pd.read_csv(tmp_path / "tab1.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "m.csv").read_text())))
    assert len(rows) == 2
    for row in rows:
        assert float(row["value"]) == table[row["column"]].iloc[int(row["row"]) - 1]
        assert rf"\newcommand{{\{row['macro']}}}{{{row['text']}}}" in (tmp_path / "m.tex").read_text()


def test_headlines_name_every_quantity_of_a_table_once():
    for headlines in HEADLINES.values():
        words = [quantity.word for quantity in headlines.quantities]
        assert len(set(words)) == len(words)
        assert all(macros.word(word) == word and not word.endswith(("Spread", "N")) for word in words)
