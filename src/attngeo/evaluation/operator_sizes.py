"""Sizes at which operators are timed and checked."""

from typing import NamedTuple


class Size(NamedTuple):
    """Slices (batch times heads), tokens, landmarks and channels; an inverse has tokens = landmarks and no channels."""

    slices: int
    tokens: int
    landmarks: int
    channels: int = 0

    @property
    def pairs(self) -> int:
        """Channels of queries times landmarks: the |a - b| of a pairwise kernel."""
        return self.slices * self.tokens * self.landmarks * self.channels

    @property
    def label(self) -> str:
        """The size in words."""
        if not self.channels:
            return f"{self.slices} matrices of {self.tokens} x {self.tokens}"
        return f"({self.slices}, {self.tokens}, {self.landmarks}, {self.channels})"


def square(slices: int, tokens: int, channels: int = 0) -> Size:
    """As many landmarks as tokens."""
    return Size(slices, tokens, tokens, channels)


# A middle stage and the first stage of the pyramid at 224 pixels, and exact attention over the first stage.
PYRAMID_SIZES = (Size(64, 784, 49, 32), Size(8, 3136, 49, 64), Size(4, 3136, 3136, 32))
# Numbers of tokens of the published kernel timings; their batch, heads and head width are not stated.
PUBLISHED_TOKENS = (16, 32, 64, 128)
INVERSE_TOKENS = (49, 64, 128)
INVERSE_SLICES = 256
ITERATIONS = 20  # of Newton-Schulz, as in the authors' code
# Twice the tokens and landmarks: four times the kernel values.
MEMORY_SIZES = (Size(4, 1568, 1568, 32), Size(4, 3136, 3136, 32))
