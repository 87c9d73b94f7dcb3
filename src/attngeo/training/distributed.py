"""Several processes that train one model: each takes a share of every batch, and their gradients are summed.

The sums are taken here, after the backward pass and over pieces in a fixed order, rather than by torch's
DistributedDataParallel: that one regroups its pieces after the first step it sees, so that three or more processes
would sum in another order after a resume, and it refuses some combinations with activation checkpointing.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from attngeo.errors import UserError
from attngeo.training.launch import Launch

Result = TypeVar("Result")

BUCKET_ELEMENTS = 1 << 24  # numbers summed at once: few calls, and a copy of 64 MiB at most beside the gradients


class Team:
    """The processes of a training; with one process every method does nothing and costs nothing.

    Raises UserError where another process of the team has gone.
    """

    def __init__(self, launch: Launch | None = None, device: str = "cpu") -> None:
        self.launch = launch or Launch()
        self.rank, self.size, self.leads = self.launch.rank, self.launch.size, self.launch.leads
        self.device = device

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """The same count of numbers from every process, by rank, float64."""
        if self.size == 1:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        everyones = [torch.empty_like(mine) for _ in range(self.size)]
        self._together(lambda: dist.all_gather(everyones, mine))
        return torch.stack(everyones).tolist()

    def gather_objects(self, value: Result) -> list[Result]:
        """What every process holds, by rank; anything that can be pickled."""
        if self.size == 1:
            return [value]
        everyones: list[Any] = [None] * self.size
        self._together(lambda: dist.all_gather_object(everyones, value))
        return everyones

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace every gradient by the sum over the processes.

        A parameter without a gradient in one process counts as zero there; without one in all it stays without.
        """
        if self.size == 1:
            return
        has_gradient = [float(parameter.grad is not None) for parameter in parameters]
        used = [any(column) for column in zip(*self.gather(has_gradient), strict=True)]
        gradients = []
        for parameter, in_use in zip(parameters, used, strict=True):
            if in_use:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            self._together(lambda flat=flat: dist.all_reduce(flat))  # type: ignore[misc]
            pieces = flat.split([gradient.numel() for gradient in bucket])
            for gradient, piece in zip(bucket, pieces, strict=True):
                gradient.copy_(piece.view(gradient.shape))

    def from_leader(self, value: Any) -> Any:
        """What the leader holds; the others' `value` is not looked at."""
        if self.size == 1:
            return value
        box = [value if self.leads else None]
        self._together(lambda: dist.broadcast_object_list(box, src=0, device=torch.device(self.device)))
        return box[0]

    def copy_from_leader(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors with the leader's."""
        if self.size == 1:
            return
        for tensor in tensors:
            whole = tensor.detach().contiguous()  # NCCL and Gloo refuse channels-last strides
            self._together(lambda whole=whole: dist.broadcast(whole, src=0))  # type: ignore[misc]
            tensor.detach().copy_(whole)

    def leader_first(self, work: Callable[[], Result]) -> Result:
        """Have the leader do something before all others do it too."""
        if not self.leads:
            self.wait()
            return work()
        result = work()
        self.wait()
        return result

    def wait(self) -> None:
        """Return when every process has come here."""
        self.gather([0.0])

    def _together(self, collective: Callable[[], Any]) -> None:
        try:
            collective()
        except RuntimeError as error:
            if "out of memory" in str(error):
                raise
            reason = re.sub(r"^\[[^]]*\] ", "", str(error)).split(". ")[0]  # Gloo begins with a place in its source
            raise UserError(
                f"process {self.rank} of {self.size} lost the others ({reason})",
                "read what the process that failed first printed; the last checkpoint is kept",
            ) from error


ALONE = Team()


@contextmanager
def team(launch: Launch, device: str) -> Iterator[Team]:
    """Join the processes of this launch (Gloo on CPUs, NCCL on GPUs) for the duration of the block.

    When the block fails, the connections are not taken down in order, since that waits for the others: the end of the
    process is what tells them.
    """
    if launch.size == 1:
        yield Team(launch, device)
        return
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(0)  # the process sees no other GPU than its own
        device = "cuda:0"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        rank=launch.rank,
        world_size=launch.size,
        device_id=torch.device(device) if on_gpu else None,
    )
    yield Team(launch, device)
    dist.destroy_process_group()


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients in order, cut where the type changes or a bucket is full."""
    for _, group in itertools.groupby(gradients, key=lambda gradient: gradient.dtype):
        bucket: list[Tensor] = []
        for gradient in group:
            if bucket and sum(map(Tensor.numel, bucket)) + gradient.numel() > BUCKET_ELEMENTS:
                yield bucket
                bucket = []
            bucket.append(gradient)
        yield bucket
