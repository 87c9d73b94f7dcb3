"""Targets say what they are made of without loading anything heavy."""

import importlib
import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

import attngeo.paper
from attngeo.config import load_preset
from attngeo.errors import UserError
from attngeo.jobs.draw import draw
from attngeo.paper import claims
from attngeo.paper.targets import FIGURES, PAGES, TABLES, TARGETS, ledger_files, made_from
from tests.unit import paper_results
from tests.unit.paper_results import Dataset, Model, Preset, Run

ROOT = Path(__file__).parents[2]
PACKAGE = Path(attngeo.paper.__file__).parent
MAKERS = {"figure": "draw", "table": "tabulate", "page": "write_page", "prose": "write_macros"}
PRESET = Preset(
    "p",
    runs=(Run("a", "m", "d", 0), Run("b", "m", "d", 1, feeds=("tab1",)), Run("c", "m", "d", 2, feeds=())),
    language_models=(Model("small@q4"),),
    vision_models=(Model("eye"),),
)


def test_importing_targets_loads_no_heavy_package():
    program = "import attngeo.paper.targets, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "pandas", "numpy", "matplotlib", "pydantic", "scipy", "jinja2"} & set(loaded)


def test_inputs_follow_the_feeds_of_the_run_sheet():
    assert FIGURES["fig2"].inputs(PRESET) == ["runs/a/metrics.jsonl", "runs/a/final.json"]
    assert FIGURES["fig3"].inputs(PRESET) == ["runs/a/final.json"]
    assert TABLES["tab1"].inputs(PRESET) == ["runs/a/final.json", "runs/b/final.json"]


def test_every_pretrained_model_is_an_input_of_the_isometry_figure():
    expected = ["analyses/connection_walk/small@q4.json", "analyses/connection_walk/eye.json"]
    assert FIGURES["fig10"].inputs(PRESET) == expected
    assert FIGURES["fig10"].inputs(Preset("p", language_models=PRESET.language_models)) == expected[:1]


def test_runs_that_feed_the_isometry_figure_are_walked_and_shown_with_the_pretrained_models():
    fed = Preset("p", runs=(Run("a", "m", "d", 0, feeds=("fig10",)),), language_models=PRESET.language_models)
    walks = ["analyses/connection_walk/small@q4.json", "analyses/connection_walk_runs.json"]
    for target in (FIGURES["fig10"], TABLES["tab6"], TABLES["tab7"]):
        assert target.inputs(fed) == walks
    for target in (FIGURES["fig9"], FIGURES["fig11"]):
        assert target.inputs(fed) == walks[:1]


def test_every_pretrained_model_and_the_runs_that_feed_it_are_inputs_of_the_figure_of_trajectories():
    models = ["analyses/trajectories/small@q4.json", "analyses/trajectories/eye.json"]
    assert FIGURES["fig17"].inputs(PRESET) == models
    fed = Preset("p", runs=(Run("a", "m", "d", 0, feeds=("fig17",)),))
    assert FIGURES["fig17"].inputs(fed) == ["analyses/trajectories_runs.json"]
    assert FIGURES["fig17"].inputs(Preset("p")) == []


def test_our_own_decoders_are_shown_as_paths_at_their_last_step():
    steps = tuple(Model(f"decoder-tiny-s0-step{step}") for step in (0, 9))
    preset = Preset("p", decoder_models=steps, finished_decoders=steps[1:])
    assert FIGURES["fig17"].inputs(preset) == ["analyses/trajectories/decoder-tiny-s0-step9.json"]
    assert len(FIGURES["fig9"].inputs(preset)) == 2


def test_ledger_reads_every_analysis_and_every_run_of_table_1():
    inputs = TABLES["tab9"].inputs(PRESET)
    assert [path for path in inputs if path.startswith("runs/")] == ["runs/a/final.json", "runs/b/final.json"]
    assert {"analyses/injectivity.json", "analyses/variational.json", "analyses/connection_walk/eye.json"} < set(inputs)
    assert {"benchmarks/operators.json", "benchmarks/gpu.json", "benchmarks/solver.json"} < set(inputs)
    assert {"benchmarks/tokens.json", "analyses/trajectories/eye.json"} < set(inputs)
    assert PAGES["claims"].inputs(PRESET) == [*inputs, "tables/findings.csv"]
    assert PAGES["claims"].inputs(Preset("p", PRESET.runs, tables=("tab9",))) == TABLES["tab9"].inputs(
        Preset("p", PRESET.runs)
    )


def test_runs_on_held_out_images_are_no_evidence():
    preset = Preset("p", runs=PRESET.runs, datasets={"d": Dataset(hold_out=0.1)})
    assert FIGURES["fig2"].inputs(preset) == FIGURES["fig2"].inputs(PRESET)
    assert not any(path.startswith("runs/") for path in PAGES["claims"].inputs(preset))


def test_maps_are_made_for_the_runs_that_feed_them_and_are_no_evidence_as_arrays():
    fed = Preset("p", runs=(Run("a", "m", "d", 0, feeds=("fig8",)),))
    maps = ["analyses/attention_maps.json", "analyses/attention_maps.npz"]
    assert FIGURES["fig8"].inputs(fed) == maps
    assert FIGURES["fig8"].inputs(PRESET) == []
    evidence = TABLES["tab9"].inputs(fed)
    assert maps[0] in evidence
    assert maps[1] not in evidence


def test_findings_come_from_ablations_walks_and_the_rank_collapse():
    runs = (Run("a", "m", "d", 0, feeds=("tab4",)),)
    fed = Preset("p", runs=runs, language_models=PRESET.language_models, rank_collapse_seeds=(0, 3))
    assert TABLES["findings"].inputs(fed) == [
        "runs/a/final.json",
        "analyses/connection_walk/small@q4.json",
        "analyses/rank_collapse/s0.json",
        "analyses/rank_collapse/s3.json",
    ]


def test_findings_see_the_whole_evidence_of_the_claims_that_they_answer():
    preset = load_preset(ROOT, "demo")
    patterns = [pattern for claim in claims.claims() if claim.id in ("P3.f", "P4.e") for pattern in claim.evidence]
    evidence = {path for path in ledger_files(preset) if any(fnmatch(path, pattern) for pattern in patterns)}
    assert any("rank_collapse" in path for path in evidence)
    assert evidence <= set(TABLES["findings"].inputs(preset))


def test_pages_and_macros_follow_what_the_preset_makes():
    preset = Preset("p", figures=("fig2",), tables=("tab1", "findings"))
    assert PAGES["index"].inputs(preset) == [
        "figures/fig2.png",
        "figures/fig2.caption.txt",
        "tables/tab1.md",
        "tables/tab1.caption.txt",
        "tables/findings.md",
        "tables/findings.caption.txt",
        "tables/findings.csv",
    ]
    assert PAGES["macros"].inputs(preset) == ["tables/tab1.csv", "tables/findings.csv"]
    assert PAGES["macros"].outputs == ("macros.tex", "macros.csv")
    assert made_from(preset).keys() == {"fig2", "tab1", "findings"}


@pytest.mark.parametrize("name", ["index", "macros"])
def test_what_is_made_of_figures_and_tables_names_the_first_that_is_missing(tmp_path, name):
    preset = load_preset(ROOT, "smoke").model_copy(update={"root": tmp_path})
    with pytest.raises(UserError, match=r"(fig|tab)\d+\S* does not exist") as caught:
        draw(preset, name, "")
    assert "preset=smoke" in caught.value.remedy
    assert not list(tmp_path.iterdir())


def test_targets_of_an_empty_preset_have_no_runs():
    assert TABLES["tab1"].inputs(Preset("empty")) == []


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    sys.addaudithook(watch)
    folder = tmp_path_factory.mktemp("results") / "demo"
    return paper_results.write_everything(folder)


opened: set[str] | None = None


def watch(event, arguments):
    """Note files of the package that are opened while `opened` is a set; a hook cannot be taken away again."""
    if opened is not None and event == "open" and isinstance(arguments[0], str | os.PathLike):
        path = Path(arguments[0])
        if PACKAGE in path.parents and path.suffix not in (".py", ".pyc"):
            opened.add(path.relative_to(PACKAGE).as_posix())


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_data_files_of_a_target_are_those_that_its_module_opens(made_up, tmp_path, name):
    global opened
    target = TARGETS[name]
    module = importlib.import_module(target.module)
    claims.claims.cache_clear()
    opened = set()
    try:
        if target.kind == "page":
            module.write_page("demo", tmp_path, tmp_path / "page.html")
        elif target.kind == "prose":
            module.write_macros("demo", [], tmp_path / "macros.tex", tmp_path / "macros.csv")
        else:
            getattr(module, MAKERS[target.kind])(made_up[name])
        found = opened
    finally:
        opened = None
    assert found == set(target.data_files)


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_target_has_its_module_caption_and_data(name):
    target = TARGETS[name]
    module = importlib.import_module(target.module)
    assert callable(getattr(module, MAKERS[target.kind]))
    assert (ROOT / target.caption_file).read_text(encoding="utf-8").strip()
    for file in target.data_files:
        assert (Path(attngeo.paper.__file__).parent / file).is_file()


def test_names_number_and_outputs_agree():
    assert {name: target.number for name, target in FIGURES.items()} == {
        f"fig{t.number}": t.number for t in FIGURES.values()
    }
    assert FIGURES["fig2"].outputs == (
        "figures/fig2.pdf",
        "figures/fig2.png",
        "figures/fig2.csv",
        "figures/fig2.caption.txt",
    )
    assert TABLES["tab1"].outputs == ("tables/tab1.csv", "tables/tab1.md", "tables/tab1.tex", "tables/tab1.caption.txt")
    assert PAGES["claims"].outputs == ("claims.html",)
