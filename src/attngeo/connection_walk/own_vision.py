"""The connection walk of pyramids trained here: exactness for every attention kind, and which kind is more isometric.

Its graphs are not compared from block to block, as those of pretrained models are: the stages of a pyramid have
different tokens.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from attngeo.connection_walk import identities, nulls, transport, walk
from attngeo.connection_walk.measurements import COLUMNS, Rows
from attngeo.language_models.architectures import AttentionSite, HeadWeights
from attngeo.language_models.own_vision import BlockCapture, opened_pyramid, stream_blocks
from attngeo.training.seeding import generator

if TYPE_CHECKING:
    import pandas as pd

IDENTITY_IMAGES = 2  # images on which the walk is formed edge by edge: an identity does not need many
EDGE_IMAGES = 8  # images along whose edges transports are taken

_OF_HEADS = "(sum s)^2 / (r sum s^2) of W_V W_O, r = min(C, D), norm gain folded into W_V"
_RELATIVE = "||walk - attention's output||_F / ||attention's output||_F, all in float64, without what stands beside it"


def analyze_pyramid(
    model: nn.Module,
    images: Tensor,
    untrained: Callable[[int], nn.Module],
    *,
    model_id: str,
    seed: int = 0,
    null_draws: int = 16,
    edges: int = 4,
    inits: int = 5,
) -> "pd.DataFrame":
    """Measure one pyramid on normalised images [n, 3, S, S]: a row a (layer, head, metric, control).

    Columns and names are those of `analyze`, layers are the blocks. Besides: `stochasticity_defect` is the largest
    |sum_j P_ij - 1|, `negative_share` the negative part of sum |A|, `beside_share` the norm of what the block adds
    beside the walk over that of its output. `untrained(i)` draws the i-th of the `inits` models of the
    random_init control.

    Raises:
        UserError: an attention kind that is no sum of rows times values.
    """
    import pandas as pd

    loaded = opened_pyramid(model, model_id)
    rows = Rows(loaded)
    rows.add(-1, "parameters", "trained", sum(p.numel() for p in model.parameters()), unit="parameters")
    blocks = _Blocks(loaded.sites, edges, seed)
    original = {name: value.dtype for name, value in model.state_dict().items()}
    try:
        model.double()
        for image in images:
            stream_blocks(loaded, image.double(), blocks.add)
    finally:
        for name, value in model.state_dict(keep_vars=True).items():
            value.data = value.data.to(original[name])
    blocks.write(rows)
    _write_heads(rows, loaded.sites, seed, null_draws)
    scores: dict[int, list[float]] = {}
    for index in range(inits):
        for layer, site in enumerate(opened_pyramid(untrained(index), model_id).sites):
            scores.setdefault(layer, []).append(_head_scores(site.weights()).mean().item())
    for layer, means in scores.items():
        over = "initialisations, each the mean over heads"
        rows.add_mean(layer, "isometry_score", "random_init", means, over, convention=_OF_HEADS)
    frame = pd.DataFrame(rows.rows, columns=list(COLUMNS))
    return frame.sort_values(["layer", "head"], kind="stable", ignore_index=True)


class _Blocks:
    """Identities and walks of every block over the images, and edges to take transports along."""

    def __init__(self, sites: list[AttentionSite], edges: int, seed: int) -> None:
        self.sites, self.edges, self.seed = sites, edges, seed
        self._of_block: list[dict[str, list[float]]] = [{} for _ in sites]
        self._errors: list[list[float]] = [[] for _ in sites]
        self._head_errors: list[list[list[float]]] = [[] for _ in sites]
        self._gates: list[list[Tensor]] = [[] for _ in sites]

    def add(self, block: BlockCapture) -> None:
        capture, layer = block.walk, block.walk.layer
        attention = capture.attention
        graph = walk.effective_graph(attention)
        beside = 0.0 if block.beside is None else block.beside.norm() / (capture.output + block.beside).norm()
        found = {
            "stochasticity_defect": (graph.sum(1) - 1).abs().max(),
            "negative_share": attention.clamp_max(0).abs().sum() / attention.abs().sum(),
            "beside_share": beside,
        }
        image = len(self._of_block[layer].get("beside_share", ()))
        for metric, value in found.items():
            self._of_block[layer].setdefault(metric, []).append(float(value))
        if image < IDENTITY_IMAGES:
            site, weights = self.sites[layer], self.sites[layer].weights()
            self._errors[layer].append(identities.walk_error(capture, site, weights))
            self._head_errors[layer].append(identities.head_walk_errors(capture, site, weights))
        if self.edges and image < EDGE_IMAGES:
            draw = generator(self.seed, "edges", image * len(self.sites) + layer)
            ends = walk.sample_edges(graph.abs(), self.edges, draw)
            self._gates[layer].append(walk.gates(attention[:, ends[0], ends[1]].double()).T)

    def write(self, rows: Rows) -> None:
        for layer, site in enumerate(self.sites):
            of_block = self._of_block[layer]
            named = "local convolution of the values, through W_O" if max(of_block["beside_share"]) else "nothing"
            rows.add_largest(layer, "identity_error", "trained", self._errors[layer], "images", convention=_RELATIVE)
            for head, errors in enumerate(zip(*self._head_errors[layer], strict=True)):
                alone = "one head alone as a walk with constant transport W_V W_O, all in float64"
                rows.add_largest(layer, "identity_error", "trained", errors, "images", head=head, convention=alone)
            for metric, convention in (
                ("stochasticity_defect", "max_i |sum_j P_ij - 1|"),
                ("negative_share", "sum of |negative weights| / sum of |weights| of the heads' maps"),
                ("beside_share", f"||beside||_F / ||block output||_F; beside the walk: {named}"),
            ):
                rows.add_mean(layer, metric, "trained", of_block[metric], "images", convention=convention)
            if self.edges:
                self._write_edges(rows, layer, site.weights(), torch.cat(self._gates[layer]), site.gain)

    def _write_edges(self, rows: Rows, layer: int, weights: HeadWeights, gates: Tensor, gain: Tensor | None) -> None:
        """Isometry of the transports along the sampled edges, each beside Gaussian weights under the same gates."""
        rank = transport.edge_rank(weights)
        trained = transport.isometry_score(transport.edge_singular_values(weights, gates), rank)
        null, same_gain = (
            _null_edge_scores(weights, gates, generator(self.seed, "null-edges", layer), of_layer)
            for of_layer in (None, gain)
        )
        convention = (
            f"(sum s)^2 / (r sum s^2) of T_ij, r = min(C, K D) = {rank}; edges sampled along the walk by |P_ij|"
        )
        for control, values in (
            ("trained", trained),
            *(("null", null), ("excess", trained - null)),
            *(("null_same_gain", same_gain), ("excess_same_gain", trained - same_gain)),
        ):
            rows.add_mean(layer, "transport_isometry_score", control, values, "edges", convention=convention)


def _head_scores(weights: HeadWeights) -> Tensor:
    """Isometry score of every head, [H], by the naive form: these models are small."""
    rank = min(weights.model_dim, weights.head_dim)
    return transport.isometry_score(torch.linalg.svdvals(transport.head_transports(weights))[:, :rank], rank)


def _null_edge_scores(weights: HeadWeights, gates: Tensor, draw: torch.Generator, gain: Tensor | None) -> Tensor:
    """Score of every edge under its own gates [E, H] and its own Gaussian weights, [E]."""
    scores = []
    for own_gates in gates.split(1):
        drawn = nulls.gaussian_like(weights, draw, gain=gain)
        spectrum = transport.edge_singular_values(drawn, own_gates)
        scores.append(transport.isometry_score(spectrum, transport.edge_rank(weights)))
    return torch.cat(scores)


def _write_heads(rows: Rows, sites: list[AttentionSite], seed: int, null_draws: int) -> None:
    """Trained score, nulls and excesses of each head, and their means over a block's heads."""
    for layer, site in enumerate(sites):
        weights = site.weights()
        scores = _head_scores(weights)
        nulls_of = {
            "": _null_scores(weights, null_draws, seed, None),
            "_same_gain": _null_scores(weights, null_draws, seed, site.gain),
        }
        rows.add_mean(layer, "isometry_score", "trained", scores, "heads", convention=_OF_HEADS)
        for head, score in enumerate(scores.tolist()):
            rows.add(layer, "isometry_score", "trained", score, head=head, convention=_OF_HEADS)
        for suffix, null in nulls_of.items():
            drawn_as = f"Gaussian draws of the same shape{' and norm gain' if suffix else ''}"
            excess = scores - null.mean()
            rows.add_mean(layer, "isometry_score", f"null{suffix}", null, drawn_as, convention=_OF_HEADS)
            rows.add_mean(layer, "isometry_score", f"excess{suffix}", excess, "heads", convention=_OF_HEADS)


def _null_scores(weights: HeadWeights, draws: int, seed: int, gain: Tensor | None) -> Tensor:
    """Scores of Gaussian heads of the same shape, at least `draws` of them, the same ones for every model."""
    draw = generator(seed, f"null-heads {weights.model_dim}x{weights.head_dim}")
    drawn = [_head_scores(nulls.gaussian_like(weights, draw, gain=gain)) for _ in range(-(-draws // weights.heads))]
    return torch.cat(drawn)
