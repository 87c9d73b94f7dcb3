"""What one token's output takes of every token of an image, stage by stage, and how widely it is spread."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attngeo.errors import UserError
from attngeo.evaluation.token_features import stage_inputs
from attngeo.layers.attention import Grid

TERCILES = ("near", "middle", "far")


@dataclass(frozen=True)
class StageMap:
    """Rows [images, N] of the centre token of a stage's last block: mean over heads, each row divided by its sum."""

    stage: int
    grid: Grid
    heads: int
    rows: Tensor

    @property
    def token(self) -> tuple[int, int]:
        """Row and column of the token."""
        return centre(self.grid)

    def images(self) -> Tensor:
        """The rows as maps [images, rows, columns]."""
        return self.rows.unflatten(-1, self.grid)


def centre(grid: Grid) -> tuple[int, int]:
    """The token whose row is looked at: the lower right one of the four around the centre of an even grid."""
    return grid[0] // 2, grid[1] // 2


def stage_maps(model: nn.Module, images: Tensor, stages: Sequence[int]) -> list[StageMap]:
    """Maps of the stages with these numbers, from 1; negative ones count from the end. Nothing N x N is formed.

    UserError for an attention kind that gives no rows of its map.
    """
    inputs = stage_inputs(model, images)
    numbers = sorted({stage if stage > 0 else len(inputs) + 1 + stage for stage in stages})
    maps = []
    for number in numbers:
        layer, x, grid = inputs[number - 1]
        if not hasattr(layer, "attention_rows"):
            raise UserError(
                f"attention kind {layer.kind!r} gives no rows of its map",
                "give its class the method attention_rows(x, grid, tokens), or let another run feed fig8",
            )
        row, column = centre(grid)
        with torch.inference_mode():
            found = layer.attention_rows(x, grid, [row * grid[1] + column])[:, :, 0].double()
        rows = found.mean(1)
        # Of the kinds only the Gaussian one (no normalisation) has rows that do not sum to 1.
        maps.append(StageMap(number, grid, found.shape[1], rows / rows.sum(-1, keepdim=True)))
    return maps


def uniform_map(of: StageMap) -> StageMap:
    """Uniform attention on the same grid: one row for all images."""
    tokens = of.grid[0] * of.grid[1]
    return StageMap(of.stage, of.grid, 1, torch.full((1, tokens), 1 / tokens, dtype=torch.float64))


def statistics(of: StageMap) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Labels and one number for each image.

    Of the shares p = |w| / sum |w| of a row w: entropy (nats), effective_tokens = exp(entropy), mean_distance (patches)
    and spatial_tercile_share, that of the third of the tokens nearest to the token on the grid, of the next third and
    of the farthest (tokens equally far count for both thirds in proportion). Of w itself: negative_share = sum of
    |negative weights| / sum |w|, and largest_weight and smallest_weight in units of 1/N.
    """
    weights = of.rows
    shares = weights.abs() / weights.abs().sum(-1, keepdim=True)
    entropy = -torch.special.xlogy(shares, shares).sum(-1)
    yield {"metric": "entropy", "unit": "nats"}, entropy
    yield {"metric": "effective_tokens", "unit": "tokens"}, entropy.exp()
    places = torch.cartesian_prod(torch.arange(of.grid[0]), torch.arange(of.grid[1])).double()
    distances = (places - torch.tensor(of.token).double()).norm(dim=-1)
    yield {"metric": "mean_distance", "unit": "patches"}, (shares * distances).sum(-1)
    for tercile, belongs in zip(TERCILES, _thirds(distances), strict=True):
        yield {"metric": "spatial_tercile_share", "unit": "1", "tercile": tercile}, shares @ belongs
    yield {"metric": "negative_share", "unit": "1"}, (shares * (weights < 0)).sum(-1)
    tokens = weights.shape[-1]
    yield {"metric": "largest_weight", "unit": "1/N"}, weights.amax(-1) * tokens
    yield {"metric": "smallest_weight", "unit": "1/N"}, weights.amin(-1) * tokens


def _thirds(distances: Tensor) -> Tensor:
    """How much each token belongs to the nearest, next and farthest third: [3, N], columns sum to 1."""
    rounded = distances.round(decimals=9)
    first = (rounded < rounded.unsqueeze(1)).sum(1).double()  # tokens that are nearer
    last = (rounded <= rounded.unsqueeze(1)).sum(1).double()
    edges = torch.arange(4, dtype=torch.float64).unsqueeze(1) * len(distances) / 3
    overlap = torch.minimum(last, edges[1:]) - torch.maximum(first, edges[:-1])
    return overlap.clamp_min(0) / (last - first)
