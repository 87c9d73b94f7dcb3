"""Queries and keys as each layer compares them, handed over beside the maps that the model made of them."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attngeo.errors import UserError
from attngeo.language_models.capture import LayerCapture, stream_layers
from attngeo.language_models.loading import LoadedModel
from attngeo.language_models.sites import AttentionSite, ComparedVectors

_RECORDER = "attngeo_recorder"


@dataclass(frozen=True)
class Comparison:
    """One layer's queries and keys for one window (the batch axis of one is dropped)."""

    query: Tensor
    """As they are compared: after their norm, scale and rotary positions, [H, N, D]."""
    key: Tensor
    """[K, N, D]."""
    scaling: float
    bias: Tensor | None
    """Mask and position bias, [1 or H, 1 or N, N]."""
    soft_cap: float | None
    rotation: tuple[Tensor, Tensor] | None
    """Cosines and sines of the rotary positions, [N, R] each with R <= D; None for a family without."""

    def maps(self) -> Tensor:
        """Softmax of soft_cap tanh(scaling q k^T / soft_cap) + bias, float64 [H, N, N]."""
        query, key = self.query.double(), self.key.double()
        scores = query @ key.repeat_interleave(len(query) // len(key), dim=0).mT * self.scaling
        if self.soft_cap is not None:
            scores = self.soft_cap * (scores / self.soft_cap).tanh()
        if self.bias is not None:
            scores = scores + self.bias.double()
        return scores.softmax(-1)


def turned(vectors: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
    """Rotary positions in the half-split layout: component i of the first R is turned with component i + R/2.

    vectors [..., N, D], cosines and sines [N, R]; components from R on stay (partial rotary).
    """
    if rotation is None:
        return vectors
    cosines, sines = (part.to(vectors.dtype) for part in rotation)
    width = cosines.shape[-1]
    first, second = vectors[..., :width].chunk(2, dim=-1)
    quarter_turn = torch.cat((-second, first), dim=-1)
    return torch.cat((vectors[..., :width] * cosines + quarter_turn * sines, vectors[..., width:]), dim=-1)


def compared_vectors(site: AttentionSite, states: Tensor, rotation: tuple[Tensor, Tensor] | None) -> list[Tensor]:
    """Queries [H, N, D] and keys [K, N, D] from states [N, C] and the extracted W_Q and W_K alone, in float64."""
    vectors = []
    norms = (site.query_norm, site.key_norm)
    for projected, norm in zip(site.query_key_weights().project(states), norms, strict=True):
        vectors.append(turned(projected if norm is None else norm(projected), rotation))
    vectors[0] = site.query_scale * vectors[0]
    return vectors


def stream_comparisons(
    loaded: LoadedModel, inputs: Tensor, on_layer: Callable[[LayerCapture, Comparison], None]
) -> None:
    """`stream_layers` with what each layer compared; the maps stay those of the library's own eager attention.

    UserError for a class that computes its attention where neither the library's interface nor its adapter shows it.
    """
    pending: dict[int, Comparison] = {}

    def hand_over(capture: LayerCapture) -> None:
        if capture.layer not in pending:
            raise UserError(
                f"what layer {capture.layer} of the {loaded.adapter.name!r} model {loaded.id} compares cannot be seen: "
                "its class computes attention without the library's attention interface",
                "give its Architecture a `compared`",
            )
        on_layer(capture, pending.pop(capture.layer))

    with _recorded(loaded, pending):
        stream_layers(loaded, inputs, hand_over)


@contextmanager
def _recorded(loaded: LoadedModel, pending: dict[int, Comparison]) -> Iterator[None]:
    """Inside, every attention call of the model leaves its comparison in `pending`, by layer."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    rotations: dict[int, tuple[Tensor, Tensor] | None] = {}
    sites, compared = loaded.adapter.sites(loaded.model), loaded.adapter.compared
    layers = {site.attention: layer for layer, site in enumerate(sites)}

    def note(layer: int, vectors: ComparedVectors) -> None:
        bias = None if vectors.bias is None else vectors.bias[0]
        pending[layer] = Comparison(
            vectors.query[0], vectors.key[0], vectors.scaling, bias, vectors.soft_cap, rotations.pop(layer)
        )

    def on_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        positions = given.get("position_embeddings")
        rotations[layers[module]] = None if positions is None else (positions[0][0], positions[1][0])
        if compared is not None:
            note(layers[module], compared(sites[layers[module]], given["hidden_states"], given))

    def record(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> Any:
        own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if own is None:
            raise UserError(
                f"{type(module).__name__} of the {loaded.adapter.name!r} model {loaded.id} has no eager attention",
                "give its Architecture a `compared`",
            )
        if module in layers:
            scaling = options.get("scaling")
            bias = options.get("position_bias")
            if attention_mask is not None:
                bias = attention_mask if bias is None else bias + attention_mask
            scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
            note(layers[module], ComparedVectors(query, key, scaling, bias, options.get("softcap")))
        return own(module, query, key, value, attention_mask, **options)

    handles = [site.attention.register_forward_pre_hook(on_call, with_kwargs=True) for site in sites]
    if compared is None:
        AttentionInterface.register(_RECORDER, record)
        AttentionMaskInterface.register(_RECORDER, eager_mask)
        loaded.model.set_attn_implementation(_RECORDER)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if compared is None:
            loaded.model.set_attn_implementation("eager")
