"""Evaluation: its numbers are those of their definitions, and of the training; other models and sizes are measured."""

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch

from attngeo.config import Preset, load_preset
from attngeo.data import packing
from attngeo.data.batches import open_batches
from attngeo.data.packing import pack
from attngeo.errors import UserError
from attngeo.evaluation.accuracy import Tally
from attngeo.files import read_json
from attngeo.jobs import train as train_job
from attngeo.jobs.evaluate import evaluate
from attngeo.jobs.export import export_run
from attngeo.models.export import load_exported
from attngeo.paper import records
from attngeo.tracking.provenance import device_name, provenance
from attngeo.training.seeding import generator
from tests.tolerances import EVALUATION_FLOAT64, EVALUATION_RENORMALISED
from tests.unit.data_support import image_folder

ROOT = Path(__file__).parents[2]
CLASSES = {"ant": (9, 5), "bee": (7, 3), "cat": (8, 4)}


def random_logits(n: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = generator(5, "logits", n)
    return 2 * torch.randn(n, classes, generator=draws), torch.randint(classes, (n,), generator=draws)


def test_every_number_is_that_of_its_definition() -> None:
    n, classes, bins = 101, 7, 4
    logits, labels = random_logits(n, classes)
    tally = Tally(classes, bins)
    for start in (0, 1, 60):
        stop = {0: 1, 1: 60, 60: n}[start]
        tally.add(logits[start:stop], labels[start:stop])
    tally.add(logits[:0], labels[:0])
    result = tally.result()
    p = np.exp(logits.double().numpy())
    p /= p.sum(1, keepdims=True)
    y = labels.numpy()
    assert result.n == n
    assert result.top1 == pytest.approx(100 * np.mean(p.argmax(1) == y))
    assert result.top5 == pytest.approx(100 * np.mean([y[i] in np.argsort(p[i])[-5:] for i in range(n)]))
    assert result.nll == pytest.approx(-np.mean(np.log(p[range(n), y])), rel=EVALUATION_FLOAT64)
    assert result.brier == pytest.approx(np.mean(np.sum((p - np.eye(classes)[y]) ** 2, 1)), rel=EVALUATION_FLOAT64)
    ece = 0.0
    for low in np.arange(bins) / bins:
        inside = (p.max(1) > low) & (p.max(1) <= low + 1 / bins)
        if inside.any():
            ece += inside.mean() * abs(np.mean(p.argmax(1)[inside] == y[inside]) - p.max(1)[inside].mean())
    assert result.ece == pytest.approx(ece, rel=EVALUATION_FLOAT64)
    assert sum(part.n for part in result.bins) == n
    for true in range(classes):
        for taken in range(classes):
            assert result.confusion[true, taken] == np.sum((y == true) & (p.argmax(1) == taken))


def test_the_top_five_need_five_classes() -> None:
    for classes, expected in ((4, None), (5, 100.0)):
        tally = Tally(classes)
        tally.add(*random_logits(11, classes))
        assert tally.result().top5 == expected


def test_a_sure_and_right_model_is_calibrated_and_one_that_knows_nothing_is_too() -> None:
    labels = torch.arange(6) % 3
    sure, ignorant = Tally(3), Tally(3)
    sure.add(1e3 * torch.eye(3)[labels], labels)
    ignorant.add(torch.zeros(6, 3), labels)
    for result, brier in ((sure.result(), 0.0), (ignorant.result(), 2 / 3)):
        assert result.ece == pytest.approx(0, abs=EVALUATION_FLOAT64)
        assert result.brier == pytest.approx(brier, abs=EVALUATION_FLOAT64)
    assert ignorant.result().nll == pytest.approx(math.log(3))


def test_labels_beyond_the_classes_and_empty_sets_are_refused() -> None:
    with pytest.raises(UserError, match="tells 3 classes apart, and the images have 4"):
        Tally(4).add(*random_logits(5, 3))
    with pytest.raises(UserError, match="no image"):
        Tally(3).result()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with one image folder and one run."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "src").symlink_to(ROOT / "src")
    (folder / "cuda_ext").symlink_to(ROOT / "cuda_ext")
    (folder / "config").mkdir()
    (folder / "config/recipes").symlink_to(ROOT / "config/recipes")
    (folder / "config/own").mkdir()
    image_folder(folder / "animals", CLASSES)
    image_folder(folder / "others", {"ant": (2, 1), "dog": (2, 1), "elk": (2, 1)})
    (folder / "config/own/config.yaml").write_text(
        "description: own\nexpected: seconds\ndatasets:\n  animals: {source: animals, storage: folder}\n"
        "figures: []\ntables: []\n"
    )
    (folder / "config/own/runs.tsv").write_text(
        "run_id\tmodel\tdataset\trecipe\tseed\tfeeds\nr\tsoftmaxformer_nano\tanimals\tsmoke-texture\t0\t\n"
    )
    return folder


class Silent:
    """In place of MLflow."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def on_start(self, *_: Any) -> None: ...
    def on_epoch(self, *_: Any) -> None: ...
    def on_end(self, *_: Any) -> None: ...
    def on_stop(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def preset(root: Path) -> Preset:
    """Its preset, packed and trained."""
    preset = load_preset(root, "own")
    recipe = preset.recipes["smoke-texture"]
    changed = {"smoke-texture": type(recipe)(**{**vars(recipe), "batch_size": 8, "images_per_epoch": 24})}
    preset = preset.model_copy(update={"recipes": changed})
    pack(root / "animals", preset.results / "data/animals", storage="folder")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_job, "MlflowObserver", Silent)
        train_job.train_run(preset, "r", "d", threads=1)
    return preset


def frame_of(path: Path) -> dict[str, float]:
    frame = records.read(path)
    return dict(zip(frame["metric"], frame["value"], strict=True))


def test_a_run_scores_what_its_training_said_and_can_be_scored_at_another_size(preset: Preset) -> None:
    size = preset.recipes["smoke-texture"].image_size
    final = records.read_json(preset.results / "runs/r/final.json")
    (path, _, result), (other, pixels, _) = evaluate(preset, "r", None, sizes=(size, size + 5), batch_size=5)
    assert (result.top1, result.n) == (final["accuracy"], 12)
    assert result.nll == pytest.approx(final["loss"], rel=EVALUATION_RENORMALISED)
    assert pixels == size + 5
    assert path == preset.results / f"runs/r/evaluations/animals-val-{size}.json"
    assert frame_of(other)["top1"] == pytest.approx(100 / 12 * round(frame_of(other)["top1"] * 12 / 100))
    with path.with_suffix(".confusion.csv").open() as stream:
        table = list(csv.reader(stream))
    assert table[0] == ["true class", *CLASSES]
    assert [sum(map(int, row[1:])) for row in table[1:]] == [5, 3, 4]
    settings = records.read_file(path).provenance["settings"]
    assert (settings["bins"], settings["autocast"], settings["classes_checked"]) == (15, "none", True)


def test_an_image_folder_is_evaluated_whole_by_the_runs_own_normalisation(preset: Preset, root: Path) -> None:
    """Its mean and deviation differ from the training's, which the model still must get."""
    val = root / "animals/val"
    (_, _, packed), (_, _, listed) = (
        evaluate(preset, str(preset.results / "runs/r"), data, out=root / "out")[0] for data in (None, str(val))
    )
    assert listed.n == 12
    elsewhere = preset.model_copy(update={"name": "demo"})
    ((path, _, _),) = evaluate(elsewhere, str(preset.results / "runs/r"), str(val), out=root / "other")
    assert records.read_file(path).provenance["preset"] == preset.name, "the preset that it was trained in"
    assert torch.equal(listed.confusion, packed.confusion)
    assert listed.nll == pytest.approx(packed.nll, rel=EVALUATION_RENORMALISED)
    assert (root / "out/r-val-all-32.json").is_file()


@pytest.mark.parametrize("split", ["train", "all"])
def test_every_image_of_a_split_counts_once(preset: Preset, root: Path, split: str) -> None:
    ((_, _, result),) = evaluate(preset, "r", "animals", split=split, batch_size=7, out=root / "out")
    expected = [t + (v if split == "all" else 0) for t, v in CLASSES.values()]
    assert result.confusion.sum(1).tolist() == expected


@pytest.mark.parametrize("saved_as", ["state_dict.pth", "training.pth", "weights.safetensors"])
def test_a_timm_checkpoint_is_evaluated_at_any_size(preset: Preset, root: Path, saved_as: str) -> None:
    torch.manual_seed(3)
    model = timm.create_model("test_vit", num_classes=3).eval()
    path = root / "checkpoints" / saved_as
    path.parent.mkdir(exist_ok=True)
    if saved_as.endswith("safetensors"):
        safetensors.torch.save_file(model.state_dict(), path)
    else:
        torch.save(model.state_dict() if saved_as[0] == "s" else {"state_dict": model.state_dict(), "epoch": 3}, path)
    found = evaluate(preset, str(path), str(root / "animals"), model="test_vit", sizes=(160, 64), bins=3)
    assert [size for _, size, _ in found] == [160, 64]
    assert found[0][0] == path.parent / f"{path.stem}-animals-val-160.json"
    settings = records.read_file(found[0][0]).provenance["settings"]
    config = timm.get_pretrained_cfg("test_vit")
    assert (settings["mean"], settings["std"]) == (list(config.mean), list(config.std))
    assert {entry["loader"] for entry in settings["images"]} == {"torch"}
    assert all(result.n == 12 and result.top5 is None for _, _, result in found)
    assert found[0][2].nll == pytest.approx(evaluated_by_hand(model, root), rel=EVALUATION_RENORMALISED)


def evaluated_by_hand(model: torch.nn.Module, root: Path) -> float:
    """Negative log-likelihood with pixels normalised by timm's own numbers."""
    packed = root / "results/own/data/animals/manifest.json"
    batches = open_batches(packed, "val", batch_size=12, seed=0, image_size=160, augment=False)
    batches.mean, batches.std = (
        torch.tensor(getattr(timm.get_pretrained_cfg("test_vit"), key)) for key in ("mean", "std")
    )
    ((images, labels),) = batches
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(model(images), labels))


@pytest.mark.parametrize(
    ("target", "options", "named"),
    [
        ("absent", {}, "no run 'absent'"),
        ("absent.pth", {"model": "test_vit"}, "there is no file"),
        ("absent.pth", {"model": "test_vitt"}, "timm knows no model"),
        ("config/own/config.yaml", {}, "does not say which model"),
        ("config/own/config.yaml", {"model": "test_vit"}, "is no checkpoint"),
        ("results/own/runs/r/weights.safetensors", {"model": "test_vit"}, "does not hold weights of test_vit"),
        ("r", {"data": "nowhere"}, "neither a folder nor a dataset"),
        ("r", {"split": "test"}, "no split 'test'"),
        ("r", {"autocast": "float16"}, "needs a GPU"),
        ("r", {"data": "others"}, "has not the classes"),
    ],
)
def test_what_cannot_be_evaluated_is_named(
    preset: Preset, root: Path, monkeypatch: pytest.MonkeyPatch, target: str, options: dict[str, Any], named: str
) -> None:
    monkeypatch.chdir(root)
    data = options.pop("data", "animals")
    with pytest.raises(UserError, match=named):
        evaluate(preset, target, data, **options)


def test_a_run_is_exported_with_its_classes_and_normalisation(preset: Preset, tmp_path: Path) -> None:
    folder = export_run(preset, "r", tmp_path / "out")
    config = read_json(folder / "config.json")
    assert config["classes"] == list(CLASSES)
    assert len(config["normalisation"]["mean"]) == 3
    weights = safetensors.torch.load_file(preset.results / "runs/r/weights.safetensors")
    exported = load_exported(folder).state_dict()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)


@pytest.mark.parametrize(("split", "checked"), [(None, 12 + 3 * 3), ("train", 24 + 3 * 3), ("all", 36)])
def test_of_an_image_folder_only_the_split_that_is_evaluated_is_checked_whole(
    preset: Preset, root: Path, monkeypatch: pytest.MonkeyPatch, split: str | None, checked: int
) -> None:
    read: list[str] = []
    examined = packing._check_image

    def counted(path: str, max_resolution: int) -> packing.Outcome:
        read.append(path)
        return examined(path, max_resolution)

    monkeypatch.setattr(packing, "_check_image", counted)
    ((_, _, result),) = evaluate(preset, "r", str(root / "animals"), split=split, out=root / "out")
    assert len(read) == checked
    ((_, _, packed),) = evaluate(preset, "r", "animals", split=split, out=root / "out")
    assert torch.equal(result.confusion, packed.confusion)
    assert result.nll == pytest.approx(packed.nll, rel=EVALUATION_RENORMALISED)


def test_several_workers_check_an_image_folder(preset: Preset, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    checking = packing.check_images

    def watched(root: Path, files: Any, options: packing.PackOptions) -> Any:
        asked.append(options.workers)
        return checking(root, files, options)

    monkeypatch.setattr(packing, "check_images", watched)
    ((_, _, result),) = evaluate(preset, "r", str(root / "animals"), workers=2, out=root / "out")
    assert (result.n, set(asked)) == (12, {2})


def test_a_folder_that_lacks_a_split_is_refused_by_its_own_name(preset: Preset, tmp_path: Path) -> None:
    (tmp_path / "val/ant").mkdir(parents=True)
    with pytest.raises(UserError, match=f"{tmp_path} has val/ but no train/"):
        evaluate(preset, "r", str(tmp_path))


def test_a_record_names_the_device_that_it_was_measured_on(
    preset: Preset, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((path, _, _),) = evaluate(preset, "r", "animals", out=root / "out")
    origin = records.read_file(path).provenance
    assert origin["device"].startswith("cpu ")
    assert origin["settings"]["device"] == "cpu"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert provenance("d", device=device_name("cuda"))["device"] == "cuda NVIDIA H200"
