"""What one image costs on a small machine: latency and memory of a model, one thread, a fresh process each."""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import timm
import torch

from attngeo.errors import UserError
from attngeo.evaluation.apart import Killed, apart
from attngeo.evaluation.macs import count
from attngeo.evaluation.timing import LEAST_REPEATS, keep_pages, peak_memory_mib, return_pages
from attngeo.models import registry  # noqa: F401  names the models to timm
from attngeo.ops import backend
from attngeo.training.seeding import generator

Row = dict[str, Any]

_CLASSES = 1000


def measure(size: str, kind: str, image_size: int, *, repeats: int, seconds: float) -> list[Row]:
    """Rows of one model (a pyramid size, one attention kind, plain MLPs) for one image of `image_size` px.

    `latency_ms` is the median of at most `repeats` forward passes, which end after `seconds`, with the range between
    quartiles; `memory_mib` what a forward takes at its peak beyond the weights, `weights_mib`. In inference mode, on
    the CPU, in float32, with one thread from here on.
    """
    torch.set_num_threads(1)
    return_pages()
    backend.forget()
    model = timm.create_model(f"softmaxformer_{size}", attention=kind, num_classes=_CLASSES, img_size=image_size).eval()
    image = torch.randn(1, 3, image_size, image_size, generator=generator(0, "edge image", image_size))

    def forward() -> None:
        with torch.inference_mode():
            model(image)

    memory = peak_memory_mib(forward, torch.device("cpu"))
    keep_pages()
    taken: list[float] = []
    while len(taken) < repeats and (sum(taken) < seconds or len(taken) < LEAST_REPEATS):
        start = time.perf_counter()
        forward()
        taken.append(time.perf_counter() - start)
    low, _, high = statistics.quantiles(taken, n=4, method="inclusive")
    counted = count(model, image_size)
    labels = {
        "size": size,
        "attention": kind,
        "image_size": image_size,
        "backend": "; ".join(f"{operator}: {what}" for operator, what in backend.ran().items()),
    }
    spread = {"spread": 1e3 * (high - low), "spread_kind": "range between quartiles"}
    values = [
        {"metric": "latency_ms", "value": 1e3 * statistics.median(taken), "unit": "ms", "n": len(taken)} | spread,
        {"metric": "memory_mib", "value": memory, "unit": "MiB", "n": 1},
        {"metric": "weights_mib", "value": _weight_bytes(model) / 2**20, "unit": "MiB", "n": 1},
        {"metric": "parameters", "value": counted.parameters, "unit": "1", "n": 1},
        {"metric": "gmac", "value": counted.total / 1e9, "unit": "GMAC", "n": 1},
        {"metric": "gmac_with_apart", "value": counted.total_with_apart / 1e9, "unit": "GMAC", "n": 1},
    ]
    return [labels | value for value in values]


def suite(
    image_sizes: Mapping[str, Sequence[int]], kinds: Sequence[str], *, repeats: int, seconds: float
) -> Iterator[list[Row]]:
    """The rows of every pyramid size with every kind at its image sizes, each measured in a process of its own.

    UserError naming the model whose process was killed, which happens where it needs more memory than there is.
    """
    for size, pixels in image_sizes.items():
        for image_size in pixels:
            for kind in kinds:
                try:
                    yield apart(measure, size, kind, image_size, repeats=repeats, seconds=seconds)
                except Killed as error:
                    raise UserError(
                        f"{size} with {kind} at {image_size} px was killed, probably for want of memory",
                        "leave that size out of benchmarks.edge, or the kind",
                    ) from error


def _weight_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
