"""The command line: a thin door to the jobs; everything heavy is imported by the command that needs it."""

import sys

import typer

from attngeo.cli import analyze, benchmark, data, paper, track, train
from attngeo.cli.common import gpu_memory_error
from attngeo.errors import UserError

app = typer.Typer(
    help="Rebuild, check and extend four papers on the geometry of attention.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(analyze.app, name="analyze")
app.add_typer(benchmark.app, name="benchmark")
app.add_typer(track.app, name="track")
for command in (
    data.fetch,
    data.build,
    data.pack,
    train.train,
    train.train_decoder,
    train.evaluate,
    train.export,
    paper.figure,
    paper.table,
    paper.ledger,
    paper.gallery,
    paper.macros,
    paper.licences,
    data.doctor,
):
    app.command()(command)


def main() -> None:
    """Run the command line; errors that the user can mend are two lines and exit status 2."""
    try:
        app()
    except UserError as error:
        _end_with(error)
    except RuntimeError as error:
        told = gpu_memory_error(error)
        if told is None:
            raise
        _end_with(told)


def _end_with(error: UserError) -> None:
    sys.stderr.write(f"attngeo: error: {error}\n")
    sys.exit(2)
