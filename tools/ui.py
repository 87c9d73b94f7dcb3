"""Start MLflow on this machine alone and print links that compare the trainings of a preset, as `make ui` does.

Where MLFLOW_TRACKING_URI names a server, nothing is started: the links lead there.
"""

import argparse
import json
import os
import socket
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from attngeo.tracking import mlflow_store

ROOT = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"
# The newest finished, else newest, training of each name within the preset.
NEWEST_RUNS = """
SELECT runs.run_uuid, runs.experiment_id, runs.name
FROM runs
JOIN tags AS preset ON preset.run_uuid = runs.run_uuid AND preset.key = 'attngeo.preset' AND preset.value = ?
JOIN tags AS kind ON kind.run_uuid = runs.run_uuid AND kind.key = 'attngeo.kind' AND kind.value = 'training'
WHERE runs.lifecycle_stage = 'active'
ORDER BY runs.status = 'FINISHED' DESC, runs.start_time DESC
"""


def newest_trainings(database: Path, preset: str) -> list[tuple[str, str]]:
    """(run id, experiment id) of one training of each name in `preset`, in the order of their names."""
    with closing(sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True)) as connection:
        rows = connection.execute(NEWEST_RUNS, (preset,)).fetchall()
    newest: dict[str, tuple[str, str]] = {}
    for run, experiment, name in rows:
        newest.setdefault(name, (run, str(experiment)))
    return [newest[name] for name in sorted(newest)]


def newest_trainings_of_server(preset: str) -> list[tuple[str, str]]:
    """The same from a server that MLFLOW_TRACKING_URI names."""
    wanted = f"tags.`attngeo.preset` = '{preset}' AND tags.`attngeo.kind` = 'training'"
    newest: dict[str, tuple[str, str]] = {}
    with mlflow_store.explain_troubles(ROOT, "run `make ui` again"):
        store = mlflow_store.client(ROOT)
        experiments = [experiment.experiment_id for experiment in store.search_experiments()]
        runs = store.search_runs(experiments, wanted, order_by=["attributes.start_time DESC"])
        for run in sorted(runs, key=lambda run: run.info.status != "FINISHED"):
            newest.setdefault(run.info.run_name, (run.info.run_id, run.info.experiment_id))
    return [newest[name] for name in sorted(newest)]


def _listed(values: list[str]) -> str:
    return quote(json.dumps(values, separators=(",", ":")), safe="[],")


def _chosen(trainings: list[tuple[str, str]]) -> str:
    experiments = sorted({experiment for _, experiment in trainings})
    return f"runs={_listed([run for run, _ in trainings])}&experiments={_listed(experiments)}"


def comparison_link(address: str, trainings: list[tuple[str, str]]) -> str:
    """The address of MLflow's comparison page for `trainings`: parameters side by side, and where they differ."""
    return f"{address}/#/compare-runs?{_chosen(trainings)}"


def curves_link(address: str, trainings: list[tuple[str, str]], metric: str = "val_top1") -> str:
    """The address of MLflow's page of one metric's curves over epochs (MLflow's step) for `trainings`."""
    shown = f"metric={quote(json.dumps(metric))}&plot_metric_keys={_listed([metric])}"
    return f"{address}/#/metric?{_chosen(trainings)}&{shown}&x_axis=step"


def tell(address: str, preset: str, trainings: list[tuple[str, str]]) -> None:
    """Print the links, or how the preset gets something to compare."""
    if trainings:
        print(f"the {len(trainings)} trainings of preset {preset}:")
        print(f"  parameters  {comparison_link(address, trainings)}")
        print(f"  curves      {curves_link(address, trainings)}")
    else:
        print(f"preset {preset} has no tracked training yet: make reproduce PRESET={preset}")
    sys.stdout.flush()


def port_is_free(port: int) -> bool:
    """Whether a server can listen on `port` of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def main() -> int:
    """Check, print the link and become the server."""
    parser = argparse.ArgumentParser(description="start MLflow on this machine alone")
    parser.add_argument("--preset", default="demo")
    parser.add_argument("--port", type=int, default=5000)
    arguments = parser.parse_args()
    uri = mlflow_store.tracking_uri(ROOT)
    if uri.startswith(("http://", "https://")):
        address = uri.rstrip("/")
        print(f"MLFLOW_TRACKING_URI names a server, {address}: nothing is started here")
        tell(address, arguments.preset, newest_trainings_of_server(arguments.preset))
        return 0
    database = mlflow_store.database(ROOT)
    if database is None:
        print(f"error: MLFLOW_TRACKING_URI is {uri}, neither a server nor sqlite:///FILE", file=sys.stderr)
        print(f"remedy: start MLflow on it yourself: mlflow server --backend-store-uri {uri}", file=sys.stderr)
        return 2
    if not database.exists():
        print(f"error: nothing is tracked yet ({database}): run `make reproduce` first", file=sys.stderr)
        return 2
    if not port_is_free(arguments.port):
        print(f"error: port {arguments.port} is in use: make ui PORT={arguments.port + 1}", file=sys.stderr)
        return 2
    address = f"http://{HOST}:{arguments.port}"
    print(f"MLflow will answer in some seconds at {address} (Ctrl-C stops it)")
    tell(address, arguments.preset, newest_trainings(database, arguments.preset))
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["DO_NOT_TRACK"] = "true"
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
    os.chdir(ROOT)
    server = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(arguments.port), "--workers", "1"]
    # The address of a sqlite database is not percent-decoded.
    os.execv(sys.executable, [*server, "--backend-store-uri", f"sqlite:///{database}"])


if __name__ == "__main__":
    from attngeo.errors import UserError

    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
