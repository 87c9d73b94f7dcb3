"""What some layers of a model are given while it looks at images."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def layer_inputs(model: nn.Module, layers: Sequence[nn.Module], images: Tensor) -> list[tuple[Any, ...]]:
    """Each layer with its positional arguments, in the order in which they run; in eval mode, without gradients."""
    found: list[tuple[Any, ...]] = []

    def catch(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        found.append((layer, *arguments))

    hooks = [layer.register_forward_pre_hook(catch) for layer in layers]
    try:
        with torch.inference_mode():
            model.eval()(images)
    finally:
        for hook in hooks:
            hook.remove()
    return found
