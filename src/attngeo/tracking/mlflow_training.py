"""What a training has in MLflow besides numbers: the run above its seeds, its data sets and its model."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attngeo.tracking import description
from attngeo.tracking.mlflow_store import store_lock
from attngeo.tracking.mlflow_values import log_metrics, log_params, log_tags, metrics_of
from attngeo.tracking.processes import this_process

FILES = "attngeo.files_sha256"
"""Tag of a complete record: the digest of the files that it repeats."""
PARENT = "mlflow.parentRunId"
_SUMMARISED = ("accuracy", "loss", "perplexity")
_MOST = 1000  # seeds of one group


def parent_tags(root: Path, store: Any, experiment: str, params: Mapping[str, Any]) -> dict[str, str]:
    """The tag that puts a training below the run of all its seeds, which is made if it is not there."""
    described = description.seeds_of(params)
    if described is None:
        return {}
    name, tags = described
    wanted = f"tags.`attngeo.group` = '{tags['attngeo.group']}' AND tags.`attngeo.kind` = 'seeds'"
    with store_lock(root):  # seeds start at the same time
        found = store.search_runs([experiment], wanted, max_results=1, order_by=["attributes.start_time ASC"])
        if not found:
            run = store.create_run(experiment, run_name=name, tags=this_process() | tags)
            shared = {key: params[key] for key in description.SAME_BUT_FOR_SEED if key in params}
            log_params(store, run.info.run_id, shared, {})
            store.set_terminated(run.info.run_id, "FINISHED")
            found = [run]
    return {PARENT: found[0].info.run_id}


def summarise_seeds(store: Any, run_id: str) -> None:
    """Record mean, standard deviation and number of the seeds that have finished in the run above `run_id`."""
    run = store.get_run(run_id)
    parent = run.data.tags.get(PARENT)
    if parent is None:
        return
    siblings = store.search_runs(
        [run.info.experiment_id],
        f"tags.`{PARENT}` = '{parent}' AND attributes.status = 'FINISHED'",
        max_results=_MOST,
        order_by=["attributes.start_time ASC"],
    )
    newest = {sibling.data.tags.get("attngeo.seed"): sibling.data.metrics for sibling in siblings}
    summary: dict[str, float] = {"seeds": len(newest)}
    for key in _SUMMARISED:
        values = [metrics[key] for metrics in newest.values() if key in metrics]
        if values:
            summary[f"{key}.mean"] = statistics.fmean(values)
        if len(values) > 1:
            summary[f"{key}.std"] = statistics.stdev(values)
    log_metrics(store, parent, metrics_of(summary, step=len(newest))[0])
    log_tags(store, parent, {"attngeo.seeds": " ".join(sorted(map(str, newest)))})


def add_inputs(root: Path, store: Any, run: Any, params: Mapping[str, Any]) -> bool:
    """Record the data sets that a training reads; whether that was still to be done and there are some."""
    if run.inputs is not None and run.inputs.dataset_inputs:
        return False
    datasets = description.datasets_of(root, params)
    if datasets:
        store.log_inputs(run.info.run_id, datasets=datasets)
    return bool(datasets)


def add_model(root: Path, store: Any, run_id: str, params: Mapping[str, Any]) -> bool:
    """Record the weights of a finished training as a model with a signature; whether there was one to record.

    A model that was begun and not completed, since its writer was killed, is removed first.
    """
    from mlflow.entities import LoggedModelOutput

    files = description.model_files(root, params)
    if not files:
        return False
    run = store.get_run(run_id)
    experiment = run.info.experiment_id
    for model in store.search_logged_models([experiment], f"source_run_id = '{run_id}'"):
        if str(model.status) == "READY":
            return False
        store.delete_logged_model(model.model_id)
    shown = {key: str(params[key]) for key in description.SAME_BUT_FOR_SEED if params.get(key) not in (None, "")}
    model = store.create_logged_model(
        experiment, name=run.info.run_name.replace(" ", "-"), source_run_id=run_id, params=shown, model_type="attngeo"
    )
    with description.model_folder(files, run_id, params, model.model_id) as folder:
        store.log_model_artifacts(model.model_id, str(folder))
    store.finalize_logged_model(model.model_id, "READY")
    store.log_outputs(run_id, [LoggedModelOutput(model.model_id, 0)])
    return True
