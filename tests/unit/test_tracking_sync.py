"""Files come first: what a server missed is sent later, once, and a new store gets the same."""

import json
import math
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from typer.testing import CliRunner

from attngeo.cli import app
from attngeo.errors import UserError
from attngeo.files import json_line, write_json
from attngeo.tracking import journal
from attngeo.tracking.mlflow_run import MlflowObserver, init, log_job
from attngeo.tracking.mlflow_store import client
from attngeo.tracking.processes import this_process
from attngeo.tracking.sync import presets_with_results, sync
from tests.mlflow_server import free_port, serving

RECIPE = {"epochs": 3, "lr": 0.1, "image_size": 8}


def info(run_id: str, seed: int) -> dict[str, Any]:
    same = {"preset": "smoke", "model": "tiny", "attention": "softmax", "dataset": "made", "recipe": "short"}
    return {"digest": "d1", "run_id": run_id, **same, "model_options": {"num_classes": 2}, "seed": seed}


class Training:
    """Writes the files that a training writes, and tells its observer when a training does."""

    def __init__(self, root: Path, run_id: str, seed: int) -> None:
        self.root, self.info = root, info(run_id, seed)
        self.folder = root / "results/smoke/runs" / run_id
        self.folder.mkdir(parents=True)
        self.scratch = root / f"results/smoke/.scratch/{run_id}-d1"
        self.scratch.mkdir(parents=True)
        tags = {"attngeo.kind": "training", "attngeo.preset": "smoke", "attngeo.code_digest": "d1"}
        tags["attngeo.seed"] = str(seed)
        self.observer = MlflowObserver(root, "LaplacianFormer", run_id, tags, self.scratch)
        self.history: list[dict[str, Any]] = []
        write_json(
            root / "results/smoke/data/made/manifest.json",
            {"storage": "arrays", "train": {"n": 9, "sha256": "a" * 64}, "val": {"n": 4, "sha256": "b" * 64}},
        )

    def start(self) -> None:
        self.observer.on_start({**RECIPE, "threads": 1, "device": "cpu", **self.info}, resumed=False)

    def epoch(self, loss: float) -> None:
        number = len(self.history) + 1
        self.history.append({"epoch": number, "step": 7 * number, "train_loss": loss, "wall_s": 2.0 * number})
        (self.folder / "metrics.jsonl").write_text("".join(json_line(line) + "\n" for line in self.history))
        self.observer.on_epoch(self.history[-1])

    def end(self, accuracy: float) -> None:
        safetensors.numpy.save_file({"w": np.ones(5, np.float32)}, self.folder / "weights.safetensors")
        result = {"status": "FINISHED", "accuracy": accuracy, "wall_s": 6.0, "epochs": 3, "threads": 1, "device": "x"}
        final = {**self.info, "recipe_values": RECIPE, **result, "seed": self.info["seed"]}
        write_json(self.folder / "final.json", final)
        self.observer.on_end(final)
        for path in sorted(self.scratch.iterdir()):
            path.unlink()
        self.scratch.rmdir()

    def whole(self, accuracy: float) -> "Training":
        self.start()
        for loss in (0.9, 0.8, 0.7):
            self.epoch(loss)
        self.end(accuracy)
        return self


def named(root: Path, name: str) -> Any:
    store = client(root)
    ids = [experiment.experiment_id for experiment in store.search_experiments()]
    [run] = store.search_runs(ids, f"attributes.run_name = '{name}'")
    return run


def curve(root: Path, name: str) -> list[tuple[int, float]]:
    history = client(root).get_metric_history(named(root, name).info.run_id, "train_loss")
    return [(point.step, point.value) for point in history]


def models_of(root: Path, name: str) -> list[Any]:
    run = named(root, name)
    return list(client(root).search_logged_models([run.info.experiment_id], f"source_run_id = '{run.info.run_id}'"))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two seeds and a figure recorded in a store that is a file."""
    root = tmp_path_factory.mktemp('it\'s a "difficult" näme 名')
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        for seed, accuracy in ((0, 60.0), (1, 64.0)):
            Training(root, f"tiny-s{seed}", seed).whole(accuracy)
        figure = root / "results/smoke/figures/fig3.csv"
        figure.parent.mkdir(parents=True)
        figure.write_text("a,b\n1,2\n")
        tags = {"attngeo.kind": "figure", "attngeo.preset": "smoke", "attngeo.code_digest": "d2"}
        log_job(
            root, "Figures and tables", "fig3", params={"n": 2}, metrics={"wall_s": 1.5}, artifacts=[figure], tags=tags
        )
        apostrophe = figure.with_name("it's.csv")
        apostrophe.write_text("a\n1\n")
        log_job(root, "Variational", "it's", params={}, metrics={}, artifacts=[apostrophe], tags=tags)
        yield root


def test_seeds_stand_below_one_run_that_summarises_them(project: Path) -> None:
    first, second = named(project, "tiny-s0"), named(project, "tiny-s1")
    parent = first.data.tags["mlflow.parentRunId"]
    assert second.data.tags["mlflow.parentRunId"] == parent
    above = client(project).get_run(parent)
    assert above.info.run_name == "tiny, made, short"
    assert above.info.status == "FINISHED"
    assert above.data.metrics["accuracy.mean"] == 62.0
    assert above.data.metrics["accuracy.std"] == pytest.approx(math.sqrt(8.0))
    assert above.data.metrics["seeds"] == 2
    assert above.data.tags["attngeo.seeds"] == "0 1"


def test_data_sets_and_models_are_recorded_without_a_pickle(project: Path, tmp_path: Path) -> None:
    run = named(project, "tiny-s0")
    inputs = {entry.tags[0].value: entry.dataset for entry in run.inputs.dataset_inputs}
    assert set(inputs) == {"training", "validation"}
    assert {entry.name for entry in inputs.values()} == {"made"}
    assert inputs["training"].digest != inputs["validation"].digest
    assert json.loads(inputs["training"].profile)["images"] == 9
    [model] = models_of(project, "tiny-s0")
    assert [output.model_id for output in run.outputs.model_outputs] == [model.model_id]
    from mlflow.models import Model

    folder = Path(model.artifact_location)
    assert {path.name for path in folder.iterdir()} == {"MLmodel", "weights.safetensors", "final.json"}
    signature = Model.load(str(folder)).signature
    assert signature.inputs.inputs[0].shape == (-1, 3, 8, 8)
    assert signature.outputs.inputs[0].shape == (-1, 2)
    assert safetensors.numpy.load_file(folder / "weights.safetensors")["w"].sum() == 5
    assert not (folder / "weights.safetensors").is_symlink()


def test_a_figures_run_names_the_claims_that_it_shows(project: Path) -> None:
    assert named(project, "fig3").data.tags["attngeo.claims"] == " P2.f "


def test_models_are_found_after_the_project_folder_has_moved(project: Path, tmp_path: Path) -> None:
    moved = tmp_path / "project, elsewhere"
    shutil.copytree(project, moved)
    init(moved)
    for model in models_of(moved, "tiny-s0"):
        assert Path(model.artifact_location).is_relative_to(moved)
        assert (Path(model.artifact_location) / "weights.safetensors").is_file()


def test_what_is_complete_is_left_alone(project: Path) -> None:
    assert presets_with_results(project) == ["smoke"]
    before = {name: named(project, name).data for name in ("tiny-s0", "tiny-s1", "fig3")}
    sent = sync(project, ["smoke"])
    assert (sent.lines, sent.left, sent.complete) == ([], [], 4)
    for name, data in before.items():
        assert named(project, name).data.to_dictionary() == data.to_dictionary()


def test_a_new_store_gets_everything_and_only_once(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {name: named(project, name).data for name in ("tiny-s0", "tiny-s1", "tiny, made, short", "fig3")}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/new.db")
    sent = sync(project, ["smoke"])
    assert len(sent.lines) == 4, sent.lines
    for name, data in expected.items():
        run = named(project, name)
        assert run.info.status == "FINISHED"
        assert run.data.metrics == data.metrics, name
        made = {"device", "attngeo.pid", "attngeo.host", "attngeo.process_started", "attngeo.boot"}
        assert run.data.params.items() >= {k: v for k, v in data.params.items() if k not in made}.items()
    assert curve(project, "tiny-s1") == [(1, 0.9), (2, 0.8), (3, 0.7)]
    run = named(project, "tiny-s1")
    assert run.info.end_time - run.info.start_time == 6000, "times are those of the training, not of the sync"
    assert len(models_of(project, "tiny-s1")) == 1
    assert sync(project, ["smoke"]).lines == []


def test_a_server_that_goes_away_in_mid_run_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    root = tmp_path / "project"
    lost = Training(root, "lost-s0", 0)
    with serving(tmp_path / "server", port):
        lost.start()
        lost.epoch(0.9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        lost.epoch(math.nan)
        lost.epoch(0.7)
        lost.end(61.0)
    told = [str(warning.message) for warning in caught if "MLflow" in str(warning.message)]
    assert len(told) == 1
    assert "attngeo track sync" in told[0]
    with pytest.raises(UserError, match="did not take everything") as refused:
        sync(root, ["smoke"])
    assert "start that server" in str(refused.value)
    with serving(tmp_path / "server", port):
        assert named(root, "lost-s0").info.status == "RUNNING"
        [line] = sync(root, ["smoke"]).lines
        assert "running -> finished" in line
        run = named(root, "lost-s0")
        assert run.info.status == "FINISHED"
        assert curve(root, "lost-s0") == [(1, 0.9), (3, 0.7)]
        assert run.data.tags["non_finite.train_loss"] == "nan@epoch 2"
        assert run.data.metrics["accuracy"] == 61.0
        assert len(models_of(root, "lost-s0")) == 1
        assert sync(root, ["smoke"]).lines == []


def test_a_training_whose_weights_are_elsewhere_is_sent_without_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/first.db")
    training = Training(tmp_path, "light-s0", 0).whole(60.0)
    (training.folder / "weights.safetensors").unlink()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/second.db")
    assert len(sync(tmp_path, ["smoke"]).lines) == 1
    assert named(tmp_path, "light-s0").info.status == "FINISHED"
    assert models_of(tmp_path, "light-s0") == []
    assert sync(tmp_path, ["smoke"]).lines == []


def test_a_killed_training_is_closed_and_a_running_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/new.db")
    init(tmp_path)
    killed, running = Training(tmp_path, "killed-s0", 0), Training(tmp_path, "running-s1", 1)
    for training in (killed, running):
        training.start()
        training.epoch(0.9)
    monkeypatch.setattr("attngeo.tracking.sync.is_gone", lambda tags: tags["attngeo.seed"] == "0")
    sent = sync(tmp_path, ["smoke"])
    assert [line.rpartition(": ")[2] for line in sent.lines] == ["running -> killed"]
    assert len(sent.left) == 2
    assert named(tmp_path, "killed-s0").info.status == "KILLED"
    assert named(tmp_path, "running-s1").info.status == "RUNNING"


def test_an_outage_of_many_epochs_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/new.db")
    training = Training(tmp_path, "long-s0", 0)
    training.start()
    real, training.observer._client = training.observer._client, None
    with warnings.catch_warnings(record=True) as caught:
        for _ in range(300):
            training.epoch(0.5)
    assert len(caught) == 1
    training.observer._client = real
    training.epoch(0.5)
    assert len(curve(tmp_path, "long-s0")) == 301


def test_jobs_of_a_workflow_are_left_to_the_pass_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(journal.LATER, "1")
    root = tmp_path / "project"
    figure = root / "results/smoke/figures/fig2.png"
    figure.parent.mkdir(parents=True)
    figure.write_bytes(b"drawn")
    draw(root, figure)
    assert not (root / "results/mlflow.db").exists()
    assert journal.has_unsent(root, "smoke")
    with monkeypatch.context() as offline:
        offline.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
        with pytest.raises(UserError, match="did not take everything"):
            sync(root, ["smoke"])
    assert journal.has_unsent(root, "smoke"), "what was not sent stays for the next pass"
    assert len(sync(root, ["smoke"]).lines) == 1
    assert not journal.has_unsent(root, "smoke")
    assert named(root, "fig2").info.status == "FINISHED"
    draw(root, figure)
    assert sync(root, ["smoke"]).lines == [], "drawn again with the same bytes is the same figure"
    figure.write_bytes(b"drawn otherwise")
    draw(root, figure)
    assert len(sync(root, ["smoke"]).lines) == 1


def draw(root: Path, figure: Path) -> None:
    tags = {"attngeo.kind": "figure", "attngeo.preset": "smoke", "attngeo.code_digest": "d2"}
    run_id = log_job(root, "Figures and tables", "fig2", params={}, metrics={}, artifacts=[figure], tags=tags)
    assert run_id is None


def test_a_workflow_begins_without_its_server_and_not_without_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config/own").mkdir(parents=True)
    (tmp_path / "config/own/config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    answer = CliRunner().invoke(app, ["track", "init", "--report", "tracking.json"])
    assert answer.exit_code == 0
    assert "warning: the MLflow store http://127.0.0.1" in answer.stderr
    assert "attngeo track sync" in answer.stderr
    assert (tmp_path / "tracking.json").is_file()
    (tmp_path / "no.db").mkdir()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/no.db")
    refused = CliRunner().invoke(app, ["track", "init", "--report", "other.json"])
    assert isinstance(refused.exception, UserError)
    assert not (tmp_path / "other.json").exists()


@pytest.mark.parametrize("what", ["training", "figure"])
def test_a_pass_that_is_cut_off_leaves_runs_that_name_its_process_and_the_next_one_completes_them(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/first.db")
    if what == "training":
        Training(tmp_path, "cut", 0).whole(60.0)
    else:
        figure = tmp_path / "results/smoke/figures/cut.png"
        figure.parent.mkdir(parents=True)
        figure.write_bytes(b"drawn")
        tags = {"attngeo.kind": "figure", "attngeo.preset": "smoke", "attngeo.code_digest": "d2"}
        log_job(tmp_path, "Figures and tables", "cut", params={}, metrics={}, artifacts=[figure], tags=tags)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/second.db")
    with monkeypatch.context() as interrupted:

        def stop(*_: Any) -> None:
            raise KeyboardInterrupt

        for function in ("log_params", "record_job"):
            interrupted.setattr(f"attngeo.tracking.sync.{function}", stop)
        with pytest.raises(KeyboardInterrupt):
            sync(tmp_path, ["smoke"])
    left = named(tmp_path, "cut")
    assert left.info.status == "RUNNING"
    assert this_process().items() <= left.data.tags.items()
    assert len(sync(tmp_path, ["smoke"]).lines) == 1
    assert named(tmp_path, "cut").info.run_id == left.info.run_id, "it is found by its tags"
    assert named(tmp_path, "cut").info.status == "FINISHED"
    assert sync(tmp_path, ["smoke"]).lines == []
