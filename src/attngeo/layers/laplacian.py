"""LaplacianFormer's attention: kernel exp(-||x - y||_1 / lambda), landmarks, Newton-Schulz, injective rows."""

from typing import ClassVar

from torch import Tensor

from attngeo.layers.attention import Grid
from attngeo.layers.landmark import LandmarkAttention, Solver
from attngeo.ops import laplacian_kernel, laplacian_kernel_matmul
from attngeo.ops.newton_schulz import Backward, Start
from attngeo.ops.nystrom import Normalization


class LaplacianAttention(LandmarkAttention):
    """Landmark attention with the Laplacian kernel, injective normalisation and a depthwise convolution on v (P2).

    `lambda_` = 4, the pooled landmarks and the solver's iteration are the paper's; the shared projection, the eps
    rule of the whitening and the learned scale are ours.
    """

    kind: ClassVar[str] = "laplacian"

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        landmarks: Grid = (7, 7),
        rotary: bool = True,
        lambda_: float = 4.0,
        shared_query_key: bool = True,
        normalization: Normalization = "injective",
        local_convolution: bool = True,
        solver: Solver = "newton_schulz",
        iterations: int = 20,
        solver_eps: float = 0.01,
        start: Start = "paper",
        backward: Backward = "implicit",
        backend: str = "auto",
    ) -> None:
        super().__init__(
            dim,
            heads,
            landmarks=landmarks,
            rotary=rotary,
            shared_query_key=shared_query_key,
            normalization=normalization,
            local_convolution=local_convolution,
            solver=solver,
            iterations=iterations,
            solver_eps=solver_eps,
            start=start,
            backward=backward,
            backend=backend,
        )
        self.lambda_ = lambda_

    def kernel(self, x: Tensor, y: Tensor) -> Tensor:
        return laplacian_kernel(x, y, self.lambda_, backend=self.backend)

    def kernel_matmul(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return laplacian_kernel_matmul(x, y, v, self.lambda_, backend=self.backend)
