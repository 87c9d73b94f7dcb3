"""The MLflow store of a project folder: made once, complete or absent, and usable after the folder has moved.

MLflow takes seconds to import and is imported by the functions that talk to it.
"""

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from attngeo.errors import UserError
from attngeo.files import explain_os_errors, path_aside

EXPERIMENTS = ("LaplacianFormer", "Connection walk", "Fiber bundle", "Variational", "Figures and tables")
_SQLITE = "sqlite:///"


def tracking_uri(root: Path) -> str:
    """MLFLOW_TRACKING_URI if it is set, else the SQLite file results/mlflow.db of the project folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"{_SQLITE}{root.resolve() / 'results' / 'mlflow.db'}"


def database(root: Path) -> Path | None:
    """The SQLite file of the store, None if the store is a server or another database."""
    uri = tracking_uri(root)
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None


def client(root: Path) -> Any:
    """An MlflowClient that gives up on an unreachable server within seconds and tells nobody of its use."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    from mlflow import MlflowClient

    path = database(root)
    if path is not None:
        _require_writable(path)  # MLflow itself would try for minutes
    return MlflowClient(tracking_uri=tracking_uri(root), registry_uri=tracking_uri(root))


def init(root: Path) -> None:
    """Make or migrate the store and its experiments; harmless when repeated, and by several processes at once."""
    path = database(root)
    if path is None:
        _ensure_experiments(client(root), None)
        return
    with _locked(path):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.db import upgrade

        if not path.exists():
            with path_aside(path) as aside:
                upgrade.callback(url=f"{_SQLITE}{aside}")
                _make_default_experiment(aside, path.with_name("mlflow-artifacts"))
        try:
            store = client(root)
        except Exception as error:
            if "out-of-date database schema" not in str(error):
                raise
            upgrade.callback(url=f"{_SQLITE}{path}")
            store = client(root)
        artifacts = path.with_name("mlflow-artifacts")
        _follow_move(path, artifacts)
        _ensure_experiments(store, artifacts)


def experiment_id(store: Any, name: str) -> str:
    """Id of an experiment made by `init`; one deleted since is restored."""
    experiment = store.get_experiment_by_name(name)
    if experiment is None:
        raise ValueError(f"experiment {name!r} is none of {', '.join(EXPERIMENTS)}")
    if experiment.lifecycle_stage == "deleted":
        store.restore_experiment(experiment.experiment_id)
    return str(experiment.experiment_id)


@contextmanager
def explain_troubles(root: Path, then: str) -> Iterator[None]:
    """Turn what MLflow raises into a UserError that names the store; for commands that have no other work.

    MLflow raises errors of its own, of requests, of urllib3 and of SQLAlchemy. `then` ends the remedy.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        where = tracking_uri(root)
        remedy = (
            "start that server, or unset MLFLOW_TRACKING_URI" if database(root) is None else "mend or move that file"
        )
        raise UserError(
            f"the MLflow store {where} did not take everything: {reason}", f"{remedy}, then {then}"
        ) from error


@contextmanager
def store_lock(root: Path) -> Iterator[None]:
    """Hold the lock of a store that is a file of this machine; a server keeps its own order."""
    path = database(root)
    if path is None:
        yield
        return
    with _locked(path):
        yield


def _make_default_experiment(path: Path, artifacts: Path) -> None:
    """Make the experiment that MLflow wants to be there: its own statement breaks on a folder with both quotes."""
    now_ms = int(time.time() * 1000)
    columns = "experiment_id, name, artifact_location, lifecycle_stage, creation_time, last_update_time"
    row = (0, "Default", str(artifacts / "default"), "active", now_ms, now_ms)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"INSERT INTO experiments ({columns}) VALUES (?, ?, ?, ?, ?, ?)", row)


def _ensure_experiments(store: Any, artifacts: Path | None) -> None:
    """Make the experiments that are missing; without `artifacts` their files go where the server puts them."""
    for name in EXPERIMENTS:
        if store.get_experiment_by_name(name) is None:
            store.create_experiment(name, None if artifacts is None else str(artifacts / _folder_name(name)))


def _folder_name(experiment: str) -> str:
    return experiment.lower().replace(" ", "-")


def _follow_move(path: Path, artifacts: Path) -> None:
    """MLflow stores absolute places of artifacts: if the project folder has moved, rewrite them."""
    with closing(sqlite3.connect(path, timeout=20)) as connection, connection:
        query = "SELECT name, artifact_location FROM experiments"
        for name, location in connection.execute(query).fetchall():
            here = str(artifacts / _folder_name(name))
            if name not in EXPERIMENTS or location == here:
                continue
            connection.execute("UPDATE experiments SET artifact_location = ? WHERE name = ?", (here, name))
            connection.execute(
                "UPDATE runs SET artifact_uri = ? || substr(artifact_uri, ?) WHERE substr(artifact_uri, 1, ?) = ?",
                (here, len(location) + 1, len(location) + 1, location + "/"),
            )
            connection.execute(
                "UPDATE logged_models SET artifact_location = ? || substr(artifact_location, ?) "
                "WHERE substr(artifact_location, 1, ?) = ?",
                (here, len(location) + 1, len(location) + 1, location + "/"),
            )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the store's lock file, beside the database, for this process; UserError where nothing can be written."""
    with explain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f".{path.name}.lock").open("w")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _require_writable(path: Path) -> None:
    """Raise sqlite3.OperationalError at once if the database cannot be written; wait 20 s for other writers."""
    with closing(sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=20)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.rollback()
