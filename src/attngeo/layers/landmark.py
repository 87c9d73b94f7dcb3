"""Kernel attention through landmarks: Nystrom form, matrix solver, normalisation, local convolution."""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from attngeo.errors import UserError
from attngeo.layers.attention import Attention, Grid, TokenMacs, autocast_off, full_precision, init_linear
from attngeo.layers.local_convolution import LocalConvolution
from attngeo.layers.separate_keys import nystrom_attention_with_keys
from attngeo.ops import newton_schulz_inverse, nystrom_attention, spd_inverse
from attngeo.ops.newton_schulz import Backward, Start, inverse_residual
from attngeo.ops.newton_schulz.macs import newton_schulz_macs, spd_macs
from attngeo.ops.nystrom import NORMALIZATIONS, Normalization
from attngeo.ops.nystrom.macs import landmark_macs, product_macs
from attngeo.ops.pairwise import kernel_macs
from attngeo.ops.precision import product

Solver = Literal["newton_schulz", "cholesky"]

SOLVERS = get_args(Solver)


class LandmarkAttention(Attention):
    """Z v with Z ~ C W^+ C^T, C = kernel(q, landmarks), W = kernel(landmarks, landmarks), linear in tokens.

    Queries are scaled by D^(-1/4) and turned by rotary angles, then averaged over the grid to the landmarks. With
    `shared_query_key` (ours, after SOFT) keys are the queries; otherwise a second projection makes them, and the
    landmarks are averaged from the mean of queries and keys, so that W stays symmetric with unit diagonal.
    The injective forms multiply their whitened part by a learned scale per head that starts at 1/N.
    Kernel, solver and statistics run in float32 under autocast. `backend` chooses the implementation of both kernel
    and solver.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        landmarks: Grid,
        rotary: bool,
        shared_query_key: bool,
        normalization: Normalization,
        local_convolution: bool,
        solver: Solver,
        iterations: int,
        solver_eps: float,
        start: Start,
        backward: Backward,
        backend: str,
    ) -> None:
        super().__init__(dim, heads, landmarks=landmarks, rotary=rotary)
        _require_one_of("normalization", normalization, NORMALIZATIONS)
        _require_one_of("solver", solver, SOLVERS)
        self.normalization: Normalization = normalization
        self.solver: Solver = solver
        self.iterations = iterations
        self.solver_eps = solver_eps
        self.start = start
        self.backward_mode = backward
        self.backend = backend
        self.query = init_linear(nn.Linear(dim, dim))
        self.key = None if shared_query_key else init_linear(nn.Linear(dim, dim))
        self.value = init_linear(nn.Linear(dim, dim))
        self.projection = init_linear(nn.Linear(dim, dim))
        self.local_convolution = LocalConvolution(dim) if local_convolution else None
        # In units of 1/N, so that the scale starts at 1/N on any grid.
        self.scale = nn.Parameter(torch.ones(heads)) if normalization.startswith("injective") else None

    def kernel(self, x: Tensor, y: Tensor) -> Tensor:
        """Kernel values [B, H, N, M] of rows x [B, H, N, D] and y [B, H, M, D]; symmetric, 1 on the diagonal."""
        raise NotImplementedError

    def landmark_matrix(self, x: Tensor, grid: Grid) -> Tensor:
        """The matrix W [B, H, M, M] that the solver inverts for tokens x [B, N, C]; `forward` keeps nothing of it."""
        query = self._feature(self.query(x), grid)
        rows = query if self.key is None else (query + self._feature(self.key(x), grid)) / 2
        landmarks = self.pool(rows, grid)
        return self.kernel(landmarks, landmarks)

    def kernel_matmul(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """kernel(x, y) v; kinds with an operator for it override this."""
        return product(self.kernel(x, y), v)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        value = self.value(x)
        query = self._feature(self.query(x), grid)
        key = None if self.key is None else self._feature(self.key(x), grid)
        landmarks = self.pool(query if key is None else (query + key) / 2, grid)
        attended = self._attend(query, key, landmarks, full_precision(self.split_heads(value)))
        out = self.merge_heads(attended).to(value.dtype)
        if self.local_convolution is not None:
            out = out + self.local_convolution(value, grid)
        return self.projection(out)

    def token_macs(self, grid: Grid) -> TokenMacs:
        cells = self.landmark_grid(grid)
        tokens, marks = grid[0] * grid[1], cells[0] * cells[1]
        kernel_kept = self.key is not None or self.normalization == "injective"
        # A second set of rows for separate keys, a second pass over the same where the kernel is not kept.
        rows = tokens if self.key is None and kernel_kept else 2 * tokens
        solver = newton_schulz_macs(marks, self.iterations) if self.solver == "newton_schulz" else spd_macs(marks)
        return TokenMacs(
            products=self.heads * product_macs(tokens, marks, self.head_dim),
            nystrom=self.heads
            * landmark_macs(tokens, marks, self.head_dim, self.normalization, kernel_kept=kernel_kept),
            distance=self.heads * kernel_macs(rows + marks, marks, self.head_dim),
            solver=self.heads * solver,
        )

    def _feature(self, projected: Tensor, grid: Grid) -> Tensor:
        """Scaled and turned rows [B, H, N, D] in full precision."""
        return self.rotate(full_precision(self.split_heads(projected)) * self.head_dim**-0.25, grid)

    def _attend(self, query: Tensor, key: Tensor | None, landmarks: Tensor, value: Tensor) -> Tensor:
        scale = None if self.scale is None else full_precision(self.scale) / value.shape[-2]
        if key is None:
            return nystrom_attention(
                query,
                landmarks,
                value,
                self.kernel,
                kernel_matmul=None if self.normalization == "injective" else self.kernel_matmul,
                normalization=self.normalization,
                solver=self._inverse(),
                scale=scale,
            )
        with autocast_off(value):
            return nystrom_attention_with_keys(
                query,
                key,
                landmarks,
                value,
                self.kernel,
                normalization=self.normalization,
                solver=self._inverse(),
                scale=scale,
            )

    def _inverse(self) -> Callable[[Tensor], Tensor]:
        """Solver as a function of W alone, which leaves its residual in `solver_residual`."""

        def invert(landmark_kernel: Tensor) -> Tensor:
            if self.solver == "newton_schulz":
                inverse, residual = newton_schulz_inverse(
                    landmark_kernel,
                    self.iterations,
                    self.solver_eps,
                    start=self.start,
                    backward=self.backward_mode,
                    backend=self.backend,
                )
            else:
                inverse = spd_inverse(landmark_kernel, self.solver_eps, backend=self.backend)
                residual = inverse_residual(landmark_kernel, inverse, self.solver_eps)
            self.solver_residual = residual.detach().amax() if residual.numel() else None
            return inverse

        return invert


def _require_one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"attention option {option} is {value!r}", f"choose one of {', '.join(allowed)}")
