"""Commands: analyses of attention, of models and of what was trained."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from attngeo.cli.common import (
    PresetOption,
    StampOption,
    ThreadsOption,
    begin,
    begin_training,
    is_project,
    preset_of,
    require_writable,
)
from attngeo.errors import UserError
from attngeo.processors import free_cores, use_threads

if TYPE_CHECKING:
    from attngeo.config import Preset

app = typer.Typer(help="Analyses; a preset's write records under results/PRESET/analyses.", no_args_is_help=True)


@app.command("connection-walk")
def analyze_connection_walk(
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(help="A model id of the preset; or ./FOLDER, FILE.gguf, OWNER/NAME on the Hugging Face hub."),
    ] = None,
    runs: Annotated[bool, typer.Option("--runs", help="The trained runs that feed fig10 instead.")] = False,
    preset: PresetOption = "demo",
    stamp: StampOption = None,
    threads: ThreadsOption = None,
    text: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--text", help="A text file or a folder of .txt files, in place of the embedded texts."),
    ] = None,
    features: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--features", help="For a speech model: log-mel features [recordings, mel bins, frames], .npy."),
    ] = None,
    revision: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--revision", help="Commit, tag or branch of a hub name."),
    ] = None,
    dtype: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--dtype", help="Round the weights to this precision first: float32, bfloat16, float16."),
    ] = None,
    windows: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--windows", min=1, help="Windows of text, or photographs, to run. [default: 8]"),
    ] = None,
    window_tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--window-tokens", min=4, help="Tokens of a window. [default: 128]"),
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Only what needs no text, one layer in memory at a time.")
    ] = False,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", help="Records; a CSV lies beside. [default: results/connection_walk/ID.json]"),
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Never touch the network.")] = False,
) -> None:
    """Transports, effective graphs and identities of one pretrained model, with shape-matched nulls.

    MODEL alone, if the preset lists it, is measured as the preset says, into results/PRESET/analyses. With any of
    --text to --out, or if it is a folder, a file or a hub name, it is measured for itself. With --runs in place of
    MODEL: the preset's trained vision models, by attention kind.
    """
    if offline:
        os.environ |= dict.fromkeys(("HF_HUB_OFFLINE", "ATTNGEO_OFFLINE"), "1")
    own = [text, features, revision, dtype, windows, window_tokens, weights_only or None, out]
    if model is None or runs:
        _walk_runs(model, runs, own, preset_of(preset), stamp, threads)
        return
    config = preset_of(preset) if is_project(Path.cwd()) or stamp is not None else None
    listed = config is not None and model in config.analysed_models
    if config is not None and listed and own.count(None) == len(own):
        digest = begin(config, stamp, f"connection_walk/{model}", threads)
        from attngeo.jobs.connection_walk import connection_walk

        connection_walk(config, model, digest)
        return
    if stamp is not None:
        raise UserError(
            f"--stamp is of a model of preset {preset} as the preset measures it, and {model} is measured for itself",
            "leave out --stamp, or every option from --text to --out",
        )
    if not listed:
        _require_name_of_a_model(model, config, preset)
    use_threads(threads or free_cores())
    from attngeo.config import ConnectionWalkConfig
    from attngeo.jobs import single_model, sources

    given = {"windows": windows, "window_tokens": window_tokens}
    measured = single_model.measure(
        sources.model_folder(config, config.analysed_models[model]) if config is not None and listed else model,
        settings=ConnectionWalkConfig(**{key: value for key, value in given.items() if value is not None}),
        model_id=model if listed else None,
        texts=text,
        features=features,
        revision=revision,
        dtype=dtype,
        offline=offline,
        weights_only=weights_only,
        out=out,
    )
    single_model.print_summary(measured)


def _require_name_of_a_model(model: str, config: "Preset | None", preset: str) -> None:
    if not Path(model).exists() and "/" not in model and not model.endswith(".gguf"):
        known = [] if config is None else list(config.analysed_models)
        raise UserError(
            f"{model!r} is no model of preset {preset}, no folder, no GGUF file and no hub name",
            f"use one of {', '.join(known) or 'its models in the folder of the project'}, ./FOLDER, FILE.gguf or "
            "OWNER/NAME",
        )


def _walk_runs(
    model: str | None, runs: bool, own: Sequence[object], config: "Preset", stamp: Path | None, threads: int | None
) -> None:
    if not runs:
        raise UserError("connection-walk needs a MODEL", "name one, or ask for the trained models with --runs")
    if model is not None:
        raise UserError(f"{model!r} and --runs are two analyses", "ask for one at a time")
    if own.count(None) != len(own):
        raise UserError(
            "--runs measures trained models as the preset says", "leave out every option from --text to --out"
        )
    digest = begin(config, stamp, "connection_walk_runs", threads)
    from attngeo.jobs.connection_walk_runs import connection_walk_runs

    connection_walk_runs(config, digest)


@app.command("variational")
def analyze_variational(
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(help="A model id of the preset; or ./FOLDER, FILE.gguf, OWNER/NAME; without it, the flows."),
    ] = None,
    runs: Annotated[bool, typer.Option("--runs", help="The trained runs that feed fig17 instead.")] = False,
    preset: PresetOption = "demo",
    stamp: StampOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Tangency, energy balance, first variation and Euler-Lagrange residual of attention flows on the sphere.

    With MODEL or --runs: hidden states by depth as paths on the sphere, step sizes, tangential share, Euler-Lagrange
    residuals and curvature beside untrained networks, random walks and shuffled depth. A model that the preset does not
    list is measured with the preset's settings and texts into results/trajectories/ID.json and .csv.
    """
    config = preset_of(preset)
    if model is not None or runs:
        _analyze_trajectories(config, model, runs, stamp, threads)
        return
    digest = begin(config, stamp, "variational", threads)
    from attngeo.jobs.variational import variational

    variational(config, digest)


def _analyze_trajectories(
    config: "Preset", model: str | None, runs: bool, stamp: Path | None, threads: int | None
) -> None:
    if model is not None and runs:
        raise UserError(f"{model!r} and --runs are two analyses", "ask for one at a time")
    listed = model in config.analysed_models
    if model is not None and not listed:
        _require_name_of_a_model(model, config, config.name)
    if model is None or listed:
        digest = begin(config, stamp, "trajectories_runs" if model is None else f"trajectories/{model}", threads)
    else:
        if stamp is not None:
            raise UserError(f"--stamp is of a model of preset {config.name}, and {model} is none", "leave out --stamp")
        require_writable(config)
        use_threads(threads or config.resources.analyze.threads)
    from attngeo.jobs import trajectories as job

    if model is None:
        answers = job.trajectories_runs(config, digest)
    elif listed:
        answers = job.trajectories(config, model, digest)
    else:
        answers = job.single_trajectories(config, model)
    for line in answers:
        typer.echo(line)


@app.command("fiber-rates")
def analyze_fiber_rates(
    name: Annotated[str, typer.Argument(help="A task of the preset's fiber_bundle.")],
    preset: PresetOption = "demo",
    stamp: StampOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Train every model on one task at each of the preset's learning rates; `fiber-task` takes the best of each."""
    config = preset_of(preset)
    if name not in config.fiber_rate_tasks:
        known = ", ".join(config.fiber_rate_tasks) or "none: give fiber_bundle.rates several rates in its config.yaml"
        raise UserError(f"preset {preset} chooses no rates on {name!r}", f"use one of: {known}")
    digest, threads = begin_training(config, stamp, f"fiber_rates/{name}", threads)
    from attngeo.jobs.fiber_tasks import choose_rates

    for line in choose_rates(config, name, digest, threads=threads):
        typer.echo(line)


@app.command("fiber-task")
def analyze_fiber_task(
    name: Annotated[str, typer.Argument(help="Task and seed, such as recall-s0; those of the preset's fiber_bundle.")],
    preset: PresetOption = "demo",
    stamp: StampOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Train the Fiber Bundle Transformer and its baselines on one task; started again after a kill, it goes on.

    Equal steps and parameters (within 1 %) for all; the full model once more, in the time that dot took beside it.
    """
    config = preset_of(preset)
    config.fiber_task_run(name)
    digest, threads = begin_training(config, stamp, f"fiber_tasks/{name}", threads)
    from attngeo.jobs.fiber_tasks import train_on_task

    for line in train_on_task(config, name, digest, threads=threads):
        typer.echo(line)


@app.command("rank-collapse")
def analyze_rank_collapse(
    seed: Annotated[int, typer.Argument(min=0, help="One of the seeds of the preset's fiber_bundle.collapse.")],
    preset: PresetOption = "demo",
    stamp: StampOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Relative residual and effective rank by depth for every metric and wiring, at initialisation and trained."""
    config = preset_of(preset)
    if seed not in config.rank_collapse_seeds:
        known = ", ".join(map(str, config.rank_collapse_seeds)) or "none: add fiber_bundle to its config.yaml"
        raise UserError(f"preset {preset} has no seed {seed} of rank collapse", f"use one of: {known}")
    digest, threads = begin_training(config, stamp, f"rank_collapse/s{seed}", threads)
    from attngeo.jobs.rank_collapse import rank_collapse

    for line in rank_collapse(config, seed, digest, threads=threads):
        typer.echo(line)


@app.command("fiber-bundle")
def analyze_fiber_bundle(
    preset: PresetOption = "demo", stamp: StampOption = None, threads: ThreadsOption = None
) -> None:
    """What the trainings on tasks and rank collapse say: paired differences, gradients, every prediction judged."""
    config = preset_of(preset)
    config.fiber_bundle_settings  # noqa: B018  refuses a preset without it
    digest = begin(config, stamp, "fiber_bundle", threads)
    from attngeo.jobs.fiber_bundle import summary

    for line in summary(config, digest):
        typer.echo(line)


@app.command("injectivity")
def analyze_injectivity(
    preset: PresetOption = "demo", stamp: StampOption = None, threads: ThreadsOption = None
) -> None:
    """Rank of the attention matrix of each kernel on features of a pretrained vision transformer."""
    config = preset_of(preset)
    config.vision_model("injectivity")
    digest = begin(config, stamp, "injectivity", threads)
    from attngeo.jobs.injectivity import injectivity

    injectivity(config, digest)


@app.command("score-rank")
def analyze_score_rank(preset: PresetOption = "demo", stamp: StampOption = None, threads: ThreadsOption = None) -> None:
    """Rank of matrices of scores against head dimension: dot products, one metric for all tokens, and one for each."""
    config = preset_of(preset)
    digest = begin(config, stamp, "score_rank", threads)
    from attngeo.jobs.score_rank import score_rank

    for line in score_rank(config, digest):
        typer.echo(line)


@app.command("attention-distance")
def analyze_attention_distance(
    preset: PresetOption = "demo", stamp: StampOption = None, threads: ThreadsOption = None
) -> None:
    """Attention of a Laplacian and a Gaussian kernel by distance, on queries and keys of vision models."""
    config = preset_of(preset)
    config.vision_model("attention_distance")
    digest = begin(config, stamp, "attention_distance", threads)
    from attngeo.jobs.attention_distance import attention_distance

    attention_distance(config, digest)


@app.command("attention-maps")
def analyze_attention_maps(
    preset: PresetOption = "demo", stamp: StampOption = None, threads: ThreadsOption = None
) -> None:
    """Attention maps of the preset's trained models: what the centre token takes of every token of an image."""
    config = preset_of(preset)
    digest = begin(config, stamp, "attention_maps", threads)
    from attngeo.jobs.attention_maps import attention_maps

    attention_maps(config, digest)
