"""The UI's link compares the newest training of each name within one preset."""

import importlib.util
import json
import socket
import sqlite3
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ui() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ui", ROOT / "tools" / "ui.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "a folder?" / "mlflow.db"
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE runs (run_uuid, experiment_id, name, status, lifecycle_stage, start_time)")
    connection.execute("CREATE TABLE tags (run_uuid, key, value)")
    rows = [
        ("r1", 1, "laplacian-s0", "FINISHED", "active", 1, "demo", "training"),
        ("r2", 1, "laplacian-s0", "FINISHED", "active", 2, "demo", "training"),
        ("r3", 1, "laplacian-s0", "KILLED", "active", 3, "demo", "training"),
        ("r4", 2, "fiber-s0", "FINISHED", "active", 1, "demo", "training"),
        ("r5", 1, "softmax-s0", "FINISHED", "deleted", 1, "demo", "training"),
        ("r6", 1, "laplacian-s1", "FINISHED", "active", 1, "smoke", "training"),
        ("r7", 5, "fig2", "FINISHED", "active", 1, "demo", "figure"),
    ]
    for run, experiment, name, status, stage, start, preset, kind in rows:
        connection.execute("INSERT INTO runs VALUES (?,?,?,?,?,?)", (run, experiment, name, status, stage, start))
        connection.execute("INSERT INTO tags VALUES (?, 'attngeo.preset', ?)", (run, preset))
        connection.execute("INSERT INTO tags VALUES (?, 'attngeo.kind', ?)", (run, kind))
    connection.commit()
    connection.close()
    return path


def test_the_newest_finished_training_of_each_name_is_compared(ui: ModuleType, database: Path) -> None:
    assert ui.newest_trainings(database, "demo") == [("r4", "2"), ("r2", "1")]
    assert ui.newest_trainings(database, "study") == []


def test_the_link_has_the_form_of_the_comparison_page(ui: ModuleType) -> None:
    link = ui.comparison_link("http://127.0.0.1:5000", [("r4", "2"), ("r2", "1")])
    page, _, query = link.partition("?")
    assert page == "http://127.0.0.1:5000/#/compare-runs"
    values = dict(part.split("=") for part in query.split("&"))
    assert json.loads(unquote(values["runs"])) == ["r4", "r2"]
    assert json.loads(unquote(values["experiments"])) == ["1", "2"]
    assert " " not in link


def test_a_busy_port_is_noticed(ui: ModuleType) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        assert not ui.port_is_free(server.getsockname()[1])


def test_the_link_to_curves_shows_accuracy_over_epochs(ui: ModuleType) -> None:
    link = ui.curves_link("http://127.0.0.1:5000", [("r4", "2"), ("r2", "1")])
    page, _, query = link.partition("?")
    assert page == "http://127.0.0.1:5000/#/metric"
    values = {key: unquote(value) for key, _, value in (part.partition("=") for part in query.split("&"))}
    assert json.loads(values["runs"]) == ["r4", "r2"]
    assert json.loads(values["metric"]) == "val_top1"
    assert json.loads(values["plot_metric_keys"]) == ["val_top1"]
    assert values["x_axis"] == "step"


def test_a_store_that_is_neither_a_file_nor_a_server_is_named(
    ui: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://tracking.example/store")
    monkeypatch.setattr("sys.argv", ["ui.py"])
    assert ui.main() == 2
    told = capsys.readouterr().err
    assert "postgresql://tracking.example/store, neither a server nor sqlite" in told
    assert "mlflow server --backend-store-uri" in told


def test_a_server_that_the_environment_names_is_linked_to_and_nothing_started(
    ui: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking.example:5000/")
    monkeypatch.setattr(ui, "newest_trainings_of_server", lambda preset: [("r1", "1")])
    monkeypatch.setattr("sys.argv", ["ui.py"])
    assert ui.main() == 0
    printed = capsys.readouterr().out
    assert "http://tracking.example:5000/#/compare-runs?runs=" in printed
    assert "nothing is started" in printed
