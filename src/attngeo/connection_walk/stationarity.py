"""Statistics of one layer's effective graph P, and of its change from the layer before (claims P3.c and P3.d).

All take P [N, N] in floating point with non-negative entries and return Python floats.
"""

import math

import numpy as np
import torch
from torch import Tensor

_DEFECT = "|F - F^T| / (sqrt(2) |F - diag F|), F_ij = pi_i P_ij"


def relative_change(before: Tensor, after: Tensor) -> float:
    """||after - before||_F / ||before||_F."""
    return ((after - before).norm() / before.norm()).item()


def row_jensen_shannon(before: Tensor, after: Tensor) -> float:
    """Mean over rows of the Jensen-Shannon distance, the square root of the divergence in bits: 0 equal, 1 disjoint."""
    p, q = _stochastic(before), _stochastic(after)
    middle = (p + q) / 2
    divergence = (_relative_entropy(p, middle) + _relative_entropy(q, middle)) / 2
    return divergence.clamp(0, 1).sqrt().mean().item()


def stochasticity_defect(graph: Tensor) -> float:
    """max_i |sum_j P_ij - 1|."""
    return (graph.sum(1) - 1).abs().max().item()


def symmetrised(graph: Tensor) -> Tensor:
    """Edge weights W = (P + P^T)/2: the undirected graph that encoders and causal decoders alike have."""
    return (graph + graph.T) / 2


def symmetrised_spectrum(graph: Tensor, leading: int | None = None) -> tuple[Tensor, Tensor]:
    """Eigenvalues (ascending, at most 1) and eigenvectors of D^(-1/2) W D^(-1/2), the walk on the symmetrised graph.

    All of them or the `leading` largest, which take a third of the time. NaN where a token has no weight at all.
    """
    from scipy import linalg

    weights = symmetrised(graph).double()
    scale = weights.sum(1).rsqrt()
    normalised = (scale[:, None] * weights * scale).numpy()
    tokens = len(graph)
    wanted = tokens if leading is None else min(leading, tokens)
    if not np.isfinite(normalised).all():
        nothing = torch.full((tokens + 1, wanted), math.nan, dtype=torch.float64)
        return nothing[0], nothing[1:]
    values, vectors = linalg.eigh(normalised, subset_by_index=[tokens - wanted, tokens - 1], check_finite=False)
    return torch.from_numpy(values), torch.from_numpy(vectors)


def spectral_gap(eigenvalues: Tensor) -> float:
    """1 - lambda_2 of the walk on the symmetrised graph; NaN for a single token, which has no second eigenvalue."""
    return 1 - eigenvalues[-2].item() if len(eigenvalues) > 1 else math.nan


def subspace_angle(before: Tensor, after: Tensor) -> float:
    """Root mean square of the principal angles between the spans of orthonormal columns, radians in [0, pi/2]."""
    if not (before.isfinite().all() and after.isfinite().all()):
        return math.nan
    cosines = torch.linalg.svdvals(before.T @ after).clamp(0, 1)
    return torch.arccos(cosines).square().mean().sqrt().item()


def stationary_law(graph: Tensor) -> Tensor:
    """pi with pi P = pi and sum 1 of the row-normalised P; a causal P puts all of it on token 0.

    NaN everywhere if the linear system is singular, that is if the walk has more than one stationary law.
    """
    walk = _stochastic(graph)
    system = torch.eye(len(walk), dtype=walk.dtype) - walk.T
    # The rows of I - P^T add up to zero, so one of them can give way to the normalisation.
    system[-1] = 1
    right = torch.zeros(len(walk), dtype=walk.dtype)
    right[-1] = 1
    law, info = torch.linalg.solve_ex(system, right)
    if info.item() != 0 or law.min() < -1e-6:
        return torch.full_like(law, math.nan)
    return law.clamp_min(0) / law.clamp_min(0).sum()


def reference_law(graph: Tensor, causal: bool) -> Tensor:
    """The law under which a graph is judged: its stationary law, of a causal one the degree law of (P + P^T)/2.

    A causal P has the point mass on token 0 as its stationary law, under which nothing flows.
    """
    if not causal:
        return stationary_law(graph)
    degrees = symmetrised(_stochastic(graph)).sum(1)
    return degrees / degrees.sum()


def entropy(law: Tensor) -> float:
    """-sum_i pi_i log pi_i in nats: log N for the uniform law, 0 for a point mass, NaN where there is no law."""
    return torch.special.entr(law).sum().item()


def law_convention(causal: bool) -> str:
    """Which law `reference_law` is, in words."""
    if causal:
        return "pi the degree law of (P + P^T)/2, since the stationary law of a causal P is the point mass on token 0"
    return "pi the stationary law of P"


def without_first_token(graph: Tensor) -> Tensor:
    """P among the other tokens, rows normalised again: [N, N] -> [N - 1, N - 1].

    A row that had all its weight on the first token stays where it is.
    """
    rest = graph[1:, 1:]
    total = rest.sum(1, keepdim=True)
    stay = torch.eye(len(rest), dtype=graph.dtype)
    return torch.where(total > 0, rest / torch.where(total > 0, total, 1.0), stay)


def detailed_balance_defect(graph: Tensor, law: Tensor) -> float:
    """||F - F^T||_F / (sqrt(2) ||F - diag F||_F) with F_ij = pi_i P_ij: 0 reversible, 1 if no edge has a way back.

    Self-loops are their own way back: they are left out, or a heavy one (an attention sink) would hide every other
    edge. NaN if nothing flows between different tokens.
    """
    flow = law[:, None] * _stochastic(graph)
    between = flow - flow.diagonal().diag()
    return ((between - between.T).norm() / (math.sqrt(2) * between.norm())).item()


def reversibility_defect(graph: Tensor, causal: bool, sink_tokens: int = 0) -> float:
    """How far P is from reversible, by `reversibility_convention`; NaN if fewer than two tokens are left.

    That of a causal P is 1 against every law under which something flows, since a triangular P has no way back.
    """
    window = graph[sink_tokens:, sink_tokens:]
    return detailed_balance_defect(window, reference_law(window, causal)) if len(window) > 1 else math.nan


def reversibility_convention(causal: bool, sink_tokens: int = 0) -> str:
    """The convention in words, to stand beside every number."""
    tokens = f"without the first {sink_tokens} tokens" if sink_tokens > 1 else "without the first token"
    tokens = tokens if sink_tokens else "all tokens"
    if not causal:
        return f"{_DEFECT}, pi the stationary law of P, {tokens}"
    return f"one-way by construction, 1 for every triangular P; {_DEFECT}, pi the degree law of (P + P^T)/2, {tokens}"


def first_token_share(graph: Tensor) -> float:
    """Mean attention that the other tokens pay to the first one; NaN for a single token."""
    return graph[1:, 0].mean().item() if len(graph) > 1 else math.nan


def _stochastic(graph: Tensor) -> Tensor:
    return graph / graph.sum(1, keepdim=True)


def _relative_entropy(p: Tensor, q: Tensor) -> Tensor:
    """sum_j p_j log2(p_j / q_j) by row; terms with p_j = 0 vanish (q is never 0 where p is not)."""
    ratio = torch.where(p > 0, p / torch.where(p > 0, q, 1.0), 1.0)
    return (p * ratio.log2()).sum(1)
