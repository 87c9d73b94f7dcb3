"""Sizes of the plain vision transformers, without torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ViTSize:
    """Shape of a plain vision transformer; `patch` and `image_size` in px."""

    dim: int
    depth: int
    heads: int
    patch: int
    image_size: int


VIT_SIZES: dict[str, ViTSize] = {
    "micro": ViTSize(dim=64, depth=4, heads=4, patch=4, image_size=32),
    "tiny": ViTSize(dim=192, depth=12, heads=3, patch=16, image_size=224),
}
