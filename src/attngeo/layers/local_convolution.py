"""Depthwise convolution over the token grid."""

from timm.layers import trunc_normal_
from torch import Tensor, nn

from attngeo.layers.attention import Grid


class LocalConvolution(nn.Module):
    """Depthwise 3 x 3 convolution of tokens [B, N, C] laid out on their grid; no bias (the projection has one)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(dim, dim, kernel_size=3, padding=1, groups=dim, bias=False)
        trunc_normal_(self.convolution.weight, std=0.02)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        image = x.transpose(1, 2).unflatten(2, grid)
        return self.convolution(image).flatten(2).transpose(1, 2)
