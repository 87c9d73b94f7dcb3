"""Commands: figures, tables, pages and the ledger."""

from pathlib import Path
from typing import Annotated

import typer

from attngeo.cli.common import PresetOption, StampOption, digest_of, preset_of, require_writable
from attngeo.errors import UserError


def _draw(kind: str, name: str, preset: str, stamp: Path | None) -> None:
    from attngeo.paper.targets import FIGURES, TABLES

    known = FIGURES if kind == "figure" else TABLES
    name = f"{kind[:3]}{name}" if name.isdigit() else name
    if name not in known:
        raise UserError(f"there is no {kind} {name!r}", f"use one of: {', '.join(known)}")
    _write(name, preset, stamp)


def figure(
    name: Annotated[str, typer.Argument(help="Number or name, such as 10 or fig10.")],
    preset: PresetOption = "demo",
    stamp: StampOption = None,
) -> None:
    """Draw a figure from the results that are there."""
    _draw("figure", name, preset, stamp)


def table(
    name: Annotated[str, typer.Argument(help="Number or name, such as 1 or tab1.")],
    preset: PresetOption = "demo",
    stamp: StampOption = None,
) -> None:
    """Make a table from the results that are there."""
    _draw("table", name, preset, stamp)


def ledger(preset: PresetOption = "demo", stamp: StampOption = None) -> None:
    """Write the page of claims, each with the verdict that the records give, and print the verdicts."""
    from attngeo.jobs.draw import draw, judge

    config = preset_of(preset)
    require_writable(config)
    for verdict in judge(config):
        typer.echo(f"{verdict.claim.id:6} {verdict.verdict:17} {verdict.reason}")
    for path in draw(config, "claims", digest_of(config, stamp, "paper/claims")):
        typer.echo(path)


def gallery(preset: PresetOption = "demo", stamp: StampOption = None) -> None:
    """Write the page of every figure and table of a preset, each with where it comes from."""
    _write("index", preset, stamp)


def macros(preset: PresetOption = "demo", stamp: StampOption = None) -> None:
    """Write the headline numbers of a preset's tables as LaTeX macros, and where each comes from."""
    _write("macros", preset, stamp)


def licences(preset: PresetOption = "demo", stamp: StampOption = None) -> None:
    """Write the licences of the data and models that a preset uses."""
    config = preset_of(preset)
    require_writable(config)
    digest_of(config, stamp, "licences")
    from attngeo.jobs.licences import write_licences

    typer.echo(write_licences(config))


def _write(name: str, preset: str, stamp: Path | None) -> None:
    config = preset_of(preset)
    require_writable(config)
    from attngeo.jobs.draw import draw

    for path in draw(config, name, digest_of(config, stamp, f"paper/{name}")):
        typer.echo(path)
