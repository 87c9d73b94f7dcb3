"""What the attention layers of vision models compare: queries and keys, of pretrained models and of our pyramids."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attngeo.errors import UserError
from attngeo.evaluation.layer_inputs import layer_inputs
from attngeo.layers.attention import Grid
from attngeo.layers.kernel_attention import KernelAttention
from attngeo.layers.softmax import SoftmaxAttention

if TYPE_CHECKING:
    from attngeo.language_models.loading import LoadedModel


@dataclass(frozen=True)
class TokenLayer:
    """Queries and keys [images, heads, N, D] of one layer, their tokens on a grid; shared keys are the same tensor."""

    name: str
    queries: Tensor
    keys: Tensor
    grid: Grid

    @property
    def shared(self) -> bool:
        """Whether the keys are the queries."""
        return self.keys is self.queries


def stage_inputs(model: nn.Module, images: Tensor) -> list[tuple[Any, Tensor, Grid]]:
    """The last attention layer of every stage of a pyramid with what it is given: tokens [B, N, C] and their grid."""
    layers = [stage.blocks[-1].attention for stage in model.stages]  # type: ignore[union-attr]
    return layer_inputs(model, layers, images)


def trained_layers(model: nn.Module, images: Tensor) -> list[TokenLayer]:
    """Queries and keys of the last attention layer of every stage of a pyramid, as its kernel or softmax takes them.

    Both are turned by their rotary angles and scaled by D^(-1/4). UserError for a kind that compares no queries and
    keys by softmax or a kernel.
    """
    layers = []
    for number, (layer, x, grid) in enumerate(stage_inputs(model, images), start=1):
        with torch.inference_mode():
            queries, keys = _queries_and_keys(layer, x, grid)
        layers.append(TokenLayer(f"stage {number}", queries, keys, grid))
    return layers


def pretrained_layers(
    loaded: "LoadedModel", images: Tensor, layers: Sequence[int]
) -> tuple[list[TokenLayer], list[TokenLayer]]:
    """Of layers of a pretrained vision transformer, from 0: its heads' queries and keys, and the states behind them.

    Both are without the class token. Queries and keys are scaled by D^(-1/4) each; the hidden states that leave a
    layer are layer-normalised without gain, one head, query and key at once, also scaled by D^(-1/4). UserError for a
    layer that is not there, and for patches that fill no square.
    """
    sites = loaded.sites
    beyond = [layer for layer in layers if not 0 <= layer < len(sites)]
    if beyond:
        raise UserError(f"{loaded.id} has layers 0 to {len(sites) - 1}, not {beyond[0]}", "choose layers it has")
    inputs: dict[int, Tensor] = {}

    def listen(layer: int) -> Any:
        def catch(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            inputs[layer] = arguments[0] if arguments else named["hidden_states"]

        return sites[layer].attention.register_forward_pre_hook(catch, with_kwargs=True)

    hooks = [listen(layer) for layer in layers]
    try:
        with torch.inference_mode():
            hidden = loaded.model(images, output_hidden_states=True).hidden_states
            attended, states = [], []
            for layer in layers:
                attention: Any = sites[layer].attention
                state = hidden[layer + 1][:, 1:]
                side = math.isqrt(state.shape[1])
                if side * side != state.shape[1]:
                    raise UserError(f"{loaded.id} makes {state.shape[1]} patches of these images", "give square images")
                name, grid = f"layer {layer}", (side, side)
                queries, keys = (
                    _scaled(project(inputs[layer])[:, 1:].unflatten(-1, (sites[layer].heads, -1)).transpose(1, 2))
                    for project in (attention.q_proj, attention.k_proj)
                )
                attended.append(TokenLayer(name, queries, keys, grid))
                state = _scaled(F.layer_norm(state, state.shape[-1:]).unsqueeze(1))
                states.append(TokenLayer(name, state, state, grid))
    finally:
        for hook in hooks:
            hook.remove()
    return attended, states


def _queries_and_keys(layer: Any, x: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    if isinstance(layer, KernelAttention):
        query, key = layer.features(x, grid)
        return query, query if key is None else key
    if isinstance(layer, SoftmaxAttention):
        query, key, _ = (layer.split_heads(part) for part in layer.query_key_value(x).chunk(3, dim=-1))
        return _scaled(layer.rotate(query, grid)), _scaled(layer.rotate(key, grid))
    raise UserError(
        f"attention kind {layer.kind!r} has no queries and keys to take distances between",
        "choose runs with softmax attention or a kernel",
    )


def _scaled(x: Tensor) -> Tensor:
    return x * x.shape[-1] ** -0.25
