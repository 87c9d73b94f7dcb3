"""Attention maps and block outputs, handed over one layer at a time while the model runs: no two layers are held.

The same goes for precision: `in_float64` upcasts one block while it runs, so that a model needs the memory of its
stored weights and of one block in float64, and half-precision weights never meet a half-precision operation.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from attngeo.language_models.loading import LoadedModel
from attngeo.processors import one_thread

SMALL = 512  # tokens; what is measured on maps of at most this size takes longer with a second thread


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
    """What the attention returns to its block, [N, C]: what is added to the residual stream where no norm follows."""


@torch.no_grad()
def stream_layers(loaded: LoadedModel, inputs: Tensor, on_layer: Callable[[LayerCapture], None]) -> None:
    """Run one window and call `on_layer`, in one thread up to `SMALL` tokens, as each layer's attention finishes.

    A window is token ids [N], an image [3, H, W] or log-mel features [F, T]. Token ids are one text: an encoder that
    knows two segments takes them for its first one.
    """
    pending: dict[str, Tensor] = {}
    handles: list[RemovableHandle] = []

    def finish(layer: int) -> None:
        if {"attention_input", "attention", "head_outputs", "output"} <= pending.keys():
            captured = LayerCapture(layer, **{name: tensor.squeeze(0) for name, tensor in pending.items()})
            pending.clear()
            with one_thread() if captured.attention.shape[-1] <= SMALL else nullcontext():
                on_layer(captured)

    def listen(layer: int) -> None:
        site = sites[layer]

        def on_attention(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> Any:
            pending["attention_input"] = args[0] if args else kwargs["hidden_states"]
            if site.result is module:
                pending["output"] = returned[0]
            if isinstance(site.maps, int):
                if returned[site.maps] is None:
                    raise ValueError(f"layer {layer} keeps no attention maps: load the model with eager attention")
                pending["attention"] = returned[site.maps]
                # Some models hold on to what a layer returns until the next one has run.
                returned = tuple(None if place == site.maps else item for place, item in enumerate(returned))
            finish(layer)
            return returned

        def on_maps(module: nn.Module, args: tuple[Any, ...]) -> None:
            pending["attention"] = args[0]

        def on_projection(module: nn.Module, args: tuple[Any, ...]) -> None:
            pending["head_outputs"] = args[0]

        def on_result(module: nn.Module, args: tuple[Any, ...], returned: Any) -> None:
            pending["output"] = returned
            finish(layer)

        handles.append(site.attention.register_forward_hook(on_attention, with_kwargs=True))
        handles.append(site.projection.register_forward_pre_hook(on_projection))
        if isinstance(site.maps, nn.Module):
            handles.append(site.maps.register_forward_pre_hook(on_maps))
        if site.result is not site.attention:
            handles.append(site.result.register_forward_hook(on_result))

    sites = loaded.adapter.sites(loaded.model)  # the modules alone: their weights may not be in memory yet
    for layer in range(len(sites)):
        listen(layer)
    adapter = loaded.adapter
    options = dict(adapter.call_options)
    if adapter.causal:
        options["use_cache"] = False
    if adapter.reads == "audio":  # models of images bring theirs to the precision of their weights themselves
        inputs = inputs.to(next(loaded.model.parameters()).dtype)
    options[adapter.input_name] = inputs[None]
    try:
        loaded.model(**options)
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def in_float64(loaded: LoadedModel) -> Iterator[None]:
    """Inside, the model computes in float64; its parameters are the stored ones again as soon as each block is left.

    What stands outside of the blocks, large vocabularies excepted, is upcast all the while.
    """
    handles: list[RemovableHandle] = []
    stored: dict[nn.Parameter, Tensor] = {}

    def upcast(parameters: Iterator[nn.Parameter]) -> None:
        for parameter in parameters:
            stored.setdefault(parameter, parameter.data)
            parameter.data = parameter.data.double()

    def restore(module: nn.Module) -> None:
        for parameter in module.parameters():
            if parameter in stored:
                parameter.data = stored.pop(parameter)

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        upcast(module.parameters())

    def leave(module: nn.Module, args: tuple[Any, ...], returned: Any) -> Any:
        restore(module)
        is_state = isinstance(returned, Tensor) and returned.is_floating_point()
        return returned.double() if is_state else returned

    def look_up(module: Any, args: tuple[Any, ...], returned: Tensor) -> Tensor:
        # A lookup is exact in any precision: a large vocabulary is not copied, only what comes out of it.
        if not hasattr(module, "embed_scale"):
            return returned.double()
        # Gemma scales what it looks up: the product belongs in float64, too.
        return nn.functional.embedding(args[0], module.weight).double() * module.embed_scale.double()

    blocks = list(_blocks(loaded.model))
    within = {module for block in blocks for module in block.modules()}
    for block in blocks:
        handles.append(block.register_forward_pre_hook(enter))
        handles.append(block.register_forward_hook(leave))
    try:
        for module in loaded.model.modules():
            if module in within:
                continue
            if isinstance(module, nn.Embedding):
                handles.append(module.register_forward_hook(look_up))
            else:
                upcast(module.parameters(recurse=False))
        yield
    finally:
        for handle in handles:
            handle.remove()
        restore(loaded.model)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The layers, which run one after the other."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _blocks(child)


@contextmanager
def working_precision_softmax() -> Iterator[None]:
    """Inside, every softmax runs in the dtype of its scores; some families compute it in float32 even for float64."""
    with _WorkingPrecisionSoftmax():
        yield


class _WorkingPrecisionSoftmax(TorchFunctionMode):
    """The library's own attention code runs, whatever it adds to its scores; only the precision it asks for changes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is nn.functional.softmax:
            options.pop("dtype", None)
        return func(*args, **options)
