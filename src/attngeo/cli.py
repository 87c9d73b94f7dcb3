"""The command line: a thin door to the jobs; everything heavy is imported by the command that needs it."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from attngeo.errors import UserError
from attngeo.files import explain_os_errors, write_json
from attngeo.processors import free_cores, use_threads

if TYPE_CHECKING:
    from attngeo.config import Preset

app = typer.Typer(
    help="Rebuild, check and extend four papers on the geometry of attention.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
analyze_app = typer.Typer(help="Analyses; each writes records under results/PRESET/analyses.", no_args_is_help=True)
benchmark_app = typer.Typer(help="Timings; each writes records under results/PRESET/benchmarks.", no_args_is_help=True)
track_app = typer.Typer(help="The MLflow store behind the comparison of runs.", no_args_is_help=True)
app.add_typer(analyze_app, name="analyze")
app.add_typer(benchmark_app, name="benchmark")
app.add_typer(track_app, name="track")

PresetOption = Annotated[str, typer.Option("--preset", help="Preset: a folder under config/.")]
StampOption = Annotated[
    Optional[Path],  # noqa: UP045  typer reads Optional on every Python version we support
    typer.Option("--stamp", help="Digest stamp of the code, written by the workflow; computed if absent."),
]
ThreadsOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--threads", min=1, help="Threads to compute with; without it, the preset's, or the free cores."),
]
ReportOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--report", help="Also write what was done to this JSON file."),
]


def _root() -> Path:
    root = Path.cwd()
    if not (root / "config").is_dir():
        raise UserError(f"{root} holds no config/ folder", "run attngeo in the folder of the project")
    return root


def _preset(name: str) -> "Preset":
    from attngeo.config import load_preset

    return load_preset(_root(), name, json.loads(os.environ.get("ATTNGEO_OVERRIDES", "{}")))


def _digest(preset: "Preset", planned: Path | None, name: str) -> str:
    """The digest of a job's code as it is now; builds the compiled operators first if the job uses them.

    A stamp that the workflow planned with must be of the same code, or a result would carry the wrong digest.
    """
    from attngeo.jobs import extension
    from attngeo.jobs.stamps import current_stamp
    from attngeo.tracking.code_digest import read_stamp

    stamp = current_stamp(preset, name)
    if planned is not None and read_stamp(planned)["digest"] != stamp["digest"]:
        raise UserError(
            f"the code, the settings or the data behind {name} changed after the workflow was planned",
            "run the same command again: it plans anew",
        )
    if extension.uses_extension(stamp):
        extension.build(preset.root)
    return str(stamp["digest"])


def _writable(preset: "Preset") -> None:
    """Find out that results cannot be written before any work is done."""
    probe = preset.results / f".write-test-{os.getpid()}"
    with explain_os_errors(preset.results):
        preset.results.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()


def _begin(preset: "Preset", planned: Path | None, job: str, threads: int | None) -> str:
    """The digest of a job's code, once its results can be written; computes with `threads` from here on.

    Without `threads`, with those that the preset has for analyses.
    """
    _writable(preset)
    digest = _digest(preset, planned, job)
    use_threads(threads or preset.resources.analyze.threads)
    return digest


@app.command()
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


@app.command()
def build(report: ReportOption = None) -> None:
    """Compile the extension if its sources, torch or the compilers changed."""
    from attngeo.jobs import extension

    recorded = extension.build(_root())
    if report is not None:
        write_json(report, recorded)


@app.command()
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

        config = _preset(preset)
        if source not in config.datasets:
            raise UserError(
                f"preset {preset} has no dataset {source!r}",
                f"use one of: {', '.join(config.datasets)}; a folder is packed by: attngeo pack FOLDER OUT.beton",
            )
        _writable(config)
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


@app.command()
def train(
    run_id: Annotated[str, typer.Argument(help="A run of the preset's runs.tsv.")],
    preset: PresetOption = "demo",
    stamp: StampOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Train one run; started again after a kill, it goes on from its newest checkpoint.

    Several processes share every batch: torchrun --nproc_per_node N -m attngeo train RUN_ID [OPTIONS]
    """
    from attngeo.training import launch

    launched = launch.from_environment()
    config = _preset(preset)
    config.run(run_id)
    if launched.leads:
        _writable(config)
    if stamp is None and launched.size > 1:
        config = config.with_processes(launched.size)  # started by hand: the digest is of what runs
    wanted = config.resources.train
    if wanted.processes != launched.size:
        raise UserError(
            f"{run_id} is planned for {wanted.processes} processes and got {launched.size}: its bits would differ",
            f"start it with: torchrun --nproc_per_node {wanted.processes} -m attngeo train {run_id} --preset {preset}",
        )
    if wanted.device == "cuda":
        from attngeo.gpu_lease import lease_gpu, visible_gpus

        if launched.local_size > len(visible_gpus()) > 0:
            raise UserError(
                f"torchrun started {launched.local_size} processes and may use {len(visible_gpus())} GPUs",
                f"start it with --nproc_per_node {len(visible_gpus())}",
            )
        lease_gpu()
    planned = wanted.threads * wanted.processes
    if threads not in (None, planned):
        raise UserError(
            f"{run_id} is planned for {planned} threads and got {threads}: its bits would differ",
            f"give snakemake --cores {planned} or more, or set resources.train.threads in config.yaml",
        )
    use_threads(wanted.threads)
    from attngeo.training.distributed import team

    with team(launched, wanted.device) as processes:
        digest = processes.leader_first(lambda: _digest(config, stamp, f"runs/{run_id}"))
        from attngeo.jobs.train import train_run

        final = train_run(config, run_id, digest, threads=wanted.threads, team=processes)
    if launched.leads:
        typer.echo(f"{run_id}: top-1 {final['accuracy']:.2f} % of {final['n_eval']} images in {final['wall_s']:.0f} s")


@app.command("train-decoder")
def train_decoder(
    name: Annotated[str, typer.Argument(help="Size and seed, such as 300k-s0; those that the preset's decoders make.")],
    preset: PresetOption = "study",
    stamp: StampOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Train one of our own decoders on the preset's texts; started again after a kill, it goes on from there.

    Writes results/PRESET/decoders/NAME/step*/, a model folder for every kept step: config.json, model.safetensors,
    tokenizer, and source.json with size, step, seed and losses. `decoders` in the preset's config.yaml says which.
    """
    config = _preset(preset)
    config.decoder_run(name)
    _writable(config)
    wanted = config.resources.train
    if threads not in (None, wanted.threads):
        raise UserError(
            f"{name} is planned for {wanted.threads} threads and got {threads}: its bits would differ",
            f"give snakemake --cores {wanted.threads} or more, or set resources.train.threads in config.yaml",
        )
    if wanted.device == "cuda":
        from attngeo.gpu_lease import lease_gpu

        lease_gpu()
    use_threads(wanted.threads)
    digest = _digest(config, stamp, f"decoders/{name}")
    from attngeo.jobs.decoders import train_decoder as run_job

    final = run_job(config, name, digest, threads=wanted.threads)
    typer.echo(
        f"{name}: {final['non_embedding_parameters']:,} parameters, {final['parameters']:,} with the embedding; "
        f"perplexity {final['perplexity']:.2f} a byte of {final['n_eval']} held-out bytes in {final['wall_s']:.0f} s"
    )


@app.command()
def evaluate(
    target: Annotated[str, typer.Argument(help="A run of the preset, a run's folder, or (with --model) a checkpoint.")],
    data: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--data", help="A dataset of the preset, a packed set, or an image folder; else the run's own."),
    ] = None,
    size: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option("--size", min=1, help="Image size in pixels, may be given several times; else the trained one."),
    ] = None,
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--model", help="Name of the timm model whose weights the checkpoint holds (.pth, .safetensors)."),
    ] = None,
    split: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--split", help="val, train or all; else val, and all of an image folder without train/ and val/."
        ),
    ] = None,
    preset: PresetOption = "demo",
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Images at a time.")] = 128,
    bins: Annotated[int, typer.Option("--bins", min=1, help="Equal bins of confidence for the calibration.")] = 15,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    autocast: Annotated[str, typer.Option("--autocast", help="none, bfloat16 or float16.")] = "none",
    workers: Annotated[int, typer.Option("--workers", min=0, help="Processes that read images.")] = 0,
    threads: ThreadsOption = None,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", help="Folder of the results; else beside the weights."),
    ] = None,
) -> None:
    """Accuracy, calibration and confusion of a trained model, at its own or other image sizes.

    Writes for each size a record file (top-1, top-5, negative log-likelihood, Brier score, expected calibration error
    and its bins) and a confusion matrix (CSV).
    """
    config = _preset(preset)
    for option, value, allowed in (
        ("--device", device, ("cpu", "cuda")),
        ("--autocast", autocast, ("none", "bfloat16", "float16")),
    ):
        if value not in allowed:
            raise UserError(f"{option} is {value!r}", f"use {' or '.join(allowed)}")
    if device == "cuda":
        from attngeo.gpu_lease import lease_gpu

        lease_gpu()
    use_threads(threads or config.resources.train.threads)
    from attngeo.jobs.evaluate import evaluate as run_job

    for path, pixels, result in run_job(
        config,
        target,
        data,
        model=model,
        sizes=size or (),
        split=split,
        batch_size=batch_size,
        bins=bins,
        device=device,
        autocast=autocast,  # type: ignore[arg-type]
        workers=workers,
        out=out,
    ):
        top5 = "" if result.top5 is None else f"top-5 {result.top5:.2f} %  "
        typer.echo(
            f"{pixels} px: top-1 {result.top1:.2f} %  {top5}of {result.n} images  nll {result.nll:.4f}  "
            f"Brier {result.brier:.4f}  ECE {result.ece:.4f} ({bins} bins)  {path}"
        )


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="A run of the preset, or a run's folder.")],
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    preset: PresetOption = "demo",
    threads: ThreadsOption = None,
) -> None:
    """Write a trained model as weights (safetensors) and config.json, read back and compared before it appears.

    In Python: attngeo.models.export.load_exported(OUT).
    """
    config = _preset(preset)
    use_threads(threads or config.resources.train.threads)
    from attngeo.jobs.export import export_run

    typer.echo(export_run(config, run, out))


@analyze_app.command("connection-walk")
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
        _walk_runs(model, runs, own, _preset(preset), stamp, threads)
        return
    config = _preset(preset) if (Path.cwd() / "config").is_dir() or stamp is not None else None
    listed = config is not None and model in config.analysed_models
    if config is not None and listed and own.count(None) == len(own):
        digest = _begin(config, stamp, f"connection_walk/{model}", threads)
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
    digest = _begin(config, stamp, "connection_walk_runs", threads)
    from attngeo.jobs.connection_walk_runs import connection_walk_runs

    connection_walk_runs(config, digest)


@analyze_app.command("variational")
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
    config = _preset(preset)
    if model is not None or runs:
        _analyze_trajectories(config, model, runs, stamp, threads)
        return
    digest = _begin(config, stamp, "variational", threads)
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
        digest = _begin(config, stamp, "trajectories_runs" if model is None else f"trajectories/{model}", threads)
    else:
        _writable(config)
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


@analyze_app.command("fiber-task")
def analyze_fiber_task(
    name: Annotated[str, typer.Argument(help="Task and seed, such as recall-s0; those of the preset's fiber_bundle.")],
    preset: PresetOption = "demo",
    stamp: StampOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Train the Fiber Bundle Transformer and its baselines on one task; started again after a kill, it goes on.

    Equal steps and parameters (within 1 %) for all; once more at equal time, by `attngeo benchmark fiber-steps`.
    """
    config = _preset(preset)
    config.fiber_task_run(name)
    digest, threads = _begin_training(config, stamp, f"fiber_tasks/{name}", threads)
    from attngeo.jobs.fiber_tasks import train_on_task

    for line in train_on_task(config, name, digest, threads=threads):
        typer.echo(line)


@analyze_app.command("rank-collapse")
def analyze_rank_collapse(
    seed: Annotated[int, typer.Argument(min=0, help="One of the seeds of the preset's fiber_bundle.collapse.")],
    preset: PresetOption = "demo",
    stamp: StampOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Relative residual and effective rank by depth for every metric and wiring, at initialisation and trained."""
    config = _preset(preset)
    if seed not in config.rank_collapse_seeds:
        known = ", ".join(map(str, config.rank_collapse_seeds)) or "none: add fiber_bundle to its config.yaml"
        raise UserError(f"preset {preset} has no seed {seed} of rank collapse", f"use one of: {known}")
    digest, threads = _begin_training(config, stamp, f"rank_collapse/s{seed}", threads)
    from attngeo.jobs.rank_collapse import rank_collapse

    for line in rank_collapse(config, seed, digest, threads=threads):
        typer.echo(line)


@analyze_app.command("fiber-bundle")
def analyze_fiber_bundle(
    preset: PresetOption = "demo", stamp: StampOption = None, threads: ThreadsOption = None
) -> None:
    """What the trainings on tasks and rank collapse say: paired differences, gradients, every prediction judged."""
    config = _preset(preset)
    config.fiber_bundle_settings  # noqa: B018  refuses a preset without it
    digest = _begin(config, stamp, "fiber_bundle", threads)
    from attngeo.jobs.fiber_bundle import summary

    for line in summary(config, digest):
        typer.echo(line)


def _begin_training(config: "Preset", stamp: Path | None, job: str, threads: int | None) -> tuple[str, int]:
    """The digest of a job that trains, and its threads: its bits depend on them."""
    wanted = config.resources.train.threads
    if threads not in (None, wanted):
        raise UserError(
            f"{job} is planned for {wanted} threads and got {threads}: its bits would differ",
            f"give snakemake --cores {wanted} or more, or set resources.train.threads in config.yaml",
        )
    return _begin(config, stamp, job, wanted), wanted


@analyze_app.command("injectivity")
def analyze_injectivity(
    preset: PresetOption = "demo", stamp: StampOption = None, threads: ThreadsOption = None
) -> None:
    """Rank of the attention matrix of each kernel on features of a pretrained vision transformer."""
    config = _preset(preset)
    digest = _begin(config, stamp, "injectivity", threads)
    from attngeo.jobs.injectivity import injectivity

    injectivity(config, digest)


@analyze_app.command("score-rank")
def analyze_score_rank(preset: PresetOption = "demo", stamp: StampOption = None, threads: ThreadsOption = None) -> None:
    """Rank of matrices of scores against head dimension: dot products, one metric for all tokens, and one for each."""
    config = _preset(preset)
    digest = _begin(config, stamp, "score_rank", threads)
    from attngeo.jobs.score_rank import score_rank

    for line in score_rank(config, digest):
        typer.echo(line)


@analyze_app.command("attention-distance")
def analyze_attention_distance(
    preset: PresetOption = "demo", stamp: StampOption = None, threads: ThreadsOption = None
) -> None:
    """Attention of a Laplacian and a Gaussian kernel by distance, on queries and keys of vision models."""
    config = _preset(preset)
    digest = _begin(config, stamp, "attention_distance", threads)
    from attngeo.jobs.attention_distance import attention_distance

    attention_distance(config, digest)


@analyze_app.command("attention-maps")
def analyze_attention_maps(
    preset: PresetOption = "demo", stamp: StampOption = None, threads: ThreadsOption = None
) -> None:
    """Attention maps of the preset's trained models: what the centre token takes of every token of an image."""
    config = _preset(preset)
    digest = _begin(config, stamp, "attention_maps", threads)
    from attngeo.jobs.attention_maps import attention_maps

    attention_maps(config, digest)


@benchmark_app.command("operators")
def benchmark_operators(preset: PresetOption = "demo", stamp: StampOption = None) -> None:
    """Time the operators against torch, SciPy and scikit-learn, each checked against float64 first; one thread."""
    config = _preset(preset)
    digest = _begin(config, stamp, "benchmarks/operators", threads=1)
    from attngeo.jobs.operator_benchmark import operator_benchmark

    for line in operator_benchmark(config, digest):
        typer.echo(line)


@benchmark_app.command("solver")
def benchmark_solver(preset: PresetOption = "demo", stamp: StampOption = None, threads: ThreadsOption = None) -> None:
    """Residuals of Newton-Schulz, conjugate gradient and direct solvers at equal numbers of matrix products."""
    config = _preset(preset)
    digest = _begin(config, stamp, "benchmarks/solver", threads)
    from attngeo.jobs.solver_benchmark import solver_benchmark

    solver_benchmark(config, digest)


@benchmark_app.command("edge")
def benchmark_edge(preset: PresetOption = "demo", stamp: StampOption = None) -> None:
    """Latency and memory of one image at a time for every attention kind; one thread, a process each."""
    config = _preset(preset)
    digest = _begin(config, stamp, "benchmarks/edge", threads=1)
    from attngeo.jobs.edge_benchmark import edge_benchmark

    for line in edge_benchmark(config, digest):
        typer.echo(line)


@benchmark_app.command("tokens")
def benchmark_tokens(preset: PresetOption = "demo", stamp: StampOption = None) -> None:
    """Time and memory of one layer of every attention kind by number of tokens, and of a training step; one thread."""
    config = _preset(preset)
    digest = _begin(config, stamp, "benchmarks/tokens", threads=1)
    from attngeo.jobs.token_benchmark import token_benchmark

    for line in token_benchmark(config, digest):
        typer.echo(line)


@benchmark_app.command("metric-costs")
def benchmark_metric_costs(preset: PresetOption = "demo", stamp: StampOption = None) -> None:
    """Time inverse, log-determinant and distance of metrics against dense forms, and a block with them; one thread."""
    config = _preset(preset)
    digest = _begin(config, stamp, "benchmarks/metric_costs", threads=1)
    from attngeo.jobs.metric_costs import metric_costs

    for line in metric_costs(config, digest):
        typer.echo(line)


@benchmark_app.command("fiber-steps")
def benchmark_fiber_steps(preset: PresetOption = "demo", stamp: StampOption = None) -> None:
    """Time a training step of every model on every task of fiber_bundle, in turn; one thread."""
    config = _preset(preset)
    config.fiber_bundle_settings  # noqa: B018  refuses a preset without it
    digest = _begin(config, stamp, "fiber_step_times", threads=1)
    from attngeo.jobs.fiber_tasks import step_times

    for line in step_times(config, digest):
        typer.echo(line)


@benchmark_app.command("gpu")
def benchmark_gpu(preset: PresetOption = "demo", stamp: StampOption = None) -> None:
    """Gather what `make gpu-check` measured on GPUs and left under docs/measured."""
    config = _preset(preset)
    _writable(config)
    from attngeo.jobs.gpu_timings import gpu_timings

    for device in gpu_timings(config, _digest(config, stamp, "benchmarks/gpu")) or ["no GPU has been measured"]:
        typer.echo(device)


def _draw(kind: str, name: str, preset: str, stamp: Path | None) -> None:
    from attngeo.paper.targets import FIGURES, TABLES

    known = FIGURES if kind == "figure" else TABLES
    name = f"{kind[:3]}{name}" if name.isdigit() else name
    if name not in known:
        raise UserError(f"there is no {kind} {name!r}", f"use one of: {', '.join(known)}")
    config = _preset(preset)
    _writable(config)
    from attngeo.jobs.draw import draw

    for path in draw(config, name, _digest(config, stamp, f"paper/{name}")):
        typer.echo(path)


@app.command()
def figure(
    name: Annotated[str, typer.Argument(help="Number or name, such as 10 or fig10.")],
    preset: PresetOption = "demo",
    stamp: StampOption = None,
) -> None:
    """Draw a figure from the results that are there."""
    _draw("figure", name, preset, stamp)


@app.command()
def table(
    name: Annotated[str, typer.Argument(help="Number or name, such as 1 or tab1.")],
    preset: PresetOption = "demo",
    stamp: StampOption = None,
) -> None:
    """Make a table from the results that are there."""
    _draw("table", name, preset, stamp)


@app.command()
def ledger(preset: PresetOption = "demo", stamp: StampOption = None) -> None:
    """Write the page of claims, each with the verdict that the records give, and print the verdicts."""
    from attngeo.jobs.draw import draw, judge

    config = _preset(preset)
    _writable(config)
    for verdict in judge(config):
        typer.echo(f"{verdict.claim.id:6} {verdict.verdict:10} {verdict.reason}")
    for path in draw(config, "claims", _digest(config, stamp, "paper/claims")):
        typer.echo(path)


@app.command()
def gallery(preset: PresetOption = "demo", stamp: StampOption = None) -> None:
    """Write the page of every figure and table of a preset, each with where it comes from."""
    _write_page("index", preset, stamp)


@app.command()
def macros(preset: PresetOption = "demo", stamp: StampOption = None) -> None:
    """Write the headline numbers of a preset's tables as LaTeX macros, and where each comes from."""
    _write_page("macros", preset, stamp)


@app.command()
def licences(preset: PresetOption = "demo", stamp: StampOption = None) -> None:
    """Write the licences of the data and models that a preset uses."""
    config = _preset(preset)
    _writable(config)
    _digest(config, stamp, "licences")
    from attngeo.jobs.licences import write_licences

    typer.echo(write_licences(config))


def _write_page(name: str, preset: str, stamp: Path | None) -> None:
    config = _preset(preset)
    _writable(config)
    from attngeo.jobs.draw import draw

    for path in draw(config, name, _digest(config, stamp, f"paper/{name}")):
        typer.echo(path)


@app.command()
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


@track_app.command("init")
def track_init(report: ReportOption = None) -> None:
    """Create or migrate the tracking store and its experiments."""
    from attngeo.tracking import mlflow_run
    from attngeo.tracking.mlflow_store import explain_troubles

    root = _root()
    with explain_troubles(
        root, "run the same command again; `attngeo track sync` sends to a server what a file recorded"
    ):
        mlflow_run.init(root)
    if report is not None:
        write_json(report, {"experiments": list(mlflow_run.EXPERIMENTS)})


@track_app.command("reap")
def track_reap() -> None:
    """Mark runs as killed whose process is gone."""
    from attngeo.tracking import mlflow_run

    typer.echo(f"{mlflow_run.reap(_root())} runs marked KILLED")


@track_app.command("sync")
def track_sync(
    presets: Annotated[Optional[list[str]], typer.Argument(help="Presets; without one, all that have results.")] = None,  # noqa: UP045
) -> None:
    """Send to the store (MLFLOW_TRACKING_URI, or results/mlflow.db) what it lacks of the files under results/."""
    from attngeo.tracking import sync

    root = _root()
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


def main() -> None:
    """Run the command line; errors that the user can mend are two lines and exit status 2."""
    try:
        app()
    except UserError as error:
        sys.stderr.write(f"attngeo: error: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
