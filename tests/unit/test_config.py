"""A preset is either valid or refused with file, key and what is allowed."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest

from attngeo.config import LanguageModelConfig, load_preset, preset_names, write_schemas
from attngeo.errors import UserError
from attngeo.jobs.stamps import stamp_names
from attngeo.layers.registry import ATTENTION_KINDS
from attngeo.models.names import FAMILIES
from attngeo.paper.targets import FIGURES
from attngeo.tracking.code_digest import CodeDigest
from attngeo.training.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "config", tmp_path / "config")
    return tmp_path


def test_every_preset_loads_with_its_recipes() -> None:
    assert {"demo", "study", "smoke", "imagenet", "tuning"} <= set(preset_names(ROOT))
    for name in preset_names(ROOT):
        preset = load_preset(ROOT, name)
        assert preset.name == name
        assert all(isinstance(preset.recipes[row.recipe], Recipe) for row in preset.runs)


def test_overrides_replace_single_keys() -> None:
    preset = load_preset(ROOT, "demo", {"connection_walk": {"windows": 3}})
    assert preset.connection_walk.windows == 3
    assert preset.connection_walk.window_tokens == load_preset(ROOT, "demo").connection_walk.window_tokens


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"colour": 1}, ["config/demo/config.yaml", "colour", "datasets"]),
        ({"prset": "demo"}, ["'prset'", "did you mean 'preset'?", "language_models"]),
        ({"connection_walk": {"window": 3}}, ["connection_walk.window", "windows"]),
        ({"connection_walk": {"windows": 0}}, ["connection_walk.windows", "0"]),
        ({"resources": {"train": {"device": "tpu"}}}, ["resources.train.device", "tpu", "cuda"]),
        ({"resources": {"train": {"device": "cuda", "processes": 3}}}, ["resources.train", "set gpu: 3"]),
        ({"resources": {"train": {"device": "cuda"}}}, ["resources.train", "gpu is 0", "set gpu: 1"]),
        ({"resources": {"train": {"device": "cuda", "gpu": 4}}}, ["gpu is 4", "set gpu: 1, or processes: 4"]),
        ({"datasets": {"a b": {"source": "x"}}}, ["a b", "file name"]),
        ({"datasets": {"textile": {"hold_out": 0.5}}}, ["datasets.textile.hold_out", "0.5"]),
        ({"datasets": {"fashion": {"source": "embedded"}}}, ["fashion", "fashion-mnist"]),
        ({"figures": ["fig7", "fig70"]}, ["fig70", "fig7"]),
        ({"language_models": [{"id": "x"}]}, ["language_models.0.source", "missing"]),
        (
            {"language_models": [{"id": "minilm-l6", "source": "embedded", "optional": True}]},
            ["language_models.0", "no folder that may be away"],
        ),
        ({"injectivity": {"model": "minilm-l6"}}, ["injectivity.model", "dinov2-s"]),
        ({"attention_distance": {"model": "minilm-l6"}}, ["attention_distance.model", "dinov2-s", "fig1"]),
        ({"attention_distance": {"layers": []}}, ["attention_distance.layers", "at least 1"]),
        ({"benchmarks": {"solver": {"landmarks": 15}}}, ["benchmarks.solver.landmarks", "square"]),
        ({"benchmarks": {"solver": {"runs": ["fashion-softmax-s0"]}}}, ["fashion-softmax-s0", "fashion-laplacian-s0"]),
        ({"benchmarks": {"tokens": {"tokens": [64, 120]}}}, ["benchmarks.tokens.tokens", "square", "120"]),
        ({"benchmarks": {"tokens": {"tokens": [64, 64]}}}, ["benchmarks.tokens.tokens", "twice"]),
        ({"benchmarks": {"tokens": {"kinds": ["softmax_fusd"]}}}, ["benchmarks.tokens.kinds", "softmax_fused"]),
        ({"benchmarks": {"training_step": {"model_size": "mikro"}}}, ["benchmarks.training_step.model_size", "micro"]),
        ({"benchmarks": {"operators": {"sizes": [[1, 2, 3]]}}}, ["benchmarks.operators.sizes.0.3", "missing"]),
        ({"vision_models": [], "language_models": [], "figures": ["fig9"]}, ["fig9", "nothing to show"]),
    ],
)
def test_a_wrong_key_or_value_is_explained(overrides: dict[str, object], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load_preset(ROOT, "demo", overrides)
    for word in words:
        assert word in str(caught.value)


def test_solvers_are_compared_on_every_seed_of_the_first_laplacian_run() -> None:
    names = [row.run_id for row in load_preset(ROOT, "demo").solver_runs]
    assert names == ["fashion-laplacian-s0", "fashion-laplacian-s1", "fashion-laplacian-s2"]
    chosen = load_preset(ROOT, "demo", {"benchmarks": {"solver": {"runs": ["textile-laplacian-s0"]}}})
    assert [row.run_id for row in chosen.solver_runs] == ["textile-laplacian-s0"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("r\tlaplacianformer_micro\tfashion-mnist\tmicro\t0", ["run 1", "columns"]),
        ("r\tlaplacianformer_micro\tfashion-mnist\tmicro\tzero\ttab1", ["run 1", "seed", "zero"]),
        ("../r\tlaplacianformer_micro\tfashion-mnist\tmicro\t0\ttab1", ["run_id", "file name"]),
        ("r\tlaplacianformer\tfashion-mnist\tmicro\t0\ttab1", ["laplacianformer", "FAMILY_SIZE"]),
        ("r\tlaplacianformer_micro\tcifar\tmicro\t0\ttab1", ["cifar", "fashion-mnist"]),
        ("r\tlaplacianformer_micro\tfashion-mnist\tmacro\t0\ttab1", ["macro", "micro"]),
        ("r\tlaplacianformer_micro\tfashion-mnist\tmicro\t0\ttab17", ["tab17", "tab1"]),
    ],
)
def test_a_wrong_run_is_explained(root: Path, line: str, words: list[str]) -> None:
    (root / "config/demo/runs.tsv").write_text(f"run_id\tmodel\tdataset\trecipe\tseed\tfeeds\n{line}\n")
    with pytest.raises(UserError) as caught:
        load_preset(root, "demo")
    for word in ["config/", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["", "123 4", "my 'x y", "embedded", "recipes", "../demo", "demoo"])
def test_a_preset_name_is_checked(root: Path, name: str) -> None:
    (root / "config" / name / "x").mkdir(parents=True, exist_ok=True)
    with pytest.raises(UserError):
        load_preset(root, name)


def test_text_that_is_not_utf8_is_named(root: Path) -> None:
    sheet = root / "config/demo/runs.tsv"
    sheet.write_bytes(sheet.read_bytes() + "é".encode("latin-1"))
    with pytest.raises(UserError, match=r"runs\.tsv"):
        load_preset(root, "demo")


def test_what_no_run_feeds_is_left_out_unless_the_preset_lists_it(root: Path) -> None:
    assert "fig2" in load_preset(root, "demo").figures
    assert "tuning" not in load_preset(root, "demo").tables
    sheet = root / "config/demo/runs.tsv"
    sheet.write_text(sheet.read_text().replace("tab1,fig2,fig3", "tab1,fig3"))
    preset = load_preset(root, "demo")
    assert "fig2" not in preset.figures
    assert {"fig3", "fig7"} < set(preset.figures)
    with pytest.raises(UserError, match="nothing to show in fig2"):
        load_preset(root, "demo", {"figures": ["fig2", "fig3"]})


def test_every_attention_kind_is_tuned_over_the_same_rates() -> None:
    lines = (ROOT / "config/tuning/runs.tsv").read_text().splitlines()
    rates: dict[str, set[str]] = {}
    for row in csv.DictReader([line for line in lines if not line.startswith("#")], delimiter="\t"):
        if row["dataset"] == "fashion-mnist":
            kind = row["attention"] or FAMILIES[row["model"].removesuffix("_micro")]
            rates.setdefault(kind, set()).add(row["options"])
    assert rates.keys() == ATTENTION_KINDS.keys()
    common = {f"recipe.lr={rate}" for rate in ("1e-3", "3e-3", "1e-2")}
    assert all(common <= tried for tried in rates.values())


def test_what_tunes_needs_images_that_are_held_out(root: Path) -> None:
    sheet = root / "config/smoke/runs.tsv"
    sheet.write_text(sheet.read_text().replace("tab1,fig2,fig3", "tuning"))
    with pytest.raises(UserError, match=r"'fashion-mnist' holds no training images out(.|\n)*hold_out"):
        load_preset(root, "smoke")
    held = {name: {"hold_out": 0.1} for name in ("fashion-mnist", "textile")}
    preset = load_preset(root, "smoke", {"datasets": held})
    assert "tuning" in preset.tables
    assert {"tab1", "fig2", "fig3"}.isdisjoint((*preset.tables, *preset.figures))


@pytest.mark.parametrize(
    ("run", "feeds", "words"),
    [
        ("fashion-riemannian-s0", "fig1", "fig1 cannot show attention 'riemannian'"),
        ("fashion-softmax-s1", "fig8", "'fashion-softmax-s0' and 'fashion-softmax-s1' of one data set"),
        ("fashion-laplacian-init-s0", "fig10", "and 'fashion-laplacian-init-s0' .* differ in more than their seed"),
    ],
)
def test_runs_that_a_figure_cannot_look_into_are_refused(root: Path, run: str, feeds: str, words: str) -> None:
    sheet = root / "config/demo/runs.tsv"
    lines = sheet.read_text().splitlines()
    lines = [re.sub(r"\ttab(\d)", rf"\t{feeds},tab\1", line) if line.startswith(f"{run}\t") else line for line in lines]
    sheet.write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=words):
        load_preset(root, "demo")


def test_a_run_twice_is_refused(root: Path) -> None:
    sheet = root / "config/demo/runs.tsv"
    sheet.write_text(sheet.read_text() + sheet.read_text().splitlines()[-1] + "\n")
    with pytest.raises(UserError, match="appears 2 times"):
        load_preset(root, "demo")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a\tsoftmaxformer_micro\tfashion-mnist\tmicro\t0\ttab1\t", "are the same training, and both feed tab1"),
        (
            "a\tsoftmaxformer_micro\tfashion-mnist\tmicro\t0\tfig3\trecipe.lr=0.001",
            "are the same training, but for its recipe's options, and both feed fig3",
        ),
        (
            "a\tlaplacianformer_micro\tfashion-mnist\tmicro\t7\ttab2\tlambda_=2",
            "it feeds tab2, where it is compared .* none of laplacianformer_micro with seed 7 feeds that",
        ),
    ],
)
def test_runs_that_a_table_cannot_compare_are_refused_before_they_are_trained(
    root: Path, line: str, words: str
) -> None:
    sheet = root / "config/demo/runs.tsv"
    sheet.write_text(sheet.read_text().rstrip("\n") + f"\n{line}\n")
    with pytest.raises(UserError, match=words):
        load_preset(root, "demo")


def test_an_own_attention_file_must_exist(root: Path) -> None:
    sheet = root / "config/demo/runs.tsv"
    sheet.write_text(
        "run_id\tmodel\tdataset\trecipe\tseed\tfeeds\tattention\n"
        "r\tlaplacianformer_micro\tfashion-mnist\tmicro\t0\ttab1,fig2,fig3,fig8,tab2,tab3,tab4\tmine.py:Mine\n"
    )
    with pytest.raises(UserError, match=r"mine\.py"):
        load_preset(root, "demo")
    for text, words in (("", "no class 'Mine'"), ("class :", "line 1")):
        (root / "mine.py").write_text(text)
        with pytest.raises(UserError, match=words):
            load_preset(root, "demo")
    (root / "mine.py").write_text("class Mine: ...")
    assert load_preset(root, "demo").runs[0].attention_kind == "mine.py:Mine"


def test_a_run_may_name_a_kind_a_stage_and_its_code_is_that_of_all_of_them(root: Path) -> None:
    sheet = root / "config/demo/runs.tsv"
    line = "r\tlaplacianformer_micro\tfashion-mnist\tmicro\t0\ttab1,fig2,fig3,fig8,tab2,tab3,tab4\t{}\n"
    head = "run_id\tmodel\tdataset\trecipe\tseed\tfeeds\tattention\n"
    for attention, words in (("softmax,cosine,softmax", "'cosine'"), ("softmax,gaussian", "2 kinds for 3 stages")):
        sheet.write_text(head + line.format(attention))
        with pytest.raises(UserError, match=f"(?s)runs.tsv, run 'r'.*{words}"):
            load_preset(root, "demo")
    sheet.write_text(head + line.format("linear_injective,gaussian,mine.py:Mine"))
    (root / "mine.py").write_text("class Mine: ...")
    preset = load_preset(root, "demo")
    assert preset.runs[0].attention_kind == "linear_injective,gaussian,mine.py:Mine"
    shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__"))
    stamp = json.dumps(dict(stamp_names(preset))["runs/r"](CodeDigest(root)))
    assert all(part in stamp for part in ("layers.linear_injective", "layers.gaussian", "mine.py"))
    assert "layers.laplacian" not in stamp


@pytest.mark.parametrize("content", ["a: [", "- 1", "", "a: 1\na: {"])
def test_a_file_that_is_not_a_mapping_is_refused(root: Path, content: str) -> None:
    (root / "config/demo/config.yaml").write_text(content)
    with pytest.raises(UserError, match=r"config/demo/config\.yaml"):
        load_preset(root, "demo")


@pytest.mark.parametrize(
    ("source", "away"), [("hub", False), ("hub:a/b", False), ("hubert/base", True), ("embedded_models/x", True)]
)
def test_only_a_folder_may_be_away(source: str, away: bool) -> None:
    if away:
        assert LanguageModelConfig(id="x", source=source, optional=True).is_away(ROOT)
    else:
        with pytest.raises(ValueError, match="is no folder that may be away"):
            LanguageModelConfig(id="x", source=source, optional=True)


def test_an_optional_model_is_measured_once_its_folder_is_there(root: Path) -> None:
    name = "larger@gguf-q4_k_m"
    models = [{"id": name, "source": f"models/{name}", "optional": True}, {"id": "minilm-l6", "source": "embedded"}]
    for place, there in ((root / "models", ()), (root / "models" / name, (name,))):
        place.mkdir(parents=True)
        if there:
            (place / "config.json").write_text("{}")
        preset = load_preset(root, "demo", {"language_models": models})
        assert tuple(model.id for model in preset.language_models) == (*there, "minilm-l6")
        assert (f"analyses/connection_walk/{name}.json" in FIGURES["fig11"].inputs(preset)) is bool(there)


def test_the_committed_schemas_are_those_of_the_models(tmp_path: Path) -> None:
    for path in write_schemas(tmp_path):
        committed = ROOT / "workflow/schemas" / path.name
        assert json.loads(committed.read_text()) == json.loads(path.read_text())
