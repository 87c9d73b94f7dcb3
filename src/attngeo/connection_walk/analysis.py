"""One pretrained model through all measurements of the connection walk, with the controls beside them.

The paper publishes no protocol, so what follows is this project's: windows of real text (or images), one layer's maps
in memory at a time, states and spectra in float64 so that half-precision weights are upcast first. Only head-averaged
graphs of the current window outlive their layer, for the comparison with shuffled depth.
"""

import math
from collections.abc import Callable, Sequence
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
from attngeo.language_models.windows import image_windows, shuffled_window, text_windows
from attngeo.training.seeding import derive_seed, generator

if TYPE_CHECKING:
    import pandas as pd

SHUFFLED_WINDOWS = 4  # windows that are also run with their tokens in random order
INITS = 5  # untrained networks behind the random_init control, each on the first INIT_WINDOWS windows
INITS_OF_LARGE = 3  # the same above LARGE parameters, where one network takes minutes to draw
INIT_WINDOWS = 2
LARGE = 1_000_000_000

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

    Controls: `null` has Gaussian weights of the same shape, `null_same_gain` moreover the layer's own norm gain and
    output scale, `excess` and `excess_same_gain` are the trained score minus these; `random_init` is the mean over
    `INITS` untrained networks (`INITS_OF_LARGE` above `LARGE` parameters) on the first `INIT_WINDOWS` windows, its
    spread that over the networks and its n their number; `shuffled_tokens` is the trained model on the first
    `SHUFFLED_WINDOWS` windows with their tokens, or image patches, in random order; `uniform_attention` has the same
    gate for every head; `depth_shuffled` has the layers in random order.

    Args:
        model: Hugging Face folder or hub name (`load`), or a model loaded already, which is left as it was.
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
    rows = Rows(loaded)
    _measure_trained(rows, loaded, inputs, seed, null_draws, edges)
    config, size = loaded.model.config, parameters(loaded.model)
    del loaded, model  # a folder's model makes room for its control
    _measure_random_init(rows, config, size, inputs, seed)
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
        shuffled = GraphMeasurements("shuffled_tokens", len(sites), loaded.adapter.causal, seed)
        for index, window in enumerate(inputs[:SHUFFLED_WINDOWS]):
            draw = generator(seed, "shuffled-tokens", index)
            stream_layers(loaded, shuffled_window(loaded, window, draw), _graphs_only(shuffled))
    graphs.write(rows)
    shuffled.write(rows)
    walks.write(rows)
    _write_head_isometry(rows, sites, seed, null_draws)
    if edges:
        _write_edge_isometry(rows, walks)


def _graphs_only(graphs: GraphMeasurements) -> Callable[[LayerCapture], None]:
    return lambda capture: graphs.add(capture.layer, walk.effective_graph(capture.attention))


def _measure_random_init(rows: Rows, config: Any, size: int, inputs: list[Tensor], seed: int) -> None:
    """Graphs and head isometry of untrained networks of the same configuration, one in memory at a time, in float32."""
    graphs: GraphMeasurements | None = None
    scores: dict[int, list[float]] = {}
    for index in range(INITS if size <= LARGE else INITS_OF_LARGE):
        untrained = random_init(config, derive_seed(seed, "random-init", index), model_id=rows.model)
        sites = untrained.sites
        graphs = graphs or GraphMeasurements("random_init", len(sites), untrained.adapter.causal, seed)
        for window in inputs[:INIT_WINDOWS]:
            stream_layers(untrained, window, _graphs_only(graphs))
        graphs.close_network()
        for layer, site in enumerate(sites):
            scores.setdefault(layer, []).append(_head_scores(site.weights()).mean().item())
        del untrained, sites, site
    if graphs is not None:
        graphs.write(rows)
    over = "initialisations, each the mean over heads"
    for layer, means in scores.items():
        rows.add_mean(layer, "isometry_score", "random_init", means, over, convention=_HEAD_SCORE)


def _head_scores(weights: HeadWeights) -> Tensor:
    singular_values = transport.head_singular_values(weights.value[weights.group], weights.output)
    return transport.isometry_score(singular_values, min(weights.model_dim, weights.head_dim))


def _write_head_isometry(rows: Rows, sites: list[AttentionSite], seed: int, null_draws: int) -> None:
    """Trained score, both nulls and both excesses of each head, and their means over a layer's heads."""
    for layer, site in enumerate(sites):
        weights = site.weights()
        scores = _head_scores(weights)
        cells: dict[str, Any] = {"convention": _HEAD_SCORE}
        rows.add_mean(layer, "isometry_score", "trained", scores, "heads", **cells)
        for head in range(len(scores)):
            rows.add(layer, "isometry_score", "trained", scores[head].item(), head=head, **cells)
        shape = (weights.model_dim, weights.head_dim)
        for suffix, scales, drawn_as in (
            ("", {}, "Gaussian draws of the same shape"),
            ("_same_gain", _scales(site), "Gaussian draws of the same shape, norm gain and output scale"),
        ):
            # The same Gaussian matrices at every layer and in both nulls: only what is folded in tells them apart.
            draw = generator(seed, f"null-heads {shape[0]}x{shape[1]}")
            null = nulls.gaussian_head_scores(*shape, null_draws, draw, **scales)
            excess = scores - null.mean()
            rows.add_mean(layer, "isometry_score", f"null{suffix}", null, drawn_as, **cells)
            rows.add_mean(layer, "isometry_score", f"excess{suffix}", excess, "heads", **cells)
            of_null: dict[str, Any] = {
                "n": null_draws,
                "spread": null.std().item(),
                "spread_kind": "standard deviation of a null draw",
            }
            for head in range(len(scores)):
                rows.add(layer, "isometry_score", f"excess{suffix}", excess[head].item(), head=head, **of_null, **cells)


def _scales(site: AttentionSite) -> dict[str, Any]:
    """What a layer folds into its weights besides W_V and W_O."""
    return {"gain": site.gain, "output_scale": site.output_scale}


def _write_edge_isometry(rows: Rows, walks: WalkMeasurements) -> None:
    """Isometry and directional gain along the sampled edges, against Gaussian weights under the same gates."""
    gain_variation = "coefficient of variation of ||x_j T_ij|| / ||x_j|| over sampled edges; 0 for a scaled isometry"
    for layer, site in enumerate(walks.sites):
        weights = site.weights()
        gates, states = torch.cat(walks.gates[layer]), torch.cat(walks.states[layer])
        rank = transport.edge_rank(weights)
        scores = transport.isometry_score(transport.edge_singular_values(weights, gates), rank)
        gains = transport.transport_along(weights, gates, states).norm(dim=1) / states.norm(dim=1)
        null, same_gain = (
            nulls.gaussian_edges(weights, gates, states, rank, generator(walks.seed, "null-edges", layer), **scales)
            for scales in ({}, _scales(site))
        )
        of_scores = {
            "trained": scores,
            "null": null[0],
            "excess": scores - null[0],
            "null_same_gain": same_gain[0],
            "excess_same_gain": scores - same_gain[0],
        }
        convention = f"(sum s)^2 / (r sum s^2) of T_ij, r = min(C, K D) = {rank}"
        sampled = f"{convention}; edges sampled along the walk"
        for control, values in of_scores.items():
            rows.add_mean(layer, "transport_isometry_score", control, values, "edges", convention=sampled)
        uniform = torch.full((1, weights.heads), 1 / weights.heads, dtype=gates.dtype)
        score = transport.isometry_score(transport.edge_singular_values(weights, uniform), rank).item()
        every = f"{convention}; every gate 1/H, the same transport for all edges"
        rows.add(layer, "transport_isometry_score", "uniform_attention", score, convention=every)
        for control, values in (("trained", gains), ("null", null[1]), ("null_same_gain", same_gain[1])):
            variation = (values.std() / values.mean()).item() if len(values) > 1 else math.nan
            rows.add(layer, "transport_gain_variation", control, variation, n=len(values), convention=gain_variation)
