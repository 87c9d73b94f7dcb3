"""How this process was started: alone, or as one of several by torchrun; read from the environment, without torch."""

import os
from dataclasses import dataclass

from attngeo.errors import UserError


@dataclass(frozen=True)
class Launch:
    """Place among the processes of one training; `parent` is torchrun's process id, None where it did not start us."""

    rank: int = 0
    size: int = 1
    local_size: int = 1  # processes on this machine
    parent: int | None = None

    @property
    def leads(self) -> bool:
        """Whether this is the process that logs and writes."""
        return self.rank == 0

    def abandoned(self) -> bool:
        """Whether torchrun is gone: its processes would train on as orphans."""
        return self.parent is not None and os.getppid() != self.parent


def from_environment() -> Launch:
    """The launch that RANK and WORLD_SIZE describe, as torchrun sets them; UserError if they contradict each other."""
    if "WORLD_SIZE" not in os.environ:
        return Launch()
    try:
        size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        if not 0 <= rank < size:
            raise ValueError(f"RANK {rank} is not below WORLD_SIZE {size}")
    except (KeyError, ValueError) as error:
        raise UserError(
            f"the environment names processes that cannot be ({error})",
            "start several processes with torchrun, or unset RANK and WORLD_SIZE",
        ) from error
    return Launch(rank, size, local_size, os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None)
