"""Attention maps and block outputs, handed over one layer at a time while the model runs: no two layers are held.

The same goes for precision: `in_float64` upcasts one block while it runs, so that a model needs the memory of its
stored weights and of one block in float64, and half-precision weights never meet a half-precision operation.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attngeo.language_models.loading import LoadedModel

WORKING_PRECISION_SOFTMAX = "attngeo_working_precision"


@dataclass(frozen=True)
class LayerCapture:
    """What one layer's attention read and wrote for one window (the batch axis of one is dropped)."""

    layer: int
    attention_input: Tensor
    """h [N, C]: what attention reads, norm and its gain included."""
    attention: Tensor
    """Maps as the model used them, [H, N, N]."""
    head_outputs: Tensor
    """Heads' outputs before W_O, [N, H D]."""
    output: Tensor
    """What the block adds to the residual stream, [N, C]."""


@torch.no_grad()
def stream_layers(loaded: LoadedModel, inputs: Tensor, on_layer: Callable[[LayerCapture], None]) -> None:
    """Run one window (token ids [N] or an image [3, H, W]) and call `on_layer` as each layer's attention finishes."""
    pending: dict[str, Tensor] = {}
    handles: list[RemovableHandle] = []

    def finish(layer: int) -> None:
        if {"attention_input", "attention", "head_outputs", "output"} <= pending.keys():
            captured = LayerCapture(layer, **{name: tensor[0] for name, tensor in pending.items()})
            pending.clear()
            on_layer(captured)

    def listen(layer: int) -> None:
        site = sites[layer]

        def on_attention(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> None:
            if returned[1] is None:
                raise ValueError(f"layer {layer} keeps no attention maps: load the model with eager attention")
            pending["attention_input"] = args[0] if args else kwargs["hidden_states"]
            pending["attention"] = returned[1]
            if site.result is module:
                pending["output"] = returned[0]
            finish(layer)

        def on_projection(module: nn.Module, args: tuple[Any, ...]) -> None:
            pending["head_outputs"] = args[0]

        def on_result(module: nn.Module, args: tuple[Any, ...], returned: Any) -> None:
            pending["output"] = returned
            finish(layer)

        handles.append(site.attention.register_forward_hook(on_attention, with_kwargs=True))
        handles.append(site.projection.register_forward_pre_hook(on_projection))
        if site.result is not site.attention:
            handles.append(site.result.register_forward_hook(on_result))

    sites = loaded.sites
    for layer in range(len(sites)):
        listen(layer)
    try:
        if loaded.adapter.reads == "images":
            loaded.model(pixel_values=inputs[None])
        else:
            options = {"use_cache": False} if loaded.adapter.causal else {}
            loaded.model(input_ids=inputs[None], **options)
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def in_float64(loaded: LoadedModel) -> Iterator[None]:
    """Inside, the model computes in float64; its parameters are the stored ones again as soon as each block is left."""
    handles: list[RemovableHandle] = []
    stored: dict[nn.Parameter, Tensor] = {}

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        # A lookup is exact in any precision: a large vocabulary is not copied, only what comes out of it.
        if not isinstance(module, nn.Embedding):
            for parameter in module.parameters():
                stored[parameter] = parameter.data
                parameter.data = parameter.data.double()

    def leave(module: nn.Module, args: tuple[Any, ...], returned: Any) -> Any:
        restore(module)
        is_state = isinstance(returned, Tensor) and returned.is_floating_point()
        return returned.double() if is_state else returned

    def restore(module: nn.Module) -> None:
        for parameter in module.parameters():
            if parameter in stored:
                parameter.data = stored.pop(parameter)

    for block in _blocks(loaded.model):
        handles.append(block.register_forward_pre_hook(enter))
        handles.append(block.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        restore(loaded.model)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that run one after the other: layers one by one, and whatever stands before and after them."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        elif any(isinstance(grandchild, nn.ModuleList) for grandchild in child.children()):
            yield from _blocks(child)
        else:
            yield child


@contextmanager
def working_precision_softmax(loaded: LoadedModel) -> Iterator[None]:
    """Inside, the softmax runs in the dtype of the states; some families compute it in float32 even for float64."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(WORKING_PRECISION_SOFTMAX, _working_precision_attention)
    AttentionMaskInterface.register(WORKING_PRECISION_SOFTMAX, eager_mask)
    loaded.model.set_attn_implementation(WORKING_PRECISION_SOFTMAX)
    try:
        yield
    finally:
        loaded.model.set_attn_implementation("eager")


def _working_precision_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The library's attention interface: query [B, H, N, D], key and value [B, K, N, D] -> ([B, N, H, D], maps)."""
    heads_per_group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(heads_per_group, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if attention_mask is not None:
        scores = scores + attention_mask
    attention = scores.softmax(dim=-1)
    return (attention @ value).transpose(1, 2).contiguous(), attention
