"""Options of single runs: refused where wrong, part of that run's digest alone, and at work wherever its model is."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from attngeo.config import Preset, RunRow, load_preset
from attngeo.data.packing import pack
from attngeo.errors import UserError
from attngeo.files import read_json
from attngeo.jobs import analysis as analysis_job
from attngeo.jobs import train as train_job
from attngeo.jobs.evaluate import evaluate
from attngeo.jobs.export import export_run
from attngeo.jobs.run_model import build_model, model_options
from attngeo.jobs.solver_benchmark import solver_benchmark
from attngeo.jobs.stamps import stamp_names
from attngeo.models.export import load_exported
from attngeo.models.names import PYRAMID_OPTIONS
from attngeo.models.pyramid import Pyramid
from attngeo.paper import records
from attngeo.run_options import options_text, parse_options
from attngeo.tracking.code_digest import CodeDigest
from tests.unit.data_support import image_folder
from tests.unit.test_training_evaluate import Silent

ROOT = Path(__file__).resolve().parents[2]
HEAD = "run_id\tmodel\tdataset\trecipe\tseed\tfeeds\tattention\toptions\n"
LINE = "{id}\tlaplacianformer_nano\tanimals\tsmoke\t{seed}\t\t{attention}\t{options}\n"
SMALL = "recipe.batch_size=8; recipe.images_per_epoch=24; recipe.epochs=1"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with one image folder."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("src", "cuda_ext"):
        (folder / name).symlink_to(ROOT / name)
    for lock in ROOT.glob("requirements*.lock"):
        shutil.copy2(lock, folder / lock.name)
    (folder / "config/own").mkdir(parents=True)
    (folder / "config/recipes").symlink_to(ROOT / "config/recipes")
    image_folder(folder / "animals", {"ant": (9, 5), "bee": (7, 3), "cat": (8, 4)})
    (folder / "config/own/config.yaml").write_text(
        "description: own\nexpected: seconds\ndatasets:\n  animals: {source: animals, storage: folder}\n"
        "figures: []\ntables: []\nbenchmarks:\n  solver: {seeds: [0], matrices: 2, landmarks: 4, iterations: 3}\n"
    )
    return folder


def sheet(root: Path, *runs: dict[str, Any]) -> Preset:
    """The preset of a sheet with these runs."""
    lines = (LINE.format(**{"id": "r", "seed": 0, "attention": "", "options": "", **run}) for run in runs)
    (root / "config/own/runs.tsv").write_text(HEAD + "".join(lines))
    return load_preset(root, "own")


def row_of(root: Path, options: str, **more: Any) -> RunRow:
    return sheet(root, {"options": options, **more}).runs[0]


def test_pairs_are_yaml_scalars_between_semicolons_or_spaces() -> None:
    found = parse_options(
        " a=1;b=2.5 c=1e-3; d=-2E4;e=true;f=null ;g=1/N;h=none; recipe.lr=3.0e-3;shared_query_key=no; "
    )
    expected = {"a": 1, "b": 2.5, "c": 1e-3, "d": -2e4, "e": True, "f": None, "g": "1/N", "h": "none"}
    assert found == expected | {"recipe.lr": 3e-3, "shared_query_key": False}
    assert [type(value) for value in found.values()][:5] == [int, float, float, float, bool]
    assert parse_options("") == parse_options(" ; ") == {}


def test_the_text_of_options_is_one_whatever_their_order_and_reads_back() -> None:
    options = parse_options("lambda_=2;init=default;recipe.lr=1e-3;recipe.max_eval_images=null;learn_scale=false")
    text = options_text(options)
    assert text == "init=default; lambda_=2; learn_scale=false; recipe.lr=0.001; recipe.max_eval_images=null"
    assert parse_options(text) == options
    assert options_text({}) == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("lambda_", ["run 1", "'lambda_' is not of the form key=value"]),
        ("lambda_=", ["'lambda_=' is not of the form"]),
        ("a.b=1", ["'a.b=1'", "recipe."]),
        ("lambda_=2;lambda_=4", ["'lambda_' is given twice"]),
        ("landmarks=[2,2]", ["'[2,2]' is no plain value"]),
        ("lambda_={", ["'{' is no plain value"]),
        ("lamda_=2", ["run 'r'", "'laplacian' has no option 'lamda_'", "did you mean 'lambda_'", "recipe.KEY"]),
        ("form=soft", ["no option 'form'", "normalization", "init"]),
        ("seed=1", ["'seed' has a column of its own"]),
        ("attention=softmax", ["'attention' has a column of its own"]),
        ("recipe.seed=1", ["'seed' has a column of its own"]),
        ("recipe.lrr=1", ["run 'r'", "'lrr' is unknown", "did you mean 'lr'"]),
        ("recipe.lr=fast", ["run 'r'", "'lr'", "fast"]),
        ("recipe.non_finite=ignore", ["run 'r'", "non_finite", "'stop'", "'record'"]),
        ("recipe.warmup_epochs=99", ["run 'r'", "warmup_epochs", "smaller than epochs"]),
    ],
)
def test_wrong_options_are_refused_with_file_run_key_and_what_is_allowed(
    root: Path, options: str, words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        sheet(root, {"options": options})
    for word in ["config/own/runs.tsv", *words]:
        assert word in str(caught.value)


def test_the_column_may_be_left_out_of_a_line_that_has_none(root: Path) -> None:
    line = "r\tlaplacianformer_nano\tanimals\tsmoke\t0\t"
    (root / "config/own/runs.tsv").write_text(f"{HEAD}{line}\n{line.replace('r', 'q', 1)}\t\n")
    assert [row.options for row in load_preset(root, "own").runs] == [{}, {}]


def test_an_option_need_only_be_one_of_some_stage_and_an_own_class_says_its_own(root: Path) -> None:
    assert row_of(root, "lambda_=2", attention="softmax,laplacian").options == {"lambda_": 2}
    (root / "mine.py").write_text(
        "from attngeo.layers.laplacian import LaplacianAttention\n\n\nclass Mine(LaplacianAttention):\n"
        "    def __init__(self, dim, heads, *, width=1, **options): ...\n"
    )
    assert row_of(root, "width=2;lambda_=2", attention="mine.py:Mine").options == {"width": 2, "lambda_": 2}
    with pytest.raises(UserError, match=r"mine\.py:Mine' has no option 'wide'"):
        row_of(root, "wide=2", attention="mine.py:Mine")


def test_what_a_model_is_made_of_is_said_in_one_place(root: Path) -> None:
    preset = sheet(root, {"options": "lambda_=2;init=default;recipe.image_size=28;recipe.drop_path=0.1"})
    assert model_options(preset, preset.runs[0], 3) == {
        "num_classes": 3,
        "img_size": 28,
        "attention": None,
        "attention_options": {"lambda_": 2},
        "init": "default",
        "drop_path_rate": 0.1,
    }
    recipe = preset.recipe_of(preset.runs[0])
    assert recipe == dataclasses.replace(preset.recipes["smoke"], image_size=28, drop_path=0.1)
    accepted = Pyramid.__init__.__kwdefaults__
    assert set(PYRAMID_OPTIONS) <= set(accepted)


def test_options_change_a_runs_digest_and_that_runs_alone(root: Path) -> None:
    digests = []
    for options in ("", "iterations=5;lambda_=2", "lambda_=2;iterations=5", "iterations=6;lambda_=2", "recipe.lr=1e-3"):
        preset = sheet(root, {"id": "plain"}, {"id": "other", "options": options})
        stamps = dict(stamp_names(preset))
        digests.append([stamps[f"runs/{name}"](CodeDigest(root))["digest"] for name in ("plain", "other")])
    assert len({plain for plain, _ in digests}) == 1
    assert digests[1][1] == digests[2][1], "the order in which options are written is no difference"
    assert len({other for _, other in digests}) == 4


def test_solvers_are_compared_on_runs_without_options_unless_named(root: Path) -> None:
    runs = [
        {"id": "changed", "options": "lambda_=2"},
        {"id": "plain"},
        {"id": "plain-s1", "seed": 1},
        {"id": "apart", "options": "shared_query_key=false; separate_landmarks=true"},
    ]
    preset = sheet(root, *runs)
    assert [row.run_id for row in preset.solver_runs] == ["plain", "plain-s1"]
    chosen = load_preset(root, "own", {"benchmarks": {"solver": {"runs": ["changed"]}}})
    assert [row.run_id for row in chosen.solver_runs] == ["changed"]
    with pytest.raises(UserError, match="'apart' is no run with laplacian attention and symmetric"):
        load_preset(root, "own", {"benchmarks": {"solver": {"runs": ["apart"]}}})
    assert sheet(root, runs[0]).solver_runs == []


def test_a_run_with_options_is_trained_compared_evaluated_and_exported_as_what_it_is(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    class Told(Silent):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            given.append(named["tags"])

    monkeypatch.setattr(train_job, "MlflowObserver", Told)
    monkeypatch.setattr(analysis_job, "log_job", lambda *_, **__: None)
    options = f"solver=conjugate_gradient; iterations=3; lambda_=2; init=default; shared_query_key=false; {SMALL}"
    sheet(root, {"id": "plain", "options": SMALL}, {"options": options})
    preset = load_preset(root, "own", {"benchmarks": {"solver": {"runs": ["r"]}}})
    pack(root / "animals", preset.results / "data/animals", storage="folder")
    final = train_job.train_run(preset, "r", "d", threads=1)
    assert final["options"] == given[0]["attngeo.options"] == options_text(parse_options(options))
    assert final["model_options"]["attention_options"]["lambda_"] == 2
    assert final["recipe_values"]["batch_size"] == 8
    assert final["recipe"] == "smoke"
    assert "conjugate_gradient_inverse" in final["ran"]
    assert final["solver_converged"] is False, "three iterations are too few, and that is said"
    assert read_json(preset.results / "runs/r/final.json")["options"] == final["options"]
    plain = timm.create_model("laplacianformer_nano", num_classes=3)
    assert final["parameters"] != sum(p.numel() for p in plain.parameters())

    solver_benchmark(preset, "d")
    trained = records.read(preset.results / "benchmarks/solver.json").query("matrix == 'trained'")
    assert len(trained)

    ((_, _, result),) = evaluate(preset, "r", None, out=tmp_path)
    assert result.top1 == final["accuracy"]
    model = load_exported(export_run(preset, "r", tmp_path / "exported"))
    attention = model.stages[0].blocks[0].attention
    assert (attention.lambda_, attention.solver, attention.iterations) == (2, "conjugate_gradient", 3)
    assert model.init == "default"


OPTIONS = sorted({row.options_text for name in ("demo", "study", "smoke") for row in load_preset(ROOT, name).runs})


@pytest.mark.parametrize("options", OPTIONS)
def test_every_ablation_of_the_presets_makes_a_model_that_learns(root: Path, options: str) -> None:
    line = LINE.format(id="r", seed=0, attention="", options=options).replace("_nano", "_micro")
    (root / "config/own/runs.tsv").write_text(HEAD + line)
    preset = load_preset(root, "own")
    torch.manual_seed(0)
    model = build_model(preset, preset.runs[0], 3)
    images = torch.randn(6, 3, 32, 32)
    torch.nn.functional.cross_entropy(model(images), torch.arange(6) % 3).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_the_ablations_at_the_papers_size_make_their_models(root: Path) -> None:
    preset = load_preset(ROOT, "imagenet")
    for row in preset.runs:
        if row.options:
            assert build_model(preset, row, 3).attention_kinds() == ("laplacian",) * 8


def test_options_that_exclude_each_other_end_the_run_before_it_begins(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_job, "MlflowObserver", Silent)
    preset = sheet(root, {"id": "x", "options": f"solver=cholesky; iterations=5; {SMALL}"})
    pack(root / "animals", preset.results / "data/animals", storage="folder")
    with pytest.raises(UserError, match="solver 'cholesky' has no iterations"):
        train_job.train_run(preset, "x", "d", threads=1)
    assert not (preset.results / "runs/x").exists()
