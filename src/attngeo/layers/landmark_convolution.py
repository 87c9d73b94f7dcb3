"""SOFT's landmarks: a strided convolution of the token grid in place of its averages."""

from timm.layers import LayerNorm, trunc_normal_
from torch import Tensor, nn
from torch.nn import functional as F

from attngeo.layers.attention import Grid, autocast_off, full_precision, pool_grid


class LandmarkConvolution(nn.Module):
    """Convolution whose stride is its kernel size, LayerNorm, GELU, on the channels of a head and shared by the heads.

    SOFT's stride divides its grid. Here the grid is continued by its border to a multiple of the stride, and what
    still is not the landmark grid is averaged to it, so that no size is refused (ours).
    """

    def __init__(self, head_dim: int, stride: Grid) -> None:
        super().__init__()
        self.stride = stride
        self.convolution = nn.Conv2d(head_dim, head_dim, stride, stride=stride, bias=False)
        self.norm = LayerNorm(head_dim)
        trunc_normal_(self.convolution.weight, std=0.02)

    def cells(self, grid: Grid) -> Grid:
        """Grid that the convolution makes of a token grid."""
        return -(-grid[0] // self.stride[0]), -(-grid[1] // self.stride[1])

    def forward(self, x: Tensor, grid: Grid, cells: Grid) -> Tensor:
        """Tokens x [B, H, N, D] on `grid` -> landmarks [B, H, M, D] on `cells`, no finer than `self.cells(grid)`."""
        made = self.cells(grid)
        margin = (0, made[1] * self.stride[1] - grid[1], 0, made[0] * self.stride[0] - grid[0])
        image = x.flatten(0, -3).mT.unflatten(-1, grid)
        with autocast_off(x):
            image = self.convolution(F.pad(image, margin, mode="replicate").to(self.convolution.weight.dtype))
            landmarks = F.gelu(self.norm(image.flatten(-2).mT))
        return pool_grid(full_precision(landmarks).unflatten(0, x.shape[:-2]), made, cells)
