"""The same runs in MLflow, for comparison in its UI; files stay the source of truth, so no trouble here stops work."""

import json
import math
import re
import sqlite3
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from attngeo.files import encode_non_finite, write_aside
from attngeo.tracking.mlflow_store import EXPERIMENTS, client, database, experiment_id, init, tracking_uri
from attngeo.tracking.processes import is_gone, this_process

__all__ = ["EXPERIMENTS", "MlflowObserver", "init", "log_job", "reap", "tracking_uri"]

_LONGEST_VALUE = 6000  # characters, MLflow's limit for parameters; tags may have more
_LONGEST_KEY = 250
_BATCH = 100  # parameters or tags in a call, MLflow's limit


class MlflowObserver:
    """Observer of a training run that records it in MLflow and never raises.

    The run's id is kept in `scratch`, so a resumed run goes on in the same MLflow run. What could not be written is
    tried again with the next epoch, and the run is ended with its status whatever its record lacks. The first trouble
    is told by a warning. ValueError, at once, for an unknown experiment.
    """

    def __init__(self, root: Path, experiment: str, run_name: str, tags: Mapping[str, str], scratch: Path) -> None:
        _require_known(experiment)
        self.root, self.experiment, self.run_name = root, experiment, run_name
        self.tags, self.scratch = dict(tags), scratch
        self.run_id: str | None = None
        self._params: frozenset[str] = frozenset()
        self._client: Any = None
        self._unwritten: list[Any] = []
        self._quiet = _Quiet()

    def on_start(self, params: dict[str, Any], resumed: bool) -> None:
        """Open the run, or the one that `scratch` remembers, and record the parameters."""
        with self._quiet:
            init(self.root)
            self._client = client(self.root)
            run = self._remembered_run()
            if run is None:
                experiment = experiment_id(self._client, self.experiment)
                run = self._client.create_run(experiment, run_name=self.run_name, tags=this_process())
                self.run_id = run.info.run_id
                with write_aside(self.scratch / "mlflow_run_id") as stream:
                    stream.write(run.info.run_id)
            else:
                _log_tags(self._client, run.info.run_id, this_process())  # before RUNNING, or `reap` takes it for dead
                self._client.update_run(run.info.run_id, status="RUNNING")
            self.run_id = run.info.run_id
            self._params = frozenset(params)
            changed = _log_params(self._client, run.info.run_id, params, run.data.params)
            _log_tags(self._client, run.info.run_id, {**self.tags, **changed})

    def on_epoch(self, metrics: dict[str, Any]) -> None:
        """Record one line of metrics in one call; a non-finite value becomes a tag, since the UI cannot draw it."""
        if self.run_id is None:
            return
        with self._quiet:
            self._log_metrics(metrics, step=_place(metrics, "epoch", "step"))

    def on_end(self, final: dict[str, Any]) -> None:
        """Record the final values and close the run."""
        if self.run_id is None:
            return
        results = {key: value for key, value in final.items() if key not in self._params}
        with self._quiet:
            self._log_metrics(results, step=_place(final, "epochs", "steps"))
        with self._quiet:
            self._client.log_dict(self.run_id, encode_non_finite(final), "final.json")
        with self._quiet:
            self._client.set_terminated(self.run_id, "FINISHED")

    def on_stop(self, status: Literal["KILLED", "FAILED"], reason: str) -> None:
        """Close the run that did not finish."""
        if self.run_id is None:
            return
        with self._quiet:
            _log_tags(self._client, self.run_id, {"stop_reason": reason})
        with self._quiet:
            self._client.set_terminated(self.run_id, status)

    def _remembered_run(self) -> Any:
        """The run whose id is in `scratch`, None if there is none or the store no longer has it."""
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run((self.scratch / "mlflow_run_id").read_text())
        except (OSError, MlflowException):
            return None
        return run if run.info.lifecycle_stage == "active" else None

    def _log_metrics(self, values: Mapping[str, Any], step: int) -> None:
        metrics, tags = _metrics(values, step)
        self._unwritten += metrics
        assert self.run_id is not None
        self._client.log_batch(self.run_id, metrics=self._unwritten)
        self._unwritten = []
        _log_tags(self._client, self.run_id, tags)


def log_job(
    root: Path,
    experiment: str,
    run_name: str,
    *,
    params: Mapping[str, Any],
    metrics: Mapping[str, Any],
    artifacts: Sequence[Path],
    tags: Mapping[str, str],
) -> str | None:
    """Record a finished analysis or drawing as one run; its id, or None (and a warning) if MLflow could not be had.

    What cannot be recorded is left out with a warning: the job has finished all the same. ValueError for an unknown
    experiment.
    """
    _require_known(experiment)
    quiet = _Quiet()
    with quiet:
        init(root)
        store = client(root)
        run = store.create_run(experiment_id(store, experiment), run_name=run_name, tags=this_process())
        run_id = str(run.info.run_id)
        with quiet:
            values, non_finite = _metrics(metrics, step=0)
            _log_tags(store, run_id, {**tags, **non_finite})
            store.log_batch(run_id, metrics=values)
        with quiet:
            _log_tags(store, run_id, _log_params(store, run_id, params, {}))
        for path in artifacts:
            with quiet:
                store.log_artifact(run_id, str(path))
        store.set_terminated(run_id, "FINISHED")
        return run_id
    return None


def reap(root: Path) -> int:
    """Mark as KILLED the RUNNING runs whose process is gone from this machine; their number.

    MLflow is imported only if there are some; a store that is a server is left to its owner.
    """
    path = database(root)
    if path is None or not path.exists():
        return 0
    gone = [run_id for run_id, tags in _running(path).items() if is_gone(tags)]
    killed = 0
    quiet = _Quiet()
    if gone:
        with quiet:
            store = client(root)
            for run_id in gone:
                with quiet:
                    _log_tags(store, run_id, {"stop_reason": "its process is gone"})
                with quiet:
                    store.set_terminated(run_id, "KILLED")
                    killed += 1
    return killed


def _require_known(experiment: str) -> None:
    """ValueError for an experiment that `init` does not make; inside the recording it would only be a warning."""
    if experiment not in EXPERIMENTS:
        raise ValueError(f"experiment {experiment!r} is none of {', '.join(EXPERIMENTS)}")


def _running(path: Path) -> dict[str, dict[str, str]]:
    """Tags of the RUNNING runs, read without MLflow."""
    query = (
        "SELECT runs.run_uuid, tags.key, tags.value FROM runs JOIN tags ON tags.run_uuid = runs.run_uuid "
        "WHERE runs.status = 'RUNNING' AND runs.lifecycle_stage = 'active' AND tags.key LIKE 'attngeo.%'"
    )
    runs: dict[str, dict[str, str]] = {}
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=20)) as connection:
        for run_id, key, value in connection.execute(query):
            runs.setdefault(run_id, {})[key] = value
    return runs


class _Quiet:
    """Context that turns the first exception into one warning and swallows those that follow."""

    def __init__(self) -> None:
        self.told = False

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        if not self.told:
            self.told = True
            reason = str(error).strip().splitlines()
            warnings.warn(
                f"MLflow does not record this run ({type(error).__name__}: {reason[0] if reason else ''}); "
                "the run itself goes on, and its files are complete",
                stacklevel=3,
            )
        return True


def _place(values: Mapping[str, Any], *counts: str) -> int:
    """Where on the axis of a curve a line of metrics lies: the first of these counts that it has."""
    return int(next(values[count] for count in counts if count in values))


def _metrics(values: Mapping[str, Any], step: int) -> tuple[list[Any], dict[str, str]]:
    """MLflow metrics of the finite numbers among `values`, tags for the non-finite ones; the rest is left out."""
    from mlflow.entities import Metric

    now_ms = int(time.time() * 1000)
    metrics, tags = [], {}
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if math.isfinite(value):
            metrics.append(Metric(_key(key), float(value), now_ms, step))
        else:
            tags[f"non_finite.{key}"] = f"{value}@epoch {step}"
    return metrics, tags


def _log_params(store: Any, run_id: str, params: Mapping[str, Any], known: Mapping[str, str]) -> dict[str, str]:
    """Record parameters, nested ones flattened and long ones cut, and all of them in full as an artifact.

    MLflow refuses to change a parameter: a new value on resume is returned as a tag `changed_on_resume.<key>`.
    """
    from mlflow.entities import Param

    flat = {_key(key): _cut(value) for key, value in _flatten(params)}
    changed = {key: f"{known[key]} -> {value}" for key, value in flat.items() if known.get(key, value) != value}
    new = [Param(key, value) for key, value in flat.items() if key not in known]
    for begin in range(0, len(new), _BATCH):
        store.log_batch(run_id, params=new[begin : begin + _BATCH])
    if new or changed:
        full = json.dumps(encode_non_finite(dict(params)), ensure_ascii=False, indent=1, default=str)
        store.log_text(run_id, full, "params.resumed.json" if changed else "params.json")
    return {f"changed_on_resume.{key}": value for key, value in changed.items()}


def _log_tags(store: Any, run_id: str, tags: Mapping[str, str]) -> None:
    from mlflow.entities import RunTag

    entries = [RunTag(_key(key), _cut(value)) for key, value in tags.items()]
    for begin in range(0, len(entries), _BATCH):
        store.log_batch(run_id, tags=entries[begin : begin + _BATCH])


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _key(key: str) -> str:
    """A name that MLflow accepts."""
    return re.sub(r"[^\w\-./ :]", "_", key)[:_LONGEST_KEY]


def _cut(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
