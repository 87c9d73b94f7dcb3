"""Texts of different lengths in one padded batch, each with the numbers that it has alone, up to rounding.

The mask comes from the lengths and never from token ids: no padding token is needed, and an end-of-text token inside a
text is a token like any other. Padding stands behind the text, so that no position moves.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attngeo.errors import UserError
from attngeo.language_models.capture import LayerCapture, stream_layers
from attngeo.language_models.loading import LoadedModel

_FILLER = 0  # any id would do: the mask hides it


def stream_batch(loaded: LoadedModel, windows: Sequence[Tensor], on_layer: Callable[[int, LayerCapture], None]) -> None:
    """Run windows of token ids, [N] each, at once; `on_layer(index, capture)` is called for each, layer by layer.

    A layer's weights are read once for all of them. UserError for a vision model.
    """
    if loaded.adapter.reads != "tokens":
        raise UserError(f"{loaded.id} reads {loaded.adapter.reads}, which have one length", "run them one by one")
    if len(windows) == 1:
        stream_layers(loaded, windows[0], lambda capture: on_layer(0, capture))
        return
    lengths = [len(window) for window in windows]
    ids = torch.full((len(windows), max(lengths)), _FILLER)
    for row, window in zip(ids, windows, strict=True):
        row[: len(window)] = window
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()

    def unwrap(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | {"input_ids": ids, "attention_mask": mask}

    def split(capture: LayerCapture) -> None:
        for index, tokens in enumerate(lengths):
            on_layer(index, _of_window(capture, index, tokens))

    handle = loaded.model.register_forward_pre_hook(unwrap, with_kwargs=True)
    try:
        stream_layers(loaded, ids, split)
    finally:
        handle.remove()


def _of_window(capture: LayerCapture, index: int, tokens: int) -> LayerCapture:
    """One window's part of a batch's capture, without its padding."""
    parts: dict[str, Any] = {}
    for part in dataclasses.fields(capture):
        batch = getattr(capture, part.name)
        if isinstance(batch, Tensor):
            whole = batch[index]
            parts[part.name] = whole[:, :tokens, :tokens] if part.name == "attention" else whole[:tokens]
    return dataclasses.replace(capture, **parts)
