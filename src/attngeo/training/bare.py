"""A training step without the loop around it: what a model costs whatever trains it."""

import math

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from attngeo.training.optimization import make_average, make_optimizer
from attngeo.training.recipe import Recipe

# Of a step whose cost is asked for and not what it learns: the rate leaves the weights nearly as they were drawn.
COST_RECIPE = Recipe(
    epochs=1,
    images_per_epoch=None,
    batch_size=64,
    eval_batch_size=64,
    max_eval_images=1,
    lr=1e-6,
    min_lr=0.0,
    warmup_epochs=0.0,
    weight_decay=0.05,
    clip_grad=1.0,
    ema_decay=0.99,
    label_smoothing=0.1,
    drop_path=0.0,
    image_size=32,
)


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
