"""The residual stream by depth: what stands between the blocks of a model, what each block adds, and its norms' gains.

Nothing here knows a family. Blocks are found by the attention inside them, norms by what they are, and whether a family
normalises before or after its steps is seen on the run: a block that ends with a norm returns what that norm returned.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attngeo.language_models.capture import stream_layers
from attngeo.language_models.loading import LoadedModel

ATTENTION, FEED_FORWARD = "attention", "feed_forward"


@dataclass(frozen=True)
class Step:
    """What is added to the stream between two norms: where it starts and the step itself, each [N, C]."""

    start: Tensor
    step: Tensor


@dataclass(frozen=True)
class StreamLayer:
    """One block: a step, or in a post-norm family one step before each norm; the gains [C] of its norms by half."""

    steps: tuple[Step, ...]
    gains: tuple[tuple[str, Tensor], ...]


@dataclass(frozen=True)
class ResidualStream:
    """States [L + 1, N, C] before, between and after L blocks, in float64, of the tokens asked for.

    In a pre-norm family the stream itself; in a post-norm one what the norm at the end of each block has been given, so
    that its gain and bias, which belong to the next block's weights, are not in the state.
    """

    states: Tensor
    layers: tuple[StreamLayer, ...]
    centred: bool
    """Whether the norms take the mean away (LayerNorm), or scale alone (RMSNorm)."""


@dataclass(frozen=True)
class _NormCall:
    given: Tensor
    returned: Tensor
    centred: bool


@dataclass
class _Block:
    start: Tensor
    end: Tensor = field(default_factory=lambda: torch.empty(0))
    norms: list[_NormCall] = field(default_factory=list)

    @property
    def ends_with_a_norm(self) -> bool:
        return bool(self.norms) and torch.equal(self.norms[-1].returned, self.end)


def residual_stream(loaded: LoadedModel, window: Tensor, positions: Sequence[int]) -> ResidualStream:
    """Run one window (token ids [N] or an image [3, H, W]) and keep the stream of the tokens at `positions`."""
    blocks: list[_Block] = []
    outside: list[_NormCall] = []
    running = False

    def taken(tensor: Tensor) -> Tensor:
        return tensor[0, list(positions)].double()

    def on_start(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal running
        running = True
        blocks.append(_Block(taken(args[0] if args else kwargs["hidden_states"])))

    def on_end(module: nn.Module, args: tuple[Any, ...], returned: Any) -> None:
        nonlocal running
        running = False
        blocks[-1].end = taken(returned if isinstance(returned, Tensor) else returned[0])

    def on_norm(module: nn.Module, args: tuple[Any, ...], returned: Tensor) -> None:
        if args[0].dim() == 3:
            call = _NormCall(taken(args[0]), taken(returned), isinstance(module, nn.LayerNorm))
            (blocks[-1].norms if running else outside).append(call)

    handles: list[RemovableHandle] = []
    attentions = [site.attention for site in loaded.sites]
    try:
        for block in _blocks(loaded.model, attentions):
            handles.append(block.register_forward_pre_hook(on_start, with_kwargs=True))
            handles.append(block.register_forward_hook(on_end))
        handles += [norm.register_forward_hook(on_norm) for norm in _norms(loaded.model, attentions)]
        stream_layers(loaded, window, lambda capture: None)
    finally:
        for handle in handles:
            handle.remove()
    return _stream(blocks, outside)


def _stream(blocks: list[_Block], outside: list[_NormCall]) -> ResidualStream:
    first = blocks[0].start
    if post_norm := blocks[0].ends_with_a_norm:
        first = next((call.given for call in outside if torch.equal(call.returned, first)), first)
        ends = [block.norms[-1].given for block in blocks]
    else:
        ends = [block.end for block in blocks]
    layers = []
    for block in blocks:
        if post_norm:
            starts = [block.start, *(call.returned for call in block.norms[:-1])]
            steps = tuple(Step(start, call.given - start) for start, call in zip(starts, block.norms, strict=True))
        else:
            steps = (Step(block.start, block.end - block.start),)
        layers.append(StreamLayer(steps, _gains(block.norms)))
    centred = any(call.centred for block in blocks for call in block.norms)
    return ResidualStream(torch.stack([first, *ends]), tuple(layers), centred)


def _gains(norms: list[_NormCall]) -> tuple[tuple[str, Tensor], ...]:
    """Gain of each norm, the first half of them in the order of their calls being the attention's.

    Read off what the norm does to these tokens, since families store it differently (Gemma's multiply by 1 + w): the
    slope of its output against the normalised input, channel by channel.
    """
    gains = []
    for place, call in enumerate(norms):
        states = call.given - call.given.mean(-1, keepdim=True) if call.centred else call.given
        states = states / states.square().mean(-1, keepdim=True).sqrt()
        deviations = states - states.mean(0)
        gain = (deviations * (call.returned - call.returned.mean(0))).sum(0) / deviations.square().sum(0)
        gains.append((ATTENTION if 2 * place < len(norms) else FEED_FORWARD, gain))
    return tuple(gains)


def _blocks(model: nn.Module, attentions: list[nn.Module]) -> Iterator[nn.Module]:
    """For each attention the outermost member of a list of modules that holds it."""
    members = [member for module in model.modules() if isinstance(module, nn.ModuleList) for member in module]
    for attention in attentions:
        yield next(member for member in members if any(part is attention for part in member.modules()))


def _norms(model: nn.Module, attentions: list[nn.Module]) -> Iterator[nn.Module]:
    """Norms with a gain, but for those inside of an attention: they are of single heads."""
    inside = {part for attention in attentions for part in attention.modules()}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if module not in inside and "norm" in type(module).__name__.lower() and isinstance(weight, Tensor):
            yield module
