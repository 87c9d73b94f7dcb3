"""A training step without the loop around it: what a model costs whatever trains it."""

import math

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from attngeo.training.optimization import make_average, make_optimizer
from attngeo.training.recipe import Recipe


class BareStep:
    """Forward and backward pass, clipping, update and average of the weights, as `Run` takes them with a recipe.

    What is left out is the loop's: loading, seeds, schedule, checks for numbers that are not finite, accounting.
    """

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.model = model.train()
        self.recipe = recipe
        self.optimizer = make_optimizer(model, recipe)
        self.average = make_average(model, recipe)
        self.taken = 0

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        """One step on images [B, 3, H, W] and labels [B]."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = cross_entropy(self.model(images), labels, label_smoothing=self.recipe.label_smoothing)
        loss.backward()
        clip_grad_norm_(self.model.parameters(), self.recipe.clip_grad or math.inf)
        self.optimizer.step()
        self.taken += 1
        self.average.update(self.model, step=self.taken)
