"""What the registrations of all operators share: autocast, vmap, and the refusal of a second derivative."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def register_forward(name: str, fake: Callable[..., Any], gradient: Callable[..., Any], context: Any) -> None:
    """Teach torch about an operator that is differentiated: its shapes, its gradient, autocast to float32, vmap."""
    _register_shapes(name, fake)
    torch.library.register_autograd(f"attngeo::{name}", gradient, setup_context=context)
    for device in ("cpu", "cuda"):
        torch.library.register_autocast(f"attngeo::{name}", device, torch.float32)


def register_backward(name: str, fake: Callable[..., Any], differentiated: str) -> None:
    """The same for the gradient of `differentiated`, which cannot be differentiated again."""

    def refuse(ctx: Any, *gradients: Tensor) -> None:
        raise NotImplementedError(f"the compiled {differentiated} has no second derivative: use backend='naive'")

    _register_shapes(name, fake)
    torch.library.register_autograd(f"attngeo::{name}", refuse)


def _register_shapes(name: str, fake: Callable[..., Any]) -> None:
    torch.library.register_fake(f"attngeo::{name}", fake)
    torch.library.register_vmap(f"attngeo::{name}", _batched(getattr(torch.ops.attngeo, name)))


def _batched(operator: Any) -> Callable[..., Any]:
    """vmap rule: the operators take any leading axes, so the mapped one becomes the first of them."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        moved = []
        for argument, axis in zip(arguments, in_dims, strict=True):
            if axis is not None:
                argument = argument.movedim(axis, 0)
            elif isinstance(argument, Tensor):
                argument = argument.expand(info.batch_size, *argument.shape)
            moved.append(argument)
        outputs = operator(*moved)
        return outputs, (0,) * len(outputs) if isinstance(outputs, tuple) else 0

    return rule
