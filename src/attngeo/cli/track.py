"""Commands: the MLflow store."""

import sys
from typing import Annotated, Optional

import typer

from attngeo.cli.common import ReportOption, project_root
from attngeo.errors import UserError
from attngeo.files import write_json

app = typer.Typer(help="The MLflow store behind the comparison of runs.", no_args_is_help=True)


@app.command("init")
def track_init(report: ReportOption = None) -> None:
    """Create or migrate the tracking store and its experiments; a server that cannot be had now is a warning.

    Whatever records there later makes them itself.
    """
    from attngeo.tracking import mlflow_run
    from attngeo.tracking.mlflow_store import database, explain_troubles

    root = project_root()
    is_file = database(root) is not None
    then = "run the same command again" if is_file else "run `attngeo track sync`: it sends what that server lacks"
    try:
        with explain_troubles(root, then):
            mlflow_run.init(root)
    except UserError as error:
        if is_file:
            raise
        sys.stderr.write(f"attngeo: warning: {error}\n")
    if report is not None:
        write_json(report, {"experiments": list(mlflow_run.EXPERIMENTS)})


@app.command("reap")
def track_reap() -> None:
    """Mark runs as killed whose process is gone."""
    from attngeo.tracking import mlflow_run

    typer.echo(f"{mlflow_run.reap(project_root())} runs marked KILLED")


@app.command("sync")
def track_sync(
    presets: Annotated[Optional[list[str]], typer.Argument(help="Presets; without one, all that have results.")] = None,  # noqa: UP045
) -> None:
    """Send to the store (MLFLOW_TRACKING_URI, or results/mlflow.db) what it lacks of the files under results/."""
    from attngeo.tracking import sync

    root = project_root()
    there = sync.presets_with_results(root)
    for preset in presets or ():
        if preset not in there:
            raise UserError(f"preset {preset!r} has no results", f"use one of: {', '.join(there) or 'none yet'}")
    sent = sync.sync(root, presets or there)
    for line in sent.lines:
        typer.echo(f"sent  {line}")
    for line in sent.left:
        typer.echo(f"left  {line}")
    typer.echo(f"{len(sent.lines)} runs sent, {sent.complete} were complete, {len(sent.left)} left for later")
