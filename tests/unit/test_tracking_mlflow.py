"""MLflow holds what the files hold, and its troubles are never the training's. Every store here is a real one."""

import ast
import json
import math
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from attngeo.tracking.mlflow_run import EXPERIMENTS, MlflowObserver, init, log_job, reap, tracking_uri
from attngeo.tracking.mlflow_store import client
from attngeo.tracking.processes import BOOT, HOST, PID, STARTED, is_gone, this_process
from tests.tolerances import UNREACHABLE_SERVER_S
from tests.unit.training_support import train_tiny

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def writer(root: Path, name: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.unit.tracking_writer", str(root), name, *map(str, arguments)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=REPOSITORY, env=ENVIRONMENT, **pipes, **options)


@pytest.fixture(scope="module")
def raced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose store was made by four writers at once, each of which then recorded 12 epochs."""
    root = tmp_path_factory.mktemp("raced")
    children = [writer(root, f"run{index}", 12) for index in range(4)]
    for child in children:
        _, complaints = child.communicate(timeout=240)
        assert child.returncode == 0, complaints
        assert "MLflow does not record" not in complaints
    return root


@pytest.fixture
def root(raced: Path, tmp_path: Path) -> Path:
    """A project with a store of its own: a copy, as if the folder had moved."""
    (tmp_path / "results").mkdir()
    shutil.copy(raced / "results/mlflow.db", tmp_path / "results/mlflow.db")
    return tmp_path


def observer(root: Path, name: str = "mine") -> MlflowObserver:
    return MlflowObserver(root, "LaplacianFormer", name, {"git_revision": "abc"}, root / "scratch")


def recorded(root: Path, run_id: str | None) -> Any:
    return client(root).get_run(run_id)


def test_four_processes_that_race_to_make_the_store_lose_nothing(raced: Path) -> None:
    store = client(raced)
    experiment = store.get_experiment_by_name("LaplacianFormer")
    runs = store.search_runs([experiment.experiment_id])
    assert sorted(run.info.run_name for run in runs) == ["run0", "run1", "run2", "run3"]
    for run in runs:
        assert run.info.status == "FINISHED"
        history = store.get_metric_history(run.info.run_id, "train_loss")
        assert [(metric.step, metric.value) for metric in history] == [(epoch, 1 / epoch) for epoch in range(1, 13)]
        assert run.data.metrics["accuracy"] == 120.0
        assert run.data.tags["kind"] == "test"
    assert {item.name for item in store.search_experiments()} >= set(EXPERIMENTS)


def test_making_the_store_again_changes_nothing(root: Path) -> None:
    init(root)
    before = sqlite3.connect(root / "results/mlflow.db").execute("SELECT * FROM experiments").fetchall()
    init(root)
    assert sqlite3.connect(root / "results/mlflow.db").execute("SELECT * FROM experiments").fetchall() == before


def test_the_store_is_the_projects_unless_the_environment_names_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_uri(tmp_path) == f"sqlite:///{tmp_path}/results/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5055")
    assert tracking_uri(tmp_path) == "http://127.0.0.1:5055"


def test_a_killed_run_is_reaped_and_resumed_in_the_same_run(root: Path) -> None:
    child = writer(root, "killed", 2, 300)
    assert child.stdout is not None
    run_id = child.stdout.readline().strip()
    assert reap(root) == 0, "a live run was reaped"
    child.kill()
    assert child.wait() == -signal.SIGKILL
    assert reap(root) == 1
    assert recorded(root, run_id).info.status == "KILLED"
    assert reap(root) == 0
    again = MlflowObserver(root, "LaplacianFormer", "killed", {}, root / "scratch/killed")
    again.on_start({"lr": 0.1, "run": "killed"}, resumed=True)
    assert again.run_id == run_id
    assert recorded(root, run_id).info.status == "RUNNING"
    assert reap(root) == 0, "a resumed run was taken for its dead predecessor"
    again.on_epoch({"epoch": 3, "train_loss": 0.1})
    again.on_end({"epochs": 3, "accuracy": 50.0})
    assert recorded(root, run_id).info.status == "FINISHED"
    assert [metric.step for metric in client(root).get_metric_history(run_id, "train_loss")] == [1, 2, 3]


def test_nothing_is_reaped_where_there_is_no_store(tmp_path: Path) -> None:
    assert reap(tmp_path) == 0


def test_only_a_process_of_this_machine_that_ended_is_gone() -> None:
    me = this_process()
    assert not is_gone(me)
    assert not is_gone({})
    assert not is_gone({**me, HOST: "elsewhere", PID: "1"})
    assert is_gone({**me, STARTED: "1"})
    assert is_gone({**me, BOOT: "the boot before"})
    ended = subprocess.Popen([sys.executable, "-c", ""])
    time.sleep(0.5)
    assert is_gone({**me, PID: str(ended.pid)})  # a zombie: not yet waited for
    ended.wait()


def test_non_finite_metrics_become_tags_and_the_others_are_kept(root: Path) -> None:
    watcher = observer(root)
    watcher.on_start({"lr": 0.1}, resumed=False)
    watcher.on_epoch({"epoch": 3, "train_loss": math.nan, "val_loss": -math.inf, "val_top1": 10.0, "residual": None})
    run = recorded(root, watcher.run_id)
    assert run.data.tags["non_finite.train_loss"] == "nan@epoch 3"
    assert run.data.tags["non_finite.val_loss"] == "-inf@epoch 3"
    assert run.data.metrics == {"epoch": 3.0, "val_top1": 10.0}


def test_long_nested_and_many_parameters_are_recorded_and_kept_in_full(root: Path) -> None:
    params = {"long": "x" * 7000, "nested": {"a": {"b": [1, 2]}}, "nan": math.nan, "odd key!": 1}
    params |= {f"p{index}": index for index in range(230)}
    watcher = observer(root)
    watcher.on_start(params, resumed=False)
    run = recorded(root, watcher.run_id)
    assert len(run.data.params["long"]) == 6000
    assert run.data.params["nested.a.b"] == "[1, 2]"
    assert run.data.params["odd key_"] == "1"
    assert run.data.params["p229"] == "229"
    full = json.loads(Path(client(root).download_artifacts(watcher.run_id, "params.json", str(root))).read_text())
    assert full["long"] == params["long"]
    assert full["nested"] == params["nested"]


def test_a_parameter_changed_on_resume_is_seen_and_stops_nothing(root: Path) -> None:
    first, second = observer(root), observer(root)
    first.on_start({"epochs": 2, "lr": 0.1}, resumed=False)
    first.on_stop("KILLED", "stopped by SIGTERM")
    assert recorded(root, first.run_id).info.status == "KILLED"
    second.on_start({"epochs": 4, "lr": 0.1, "new": 1}, resumed=True)
    second.on_epoch({"epoch": 3, "train_loss": 0.5})
    assert second.run_id == first.run_id
    run = recorded(root, second.run_id)
    assert run.data.params == {"epochs": "2", "lr": "0.1", "new": "1"}
    assert run.data.tags["changed_on_resume.epochs"] == "2 -> 4"
    assert run.data.tags["stop_reason"] == "stopped by SIGTERM"
    assert run.data.metrics["train_loss"] == 0.5


def test_a_deleted_experiment_is_restored(root: Path) -> None:
    init(root)
    store = client(root)
    store.delete_experiment(store.get_experiment_by_name("LaplacianFormer").experiment_id)
    watcher = observer(root)
    watcher.on_start({"lr": 0.1}, resumed=False)
    assert recorded(root, watcher.run_id).info.status == "RUNNING"
    assert store.get_experiment_by_name("LaplacianFormer").lifecycle_stage == "active"


def test_a_run_deleted_in_the_ui_is_begun_anew(root: Path) -> None:
    first, second = observer(root), observer(root)
    first.on_start({"lr": 0.1}, resumed=False)
    client(root).delete_run(first.run_id)
    second.on_start({"lr": 0.1}, resumed=True)
    assert second.run_id not in (None, first.run_id)


def test_artifacts_are_found_after_the_project_folder_has_moved(root: Path, tmp_path_factory: Any) -> None:
    figure = root / "figure.txt"
    figure.write_text("drawn")
    options: dict[str, Any] = {"params": {"number": 3}, "metrics": {"points": 7}, "tags": {"rule": "figure"}}
    run_id = log_job(root, "Figures and tables", "fig3", artifacts=[figure], **options)
    assert run_id is not None
    moved = tmp_path_factory.mktemp("moved") / "project, elsewhere"
    shutil.move(root, moved)
    init(moved)
    path = client(moved).download_artifacts(run_id, "figure.txt", str(moved))
    assert Path(path).read_text() == "drawn"
    assert str(moved) in client(moved).get_run(run_id).info.artifact_uri
    root.mkdir()


def test_a_job_whose_record_lacks_a_file_has_finished_all_the_same(root: Path) -> None:
    (root / "figure.txt").write_text("drawn")
    options: dict[str, Any] = {"params": {}, "metrics": {"points": 7}, "tags": {"rule": "figure"}}
    with pytest.warns(UserWarning, match="MLflow does not record this run"):
        run_id = log_job(root, "Variational", "x", artifacts=[root / "absent", root / "figure.txt"], **options)
    run = recorded(root, run_id)
    assert run.info.status == "FINISHED"
    assert run.data.metrics == {"points": 7.0}
    assert [file.path for file in client(root).list_artifacts(run_id)] == ["figure.txt"]


def test_a_training_whose_record_lacks_a_file_is_ended_with_its_status(root: Path) -> None:
    finished, killed = observer(root, "finished"), observer(root, "killed")
    finished.scratch, killed.scratch = root / "scratch/a", root / "scratch/b"
    for watcher in (finished, killed):
        watcher.on_start({"lr": 0.1}, resumed=False)
    artifacts = Path(recorded(root, finished.run_id).info.artifact_uri)
    shutil.rmtree(artifacts)
    artifacts.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="MLflow does not record this run"):
        finished.on_end({"epochs": 1, "accuracy": 50.0})
    assert recorded(root, finished.run_id).info.status == "FINISHED"
    assert recorded(root, finished.run_id).data.metrics["accuracy"] == 50.0
    refuse_writes(root, "tags")
    with pytest.warns(UserWarning, match="MLflow does not record this run"):
        killed.on_stop("KILLED", "stopped by SIGTERM")
    assert recorded(root, killed.run_id).info.status == "KILLED"


def test_a_run_that_cannot_be_remembered_is_still_ended(root: Path) -> None:
    watcher = observer(root)
    watcher.scratch.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="MLflow does not record this run"):
        watcher.on_start({"lr": 0.1}, resumed=False)
    watcher.on_end({"epochs": 1})
    assert recorded(root, watcher.run_id).info.status == "FINISHED"


def test_runs_are_reaped_though_no_reason_can_be_noted(root: Path) -> None:
    children = [writer(root, name, 1, 300) for name in ("one", "two")]
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()
        child.kill()
        child.wait()
    refuse_writes(root, "tags")
    with pytest.warns(UserWarning, match="MLflow does not record this run"):
        assert reap(root) == 2
    assert reap(root) == 0


def refuse_writes(root: Path, table: str) -> None:
    """Make the store fail where it writes to one of its tables."""
    with sqlite3.connect(root / "results/mlflow.db") as connection:
        for event in ("INSERT", "UPDATE"):
            connection.execute(
                f"CREATE TRIGGER refuse_{event} BEFORE {event} ON {table} BEGIN SELECT RAISE(ABORT, 'refused'); END"
            )


def test_every_job_records_under_an_experiment_that_exists() -> None:
    named = set()
    for file in (REPOSITORY / "src/attngeo/jobs").glob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if not isinstance(call, ast.Call):
                continue
            values = [keyword.value for keyword in call.keywords if keyword.arg == "experiment"]
            if isinstance(call.func, ast.Name) and call.func.id in ("log_job", "MlflowObserver"):
                values += call.args[1:2]
            named |= {value.value for value in values if isinstance(value, ast.Constant)}
    assert named, "no job names an experiment: the test looks in the wrong place"
    assert named <= set(EXPERIMENTS)


def test_an_unknown_experiment_is_an_error_and_no_warning(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'Varational' is none of"):
        log_job(tmp_path, "Varational", "x", params={}, metrics={}, artifacts=[], tags={})
    with pytest.raises(ValueError, match="'Varational' is none of"):
        MlflowObserver(tmp_path, "Varational", "x", {}, tmp_path)


def test_a_closed_server_costs_seconds_and_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    begin = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        final = train_tiny(tmp_path, observers=[observer(tmp_path)])
    assert time.monotonic() - begin < UNREACHABLE_SERVER_S
    assert len([warning for warning in caught if "MLflow does not record this run" in str(warning.message)]) == 1
    assert final["status"] == "FINISHED"


def test_a_store_lost_during_the_run_is_told_once_and_its_metrics_are_sent_when_it_is_back(root: Path) -> None:
    watcher = observer(root)
    watcher.on_start({"lr": 0.1}, resumed=False)
    database = root / "results/mlflow.db"
    connection = sqlite3.connect(database)
    connection.execute("ALTER TABLE metrics RENAME TO lost_metrics")
    connection.commit()
    with pytest.warns(UserWarning, match="MLflow does not record this run"):
        watcher.on_epoch({"epoch": 1, "train_loss": 0.9})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watcher.on_epoch({"epoch": 2, "train_loss": 0.8})
    connection.execute("ALTER TABLE lost_metrics RENAME TO metrics")
    connection.commit()
    connection.close()
    watcher.on_epoch({"epoch": 3, "train_loss": 0.7})
    history = client(root).get_metric_history(watcher.run_id, "train_loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.9), (2, 0.8), (3, 0.7)]


def test_results_that_cannot_be_written_are_one_warning(root: Path) -> None:
    public = Path(tempfile.mkdtemp(prefix="attngeo-read-only-"))  # pytest's own folders are closed to other users
    try:
        shutil.copytree(root, public, dirs_exist_ok=True)
        public.chmod(0o755)
        (public / "results").chmod(0o555)
        (public / "results/mlflow.db").chmod(0o444)
        user = os.geteuid()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", UserWarning)
            os.seteuid(65534 if user == 0 else user)  # root may write anywhere
            try:
                watcher = observer(public)
                watcher.on_start({"lr": 0.1}, resumed=False)
                watcher.on_epoch({"epoch": 1, "train_loss": 0.9})
                watcher.on_end({"epochs": 1})
            finally:
                os.seteuid(user)
        assert [str(warning.message).partition(" (")[0] for warning in told] == ["MLflow does not record this run"]
        assert "Permission denied" in str(told[0].message)
    finally:
        shutil.rmtree(public)


def test_a_training_run_and_its_record_agree(root: Path) -> None:
    watcher = observer(root, "tiny")
    final = train_tiny(root, observers=[watcher])
    run = recorded(root, watcher.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.metrics["accuracy"] == final["accuracy"]
    assert run.data.params["lr"] == "0.02"
    assert len(client(root).get_metric_history(watcher.run_id, "val_top1")) == 3
    assert not (root / "scratch").exists()
