"""Mixup and CutMix (timm's), seeded for each step and defined for every batch size."""

import numpy as np
import torch
from timm.data.mixup import Mixup
from torch import Tensor
from torch.nn.functional import one_hot

from attngeo.training.recipe import Recipe
from attngeo.training.seeding import derive_seed


class Mixer:
    """Mixes the images of a batch and returns soft labels; validation batches never pass through it.

    timm's Mixup pairs the first image with the last, the second with the last but one, and so on, and insists on an
    even number. Here the last image of an odd batch, and so the only one of a batch of one, stays unmixed.
    """

    def __init__(self, recipe: Recipe, num_classes: int) -> None:
        self.num_classes = num_classes
        self.label_smoothing = recipe.label_smoothing
        self._mixup = Mixup(
            mixup_alpha=recipe.mixup,
            cutmix_alpha=recipe.cutmix,
            label_smoothing=recipe.label_smoothing,
            num_classes=num_classes,
        )

    def __call__(self, images: Tensor, labels: Tensor, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """[B, 3, H, W], [B] -> mixed images [B, 3, H, W], class probabilities [B, num_classes]."""
        even = len(images) // 2 * 2
        smoothed = one_hot(labels, self.num_classes).to(images.dtype)
        smoothed = smoothed * (1 - self.label_smoothing) + self.label_smoothing / self.num_classes
        if even == 0:
            return images, smoothed
        mixed, targets = self._seeded(images[:even].clone(), labels[:even], derive_seed(seed, "mixup", step))
        return torch.cat([mixed, images[even:]]), torch.cat([targets, smoothed[even:]])

    def _seeded(self, images: Tensor, labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Call timm's Mixup, which draws from NumPy's global generator, and leave that generator as it was."""
        state = np.random.get_state()  # noqa: NPY002
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            return self._mixup(images, labels)
        finally:
            np.random.set_state(state)  # noqa: NPY002


def make_mixer(recipe: Recipe, num_classes: int) -> Mixer | None:
    """The mixer of a recipe, or None if it mixes nothing."""
    return Mixer(recipe, num_classes) if recipe.mixup > 0 or recipe.cutmix > 0 else None
