"""The training loop: a run killed at any moment and started again ends with the same bits as one left alone."""

import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from attngeo.ops import backend
from attngeo.training import checkpoint
from attngeo.training.distributed import ALONE, Team
from attngeo.training.interruption import Interrupted, Interruption
from attngeo.training.protocols import Batches, Observer
from attngeo.training.recipe import Recipe
from attngeo.training.run import Run
from attngeo.training.seeding import reproducible


def train(
    model: nn.Module,
    train_batches: Batches,
    val_batches: Batches,
    recipe: Recipe,
    *,
    seed: int,
    run_dir: Path,
    scratch: Path,
    threads: int,
    device: str = "cpu",
    observers: Sequence[Observer] = (),
    info: dict[str, Any] | None = None,
    checkpoint_every_s: float = 60.0,
    team: Team = ALONE,
) -> dict[str, Any]:
    """Train `model`, or go on with the run whose checkpoints are in `scratch`; return what final.json holds.

    Writes run_dir/{metrics.jsonl, weights.safetensors, final.json}; the weights are the averaged ones, which are also
    the ones evaluated. Checkpoints go to `scratch` at the end of every epoch, every `checkpoint_every_s` seconds, and
    on SIGTERM or Ctrl-C; `scratch` is removed when the run has finished. `info` (run_id, model, attention, digest, ...)
    goes into final.json and to the observers as it is.
    On a CPU the result is the same, bit for bit, however often the run was interrupted; wall times are excepted.

    Of several processes (`team`) each calls this with the same arguments and takes its share of every batch: batch
    size, learning rate and number of steps are those of the recipe, whatever their number, and the result is that of
    one process up to the order of sums, the draws of dropout and drop-path, and statistics of batch norms. The same
    number of processes on the same machine gives the same bits, interrupted or not.

    Raises UserError for a non-finite loss or gradient (unless the recipe skips them), for a full disk, and for a
    checkpoint of another thread count, number of processes, seed, recipe, digest, data set, loader or torch;
    Interrupted (status 128 + signal) after a signal.
    """
    if not team.leads:
        observers = ()
    claim = checkpoint.claim(scratch) if team.leads else nullcontext()
    with claim, reproducible(threads, device), Interruption(team.launch) as stop:
        try:
            backend.forget()
            run = Run(
                model=model,
                train_batches=train_batches,
                val_batches=val_batches,
                recipe=recipe,
                seed=seed,
                run_dir=run_dir,
                scratch=scratch,
                threads=threads,
                device=device,
                observers=observers,
                info=dict(info or {}),
                checkpoint_every_s=checkpoint_every_s,
                stop=stop,
                team=team,
            )
            resumed = run.resume()
            for observer in observers:
                observer.on_start(run.parameters(), resumed)
            final = _run_to_the_end(run)
        except Interrupted as interrupted:
            for observer in observers:
                observer.on_stop("KILLED", interrupted.reason)
            raise
        except BaseException as error:
            for observer in observers:
                observer.on_stop("FAILED", f"{type(error).__name__}: {error}")
            raise
        for observer in observers:
            observer.on_end(final)
    if team.leads:
        shutil.rmtree(scratch, ignore_errors=True)
    return final


def _run_to_the_end(run: Run) -> dict[str, Any]:
    """Train and evaluate what is left; an interrupted run is saved first."""
    try:
        while run.epoch < run.recipe.epochs:
            run.train_epoch()
            run.evaluate_epoch()
        return run.finish()
    except Interrupted:
        run.save()
        run.team.wait()  # a process that ended sooner would have torchrun end the one that writes
        raise
