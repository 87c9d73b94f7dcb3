"""Collects what one network shows, layer by layer and window by window, and writes it out as rows of the tidy frame."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attngeo import intervals
from attngeo.connection_walk import identities, nulls, stationarity, walk
from attngeo.errors import UserError
from attngeo.language_models.architectures import AttentionSite
from attngeo.language_models.capture import LayerCapture
from attngeo.language_models.loading import LoadedModel
from attngeo.training.seeding import generator

COLUMNS = (
    "model",
    "family",
    "revision",
    "precision",
    "layer",
    "head",
    "metric",
    "control",
    "value",
    "unit",
    "n",
    "spread",
    "spread_kind",
    "low",
    "high",
    "convention",
)
"""Columns of the frame. Layer -1 is the whole model, head -1 the whole layer; convention defines the number.

low and high are the 95 % bootstrap interval of a mean over windows, of an excess that no window enters that of the mean
over heads less that over null draws; NaN for any other number and for fewer than `intervals.FEWEST` values.
family is the architecture ("bert") or what the model's source.json says, revision the hub's commit that the weights
are from, empty for a local folder.
"""

SINK_TOKENS = 4  # tokens left out of a decoder's reversibility: attention sinks sit on the first few
WITHOUT_FIRST = "_without_first_token"  # ends the names of metrics that leave an attention sink out
SUBSPACE = 8  # leading eigenvectors whose turning from layer to layer is measured
SHUFFLES = 32  # random orders of depth per window
IDENTITY_WINDOWS = 2  # windows on which the walk is formed edge by edge: an identity does not need many
ROTATION_DIM = 4  # fibre of the random rotations that check the Laplacian identity; any dimension would do
ROTATION_TOKENS = 64  # tokens of that check: 2 016 rotations are enough for an identity and cheap at every layer
GRAPH_BYTES = 2**30  # limit on the head-averaged graphs of one window

_CONVENTIONS = {
    "spectral_gap": "1 - lambda_2 of D^(-1/2) W D^(-1/2), W = (P + P^T)/2",
    "stochasticity_defect": "max_i |sum_j P_ij - 1|",
    "first_token_share": "mean of P_i0 over i > 0",
    "graph_change": "||P_l - P_(l-1)||_F / ||P_(l-1)||_F, written at layer l",
    "row_jensen_shannon": "mean over rows of the distance between P_(l-1) and P_l, written at layer l",
    "subspace_angle": f"root mean square angle between the {SUBSPACE} leading eigenspaces of layers l - 1 and l",
    "last_layer_similarity": "cosine <P_l, P_last>_F / (||P_l||_F ||P_last||_F)",
    "graph_change_trend": "Spearman correlation of graph_change with depth",
    "gate_entropy": "mean over edges, by P_ij, of -sum_h g^h_ij log g^h_ij; log H if every head has the same map",
    "stationary_entropy": "-sum_i pi_i log pi_i",
}
_WITHOUT_FIRST = "edges among the tokens after the first, rows of P normalised again"
_UNITS = {
    "row_jensen_shannon": "sqrt(bit)",
    "subspace_angle": "rad",
    "gate_entropy": "nat",
    "stationary_entropy": "nat",
}


class Rows:
    """The frame's rows of one model."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.model = loaded.id
        self._of_model = (loaded.id, loaded.family, loaded.revision, loaded.precision)
        self.rows: list[dict[str, Any]] = []

    def add(
        self,
        layer: int,
        metric: str,
        control: str,
        value: float,
        *,
        unit: str = "1",
        n: int = 1,
        spread: float = math.nan,
        spread_kind: str = "",
        low: float = math.nan,
        high: float = math.nan,
        head: int = -1,
        convention: str = "",
    ) -> None:
        cells = (
            *self._of_model,
            *(layer, head, metric, control),
            *(value, unit, n, spread, spread_kind, low, high, convention),
        )
        self.rows.append(dict(zip(COLUMNS, cells, strict=True)))

    def add_mean(
        self,
        layer: int,
        metric: str,
        control: str,
        values: Sequence[float] | Tensor,
        over: str,
        *,
        interval: bool = False,
        **cells: Any,
    ) -> None:
        """Mean, standard deviation (none for a single value) and n of a sample; a NaN in it stays visible.

        `interval` adds the bootstrap interval of the mean, for values that are a sample of windows.
        """
        sample = torch.as_tensor(values, dtype=torch.float64)
        spread = sample.std().item() if len(sample) > 1 else math.nan
        cells |= {"n": len(sample), "spread": spread, "spread_kind": f"standard deviation over {over}"}
        if interval:
            cells["low"], cells["high"] = intervals.mean_interval(sample)
        self.add(layer, metric, control, sample.mean().item(), **cells)

    def add_largest(
        self, layer: int, metric: str, control: str, values: Sequence[float], over: str, **cells: Any
    ) -> None:
        """The largest of a sample of errors, NaN if there is one in it."""
        sample = torch.as_tensor(values, dtype=torch.float64)
        cells |= {"n": len(sample), "spread_kind": f"largest over {over}"}
        self.add(layer, metric, control, sample.max().item(), **cells)


class GraphMeasurements:
    """Statistics of the effective graphs of a network, compared from layer to layer within each window.

    The sample behind a mean is the windows; after `close_network`, networks, each with the mean over its windows.
    """

    def __init__(self, control: str, layers: int, causal: bool, seed: int) -> None:
        self.control, self.layers, self.causal, self.seed = control, layers, causal, seed
        self.windows = self._windows_each = 0
        self._values: dict[tuple[int, str, str], list[float]] = {}
        self._of_networks: dict[tuple[int, str, str], list[float]] = {}
        self._graphs: list[Tensor] = []
        self._before: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, layer: int, attention: Tensor) -> None:
        """Maps [H, N, N] of the window at hand; layer 0 opens a window and the last layer closes it."""
        graph = walk.effective_graph(attention)
        if layer == 0:
            self._open_window(graph)
        self._note(layer, "stochasticity_defect", stationarity.stochasticity_defect(graph))
        self._note(layer, "first_token_share", stationarity.first_token_share(graph))
        entropy, entropy_without = walk.gate_entropy(attention)
        self._note(layer, "gate_entropy", entropy)
        self._note_reversibility(layer, graph)
        self._note_graph(layer, graph, "")
        if len(graph) > 2:
            self._note(layer, "gate_entropy" + WITHOUT_FIRST, entropy_without)
            self._note_graph(layer, stationarity.without_first_token(graph), WITHOUT_FIRST)
        self._graphs.append(graph.float())
        if layer == self.layers - 1:
            self._close_window()

    def write(self, rows: Rows, first_layer: int = 0) -> None:
        """Mean over the sample of each number; the network's layer 0 is written as `first_layer`."""
        left_out = SINK_TOKENS if self.causal else 0
        conventions = _CONVENTIONS | {
            "reversibility_defect": stationarity.reversibility_convention(self.causal, left_out),
        }
        conventions["stationary_entropy"] += f", {stationarity.law_convention(self.causal)}"
        sample = self._of_networks or self._values
        sampled = (
            f"initialisations, each the mean over {self._windows_each} windows" if self._of_networks else "windows"
        )
        for (layer, named, control), values in sorted(sample.items()):
            metric = named.removesuffix(WITHOUT_FIRST)
            over, convention = sampled, conventions[metric]
            if control == "depth_shuffled" and layer < 0:
                over, convention = "windows and shuffles", convention + ", layers in random order"
            elif control == "depth_shuffled":
                convention = "||P_l - P_m||_F / ||P_m||_F, mean over all other layers m"
            elif control == "symmetrised":
                convention = (
                    f"the walk on (P + P^T)/2 without the first {SINK_TOKENS} tokens, reversible by construction"
                )
            elif control == "uniform_attention":
                convention += "; each token attends alike to all that it may see"
            if named == "reversibility_defect" + WITHOUT_FIRST:
                convention = stationarity.reversibility_convention(False, 1)
            elif metric != named:
                convention += f"; {_WITHOUT_FIRST}"
            rows.add_mean(
                layer if layer < 0 else layer + first_layer,
                named,
                control,
                values,
                over,
                interval=over == "windows",
                unit=_UNITS.get(metric, "1"),
                convention=convention,
            )

    def close_network(self) -> None:
        """Turn the windows so far into one network's means, and begin with the next network."""
        for key, values in self._values.items():
            self._of_networks.setdefault(key, []).append(sum(values) / len(values))
        self._values.clear()
        self._windows_each, self.windows = self.windows, 0

    def _note_reversibility(self, layer: int, graph: Tensor) -> None:
        if not self.causal:
            self._note(layer, "reversibility_defect", stationarity.reversibility_defect(graph, False))
            without = stationarity.reversibility_defect(graph, False, 1)
            self._note(layer, "reversibility_defect" + WITHOUT_FIRST, without)
            return
        self._note(layer, "reversibility_defect", stationarity.reversibility_defect(graph, True, SINK_TOKENS))
        if self.control == "trained":
            either_way = stationarity.symmetrised(graph[SINK_TOKENS:, SINK_TOKENS:])
            defect = stationarity.reversibility_defect(either_way, False)
            self._note(layer, "reversibility_defect", defect, control="symmetrised")

    def _note_graph(self, layer: int, graph: Tensor, suffix: str) -> None:
        """What one graph shows, and its change from the layer before where that one has as many tokens."""
        eigenvalues, leading = stationarity.symmetrised_spectrum(graph, SUBSPACE)
        law = stationarity.reference_law(graph, self.causal)
        noted = {
            "spectral_gap": stationarity.spectral_gap(eigenvalues),
            "stationary_entropy": stationarity.entropy(law),
        }
        before, leading_before = self._before.get(suffix, (graph[:0], leading))
        if layer > 0 and before.shape == graph.shape:
            noted |= {
                "graph_change": stationarity.relative_change(before, graph),
                "row_jensen_shannon": stationarity.row_jensen_shannon(before, graph),
                "subspace_angle": stationarity.subspace_angle(leading_before, leading),
            }
        for metric, value in noted.items():
            self._note(layer, metric + suffix, value)
        self._before[suffix] = graph, leading

    def _open_window(self, graph: Tensor) -> None:
        size = self.layers * graph.numel() * 4
        if size > GRAPH_BYTES:
            longest = int(math.sqrt(GRAPH_BYTES / 4 / self.layers))
            raise UserError(
                f"the graphs of a window of {len(graph)} tokens take {size // 2**20} MiB over {self.layers} layers",
                f"use windows of at most {longest} tokens",
            )
        self._graphs.clear()
        self._before.clear()

    def _close_window(self) -> None:
        """What needs all layers of a window: similarity with the last one, shuffled depth, the trend with depth.

        Layers whose graphs have another size than the last one's (earlier stages of a pyramid) are left out.
        """
        last = self._graphs[-1].shape
        first = max((layer + 1 for layer, graph in enumerate(self._graphs) if graph.shape != last), default=0)
        graphs = self._graphs[first:]
        self._compare_layers(first, graphs, "")
        if last[0] > 2:
            for place, graph in enumerate(graphs):
                graphs[place] = stationarity.without_first_token(graph)
            self._compare_layers(first, graphs, WITHOUT_FIRST)
        self.windows += 1

    def _compare_layers(self, first: int, graphs: list[Tensor], suffix: str) -> None:
        products = nulls.graph_products(graphs)
        norms = products.diagonal().sqrt()
        for layer, similarity in enumerate((products[:, -1] / (norms * norms[-1])).tolist(), first):
            self._note(layer, "last_layer_similarity" + suffix, similarity)
        if len(graphs) > 2:
            changes = nulls.pairwise_changes(products)
            self._note(-1, "graph_change_trend" + suffix, _depth_trend(changes.diagonal(1)))
            if self.control == "trained":
                self._shuffle_depth(first, changes, suffix)

    def _shuffle_depth(self, first: int, changes: Tensor, suffix: str) -> None:
        for layer in range(1, len(changes)):
            others = [other for other in range(len(changes)) if other != layer]
            mean = changes[others, layer].mean().item()
            self._note(first + layer, "graph_change" + suffix, mean, control="depth_shuffled")
        for shuffle in range(SHUFFLES):
            draw = generator(self.seed, "depth-shuffle", self.windows * SHUFFLES + shuffle)
            trend = _depth_trend(nulls.shuffled_changes(changes, draw))
            self._note(-1, "graph_change_trend" + suffix, trend, control="depth_shuffled")

    def _note(self, layer: int, metric: str, value: float, control: str | None = None) -> None:
        self._values.setdefault((layer, metric, control or self.control), []).append(value)


class IdentityMeasurements:
    """The errors of the identities at each layer, on windows that the model runs in float64."""

    def __init__(self, sites: list[AttentionSite], causal: bool, seed: int) -> None:
        self.sites, self.causal, self.seed = sites, causal, seed
        layers = range(len(sites))
        self._errors: list[list[float]] = [[] for _ in layers]
        self._head_errors: list[list[list[float]]] = [[] for _ in layers]
        self._exact_errors: list[float] = []
        self._laplacian_errors: list[tuple[float, float]] = []
        self._rotations = self._fields = torch.empty(0)

    def add(self, capture: LayerCapture) -> None:
        """One layer of one window; the Laplacian identity is checked on the first window."""
        layer, site = capture.layer, self.sites[capture.layer]
        weights = site.weights()
        if not self._errors[layer]:
            self._laplacian_errors.append(self._check_laplacian(walk.effective_graph(capture.attention)))
        self._errors[layer].append(identities.walk_error(capture, site, weights))
        self._head_errors[layer].append(identities.head_walk_errors(capture, site, weights))

    def add_with_float64_softmax(self, capture: LayerCapture) -> None:
        site = self.sites[capture.layer]
        self._exact_errors.append(identities.walk_error(capture, site, site.weights()))

    def write(self, rows: Rows) -> None:
        relative = "||walk - block output||_F / ||block output||_F"
        own = f"{relative}; float64 states, softmax as the library computes it, its own row sums on the value bias"
        for layer in range(len(self.sites)):
            rows.add_largest(layer, "identity_error", "trained", self._errors[layer], "windows", convention=own)
            rows.add(
                layer,
                "identity_error",
                "float64_softmax",
                self._exact_errors[layer],
                convention=f"{relative}; float64 states and softmax, first window",
            )
            for head, errors in enumerate(zip(*self._head_errors[layer], strict=True)):
                rows.add_largest(
                    layer,
                    "identity_error",
                    "trained",
                    errors,
                    "windows",
                    head=head,
                    convention="one head alone as a walk with constant transport W_V W_O",
                )
            kinds = (("conditions_hold", "P made reversible"), ("trained", "P as it is"))
            for (control, graph), error in zip(kinds, self._laplacian_errors[layer], strict=True):
                rows.add(
                    layer,
                    "connection_laplacian_error",
                    control,
                    error,
                    convention=f"|<f, L g> - energy(f, g)| / (||f|| ||g||), random rotations as transports, {graph}",
                )

    def _check_laplacian(self, graph: Tensor) -> tuple[float, float]:
        """Error where the conditions hold, and on the layer's own graph, whose flow need not be reversible."""
        tokens = min(len(graph), ROTATION_TOKENS)
        if not len(self._rotations):
            self._rotations = identities.paired_rotations(tokens, ROTATION_DIM, generator(self.seed, "rotations"))
            draw = generator(self.seed, "test-functions")
            self._fields = torch.randn(2, tokens, ROTATION_DIM, dtype=torch.float64, generator=draw)
        window = graph[:tokens, :tokens]
        own = window / window.sum(1, keepdim=True)
        weights = stationarity.symmetrised(own)
        degrees = weights.sum(1)
        pairs = (
            (weights / degrees[:, None], degrees / degrees.sum()),
            (own, stationarity.reference_law(own, self.causal)),
        )
        errors = [
            identities.connection_laplacian_error(
                walked, measure, self._rotations[:tokens, :tokens], *self._fields[:, :tokens]
            )
            for walked, measure in pairs
        ]
        return errors[0], errors[1]


def _depth_trend(values: Tensor) -> float:
    """Spearman correlation of the values with their position; NaN if all are equal."""
    from scipy.stats import spearmanr

    if bool((values == values[0]).all()):
        return math.nan
    return float(spearmanr(range(len(values)), values.numpy()).statistic)
