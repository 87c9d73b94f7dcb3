"""What all attention kinds share: heads, rotary positions, landmarks by pooling, the precision policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from timm.layers import apply_rot_embed, build_rotary_pos_embed, trunc_normal_
from torch import Tensor, nn
from torch.nn import functional as F

from attngeo.errors import UserError

Grid = tuple[int, int]
Tokens = Sequence[int] | Tensor

# Axial rotary base of the vision literature; the angles of one token step run from 1 down to about 1/100 radian.
ROTARY_TEMPERATURE = 100.0


@dataclass(frozen=True)
class TokenMacs:
    """Multiply-accumulates an image of one layer, beside those of its linear and convolution modules.

    `products` are matrix products of tokens with tokens, landmarks or values; `nystrom` the m x m products of the
    Nystrom form and its normalisation; `distance` one per |a - b|; `solver` the inverse; `metric` metric inversions.
    """

    products: int = 0
    nystrom: int = 0
    distance: int = 0
    solver: int = 0
    metric: int = 0


def init_linear(layer: nn.Linear) -> nn.Linear:
    """Truncated normal of standard deviation 0.02 and zero bias (for which lambda = 4 fits); returns the layer."""
    trunc_normal_(layer.weight, std=0.02)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def require_one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    """UserError, naming what is allowed, unless an attention option has an allowed value."""
    if value not in allowed:
        raise UserError(f"attention option {option} is {value!r}", f"choose one of {', '.join(allowed)}")


def select_tokens(x: Tensor, tokens: Tokens) -> Tensor:
    """Rows x[..., tokens, :] of x [..., N, D], in the order of `tokens`; negative ones count from the end."""
    return x[..., torch.as_tensor(tokens, device=x.device), :]


def full_precision(x: Tensor) -> Tensor:
    """`x` in float32, or as it is if it is float64: kernels, distances and solvers never run in half precision."""
    return x if x.dtype == torch.float64 else x.float()


def autocast_off(x: Tensor) -> torch.autocast:
    """Context in which autocast does not lower the precision on the device of `x`."""
    return torch.autocast(x.device.type, enabled=False)


def pool_grid(x: Tensor, grid: Grid, cells: Grid) -> Tensor:
    """Average tokens x [..., N, D] on a grid to [..., M, D] on a grid of `cells`, which need not divide it."""
    if cells == grid:
        return x
    image = x.flatten(0, -3).transpose(-1, -2).unflatten(-1, grid)
    pooled = F.adaptive_avg_pool2d(image, cells).flatten(-2).transpose(-1, -2)
    return pooled.unflatten(0, x.shape[:-2])


class Attention(nn.Module):
    """Base of the attention kinds: forward(x [B, N, C], grid) -> [B, N, C] with N = grid[0] * grid[1].

    `kind` is the name by which a run is labelled. `solver_residual` holds, after a forward, max ||I - P X||_F of the
    kinds that invert a matrix, detached; None for the others. `uses_landmarks` tells whether the landmark grid that
    every kind is given means anything to it.
    """

    kind: ClassVar[str]
    uses_landmarks: ClassVar[bool] = False
    solver_residual: Tensor | None

    def __init__(self, dim: int, heads: int, *, landmarks: Grid = (7, 7), rotary: bool = True) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"{heads} heads do not divide the width {dim}")
        if rotary and (dim // heads) % 4:
            raise ValueError(f"2-D rotary positions need a head width that 4 divides, not {dim // heads}")
        self.dim = dim
        self.heads = heads
        self.head_dim = dim // heads
        self.landmarks = landmarks
        self.rotary = rotary
        self.solver_residual = None

    def token_macs(self, grid: Grid) -> TokenMacs:
        """Multiply-accumulates of one image on a token grid, without the linear and convolution modules."""
        raise NotImplementedError

    def attention_rows(self, x: Tensor, grid: Grid, tokens: Tokens) -> Tensor:
        """What the output of some tokens of x [B, N, C] takes of every value: [B, H, T, N]; nothing N x N is formed."""
        raise NotImplementedError

    def split_heads(self, x: Tensor) -> Tensor:
        """[B, N, H * D] -> [B, H, N, D]."""
        return x.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)

    def merge_heads(self, x: Tensor) -> Tensor:
        """[B, H, N, D] -> [B, N, H * D]."""
        return x.transpose(1, 2).flatten(2)

    def rotate(self, x: Tensor, grid: Grid, pooled_to: Grid | None = None) -> Tensor:
        """Turn x [B, H, N, D] by 2-D axial rotary angles of the token centres, in steps of this stage's grid.

        The angles depend on the token's row and column alone, so that every grid works and none is interpolated.
        With `pooled_to`, x holds that smaller grid of cells pooled from `grid`, turned by the cells' centres.
        """
        if not self.rotary:
            return x
        sine, cosine = build_rotary_pos_embed(
            list(pooled_to or grid),
            dim=self.head_dim,
            temperature=ROTARY_TEMPERATURE,
            in_pixels=False,
            ref_feat_shape=None if pooled_to is None else list(grid),
            grid_offset=0.5,
            rotate_half=True,
            device=x.device,
            dtype=torch.float32,
        )
        return apply_rot_embed(x, sine, cosine, half=True)

    def landmark_grid(self, grid: Grid) -> Grid:
        """The landmark grid, no finer than the token grid: repeated landmarks would make their matrix singular."""
        return min(grid[0], self.landmarks[0]), min(grid[1], self.landmarks[1])

    def pool(self, x: Tensor, grid: Grid) -> Tensor:
        """Average x [..., N, D] adaptively over its grid to landmarks [..., M, D]; any grid is accepted."""
        return pool_grid(x, grid, self.landmark_grid(grid))
