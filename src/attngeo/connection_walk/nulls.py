"""Controls without which no score may be called structure: shape-matched Gaussian weights and shuffled depth.

A product of Gaussian W_V W_O is already nearly a scaled isometry, the more so the wider the model: "stronger with
scale" shows up in untrained matrices. A trained score also has the layer's norm gain and output scale folded in, which
alone can spoil an isometry: the same-gain null carries them too. The untrained network itself is
`language_models.loading.random_init`.
"""

import torch
from torch import Tensor

from attngeo.connection_walk.transport import (
    edge_singular_values,
    head_singular_values,
    isometry_score,
    transport_along,
)
from attngeo.language_models.architectures import HeadWeights


def gaussian_head_scores(
    model_dim: int,
    head_dim: int,
    draws: int,
    generator: torch.Generator,
    *,
    gain: Tensor | None = None,
    output_scale: Tensor | None = None,
) -> Tensor:
    """Isometry scores of `draws` heads with independent standard normal W_V and W_O, [draws].

    With `gain` or `output_scale` [C] the heads are diag(gain) W_V and W_O diag(output_scale) of the same W_V and W_O.
    """
    value = torch.randn(draws, model_dim, head_dim, dtype=torch.float64, generator=generator)
    output = torch.randn(draws, head_dim, model_dim, dtype=torch.float64, generator=generator)
    value, output = _scaled(value, output, gain, output_scale)
    return isometry_score(head_singular_values(value, output), min(model_dim, head_dim))


def gaussian_head_score_estimate(model_dim: int, head_dim: int) -> float:
    """1 - D/(2 C): the mean of `gaussian_head_scores` to first order in D/C."""
    return 1 - head_dim / (2 * model_dim)


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
    rank: int,
    generator: torch.Generator,
    *,
    gain: Tensor | None = None,
    output_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Isometry score and gain ||x T||/||x|| of each edge under its own gates and its own Gaussian weights, [E] each.

    The pairing by edge leaves the gates as the only thing that trained and null transports share.
    """
    scores, gains = torch.empty(len(gates), dtype=torch.float64), torch.empty(len(gates), dtype=torch.float64)
    for edge in range(len(gates)):
        drawn = gaussian_like(weights, generator, gain=gain, output_scale=output_scale)
        own_gates, own_state = gates[edge : edge + 1], states[edge : edge + 1]
        scores[edge] = isometry_score(edge_singular_values(drawn, own_gates), rank)
        gains[edge] = transport_along(drawn, own_gates, own_state).norm() / own_state.norm()
    return scores, gains


def pairwise_changes(graphs: Tensor) -> Tensor:
    """||P_b - P_a||_F / ||P_a||_F for every ordered pair of layers: [L, N, N] -> [L, L] with index (a, b), float64."""
    layers = len(graphs)
    changes = torch.zeros(layers, layers, dtype=torch.float64)
    norms = torch.linalg.vector_norm(graphs, dim=(1, 2), dtype=torch.float64)
    for first in range(layers):
        for second in range(first):
            distance = torch.linalg.vector_norm(graphs[first] - graphs[second], dtype=torch.float64)
            changes[first, second], changes[second, first] = distance / norms[first], distance / norms[second]
    return changes


def shuffled_changes(changes: Tensor, generator: torch.Generator) -> Tensor:
    """Changes along the depth of one random order of the layers: [L, L] -> [L - 1]."""
    order = torch.randperm(len(changes), generator=generator)
    return changes[order[:-1], order[1:]]


def _scaled(value: Tensor, output: Tensor, gain: Tensor | None, output_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    if gain is not None:
        value = gain.detach().double()[:, None] * value
    if output_scale is not None:
        output = output * output_scale.detach().double()
    return value, output
