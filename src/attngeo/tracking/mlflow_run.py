"""The same runs in MLflow, for comparison in its UI; files stay the source of truth, so no trouble here stops work."""

import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from attngeo.files import encode_non_finite, write_aside
from attngeo.tracking import description, journal
from attngeo.tracking.mlflow_store import EXPERIMENTS, client, database, experiment_id, init, tracking_uri
from attngeo.tracking.mlflow_training import FILES, add_inputs, add_model, parent_tags, summarise_seeds
from attngeo.tracking.mlflow_values import Quiet, log_metrics, log_params, log_tags, metrics_of, place
from attngeo.tracking.processes import is_gone, this_process

__all__ = ["EXPERIMENTS", "MlflowObserver", "init", "log_job", "reap", "record_job", "tracking_uri"]

_SLOW_S = 1.0  # a failure that takes longer is a server that does not answer
_PAUSE = 20.0  # times what such a failure took, before the server is asked again: at most 5 % of a training are lost


class MlflowObserver:
    """Observer of a training run that records it in MLflow and never raises.

    The run's id is kept in `scratch`, so a resumed run goes on in the same MLflow run. What could not be written is
    tried again with a later epoch, and the run is ended with its status whatever its record lacks. The first trouble
    is told by a warning; `attngeo track sync` sends what was lost. ValueError, at once, for an unknown experiment.
    """

    def __init__(self, root: Path, experiment: str, run_name: str, tags: Mapping[str, str], scratch: Path) -> None:
        _require_known(experiment)
        self.root, self.experiment, self.run_name = root, experiment, run_name
        self.tags, self.scratch = dict(tags), scratch
        self.run_id: str | None = None
        self._params: dict[str, Any] = {}
        self._client: Any = None
        self._unwritten: list[Any] = []
        self._not_before = 0.0  # monotonic time of the next attempt
        self._quiet = Quiet()

    def on_start(self, params: dict[str, Any], resumed: bool) -> None:
        """Open the run, or the one that `scratch` remembers, and record parameters, tags and data sets."""
        self._params = params
        with self._quiet:
            init(self.root)
            self._client = client(self.root)
            run = self._remembered_run()
            if run is None:
                experiment = experiment_id(self._client, self.experiment)
                tags = this_process() | parent_tags(self.root, self._client, experiment, params)
                run = self._client.create_run(experiment, run_name=self.run_name, tags=tags)
                self.run_id = run.info.run_id
                with write_aside(self.scratch / "mlflow_run_id") as stream:
                    stream.write(run.info.run_id)
            else:
                log_tags(self._client, run.info.run_id, this_process())  # before RUNNING, or `reap` takes it for dead
                self._client.update_run(run.info.run_id, status="RUNNING")
            self.run_id = run.info.run_id
            changed = log_params(self._client, run.info.run_id, params, run.data.params)
            claims = description.claims_tag(description.claims_of_training(self.root, params))
            log_tags(self._client, run.info.run_id, {**self.tags, **claims, **changed})
            add_inputs(self.root, self._client, run, params)

    def on_epoch(self, metrics: dict[str, Any]) -> None:
        """Record one line of metrics in one call; a non-finite value becomes a tag, since the UI cannot draw it."""
        if self.run_id is None:
            return
        with self._quiet:
            self._log_metrics(metrics, step=place(metrics, "epoch", "step"))

    def on_end(self, final: dict[str, Any]) -> None:
        """Record the final values and the model, and close the run."""
        if self.run_id is None:
            return
        self._not_before = 0.0
        results = {key: value for key, value in final.items() if key not in self._params}
        with self._quiet:
            self._log_metrics(results, step=place(final, "epochs", "steps"))
        with self._quiet:
            self._client.log_dict(self.run_id, encode_non_finite(final), "final.json")
        with self._quiet:
            add_model(self.root, self._client, self.run_id, self._params)
        if not self._quiet.told:
            with self._quiet:
                files = description.training_files(description.run_folder(self.root, self._params))
                log_tags(self._client, self.run_id, {FILES: description.digest_of_files(files)})
        with self._quiet:
            self._client.set_terminated(self.run_id, "FINISHED")
        with self._quiet:
            summarise_seeds(self._client, self.run_id)

    def on_stop(self, status: Literal["KILLED", "FAILED"], reason: str) -> None:
        """Close the run that did not finish."""
        if self.run_id is None:
            return
        with self._quiet:
            log_tags(self._client, self.run_id, {"stop_reason": reason})
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
        metrics, tags = metrics_of(values, step)
        self._unwritten += metrics
        assert self.run_id is not None
        begin = time.monotonic()
        if begin < self._not_before:
            return
        try:
            log_metrics(self._client, self.run_id, self._unwritten)
            self._unwritten = []
            log_tags(self._client, self.run_id, tags)
        finally:
            took = time.monotonic() - begin
            self._not_before = begin + took * (1 + _PAUSE) if self._unwritten and took > _SLOW_S else 0.0


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
    """Record a finished analysis or drawing as one run; its id, or None where that is left to `attngeo track sync`.

    What is recorded is first written to the job's journal. There it stays, without MLflow being imported, for a job of
    a workflow that has `journal.LATER` set and ends with a pass of `attngeo track sync`; and, with a warning, where
    MLflow could not be had. What cannot be recorded is left out with a warning: the job has finished all the same.
    ValueError for an unknown experiment.
    """
    _require_known(experiment)
    quiet = Quiet()
    job = journal.Job(experiment, run_name, dict(params), dict(metrics), [*artifacts], dict(tags))
    with quiet:
        if journal.write(root, job):
            return None
    with quiet:
        init(root)
        store = client(root)
        run = store.create_run(experiment_id(store, experiment), run_name=run_name, tags=this_process())
        record_job(root, store, run, job, quiet)
        return str(run.info.run_id)
    return None


def record_job(root: Path, store: Any, run: Any, job: journal.Job, quiet: Quiet) -> None:
    """Complete `run` as the record of a job and end it; troubles with its parts go to `quiet`."""
    run_id = run.info.run_id
    with quiet:
        values, non_finite = metrics_of(job.metrics, step=0)
        log_tags(store, run_id, {**job.tags, **job.claims_tag(root), **non_finite})
        log_metrics(store, run_id, [metric for metric in values if metric.key not in run.data.metrics])
    with quiet:
        log_tags(store, run_id, log_params(store, run_id, job.params, run.data.params))
    for path in job.artifacts:
        with quiet:
            store.log_artifact(run_id, str(path))
    if not quiet.told:
        log_tags(store, run_id, {FILES: description.digest_of_files(job.artifacts)})
    store.set_terminated(run_id, "FINISHED")


def reap(root: Path) -> int:
    """Mark as KILLED the RUNNING runs whose process is gone from this machine; their number.

    MLflow is imported only if there are some; a store that is a server is left to its owner and to `track sync`.
    """
    path = database(root)
    if path is None or not path.exists():
        return 0
    gone = [run_id for run_id, tags in _running(path).items() if is_gone(tags)]
    killed = 0
    quiet = Quiet()
    if gone:
        with quiet:
            store = client(root)
            for run_id in gone:
                with quiet:
                    log_tags(store, run_id, {"stop_reason": "its process is gone"})
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
