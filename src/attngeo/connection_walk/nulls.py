"""Controls without which no score may be called structure: shape-matched Gaussian weights and shuffled depth.

A product of Gaussian W_V W_O is already nearly a scaled isometry, the more so the wider the model: "stronger with
scale" shows up in untrained matrices. A trained score also has the layer's norm gain and output scale folded in, which
alone can spoil an isometry: the same-gain null carries them too. The untrained network itself is
`language_models.loading.random_init`.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attngeo.connection_walk.transport import product_singular_values
from attngeo.language_models.architectures import HeadWeights

_CHUNK_ENTRIES = 2**16  # entries of each graph that are multiplied at a time, in float64


def gaussian_heads(
    model_dim: int,
    head_dim: int,
    draws: int,
    generator: torch.Generator,
    *,
    gain: Tensor | None = None,
    output_scale: Tensor | None = None,
) -> HeadWeights:
    """`draws` heads with independent standard normal W_V and W_O and no biases.

    With `gain` or `output_scale` [C] the heads are diag(gain) W_V and W_O diag(output_scale) of the same W_V and W_O.
    """
    value = torch.randn(draws, model_dim, head_dim, dtype=torch.float64, generator=generator)
    output = torch.randn(draws, head_dim, model_dim, dtype=torch.float64, generator=generator)
    value, output = _scaled(value, output, gain, output_scale)
    return HeadWeights(
        value=value,
        output=output,
        value_bias=torch.zeros(draws, head_dim, dtype=torch.float64),
        output_bias=torch.zeros(model_dim, dtype=torch.float64),
        group=torch.arange(draws),
    )


def gaussian_head_score_estimate(model_dim: int, head_dim: int) -> float:
    """1 - D/(2 C): the mean isometry score of `gaussian_heads` to first order in D/C."""
    return 1 - head_dim / (2 * model_dim)


def gaussian_reciprocity_defect(model_dim: int) -> float:
    """sqrt(1 - 1/C): the defect between T_ij and T_ji of Gaussian weights if both have the same gates.

    E tr(M M) = C D and E ||M||_F^2 = C^2 D; different heads are unrelated. Other gates only bring it nearer to 1.
    """
    return math.sqrt(1 - 1 / model_dim)


def gaussian_like(
    weights: HeadWeights,
    generator: torch.Generator,
    *,
    gain: Tensor | None = None,
    output_scale: Tensor | None = None,
) -> HeadWeights:
    """Standard normal W_V and W_O of the same shapes and the same sharing of W_V between heads; no biases.

    `gain` and `output_scale` [C] are folded in as `AttentionSite.weights` does it.
    """
    value = torch.randn(weights.value.shape, dtype=torch.float64, generator=generator)
    output = torch.randn(weights.output.shape, dtype=torch.float64, generator=generator)
    value, output = _scaled(value, output, gain, output_scale)
    return HeadWeights(
        value=value,
        output=output,
        value_bias=torch.zeros_like(weights.value_bias),
        output_bias=torch.zeros_like(weights.output_bias),
        group=weights.group,
    )


def gaussian_edges(
    weights: HeadWeights,
    gates: Tensor,
    states: Tensor,
    generator: np.random.Generator,
    *,
    gain: Tensor | None = None,
    output_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Singular values [E, rank] and gains ||x T||/||x|| [E] of Gaussian weights under each edge's gates.

    Every edge has weights of its own, and its gain and spectrum are drawn apart; the pairing by edge leaves the gates
    as the only thing that trained and null transports share. The law is that of `gaussian_like`, the draws are fewer:
    the sum of Gaussian W_O under gates g over a group's heads is Gaussian with deviation sigma = H ||g||, and of a
    Gaussian matrix that nothing scales its triangular factor is drawn alone (Bartlett, 1933).
    """
    width, heads, side = weights.model_dim, weights.heads, weights.groups * weights.head_dim
    by_group = torch.zeros(len(gates), weights.groups, dtype=torch.float64).index_add_(1, weights.group, gates.square())
    sigma = (heads * by_group.sqrt()).repeat_interleave(weights.head_dim, dim=1)
    on_value, on_output = (None if scale is None else scale.detach().double() for scale in (gain, output_scale))
    singular_values = torch.empty(len(gates), min(width, side), dtype=torch.float64)
    for edge in range(len(gates)):
        if on_value is None:
            left = _gaussian_triangle(width, side, generator)
        else:
            left = on_value[:, None] * _gaussian(generator, width, side)
        if on_output is None:
            right = _gaussian_triangle(width, side, generator).T
        else:
            right = _gaussian(generator, side, width) * on_output
        singular_values[edge] = product_singular_values(left * sigma[edge], right, singular_values.shape[1])
    read = states if on_value is None else states * on_value
    arrived = _gaussian(generator, len(gates), width)
    arrived = arrived if on_output is None else arrived * on_output
    carried = (_gaussian(generator, len(gates), side) * sigma).norm(dim=1) * arrived.norm(dim=1)
    return singular_values, read.norm(dim=1) / states.norm(dim=1) * carried


def graph_products(graphs: Sequence[Tensor]) -> Tensor:
    """<P_a, P_b>_F for every pair of layers: L graphs [N, N] -> [L, L], float64."""
    products = torch.zeros(len(graphs), len(graphs), dtype=torch.float64)
    for parts in zip(*(graph.flatten().split(_CHUNK_ENTRIES) for graph in graphs), strict=True):
        some = torch.stack(parts).double()
        products += some @ some.T
    return products


def pairwise_changes(products: Tensor) -> Tensor:
    """||P_b - P_a||_F / ||P_a||_F for every ordered pair of layers from `graph_products`: [L, L] with index (a, b)."""
    squares = products.diagonal()
    distances = (squares[:, None] + squares - 2 * products).clamp_min(0)
    return (distances / squares[:, None]).sqrt()


def shuffled_changes(changes: Tensor, generator: torch.Generator) -> Tensor:
    """Changes along the depth of one random order of the layers: [L, L] -> [L - 1]."""
    order = torch.randperm(len(changes), generator=generator)
    return changes[order[:-1], order[1:]]


def _gaussian(generator: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(generator.standard_normal(shape))


def _gaussian_triangle(rows: int, columns: int, generator: np.random.Generator) -> Tensor:
    """R of a QR decomposition of a standard normal [rows, columns]: chi on the diagonal, standard normal above it."""
    side = min(rows, columns)
    factor = _gaussian(generator, side, columns).triu(1)
    factor.diagonal().copy_(torch.from_numpy(np.sqrt(generator.chisquare(rows - np.arange(side)))))
    return factor


def _scaled(value: Tensor, output: Tensor, gain: Tensor | None, output_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    if gain is not None:
        value = gain.detach().double()[:, None] * value
    if output_scale is not None:
        output = output * output_scale.detach().double()
    return value, output
