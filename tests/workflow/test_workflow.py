"""Laws of the DAG: what it makes, what it makes again, and what it says when something is wrong."""

import json
import re
import shutil
import sqlite3
import time
from pathlib import Path

import pytest

from attngeo.paper.targets import FIGURES, TABLES
from attngeo.tracking import journal
from tests.mlflow_server import free_port
from tests.workflow.project_copy import ProjectCopy

PAGES_SHOWN = {"claims.html", "index.html", "macros.tex", "macros.csv", "licences.md", "PRESET"}
FED_TABLES = set(TABLES) - {"tuning"}  # what the runs of the preset smoke feed

pytestmark = [pytest.mark.workflow, pytest.mark.network, pytest.mark.timeout(1200)]


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text, f"{old!r} not in {file}"
    file.write_text(text.replace(old, new, 1))


def append(file: Path, text: str) -> None:
    file.write_text(file.read_text() + text)


def test_the_users_command_makes_every_figure_table_and_the_ledger(finished: ProjectCopy) -> None:
    made = {path.name for path in (finished.root / "paper_figures").iterdir()}
    expected = {f"{name}.{ending}" for name in FIGURES for ending in ("pdf", "png")}
    expected |= {f"{name}.{ending}" for name in FED_TABLES for ending in ("csv", "md", "tex")}
    assert expected | PAGES_SHOWN <= made
    assert (finished.root / "paper_figures/PRESET").read_text().strip() == "demo"
    assert all((finished.root / "paper_figures" / name).stat().st_size > 0 for name in made)


def test_a_second_run_has_nothing_to_do(finished: ProjectCopy) -> None:
    done = finished.run("snakemake --cores 8 all")
    assert "Nothing to be done" in done.stdout + done.stderr


@pytest.mark.parametrize("target", ["paper_figures/fig3.pdf", "results/demo/tables/tab1.csv", "fig16"])
def test_one_target_can_be_named(finished: ProjectCopy, target: str) -> None:
    done = finished.run(f"snakemake {target}")
    assert "Nothing to be done" in done.stdout + done.stderr


def test_a_dry_run_is_quick(finished: ProjectCopy) -> None:
    times = []
    for _ in range(3):
        start = time.monotonic()
        finished.run("snakemake -n")
        times.append(time.monotonic() - start)
    assert min(times) < 60, "it takes some seconds; who waits a minute for a plan has another fault"


def test_the_report_holds_every_figure_with_its_caption(finished: ProjectCopy) -> None:
    finished.run("snakemake --report report.html")
    page = (finished.root / "report.html").read_text()
    for name in FIGURES:
        assert f"{name}.png" in page


def test_lint_finds_nothing(finished: ProjectCopy) -> None:
    done = finished.run("snakemake --lint")
    assert "good condition" in done.stdout + done.stderr


def test_every_number_says_where_it_comes_from(finished: ProjectCopy) -> None:
    for path in (finished.root / "results/demo/analyses").rglob("*.json"):
        content = json.loads(path.read_text())
        assert content["records"], path
        for key in ("code_digest", "git_revision", "device", "torch"):
            assert content["provenance"][key], (path, key)
    for path in (finished.root / "results/demo/benchmarks").glob("*.json"):
        content = json.loads(path.read_text())
        assert content["records"] or path.name == "gpu.json", path
        assert content["provenance"]["code_digest"]
    for path in (finished.root / "results/demo/runs").glob("*/final.json"):
        final = json.loads(path.read_text())
        assert final["provenance"]["code_digest"]
        assert final["ran"] or final["attention"] == "softmax", "the implementation that ran is not recorded"
        assert final["loader"]["loader"] in ("arrays", "torch", "ffcv")
        stages = set(final["attention_of_stages"])
        assert stages == {final["attention"]}, "a stage ran another kind than the run names"


def test_every_job_is_in_the_tracking_store(finished: ProjectCopy) -> None:
    with sqlite3.connect(finished.root / "results/mlflow.db") as store:
        rows = store.execute("select name, status from runs where lifecycle_stage = 'active'").fetchall()
        curves = store.execute(
            "select r.name, count(distinct m.step) from runs r join metrics m on m.run_uuid = r.run_uuid"
            " where m.key = 'val_top1' group by r.run_uuid"
        ).fetchall()
    names = [name for name, _ in rows]
    assert {status for _, status in rows} == {"FINISHED"}
    runs = [path.name for path in (finished.root / "results/demo/runs").iterdir()]
    for name in (*runs, *FIGURES, *FED_TABLES):
        assert names.count(name) == 1, (name, names)
    assert dict(curves).keys() == set(runs)
    assert all(steps >= 2 for _, steps in curves), "metrics by epoch are missing"


def test_a_server_that_is_away_stops_nothing_and_is_told_later(finished_copy: ProjectCopy) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    for folder in ("results/demo/figures", "paper_figures"):
        (finished_copy.root / folder / "fig2.pdf").unlink()
    append(finished_copy.root / "src/attngeo/paper/figures/fig02_training_curves.py", "\n_CHANGED = 1\n")
    done = finished_copy.run(f"MLFLOW_TRACKING_URI={address} snakemake --cores 2 paper_figures/fig2.pdf")
    assert (finished_copy.root / "paper_figures/fig2.pdf").exists()
    assert "attngeo track sync demo" in done.stderr
    assert journal.has_unsent(finished_copy.root, "demo")
    sent = finished_copy.run("attngeo track sync demo")
    assert "figure fig2: " in sent.stdout
    assert not journal.has_unsent(finished_copy.root, "demo")


# What an edit makes again: (file, old text, new text) -> rules expected, given as patterns of "rule output".
def _trainings(jobs: list[str]) -> set[str]:
    return {match.group(1) for job in jobs if (match := re.search(r"^train .*runs/([^/]+)/", job))}


def test_a_statement_in_a_figure_redraws_that_figure_only(finished_copy: ProjectCopy) -> None:
    append(finished_copy.root / "src/attngeo/paper/figures/fig10_transport_isometry.py", "\n_CHANGED = 1\n")
    jobs = finished_copy.planned()
    assert {job.split()[0] for job in jobs} <= {"fig10", "index", "show", "show_page", "all"}
    assert any(job.startswith("fig10") for job in jobs)


@pytest.mark.parametrize(
    ("file", "text", "kinds"),
    [
        ("src/attngeo/layers/laplacian.py", "\n_CHANGED = 1\n", {"laplacian"}),
        ("cuda_ext/csrc/cpu/pairwise_kernel.cpp", "\nstatic int changed = 1;\n", {"laplacian", "gaussian"}),
        ("src/attngeo/layers/riemannian.py", "\n_CHANGED = 1\n", {"riemannian"}),
        ("src/attngeo/layers/fiber_feed_forward.py", "\n_CHANGED = 1\n", {"riemannian"}),
        ("src/attngeo/layers/gaussian.py", "\n_CHANGED = 1\n", {"gaussian"}),
    ],
)
def test_an_edit_of_a_kind_retrains_that_kind_only(
    finished_copy: ProjectCopy, file: str, text: str, kinds: set[str]
) -> None:
    append(finished_copy.root / file, text)
    jobs = finished_copy.planned()
    trained = _trainings(jobs)
    assert trained, jobs
    assert {run_id.split("-")[1] for run_id in trained} == kinds, trained
    assert any(job.startswith("tab1") for job in jobs)


def test_timings_of_another_gpu_redraw_what_shows_them_and_nothing_else(finished_copy: ProjectCopy) -> None:
    measured = finished_copy.root / "docs/measured/invented-gpu"
    measured.mkdir(parents=True)
    (measured / "operators.csv").write_text("device_kind,metric,value,n\n")
    (measured / "operators.json").write_text("{}")
    rules = {job.split()[0] for job in finished_copy.planned()}
    assert {"gpu_timings", "fig5", "tab5", "tab9", "claims"} <= rules
    assert rules <= {"gpu_timings", "fig5", "tab5", "tab9", "claims", "index", "macros", "show", "show_page", "all"}


def test_comments_docstrings_and_reverted_edits_rerun_nothing(finished_copy: ProjectCopy) -> None:
    layer = finished_copy.root / "src/attngeo/layers/laplacian.py"
    kernel = finished_copy.root / "cuda_ext/csrc/cpu/pairwise_kernel.cpp"
    original = layer.read_text()
    layer.write_text('"""Another docstring."""\n# a comment\n' + original.split('"""', 2)[2])
    append(kernel, "\n// a comment\n/* and\n   another */\n")
    assert finished_copy.planned() == []
    layer.write_text(original + "\n_CHANGED = 1\n")
    assert finished_copy.planned()
    layer.write_text(original)
    assert finished_copy.planned() == []


def test_a_lost_memory_of_snakemake_reruns_nothing(finished_copy: ProjectCopy) -> None:
    shutil.rmtree(finished_copy.root / ".snakemake")
    assert finished_copy.planned() == []


def test_a_changed_recipe_retrains_its_runs(finished_copy: ProjectCopy) -> None:
    recipe = finished_copy.root / "config/recipes/smoke.yaml"
    recipe.write_text(re.sub(r"(?m)^weight_decay: .*$", "weight_decay: 0.0123", recipe.read_text()))
    assert _trainings(finished_copy.planned()) == {
        "fashion-laplacian-s0",
        "fashion-softmax-s0",
        "fashion-gaussian-s0",
        "fashion-riemannian-s0",
        "fashion-laplacian-lambda2-s0",
        "fashion-laplacian-cg40-s0",
        "fashion-laplacian-all5-s0",
    }


def test_looking_at_another_preset_reruns_nothing(finished_copy: ProjectCopy) -> None:
    assert finished_copy.planned("--config preset=smoke")
    assert finished_copy.planned() == []


def test_another_presets_figures_do_not_stay_among_this_ones(finished_copy: ProjectCopy) -> None:
    sheet = finished_copy.root / "config/smoke/config.yaml"
    sheet.write_text(sheet.read_text() + "figures: [fig2, fig16]\ntables: [tab9]\n")
    shutil.copytree(finished_copy.root / "results/demo", finished_copy.root / "results/smoke")
    finished_copy.run("snakemake --cores 2 all --config preset=smoke")
    shown = {path.name for path in (finished_copy.root / "paper_figures").iterdir()}
    expected = PAGES_SHOWN | {"fig2.pdf", "fig2.png", "fig16.pdf", "fig16.png"}
    expected |= {f"tab9.{ending}" for ending in ("csv", "md", "tex", "caption.txt")}
    assert shown <= expected
    assert {"PRESET", "fig2.pdf", "fig16.png", "tab9.csv"} <= shown
    assert (finished_copy.root / "paper_figures/PRESET").read_text().strip() == "smoke"


def test_a_key_overridden_reruns_what_depends_on_it(finished_copy: ProjectCopy) -> None:
    jobs = finished_copy.planned("--config 'connection_walk={\"windows\": 3}'")
    walked = {job.rpartition("/")[2].removesuffix(".json") for job in jobs if job.startswith("connection_walk")}
    decoders = {f"decoder-6k-s0-step{step}" for step in (0, 2, 6)}
    assert walked == {"minilm-l3"} | decoders, "images are no windows: vision models stay as they are"
    assert not _trainings(jobs)


def test_changed_pins_and_texts_rerun_what_they_feed(finished_copy: ProjectCopy) -> None:
    text = next((finished_copy.root / "src/attngeo/data/text").glob("moby*.txt"))
    append(text, "Call me again.\n")
    assert {job.split()[0] for job in finished_copy.planned()} >= {"connection_walk", "fig10"}
    assert not _trainings(finished_copy.planned())
    edit(finished_copy.root / "src/attngeo/data/sources.yaml", "min_crop_area: 0.5", "min_crop_area: 0.6")
    assert _trainings(finished_copy.planned()) == {"textile-laplacian-s0"}


def test_code_changed_after_planning_is_refused(finished_copy: ProjectCopy) -> None:
    stamp = finished_copy.root / "results/demo/.code/runs/fashion-laplacian-s0.txt"
    append(finished_copy.root / "src/attngeo/layers/laplacian.py", "\n_CHANGED = 1\n")
    planned = stamp.relative_to(finished_copy.root)
    done = finished_copy.run(f"attngeo train fashion-laplacian-s0 --stamp {planned}", check=False)
    assert done.returncode == 2
    assert "changed after the workflow was planned" in done.stderr


def test_reproduce_again_has_nothing_to_do_and_says_where_things_are(finished_copy: ProjectCopy) -> None:
    start = time.monotonic()
    done = finished_copy.run("python tools/reproduce.py --preset demo")
    print(f"reproduce with nothing to do: {time.monotonic() - start:.1f} s")
    assert "Nothing to be done" in done.stdout + done.stderr
    for word in ("paper_figures", "claims.html", "make ui"):
        assert word in done.stdout


def test_switching_presets_redraws_nothing_that_exists(finished_copy: ProjectCopy) -> None:
    shutil.copytree(finished_copy.root / "results/demo", finished_copy.root / "results/smoke")
    jobs = finished_copy.planned("--config preset=smoke")
    assert {job.split()[0] for job in jobs} <= {"show", "show_page", "show_preset", "all"}, jobs


CONFIG, SHEET, RECIPE = "config/demo/config.yaml", "config/demo/runs.tsv", "config/recipes/smoke.yaml"


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        (CONFIG, "connection_walk:", "conection_walk:", [CONFIG, "conection_walk", "'connection_walk'"]),
        (CONFIG, "windows: 2", "windows: none", [CONFIG, "connection_walk.windows"]),
        (CONFIG, "storage: arrays", "storage: zip", ["storage", "'beton'"]),
        (CONFIG, "id: minilm-l3", "id: minilm-l9", ["minilm-l9", "minilm-l6"]),
        (SHEET, "softmaxformer_nano", "softmaxformer_nono", [SHEET, "softmaxformer_nono", "softmaxformer_nano"]),
        (SHEET, "\tsmoke\t", "\tsmok\t", ["smok", "smoke"]),
        (SHEET, "tab1,fig2,fig3", "tab1,fig99", ["fig99", "fig2"]),
        (RECIPE, "batch_size:", "batchsize:", [RECIPE, "batchsize", "batch_size"]),
    ],
)
def test_a_wrong_key_or_value_names_file_key_and_what_is_allowed(
    finished_copy: ProjectCopy, file: str, old: str, new: str, words: list[str]
) -> None:
    edit(finished_copy.root / file, old, new)
    done = finished_copy.run("snakemake -n", check=False)
    assert done.returncode != 0
    message = done.stdout + done.stderr
    assert "Traceback" not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("target", ["tuning", "paper_figures/tuning.csv", "results/demo/tables/tuning.csv"])
def test_a_table_that_nothing_feeds_is_refused_with_a_remedy(fresh: ProjectCopy, target: str) -> None:
    done = fresh.run(f"snakemake -n {target}", check=False)
    assert done.returncode != 0
    assert "preset demo does not make tuning" in done.stdout + done.stderr
    assert "config/demo/runs.tsv" in done.stdout + done.stderr


def test_an_unknown_preset_or_key_names_those_there_are(fresh: ProjectCopy) -> None:
    done = fresh.run("snakemake -n --config preset=dmo", check=False)
    assert done.returncode != 0
    assert "demo" in done.stdout + done.stderr
    done = fresh.run("snakemake -n --config prset=demo", check=False)
    assert done.returncode != 0
    assert "did you mean 'preset'?" in done.stdout + done.stderr


@pytest.mark.parametrize("preset", ["demo", "study", "smoke", "imagenet", "tuning"])
def test_every_preset_is_valid(fresh: ProjectCopy, preset: str) -> None:
    if preset == "imagenet":
        (fresh.root / "datasets/imagenet").mkdir(parents=True)
    assert fresh.planned(f"--config preset={preset}")


def test_another_machine_goes_on_from_the_records_kept_in_git(finished_copy: ProjectCopy) -> None:
    """No run is trained and no model measured again, though the weights stayed behind; an edited kind is."""
    finished_copy.run("python tools/snapshot.py --preset demo --unfinished")
    measured = {path.name for path in (finished_copy.root / "docs/measured/demo/runs").iterdir()}
    so_far = (finished_copy.root / "docs/measured/demo/tables/findings.md").read_text()
    assert (finished_copy.root / "docs/measured/demo/figures/fig2.png").is_file()
    assert so_far.splitlines()[2] in (finished_copy.root / "results/demo/tables/findings.md").read_text()
    for gone in ("results/demo", ".snakemake", "paper_figures"):
        shutil.rmtree(finished_copy.root / gone)
    append(finished_copy.root / "src/attngeo/layers/gaussian.py", "\n_CHANGED = 1\n")
    done = finished_copy.run("python tools/take_over.py --preset demo --cores 2")
    assert "results taken" in done.stdout
    assert "were made by other code" in done.stdout
    (finished_copy.root / "paper_figures").mkdir()
    taken = {path.name for path in (finished_copy.root / "results/demo/runs").iterdir()}
    assert taken == {name for name in measured if "gaussian" not in name}
    again = [path for path in finished_copy.planned() if path.startswith("train ")]
    # What looks into several runs at once needs the weights of all, since one of them is another now.
    assert any("gaussian" in job for job in again)
    walks = [job for job in finished_copy.planned() if job.startswith("connection_walk ")]
    assert not walks
    edit(finished_copy.root / "src/attngeo/layers/gaussian.py", "\n_CHANGED = 1\n", "")
    finished_copy.run("python tools/take_over.py --preset demo --cores 2")
    rules = {job.split()[0] for job in finished_copy.planned()}
    assert not rules & {"train", "train_decoder", "connection_walk", "connection_walk_runs", "trajectories"}, rules
