"""Every figure, table, page and macro of a finished preset is fit for print and opens without a network."""

import hashlib
import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from attngeo.paper.macros import HEADLINES
from attngeo.paper.targets import FIGURES, TABLES, TARGETS
from tests import print_checks
from tests.browser import Browser
from tests.page_checks import assert_ledger_works_from_the_keyboard, assert_page_stands_alone
from tests.workflow.project_copy import ProjectCopy

pytestmark = [pytest.mark.workflow, pytest.mark.network, pytest.mark.timeout(1200)]

MADE_TABLES = sorted(set(TABLES) - {"tuning"})  # what the runs of the preset smoke feed
IN_WORDS_ALONE = {"tab9", "findings"}  # their numbers stand, with all that belongs to them, where they point to
DRAW_AGAIN = """
import importlib, json, sys
from pathlib import Path
from attngeo.config import load_preset
from attngeo.jobs import licences
from attngeo.paper import gallery, ledger, macros, render
from attngeo.paper.targets import PAGES, TARGETS, made_from
root, out = Path.cwd(), Path(sys.argv[1])
preset = load_preset(root, "demo")
for name in (*preset.figures, *preset.tables):
    target = TARGETS[name]
    inputs = [preset.results / path for path in reversed(target.inputs(preset))]
    module, stem = importlib.import_module(target.module), out / f"{target.kind}s" / name
    if target.kind == "figure":
        render.write_figure(module.draw(inputs), stem)
    else:
        render.write_table(module.tabulate(inputs), stem)
for name, write in (("claims", ledger.write_page), ("index", gallery.write_page)):
    inputs = [preset.results / path for path in PAGES[name].inputs(preset)]
    write("demo", preset.results, out / f"{name}.html", inputs, made_from(preset))
inputs = [preset.results / path for path in PAGES["macros"].inputs(preset)]
macros.write_macros("demo", inputs, out / "macros.tex", out / "macros.csv")
"""


@pytest.fixture(scope="module")
def made_from(finished: ProjectCopy) -> dict[str, list[Path]]:
    """The files that each figure and table of the finished preset is made from."""
    script = (
        "import json; from pathlib import Path; from attngeo.config import load_preset;"
        "from attngeo.paper.targets import made_from; print(json.dumps(made_from(load_preset(Path.cwd(), 'demo'))))"
    )
    done = finished.run(f'{sys.executable} -c "{script}"')
    results = finished.root / "results/demo"
    return {name: [results / path for path in paths] for name, paths in json.loads(done.stdout).items()}


def devices_of(paths: list[Path]) -> set[str]:
    """The devices that the result files name."""
    contents = [json.loads(path.read_text()) for path in paths if path.suffix == ".json"]
    return {content.get("device") or content["provenance"]["device"] for content in contents}


def runs_of(paths: list[Path]) -> set[str]:
    """The ids of the runs among the result files."""
    return {path.parent.name for path in paths if path.parent.parent.name == "runs"}


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_a_figure_is_print_ready(finished: ProjectCopy, made_from: dict[str, list[Path]], name: str) -> None:
    stem = finished.root / "results/demo/figures" / name
    print_checks.assert_pdf_is_print_ready(stem.with_suffix(".pdf"))
    print_checks.assert_png_is_print_ready(stem.with_suffix(".png"))
    data = pd.read_csv(stem.with_suffix(".csv"))
    assert len(data)
    caption = (stem.parent / f"{name}.caption.txt").read_text()
    print_checks.assert_caption_is_complete(caption, "demo", devices_of(made_from[name]), runs_of(made_from[name]))
    print_checks.assert_numbers_are_marked(data, caption)


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_a_figure_says_what_its_bars_and_bands_are(finished: ProjectCopy, name: str) -> None:
    caption = (finished.root / "results/demo/figures" / f"{name}.caption.txt").read_text()
    assert any(word in caption for word in print_checks.SPREADS), caption


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_series_are_told_apart_without_colour(made_from: dict[str, list[Path]], name: str) -> None:
    drawn = importlib.import_module(FIGURES[name].module).draw(made_from[name])
    print_checks.assert_series_differ_without_colour(drawn.figure, name)


@pytest.mark.parametrize("name", MADE_TABLES)
def test_a_table_is_print_ready(finished: ProjectCopy, made_from: dict[str, list[Path]], name: str) -> None:
    folder = finished.root / "results/demo/tables"
    frame = pd.read_csv(folder / f"{name}.csv")
    caption = (folder / f"{name}.caption.txt").read_text()
    print_checks.assert_markdown_is_a_table((folder / f"{name}.md").read_text(), len(frame.columns), len(frame))
    print_checks.assert_latex_is_a_table((folder / f"{name}.tex").read_text(), len(frame.columns), len(frame))
    print_checks.assert_numbers_are_marked(frame, caption)
    if name in IN_WORDS_ALONE:
        assert "preset demo" in caption
    else:
        paths = made_from[name]
        print_checks.assert_caption_is_complete(caption, "demo", devices_of(paths), runs_of(paths))


def test_macros_are_those_of_the_tables_and_lead_back_to_them(finished: ProjectCopy) -> None:
    text = (finished.root / "paper_figures/macros.tex").read_text()
    print_checks.assert_latex_is_sound(text)
    manifest = pd.read_csv(finished.root / "paper_figures/macros.csv", dtype=str, keep_default_na=False)
    names = re.findall(r"\\newcommand\{\\(\w+)\}", text)
    assert len(set(names)) == len(names) == 1 + 3 * len(manifest)
    assert all(re.fullmatch("[A-Za-z]+", name) for name in names)
    assert "AttngeoTabOneFashionMnistLaplacianAccuracy" in names
    assert {Path(file).stem for file in manifest["file"]} == set(HEADLINES) & set(MADE_TABLES)
    tables = {file: pd.read_csv(finished.root / "results/demo" / file) for file in set(manifest["file"])}
    for row in manifest.to_dict(orient="records"):
        assert str(tables[row["file"]][row["column"]].iloc[int(row["row"]) - 1]) == row["value"]


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex on this machine: the files are parsed only")
def test_tables_and_macros_compile(finished: ProjectCopy, tmp_path: Path) -> None:
    for file in (finished.root / "paper_figures").glob("*.tex"):
        shutil.copy(file, tmp_path)
    inputs = "\n".join(rf"\input{{{name}}}\clearpage" for name in MADE_TABLES)
    (tmp_path / "all.tex").write_text(
        "\\documentclass{article}\n\\usepackage{booktabs,longtable}\n\\usepackage[a3paper,landscape]{geometry}\n"
        f"\\input{{macros}}\n\\begin{{document}}\\small\n{inputs}\n"
        "\\AttngeoPreset{} \\AttngeoTabOneFashionMnistLaplacianAccuracy\n\\end{document}\n"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace", timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_same_numbers_give_the_same_bytes_without_display_or_latex(finished: ProjectCopy, tmp_path: Path) -> None:
    nowhere = {"PATH": str(tmp_path / "empty"), "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7", "SOURCE_DATE_EPOCH": "1"}
    kept = {name: value for name, value in finished.environment().items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    out = tmp_path / "again"
    command = [sys.executable, "-c", DRAW_AGAIN, str(out)]
    subprocess.run(command, cwd=finished.root, env=kept | nowhere | {"MPLBACKEND": "TkAgg"}, check=True, timeout=600)
    again = {path.relative_to(out): _digest(path) for path in out.rglob("*") if path.is_file()}
    assert again == {place: _digest(finished.root / "results/demo" / place) for place in again}
    assert {str(place) for place in again} >= {path for name in FIGURES for path in TARGETS[name].outputs}


@pytest.mark.parametrize("page", ["index", "claims"])
def test_pages_stand_alone_on_phone_and_desk(finished: ProjectCopy, browser: Browser, page: str) -> None:
    assert_page_stands_alone(browser, finished.root / f"paper_figures/{page}.html")


def test_pages_stand_alone_beside_the_results_too(finished: ProjectCopy, browser: Browser) -> None:
    assert_page_stands_alone(browser, finished.root / "results/demo/index.html")


def test_the_ledger_is_worked_from_the_keyboard(finished: ProjectCopy, browser: Browser) -> None:
    assert_ledger_works_from_the_keyboard(browser, finished.root / "paper_figures/claims.html")


def test_the_gallery_holds_every_figure_and_table_once(finished: ProjectCopy) -> None:
    page = (finished.root / "paper_figures/index.html").read_text(encoding="utf-8")
    assert re.findall(r'<article id="(\w+)"', page) == [*FIGURES, *(name for name in TABLES if name in MADE_TABLES)]


def test_licences_of_all_that_was_used_lie_beside_the_figures(finished: ProjectCopy) -> None:
    text = (finished.root / "paper_figures/licences.md").read_text(encoding="utf-8")
    for name in ("fashion-mnist", "textile", "minilm-l3", "dinov2-s", "texts"):
        assert f"| {name} |" in text


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
