"""Start MLflow on this machine alone and print a link that compares the trainings of a preset, as `make ui` does."""

import argparse
import json
import os
import socket
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

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


def comparison_link(address: str, trainings: list[tuple[str, str]]) -> str:
    """The address of MLflow's comparison page for `trainings`."""

    def listed(values: list[str]) -> str:
        return quote(json.dumps(values, separators=(",", ":")), safe="[],")

    runs = listed([run for run, _ in trainings])
    experiments = listed(sorted({experiment for _, experiment in trainings}))
    return f"{address}/#/compare-runs?runs={runs}&experiments={experiments}"


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
    database = ROOT / "results" / "mlflow.db"
    if not database.exists():
        print("error: nothing is tracked yet (results/mlflow.db): run `make reproduce` first", file=sys.stderr)
        return 2
    if not port_is_free(arguments.port):
        print(f"error: port {arguments.port} is in use: make ui PORT={arguments.port + 1}", file=sys.stderr)
        return 2
    address = f"http://{HOST}:{arguments.port}"
    trainings = newest_trainings(database, arguments.preset)
    print(f"MLflow will answer in some seconds at {address} (Ctrl-C stops it)")
    if trainings:
        print(f"the {len(trainings)} trainings of preset {arguments.preset} compared:")
        print(f"  {comparison_link(address, trainings)}")
    else:
        print(f"preset {arguments.preset} has no tracked training yet: make reproduce PRESET={arguments.preset}")
    sys.stdout.flush()
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["DO_NOT_TRACK"] = "true"
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
    os.chdir(ROOT)
    server = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(arguments.port), "--workers", "1"]
    # The address of a sqlite database is not percent-decoded.
    os.execv(sys.executable, [*server, "--backend-store-uri", f"sqlite:///{database}"])


if __name__ == "__main__":
    sys.exit(main())
