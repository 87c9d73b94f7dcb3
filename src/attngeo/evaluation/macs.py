"""Multiply-accumulates and parameters of a model, by a counting rule that is printed with the numbers."""

import copy
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from attngeo.layers.attention import Grid, TokenMacs

COUNTING_RULE = (
    "One multiply-accumulate counts as one; the papers' 'FLOPs' are taken as these. The total holds convolutions, "
    "linear layers and products of tokens with tokens, landmarks or values. Listed apart: one for each |a - b| of a "
    "distance, the matrix solver, the Nystrom products of landmark size with the row statistics, and metric "
    "inversions. Norms, activations, biases, exponentials and pooling are not counted."
)


@dataclass(frozen=True)
class MacCount:
    """Multiply-accumulates of one image; `uncounted` names attention classes that give no count of their own."""

    image_size: tuple[int, int]
    parameters: int
    convolution: int
    linear: int
    products: int
    nystrom: int
    distance: int
    solver: int
    metric: int
    uncounted: tuple[str, ...]

    @property
    def total(self) -> int:
        """Convolutions, linear layers and token products: the number to set beside a paper's."""
        return self.convolution + self.linear + self.products

    @property
    def total_with_apart(self) -> int:
        """The total and all that the rule lists apart."""
        return self.total + self.nystrom + self.distance + self.solver + self.metric

    def as_record(self) -> dict[str, Any]:
        """What a run's record keeps: parameters, counts in units of 10^9, and the rule that they follow."""
        apart = ("nystrom", "distance", "solver", "metric")
        return {
            "parameters": self.parameters,
            "gmac": self.total / 1e9,
            "gmac_with_apart": self.total_with_apart / 1e9,
            **{f"gmac_{name}": getattr(self, name) / 1e9 for name in apart},
            "gmac_uncounted": list(self.uncounted),
            "gmac_rule": COUNTING_RULE,
        }


def parameter_count(model: nn.Module) -> int:
    """Number of trainable parameters, a shared one counted once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def count_macs(model: nn.Module, image_size: int | tuple[int, int], *, in_chans: int = 3) -> dict[str, Any]:
    """The record of `count` for one image of `image_size` (height, width in px)."""
    return count(model, image_size, in_chans=in_chans).as_record()


def count(model: nn.Module, image_size: int | tuple[int, int], *, in_chans: int = 3) -> MacCount:
    """Count one image of `image_size` (height, width in px) through `model`, without computing anything.

    Only shapes are computed (fake tensors on a copy), so that the largest size costs little. Layers that have a
    `token_macs(grid)` are asked for their products; attention layers (they have a `kind`) without it are named in
    `uncounted`, since their linear and convolution modules alone would be too small a number.
    """
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    fake = FakeTensorMode()
    # Parameters are replaced in the copy, not copied: the layers may note things on themselves during a forward.
    replaced = {id(tensor): fake.from_tensor(tensor) for tensor in chain(model.parameters(), model.buffers())}
    ghost = copy.deepcopy(model, replaced).eval()
    convolution = linear = 0
    tokens: list[TokenMacs] = []
    uncounted: set[str] = set()
    grid: Grid = (0, 0)

    def on_convolution(module: nn.Conv2d, _: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal convolution
        taps = module.kernel_size[0] * module.kernel_size[1] * module.in_channels // module.groups
        convolution += output.numel() * taps

    def on_linear(module: nn.Linear, _: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal linear
        linear += output.numel() * module.in_features

    def on_layer(module: nn.Module, arguments: tuple[Any, ...], _: Tensor) -> None:
        # Attention layers are handed their grid; a feed-forward comes after one of the same block.
        nonlocal grid
        if len(arguments) > 1:
            grid = arguments[1]
        layer_count = getattr(module, "token_macs", None)
        if layer_count is None:
            uncounted.add(type(module).__name__)
        else:
            tokens.append(layer_count(grid))

    for module in ghost.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(on_convolution)
        elif isinstance(module, nn.Linear):
            module.register_forward_hook(on_linear)
        elif hasattr(module, "token_macs") or isinstance(getattr(module, "kind", None), str):
            module.register_forward_hook(on_layer)
    parameter = next(model.parameters())
    with torch.no_grad(), fake:
        ghost(torch.empty(1, in_chans, height, width, device=parameter.device, dtype=parameter.dtype))
    return MacCount(
        image_size=(height, width),
        parameters=parameter_count(model),
        convolution=convolution,
        linear=linear,
        products=sum(layer.products for layer in tokens),
        nystrom=sum(layer.nystrom for layer in tokens),
        distance=sum(layer.distance for layer in tokens),
        solver=sum(layer.solver for layer in tokens),
        metric=sum(layer.metric for layer in tokens),
        uncounted=tuple(sorted(uncounted)),
    )
