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
from attngeo.ops.newton_schulz import Backward, Start
from attngeo.ops.nystrom import NORMALIZATIONS, Normalization

Solver = Literal["newton_schulz", "cholesky"]

SOLVERS = get_args(Solver)


class LandmarkAttention(Attention):
    """Z v with Z ~ C W^+ C^T, C = kernel(q, landmarks), W = kernel(landmarks, landmarks), linear in tokens.

    Queries are scaled by D^(-1/4) and turned by rotary angles, then averaged over the grid to the landmarks. With
    `shared_query_key` (ours, after SOFT) keys are the queries; otherwise a second projection makes them, and the
    landmarks are averaged from the mean of queries and keys, so that W stays symmetric with unit diagonal.
    The injective forms multiply their whitened part by a learned scale per head that starts at 1/N.
    Kernel, solver and statistics run in float32 under autocast. `backend` chooses the kernel's implementation; the
    solver has one alone.
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
        feature_rows = tokens if self.key is None else 2 * tokens
        cubes = 2 * self.iterations if self.solver == "newton_schulz" else 1
        # C W^+ always; the row variances of the full form need a Gram matrix and one more product of the same size.
        squares = 3 if self.normalization == "injective" else 1
        return TokenMacs(
            products=2 * tokens * marks * self.dim,
            nystrom=squares * tokens * marks * marks * self.heads,
            distance=(feature_rows + marks) * marks * self.dim,
            solver=cubes * marks**3 * self.heads,
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
                )
            else:
                inverse = spd_inverse(landmark_kernel, self.solver_eps)
                with torch.no_grad():
                    identity = torch.eye(landmark_kernel.shape[-1], device=inverse.device, dtype=inverse.dtype)
                    shifted = landmark_kernel + self.solver_eps * identity
                    residual = (identity - shifted @ inverse).norm(dim=(-2, -1))
            self.solver_residual = residual.detach().amax() if residual.numel() else None
            return inverse

        return invert


def _require_one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"attention option {option} is {value!r}", f"choose one of {', '.join(allowed)}")
