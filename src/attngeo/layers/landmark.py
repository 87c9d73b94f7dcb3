"""Kernel attention through landmarks: Nystrom form, matrix solver."""

from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from attngeo.errors import UserError
from attngeo.layers.attention import Grid, TokenMacs, Tokens, autocast_off, full_precision, require_one_of
from attngeo.layers.kernel_attention import KernelAttention
from attngeo.layers.landmark_convolution import LandmarkConvolution
from attngeo.layers.nystrom_factors import STATISTICS, Factors, Statistics, factorize
from attngeo.ops import conjugate_gradient_inverse, newton_schulz_inverse, nystrom_attention, spd_inverse
from attngeo.ops.conjugate_gradient.macs import conjugate_gradient_macs
from attngeo.ops.newton_schulz import Backward, Start, inverse_residual
from attngeo.ops.newton_schulz.macs import newton_schulz_macs, spd_macs
from attngeo.ops.nystrom.macs import landmark_macs, product_macs
from attngeo.ops.pairwise import kernel_macs

Solver = Literal["newton_schulz", "conjugate_gradient", "cholesky"]
LandmarkMap = Literal["pool", "convolution"]

SOLVERS = get_args(Solver)
LANDMARK_MAPS = get_args(LandmarkMap)
# 40 matrix products each.
DEFAULT_ITERATIONS: dict[Solver, int] = {"newton_schulz": 20, "conjugate_gradient": 40}


class LandmarkAttention(KernelAttention):
    """Z v with Z ~ C W^+ C^T, C = kernel(q, landmarks), W = kernel(landmarks, landmarks), linear in tokens.

    Queries are averaged over the grid to the landmarks (`landmark_map` "pool"), or convolved with a stride of
    `landmark_stride`, which the pyramid derives from its image size ("convolution", SOFT's). With separate keys the
    landmarks come from the mean of queries and keys, so that W stays symmetric with unit diagonal; with
    `separate_landmarks` queries and keys have their own and Z ~ kernel(q, l_k) W^+ kernel(l_q, k), W = kernel(l_q, l_k)
    not symmetric. Solver and kernel run in float32 under autocast.

    `iterations` and `backward` are those of the iterated solvers (20 of "newton_schulz", 40 of "conjugate_gradient",
    which take as many matrix products; "implicit"), `start` is Newton-Schulz's ("paper"); given to a solver that has
    no such thing, they are refused.

    `statistics` "batch" takes mean and variance of the injective form over the images of a batch, in evaluation those
    of the batch at hand: a sample's output then depends on its batch mates. It exists only for the ablation of a
    replication that failed.
    """

    uses_landmarks: ClassVar[bool] = True
    default_start: ClassVar[Start] = "paper"

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        landmark_map: LandmarkMap = "pool",
        landmark_stride: Grid = (1, 1),
        separate_landmarks: bool = False,
        statistics: Statistics = "image",
        solver: Solver = "newton_schulz",
        iterations: int | None = None,
        solver_eps: float = 0.01,
        start: Start | None = None,
        backward: Backward | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dim, heads, **options)
        require_one_of("solver", solver, SOLVERS)
        require_one_of("landmark_map", landmark_map, LANDMARK_MAPS)
        require_one_of("statistics", statistics, STATISTICS)
        _refuse_unless_solver_has("iterations", iterations, solver, tuple(DEFAULT_ITERATIONS))
        _refuse_unless_solver_has("backward", backward, solver, tuple(DEFAULT_ITERATIONS))
        _refuse_unless_solver_has("start", start, solver, ("newton_schulz",))
        if landmark_map == "pool" and tuple(landmark_stride) != (1, 1):
            raise UserError("pooled landmarks have no landmark_stride", 'choose landmark_map "convolution"')
        if separate_landmarks and self.key is None:
            raise UserError("separate_landmarks needs queries and keys of their own", "set shared_query_key to false")
        if separate_landmarks and (solver != "newton_schulz" or (start or self.default_start) == "identity"):
            raise UserError(
                "with separate_landmarks the matrix to invert is not symmetric",
                'choose solver "newton_schulz" with start "paper"',
            )
        if statistics == "batch" and self.normalization != "injective":
            raise UserError(
                f"normalization {self.normalization!r} has no statistics of a batch",
                'choose normalization "injective", or statistics "image"',
            )
        self.separate_landmarks = separate_landmarks
        self.statistics: Statistics = statistics
        self.solver: Solver = solver
        self.iterations = DEFAULT_ITERATIONS.get(solver, 0) if iterations is None else iterations
        self.solver_eps = solver_eps
        self.start: Start = self.default_start if start is None else start
        self.backward_mode: Backward = "implicit" if backward is None else backward
        require_one_of("start", self.start, get_args(Start))
        require_one_of("backward", self.backward_mode, get_args(Backward))
        if self.iterations < 0:
            raise UserError(f"attention option iterations is {iterations}", "give 0 or more")
        self.landmark_convolution = (
            LandmarkConvolution(self.head_dim, (landmark_stride[0], landmark_stride[1]))
            if landmark_map == "convolution"
            else None
        )

    def landmark_grid(self, grid: Grid) -> Grid:
        """The landmark grid, no finer than the tokens' or than what the convolution makes of it."""
        return super().landmark_grid(
            grid if self.landmark_convolution is None else self.landmark_convolution.cells(grid)
        )

    def landmark_matrix(self, x: Tensor, grid: Grid) -> Tensor:
        """The matrix W [B, H, M, M] that the solver inverts for tokens x [B, N, C]; `forward` keeps nothing of it."""
        return self.kernel(*self._landmarks(*self.features(x, grid), grid))

    def rescaled_inverse(self, W: Tensor, inverse: Tensor) -> Tensor:
        """What stands for W^+ [B, H, M, M] between the kernels: the solver's inverse itself, unless overridden."""
        return inverse

    def forward(self, x: Tensor, grid: Grid, return_factors: bool = False) -> Tensor | tuple[Tensor, Factors]:
        """Tokens [B, N, C] -> [B, N, C]; with `return_factors` also what the attention map is made of."""
        value = self.value(x)
        query, key = self.features(x, grid)
        by_head = full_precision(self.split_heads(value))
        if return_factors or key is not None or self.statistics == "batch":
            factors = self._factors(query, key, grid)
            with autocast_off(by_head):
                attended = factors.apply(by_head)
            out = self.output(attended, value, grid)
            return (out, factors) if return_factors else out
        landmarks, _ = self._landmarks(query, key, grid)
        attended = nystrom_attention(
            query,
            landmarks,
            by_head,
            self.kernel,
            kernel_matmul=None if self.normalization == "injective" else self.kernel_matmul,
            normalization=self.normalization,
            solver=self._inverse,
            scale=self.head_scale(by_head),
            eps_relative=self.eps_relative,
            eps_absolute=self.eps_absolute,
        )
        return self.output(attended, value, grid)

    def attention_rows(self, x: Tensor, grid: Grid, tokens: Tokens) -> Tensor:
        return self._factors(*self.features(x, grid), grid).attention_rows(tokens)

    def token_macs(self, grid: Grid) -> TokenMacs:
        cells = self.landmark_grid(grid)
        tokens, marks = grid[0] * grid[1], cells[0] * cells[1]
        kernel_kept = self.key is not None or self.normalization == "injective"
        # A second set of rows for separate keys, a second pass over the same where the kernel is not kept.
        rows = tokens if self.key is None and kernel_kept else 2 * tokens
        return TokenMacs(
            products=self.heads * product_macs(tokens, marks, self.head_dim),
            nystrom=self.heads
            * landmark_macs(tokens, marks, self.head_dim, self.normalization, kernel_kept=kernel_kept),
            distance=self.heads * kernel_macs(rows + marks, marks, self.head_dim),
            solver=self.heads * self._solver_macs(marks),
        )

    def _factors(self, query: Tensor, key: Tensor | None, grid: Grid) -> Factors:
        of_queries, of_keys = self._landmarks(query, key, grid)
        scale = self.head_scale(query)
        with autocast_off(query):
            C_q = self.kernel(query, of_keys)
            return factorize(
                C_q,
                self._inverse(self.kernel(of_queries, of_keys)),
                C_q if key is None else self.kernel(key, of_queries),
                normalization=self.normalization,
                scale=None if scale is None else scale[:, None, None],
                statistics=self.statistics,
                eps_relative=self.eps_relative,
                eps_absolute=self.eps_absolute,
            )

    def _landmarks(self, query: Tensor, key: Tensor | None, grid: Grid) -> tuple[Tensor, Tensor]:
        """Landmarks [B, H, M, D] of the queries and of the keys, the same ones unless they are separate."""
        if key is not None and self.separate_landmarks:
            return self._landmarks_of(query, grid), self._landmarks_of(key, grid)
        landmarks = self._landmarks_of(query if key is None else (query + key) / 2, grid)
        return landmarks, landmarks

    def _landmarks_of(self, rows: Tensor, grid: Grid) -> Tensor:
        if self.landmark_convolution is None:
            return self.pool(rows, grid)
        landmarks: Tensor = self.landmark_convolution(rows, grid, self.landmark_grid(grid))
        return landmarks

    def _inverse(self, W: Tensor) -> Tensor:
        """What stands for W^+; the solver's residual is left in `solver_residual`."""
        if self.solver == "newton_schulz":
            inverse, residual = newton_schulz_inverse(
                W,
                self.iterations,
                self.solver_eps,
                start=self.start,
                backward=self.backward_mode,
                backend=self.backend,
            )
        elif self.solver == "conjugate_gradient":
            inverse, residual = conjugate_gradient_inverse(
                W, self.iterations, self.solver_eps, backward=self.backward_mode, backend=self.backend
            )
        else:
            inverse = spd_inverse(W, self.solver_eps, backend=self.backend)
            residual = inverse_residual(W, inverse, self.solver_eps)
        self.solver_residual = residual.detach().amax() if residual.numel() else None
        return self.rescaled_inverse(W, inverse)

    def _solver_macs(self, marks: int) -> int:
        if self.solver == "newton_schulz":
            return newton_schulz_macs(marks, self.iterations)
        if self.solver == "conjugate_gradient":
            return conjugate_gradient_macs(marks, self.iterations)
        return spd_macs(marks)


def _refuse_unless_solver_has(option: str, value: object, solver: Solver, solvers: tuple[Solver, ...]) -> None:
    """UserError where an option is given that the chosen solver would ignore."""
    if value is not None and solver not in solvers:
        raise UserError(f"solver {solver!r} has no {option}", f"leave {option} out, or choose {' or '.join(solvers)}")
