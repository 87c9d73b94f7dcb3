"""Send to MLflow what its store lacks of the files under results/: after an outage, or to a store that is new.

A run that has the digest of its files as a tag is complete and left alone, so a second pass sends nothing. Every part
is looked for before it is sent, so a pass that is cut off goes on with the next one.
"""

import fcntl
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attngeo.files import decode_non_finite, read_json
from attngeo.tracking import description, journal
from attngeo.tracking.mlflow_run import record_job
from attngeo.tracking.mlflow_store import client, experiment_id, explain_troubles, init
from attngeo.tracking.mlflow_training import FILES, add_inputs, add_model, parent_tags, summarise_seeds
from attngeo.tracking.mlflow_values import Quiet, flatten, key_of, log_metrics, log_params, log_tags, metrics_of, place
from attngeo.tracking.processes import is_gone, this_process

_SETTINGS = ("seed", "threads", "world_size")  # parameters that final.json has among the results
_FOLDERS = {"runs": "LaplacianFormer", "decoders": "Connection walk"}  # below results/<preset>, and their experiment


@dataclass
class Sent:
    """What a pass did: a line for each run it made or completed, one for each it left; how many were complete."""

    lines: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    complete: int = 0


def sync(root: Path, presets: list[str]) -> Sent:
    """Complete the store's record of these presets' finished trainings, analyses, figures and tables.

    UserError where the store cannot be reached or refuses something.
    """
    sent = Sent()
    with explain_troubles(root, "run `attngeo track sync` again: it goes on from here"):
        init(root)
        store = client(root)
        for preset in presets:
            for kind in _FOLDERS:
                for folder in sorted((root / "results" / preset / kind).glob("*")):
                    if (folder / "final.json").is_file():
                        _sync_training(root, store, preset, kind, folder, sent)
            _close_killed(root, store, preset, sent)
            with journal.sending(root, preset) as jobs:
                for job in jobs:
                    _sync_job(root, store, preset, job, sent)
    return sent


def presets_with_results(root: Path) -> list[str]:
    """Presets below results/ that have something to track."""
    folders = (*_FOLDERS, ".tracking")
    found = sorted(path for path in (root / "results").glob("*") if path.is_dir())
    return [path.name for path in found if any((path / name).is_dir() for name in folders)]


def known_before(final: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a finished training: final.json begins with what was known before the first step."""
    names = list(final)
    info = {name: final[name] for name in names[: names.index("status")]}
    return dict(info.get("recipe_values", {})) | {name: final[name] for name in _SETTINGS if name in final} | info


def _sync_training(root: Path, store: Any, preset: str, kind: str, folder: Path, sent: Sent) -> None:
    final = read_json(folder / "final.json")
    params = known_before(final) | {"preset": preset}
    name = folder.name if kind == "runs" else f"decoder {folder.name}"
    digest = description.digest_of_files(description.training_files(folder))
    experiment = experiment_id(store, _FOLDERS[kind])
    tags = {"attngeo.kind": "training", "attngeo.preset": preset, "attngeo.code_digest": str(final["digest"])}
    run, is_complete = _find(store, experiment, name, tags, digest)
    if is_complete:
        sent.complete += 1
        return
    done = []
    ended_ms = int((folder / "final.json").stat().st_mtime * 1000)
    if run is None:
        started_ms = ended_ms - int(1000 * final.get("wall_s", 0))
        made = this_process() | tags | parent_tags(root, store, experiment, params)
        run = store.create_run(experiment, start_time=started_ms, run_name=name, tags=made)
        done.append("made")
    run_id = run.info.run_id
    log_params(store, run_id, {key: value for key, value in flatten(params) if key_of(key) not in run.data.params}, {})
    claims = description.claims_tag(description.claims_of_training(root, params))
    log_tags(store, run_id, _training_tags(final) | tags | claims)
    points = _missing_points(store, run_id, folder, final, params, ended_ms)
    if points:
        done.append(f"{len(points)} metric values")
    log_metrics(store, run_id, points)
    store.log_artifact(run_id, str(folder / "final.json"))
    if add_inputs(root, store, run, params):
        done.append("data sets")
    if add_model(root, store, run_id, params):
        done.append("model")
    if run.info.status != "FINISHED":
        done.append(f"{run.info.status.lower()} -> finished")
        store.set_terminated(run_id, "FINISHED", end_time=ended_ms)
    log_tags(store, run_id, {FILES: digest})
    summarise_seeds(store, run_id)
    sent.lines.append(f"{preset}: training {name}: {', '.join(done) or 'looked through'}")


def _sync_job(root: Path, store: Any, preset: str, job: journal.Job, sent: Sent) -> None:
    job = journal.Job(**{**vars(job), "tags": job.tags | {"attngeo.preset": preset}})
    digest = description.digest_of_files(job.artifacts)
    experiment = experiment_id(store, job.experiment)
    keys = ("attngeo.kind", "attngeo.preset", "attngeo.code_digest")
    tags = {key: job.tags[key] for key in keys if key in job.tags}
    run, is_complete = _find(store, experiment, job.name, tags, digest)
    if is_complete:
        sent.complete += 1
        return
    if run is None or FILES in run.data.tags:  # none yet, or one of other files
        run = store.create_run(experiment, run_name=job.name, tags=this_process() | tags)
    record_job(root, store, run, job, Quiet(raises=True))
    sent.lines.append(f"{preset}: {job.tags.get('attngeo.kind', 'job')} {job.name}: {len(job.artifacts)} files")


def _find(store: Any, experiment: str, name: str, tags: Mapping[str, str], digest: str) -> tuple[Any, bool]:
    """The store's run of that name and these tags, the complete one first, else the newest; whether it is complete."""
    wanted = [f"tags.`{key}` = '{value}'" for key, value in tags.items()]
    found = store.search_runs([experiment], " AND ".join(wanted), order_by=["attributes.start_time DESC"])
    runs = [run for run in found if run.info.run_name == name]  # MLflow's filter takes no apostrophe
    for run in runs:
        if run.data.tags.get(FILES) == digest and run.info.status == "FINISHED":
            return run, True
    return (runs[0] if runs else None), False


def _missing_points(
    store: Any, run_id: str, folder: Path, final: Mapping[str, Any], params: Mapping[str, Any], ended_ms: int
) -> list[Any]:
    """Metrics of the curves and of the result that the run does not have, at the time when they were measured."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    points: list[Any] = []
    tags: dict[str, str] = {}
    for line in (decode_non_finite(json.loads(text)) for text in lines):
        at_ms = ended_ms - int(1000 * max(0.0, final.get("wall_s", 0) - line.get("wall_s", 0)))
        metrics, non_finite = metrics_of(line, place(line, "epoch", "step"), at_ms)
        points += metrics
        tags |= non_finite
    results = {key: value for key, value in final.items() if key not in params}
    metrics, non_finite = metrics_of(results, place(final, "epochs", "steps"), ended_ms)
    log_tags(store, run_id, tags | non_finite)
    points += metrics
    there = {
        (key, point.step)
        for key in {metric.key for metric in points}
        for point in store.get_metric_history(run_id, key)
    }
    return [metric for metric in points if (metric.key, metric.step) not in there]


def _training_tags(final: Mapping[str, Any]) -> dict[str, str]:
    known = ("attention", "dataset", "options", "size", "seed")
    tags = {f"attngeo.{key}": str(final[key]) for key in known if key in final}
    return tags | {"attngeo.git_revision": str(final.get("provenance", {}).get("git_revision", ""))}


def _close_killed(root: Path, store: Any, preset: str, sent: Sent) -> None:
    """End the records of trainings that are neither finished nor running; the rest is sent when they have finished."""
    for scratch in sorted((root / "results" / preset / ".scratch").glob("*")):
        if not scratch.is_dir():
            continue
        remembered = scratch / "mlflow_run_id"
        if not remembered.is_file() or _is_training(scratch):
            sent.left.append(f"{preset}: {scratch.name}: not finished yet")
            continue
        from mlflow.exceptions import MlflowException

        try:
            run = store.get_run(remembered.read_text())
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            sent.left.append(f"{preset}: {scratch.name}: not finished yet, and not in this store")
            continue
        if run.info.status == "RUNNING" and is_gone(run.data.tags):
            log_tags(store, run.info.run_id, {"stop_reason": "its process is gone"})
            store.set_terminated(run.info.run_id, "KILLED")
            sent.lines.append(f"{preset}: training {run.info.run_name}: running -> killed")
        sent.left.append(f"{preset}: {scratch.name}: not finished yet")


def _is_training(scratch: Path) -> bool:
    """Whether a process holds the folder, as a training does."""
    try:
        with (scratch / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
