"""Trainings of the tiny model by two processes, which torchrun starts; without it the program forks into two.

python -m tests.unit.training_team FOLDER SCENARIO [SECONDS_A_BATCH]
"""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from attngeo.errors import UserError
from attngeo.models.pyramid import Pyramid
from attngeo.models.sizes import PYRAMID_SIZES
from attngeo.training import launch
from attngeo.training.distributed import Team, team
from attngeo.training.interruption import Interrupted
from attngeo.training.recipe import Recipe
from attngeo.training.seeding import seed_everything
from tests.unit.training_support import CLASSES, SEED, MemoryBatches, stop_at, tiny_recipe, train_tiny


class Independent(nn.Module):
    """A pyramid, and a parameter that nothing uses: without batch statistics or dropout, shares change nothing."""

    def __init__(self, drop_path: float = 0.0) -> None:
        super().__init__()
        seed_everything(SEED)
        size = PYRAMID_SIZES["nano"]
        self.pyramid = Pyramid(size, "laplacian", num_classes=CLASSES, img_size=8, drop_path_rate=drop_path)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, images: Tensor) -> Tensor:
        return self.pyramid(images)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.pyramid.set_grad_checkpointing(enable)


# Settings that one process and two must train alike. 33 images in batches of 4 leave one over; 21 are evaluated.
ALIKE: dict[str, dict[str, Any]] = {
    "plain": {"mixup": 0.0, "cutmix": 0.0},
    "mixed": {"epochs": 2},
    "accumulated": {"accumulation": 2},
    "checkpointed": {"activation_checkpointing": True},
    "odd": {"batch_size": 7, "eval_batch_size": 1},
    "subset": {"max_eval_images": 5},
}


def uneven(folder: Path, recipe: Recipe, processes: Team | None, **options: Any) -> dict[str, Any]:
    """Train on 33 images, evaluate on 21; keep the first step's gradients and the images that this process read."""
    first: dict[str, Tensor] = {}

    def on_batch(epoch: int, batch: int) -> None:
        if (epoch, batch) == (0, 1):
            first.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    training = MemoryBatches(33, recipe.batch_size, shuffle=True, on_batch=on_batch)
    validation = MemoryBatches(21, recipe.eval_batch_size, shuffle=False)
    model = options.pop("model", None) or Independent()
    final = train_tiny(
        folder,
        recipe=recipe,
        model=model,
        batches=training,
        val_batches=validation,
        team=processes or Team(),
        **options,
    )
    rank = processes.rank if processes else 0
    safetensors.torch.save_file(first, folder / f"gradients{rank}.safetensors")
    seen = folder / f"seen{rank}.json"
    seen.write_text(json.dumps({"train": training.served, "val": validation.served}))
    return final


def alike_recipe(name: str) -> Recipe:
    return tiny_recipe(**{"batch_size": 4, "eval_batch_size": 4, "epochs": 1, **ALIKE[name]})


def run_laws(folder: Path, processes: Team) -> None:
    """All settings of ALIKE, a pair with drop-path, and the run that kills are compared with."""
    for name in ALIKE:
        uneven(folder / name, alike_recipe(name), processes)
    for name, again in (("kept", False), ("again", True)):
        recipe = tiny_recipe(batch_size=4, epochs=1, activation_checkpointing=again)
        uneven(folder / f"drop-path-{name}", recipe, processes, model=Independent(drop_path=0.5))
    train_tiny(folder / "uninterrupted", team=processes)
    stop_one_and_go_on(folder / "told", processes)
    refused(folder / f"few{processes.rank}", lambda: uneven(folder / "few", tiny_recipe(batch_size=3), processes))
    if processes.leads:
        with contextlib.suppress(Interrupted):
            train_tiny(folder / "alone", on_batch=stop_at(0, 2))
    processes.wait()
    refused(folder / f"world{processes.rank}", lambda: train_tiny(folder / "alone", team=processes))


def refused(told: Path, work: Callable[[], Any]) -> None:
    """Keep what the user is told."""
    try:
        work()
    except UserError as error:
        told.write_text(str(error))


def stop_one_and_go_on(folder: Path, processes: Team) -> None:
    """The last process alone gets SIGTERM, in epoch 2; both must stop before the same step, and go on from there."""
    try:
        train_tiny(folder, team=processes, on_batch=None if processes.leads else stop_at(1, 3))
    except Interrupted as interrupted:
        (folder / f"stopped{processes.rank}").write_text(str(interrupted.code))
    train_tiny(folder, team=processes)


def run_slowly(folder: Path, processes: Team, pause_s: float) -> None:
    train_tiny(folder, team=processes, on_batch=lambda epoch, batch: time.sleep(pause_s))


def fail(folder: Path, processes: Team) -> None:
    """The last process meets an error in epoch 2."""

    def on_batch(epoch: int, batch: int) -> None:
        if epoch == 1 and processes.rank == processes.size - 1:
            (folder / "failed").touch()
            raise OSError("the disk of this process is gone")

    train_tiny(folder, team=processes, on_batch=on_batch)


def main(folder: Path, scenario: str, pause_s: float) -> None:
    with team(launch.from_environment(), "cpu") as processes:
        if scenario == "laws":
            run_laws(folder, processes)
        elif scenario == "fail":
            fail(folder, processes)
        else:
            run_slowly(folder, processes, pause_s)


def fork_in_two() -> None:
    """Go on as one of two processes (importing torch once is quicker than twice); the parent waits for them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "1"}
    for rank in range(2):
        if os.fork() == 0:
            os.environ["RANK"] = str(rank)
            return
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2)]
    sys.exit(next((code for code in codes if code), 0))


if __name__ == "__main__":
    if "WORLD_SIZE" not in os.environ:
        fork_in_two()
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]) if len(sys.argv) > 3 else 0.0)
