"""Feed-forward preconditioned by the token's metric."""

from timm.layers import Mlp
from torch import Tensor, nn

from attngeo.layers.attention import Grid, TokenMacs, init_linear
from attngeo.layers.token_metric import TokenMetric
from attngeo.ops import low_rank_metric
from attngeo.ops.low_rank_metric.macs import solve_macs


class FiberFeedForward(nn.Module):
    """G(x)^-1 FFN(x) for tokens x [B, N, C], with G = diag(a) + U U^T inverted by Woodbury's identity (P4)."""

    def __init__(self, dim: int, hidden: int, *, rank: int = 2) -> None:
        super().__init__()
        self.dim = dim
        self.mlp = Mlp(dim, hidden)
        init_linear(self.mlp.fc1)
        init_linear(self.mlp.fc2)
        self.token_metric = TokenMetric(dim, dim, rank)

    def forward(self, x: Tensor) -> Tensor:
        update = self.mlp(x)
        diagonal, factor = self.token_metric(x)
        return low_rank_metric.solve(diagonal, factor, update).to(update.dtype)

    def token_macs(self, grid: Grid) -> TokenMacs:
        """The solve of every token."""
        return TokenMacs(metric=grid[0] * grid[1] * solve_macs(self.dim, self.token_metric.rank))
