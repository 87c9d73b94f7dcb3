"""Hidden states by depth as paths on the sphere, of pretrained models and of our pyramids, beside their controls (P1).

Does training make the paths closer to stationary? The paper publishes no protocol, so all of this is this project's.
One window's states are in memory at a time, of some of its tokens; what is kept of a window are those tokens' paths.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attngeo.errors import UserError
from attngeo.intervals import mean_interval_of_grid
from attngeo.language_models.capture import in_float64
from attngeo.language_models.loading import LoadedModel, load, random_init
from attngeo.language_models.residual_stream import ATTENTION, FEED_FORWARD, ResidualStream, residual_stream
from attngeo.language_models.windows import image_windows, text_windows
from attngeo.training.seeding import derive_seed, generator
from attngeo.variational.paths import (
    DIRECTIONS,
    TokenPath,
    acceleration,
    bend_measures,
    depth_shuffled,
    potential_residuals,
    random_walk,
    step_measures,
    token_path,
)

if TYPE_CHECKING:
    import pandas as pd

TRAINED = "trained"
RANDOM_INIT, RANDOM_WALK, DEPTH_SHUFFLED = "random_init", "random_walk", "depth_shuffled"
CONTROLS = (RANDOM_INIT, RANDOM_WALK, DEPTH_SHUFFLED)
DRAWS = 4  # of the walk and of the order of depth, for each window
LAYERS, HALF_LAYERS = "layers", "half layers"
INTERVAL = "half-width of the 95 % bootstrap interval over windows and draws"
LAGRANGIANS = {"free": "el_residual_free", "potential": "el_residual_potential"}
COLUMNS = [
    "model", "family", "revision", "precision", "nodes", "stage", "layer", "lagrangian", "metric", "control", "value",
    "unit", "n", "spread", "spread_kind", "low", "high", "answer", "convention",
]  # fmt: skip
"""Columns of the frame. Layer -1 is the whole model; a step from layer l and a bend at its start stand at layer l."""

_UNITS = {
    "step_size": "rad",
    "kinetic_energy": "rad^2",
    "turning_angle": "rad",
    "geodesic_curvature": "1/rad",
    "norm_growth": "nat",
}
_RELATIVE = "P_x(acceleration + grad V) over the two steps that make the acceleration, root mean squares over tokens"
_CONVENTIONS = {
    "step_size": "angle between the states at the two ends of a layer",
    "kinetic_energy": "half the squared angle, a layer being the unit of time",
    "tangential_share": "|P_x s|^2 / |s|^2 of the step s that is added to the stream, x its direction before",
    "norm_growth": "log of the stream's norm after the step over that before",
    "turning_angle": "between the directions of arrival and departure",
    "geodesic_curvature": "turning angle over the mean of the two steps",
    "el_residual_free": f"{_RELATIVE}; V = 0; 0 on a geodesic at constant speed",
    "el_residual_potential": f"{_RELATIVE}; V quadratic in the {DIRECTIONS} directions that hold most of states and "
    "accelerations, least squares on the windows of the other parity",
}
_OF_CONTROLS = {
    RANDOM_WALK: "steps of the same sizes in random directions",
    DEPTH_SHUFFLED: "the same states in random order of depth",
}


@dataclass
class Trajectories:
    """The paths of one network: a list of windows for every stretch of equal width ("" of a pretrained model)."""

    stages: dict[str, list[TokenPath]] = field(default_factory=dict)
    model: str = "the model"
    gains: list[tuple[tuple[str, Tensor], ...]] = field(default_factory=list)
    """Gains of the norms of each layer, by half of the layer."""

    def add(self, stage: str, path: TokenPath) -> None:
        """One window's path; UserError if it has fewer than 3 nodes, or a node that is no point of the sphere."""
        if len(path.points) < 3:
            where = f"stage {stage}" if stage else self.model
            raise UserError(
                f"{where} has {len(path.points)} states by depth, and only a path of 3 or more can bend",
                "take a model of two layers or more; in a preset that lists it, leave fig17 out of figures",
            )
        finite = path.points.isfinite().flatten(1).all(dim=1).tolist()
        if not all(finite):
            raise UserError(
                f"{f'stage {stage}' if stage else self.model}: the states after {finite.index(False)} of "
                f"{len(finite) - 1} layers are zero or not finite",
                "look for NaN and infinity in the weights up to that layer: a file is damaged, or a training diverged",
            )
        self.stages.setdefault(stage, []).append(path)


def analyze_trajectories(
    model: Path | str | LoadedModel,
    texts: str | Sequence[str] | Tensor | None = None,
    *,
    model_id: str | None = None,
    images: Tensor | None = None,
    windows: int = 8,
    window_tokens: int = 64,
    tokens: int = 32,
    inits: int = 5,
    seed: int = 0,
) -> "pd.DataFrame":
    """Paths of a pretrained model's hidden states by layer: a row a (layer, metric, control), columns `COLUMNS`.

    Metrics are those of `attngeo.variational.paths`, each with its `_difference` trained minus control (95 % bootstrap
    interval over windows), and `norm_gain_cv`: the larger coefficient of variation of |g| of a layer's two norms. The
    first token, a sink in many decoders and the class token of vision models, is not measured.
    `tangential_share_excess` is the ledger's: the difference to the random walk. `closer_to_stationary` counts the
    controls whose Euler-Lagrange residual is larger and says the answer in words.

    Args:
        model: Hugging Face folder or hub name (`load`), or a model loaded already, which is left as it was.
        texts: real text for a language model, or token ids [windows, tokens].
        images: normalised [n, 3, H, W] for a vision model, one image a window.
        windows, window_tokens, tokens: how much of it, and how many tokens of a window are measured.
        inits: untrained networks of the same configuration behind the control random_init.

    Raises:
        UserError: unreadable or unsupported model, or input that does not fit it.
    """
    _need_a_network(inits)
    loaded = model if isinstance(model, LoadedModel) else load(model, None, model_id=model_id)
    loaded = replace(loaded, id=model_id or loaded.id)
    if loaded.adapter.reads == "audio":
        raise UserError(f"{loaded.id} is a speech model", "name a language or a vision model")
    if loaded.adapter.reads == "images":
        if images is None:
            raise UserError(f"{loaded.id} is a vision model", "give images, not text")
        inputs = image_windows(loaded, images, windows)
    else:
        if texts is None:
            raise UserError(f"{loaded.id} is a language model", "give text, not images")
        inputs = text_windows(loaded, texts, windows, window_tokens)
    labels = {
        "model": loaded.id,
        "family": loaded.family,
        "revision": loaded.revision,
        "precision": loaded.precision,
        "nodes": LAYERS,
    }
    with in_float64(loaded):
        trained = _of_network(loaded, inputs, tokens)
    config = loaded.model.config
    del loaded, model  # a folder's model makes room for its control

    def untrained() -> Iterator[Trajectories]:
        for index in range(inits):
            drawn = random_init(config, derive_seed(seed, "random-init", index), model_id=str(labels["model"]))
            yield _of_network(drawn, inputs, tokens)

    return _frame(labels, trained, untrained(), seed)


def analyze_pyramid(
    model: nn.Module,
    untrained: Callable[[int], nn.Module],
    images: Tensor,
    *,
    labels: dict[str, Any],
    tokens: int = 32,
    inits: int = 5,
    seed: int = 0,
) -> "pd.DataFrame":
    """The same of one of our pyramids, by half layer within each stage; `untrained(index)` draws it anew.

    `labels` are columns beside `COLUMNS`, the run's id among them as `model`.
    """
    _need_a_network(inits)
    trained = _of_pyramid(model, images, tokens)
    drawn = (_of_pyramid(untrained(index), images, tokens) for index in range(inits))
    return _frame({"precision": "float32", "nodes": HALF_LAYERS} | labels, trained, drawn, seed)


def spread_evenly(length: int, wanted: int, first: int) -> list[int]:
    """At most `wanted` of the positions first .. length - 1, evenly."""
    available = length - first
    if available < 1:
        raise UserError(f"a window of {length} tokens has none beside the first one", "use longer windows")
    count = min(wanted, available)
    return [first + (2 * place + 1) * available // (2 * count) for place in range(count)]


def _need_a_network(inits: int) -> None:
    if inits < 1:
        raise UserError(f"inits = {inits} leaves nothing untrained to compare with", "ask for at least 1")


def _of_network(loaded: LoadedModel, inputs: Sequence[Tensor], tokens: int) -> Trajectories:
    found = Trajectories(model=loaded.id)
    for window in inputs:
        stream = residual_stream(loaded, window, spread_evenly(_length(loaded, window), tokens, 1))
        found.add("", _path(stream))
        found.gains = found.gains or [layer.gains for layer in stream.layers]
    return found


def _length(loaded: LoadedModel, window: Tensor) -> int:
    """Tokens of a window: ids, or the patches of an image and its class token."""
    if loaded.adapter.reads == "tokens":
        return len(window)
    patch = loaded.model.config.patch_size
    return 1 + window.shape[1] // patch * (window.shape[2] // patch)


def _path(stream: ResidualStream) -> TokenPath:
    starts, steps = (
        torch.stack([torch.stack([getattr(step, part) for step in layer.steps]) for layer in stream.layers])
        for part in ("start", "step")
    )
    return token_path(stream.states, starts, steps, stream.centred)


@torch.no_grad()
def _of_pyramid(model: nn.Module, images: Tensor, tokens: int) -> Trajectories:
    """The stream before each norm of each stage's blocks and before the stage's own, an image a window."""
    found = Trajectories()
    stages: Any = model.stages
    nodes: list[list[Tensor]] = [[] for _ in stages]

    def listen(norm: nn.Module, nodes_of_stage: list[Tensor]) -> Any:
        def catch(module: nn.Module, args: tuple[Tensor]) -> None:
            nodes_of_stage.append(args[0][0].double())

        return norm.register_forward_pre_hook(catch)

    norms = [[norm for b in stage.blocks for norm in (b.norm1, b.norm2)] + [stage.norm] for stage in stages]
    handles = [listen(norm, nodes[place]) for place, of_stage in enumerate(norms) for norm in of_stage]
    try:
        for image in images:
            model(image[None])
            for place, states in enumerate(nodes):
                chosen = spread_evenly(len(states[0]), tokens, 0)
                by_depth = torch.stack([state[chosen] for state in states])
                steps = by_depth.diff(dim=0).unsqueeze(1)
                found.add(str(place + 1), token_path(by_depth, by_depth[:-1, None], steps, centred=True))
                states.clear()
    finally:
        for handle in handles:
            handle.remove()
    found.gains = [
        ((ATTENTION, block.norm1.weight.detach().double()), (FEED_FORWARD, block.norm2.weight.detach().double()))
        for stage in stages
        for block in stage.blocks
    ]
    return found


Measured = dict[tuple[str, str], Tensor]
"""By (stage, metric): values [draws, windows, layers], a layer's position being its number."""


def measures(paths: Sequence[TokenPath], draw: torch.Generator) -> dict[str, Tensor]:
    """Every metric of paths of the same nodes, [windows, layers]; NaN at layer 0 for what inner nodes alone have."""
    bends = [acceleration(path.points) for path in paths]
    inner = [bend_measures(bend) for bend in bends]
    found = {metric: torch.stack([one[metric] for one in inner]) for metric in inner[0]}
    found["el_residual_potential"] = potential_residuals(bends, draw)
    missing = torch.full((len(paths), 1), math.nan, dtype=torch.float64)
    steps = [step_measures(path) for path in paths]
    return {metric: torch.stack([one[metric] for one in steps]) for metric in steps[0]} | {
        metric: torch.cat([missing, values], dim=1) for metric, values in found.items()
    }


def _measured(networks: Iterable[Trajectories], seed: int) -> Measured:
    """Of the one trained network, or of every draw of a control, one in memory at a time."""
    found: dict[tuple[str, str], list[Tensor]] = {}
    for draw, network in enumerate(networks):
        for stage, paths in network.stages.items():
            for metric, values in measures(paths, generator(seed, f"directions {stage}", draw)).items():
                found.setdefault((stage, metric), []).append(values)
    return {key: torch.stack(values) for key, values in found.items()}


def _changed(
    trained: Trajectories, change: Callable[[TokenPath, torch.Generator], TokenPath], purpose: str, seed: int
) -> Iterator[Trajectories]:
    for draw in range(DRAWS):
        source = generator(seed, purpose, draw)
        yield Trajectories({name: [change(path, source) for path in paths] for name, paths in trained.stages.items()})


def _frame(
    labels: dict[str, Any], trained: Trajectories, untrained: Iterable[Trajectories], seed: int
) -> "pd.DataFrame":
    import pandas as pd

    rows = _Rows(labels)
    of_control = {
        TRAINED: _measured([trained], seed),
        RANDOM_INIT: _measured(untrained, seed),
        RANDOM_WALK: _measured(_changed(trained, random_walk, RANDOM_WALK, seed), seed),
        DEPTH_SHUFFLED: _measured(_changed(trained, depth_shuffled, DEPTH_SHUFFLED, seed), seed),
    }
    for control, measured in of_control.items():
        rows.add_layers(measured, control)
    _write_gains(rows, trained)
    whole = {control: _whole_model(measured) for control, measured in of_control.items()}
    _write_answers(rows, _write_differences(rows, whole))
    _write_dimensions(rows, trained)
    return pd.DataFrame(rows.rows, columns=[*COLUMNS, *(name for name in labels if name not in COLUMNS)])


def _whole_model(measured: Measured) -> dict[str, Tensor]:
    """Means over all layers of all stages, by metric: [draws, windows]."""
    metrics = dict.fromkeys(metric for _, metric in measured)
    return {
        metric: torch.cat([values for (_, name), values in measured.items() if name == metric], dim=2).nanmean(dim=2)
        for metric in metrics
    }


class _Rows:
    def __init__(self, labels: dict[str, Any]) -> None:
        self.labels = labels
        self.rows: list[dict[str, Any]] = []

    def add(self, metric: str, control: str, value: float, *, layer: int = -1, n: int = 1, **cells: Any) -> None:
        row = {"metric": metric, "control": control, "value": value, "layer": layer, "n": n, "unit": "1", **cells}
        self.rows.append(self.labels | row)

    def add_layers(self, measured: Measured, control: str) -> None:
        """A row a layer, and one of the whole model; the first layer has no bend and no row of it."""
        for (stage, metric), values in measured.items():
            for layer in range(values.shape[2]):
                if layer or metric not in _AT_INNER_NODES:
                    self._add_mean(metric, control, values[:, :, layer], layer=layer, stage=stage)
        for metric, values in _whole_model(measured).items():
            self._add_mean(metric, control, values)

    def _add_mean(self, metric: str, control: str, values: Tensor, **cells: Any) -> None:
        """Of values [draws, windows]: over networks for the untrained ones, else over windows, with its interval."""
        networks = control == RANDOM_INIT
        sample = values.mean(dim=1 if networks else 0)
        over = "initialisations, each the mean over windows" if networks else "windows"
        low, high = (math.nan, math.nan) if networks else mean_interval_of_grid(values)
        convention = "; ".join(filter(None, (_CONVENTIONS[metric], _OF_CONTROLS.get(control))))
        self.add(
            metric,
            control,
            sample.mean().item(),
            n=len(sample),
            unit=_UNITS.get(metric, "1"),
            spread=sample.std().item() if len(sample) > 1 else math.nan,
            spread_kind=f"standard deviation over {over}",
            low=low,
            high=high,
            convention=convention,
            **cells,
        )


_AT_INNER_NODES = ("turning_angle", "geodesic_curvature", *LAGRANGIANS.values())


def _write_gains(rows: _Rows, trained: Trajectories) -> None:
    """Coefficient of variation of |g|: of each norm, and the larger one of each layer, which the ledger judges."""
    convention = "standard deviation over mean of |g| over channels"
    for layer, gains in enumerate(trained.gains):
        of_norm: dict[str, float] = {}
        for half, gain in gains:
            size = gain.abs()
            of_norm[half] = max((size.std(correction=0) / size.mean()).item(), of_norm.get(half, 0.0))
        for half, variation in of_norm.items():
            rows.add(f"{half}_norm_gain_cv", TRAINED, variation, layer=layer, convention=convention)
        if of_norm:
            largest = f"{convention}; the larger of the layer's norms"
            rows.add("norm_gain_cv", TRAINED, max(of_norm.values()), layer=layer, convention=largest)


Sides = dict[tuple[str, str], tuple[float, float, float]]
"""By (metric, control): trained minus control, and its 95 % interval."""


def _write_differences(rows: _Rows, whole: dict[str, dict[str, Tensor]]) -> Sides:
    sides: Sides = {}
    for control in CONTROLS:
        for metric, of_control in whole[control].items():
            differences = whole[TRAINED][metric] - of_control
            low, high = mean_interval_of_grid(differences)
            value = differences.mean().item()
            sides[metric, control] = value, low, high
            cells: dict[str, Any] = {
                "n": differences.shape[1],
                "unit": _UNITS.get(metric, "1"),
                "spread": (high - low) / 2,
                "spread_kind": INTERVAL,
                "low": low,
                "high": high,
                "convention": f"trained minus control, mean over layers, {len(differences)} draws or networks; "
                f"{_CONVENTIONS[metric]}",
            }
            rows.add(f"{metric}_difference", control, value, **cells)
            if (metric, control) == ("tangential_share", RANDOM_WALK):
                rows.add("tangential_share_excess", control, value, **cells)
    return sides


def _write_answers(rows: _Rows, sides: Sides) -> None:
    """Does training make the paths closer to stationary than each control? Counted, and in words."""
    for lagrangian, metric in LAGRANGIANS.items():
        found = {control: sides[metric, control] for control in CONTROLS}
        closer = sum(high < 0 for _, _, high in found.values())
        rows.add(
            "closer_to_stationary",
            TRAINED,
            closer,
            lagrangian=lagrangian,
            unit=f"controls of {len(found)}",
            convention=f"controls whose {metric} is larger, with the 95 % interval of the difference",
            answer="; ".join(_words(control, *side) for control, side in found.items()),
        )


def _words(control: str, value: float, low: float, high: float) -> str:
    name = control.replace("_", " ")
    if math.isnan(low):
        return f"than {name}: undecided, no interval ({value:+.3g})"
    side = "closer" if high < 0 else "farther" if low > 0 else "neither closer nor farther"
    return f"{side} than {name} ({value:+.3g}, 95 % interval {low:+.3g} to {high:+.3g})"


def _write_dimensions(rows: _Rows, trained: Trajectories) -> None:
    """What the numbers are of, and the share that an isotropic step has on average in that dimension."""
    for stage, paths in trained.stages.items():
        nodes, tokens, dimension = paths[0].points.shape
        rows.add("dimension", TRAINED, dimension, stage=stage, convention="of the space that holds the sphere")
        rows.add("measured_tokens", TRAINED, tokens, stage=stage, unit="tokens a window")
        rows.add("nodes_by_depth", TRAINED, nodes, stage=stage)
        rows.add("tangential_share", "isotropic", 1 - 1 / dimension, stage=stage, convention="mean of 1 - 1/dimension")
