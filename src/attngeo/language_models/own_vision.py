"""Pyramids trained here, opened up for the connection walk: W_V, W_O, norms, and the maps of any attention kind.

Every kind is y = sum_j A_ij v_j W_O + b_O with v = h W_V + b_V, whatever makes its rows A: softmax, a kernel by its
landmarks, whitened rows, a metric. Some rows do not sum to 1 and some are signed; the walk needs neither. What a block
adds beside it, a local convolution of the values in front of W_O, is handed over apart.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from attngeo.errors import UserError
from attngeo.language_models.architectures import Architecture, AttentionSite
from attngeo.language_models.capture import LayerCapture
from attngeo.language_models.loading import LoadedModel


@dataclass(frozen=True)
class BlockCapture:
    """One block's attention for one image: the walk's part of its output, and what stands beside it [N, C], if any."""

    walk: LayerCapture
    beside: Tensor | None


def opened_pyramid(model: nn.Module, model_id: str) -> LoadedModel:
    """A pyramid as a model to analyse; its family is the attention kind, or the kinds of its stages."""
    kinds = dict.fromkeys(block.attention.kind for block in _blocks(model))
    return LoadedModel(
        model=model,
        tokenizer=None,
        adapter=Architecture(
            name=f"{'+'.join(kinds)} pyramid",
            model_class=type(model).__name__,
            reads="images",
            causal=False,
            norm="pre",
            sites=pyramid_sites,
        ),
        id=model_id,
        quantised=None,
        stored_dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
    )


def pyramid_sites(model: Any) -> list[AttentionSite]:
    """The attention of every block, first block first; UserError for a kind that is no sum of rows times values."""
    sites = []
    for block in _blocks(model):
        layer = block.attention
        value_weight, value_bias = _value_map(layer)
        sites.append(
            AttentionSite(
                attention=layer,
                projection=layer.projection,
                result=layer,
                value_weight=value_weight,
                value_bias=value_bias,
                output_weight=layer.projection.weight.T,
                output_bias=layer.projection.bias,
                gain=block.norm1.weight,
                shift=block.norm1.bias,
                heads=layer.heads,
                groups=layer.heads,
            )
        )
    return sites


@torch.no_grad()
def stream_blocks(loaded: LoadedModel, image: Tensor, on_block: Callable[[BlockCapture], None]) -> None:
    """Run one image [3, S, S] and call `on_block` as each block's attention finishes; no two maps are held."""
    handles: list[RemovableHandle] = []
    caught: dict[str, Tensor] = {}

    def listen(index: int, layer: Any) -> None:
        local = getattr(layer, "local_convolution", None)

        def on_local(module: nn.Module, args: tuple[Any, ...], returned: Tensor) -> None:
            caught["local"] = returned

        def on_projection(module: nn.Module, args: tuple[Any, ...]) -> None:
            caught["projected"] = args[0]

        def on_attention(module: nn.Module, args: tuple[Any, ...], returned: Tensor) -> None:
            x, grid = args
            heads, output, beside = caught.pop("projected"), returned, None
            if "local" in caught:
                convolved = caught.pop("local")
                beside = F.linear(convolved, layer.projection.weight)
                heads, output, beside = heads - convolved, output - beside, beside[0]
            maps = layer.attention_rows(x, grid, torch.arange(x.shape[1]))[0]
            on_block(BlockCapture(LayerCapture(index, x[0], maps, heads[0], output[0]), beside))

        handles.append(layer.projection.register_forward_pre_hook(on_projection))
        handles.append(layer.register_forward_hook(on_attention))
        if local is not None:
            handles.append(local.register_forward_hook(on_local))

    for index, block in enumerate(_blocks(loaded.model)):
        listen(index, block.attention)
    try:
        loaded.model(image[None])
    finally:
        for handle in handles:
            handle.remove()


def _blocks(model: Any) -> list[Any]:
    return [block for stage in model.stages for block in stage.blocks]


def _value_map(layer: Any) -> tuple[Tensor, Tensor | None]:
    """W_V [C, C] and its bias [C], from a projection of its own or from the last third of a joint one."""
    if hasattr(layer, "attention_rows") and hasattr(layer, "value"):
        return layer.value.weight.T, layer.value.bias
    if hasattr(layer, "attention_rows") and hasattr(layer, "query_key_value"):
        joint, width = layer.query_key_value, layer.dim
        return joint.weight[2 * width :].T, None if joint.bias is None else joint.bias[2 * width :]
    raise UserError(
        f"attention kind {layer.kind!r} is no sum of rows times values of the tokens",
        "let runs of other kinds feed fig10",
    )
