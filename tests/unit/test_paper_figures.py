"""Every figure and table draws, says what it could not draw, and gives the same bytes for the same numbers."""

import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest

from attngeo.errors import UserError
from attngeo.files import write_json
from attngeo.paper import records, render, style
from attngeo.paper.layers import isometry_by_layer
from attngeo.paper.targets import FIGURES, TABLES
from tests.tolerances import RASTERISED_SCATTER_BYTES
from tests.unit import paper_results

ROOT = Path(__file__).parents[2]
DRAW_EVERYTHING = """
import importlib, json, sys
from pathlib import Path
from attngeo.paper import claims, render
from attngeo.paper.targets import FIGURES, TABLES
inputs, out = json.loads(sys.argv[1]), Path(sys.argv[2])
for name, paths in inputs.items():
    paths = [Path(path) for path in paths]
    if name in FIGURES:
        render.write_figure(importlib.import_module(FIGURES[name].module).draw(paths), out / name)
    else:
        render.write_table(importlib.import_module(TABLES[name].module).tabulate(paths), out / name)
claims.write_page("demo", Path.cwd(), out / "claims.html")
"""


def draw_everything(results: Path, inputs: dict[str, list[Path]], out: Path, **environment: str) -> dict[str, str]:
    """Draw all targets in a new process; SHA-256 of every file made, by name."""
    names = {name: [str(path) for path in paths] for name, paths in inputs.items()}
    subprocess.run(
        [sys.executable, "-c", DRAW_EVERYTHING, json.dumps(names), str(out)],
        check=True,
        cwd=results,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
    )
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())}


def moved(inputs: dict[str, list[Path]], old: Path, new: Path) -> dict[str, list[Path]]:
    """The same files in a copy of the folder, and in the opposite order."""
    return {name: [new / path.relative_to(old) for path in reversed(paths)] for name, paths in inputs.items()}


def test_bytes_depend_on_the_numbers_alone(tmp_path):
    first = tmp_path / "one" / "demo"
    inputs = paper_results.write_everything(first)
    second = tmp_path / "elsewhere" / "deeper" / "demo"
    shutil.copytree(first, second)
    made = draw_everything(first, inputs, tmp_path / "out", PYTHONHASHSEED="1")
    again = draw_everything(
        second, moved(inputs, first, second), tmp_path / "out2", PYTHONHASHSEED="2", MPLBACKEND="TkAgg", TZ="Asia/Tokyo"
    )
    assert made == again
    expected = {Path(path).name for target in (*FIGURES.values(), *TABLES.values()) for path in target.outputs}
    assert set(made) == expected | {"claims.html"}


@pytest.fixture(scope="module")
def with_nan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results") / "demo"
    return paper_results.write_everything(folder, nan_run=True)


@pytest.mark.parametrize("name", [*FIGURES, *TABLES])
def test_caption_names_preset_device_and_n(with_nan, name):
    caption = made(name, with_nan).caption
    assert "reset demo" in caption
    if name != "tab9":
        assert paper_results.DEVICE in caption
        assert "n = " in caption or name == "tab1"


@pytest.mark.parametrize(("name", "count"), [("fig2", 6), ("fig3", 2), ("fig16", 9), ("tab1", 2)])
def test_caption_counts_what_was_not_finite(with_nan, name, count):
    # Two data sets with one run whose loss is NaN in 3 epochs, and a control whose 3 series of 3 steps are NaN.
    assert f" {count} values were not finite and could not be drawn." in made(name, with_nan).caption


@pytest.mark.parametrize("name", ["fig7", "fig10"])
def test_caption_is_silent_where_all_is_finite(with_nan, name):
    assert "not finite" not in made(name, with_nan).caption


def made(name, inputs):
    """The drawn or tabulated target."""
    if name in FIGURES:
        return importlib.import_module(FIGURES[name].module).draw(inputs[name])
    return importlib.import_module(TABLES[name].module).tabulate(inputs[name])


def test_single_seed_draws_without_band(tmp_path):
    paths = paper_results.write_runs(tmp_path / "demo", datasets=["only"], seeds=1)
    drawn = importlib.import_module(FIGURES["fig2"].module).draw(paths)
    assert drawn.data["std"].isna().all()
    assert set(drawn.data["n"]) == {1}
    assert not [shape for axis in drawn.figure.axes for shape in axis.collections]


@pytest.mark.parametrize("name", ["fig3", "tab1"])
def test_every_number_says_whose_it_is(with_nan, name):
    drawn = made(name, with_nan)
    frame = drawn.data if name == "fig3" else drawn.frame
    assert set(frame["kind"]) <= {"paper", "derived", "ours"}
    ours = frame[frame["kind"] == "ours"]
    assert len(ours) == 8
    assert set(ours["n"]) <= {2, 3}


def test_isometry_panels_keep_null_and_excess(with_nan):
    data = made("fig10", with_nan).data
    assert set(data["control"]) == {"trained", "null", "excess"}
    assert (data.loc[data["control"] == "excess", "low"] < data.loc[data["control"] == "excess", "value"]).all()


def test_user_defined_attention_kind_gets_a_style_of_its_own(tmp_path):
    paths = paper_results.write_runs(tmp_path / "demo", datasets=["only"], seeds=2)
    for path in paths:
        if path.name == "final.json" and "gaussian" in path.parent.name:
            write_json(path, json.loads(path.read_text()) | {"attention": "mine.py:Mine_&Co"})
    drawn = importlib.import_module(FIGURES["fig2"].module).draw(paths)
    labels = drawn.figure.axes[0].get_legend_handles_labels()[1]
    assert "mine.py:Mine_&Co" in labels


def test_many_points_are_rasterised_and_the_text_stays(tmp_path):
    with style.paper_style():
        figure, axes = style.new_figure()
        x, y = np.random.default_rng(0).normal(size=(2, 1_000_000))
        style.scatter_points(axes[0][0], x, y, marker=".", color="#000000")
        axes[0][0].set_xlabel("tokens")
    paths = render.write_figure(render.Drawn(figure, pd.DataFrame({"x": [1]}), "c"), tmp_path / "big")
    pdf = paths[0].read_bytes()
    assert len(pdf) < RASTERISED_SCATTER_BYTES
    assert b"/Subtype /Image" in pdf
    assert b"/FontFile2" in pdf


def test_pdf_embeds_truetype_fonts_and_no_date(with_nan, tmp_path):
    pdf = render.write_figure(made("fig16", with_nan), tmp_path / "fig16")[0].read_bytes()
    assert b"/FontFile2" in pdf
    assert b"/Type3" not in pdf
    assert b"CreationDate" not in pdf


def test_drawing_leaves_the_settings_of_the_caller_alone(with_nan):
    with matplotlib.rc_context({"font.size": 23.0, "axes.grid": False}):
        made("fig2", with_nan)
        assert matplotlib.rcParams["font.size"] == 23.0


def test_files_of_two_presets_do_not_mix(tmp_path):
    paths = [paper_results.write_connection_walk(tmp_path / preset, "m") for preset in ("demo", "study")]
    with pytest.raises(UserError, match="2 results folders"):
        importlib.import_module(FIGURES["fig10"].module).draw(paths)


def test_run_without_its_accuracy_is_refused_by_name(tmp_path):
    path = tmp_path / "demo" / "runs" / "x" / "final.json"
    write_json(path, {"run_id": "x"})
    with pytest.raises(UserError, match="accuracy"):
        importlib.import_module(FIGURES["fig3"].module).draw([path])


def test_model_that_cannot_be_counted_has_no_cost(tmp_path):
    for path in (paths := paper_results.write_runs(tmp_path / "demo", datasets=["d"], seeds=1)):
        if path.name == "final.json" and "gaussian" in path.parent.name:
            write_json(path, json.loads(path.read_text()) | {"gmac_uncounted": ["Mine"]})
    drawn = importlib.import_module(FIGURES["fig3"].module).draw(paths)
    ours = drawn.data[drawn.data["kind"] == "ours"]
    assert list(ours.loc[ours["gmac"].isna(), "model"]) == ["gaussianformer_micro"]
    assert "give no count: gaussianformer_micro" in drawn.caption


def test_layer_record_is_preferred_to_its_heads(tmp_path):
    shared = {"metric": "isometry_score", "model": "m", "control": "excess", "layer": 0}
    head = {"head": 0, "value": 9.0, "n": 1, "spread": None, "spread_kind": ""}
    whole = {"head": -1, "value": 1.0, "n": 4, "spread": 0.5, "spread_kind": "standard deviation over heads"}
    rows = [shared | head, shared | whole]
    records.write(tmp_path / "a.json", records.from_frame(pd.DataFrame(rows)))
    (row,) = isometry_by_layer(records.read(tmp_path / "a.json")).to_dict("records")
    assert row["value"] == 1.0
    # Student quantile of 3 degrees of freedom, 3.182, times 0.5 / sqrt(4).
    assert row["low"] == pytest.approx(1.0 - 3.182446 * 0.25)
