"""Sizes of the pyramid, without torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PyramidSize:
    """Shape of a pyramid; each tuple has one entry a stage.

    `shared_query_key` is the default of the landmark kinds: one projection for queries and keys (ours, after SOFT),
    whose saving goes to the MLP, so that the kinds match in parameters.
    The published sizes keep two projections, because the paper's parameter totals count four square matrices a block.
    """

    dims: tuple[int, ...]
    depths: tuple[int, ...]
    mlp_ratios: tuple[int, ...]
    heads: tuple[int, ...]
    patch_kernels: tuple[int, ...]
    patch_strides: tuple[int, ...]
    landmarks: tuple[int, int]
    image_size: int
    shared_query_key: bool


def _published(depths: tuple[int, int, int, int]) -> PyramidSize:
    """A size of the LaplacianFormer paper: the depths differ, all else is shared.

    The depths of Tiny are the paper's; those of Small to Huge are ours, fitted to the printed totals.
    """
    return PyramidSize(
        dims=(64, 128, 320, 512),
        depths=depths,
        mlp_ratios=(8, 8, 4, 4),
        heads=(2, 4, 10, 16),
        patch_kernels=(7, 3, 3, 3),
        patch_strides=(4, 2, 2, 2),
        landmarks=(7, 7),
        image_size=224,
        shared_query_key=False,
    )


PYRAMID_SIZES: dict[str, PyramidSize] = {
    "nano": PyramidSize(
        dims=(16, 32),
        depths=(1, 1),
        mlp_ratios=(2, 2),
        heads=(1, 2),
        patch_kernels=(3, 3),
        patch_strides=(2, 2),
        landmarks=(2, 2),
        image_size=32,
        shared_query_key=True,
    ),
    "micro": PyramidSize(
        dims=(32, 64, 128),
        depths=(1, 1, 1),
        mlp_ratios=(4, 4, 4),
        heads=(1, 2, 4),
        patch_kernels=(3, 3, 3),
        patch_strides=(2, 2, 2),
        landmarks=(4, 4),
        image_size=32,
        shared_query_key=True,
    ),
    "tiny": _published((2, 2, 2, 2)),
    "small": _published((2, 4, 10, 3)),
    "medium": _published((2, 2, 22, 5)),
    "large": _published((1, 2, 38, 4)),
    "huge": _published((4, 4, 50, 4)),
}
