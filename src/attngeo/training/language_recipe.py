"""What a training on text does, apart from its model, its text and its seed; imports no torch."""

from dataclasses import dataclass
from typing import Any, ClassVar

from attngeo.errors import UserError


@dataclass(frozen=True)
class LanguageRecipe:
    """Hyperparameters of one training on the next token of a text."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    steps: int
    context: int  # tokens that the model reads at once
    batch_tokens: int  # tokens a step: a multiple of the context
    checkpoints: tuple[int, ...] = ()  # steps whose weights are kept, besides the first (0, untrained) and the last
    lr: float = 1e-3  # peak learning rate of AdamW
    min_lr: float = 1e-4  # at the start of the warm-up and at the end of the cosine
    warmup_steps: int = 0  # of linear warm-up
    weight_decay: float = 0.1  # decoupled; none on norms and other vectors
    clip_grad: float = 1.0  # largest Euclidean norm of the whole gradient; 0: no clipping
    hold_out: float = 0.15  # share of each document, its end, that is not trained on
    log_every: int = 50  # steps between two lines of metrics.jsonl, each with a validation

    def __post_init__(self) -> None:
        """Refuse values without meaning; UserError names the key."""
        kept = self.checkpoints
        for key, sound, words in (
            ("steps", self.steps >= 1, "at least 1"),
            ("context", self.context >= 2, "at least 2"),
            ("batch_tokens", self.batch_tokens > 0 == self.batch_tokens % self.context, "a multiple of context"),
            ("checkpoints", all(0 <= step <= self.steps for step in kept), f"steps from 0 to {self.steps}"),
            ("checkpoints", len(set(kept)) == len(kept), "a list of different steps"),
            ("min_lr", self.min_lr >= 0, "0 or more"),
            ("lr", self.lr > 0 and self.lr >= self.min_lr, "above 0 and not below min_lr"),
            ("warmup_steps", 0 <= self.warmup_steps < self.steps, "0 or more and smaller than steps"),
            ("weight_decay", self.weight_decay >= 0, "0 or more"),
            ("clip_grad", self.clip_grad >= 0, "0 or more"),
            ("hold_out", 0 < self.hold_out <= 0.5, "above 0 and at most 0.5"),
            ("log_every", self.log_every >= 1, "at least 1"),
        ):
            if not sound:
                raise UserError(f"training on text: {key} is {getattr(self, key)!r}", f"make {key} {words}")

    @property
    def kept_steps(self) -> tuple[int, ...]:
        """Steps whose weights are kept, in order: the untrained ones, those of `checkpoints` and the last."""
        return tuple(sorted({0, *self.checkpoints, self.steps}))
