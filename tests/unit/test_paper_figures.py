"""Every figure and table draws, says what it could not draw, and gives the same bytes for the same numbers."""

import hashlib
import importlib
import json
import math
import os
import shutil
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest

from attngeo.errors import UserError
from attngeo.files import write_json
from attngeo.paper import records, render, style
from attngeo.paper.decisions import DECISIONS
from attngeo.paper.intervals import interval_95
from attngeo.paper.results import require_inputs
from attngeo.paper.targets import FIGURES, TABLES
from attngeo.paper.walks import isometry_by_layer, number_of_model
from tests.print_checks import assert_series_differ_without_colour
from tests.tolerances import RASTERISED_SCATTER_BYTES
from tests.unit import paper_results

ROOT = Path(__file__).parents[2]
DRAW_EVERYTHING = """
import importlib, json, sys
from pathlib import Path
from attngeo.paper import ledger, macros, render
from attngeo.paper.results import require_inputs
from attngeo.paper.targets import FIGURES, TABLES
inputs, out = json.loads(sys.argv[1]), Path(sys.argv[2])
for name, paths in inputs.items():
    paths = [Path(path) for path in paths]
    if name in FIGURES:
        render.write_figure(importlib.import_module(FIGURES[name].module).draw(paths), out / name)
    else:
        render.write_table(importlib.import_module(TABLES[name].module).tabulate(paths), out / name)
findings = out / "findings.csv"
ledger.write_page("demo", Path.cwd(), out / "claims.html", [*map(Path, inputs["tab9"]), findings], inputs)
macros.write_macros("demo", [out / f"{name}.csv" for name in sorted(TABLES)], out / "macros.tex", out / "macros.csv")
"""


def draw_everything(results: Path, inputs: dict[str, list[Path]], out: Path, **environment: str) -> dict[str, str]:
    """Draw all targets in a new process; SHA-256 of every file made, by name."""
    names = {name: [str(path) for path in paths] for name, paths in inputs.items()}
    subprocess.run(
        [sys.executable, "-c", DRAW_EVERYTHING, json.dumps(names), str(out)],
        check=True,
        cwd=results,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "src")))} | environment,
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
    assert set(made) == expected | {"claims.html", "macros.tex", "macros.csv"}


@pytest.fixture(scope="module")
def with_nan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results") / "demo"
    return paper_results.write_everything(folder, nan_run=True)


@pytest.mark.parametrize("name", [*FIGURES, *TABLES])
def test_caption_names_preset_device_and_n(with_nan, name):
    caption = made(name, with_nan).caption
    assert "reset demo" in caption
    if name not in ("tab9", "findings"):  # words that point to where the numbers stand with theirs
        assert paper_results.DEVICE in caption
        assert "n = " in caption or name == "tab1"


@pytest.mark.parametrize("name", list(FIGURES))
def test_series_are_told_apart_without_colour(with_nan, name):
    assert_series_differ_without_colour(made(name, with_nan).figure, name)


@pytest.mark.parametrize(("name", "count"), [("fig2", 6), ("fig3", 2), ("fig16", 12), ("tab1", 2)])
def test_caption_counts_what_was_not_finite(with_nan, name, count):
    # Two data sets with one run whose loss is NaN in 3 epochs, and a control whose 4 series of 3 steps are NaN.
    assert f" {count} values were not finite and could not be drawn." in made(name, with_nan).caption


@pytest.mark.parametrize("name", ["fig5", "fig7", "fig9", "fig10", "fig11", "tab5"])
def test_caption_is_silent_where_all_is_finite(with_nan, name):
    assert "not finite" not in made(name, with_nan).caption


def made(name, inputs):
    """The drawn or tabulated target."""
    if name in FIGURES:
        return importlib.import_module(FIGURES[name].module).draw(inputs[name])
    return importlib.import_module(TABLES[name].module).tabulate(inputs[name])


@pytest.mark.parametrize("name", ["fig2", "fig3", "tab1"])
def test_two_recipes_are_never_averaged_as_seeds(tmp_path, name):
    paths = []
    for recipe, seeds in (("short", 3), ("long-recipe-name-of-many-letters", 2)):
        paths += paper_results.write_runs(tmp_path / "demo", datasets=["only"], seeds=seeds, recipe=recipe)
    drawn = made(name, {name: paths})
    data = drawn.frame if name == "tab1" else drawn.data[drawn.data["dataset"] == "only"]
    data = data[data["data set"] == "only"] if name == "tab1" else data
    assert {recipe: set(group["n"]) for recipe, group in data.groupby("recipe")} == {
        "short": {3},
        "long-recipe-name-of-many-letters": {2},
    }
    if name != "tab1":
        titles = " ".join(axis.get_title("left").replace("\n", "") for axis in drawn.figure.axes)
        assert "only, long-recipe-name-of-many-letters" in titles
        assert "only, short" in titles
        assert_titles_fit(drawn.figure)


@pytest.mark.parametrize("name", ["fig2", "fig3", "tab1"])
def test_runs_that_share_everything_and_the_seed_are_refused(tmp_path, name):
    paths = paper_results.write_runs(tmp_path / "demo", datasets=["only"], seeds=2)
    for path in paths:
        if path.name == "final.json" and "laplacian" in path.parent.name:
            write_json(path, json.loads(path.read_text()) | {"seed": 0})
    with pytest.raises(UserError, match="only-laplacian-invented-micro-s0, only-laplacian-invented-micro-s1 share"):
        made(name, {name: paths})


def test_sizes_of_one_kind_are_told_apart_by_name(tmp_path):
    paths = []
    for size in ("tiny", "small"):
        paths += paper_results.write_runs(tmp_path / "demo", datasets=["only"], seeds=2, size=size)
    for name, places in (("fig2", 2), ("fig3", 1)):
        texts = [text.get_text() for axis in made(name, {name: paths}).figure.axes for text in axis.texts]
        assert sorted(texts) == sorted(["tiny", "small"] * 4 * places)


def test_table_says_on_how_many_images_a_run_was_evaluated(tmp_path):
    paths = paper_results.write_runs(tmp_path / "demo", datasets=["even", "uneven"], seeds=2)
    changed = next(p for p in paths if p.name == "final.json" and "uneven-softmax" in p.parent.name)
    write_json(changed, json.loads(changed.read_text()) | {"n_eval": 77})
    frame = made("tab1", {"tab1": paths}).frame
    images = frame.set_index(["data set", "attention"])["images"]
    assert images["even", "softmax"] == images["uneven", "laplacian"] == 1000
    assert images["uneven", "softmax"] == "77 to 1000"
    assert frame.loc[frame["kind"] == "paper", "images"].isna().all()


def test_the_rate_with_the_highest_held_out_accuracy_is_chosen_and_of_equals_the_lower(tmp_path):
    for name, accuracies, expected in (
        ("inside", {1e-3: 70.0, 3e-3: 80.0, 1e-2: 75.0}, [(0.003, "yes")]),
        ("equals", {1e-4: 1.0, 1e-3: 80.0, 3e-3: 80.0, 1e-2: 75.0}, [(0.001, "yes")]),
        ("end", {1e-3: 70.0, 3e-3: math.nan, 1e-2: 75.0}, [(0.01, "yes, at an end of the range")]),
        ("nothing", {1e-3: math.nan, 3e-3: math.nan}, []),
    ):
        paths = paper_results.write_tuning(tmp_path / name, accuracies, n_eval=1600)
        frame = made("tuning", {"tuning": paths[::-1]}).frame
        assert len(frame) == 4 * len(accuracies)
        for _, rows in frame.groupby("attention"):
            picked = rows[rows["chosen"] != ""]
            assert list(zip(picked["peak rate"], picked["chosen"], strict=True)) == expected
            assert (picked["below the best"] == 0).all()
    assert frame["standard error"].isna().all()
    caption = made("tuning", {"tuning": paths}).caption
    assert "of held are training images that were held out" in caption


def test_the_standard_error_is_that_of_a_binomial(tmp_path):
    paths = paper_results.write_tuning(tmp_path / "tuning", {1e-3: 80.0}, n_eval=1600)
    assert made("tuning", {"tuning": paths}).frame["standard error"].tolist() == pytest.approx([1.0] * 4)


def test_the_classification_table_names_the_rates(tmp_path):
    paths = paper_results.write_runs(tmp_path / "demo", datasets=["even", "uneven"], seeds=2)
    for path in paths:
        if path.name == "final.json" and "uneven-gaussian" in path.parent.name:
            write_json(path, json.loads(path.read_text()) | {"recipe_values": {"lr": 0.01}})
    expected = "even 0.003 for every kind; uneven gaussian 0.01, laplacian 0.003, riemannian 0.003, softmax 0.003"
    assert f"Peak learning rates: {expected} (" in made("tab1", {"tab1": paths}).caption


@pytest.mark.parametrize("name", ["fig2", "fig3", "fig9", "fig10", "fig11", "tab1", "tab6", "tab7", "tab9", "tuning"])
def test_nothing_to_draw_is_said_plainly(name):
    with pytest.raises(UserError, match=f"no (run|model|file) of the preset feeds {name}"):
        made(name, {name: []})


def test_remedy_of_nothing_to_draw_names_the_sheet_or_the_configuration():
    with pytest.raises(UserError, match=r"runs\.tsv"):
        require_inputs([], "fig2", "run")
    with pytest.raises(UserError, match=r"config\.yaml"):
        require_inputs([], "fig10", "model")
    require_inputs([Path("a")], "fig2", "run")


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
def test_ids_of_models_are_whole_and_within_the_figure(tmp_path, count):
    ids = ["smollm2-135m-instruct@gguf-q4_1", *(f"another-model-of-many-letters-{i}@bf16" for i in range(count - 1))]
    paths = [paper_results.write_connection_walk(tmp_path / "demo", model) for model in ids]
    figure = made("fig10", {"fig10": paths}).figure
    titles = {axis.get_title("left").replace("\n", "")[4:] for axis in figure.axes} - {""}
    assert titles == set(ids)
    assert_titles_fit(figure)


@pytest.mark.parametrize("name", ["fig2", "fig3", "fig4", "fig5", "fig6", "fig7", "fig9", "fig11", "fig16"])
def test_titles_are_within_the_figure(with_nan, name):
    assert_titles_fit(made(name, with_nan).figure)


def assert_titles_fit(figure):
    """Every panel title ends before the next panel's title in its row starts, and within the figure."""
    with style.paper_style():
        figure.canvas.draw()
    boxes = [axis._left_title.get_window_extent() for axis in figure.axes if axis.get_title("left")]
    for box in boxes:
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
        right = [other for other in boxes if other.x0 > box.x0 and abs(other.y0 - box.y0) < 1]
        assert all(box.x1 < other.x0 for other in right)


def test_panels_that_are_compared_share_their_scale(tmp_path):
    paths = [
        paper_results.write_connection_walk(tmp_path / "demo", model, excess=excess)
        for model, excess in (("a", 0.01), ("bb", -0.3), ("ccc", 0.0), ("dddd", 0.02), ("eeeee", 0.03))
    ]
    drawn = made("fig10", {"fig10": paths})
    used = [axis for axis in drawn.figure.axes if axis.axison]
    assert len(used) == 10
    assert len({axis.get_ylim() for axis in used}) == 2
    assert "share one scale" in drawn.caption


def test_caption_of_the_variational_figure_states_no_finding(tmp_path):
    captions = [
        made("fig16", {"fig16": [paper_results.write_variational(tmp_path / name / "demo", orders=orders)]}).caption
        for name, orders in (("good", (1.0, 4.0)), ("bad", (0.0, 0.0)))
    ]
    assert captions[0] == captions[1]
    assert "(b) 4 (RK4), 1 (Euler), 0 (1/n flow, softmax flow)" in captions[0]


def test_caption_of_the_injectivity_figure_says_whose_matrices_they_are(with_nan):
    caption = made("fig7", with_nan).caption
    assert "layer-normalised features (invented features) under one random projection" in caption
    assert "inverted exactly; they are not that model's own attention" in caption


def test_the_figure_of_tokens_draws_measured_points_alone(tmp_path):
    drawn = made("fig4", {"fig4": [paper_results.write_tokens(tmp_path / "demo")]})
    lines = {line.get_label(): line for line in drawn.figure.axes[1].lines if len(line.get_xdata()) > 2}
    assert list(lines) == ["softmax, plain (1.90, 2.00)", "softmax, fused (1.80, 1.00)", "Laplacian (1.05, 1.00)"]
    assert max(lines["softmax, plain (1.90, 2.00)"].get_xdata()) == 9216
    assert max(lines["Laplacian (1.05, 1.00)"].get_xdata()) == 16384
    assert "Left out for time or memory (tokens): softmax, plain, forward and backward, from 16,384." in drawn.caption
    assert "Laplacian, forward, time 1.05 ± 0.01" in drawn.caption
    assert "6 to 7 sizes from 1,024 to 16,384 tokens" in drawn.caption
    assert set(drawn.data["pass"]) == {"forward", "forward and backward"}


def test_the_figure_of_few_tokens_says_that_nothing_was_fitted(tmp_path):
    drawn = made("fig4", {"fig4": [paper_results.write_tokens(tmp_path / "demo", tokens=(16, 64))]})
    assert drawn.figure.axes[0].get_legend_handles_labels()[1] == ["softmax, plain", "softmax, fused", "Laplacian"]
    assert "No exponent was fitted" in drawn.caption
    assert "Left out" not in drawn.caption


def test_the_table_of_timings_ends_with_the_share_of_a_training_step(tmp_path, timings):
    tabulated = made("tab5", {"tab5": [timings, paper_results.write_gpu_timings(tmp_path / "demo")]})
    steps = tabulated.frame.tail(3)
    assert list(steps["operation"]) == [
        *["training step, micro laplacian, batch 64"] * 2,
        "training step, micro softmax, batch 64",
    ]
    assert list(steps["share of step (%)"]) == [20.0, 0.0, 0.0]
    assert steps["torch / own"].iloc[0] == pytest.approx(1.5)
    assert steps["torch / own"].iloc[1:].isna().all()
    assert tabulated.frame["share of step (%)"].iloc[:-3].isna().all()
    assert "share of step" in tabulated.caption


@pytest.fixture
def timings(tmp_path):
    return paper_results.write_operator_timings(tmp_path / "demo")


def test_gpu_that_was_not_measured_is_said_and_not_drawn(tmp_path, timings):
    inputs = [timings, paper_results.write_gpu_timings(tmp_path / "demo")]
    drawn = made("fig5", {"fig5": inputs})
    assert [axis.texts[0].get_text() for axis in drawn.figure.axes] == ["our GPU, not measured"] * 4
    assert "GPU: not measured by this project." in drawn.caption
    on_gpu = drawn.data[drawn.data["device_kind"] == "cuda"]
    assert set(on_gpu["kind"]) == {"paper"}
    tabulated = made("tab5", {"tab5": inputs})
    (row,) = rows_with(tabulated.frame, device="our GPU, not measured")
    assert pd.isna(row["time (ms)"])
    assert "No GPU has been measured by this project." in tabulated.caption


def test_measured_gpus_are_named_and_drawn_as_measured(tmp_path, timings):
    gpu = paper_results.write_gpu_timings(tmp_path / "demo", devices=["GPU B", "GPU A"], same_sources=False)
    drawn = made("fig5", {"fig5": [gpu, timings]})
    assert not [text for axis in drawn.figure.axes for text in axis.texts]
    labels = drawn.figure.axes[0].get_legend_handles_labels()[1]
    assert labels[4:] == [f"{name}, GPU {letter} (ours)" for letter in "AB" for name in ("torch", "attngeo")]
    assert "GPU: GPU A, GPU B (GPU A, GPU B: with earlier sources of the operators)." in drawn.caption
    ours = drawn.data[(drawn.data["device"] == "GPU A") & (drawn.data["form"] == "own")]
    assert sorted(set(ours["tokens"])) == [16, 32, 64, 128]
    assert ours.loc[ours["tokens"] == 64, "time_ms"].tolist() == [0.64] * 4, "two operators, two directions"
    heights = [bar.get_height() for bar in drawn.figure.axes[0].patches]
    assert heights.count(0.64) == 3, "the processor's bar and one for each GPU"


def test_timing_below_the_published_resolution_is_hollow(tmp_path, timings):
    drawn = made("fig5", {"fig5": [timings, paper_results.write_gpu_timings(tmp_path / "demo")]})
    bars = [bar for axis in drawn.figure.axes for bar in axis.patches]
    assert sum(not bar.get_fill() for bar in bars) == 2
    published = drawn.data[drawn.data["kind"] == "paper"]
    assert (published["time_ms"] == 0.0).sum() == 2, "the data hold what was published"


@pytest.mark.parametrize("name", ["fig5", "tab5"])
def test_every_timing_has_device_and_kind(with_nan, name):
    drawn = made(name, with_nan)
    frame = drawn.data if name == "fig5" else drawn.frame
    assert frame["device"].notna().all()
    assert set(frame["kind"]) == {"paper", "ours"}
    assert set(frame.loc[frame["kind"] == "paper", "device"]) == {"A100"}
    assert set(frame.loc[frame["kind"] == "ours", "device"]) == {paper_results.DEVICE, "Invented GPU"}


def test_timing_table_compares_with_the_fastest_form_in_torch(with_nan):
    frame = made("tab5", with_nan).frame
    ours = rows_with(frame, kind="ours", operation="laplacian_kernel", direction="forward", tokens=784)
    assert [row["implementation"] for row in ours] == ["attngeo", "torch.cdist(p=1) + exp"]
    assert ours[0]["torch / own"] == pytest.approx(5.0)
    assert pd.isna(ours[1]["torch / own"])
    paper = rows_with(frame, kind="paper", operation="newton_schulz_inverse", direction="forward", tokens=128)
    assert {row["implementation"]: row["torch / own"] for row in paper}["CUDA"] == pytest.approx(1.66 / 1.12)


def test_solver_panels_say_what_there_is(tmp_path):
    drawn = made("fig6", {"fig6": [paper_results.write_solver(tmp_path / "demo", matrices=7)]})
    assert "a trained model's: n = 7 matrices of 16 landmarks from runs invented-run" in drawn.caption
    assert "random tokens: n = 7 matrices of 16 landmarks from 3 seeds" in drawn.caption
    assert "the iteration leaves the panel in 3 of 3 of them" in drawn.caption
    assert len(drawn.data) == 3 * (3 * 20 + 40 + 2)
    without = made("fig6", {"fig6": [paper_results.write_solver(tmp_path / "other" / "demo", trained=False)]})
    assert "no run with" in without.figure.axes[1].texts[0].get_text()
    assert "trained" not in without.caption


def rows_with(frame, **cells):
    """Rows whose cells have these values."""
    for name, value in cells.items():
        frame = frame[frame[name] == value]
    return frame.to_dict("records")


@pytest.mark.parametrize("width", [2, 7, 12, 40])
@pytest.mark.parametrize(
    "text", ["", "a", "smollm2-135m-instruct@gguf-q4_1", "@q", "x@y@z", "abcdefghijklmnop--q", "a set, a-recipe, ours"]
)
def test_wrapping_keeps_every_letter_within_the_width(text, width):
    lines = style.wrapped(text, width).split("\n")
    assert "".join(lines) == text
    assert all(len(line) <= width for line in lines)


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


def test_graphs_by_depth_are_drawn_beside_their_controls_and_what_is_absent_is_said(tmp_path):
    walks = [paper_results.write_connection_walk(tmp_path / "demo", name) for name in ("encoder", "causal-decoder")]
    walks += paper_results.write_decoders(tmp_path / "demo", sizes=1, seeds=2)
    drawn = made("fig9", {"fig9": walks})
    changes = drawn.data[drawn.data["metric"] == "graph_change"]
    assert set(changes["control"]) == {"trained", "depth_shuffled", "random_init", "shuffled_tokens"}
    assert (changes["low"] < changes["value"]).all()
    texts = [text.get_text() for axis in drawn.figure.axes for text in axis.texts]
    assert texts == ["not measured"] * 3  # the subspace angle, once a model
    assert "decoder-size0-s0-step100: 1 by construction, attention is causal" in drawn.caption
    assert "3 more models trained here are left out" in drawn.caption


def test_intervals_of_windows_are_the_records_own_where_they_have_them():
    row = {"value": 1.0, "spread": 2.0, "spread_kind": "standard deviation over windows", "n": 4}
    assert interval_95(row | {"low": 0.7, "high": 1.2}) == (0.7, 1.2)
    # Student quantile of 3 degrees of freedom, 3.182, times 2 / sqrt(4).
    assert interval_95(row | {"low": math.nan, "high": math.nan}) == pytest.approx((1 - 3.182446, 1 + 3.182446))
    assert all(map(math.isnan, interval_95(row | {"n": 1})))


def test_quantised_models_are_hollow_and_in_no_line(tmp_path):
    folder = tmp_path / "demo"
    for size, name in enumerate(["a", "b", "c"]):
        for precision, sign in (("", 1), ("@4bit", -1)):
            paper_results.write_connection_walk(
                folder, name + precision, family="f", excess=sign * 0.01 * size, parameters=10.0 ** (6 + size)
            )
    drawn = made("fig11", {"fig11": sorted(folder.glob("analyses/connection_walk/*.json"))})
    handles, labels = drawn.figure.axes[0].get_legend_handles_labels()
    lines = {label: handle.lines[0] for handle, label in zip(handles, labels, strict=True)}
    assert lines["f, 4bit"].get_markerfacecolor() == lines["f, 4bit"].get_linestyle().lower() == "none"
    assert lines["f, float32"].get_linestyle() == "-"
    assert "in no line or correlation: a@4bit, b@4bit, c@4bit, quantised" in drawn.caption
    assert "excess within families f float32 +1.00 (n = 3 sizes), across families +1.00 (n = 3)" in drawn.caption


def test_emergence_over_training_has_a_row_of_its_own_where_it_was_measured(tmp_path):
    own = paper_results.write_decoders(tmp_path / "demo", sizes=2, seeds=2, steps=(0, 10, 100))
    drawn = made("fig11", {"fig11": own})
    assert len(drawn.figure.axes) == 4
    assert set(drawn.data["step"]) == {0, 10, 100}
    assert set(drawn.data["seeds"]) == {2}
    last = [path for path in own if "step100" in path.name]
    assert len(made("fig11", {"fig11": last}).figure.axes) == 2


def test_of_several_seeds_of_an_own_decoder_one_has_a_column_and_all_have_their_differences(tmp_path):
    names = ["invented-encoder", "decoder-3m-s0-step9", "decoder-3m-s1-step9"]
    inputs = [paper_results.write_trajectories(tmp_path, name) for name in names]
    drawn = made("fig17", {"fig17": inputs})
    by_layer = drawn.data["layer"] >= 0
    assert set(drawn.data.loc[by_layer, "model"]) == set(names[:2])
    assert set(drawn.data.loc[~by_layer, "model"]) == set(names)


def test_runs_trained_here_stand_apart_from_pretrained_models(with_nan):
    drawn = made("fig10", with_nan)
    own = drawn.data[drawn.data["dataset"].notna()]
    assert set(own["attention"]) == {"softmax", "laplacian", "riemannian"}
    assert set(own["n"]) == {3}
    means = own[own["control"] == "excess"].groupby("attention")["value"].mean()
    assert means.idxmax() == "riemannian"
    table = made("tab6", with_nan).frame.set_index("model")
    assert table.loc["laplacian on invented-a", "heads"] == "1/2/4"
    assert table.loc["laplacian on invented-a", "n"] == 3
    assert table.loc["laplacian on invented-a", "high"] < 0 < table.loc["riemannian on invented-a", "low"]
    exact = made("tab7", with_nan).frame.set_index("model")
    assert exact.loc["softmax on invented-b", "negative"] == 0 < exact.loc["laplacian on invented-b", "negative"]


def test_models_are_tabulated_with_what_was_measured_of_them(with_nan):
    drawn = made("tab6", with_nan)
    table = drawn.frame.set_index("model")
    assert not [name for name in table.index if name.endswith("step0")]
    assert "6 earlier steps of models trained here" in drawn.caption
    assert table.loc["invented-encoder", "layers"] == 7
    assert pd.isna(table.loc["invented-encoder", "width"])
    assert "Quantised, in no trend: invented-decoder@4bit" in drawn.caption
    assert pd.isna(table.loc["invented-encoder", "above, adjusted"])
    row = {"model": "x", "control": "trained", "metric": "value_groups", "value": 2.0}
    assert number_of_model(pd.DataFrame([row]), "value_groups") == 2
    assert number_of_model(pd.DataFrame([row]), "heads") is None


def test_what_newer_records_say_of_a_model_stands_in_its_row(tmp_path):
    path = paper_results.write_connection_walk(tmp_path / "demo", "m")
    file = records.read_file(path)
    labels = {"model": "m", "family": "f", "precision": "float32", "layer": -1, "head": -1, "control": "trained"}
    numbers = {"layers": 7.0, "heads": 8.0, "value_groups": 2.0, "head_dim": 5.0, "model_dim": 40.0}
    numbers["graph_change_trend_without_first_token"] = -0.4
    newer = [records.Record(metric=metric, value=value, n=1, labels=labels) for metric, value in numbers.items()]
    adjusted = {"isometry_score_layers_above_null": 3.0, "isometry_score_layers_below_null": 1.0}
    excess = labels | {"control": "excess"}
    newer += [records.Record(metric=metric, value=value, n=7, labels=excess) for metric, value in adjusted.items()]
    records.write(path, file.model_copy(update={"records": [*file.records, *newer]}))
    row = made("tab6", {"tab6": [path]}).frame.iloc[0]
    assert (row["heads"], row["head dim"], row["width"], row["layers"]) == ("8/2", 5, 40, 7)
    assert (row["above, adjusted"], row["below, adjusted"], row["trend, no first token"]) == (3, 1, -0.4)
    assert made("tab7", {"tab7": [path]}).frame.iloc[0]["head layout"] == "4 heads, 2 value groups"
    found = DECISIONS["isometry_excess"](records.read(path))
    assert found.numbers["layers above the null once adjusted for their number (Holm), m"] == "3 of 7"


def test_the_table_of_identities_keeps_the_largest_error_and_shows_a_nan(tmp_path):
    path = paper_results.write_connection_walk(tmp_path / "demo", "m")
    file = records.read_file(path)
    errors = [record for record in file.records if record.metric == "identity_error"]
    heads = [place for place, record in enumerate(file.records) if record in errors and record.labels["head"] == 2]

    def with_value(value):
        changed = list(file.records)
        changed[heads[1]] = changed[heads[1]].model_copy(update={"value": value})
        records.write(path, file.model_copy(update={"records": changed}))
        return made("tab7", {"tab7": [path]}).frame.iloc[0]

    found = with_value(1e-9)
    assert found["single head"] == 1e-9
    assert found["multi head, float64 softmax"] == 2e-15
    assert found["head layout"] == "4 heads"
    assert math.isnan(with_value(math.nan)["single head"])


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


@contextmanager
def no_empty_boxes():
    """matplotlib draws one for a letter that the font lacks, and says so in a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Glyph|Font family|findfont")
        yield


@pytest.mark.parametrize("name", list(FIGURES))
def test_every_letter_of_a_figure_is_in_its_font(with_nan, name, tmp_path):
    with no_empty_boxes():
        render.write_figure(made(name, with_nan), tmp_path / name)


def test_letters_that_the_font_lacks_are_spelled_out(tmp_path):
    with style.paper_style():
        figure, axes = style.new_figure()
        axes[0][0].plot([0, 1], [0, 1], label="注, κ")
        axes[0][0].set_xticks([0, 1], labels=["日é", "$λ$"])
        axes[0][0].legend()
        axes[0][0].set_title("a\n意")
    drawn = render.Drawn(figure, pd.DataFrame({"x": [1]}), "c")
    with no_empty_boxes():
        render.write_figure(drawn, tmp_path / "figure")
    assert axes[0][0].get_legend().get_texts()[0].get_text() == "(U+6CE8), κ"
    assert [tick.get_text() for tick in axes[0][0].get_xticklabels()] == ["(U+65E5)é", "$λ$"]
    assert axes[0][0].get_title() == "a\n(U+610F)"


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
    records.write(tmp_path / "a.json", records.from_frame(pd.DataFrame([shared | whole | {"low": 0.9, "high": 1.3}])))
    (row,) = isometry_by_layer(records.read(tmp_path / "a.json")).to_dict("records")
    assert (row["low"], row["high"], row["interval"]) == (0.9, 1.3, "95 % bootstrap interval of the mean")
