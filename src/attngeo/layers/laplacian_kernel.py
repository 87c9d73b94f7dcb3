"""The kernel exp(-||x - y||_1 / lambda) of a layer, lambda fixed or learned."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from attngeo.errors import UserError
from attngeo.layers.attention import full_precision
from attngeo.layers.kernel_attention import KernelAttention
from attngeo.ops import laplacian_kernel, laplacian_kernel_matmul


class LaplacianKernel(KernelAttention):
    """Kernel attention with the Laplacian kernel (P2): `lambda_` = 4 for all layers and heads is the paper's.

    With `learn_lambda` (ours) it is where a lambda per head starts, learned by its logarithm.
    """

    def __init__(
        self, dim: int, heads: int, *, lambda_: float = 4.0, learn_lambda: bool = False, **options: Any
    ) -> None:
        super().__init__(dim, heads, **options)
        if not lambda_ > 0:
            raise UserError(f"attention option lambda_ is {lambda_}", "give a positive number")
        self.lambda_ = lambda_
        self.log_lambda = nn.Parameter(torch.full((heads,), math.log(lambda_))) if learn_lambda else None

    def kernel(self, x: Tensor, y: Tensor) -> Tensor:
        x, y, lambda_ = self._by_lambda(x, y)
        return laplacian_kernel(x, y, lambda_, backend=self.backend)

    def kernel_matmul(self, x: Tensor, y: Tensor, v: Tensor, *, normalize: bool = False, power: int = 1) -> Tensor:
        """kernel(x, y) v, its values raised to `power`, its rows divided by their sums with `normalize`."""
        x, y, lambda_ = self._by_lambda(x, y)
        return laplacian_kernel_matmul(x, y, v, lambda_ / power, normalize=normalize, backend=self.backend)

    def _by_lambda(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, float]:
        """Rows and a lambda that is a number, as the operators take it: a learned one goes into the rows."""
        if self.log_lambda is None:
            return x, y, self.lambda_
        learned = full_precision(self.log_lambda).exp()[:, None, None]
        return x / learned, y / learned, 1.0
