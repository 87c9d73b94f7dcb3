"""Optimizer, learning-rate schedule and average of the weights, built from a recipe with timm's parts."""

from collections.abc import Collection

import torch
from timm.optim import param_groups_weight_decay
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import nn

from attngeo.training.recipe import Recipe

# Weight of the newest model in the average after t updates: 10/t, until 1 - ema_decay is larger. The average then
# spans the last tenth of a short run, instead of still holding the initial weights.
_EMA_WARMUP_GAMMA = 10.0


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW without weight decay on biases, norms, other vectors, and what the model lists in `no_weight_decay()`."""
    listed: Collection[str] = getattr(model, "no_weight_decay", tuple)()
    groups = param_groups_weight_decay(model, recipe.weight_decay, no_weight_decay_list=listed)
    return torch.optim.AdamW(groups, lr=recipe.lr)


def make_schedule(optimizer: torch.optim.Optimizer, recipe: Recipe, steps_per_epoch: int) -> CosineLRScheduler:
    """Linear warm-up from min_lr to lr, then a cosine back to min_lr, by step; without state: step -> rate."""
    total = recipe.epochs * steps_per_epoch
    warmup = min(round(recipe.warmup_epochs * steps_per_epoch), total - 1)
    return CosineLRScheduler(
        optimizer,
        t_initial=max(total - warmup, 1),
        lr_min=recipe.min_lr,
        warmup_t=warmup,
        warmup_lr_init=recipe.min_lr,
        warmup_prefix=True,
        t_in_epochs=False,
    )


def make_average(model: nn.Module, recipe: Recipe) -> ModelEmaV3:
    """Exponential moving average of parameters and buffers, a copy of the model."""
    return ModelEmaV3(model, decay=recipe.ema_decay, use_warmup=True, warmup_gamma=_EMA_WARMUP_GAMMA, warmup_power=1.0)
