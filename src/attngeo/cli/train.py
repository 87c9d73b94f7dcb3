"""Commands: trainings, and what becomes of a trained model."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from attngeo.cli.common import (
    PresetOption,
    StampOption,
    ThreadsOption,
    digest_of,
    preset_of,
    refuse_other_threads,
    require_writable,
    use_device,
)
from attngeo.errors import UserError
from attngeo.processors import use_threads


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
    config = preset_of(preset)
    config.run(run_id)
    if launched.leads:
        require_writable(config)
    if stamp is None and launched.size > 1:
        config = config.with_processes(launched.size)  # started by hand: the digest is of what runs
    wanted = config.resources.train
    if wanted.processes != launched.size:
        raise UserError(
            f"{run_id} is planned for {wanted.processes} processes and got {launched.size}: its bits would differ",
            f"start it with: torchrun --nproc_per_node {wanted.processes} -m attngeo train {run_id} --preset {preset}",
        )
    if wanted.device == "cuda":
        from attngeo.gpu_lease import visible_gpus

        if launched.local_size > len(visible_gpus()) > 0:
            raise UserError(
                f"torchrun started {launched.local_size} processes and may use {len(visible_gpus())} GPUs",
                f"start it with --nproc_per_node {len(visible_gpus())}",
            )
    refuse_other_threads(run_id, wanted.threads * wanted.processes, threads)
    use_device(wanted.device, wanted.threads)
    from attngeo.training.distributed import team

    with team(launched, wanted.device) as processes:
        digest = processes.leader_first(lambda: digest_of(config, stamp, f"runs/{run_id}"))
        from attngeo.jobs.train import train_run

        final = train_run(config, run_id, digest, threads=wanted.threads, team=processes)
    if launched.leads:
        typer.echo(f"{run_id}: top-1 {final['accuracy']:.2f} % of {final['n_eval']} images in {final['wall_s']:.0f} s")


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
    config = preset_of(preset)
    config.decoder_run(name)
    require_writable(config)
    wanted = config.resources.train
    refuse_other_threads(name, wanted.threads, threads)
    use_device(wanted.device, wanted.threads)
    digest = digest_of(config, stamp, f"decoders/{name}")
    from attngeo.jobs.decoders import train_decoder as run_job

    final = run_job(config, name, digest, threads=wanted.threads)
    typer.echo(
        f"{name}: {final['non_embedding_parameters']:,} parameters, {final['parameters']:,} with the embedding; "
        f"perplexity {final['perplexity']:.2f} a byte of {final['n_eval']} held-out bytes in {final['wall_s']:.0f} s"
    )


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
    config = preset_of(preset)
    for option, value, allowed in (
        ("--device", device, ("cpu", "cuda")),
        ("--autocast", autocast, ("none", "bfloat16", "float16")),
    ):
        if value not in allowed:
            raise UserError(f"{option} is {value!r}", f"use {' or '.join(allowed)}")
    use_device(device, threads or config.resources.train.threads)
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


def export(
    run: Annotated[str, typer.Argument(help="A run of the preset, or a run's folder.")],
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    preset: PresetOption = "demo",
    threads: ThreadsOption = None,
) -> None:
    """Write a trained model as weights (safetensors) and config.json, read back and compared before it appears.

    In Python: attngeo.models.export.load_exported(OUT).
    """
    config = preset_of(preset)
    use_threads(threads or config.resources.train.threads)
    from attngeo.jobs.export import export_run

    typer.echo(export_run(config, run, out))
