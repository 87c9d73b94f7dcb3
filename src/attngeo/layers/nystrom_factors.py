"""Nystrom attention by its factors: keys apart from queries, statistics of a batch, single rows of the N x N map."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from attngeo.layers.attention import Tokens, select_tokens
from attngeo.ops.nystrom import Normalization
from attngeo.ops.nystrom.naive import over_row_sum
from attngeo.ops.precision import product

Statistics = Literal["image", "batch"]

STATISTICS = get_args(Statistics)


@dataclass(frozen=True)
class Factors:
    """What Z is made of: the normalised rows of G = C_q W^+ C_k^T, of which nothing N x N is formed.

    `C_q` and `C_k` [B,H,N,M] are the kernels of queries and keys with the landmarks, `W_inverse` [B,H,M,M] what the
    solver gave; `scale` ([H,1,1], None for 1) multiplies the whitened part. Of the injective form alone: `whitening`
    [B,H,N,1], 1 / sqrt(variance + eps) of a column of G, and `shift` [B,H,N,1], the image's mean of a column less the
    mean that is subtracted (None where they are the same).
    """

    C_q: Tensor
    W_inverse: Tensor
    C_k: Tensor
    normalization: Normalization
    scale: Tensor | None
    rows: Tensor
    whitening: Tensor | None = None
    shift: Tensor | None = None

    @property
    def mean(self) -> Tensor:
        """Mean of each column of G that the injective form subtracts: [B,H,N,1]."""
        centre = product(self.C_q, self.W_inverse).mean(-2, keepdim=True)
        mean = product(self.C_k, centre.mT)
        return mean if self.shift is None else mean - self.shift

    def apply(self, v: Tensor) -> Tensor:
        """Z v in time linear in the tokens: v [B,H,N,D] -> [B,H,N,D]."""
        if self.normalization == "none":
            return self._scaled(product(self.rows, product(self.C_k.mT, v)))
        mean = v.mean(-2, keepdim=True)
        if self.normalization == "row_sum":
            total = product(self.rows, self.C_k.sum(-2).unsqueeze(-1))
            return over_row_sum(product(self.rows, product(self.C_k.mT, v)), total, mean)
        if self.whitening is None:
            return self._scaled(product(self.rows, product(self.C_k.mT, v - mean))) + mean
        weighted = self.whitening * v
        output = product(self.rows, product(self.C_k.mT, weighted))
        if self.shift is not None:
            output = output + product(self.shift.mT, weighted)
        return self._scaled(output) + mean

    def attention_rows(self, tokens: Tokens) -> Tensor:
        """Rows of Z of some tokens: [B,H,T,N]."""
        G = product(select_tokens(self.rows, tokens), self.C_k.mT)
        if self.normalization == "none":
            return self._scaled(G)
        if self.normalization == "row_sum":
            return over_row_sum(G, G.sum(-1, keepdim=True), 1.0 / G.shape[-1])
        if self.whitening is None:
            G = G - G.mean(-1, keepdim=True)
        else:
            G = (G if self.shift is None else G + self.shift.mT) * self.whitening.mT
        return self._scaled(G) + 1.0 / G.shape[-1]

    def row(self, token: int) -> Tensor:
        """The row of Z of one token: [B,H,N]."""
        return self.attention_rows([token])[..., 0, :]

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.scale is None else self.scale * x


def factorize(
    C_q: Tensor,
    W_inverse: Tensor,
    C_k: Tensor,
    *,
    normalization: Normalization = "injective",
    scale: Tensor | None = None,
    statistics: Statistics = "image",
    eps_relative: float = 1e-3,
    eps_absolute: float = 1e-12,
) -> Factors:
    """The factors and, for the injective form, the statistics of the columns of G; shapes as in `Factors`.

    Statistics are per image and head; with "batch" the images of the batch share them, by the law of total variance.
    """
    rows = product(C_q, W_inverse)
    if normalization != "injective":
        return Factors(C_q, W_inverse, C_k, normalization, scale, rows)
    # Centring before squaring: E[g^2] - mean^2 cancels in float32.
    centre = rows.mean(-2, keepdim=True)
    rows = rows - centre
    variance = (product(C_k, product(rows.mT, rows) / C_q.shape[-2]) * C_k).sum(-1, keepdim=True).clamp_min(0.0)
    shift = None
    if statistics == "batch":
        mean = product(C_k, centre.mT)
        shift = mean - mean.mean(0, keepdim=True)
        variance = (variance + shift.square()).mean(0, keepdim=True)
    whitening = torch.rsqrt(variance + eps_relative * variance.mean(-2, keepdim=True) + eps_absolute)
    return Factors(C_q, W_inverse, C_k, normalization, scale, rows, whitening, shift)
