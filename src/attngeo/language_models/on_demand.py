"""Weights of a model that is too large for memory: on disk, or not yet drawn, until the layer runs that needs them.

A checkpoint is mapped into memory and its pages are given back after every layer, so that the numbers are those of the
whole model, bit for bit. An untrained network has no file; each of its layers is drawn when it is needed, from a seed
of its own, and forgotten when the next one runs.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from attngeo.errors import UserError
from attngeo.language_models.architectures import AttentionSite
from attngeo.training.seeding import derive_seed

_Build = Callable[[], list[AttentionSite]]


class WeightsOnDemand(Protocol):
    """Has the weights of one layer at a time."""

    def site(self, build: _Build, layer: int) -> AttentionSite:
        """The attention of a layer with its weights in reach; `build` lists all layers as they are now."""


class SitesOnDemand(list[AttentionSite]):
    """Attention of each layer; looking one up brings its weights and lets those of the one before go."""

    def __init__(self, weights: WeightsOnDemand, build: _Build) -> None:
        super().__init__(build())
        self._weights, self._build = weights, build

    def __getitem__(self, layer: Any) -> Any:
        if isinstance(layer, slice):
            return [self[index] for index in range(*layer.indices(len(self)))]
        return self._weights.site(self._build, range(len(self))[layer])

    def __iter__(self) -> Iterator[AttentionSite]:
        return (self[layer] for layer in range(len(self)))


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that run one after the other: layers one by one, and whatever stands before and after them."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        elif any(isinstance(grandchild, nn.ModuleList) for grandchild in child.children()):
            yield from blocks(child)
        else:
            yield child


class MappedWeights:
    """Gives the pages of a model's mapped weight files back after each of its blocks; nothing may write to them.

    Holds the mappings, so that no address is given back that something else has taken.
    """

    def __init__(self, model: nn.Module, files: list[Path]) -> None:
        self._held: dict[tuple[int, int], Tensor] = {}
        mappings = _mappings({os.path.realpath(file) for file in files})
        for parameter in model.parameters():
            place = next((m for m in mappings if m[0] <= parameter.data_ptr() < m[1]), None)
            if place is not None:
                self._held[place] = parameter.detach()
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        # A weak reference: model and weights in a circle would outlive their last use until a collection.
        this = weakref.ref(self)
        for block in blocks(model):
            block.register_forward_hook(lambda *_: weights.release() if (weights := this()) else None)

    def release(self) -> None:
        """Give all pages back; what is read again comes from the file, or from the system's cache of it."""
        for begin, end in self._held:
            self._madvise(begin, end - begin, mmap.MADV_DONTNEED)

    def site(self, build: _Build, layer: int) -> AttentionSite:
        self.release()
        return build()[layer]


def _mappings(files: set[str]) -> list[tuple[int, int]]:
    """Address ranges [begin, end) of this process that are mapped from the given files."""
    found = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").split("\n"):
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and parts[5] in files:
            begin, _, end = parts[0].partition("-")
            found.append((int(begin, 16), int(end, 16)))
    return found


class UntrainedWeights:
    """Draws the blocks of a model on the meta device by the library's own initialisation, each from its own seed.

    With `tables_from_above` the model's own initialisation, which then draws nothing, follows that of each part.

    Raises UserError where that initialisation leaves a parameter of a supported family unset.
    """

    def __init__(self, model: Any, seed: int, *, tables_from_above: bool = False) -> None:
        self._model, self._seed, self._tables_from_above = model, seed, tables_from_above
        self._names = {module: name for name, module in model.named_modules()}
        self._blocks = list(blocks(model))
        self._running: nn.Module | None = None
        self._places = _places(model)
        inside = {module for block in self._blocks for module in block.modules()}
        self._make_buffers()
        for module in self._names:
            if module not in inside:
                self._draw([module], partial(model._init_weights, module))

    def draw_all(self) -> None:
        """Draw every block, for a model that fits into memory."""
        for block in self._blocks:
            self._draw_block(block)

    def draw_as_they_run(self) -> None:
        """From here on a block is drawn when it runs, and forgotten when another one does."""
        this = weakref.ref(self)
        for block in self._blocks:
            block.register_forward_pre_hook(lambda module, _: weights._enter(module) if (weights := this()) else None)

    def site(self, build: _Build, layer: int) -> AttentionSite:
        """The attention of a layer, drawn without the feed-forward matrices beside it."""
        site = build()[layer]
        home = next(block for block in self._blocks if site.attention in set(block.modules()))
        if home is not self._running:
            self._forget(home)
            wanted = {site.attention, site.projection, site.result}
            for unit in _units(home):
                matrices = any(parameter.dim() > 1 for parameter in unit.parameters())
                if not matrices or wanted & set(unit.modules()):
                    self._draw_unit(unit)
        return build()[layer]

    def _enter(self, block: nn.Module) -> None:
        self._forget(block)
        self._draw_block(block)
        self._running = block

    def _forget(self, kept: nn.Module) -> None:
        self._running = None
        shared = {id(parameter) for parameter in kept.parameters()}
        shared |= {id(parameter) for parameter in self._model.parameters() if parameter.is_meta}
        for block in self._blocks:
            self._replace(block.modules(), lambda parameter: torch.empty_like(parameter, device="meta"), shared)

    def _draw_block(self, block: nn.Module) -> None:
        for unit in _units(block):
            self._draw_unit(unit)

    def _draw_unit(self, unit: nn.Module) -> None:
        if any(parameter.is_meta for parameter in unit.parameters()):
            self._draw(list(unit.modules()), partial(self._initialise, unit))

    def _initialise(self, unit: nn.Module) -> None:
        unit.apply(self._model._init_weights)
        if self._tables_from_above:
            self._model._init_weights(self._model)

    def _draw(self, owners: list[nn.Module], initialise: Callable[[], Any]) -> None:
        drawn = [(owner, name) for owner in owners for name, _ in owner.named_parameters(recurse=False)]
        if not drawn:
            return
        first, _ = self._places[drawn[0]][0]  # of tied weights the same, whichever of their modules runs
        self._replace(owners, lambda parameter: torch.full_like(parameter, torch.nan, device="cpu"))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(derive_seed(self._seed, f"untrained {self._names[first]}"))
            initialise()
        for owner in owners:
            for key, parameter in owner.named_parameters(recurse=False):
                if bool(parameter.isnan().any()):
                    raise UserError(
                        f"the initialisation of {type(self._model).__name__} leaves {self._names[owner]}.{key} unset",
                        "initialise it in the model's _init_weights",
                    )

    def _replace(
        self, owners: Iterable[nn.Module], make: Callable[[Tensor], Tensor], kept: Collection[int] = ()
    ) -> None:
        """Another tensor for each parameter of these modules, wherever it is used; not for those of an id in `kept`."""
        for owner in owners:
            for name, parameter in list(owner.named_parameters(recurse=False)):
                if id(parameter) not in kept:
                    replacement = nn.Parameter(make(parameter.data), requires_grad=False)
                    for module, own_name in self._places[owner, name]:
                        module._parameters[own_name] = replacement

    def _make_buffers(self) -> None:
        """Tables of positions and the like, which are computed and not drawn."""
        for module in self._names:
            buffers = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
            for name, buffer in buffers.items():
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
            if buffers:
                with torch.random.fork_rng(devices=[]), torch.no_grad():
                    self._model._init_weights(module)


def _units(block: nn.Module) -> list[nn.Module]:
    """Parts of a block that are drawn from a seed each: its children, or all of it if it has parameters of its own."""
    children = list(block.children())
    own = any(True for _ in block.parameters(recurse=False))
    return [block] if own or not children else children


def _places(model: nn.Module) -> dict[tuple[nn.Module, str], list[tuple[nn.Module, str]]]:
    """Module and name of each parameter, with every place of the same one: tied weights are one parameter."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            found.setdefault(id(parameter), []).append((module, name))
    return {place: places for places in found.values() for place in places}
