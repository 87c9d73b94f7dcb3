"""One pretrained model through all measurements of the connection walk, with the controls beside them.

The paper publishes no protocol, so what follows is this project's: windows of real text (or images), one layer's maps
in memory at a time. Identities are checked on a model that computes in float64; statistics are taken of maps and states
in float32 at least, so that half-precision weights are upcast first, and spectra always in float64. Only head-averaged
graphs of the current window outlive their layer, for the comparison with shuffled depth.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attngeo.connection_walk import walk
from attngeo.connection_walk.measurements import (
    COLUMNS,
    IDENTITY_WINDOWS,
    GraphMeasurements,
    IdentityMeasurements,
    Rows,
)
from attngeo.connection_walk.transport_measurements import (
    HEAD_CONVENTIONS,
    HeadMeasurements,
    TransportMeasurements,
    head_statistics,
)
from attngeo.errors import UserError
from attngeo.language_models.architectures import AttentionSite
from attngeo.language_models.capture import (
    LayerCapture,
    in_float64,
    stream_layers,
    working_precision_softmax,
)
from attngeo.language_models.loading import LoadedModel, load, parameters, random_init
from attngeo.language_models.windows import audio_windows, image_windows, shuffled_window, text_windows
from attngeo.training.seeding import derive_seed, generator

if TYPE_CHECKING:
    import pandas as pd

SHUFFLED_WINDOWS = 8  # windows that are also run with their tokens in random order
INITS_OF_LARGE = 3  # untrained networks at most above LARGE parameters, where one takes minutes to draw
INIT_WINDOWS = 2
LARGE = 1_000_000_000
_KINDS = {"tokens": ("language", "text"), "images": ("vision", "images"), "audio": ("speech", "log-mel features")}


def analyze(
    model: Path | str | LoadedModel,
    texts: str | Sequence[str] | Tensor | None = None,
    *,
    model_id: str | None = None,
    windows: int = 8,
    window_tokens: int = 128,
    seed: int = 0,
    null_draws: int = 16,
    images: Tensor | None = None,
    features: Tensor | None = None,
    edges: int = 4,
    inits: int = 5,
) -> "pd.DataFrame":
    """Measure one model as a connection walk: a row a (layer, head, metric, control), columns `COLUMNS`.

    Metrics that end in `_without_first_token` leave the first token out, which may be an attention sink. Metrics of
    heads alone have no prefix, those of the edges' effective transports begin with `transport_`.

    Controls: `null` has Gaussian weights of the same shape, `null_same_gain` moreover the layer's own norm gain and
    output scale, `excess` and `excess_same_gain` are the trained number minus these, tested layer by layer with Holm's
    correction (`..._p_value`, `..._layers_above_null`); `random_init` is the mean over
    `inits` untrained networks (`INITS_OF_LARGE` above `LARGE` parameters) on the first `INIT_WINDOWS` windows, its
    spread that over the networks and its n their number; `shuffled_tokens` is the trained model on the first
    `SHUFFLED_WINDOWS` windows with their tokens, or image patches, in random order; in `uniform_attention` each token
    attends alike to all that it may see, whatever the head; `depth_shuffled` has the layers in random order.

    Args:
        model: Hugging Face folder or hub name (`load`), or a model loaded already, which is left as it was.
        texts: real text for a language model, or token ids [windows, tokens].
        windows, window_tokens: how much of it; the spread over windows is the spread of the graph metrics.
        null_draws: Gaussian heads of the same shape behind the null of the isometry score.
        images: normalised [n, 3, H, W] for a vision model, one image a window.
        features: log-mel [n, F, T] for the encoder of a speech model, one recording a window.
        edges: edges sampled per window and layer, along the walk, for the edge transports; 0 leaves these out.
        inits: untrained networks; with a single one their spread is not known.

    Raises:
        UserError: unreadable or unsupported model, or input that does not fit it.
    """
    import pandas as pd

    if null_draws < 2:
        raise UserError(f"null_draws = {null_draws} gives the null no spread", "ask for at least 2")
    held = isinstance(model, LoadedModel)
    loaded = model if isinstance(model, LoadedModel) else load(model, None, model_id=model_id)
    loaded = replace(loaded, id=model_id or loaded.id)
    inputs = _windows(loaded, texts, images, features, windows, window_tokens)
    rows = Rows(loaded)
    write_sizes(rows, loaded)
    _measure_identities(rows, loaded, inputs, seed)
    measure_trained(rows, loaded, inputs, seed=seed, null_draws=null_draws, edges=edges)
    _measure_shuffled(rows, loaded, inputs, seed)
    config, size = loaded.model.config, parameters(loaded.model)
    del loaded, model  # a folder's model makes room for its control; beside the caller's only a layer of it is drawn
    measure_random_init(rows, config, size, inputs, seed, inits, on_demand=True if held else None)
    frame = pd.DataFrame(rows.rows, columns=list(COLUMNS))
    return frame.sort_values(["layer", "head"], kind="stable", ignore_index=True)


def _windows(
    loaded: LoadedModel,
    texts: str | Sequence[str] | Tensor | None,
    images: Tensor | None,
    features: Tensor | None,
    windows: int,
    window_tokens: int,
) -> list[Tensor]:
    if texts is not None and len(texts) == 0:
        texts = None
    given = {"tokens": texts, "images": images, "audio": features}
    reads = loaded.adapter.reads
    if [kind for kind, value in given.items() if value is not None] != [reads]:
        kind, wanted = _KINDS[reads]
        others = " or ".join(name for other, (_, name) in _KINDS.items() if other != reads)
        raise UserError(f"{loaded.id} is a {kind} model", f"give {wanted}, not {others}")
    if images is not None:
        return image_windows(loaded, images, windows)
    if features is not None:
        return audio_windows(loaded, features, windows)
    assert texts is not None
    return text_windows(loaded, texts, windows, window_tokens)


def _measure_identities(rows: Rows, loaded: LoadedModel, inputs: list[Tensor], seed: int) -> None:
    checked = IdentityMeasurements(loaded.sites, loaded.adapter.causal, seed)
    with in_float64(loaded):
        for window in inputs[:IDENTITY_WINDOWS]:
            stream_layers(loaded, window, checked.add)
        with working_precision_softmax():
            stream_layers(loaded, inputs[0], checked.add_with_float64_softmax)
    checked.write(rows)


def measure_trained(
    rows: Rows, loaded: LoadedModel, inputs: Sequence[Tensor], *, seed: int, null_draws: int, edges: int
) -> None:
    """Graphs, transports and heads of the trained network, with the controls that need no other network or input."""
    sites, causal = loaded.sites, loaded.adapter.causal
    graphs = GraphMeasurements("trained", len(sites), causal, seed)
    transports = TransportMeasurements(sites, causal, edges, seed)
    shapes: dict[int, tuple[int, int]] = {}

    def on_layer(capture: LayerCapture) -> None:
        shapes[capture.layer] = capture.attention.shape[0], capture.attention.shape[1]
        graphs.add(capture.layer, capture.attention)
        transports.add(capture)

    with in_float32_at_least(loaded):
        for window in inputs:
            stream_layers(loaded, window, on_layer)
    graphs.write(rows)
    for layer, (heads, tokens) in shapes.items():
        uniform = GraphMeasurements("uniform_attention", 1, causal, seed)
        uniform.add(0, walk.uniform_attention(heads, tokens, causal))
        uniform.write(rows, layer)
    transports.write(rows)
    write_head_isometry(rows, sites, seed, null_draws)


def _measure_shuffled(rows: Rows, loaded: LoadedModel, inputs: list[Tensor], seed: int) -> None:
    shuffled = GraphMeasurements("shuffled_tokens", len(loaded.sites), loaded.adapter.causal, seed)
    with in_float32_at_least(loaded):
        for index, window in enumerate(inputs[:SHUFFLED_WINDOWS]):
            draw = generator(seed, "shuffled-tokens", index)
            stream_layers(loaded, shuffled_window(loaded, window, draw), _graphs_only(shuffled))
    shuffled.write(rows)


def in_float32_at_least(loaded: LoadedModel) -> AbstractContextManager[None]:
    """Inside, the model computes as it is stored, or in float64 if it is stored in half precision."""
    stored = {parameter.dtype for parameter in loaded.model.parameters()}
    return nullcontext() if stored <= {torch.float32, torch.float64} else in_float64(loaded)


def write_head_isometry(rows: Rows, sites: list[AttentionSite], seed: int, null_draws: int) -> None:
    heads = HeadMeasurements(rows, null_draws, seed)
    for layer, site in enumerate(sites):
        heads.add(layer, site)
    heads.write_tests()


def write_sizes(rows: Rows, loaded: LoadedModel) -> None:
    sites = loaded.sites
    weights = sites[0].weights()
    sizes = {
        "parameters": (parameters(loaded.model), "parameters"),
        "layers": (len(sites), "layers"),
        "heads": (weights.heads, "heads"),
        "value_groups": (weights.groups, "groups"),
        "head_dim": (weights.head_dim, "components"),
        "model_dim": (weights.model_dim, "components"),
    }
    for metric, (value, unit) in sizes.items():
        rows.add(-1, metric, "trained", value, unit=unit)


def _graphs_only(graphs: GraphMeasurements) -> Callable[[LayerCapture], None]:
    return lambda capture: graphs.add(capture.layer, capture.attention)


def measure_random_init(
    rows: Rows,
    config: Any,
    size: int,
    inputs: list[Tensor],
    seed: int,
    inits: int,
    on_demand: bool | None = None,
) -> None:
    """Graphs and heads of untrained networks of the same configuration, one in memory at a time, in float32."""
    graphs: GraphMeasurements | None = None
    found: dict[tuple[int, str], list[float]] = {}
    for index in range(inits if size <= LARGE else min(inits, INITS_OF_LARGE)):
        network = derive_seed(seed, "random-init", index)
        untrained = random_init(config, network, model_id=rows.model, on_demand=on_demand)
        sites = untrained.sites
        graphs = graphs or GraphMeasurements("random_init", len(sites), untrained.adapter.causal, seed)
        for window in inputs[:INIT_WINDOWS]:
            stream_layers(untrained, window, _graphs_only(graphs))
        graphs.close_network()
        for layer, site in enumerate(sites):
            for metric, values in head_statistics(site.weights()).items():
                found.setdefault((layer, metric), []).append(values.mean().item())
        del untrained, sites, site
    if graphs is not None:
        graphs.write(rows)
    over = "initialisations, each the mean over heads"
    for (layer, metric), means in found.items():
        rows.add_mean(layer, metric, "random_init", means, over, convention=HEAD_CONVENTIONS[metric])
