"""A small text and a training on it for the tests; as a program, a training that can be killed.

python -m tests.analyses.text_training FOLDER [SECONDS_A_STEP]
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from attngeo.language_models import decoder
from attngeo.training.language import train_on_text
from attngeo.training.language_recipe import LanguageRecipe
from attngeo.training.protocols import Observer

SENTENCE = "the whale swam past the ship, and the ship went on. "
DOCUMENTS = (SENTENCE * 7, SENTENCE.upper() * 5, SENTENCE[::-1] * 3)


class DroppingDecoder(nn.Module):
    """A tiny decoder behind dropout, so that every step draws from the global generator."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = decoder.build(decoder.decoder_config(2, 12, 3, 11), seed=4)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(decoder.next_token_logits(self.decoder, tokens))


def recipe(**changes: Any) -> LanguageRecipe:
    values: dict[str, Any] = {"steps": 23, "context": 11, "batch_tokens": 55, "checkpoints": (3, 7), "log_every": 5}
    return LanguageRecipe(**{**values, "lr": 1e-2, "warmup_steps": 2, **changes})


def train_tiny(
    folder: Path,
    *,
    of: LanguageRecipe | None = None,
    on_step: Callable[[nn.Module], None] | None = None,
    documents: Sequence[str] = DOCUMENTS,
    observers: Sequence[Observer] = (),
    threads: int = 1,
    digest: str = "d1",
) -> dict[str, Any]:
    """Train with a checkpoint after every step, in folder/run and folder/scratch; `on_step` comes before each step."""
    tokenizer = decoder.byte_tokenizer()
    ids = [decoder.token_ids(tokenizer, document) for document in documents]

    def keep(target: Path, step: int, numbers: dict[str, Any]) -> None:
        decoder.save(target, model.decoder, tokenizer, numbers)

    def logits(of_model: nn.Module, tokens: Tensor) -> Tensor:
        if of_model.training and on_step is not None:
            on_step(of_model)
        return of_model(tokens)

    model = DroppingDecoder()
    return train_on_text(
        model,
        [document[:-30] for document in ids],
        [document[-30:] for document in ids],
        of or recipe(),
        seed=5,
        run_dir=folder / "run",
        scratch=folder / "scratch",
        threads=threads,
        keep=keep,
        logits=logits,
        observers=observers,
        info={"digest": digest},
        checkpoint_every_s=0.0,
    )


if __name__ == "__main__":
    pause_s = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    train_tiny(Path(sys.argv[1]), on_step=lambda model: time.sleep(pause_s))
