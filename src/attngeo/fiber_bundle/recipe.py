"""How a model of an experiment is trained; imports no torch."""

from dataclasses import dataclass
from typing import Any, ClassVar

from attngeo.errors import UserError


@dataclass(frozen=True)
class TaskRecipe:
    """Hyperparameters of one training on a task; its budget is in steps, and a result is a function of the seed."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    steps: int
    batch: int  # sequences or images a step
    lr: float = 2e-3  # peak learning rate of AdamW
    min_lr: float = 1e-5  # at the start of the warm-up and at the end of the cosine
    warmup: float = 0.1  # share of the steps with linear warm-up
    weight_decay: float = 0.05  # decoupled; none on norms and other vectors
    clip_grad: float = 1.0  # largest Euclidean norm of the whole gradient
    held_out: int = 256  # sequences or images that a model is tested on

    def __post_init__(self) -> None:
        """Refuse values without meaning; UserError names the key."""
        for key, sound, words in (
            ("steps", self.steps >= 1, "at least 1"),
            ("batch", self.batch >= 1, "at least 1"),
            ("min_lr", self.min_lr >= 0, "0 or more"),
            ("lr", self.lr > 0 and self.lr >= self.min_lr, "above 0 and not below min_lr"),
            ("warmup", 0 <= self.warmup < 1, "0 or more and below 1"),
            ("weight_decay", self.weight_decay >= 0, "0 or more"),
            ("clip_grad", self.clip_grad > 0, "above 0"),
            ("held_out", self.held_out >= 1, "at least 1"),
        ):
            if not sound:
                raise UserError(f"training on a task: {key} is {getattr(self, key)!r}", f"make {key} {words}")
