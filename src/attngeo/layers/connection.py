"""Connections between the fibres of tokens: a learned low-rank one, and the polar factors of metrics' square roots.

The learned one is covariant: turning the factors of every fibre by a rotation of its own turns Gamma with them. The
polar construction knows the metrics alone and is invariant under one rotation of all fibres together.
"""

import math
from typing import ClassVar

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from attngeo.layers.attention import full_precision
from attngeo.ops.low_rank_metric import square_root


class Connection(nn.Module):
    """Factors W, A, B [B, N, F, R] of Gamma(u, v) = sum_r W_r (A_r . u)(B_r . v), made of tokens [B, N, C] (ours).

    All are linear in the token. W starts at 0 and with it Gamma, but not its gradient, since A and B start at random.
    With `symmetric` B is A, so that the torsion Gamma(u, v) - Gamma(v, u) vanishes: the control.
    """

    keeps_its_start: ClassVar[bool] = True

    def __init__(self, dim: int, features: int, rank: int, *, symmetric: bool = False) -> None:
        super().__init__()
        self.rank = rank
        self.outward = nn.Linear(dim, features * rank, bias=False)
        self.left = nn.Linear(dim, features * rank, bias=False)
        self.right = None if symmetric else nn.Linear(dim, features * rank, bias=False)
        nn.init.zeros_(self.outward.weight)
        for layer in (self.left, self.right):
            if layer is not None:
                # Entries of size 1 / sqrt(F) on layer-normalised tokens: projections of unit vectors of about that.
                trunc_normal_(layer.weight, std=1.0 / math.sqrt(dim * features))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        left = self._factor(self.left, x)
        right = left if self.right is None else self._factor(self.right, x)
        return self._factor(self.outward, x), left, right

    def _factor(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return layer(x).unflatten(-1, (-1, self.rank))


def gamma(outward: Tensor, left: Tensor, right: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """sum_r W_r (A_r . u)(B_r . v): W, A, B [..., F, R] and u, v [..., F] -> [..., F]."""
    coefficients = (u.unsqueeze(-2) @ left) * (v.unsqueeze(-2) @ right)
    return (outward @ coefficients.mT).squeeze(-1)


def torsion(outward: Tensor, left: Tensor, right: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Mean |Gamma(u, v) - Gamma(v, u)|, the torsion proxy, over all leading axes of u and v [..., F]."""
    difference = gamma(outward, left, right, u, v) - gamma(outward, left, right, v, u)
    return torch.linalg.vector_norm(difference, dim=-1).mean()


def extended_values(value: Tensor, key: Tensor, right: Tensor) -> Tensor:
    """Values with what transport along an edge asks of their token: [..., N, D + R + R D].

    v_j, beta_j = B_j^T v_j and beta_j k_j^T, for v, k [..., N, D] and B [..., N, D, R]. The mean of all that over the
    keys of a query is all that `mixed_with_transport` needs, so that no edge is ever stored.
    """
    beta = (value.unsqueeze(-2) @ right).squeeze(-2)
    moments = beta.unsqueeze(-1) * key.unsqueeze(-2)
    return torch.cat([value, beta, moments.flatten(-2)], -1)


def mixed_with_transport(mixed: Tensor, query: Tensor, outward: Tensor, left: Tensor) -> Tensor:
    """sum_j p_ij (v_j - Gamma_ij(q_i - k_j, v_j)) from means of `extended_values`: [..., N, D].

    Gamma_ij(u, v) = sum_r W_i,r (A_i,r . u)(B_j,r . v) takes v from the fibre of j to that of i, to first order in the
    step u from k_j to q_i. W, A [..., N, D, R], q [..., N, D].
    """
    width, rank = outward.shape[-2:]
    value, beta, moments = mixed.split([width, rank, rank * width], dim=-1)
    steps = moments.unflatten(-1, (rank, width)) - beta.unsqueeze(-1) * query.unsqueeze(-2)
    coefficients = (left.mT * steps).sum(-1, keepdim=True)
    return value + (outward @ coefficients).squeeze(-1)


def dense_root(a: Tensor, U: Tensor) -> Tensor:
    """S [..., F, F] with S S^T = diag(a) + U U^T: a [..., F], U [..., F, R], for sampled tokens only."""
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    columns = square_root(a.unsqueeze(-2), U.unsqueeze(-3), identity.expand(*a.shape, -1))
    return columns.mT


def polar_transport(first: Tensor, second: Tensor) -> Tensor:
    """R_ij, the orthogonal polar factor of S_i^-1 S_j: roots [..., F, F] -> [..., F, F].

    It takes orthonormal coordinates of the fibre of j to those of i. S_i^-1 S_j itself is flat: around a triangle its
    product is I.
    """
    left, _, right = torch.linalg.svd(torch.linalg.solve(first, second))
    return left @ right


def sample_triangles(tokens: int, count: int, generator: torch.Generator) -> Tensor:
    """`count` triples [count, 3] of different tokens of `tokens`, at least 3."""
    drawn = torch.rand(count, tokens, generator=generator)
    return drawn.argsort(-1)[:, :3]


def curvature(a: Tensor, U: Tensor, triangles: Tensor) -> Tensor:
    """Mean |R_ij R_jk R_ki - I|_F over triangles [T, 3] of tokens, the curvature proxy.

    a [..., N, F], U [..., N, F, R]. Zero to rounding where all metrics are diagonal or all are equal. In float64.
    """
    a, U = full_precision(a).double(), full_precision(U).double()
    return holonomy(dense_root(a[..., triangles, :], U[..., triangles, :, :])).mean()


def holonomy(roots: Tensor) -> Tensor:
    """|R_ij R_jk R_ki - I|_F of triangles of roots [..., 3, F, F]."""
    first, second, third = roots.unbind(-3)
    around = polar_transport(first, second) @ polar_transport(second, third) @ polar_transport(third, first)
    identity = torch.eye(around.shape[-1], dtype=around.dtype, device=around.device)
    return torch.linalg.matrix_norm(around - identity)
