"""One pretrained model through all measurements of the connection walk, with the controls beside them.

The paper publishes no protocol, so what follows is this project's: windows of real text (or images), one layer's maps
in memory at a time, states and spectra in float64 so that half-precision weights are upcast first. Only head-averaged
graphs of the current window outlive their layer, for the comparison with shuffled depth.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attngeo.connection_walk import nulls, transport, walk
from attngeo.connection_walk.measurements import COLUMNS, GraphMeasurements, Rows, WalkMeasurements
from attngeo.errors import UserError
from attngeo.language_models.architectures import AttentionSite, HeadWeights
from attngeo.language_models.capture import LayerCapture, in_float64, stream_layers, working_precision_softmax
from attngeo.language_models.loading import LoadedModel, load, parameters, random_init
from attngeo.language_models.windows import image_windows, text_windows
from attngeo.training.seeding import derive_seed, generator

if TYPE_CHECKING:
    import pandas as pd

_HEAD_SCORE = "(sum s)^2 / (r sum s^2) of W_V W_O, r = min(C, D), norm gain folded into W_V"


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
    edges: int = 4,
) -> "pd.DataFrame":
    """Measure one model as a connection walk: a row a (layer, head, metric, control), columns `COLUMNS`.

    Args:
        model: Hugging Face folder, or a model loaded already, which is left as it was.
        texts: real text for a language model, or token ids [windows, tokens].
        windows, window_tokens: how much of it; the spread over windows is the spread of the graph metrics.
        null_draws: Gaussian heads of the same shape behind the null of the isometry score.
        images: normalised [n, 3, H, W] for a vision model, one image a window.
        edges: edges sampled per window and layer, along the walk, for the edge transports; 0 leaves these out.

    Raises:
        UserError: unreadable or unsupported model, or input that does not fit it.
    """
    import pandas as pd

    if null_draws < 2:
        raise UserError(f"null_draws = {null_draws} gives the null no spread", "ask for at least 2")
    loaded = load(model, None, model_id=model_id) if not isinstance(model, LoadedModel) else model
    loaded = replace(loaded, id=model_id or loaded.id)
    inputs = _windows(loaded, texts, images, windows, window_tokens)
    rows = Rows(loaded.id, loaded.precision)
    _measure_trained(rows, loaded, inputs, seed, null_draws, edges)
    config = loaded.model.config
    del loaded, model  # a folder's model makes room for its control
    _measure_random_init(rows, config, inputs, seed)
    frame = pd.DataFrame(rows.rows, columns=list(COLUMNS))
    return frame.sort_values(["layer", "head"], kind="stable", ignore_index=True)


def _windows(
    loaded: LoadedModel,
    texts: str | Sequence[str] | Tensor | None,
    images: Tensor | None,
    windows: int,
    window_tokens: int,
) -> list[Tensor]:
    has_texts, has_images = texts is not None and len(texts) > 0, images is not None
    if loaded.adapter.reads == "images":
        if images is None or has_texts:
            raise UserError(f"{loaded.id} is a vision model", "give images, not text")
        return image_windows(loaded, images, windows)
    if texts is None or not has_texts or has_images:
        raise UserError(f"{loaded.id} is a language model", "give text, not images")
    return text_windows(loaded, texts, windows, window_tokens)


def _measure_trained(
    rows: Rows, loaded: LoadedModel, inputs: list[Tensor], seed: int, null_draws: int, edges: int
) -> None:
    sites = loaded.sites
    rows.add(-1, "parameters", "trained", parameters(loaded.model), unit="parameters")
    walks = WalkMeasurements(sites, loaded.adapter.causal, edges, seed)
    graphs = GraphMeasurements("trained", len(sites), loaded.adapter.causal, seed)

    def on_layer(capture: LayerCapture) -> None:
        graph = walk.effective_graph(capture.attention)
        graphs.add(capture.layer, graph)
        walks.add(capture, graph)

    with in_float64(loaded):
        for window in inputs:
            stream_layers(loaded, window, on_layer)
        with working_precision_softmax(loaded):
            stream_layers(loaded, inputs[0], walks.add_with_float64_softmax)
    graphs.write(rows)
    walks.write(rows)
    _write_head_isometry(rows, sites, seed, null_draws)
    if edges:
        _write_edge_isometry(rows, walks)


def _measure_random_init(rows: Rows, config: Any, inputs: list[Tensor], seed: int) -> None:
    """Graphs and head isometry of an untrained network of the same configuration on the same windows, in float32."""
    untrained = random_init(config, derive_seed(seed, "random-init"), model_id=rows.model)
    sites = untrained.sites
    graphs = GraphMeasurements("random_init", len(sites), untrained.adapter.causal, seed)
    for window in inputs:
        stream_layers(
            untrained,
            window,
            lambda capture: graphs.add(capture.layer, walk.effective_graph(capture.attention)),
        )
    graphs.write(rows)
    for layer, site in enumerate(sites):
        scores = _head_scores(site.weights())
        rows.add_mean(layer, "isometry_score", "random_init", scores, "heads", convention=_HEAD_SCORE)


def _head_scores(weights: HeadWeights) -> Tensor:
    singular_values = transport.head_singular_values(weights.value[weights.group], weights.output)
    return transport.isometry_score(singular_values, min(weights.model_dim, weights.head_dim))


def _write_head_isometry(rows: Rows, sites: list[AttentionSite], seed: int, null_draws: int) -> None:
    """Trained score, shape-matched null and excess of each head, and their means over a layer's heads."""
    null_of_shape: dict[tuple[int, int], Tensor] = {}
    for layer, site in enumerate(sites):
        weights = site.weights()
        shape = (weights.model_dim, weights.head_dim)
        if shape not in null_of_shape:
            draw = generator(seed, f"null-heads {shape[0]}x{shape[1]}")
            null_of_shape[shape] = nulls.gaussian_head_scores(*shape, null_draws, draw)
        null, scores = null_of_shape[shape], _head_scores(weights)
        excess = scores - null.mean()
        cells: dict[str, Any] = {"convention": _HEAD_SCORE}
        rows.add_mean(layer, "isometry_score", "trained", scores, "heads", **cells)
        rows.add_mean(layer, "isometry_score", "null", null, "Gaussian draws of the same shape", **cells)
        rows.add_mean(layer, "isometry_score", "excess", excess, "heads", **cells)
        of_null: dict[str, Any] = {
            "n": null_draws,
            "spread": null.std().item(),
            "spread_kind": "standard deviation of a null draw",
        }
        for head in range(len(scores)):
            rows.add(layer, "isometry_score", "trained", scores[head].item(), head=head, **cells)
            rows.add(layer, "isometry_score", "excess", excess[head].item(), head=head, **of_null, **cells)


def _write_edge_isometry(rows: Rows, walks: WalkMeasurements) -> None:
    """Isometry and directional gain along the sampled edges, against Gaussian weights under the same gates."""
    gain_variation = "coefficient of variation of ||x_j T_ij|| / ||x_j|| over sampled edges; 0 for a scaled isometry"
    for layer, site in enumerate(walks.sites):
        weights = site.weights()
        gates, states = torch.cat(walks.gates[layer]), torch.cat(walks.states[layer])
        rank = transport.edge_rank(weights)
        scores = transport.isometry_score(transport.edge_singular_values(weights, gates), rank)
        gains = transport.transport_along(weights, gates, states).norm(dim=1) / states.norm(dim=1)
        draw = generator(walks.seed, "null-edges", layer)
        null_scores, null_gains = nulls.gaussian_edges(weights, gates, states, rank, draw)
        convention = f"(sum s)^2 / (r sum s^2) of T_ij, r = min(C, K D) = {rank}; edges sampled along the walk"
        for control, values in (("trained", scores), ("null", null_scores), ("excess", scores - null_scores)):
            rows.add_mean(layer, "transport_isometry_score", control, values, "edges", convention=convention)
        for control, values in (("trained", gains), ("null", null_gains)):
            variation = (values.std() / values.mean()).item() if len(values) > 1 else math.nan
            rows.add(layer, "transport_gain_variation", control, variation, n=len(values), convention=gain_variation)
