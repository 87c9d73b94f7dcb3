"""What commands share: options, the preset, the digest of a job's code, and results that can be written."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from attngeo.errors import UserError
from attngeo.files import explain_os_errors
from attngeo.processors import use_threads

if TYPE_CHECKING:
    from attngeo.config import Preset

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


def is_project(folder: Path) -> bool:
    """Whether a folder has presets: a folder config/ is common in others, too."""
    return any(folder.glob("config/*/config.yaml"))


def project_root() -> Path:
    """The folder of the project, in which commands run; UserError elsewhere."""
    root = Path.cwd()
    if not is_project(root):
        raise UserError(f"{root} holds no presets, config/*/config.yaml", "run attngeo in the folder of the project")
    return root


def preset_of(name: str) -> "Preset":
    """The preset of that name with the keys that the workflow was given on its command line."""
    from attngeo.config import load_current

    return load_current(project_root(), name)


def digest_of(preset: "Preset", planned: Path | None, name: str) -> str:
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


def require_writable(preset: "Preset") -> None:
    """Find out that results cannot be written before any work is done."""
    probe = preset.results / f".write-test-{os.getpid()}"
    with explain_os_errors(preset.results):
        preset.results.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()


def begin(preset: "Preset", planned: Path | None, job: str, threads: int | None) -> str:
    """The digest of a job's code, once its results can be written; computes with `threads` from here on.

    Without `threads`, with those that the preset has for analyses.
    """
    require_writable(preset)
    digest = digest_of(preset, planned, job)
    use_threads(threads or preset.resources.analyze.threads)
    return digest


def use_device(device: str, threads: int) -> None:
    """Compute with that many threads, and on "cuda" with a GPU of this process's own; UserError where torch cannot."""
    if device != "cuda":
        use_threads(threads)
        return
    from attngeo.gpu_lease import NO_GPU_REMEDY, lease_gpu

    lease_gpu()  # before torch is imported
    use_threads(threads)
    import torch

    if not torch.cuda.is_available():
        built = f"it was built for CUDA {torch.version.cuda}" if torch.version.cuda else "it was built without CUDA"
        raise UserError(
            f"torch {torch.__version__} cannot use this machine's GPU: {built}",
            "install a build that the driver supports, make env TORCH_INDEX=URL (`attngeo doctor` says what is here); "
            f"or {NO_GPU_REMEDY}",
        )


def gpu_memory_error(error: BaseException) -> UserError | None:
    """What to tell of a GPU that has too little memory; None of any other error."""
    torch = sys.modules.get("torch")  # who never imported it has no such error
    if torch is None or not isinstance(error, torch.OutOfMemoryError):
        return None
    return UserError(
        f"the GPU has too little memory: {str(error).strip().splitlines()[0]}",
        "hold less at a time: for a training, in config/recipes, accumulation: 2 or more, activation_checkpointing: "
        "true or a smaller batch_size, or resources.train.gpu and processes for several GPUs in config.yaml; for our "
        "decoders a smaller batch_tokens; for attngeo evaluate a smaller --batch-size",
    )


def begin_training(config: "Preset", stamp: Path | None, job: str, threads: int | None) -> tuple[str, int]:
    """The digest of a job that trains in one process on the processor, and its threads."""
    wanted = config.resources.train.threads
    refuse_other_threads(job, wanted, threads)
    return begin(config, stamp, job, wanted), wanted


def refuse_other_threads(job: str, planned: int, threads: int | None) -> None:
    """UserError where a training, whose bits depend on its threads, was given others than planned."""
    if threads not in (None, planned):
        raise UserError(
            f"{job} is planned for {planned} threads and got {threads}: its bits would differ",
            f"give snakemake --cores {planned} or more, or set resources.train.threads in config.yaml",
        )
