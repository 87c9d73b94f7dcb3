"""RandAugment and random erasing (timm's) and colour jitter (torchvision's) of decoded images, alike in every loader.

What is drawn for an image depends on (seed, pass, index) and on the kind of augmentation, so that neither workers,
batches nor a resume change it, and switching one kind on leaves the draws of the others as they were. Images are
cropped and resized, then RandAugment, jitter, mirroring, normalisation and erasing follow in this order.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from attngeo.data.transforms import Segment, uniform_draws
from attngeo.errors import UserError
from attngeo.training.seeding import derive_seed, seeded_globals


@dataclass(frozen=True)
class Augmentation:
    """What training does to images beyond cropping and mirroring; the default is nothing."""

    rand_augment: str = ""  # timm's words, such as rand-m9-mstd0.5-inc1
    color_jitter: float = 0.0  # brightness, contrast and saturation change by up to this share
    random_erasing: float = 0.0  # probability that a rectangle of 2 % to a third of the image becomes noise

    def __bool__(self) -> bool:
        return self != Augmentation()

    @property
    def words(self) -> str:
        """What is done, for the record of a run; begins with a separator, or is empty."""
        parts = [f"RandAugment {self.rand_augment}"] if self.rand_augment else []
        parts += [f"colour jitter {self.color_jitter:g}"] if self.color_jitter else []
        parts += [f"erased with probability {self.random_erasing:g}"] if self.random_erasing else []
        return "".join(f"; {part}" for part in parts)


class Augmenter:
    """Applies an Augmentation to square images of `size` pixels; `mean` [3] in [0, 1] fills what is moved in."""

    def __init__(
        self, wanted: Augmentation, *, seed: int, size: int, mean: Iterable[float], interpolation: str = "auto"
    ) -> None:
        self.wanted = wanted
        self.seed = seed
        self._rand_augment: Any = None
        self._jitter: Any = None
        self._erase: Any = None
        if wanted.rand_augment:
            from timm.data.auto_augment import rand_augment_transform
            from timm.data.transforms import str_to_pil_interp

            settings: dict[str, Any] = {
                "translate_const": int(size * 0.45),
                "img_mean": tuple(min(255, round(255 * float(value))) for value in mean),
            }
            if interpolation != "auto":
                settings["interpolation"] = str_to_pil_interp(interpolation)
            try:
                self._rand_augment = rand_augment_transform(wanted.rand_augment, settings)
            except (AssertionError, KeyError, ValueError) as error:
                raise UserError(
                    f"rand_augment is {wanted.rand_augment!r}, which timm does not understand ({error})",
                    "write it like rand-m9-mstd0.5-inc1",
                ) from error
        if wanted.color_jitter:
            from torchvision.transforms.v2 import ColorJitter

            self._jitter = ColorJitter(wanted.color_jitter, wanted.color_jitter, wanted.color_jitter)
        if wanted.random_erasing:
            from timm.data.random_erasing import RandomErasing

            self._erase = RandomErasing(probability=1.0, mode="pixel", device="cpu")

    @property
    def changes_pixels(self) -> bool:
        """Whether anything happens before the images are normalised."""
        return self._rand_augment is not None or self._jitter is not None

    def colour_and_shape(self, images: Tensor, segment: Segment) -> Tensor:
        """RandAugment and jitter: uint8 [B, 3, S, S], the images of `segment` in order, to the same, as a copy."""
        changed = [
            self._changed(image, segment.pass_number, int(index))
            for image, index in zip(images, segment.indices, strict=True)
        ]
        return torch.stack(changed) if changed else images

    def _changed(self, image: Tensor, pass_number: int, index: int) -> Tensor:
        if self._rand_augment is not None:
            with seeded_globals(self._seed("RandAugment", pass_number, index)):
                turned = self._rand_augment(Image.fromarray(np.ascontiguousarray(image.permute(1, 2, 0))))
            image = torch.from_numpy(np.array(turned)).permute(2, 0, 1)
        if self._jitter is not None:
            with seeded_globals(self._seed("colour jitter", pass_number, index)):
                image = self._jitter(image)
        return image

    def erase(self, images: Tensor, segments: Iterable[Segment]) -> Tensor:
        """Random erasing of normalised float32 [B, 3, S, S] in place: the images of `segments` one after the other."""
        place = 0
        for segment in segments if self._erase is not None else ():
            seed = derive_seed(self.seed, "which images are erased")
            chosen = uniform_draws(seed, segment.pass_number, segment.indices)[:, 0] < self.wanted.random_erasing
            for offset in np.flatnonzero(chosen):
                index = int(segment.indices[offset])
                with seeded_globals(self._seed("erasing", segment.pass_number, index)):
                    self._erase(images[place + int(offset)])
            place += len(segment.indices)
        return images

    def _seed(self, purpose: str, pass_number: int, index: int) -> int:
        return derive_seed(derive_seed(self.seed, purpose, pass_number), "image", index)
