"""What transports are like: heads from their weights, edges on real states, each beside Gaussian weights."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from attngeo import intervals
from attngeo.connection_walk import nulls, transport, walk
from attngeo.connection_walk.measurements import WITHOUT_FIRST, Rows
from attngeo.language_models.architectures import AttentionSite, HeadWeights
from attngeo.language_models.capture import LayerCapture
from attngeo.training.seeding import generator, numpy_generator

_SPECTRAL: dict[str, tuple[Callable[[Tensor, int], Tensor], str]] = {
    "isometry_score": (transport.isometry_score, "(sum s)^2 / (r sum s^2) of"),
    "singular_value_variation": (
        transport.singular_value_variation,
        "standard deviation / mean of the r largest singular values of",
    ),
    "polar_residual": (transport.polar_residual, "||T - a Q||_F / ||T||_F for the nearest scaled isometry a Q of T ="),
}
_OF_A_HEAD = "W_V W_O, r = min(C, D), norm gain folded into W_V"
HEAD_CONVENTIONS = {metric: f"{formula} {_OF_A_HEAD}" for metric, (_, formula) in _SPECTRAL.items()} | {
    "reciprocity_defect": "||M - M^T||_F / (sqrt(2) ||M||_F) of M = W_V W_O, norm gain folded into W_V; 1 if unrelated"
}
_GAIN = "gain"
_TOUCHING = ("first token", "")
_GAIN_CONVENTIONS = {
    "trained": "||x M|| / ||x|| on the states x that attention reads",
    "null": "||M||_F / sqrt(C), the root mean square gain over all directions",
}
_GAIN_VARIATION = "coefficient of variation of ||x_j T_ij|| / ||x_j|| over sampled edges; 0 for a scaled isometry"
_RECIPROCITY_CONVENTIONS = {
    False: "||T_ji - T_ij^T||_F / sqrt(||T_ij||_F^2 + ||T_ji||_F^2)",
    True: "||T_ij - T_ij^T||_F / (sqrt(2) ||T_ij||_F), since a causal graph has no edge back",
}
_SIGNIFICANT = 0.05  # of the tests of one metric taken together


def head_statistics(weights: HeadWeights) -> dict[str, Tensor]:
    """Isometry and reciprocity of each head alone: [H] by metric, defined in `HEAD_CONVENTIONS`."""
    singular_values = transport.head_singular_values(weights)
    rank = min(weights.model_dim, weights.head_dim)
    found = {metric: measure(singular_values, rank) for metric, (measure, _) in _SPECTRAL.items()}
    return found | {"reciprocity_defect": transport.head_reciprocity_defect(weights)}


class HeadMeasurements:
    """Heads from the weights alone, a layer at a time, against Gaussian heads of the same shape."""

    def __init__(self, rows: Rows, null_draws: int, seed: int) -> None:
        self.rows, self.null_draws, self.seed = rows, null_draws, seed
        self._plain_nulls: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._tests = _LayerTests("isometry_score", "Welch's t test of heads against null draws")

    def add(self, layer: int, site: AttentionSite) -> None:
        """Write trained values, both nulls and both excesses of a layer; of single heads those of the isometry."""
        weights = site.weights()
        trained = head_statistics(weights)
        for metric, values in trained.items():
            cells: dict[str, Any] = {"convention": HEAD_CONVENTIONS[metric]}
            self.rows.add_mean(layer, metric, "trained", values, "heads", **cells)
            for head in range(len(values)):
                self.rows.add(layer, metric, "trained", values[head].item(), head=head, **cells)
        for suffix, scales, drawn_as in (
            ("", {}, "Gaussian draws of the same shape"),
            ("_same_gain", scales_of(site), "Gaussian draws of the same shape, norm gain and output scale"),
        ):
            null = self._null(weights, scales)
            for metric, values in trained.items():
                cells = {"convention": HEAD_CONVENTIONS[metric]}
                self.rows.add_mean(layer, metric, f"null{suffix}", null[metric], drawn_as, **cells)
                excess = values - null[metric].mean()
                low, high = intervals.mean_interval(values, null[metric])
                self.rows.add_mean(layer, metric, f"excess{suffix}", excess, "heads", low=low, high=high, **cells)
            self._write_head_excess(layer, f"excess{suffix}", trained["isometry_score"], null["isometry_score"])

    def write_tests(self) -> None:
        """Which layers lie above and below the null once that many are tested."""
        self._tests.write(self.rows)

    def _write_head_excess(self, layer: int, control: str, scores: Tensor, null: Tensor) -> None:
        for head, excess in enumerate((scores - null.mean()).tolist()):
            self.rows.add(
                layer,
                "isometry_score",
                control,
                excess,
                head=head,
                n=len(null),
                spread=null.std().item(),
                spread_kind="standard deviation of a null draw",
                convention=HEAD_CONVENTIONS["isometry_score"],
            )
        self._tests.add(layer, control, scores, null)

    def _null(self, weights: HeadWeights, scales: Mapping[str, Any]) -> dict[str, Tensor]:
        """The same Gaussian matrices at every layer and in both nulls: only what is folded in tells them apart."""
        shape = (weights.model_dim, weights.head_dim)
        plain = all(scale is None for scale in scales.values())
        if plain and shape in self._plain_nulls:
            return self._plain_nulls[shape]
        draw = generator(self.seed, f"null-heads {shape[0]}x{shape[1]}")
        drawn = [head_statistics(nulls.gaussian_heads(*shape, 1, draw, **scales)) for _ in range(self.null_draws)]
        null = {metric: torch.cat([one[metric] for one in drawn]) for metric in drawn[0]}
        if plain:
            self._plain_nulls[shape] = null
        return null


def scales_of(site: AttentionSite) -> dict[str, Any]:
    """What a layer folds into its weights besides W_V and W_O."""
    return {"gain": site.gain, "output_scale": site.output_scale}


class TransportMeasurements:
    """What transports do to real states: every head on every token, and edges sampled along the walk.

    A window's numbers are taken while its layer is at hand; only means and a number an edge are kept.
    """

    def __init__(self, sites: list[AttentionSite], causal: bool, edges: int, seed: int) -> None:
        self.sites, self.causal, self.edges, self.seed = sites, causal, edges, seed
        self.windows = 0
        self._products: dict[int, transport.HeadProducts] = {}
        self._gains: dict[tuple[int, str], list[Tensor]] = {}
        self._reciprocity: dict[tuple[int, str], list[float]] = {}
        self._edges: list[list[dict[tuple[str, str], Tensor]]] = [[] for _ in sites]

    def add(self, capture: LayerCapture) -> None:
        """One layer of the window at hand; the last layer closes the window."""
        layer, site = capture.layer, self.sites[capture.layer]
        weights, states = site.weights(), site.states(capture.attention_input)
        if layer not in self._products:
            self._products[layer] = transport.HeadProducts.of(weights)
        gains = self._products[layer].head_gains(weights, states)
        self._gains.setdefault((layer, ""), []).append(gains.mean(1))
        if len(states) > 1:
            self._gains.setdefault((layer, WITHOUT_FIRST), []).append(gains[:, 1:].mean(1))
        graph = walk.effective_graph(capture.attention)
        self._note_reciprocity(layer, capture.attention, graph)
        if self.edges:
            self._edges[layer].append(self._sample_edges(layer, site, weights, capture.attention, graph, states))
        self.windows += layer == len(self.sites) - 1

    def write(self, rows: Rows) -> None:
        tests = _LayerTests("transport_isometry_score", "t test of the windows' mean excess")
        for layer, site in enumerate(self.sites):
            self._write_gains(rows, layer)
            self._write_reciprocity(rows, layer)
            if self.edges:
                self._write_edges(rows, layer, site, tests)
        if self.edges:
            tests.write(rows)

    def _note_reciprocity(self, layer: int, attention: Tensor, graph: Tensor) -> None:
        gates = walk.gates(attention)
        back = gates if self.causal else gates.transpose(1, 2)
        defects = self._products[layer].edge_reciprocity_defects(gates, back).double()
        weights = graph - graph.diagonal().diag()
        for suffix, start in (("", 0), (WITHOUT_FIRST, 1)):
            kept = weights[start:, start:]
            if kept.sum() > 0:
                taken = torch.where(kept > 0, defects[start:, start:], 0.0)
                self._reciprocity.setdefault((layer, suffix), []).append(((kept * taken).sum() / kept.sum()).item())

    def _sample_edges(
        self, layer: int, site: AttentionSite, weights: HeadWeights, attention: Tensor, graph: Tensor, states: Tensor
    ) -> dict[tuple[str, str], Tensor]:
        """By metric and control the numbers of this window's edges, [E]; those of `_TOUCHING` say which meet a sink."""
        index = self.windows * len(self.sites) + layer
        rows, columns = walk.sample_edges(graph, self.edges, generator(self.seed, "edges", index))
        gates, read = walk.gates(attention[:, rows, columns].double()).T, states[columns]
        spectra = {"trained": transport.edge_singular_values(weights, gates)}
        gains = {"trained": transport.transport_along(weights, gates, read).norm(dim=1) / read.norm(dim=1)}
        for control, scales in (("null", {}), ("null_same_gain", scales_of(site))):
            draw = numpy_generator(self.seed, "null-edges", index)
            spectra[control], gains[control] = nulls.gaussian_edges(weights, gates, read, draw, **scales)
        found = {_TOUCHING: (rows == 0) | (columns == 0)}
        found |= {(_GAIN, control): values for control, values in gains.items()}
        rank = transport.edge_rank(weights)
        for metric, (measure, _) in _SPECTRAL.items():
            values = {control: measure(spectrum, rank) for control, spectrum in spectra.items()}
            found |= {(metric, control): numbers for control, numbers in _with_excess(values).items()}
        isotropic = self._products[layer].isotropic_edge_gains(gates)
        values = {"trained": gains["trained"], "null": isotropic}
        return found | {("directional_gain", control): numbers for control, numbers in _with_excess(values).items()}

    def _write_gains(self, rows: Rows, layer: int) -> None:
        """Gains of heads on all tokens, against the root mean square over all directions."""
        isotropic = self._products[layer].isotropic_head_gains()
        for suffix in ("", WITHOUT_FIRST):
            if (layer, suffix) not in self._gains:
                continue
            trained = torch.stack(self._gains[layer, suffix])
            convention = f"{_GAIN_CONVENTIONS['trained']}; mean over {'the other ' if suffix else ''}tokens"
            null = f"{_GAIN_CONVENTIONS['null']}, M = W_V W_O"
            metric = f"directional_gain{suffix}"
            rows.add(layer, metric, "null", isotropic.mean().item(), convention=f"{null}; mean over heads")
            for control, values in (("trained", trained), ("excess", trained - isotropic)):
                cells: dict[str, Any] = {"interval": True, "convention": convention}
                rows.add_mean(layer, metric, control, values.mean(1), "windows, each the mean over heads", **cells)
                for head in range(values.shape[1]):
                    rows.add_mean(layer, metric, control, values[:, head], "windows", head=head, **cells)

    def _write_reciprocity(self, rows: Rows, layer: int) -> None:
        for suffix in ("", WITHOUT_FIRST):
            if (layer, suffix) not in self._reciprocity:
                continue
            metric = f"transport_reciprocity_defect{suffix}"
            among = ", edges among the tokens after the first" if suffix else ""
            convention = f"{_RECIPROCITY_CONVENTIONS[self.causal]}; mean over edges between tokens by P_ij{among}"
            values = self._reciprocity[layer, suffix]
            rows.add_mean(layer, metric, "trained", values, "windows", interval=True, convention=convention)
            null = nulls.gaussian_reciprocity_defect(self._products[layer].model_dim)
            rows.add(layer, metric, "null", null, convention="sqrt(1 - 1/C), Gaussian weights with the same gates back")

    def _write_edges(self, rows: Rows, layer: int, site: AttentionSite, tests: "_LayerTests") -> None:
        """Isometry and directional gain along the sampled edges, against Gaussian weights under the same gates."""
        weights = site.weights()
        rank = transport.edge_rank(weights)
        conventions = {
            metric: f"{formula} T_ij, r = min(C, K D) = {rank}; edges sampled along the walk"
            for metric, (_, formula) in _SPECTRAL.items()
        } | {"directional_gain": "||x_j T_ij|| / ||x_j||, null ||T_ij||_F / sqrt(C); edges sampled along the walk"}
        windows = self._edges[layer]
        for suffix in ("", WITHOUT_FIRST):
            chosen = [~window[_TOUCHING] if suffix else torch.ones_like(window[_TOUCHING]) for window in windows]
            if not any(bool(some.any()) for some in chosen):
                continue
            among = ", those that touch the first token left out" if suffix else ""
            for metric, control in windows[0]:
                by_window = [window[metric, control][some] for window, some in zip(windows, chosen, strict=True)]
                if metric in conventions:
                    self._write_edge_mean(
                        rows, layer, f"transport_{metric}{suffix}", control, by_window, conventions[metric] + among
                    )
                elif metric == _GAIN:
                    values = torch.cat(by_window)
                    variation = (values.std() / values.mean()).item() if len(values) > 1 else math.nan
                    convention = _GAIN_VARIATION + among
                    name = f"transport_gain_variation{suffix}"
                    rows.add(layer, name, control, variation, n=len(values), convention=convention)
        for control in ("excess", "excess_same_gain"):
            means = torch.stack([window["isometry_score", control].mean() for window in windows])
            tests.add(layer, control, means)
        gates = torch.full((1, weights.heads), 1 / weights.heads, dtype=torch.float64)
        uniform = transport.edge_singular_values(weights, gates)
        for metric, (measure, formula) in _SPECTRAL.items():
            every = f"{formula} T_ij, r = min(C, K D) = {rank}; every gate 1/H, the same transport for all edges"
            value = measure(uniform, rank).item()
            rows.add(layer, f"transport_{metric}", "uniform_attention", value, convention=every)

    def _write_edge_mean(
        self, rows: Rows, layer: int, metric: str, control: str, by_window: list[Tensor], convention: str
    ) -> None:
        """Mean over windows of the mean over their edges; windows whose edges were all left out do not count."""
        values = torch.cat(by_window)
        means = torch.stack([window.mean() for window in by_window if len(window)])
        low, high = intervals.mean_interval(means)
        rows.add(
            layer,
            metric,
            control,
            means.mean().item(),
            n=len(values),
            spread=values.std().item() if len(values) > 1 else math.nan,
            spread_kind="standard deviation over edges",
            low=low,
            high=high,
            convention=convention,
        )


class _LayerTests:
    """One test a layer whether an excess is 0, and Holm's correction for their number."""

    def __init__(self, metric: str, test: str) -> None:
        self.metric, self.test = metric, test
        self._found: dict[str, dict[int, tuple[float, float]]] = {}

    def add(self, layer: int, control: str, values: Tensor, subtracted: Tensor | None = None) -> None:
        """Test the mean of a sample against 0, or against the mean of another sample (Welch)."""
        from scipy import stats

        difference, p_value = values.mean().item(), math.nan
        if subtracted is not None:
            difference -= subtracted.mean().item()
        if len(values) > 1:
            if subtracted is None:
                p_value = float(stats.ttest_1samp(values.numpy(), 0).pvalue)
            else:
                p_value = float(stats.ttest_ind(values.numpy(), subtracted.numpy(), equal_var=False).pvalue)
        self._found.setdefault(control, {})[layer] = (difference, p_value)

    def write(self, rows: Rows) -> None:
        for control, layers in self._found.items():
            adjusted = intervals.holm([p_value for _, p_value in layers.values()])
            convention = f"{self.test}, two-sided, adjusted for {len(layers)} layers (Holm)"
            for layer, p_value in zip(layers, adjusted, strict=True):
                rows.add(layer, f"{self.metric}_p_value", control, p_value, n=len(layers), convention=convention)
            for side, sign in (("above", 1), ("below", -1)):
                count = sum(
                    p_value < _SIGNIFICANT and sign * difference > 0
                    for (difference, _), p_value in zip(layers.values(), adjusted, strict=True)
                )
                rows.add(
                    -1,
                    f"{self.metric}_layers_{side}_null",
                    control,
                    count,
                    unit="layers",
                    n=len(layers),
                    convention=f"layers {side} the null with p below {_SIGNIFICANT}: {convention}",
                )


def _with_excess(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values by control, and trained minus each null."""
    excess = {
        control.replace("null", "excess"): values["trained"] - null
        for control, null in values.items()
        if control != "trained"
    }
    return values | excess
