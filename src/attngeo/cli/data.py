"""Commands: data, models, the compiled operators, and what this machine lacks."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from attngeo.cli.common import PresetOption, ReportOption, preset_of, project_root, require_writable
from attngeo.errors import UserError
from attngeo.files import write_json


def fetch(
    names: Annotated[Optional[list[str]], typer.Argument(help="Names of embedded data and models.")] = None,  # noqa: UP045
    report: ReportOption = None,
) -> None:
    """Download, verify and convert embedded data and models; without names, list them."""
    from attngeo.data import embedded

    if not names:
        for name, source in embedded.sources().items():
            there = "fetched" if embedded.is_fetched(name) else "not fetched"
            typer.echo(f"{name:32} {there:12} {source.licence}")
        return
    for name in names:
        folder = embedded.fetch(name)
        typer.echo(f"{name}: {folder}")
        if report is not None:
            write_json(report, {"name": name, "licence": embedded.sources()[name].licence})


def build(report: ReportOption = None) -> None:
    """Compile the extension if its sources, torch or the compilers changed."""
    from attngeo.jobs import extension

    recorded = extension.build(project_root())
    if report is not None:
        write_json(report, recorded)


def pack(
    source: Annotated[
        str, typer.Argument(help="An image folder (with OUT), or a dataset of the preset's config.yaml.")
    ],
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Argument(
            help="OUT.beton, which holds the training images (the validation images and the report lie beside it), or "
            "a folder. Without it SOURCE is a dataset of the preset."
        ),
    ] = None,
    preset: PresetOption = "demo",
    workers: Annotated[int, typer.Option(help="Processes that encode images.", min=1)] = 1,
    val_labels: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--val-labels", help="Label file of validation images that lie flat in val/."),
    ] = None,
    hold_out: Annotated[
        float,
        typer.Option(
            "--hold-out",
            help="Share of the training images (below 0.5, of each class) that is set aside to choose settings on, in "
            "place of the validation images, which are not read.",
        ),
    ] = 0.0,
    max_resolution: Annotated[
        int, typer.Option("--max-resolution", min=1, help="Longest stored side in pixels; longer images are reduced.")
    ] = 500,
    write_mode: Annotated[str, typer.Option("--write-mode", help="jpg (quality 90) or raw pixels.")] = "jpg",
    storage: Annotated[
        str, typer.Option("--storage", help="auto, beton, or folder: a checked list of the files themselves.")
    ] = "auto",
) -> None:
    """Pack an image folder, or a dataset of the preset, into the form that training reads.

    An image folder has train/CLASS/*.JPEG and val/CLASS/*.JPEG, or val/*.JPEG and a label file (--val-labels), or
    CLASS/* alone, of which a fifth is kept for validation. Every file refused, repaired or left out is in report.csv,
    the order of the classes in classes.csv; nothing is at its place before all is. Killed, start it again.
    """
    if out is None:
        from attngeo.jobs.pack import pack as run_job

        config = preset_of(preset)
        if source not in config.datasets:
            raise UserError(
                f"preset {preset} has no dataset {source!r}",
                f"use one of: {', '.join(config.datasets)}; a folder is packed by: attngeo pack FOLDER OUT.beton",
            )
        require_writable(config)
        typer.echo(run_job(config, source, workers=workers))
        return
    for option, value, allowed in (
        ("--write-mode", write_mode, ("jpg", "raw")),
        ("--storage", storage, ("auto", "beton", "folder")),
    ):
        if value not in allowed:
            raise UserError(f"{option} is {value!r}", f"use {', '.join(allowed)}")
    from attngeo.data import packing

    manifest = packing.pack(
        Path(source),
        out,
        storage=storage,  # type: ignore[arg-type]
        max_resolution=max_resolution,
        write_mode=write_mode,  # type: ignore[arg-type]
        workers=workers,
        val_labels=val_labels,
        hold_out=hold_out,
    )
    for line in packing.summary(manifest):
        typer.echo(line)


def doctor(
    data: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--data", help="An image folder: look for mistakes of its layout instead, in seconds."),
    ] = None,
    val_labels: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--val-labels", help="With --data: label file of validation images that lie flat in val/."),
    ] = None,
) -> None:
    """Say what this machine has, what will run on it, and what to do about what is missing."""
    from attngeo import doctor as examination

    if data is None:
        checks = examination.report()
    else:
        from attngeo.data.checkup import check_folder

        checks = check_folder(data, val_labels)
    examination.print_report(checks)
    raise typer.Exit(examination.exit_status(checks))
