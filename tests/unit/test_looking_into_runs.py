"""Jobs that look into finished runs, from trained weights to figure, at the smallest size."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from attngeo.config import Preset, load_preset
from attngeo.data.batches import open_batches
from attngeo.data.packing import pack
from attngeo.errors import UserError
from attngeo.files import read_json
from attngeo.jobs import analysis, sources, stamps
from attngeo.jobs import train as train_job
from attngeo.jobs.attention_distance import attention_distance
from attngeo.jobs.attention_maps import attention_maps
from attngeo.jobs.connection_walk_runs import connection_walk_runs
from attngeo.jobs.trained import evenly_spread, load_trained
from attngeo.paper import records
from attngeo.paper.decisions import DECISIONS, Finding
from attngeo.paper.figures import fig01_kernel_profiles, fig08_attention_maps, fig10_transport_isometry
from attngeo.paper.tables import tab06_models, tab07_identities
from attngeo.paper.targets import ATTENTION_DISTANCE, ATTENTION_MAPS, RUN_WALKS
from tests.analyses import tiny_language_models as tiny
from tests.tolerances import WALK_IDENTITY_FLOAT64
from tests.unit.data_support import image_folder
from tests.unit.test_training_evaluate import Silent

ROOT = Path(__file__).parents[2]
CLASSES = {"ant": (9, 5), "bee": (7, 3), "cat": (8, 4)}
RUNS = {"laplacian": "fig1,fig8,fig10", "softmax": "fig1,fig8,fig10", "gaussian": "fig8,fig10", "fiber": "fig8,fig10"}


@pytest.fixture(scope="module")
def preset(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preset]:
    """A preset of one image folder, four trained kinds and a tiny vision transformer."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "src").symlink_to(ROOT / "src")
    (folder / "cuda_ext").symlink_to(ROOT / "cuda_ext")
    (folder / "config/own").mkdir(parents=True)
    (folder / "config/recipes").symlink_to(ROOT / "config/recipes")
    image_folder(folder / "animals", CLASSES)
    tiny.saved(folder / "eye", tiny.config("dinov2"))
    (folder / "config/own/config.yaml").write_text(
        "description: own\nexpected: seconds\ndatasets:\n  animals: {source: animals, storage: folder}\n"
        "vision_models:\n  - {id: eye, source: eye}\n"
        "attention_distance: {images: 3, model: eye, layers: [0, 2], queries: 5}\n"
        "attention_maps: {images: 4, shown: 2}\nconnection_walk: {images: 2, null_draws: 4}\n"
        "figures: [fig1, fig8, fig10]\ntables: []\n"
    )
    lines = [f"{kind}\t{kind}former_nano\tanimals\tsmoke-texture\t0\t{feeds}\n" for kind, feeds in RUNS.items()]
    (folder / "config/own/runs.tsv").write_text("run_id\tmodel\tdataset\trecipe\tseed\tfeeds\n" + "".join(lines))
    preset = load_preset(folder, "own")
    recipe = preset.recipes["smoke-texture"]
    changed = {"smoke-texture": type(recipe)(**{**vars(recipe), "batch_size": 8, "images_per_epoch": 24})}
    preset = preset.model_copy(update={"recipes": changed})
    pack(folder / "animals", preset.results / "data/animals", storage="folder")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_job, "MlflowObserver", Silent)
        for kind in RUNS:
            train_job.train_run(preset, kind, "d", threads=1)
        patch.setattr(analysis, "log_job", lambda *_, **__: None)
        patch.setattr(sources, "photographs", lambda count: torch.randn(count, 3, 28, 28))
        yield preset


def test_spread_images_are_those_at_even_places_whatever_the_batches(preset: Preset) -> None:
    def opened(batch_size: int):
        manifest = preset.results / "data/animals/manifest.json"
        return open_batches(manifest, "val", batch_size=batch_size, seed=0, image_size=32, augment=False)

    whole, labels = next(iter(opened(12)))
    for count, places in ((1, [0]), (3, [0, 6, 11]), (12, range(12)), (99, range(12))):
        for batch_size in (1, 5, 12):
            images, classes = evenly_spread(opened(batch_size), count)
            assert torch.equal(images, whole[list(places)])
            assert torch.equal(classes, labels[list(places)])


def test_the_trained_model_scores_as_its_run_did(preset: Preset) -> None:
    for kind in RUNS:
        model, batches = load_trained(preset, preset.run(kind), batch_size=12)
        images, labels = next(iter(batches))
        top1 = 100 * float((model(images).argmax(1) == labels).double().mean())
        final = read_json(preset.results / f"runs/{kind}/final.json")
        assert top1 == pytest.approx(final["accuracy"])
        assert model.attention_kinds() == tuple(final["attention_of_stages"])


def test_weights_of_another_model_than_the_run_sheet_names_are_refused(preset: Preset) -> None:
    changed = preset.run("softmax").model_copy(update={"attention": "gaussian"})
    with pytest.raises(UserError, match="attngeo train softmax"):
        load_trained(preset, changed)


def test_attention_by_distance_from_models_to_figure_and_ledger(preset: Preset) -> None:
    attention_distance(preset, "d")
    path = preset.results / ATTENTION_DISTANCE
    frame = records.read(path)
    assert list(frame["features"].unique()) == ["eye queries and keys", "eye hidden states", "laplacian", "softmax"]
    rule = frame[frame["metric"] == "middle_tercile_mass_excess"]
    assert list(rule["n"]) == [3] * 4
    assert isinstance(DECISIONS["middle_distance_mass"](frame), Finding)
    layers = frame[frame["features"] == "eye queries and keys"]["layer"].unique()
    assert set(layers) == {"layer 0", "layer 2", "mean"}
    drawn = fig01_kernel_profiles.draw([path])
    assert set(drawn.data["panel"]) == set("abcdef")
    assert "n = 3 images" in drawn.caption


def test_a_layer_that_is_not_there_is_named(preset: Preset) -> None:
    changed = preset.attention_distance.model_copy(update={"layers": (0, 7)})
    with pytest.raises(UserError, match="layers 0 to 2, not 7"):
        attention_distance(preset.model_copy(update={"attention_distance": changed}), "d")


def test_attention_maps_from_runs_to_figure(preset: Preset) -> None:
    attention_maps(preset, "d")
    json, npz = (preset.results / name for name in ATTENTION_MAPS)
    frame = records.read(json)
    with np.load(npz) as arrays:
        assert arrays["animals/images"].shape == (2, 32, 32, 3)
        assert arrays["animals/images"].std() > 10, "pictures, not normalised numbers"
        assert {name for name in arrays if "stage" in name} == {f"{kind}/stage {s}" for kind in RUNS for s in (1, 2)}
        assert np.allclose(arrays["laplacian/stage 1"].sum((1, 2)), 1, atol=1e-5)
    every = frame[(frame["image"] == "all") & (frame["metric"] == "effective_tokens")]
    assert not every.duplicated(["attention", "control", "stage"]).any()
    assert set(every["control"]) == {"trained", "random_init", "uniform"}
    trained, drawn_anew = (
        every[(every["control"] == control) & (every["attention"] == "softmax")]["value"].tolist()
        for control in ("trained", "random_init")
    )
    assert trained != drawn_anew
    drawn = fig08_attention_maps.draw([npz, json])
    assert len(drawn.figure.axes) == 3 * 5  # two images at the first stage, one at the last; image and four kinds
    assert "n = 4 images" in drawn.caption


def test_walks_of_trained_runs_are_exact_and_shown_by_kind(preset: Preset) -> None:
    connection_walk_runs(preset, "d")
    path = preset.results / RUN_WALKS
    frame = records.read(path)
    assert set(frame["model"]) == set(RUNS)
    exact = tab07_identities.tabulate([path]).frame
    assert list(exact["model"]) == [f"{kind} on animals" for kind in ("gaussian", "laplacian", "riemannian", "softmax")]
    assert exact[["single head", "multi head, float64 softmax"]].max(axis=None) <= WALK_IDENTITY_FLOAT64
    table = tab06_models.tabulate([path]).frame
    assert list(table["model"]) == list(exact["model"])
    assert (table["score"] - table["null"]).tolist() == pytest.approx(table["excess"].tolist())
    drawn = fig10_transport_isometry.draw([path])
    assert drawn.figure.axes[0].get_title("left") == "(a) trained here: animals"
    assert "n = 1 runs" in drawn.caption


def test_stamps_hold_the_kinds_that_a_figure_looks_into(preset: Preset) -> None:
    for name, kinds, others in (
        ("attention_distance", ("laplacian", "softmax"), ("riemannian", "gaussian")),
        ("attention_maps", ("laplacian", "softmax", "gaussian", "riemannian"), ("laplacian_exact",)),
        ("connection_walk_runs", ("laplacian", "softmax", "gaussian", "riemannian"), ("laplacian_exact",)),
    ):
        text = str(stamps.current_stamp(preset, name))
        assert all(f"attngeo.layers.{kind}" in text for kind in kinds)
        assert not any(f"attngeo.layers.{kind}" in text for kind in others)
