"""Where the attention of a Laplacian and of a Gaussian kernel lies by distance, on real queries and keys (P2.b).

Both kernels are exact, their rows divided by the row sum, a token's weight on itself left out:
exp(-|q - k|_1 / lambda) and exp(-|q - k|^2 / (2 sigma^2)). lambda and sigma are matched for every head: the mean kernel
value over the pairs of different tokens of all images is the same.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attngeo.errors import UserError
from attngeo.evaluation.token_features import TokenLayer
from attngeo.training.seeding import generator, numpy_generator

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

Labels = dict[str, Any]

KERNELS = ("laplacian", "gaussian")
PARTITIONS = ("l2", "l1")
TERCILES = ("near", "middle", "far")
# The rule's mean similarity: what the Laplacian kernel is at a distance of lambda. Fixed before anything was measured.
RULE_SIMILARITY = round(math.exp(-1), 6)
SIMILARITIES = (0.1, 0.2, RULE_SIMILARITY, 0.6, 0.8)
# Bandwidths as models have them: the paper's lambda, and SOFT's Gaussian.
FIXED = {"laplacian": 4.0, "gaussian": 1.0}
ALL_LAYERS = "mean"
FEATURES, NOISE, SHUFFLED, UNIFORM = "features", "gaussian_noise", "shuffled_tokens", "uniform"
RULE_METRIC, DIFFERENCE = "middle_tercile_mass_excess", "middle_mass_difference"
INTERVAL = "half-width of the 95 % bootstrap interval over images"
HULL = "half-width of the hull of the 95 % bootstrap intervals over images by l2 and by l1 distance"
_BY_LAYER = (DIFFERENCE, "bandwidth", "distance_mean", "distance_sd", "distance_cv", "distance_skewness")
_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
# Bins of the densities: distances in standard deviations from their mean, and in units of their median.
_STANDARDISED, _IN_MEDIANS = (-4.0, 6.0, 40), (0.0, 2.5, 50)


@dataclass(frozen=True)
class _Entry:
    """One number for each image, or for each head, of a layer."""

    labels: Labels
    values: Tensor
    over: str = "images"


@dataclass(frozen=True)
class _Pairs:
    """Of sampled queries to all other tokens: distances [images, heads, Q, N - 1], and in patches [Q, N - 1]."""

    l1: Tensor
    squared_l2: Tensor
    patches: Tensor
    shuffled_patches: Tensor

    def exponents(self, kernel: str) -> Tensor:
        """What the kernel is exp(- ... / theta) of: theta is lambda, or sigma squared."""
        return self.l1 if kernel == "laplacian" else self.squared_l2 / 2

    def orders(self) -> dict[str, Tensor]:
        """The other tokens of every query from near to far, by each partition's distance."""
        return {"l2": self.squared_l2.argsort(dim=-1), "l1": self.l1.argsort(dim=-1)}


def analyze(
    features: Mapping[str, Sequence[TokenLayer]], seed: int, *, queries: int = 64, resamples: int = 2000
) -> "pd.DataFrame":
    """Measure distances and attention masses of feature sets, each a list of layers; one row a number.

    `queries` tokens are drawn from each layer, the same ones in every image, and compared with all tokens. A query's
    other tokens are cut into terciles by the rank of their l2 distance from it (partition "l2") or l1 distance ("l1"),
    the same for both kernels. Metrics, by `features` and `control`:
    tercile_mass of each kernel (sums to 1 over terciles; uniform attention beside it); middle_mass_difference, that of
    the middle tercile, Laplacian minus Gaussian; mean_attention_distance (patches); bandwidth, mean_similarity and
    median_over_bandwidth (of the distance) of each kernel; statistics and densities of the l1 and the squared l2
    distance (of l1 and l2 in units of their medians). `scale` "matched": bandwidths at which both kernels have mean
    similarity `matched_at`; "fixed": the paper's lambda = 4 and SOFT's sigma = 1. Values are means over images of means
    over layers, heads and queries; intervals are percentiles of `resamples` bootstrap samples of the images.
    middle_tercile_mass_excess is the ledger's: the centre and half-width of the hull of both partitions' intervals at
    RULE_SIMILARITY, so that it lies above or below 0 only where both do.
    Controls: gaussian_noise of the same mean and covariance of each head's queries and keys; shuffled_tokens, which
    changes distances in patches alone; uniform attention.
    A head of which too many pairs coincide for a mean similarity has NaN.

    UserError for features that are not finite, all the same, of fewer than 4 tokens, or of differing numbers of images.
    """
    import pandas as pd

    rows: list[Labels] = []
    number = 0
    for name, layers in features.items():
        _check(name, layers)
        images = len(layers[0].queries)
        resampled = numpy_generator(seed, "bootstrap over images", images).integers(images, size=(resamples, images))
        measured = []
        for layer in layers:
            measured.append(_measure(layer, seed, number, queries))
            number += 1
        of_set = []
        for entries in zip(*measured, strict=True):
            labels = {"features": name, **entries[0].labels}
            if _kept_by_layer(labels):
                rows += [
                    _row(labels | {"layer": layer.name}, entry.values, entry.over, resampled)
                    for layer, entry in zip(layers, entries, strict=True)
                ]
            over = entries[0].over
            values = [entry.values for entry in entries]
            together = torch.stack(values).mean(0) if over == "images" else torch.cat(values)
            of_set.append(_row(labels | {"layer": ALL_LAYERS}, together, over, resampled))
        rows += [*of_set, _rule_row(name, of_set)]
    return pd.DataFrame(rows)


def matched_bandwidths(exponents: Tensor, similarity: float) -> Tensor:
    """theta [H] at which exp(-exponents / theta), exponents [images, H, Q, K] >= 0, has that mean for each head.

    Newton's method on log theta, by halves of the bracket where a step leaves it. NaN where no theta does, because as
    large a share of the pairs coincides.
    """
    by_head = exponents.transpose(0, 1).flatten(1)
    coinciding = (by_head == 0).double().mean(1)
    smallest = torch.where(by_head > 0, by_head, torch.inf).amin(1).double()
    # Jensen: at least as similar at `high`; at `low` all pairs but the coinciding ones have vanished.
    high = (by_head.mean(1, dtype=torch.float64) / -math.log(similarity)).log()
    low = (smallest / 1e3).log()
    guess = high
    for _ in range(100):
        theta = guess.exp().to(by_head.dtype).unsqueeze(1)
        kernel = torch.exp(-by_head / theta)
        mean = kernel.mean(1, dtype=torch.float64)
        if bool(((mean / similarity - 1).abs() < 1e-7).logical_or(coinciding >= similarity).all()):
            break
        slope = (kernel.mul_(by_head).mean(1, dtype=torch.float64) / guess.exp()) / mean
        low, high = torch.where(mean < similarity, guess, low), torch.where(mean < similarity, high, guess)
        newton = guess - (mean / similarity).log() / slope
        guess = torch.where((newton > low) & (newton < high), newton, (low + high) / 2)
    return torch.where(coinciding < similarity, guess.exp(), math.nan)


def tercile_masses(weights: Tensor, order: Tensor) -> Tensor:
    """Sums of weights [..., K] over the near, middle and far third in the order of `order` [..., K]: [..., 3]."""
    parts = weights.gather(-1, order).tensor_split(3, dim=-1)
    return torch.stack([part.sum(-1) for part in parts], dim=-1)


def _check(name: str, layers: Sequence[TokenLayer]) -> None:
    for layer in layers:
        of = f"features {name!r}, {layer.name}"
        if layer.queries.shape[-2] < 4:
            raise UserError(f"{of}: {layer.queries.shape[-2]} tokens have no terciles", "give larger images")
        if not all(torch.isfinite(x).all() for x in (layer.queries, layer.keys)):
            raise UserError(f"{of} hold NaN or infinity", "look at the model or images that made them")
        if len(layer.queries) != len(layers[0].queries):
            raise UserError(f"{of} are of {len(layer.queries)} images, not {len(layers[0].queries)}", "give the same")


def _measure(layer: TokenLayer, seed: int, number: int, queries: int) -> list[_Entry]:
    """Every number of one layer, in the same order for every layer."""
    tokens = layer.queries.shape[-2]
    draws = generator(seed, "attention distance queries", number)
    chosen = torch.randperm(tokens, generator=draws)[: min(queries, tokens)].sort().values
    shuffle = torch.randperm(tokens, generator=generator(seed, "attention distance shuffle", number))
    pairs = _pairs(layer, chosen, shuffle)
    if not bool((pairs.l1.amax((0, 2, 3)) > 0).all()):
        raise UserError(f"{layer.name}: all tokens of a head are the same", "look at the model or images")
    entries = [*_distances(pairs, FEATURES), *_densities(pairs)]
    orders = pairs.orders()
    for similarity in SIMILARITIES:
        entries += _masses(pairs, orders, {"control": FEATURES, "scale": "matched", "matched_at": similarity})
    entries += _masses(pairs, orders, {"control": FEATURES, "scale": "fixed"})
    noise = _pairs(_noise(layer, generator(seed, "attention distance noise", number)), chosen, shuffle)
    entries += _distances(noise, NOISE)
    entries += _masses(noise, noise.orders(), {"control": NOISE, "scale": "matched", "matched_at": RULE_SIMILARITY})
    others, images = tokens - 1, len(layer.queries)
    for tercile, part in zip(TERCILES, torch.ones(others).tensor_split(3), strict=True):
        labels = {"metric": "tercile_mass", "unit": "1", "control": UNIFORM, "kernel": UNIFORM, "tercile": tercile}
        entries.append(_Entry(labels, torch.full((images,), len(part) / others, dtype=torch.float64)))
    labels = {"metric": "mean_attention_distance", "unit": "patches", "control": UNIFORM, "kernel": UNIFORM}
    entries.append(_Entry(labels, pairs.patches.double().mean().expand(images)))
    return entries


def _pairs(layer: TokenLayer, chosen: Tensor, shuffle: Tensor) -> _Pairs:
    tokens = layer.queries.shape[-2]
    others = torch.arange(tokens) != chosen.unsqueeze(1)

    def without_self(x: Tensor) -> Tensor:
        return x[..., others].unflatten(-1, (len(chosen), tokens - 1))

    queries = layer.queries[..., chosen, :]
    # The direct distances: the expansion |q|^2 + |k|^2 - 2 q.k cancels where tokens are close.
    l1, l2 = (
        without_self(torch.cdist(queries, layer.keys, p=p, compute_mode="donot_use_mm_for_euclid_dist")) for p in (1, 2)
    )
    places = torch.cartesian_prod(torch.arange(layer.grid[0]), torch.arange(layer.grid[1])).to(l1.dtype)
    patches, shuffled = (
        without_self(torch.cdist(where[chosen], where, compute_mode="donot_use_mm_for_euclid_dist"))
        for where in (places, places[shuffle])
    )
    return _Pairs(l1, l2.square(), patches, shuffled)


def _noise(layer: TokenLayer, draws: torch.Generator) -> TokenLayer:
    """Normal draws with the mean and covariance of each head's queries and keys taken together."""
    width = layer.queries.shape[-1]
    joint = layer.queries if layer.shared else torch.cat([layer.queries, layer.keys], dim=-1)
    flat = joint.double().transpose(0, 1).flatten(1, 2)  # [heads, images * N, D or 2 D]
    centred = flat - flat.mean(1, keepdim=True)
    eigenvalues, basis = torch.linalg.eigh(centred.mT @ centred / flat.shape[1])
    root = basis * eigenvalues.clamp_min(0).sqrt().unsqueeze(-2)
    drawn = torch.randn(flat.shape, generator=draws, dtype=torch.float64) @ root.mT + flat.mean(1, keepdim=True)
    drawn = drawn.to(joint.dtype).unflatten(1, (joint.shape[0], joint.shape[2])).transpose(0, 1)
    queries = drawn[..., :width]
    return TokenLayer(layer.name, queries, queries if layer.shared else drawn[..., width:], layer.grid)


def _masses(pairs: _Pairs, orders: Mapping[str, Tensor], labels: Labels) -> list[_Entry]:
    """Masses by tercile, mean distance and bandwidth of both kernels, and the difference in the middle."""
    entries: list[_Entry] = []
    middle: dict[tuple[str, str], Tensor] = {}
    on_rule = labels.get("matched_at") == RULE_SIMILARITY
    for kernel in KERNELS:
        exponents = pairs.exponents(kernel)
        of = labels | {"kernel": kernel}
        if labels["scale"] == "fixed":
            theta = torch.full((exponents.shape[1],), FIXED[kernel] ** (1 if kernel == "laplacian" else 2)).double()
        else:
            theta = matched_bandwidths(exponents, labels["matched_at"])
        scaled = exponents / theta.to(exponents.dtype)[:, None, None]
        distances = pairs.l1 if kernel == "laplacian" else pairs.squared_l2.sqrt()
        bandwidth = theta if kernel == "laplacian" else theta.sqrt()
        medians = distances.transpose(0, 1).flatten(1).median(1).values.double()
        similarity = torch.exp(-scaled).mean((0, 2, 3), dtype=torch.float64)
        for metric, values in (
            ("bandwidth", bandwidth),
            ("median_over_bandwidth", medians / bandwidth),
            ("mean_similarity", similarity),
        ):
            entries.append(_Entry(of | {"metric": metric, "unit": "1"}, values, over="heads"))
        weights = torch.softmax(-scaled, dim=-1)  # the kernel over its row sum
        for partition in PARTITIONS:
            masses = tercile_masses(weights, orders[partition]).mean((1, 2), dtype=torch.float64)
            middle[kernel, partition] = masses[:, 1]
            entries += [
                _Entry(
                    of | {"metric": "tercile_mass", "unit": "1", "partition": partition, "tercile": tercile},
                    masses[:, index],
                )
                for index, tercile in enumerate(TERCILES)
            ]
        places = [(labels["control"], pairs.patches)]
        if on_rule and labels["control"] == FEATURES:
            places.append((SHUFFLED, pairs.shuffled_patches))
        entries += [
            _Entry(
                of | {"metric": "mean_attention_distance", "unit": "patches", "control": control},
                (weights * patches).sum(-1).mean((1, 2), dtype=torch.float64),
            )
            for control, patches in places
        ]
    entries += [
        _Entry(
            labels | {"metric": DIFFERENCE, "unit": "1", "partition": partition},
            middle["laplacian", partition] - middle["gaussian", partition],
        )
        for partition in PARTITIONS
    ]
    return entries


def _distances(pairs: _Pairs, control: str) -> Iterator[_Entry]:
    """Statistics of the l1 and of the squared l2 distances of each head and image, mean over heads."""
    for name, distances in (("l1", pairs.l1), ("squared_l2", pairs.squared_l2)):
        values = distances.double().flatten(2).sort(-1).values
        mean = values.mean(-1)
        centred = values - mean.unsqueeze(-1)
        sd = centred.square().mean(-1).sqrt()
        quantiles = {level: values[..., round(level * (values.shape[-1] - 1))] for level in _QUANTILES}
        statistics = {
            "mean": mean,
            "sd": sd,
            "cv": sd / mean,
            "skewness": centred.pow(3).mean(-1) / sd.pow(3),
            "excess_kurtosis": centred.pow(4).mean(-1) / sd.pow(4) - 3,
            "dynamic_range": quantiles[0.99] / quantiles[0.01],
        }
        labels = {"control": control, "distance": name, "unit": "1"}
        for metric, numbers in statistics.items():
            yield _Entry(labels | {"metric": f"distance_{metric}"}, numbers.mean(1))
        for level, numbers in quantiles.items():
            yield _Entry(labels | {"metric": "distance_quantile", "level": level}, numbers.mean(1))


def _densities(pairs: _Pairs) -> Iterator[_Entry]:
    """Densities of distances by head: standardised, and in units of the median."""

    def by_head(distances: Tensor, bins: tuple[float, float, int], labels: Labels) -> Iterator[_Entry]:
        low, high, count = bins
        width = (high - low) / count
        shares = torch.stack([torch.histc(head.float(), count, low, high) / head.numel() / width for head in distances])
        for index in range(count):
            place = {"at": round(low + (index + 0.5) * width, 9), "width": width}
            yield _Entry(labels | place, shares[:, index].double(), over="heads")

    labels = {"control": FEATURES, "metric": "distance_density", "unit": "1"}
    for name, distances in (("l1", pairs.l1), ("squared_l2", pairs.squared_l2)):
        values = distances.transpose(0, 1).flatten(1)
        standardised = (values - values.mean(1, keepdim=True)) / values.std(1, keepdim=True)
        yield from by_head(standardised, _STANDARDISED, labels | {"distance": name, "in": "standard deviations"})
    for name, distances in (("l1", pairs.l1), ("l2", pairs.squared_l2.sqrt())):
        values = distances.transpose(0, 1).flatten(1)
        in_medians = values / values.median(1, keepdim=True).values
        yield from by_head(in_medians, _IN_MEDIANS, labels | {"distance": name, "in": "medians"})


def _kept_by_layer(labels: Labels) -> bool:
    return (
        labels["metric"] in _BY_LAYER
        and labels["control"] == FEATURES
        and labels.get("matched_at", RULE_SIMILARITY) == RULE_SIMILARITY
        and labels.get("scale") != "fixed"
    )


def _row(labels: Labels, values: Tensor, over: str, resampled: "np.ndarray") -> Labels:
    """A row: the mean with a bootstrap interval over images, or with the standard deviation over heads."""
    shared = labels | {"value": float(values.mean()), "n": len(values), "spread": None, "spread_kind": ""}
    if len(values) < 2:
        return shared
    if over == "heads":
        return shared | {"spread": float(values.std()), "spread_kind": "std over heads"}
    low, high = _interval(values, resampled)
    return shared | {"spread": (high - low) / 2, "spread_kind": INTERVAL, "low": low, "high": high}


def _interval(values: Tensor, resampled: "np.ndarray") -> tuple[float, float]:
    import numpy as np

    low, high = np.quantile(values.numpy()[resampled].mean(1), (0.025, 0.975))
    return float(low), float(high)


def _rule_row(name: str, rows: Sequence[Labels]) -> Labels:
    """The ledger's number of a feature set from the differences of its partitions."""
    found = [
        row
        for row in rows
        if row["metric"] == DIFFERENCE and row["control"] == FEATURES and row.get("matched_at") == RULE_SIMILARITY
    ]
    shared = {"features": name, "metric": RULE_METRIC, "unit": "1", "n": found[0]["n"], "layer": ALL_LAYERS}
    if any(row["spread"] is None for row in found):  # one image: no interval
        value = sum(row["value"] for row in found) / len(found)
        return shared | {"value": value, "spread": None, "spread_kind": ""}
    low, high = min(row["low"] for row in found), max(row["high"] for row in found)
    return shared | {"value": (low + high) / 2, "spread": (high - low) / 2, "spread_kind": HULL}
