"""The identities that the analysis rests on, as errors that must vanish.

P3.a, P3.b: attention equals the connection walk. P3.c: where pi_i P_ij = pi_j P_ji = w_ij and T_ij is isometric with
T_ji = T_ij^(-1), L = I - P(T) satisfies <f, L g>_pi = (1/2) sum_ij w_ij <f_i - f_j T_ij, g_i - g_j T_ij>. Two test
functions are used: with f = g the identity would hold for any stationary pi, reversible or not.
"""

import torch
from torch import Tensor

from attngeo.connection_walk.walk import connection_walk, head_walk
from attngeo.language_models.architectures import AttentionSite, HeadWeights
from attngeo.language_models.capture import LayerCapture


def relative_error(computed: Tensor, reference: Tensor) -> float:
    """||computed - reference||_F / ||reference||_F; the plain norm of the difference where the reference is zero."""
    difference, scale = (computed - reference).norm().item(), reference.norm().item()
    return difference / scale if scale > 0 else difference


def walk_error(capture: LayerCapture, site: AttentionSite, weights: HeadWeights) -> float:
    """Relative error of the connection walk against the block's own output (P3.b; P3.a if the layer has one head)."""
    walked = connection_walk(capture.attention.double(), site.states(capture.attention_input), weights)
    return relative_error(walked, capture.output.double())


def head_walk_errors(capture: LayerCapture, site: AttentionSite, weights: HeadWeights) -> list[float]:
    """The same for each head alone, a walk with constant transport, against the model's own head output times W_O."""
    walked = head_walk(capture.attention.double(), site.states(capture.attention_input), weights)
    own = capture.head_outputs.double().unflatten(1, (weights.heads, weights.head_dim)).transpose(0, 1) @ weights.output
    return [relative_error(walked[head], own[head]) for head in range(weights.heads)]


def paired_rotations(tokens: int, dim: int, generator: torch.Generator) -> Tensor:
    """Random orthogonal T_ij with T_ji = T_ij^T and T_ii = I, float64 [N, N, dim, dim]; not flat."""
    first, second = torch.triu_indices(tokens, tokens, offset=1)
    drawn = torch.linalg.qr(torch.randn(len(first), dim, dim, dtype=torch.float64, generator=generator)).Q
    transports = torch.eye(dim, dtype=torch.float64).repeat(tokens, tokens, 1, 1)
    transports[first, second] = drawn
    transports[second, first] = drawn.transpose(1, 2)
    return transports


def connection_laplacian_error(graph: Tensor, law: Tensor, transports: Tensor, f: Tensor, g: Tensor) -> float:
    """|<f, L g>_pi - (1/2) sum w <f_i - f_j T_ij, g_i - g_j T_ij>| / (||f||_pi ||g||_pi).

    graph [N, N], law [N], transports [N, N, dim, dim], f and g [N, dim].
    """
    carried_f, carried_g = (torch.einsum("jd,ijde->ije", field, transports) for field in (f, g))
    generator_g = g - torch.einsum("ij,ijd->id", graph, carried_g)
    form = (law[:, None] * f * generator_g).sum()
    flow = law[:, None] * graph
    energy = torch.einsum("ij,ijd,ijd->", flow, f[:, None] - carried_f, g[:, None] - carried_g) / 2
    norms = [(law[:, None] * field.square()).sum().sqrt() for field in (f, g)]
    return ((form - energy).abs() / (norms[0] * norms[1])).item()
