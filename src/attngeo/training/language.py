"""Training on the next token of a text: a run killed at any moment and started again ends with the same bits.

The model is a parameter: any module, with a function that gives its logits [B, N, vocabulary] for token ids [B, N].
"""

import hashlib
import math
import resource
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import InitVar, asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from timm.optim import param_groups_weight_decay
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from attngeo.errors import UserError
from attngeo.files import json_line, path_aside, write_aside, write_json
from attngeo.training import checkpoint
from attngeo.training.display import say, step_bar
from attngeo.training.interruption import Interrupted, Interruption
from attngeo.training.language_recipe import LanguageRecipe
from attngeo.training.protocols import Observer
from attngeo.training.seeding import derive_seed, generator, reproducible, seed_everything

Logits = Callable[[nn.Module, Tensor], Tensor]
Keep = Callable[[Path, int, dict[str, Any]], None]


class TokenWindows:
    """Windows of `tokens` consecutive tokens; none spans two documents, and shorter documents have none.

    Raises UserError if no document fills a window.
    """

    def __init__(self, documents: Sequence[Tensor], tokens: int, what: str) -> None:
        filling = [document for document in documents if len(document) >= tokens]
        if not filling:
            raise UserError(
                f"none of the {len(documents)} documents has {tokens} tokens of {what}",
                "give longer texts, lower context, or change hold_out",
            )
        self.tokens = tokens
        self.stream = torch.cat(filling)
        begins = [0, *torch.tensor([len(document) for document in filling]).cumsum(0).tolist()]
        starts = [torch.arange(begin, end - tokens + 1) for begin, end in pairwise(begins)]
        self._starts = torch.cat(starts)
        # One token of overlap: the last one of a window is predicted there and read in the next.
        self._consecutive = torch.cat([of_document[:: tokens - 1] for of_document in starts])

    def drawn(self, count: int, draw: torch.Generator) -> Tensor:
        """Int64 [count, tokens]: windows at random places, any place as likely as any other."""
        return self._at(self._starts[torch.randint(len(self._starts), (count,), generator=draw)])

    def consecutive(self, most: int | None = None) -> Tensor:
        """Int64 [n, tokens]: windows side by side, at most `most` of them, spread evenly."""
        starts = self._consecutive
        if most is not None and most < len(starts):
            starts = starts[(torch.arange(most) * len(starts)) // most]
        return self._at(starts)

    def _at(self, starts: Tensor) -> Tensor:
        return self.stream[starts[:, None] + torch.arange(self.tokens)]


@dataclass
class Progress:
    """How far a run has come; a checkpoint holds it beside the weights and the optimizer's state."""

    step: int = 0
    loss_sum: float = 0.0  # over the steps since the last line of metrics.jsonl
    loss_steps: int = 0
    train_s: float = 0.0  # without evaluation
    wall_s: float = 0.0
    resumed: int = 0  # times
    history: list[dict[str, Any]] = field(default_factory=list)  # the lines of metrics.jsonl


def train_on_text(
    model: nn.Module,
    training: Sequence[Tensor],
    validation: Sequence[Tensor],
    recipe: LanguageRecipe,
    *,
    seed: int,
    run_dir: Path,
    scratch: Path,
    threads: int,
    keep: Keep,
    logits: Logits = lambda model, tokens: model(tokens),
    device: str = "cpu",
    observers: Sequence[Observer] = (),
    info: dict[str, Any] | None = None,
    checkpoint_every_s: float = 60.0,
) -> dict[str, Any]:
    """Train `model` on the next token, or go on with the run whose checkpoints are in `scratch`; what final.json holds.

    Writes run_dir/{metrics.jsonl, final.json} and, for every step that the recipe keeps, the folder run_dir/step<step>,
    which `keep(folder, step, numbers)` fills with the model as it is. Losses are means over tokens, in nats; the
    numbers that `keep` gets hold no time, so that a folder's bits are those of an uninterrupted run.
    `training` and `validation` hold the token ids of each document, int64 [tokens]. Batches are drawn from
    (seed, step) alone, so an interruption changes none; full checkpoints go to `scratch` every `checkpoint_every_s`
    seconds, at every kept step, and on SIGTERM or Ctrl-C. `scratch` is removed when the run has finished.

    Raises UserError for a non-finite loss or gradient, text that fills no window, a full disk, and a checkpoint of
    other text, threads, seed, recipe, digest or torch; Interrupted (status 128 + signal) after a signal.
    """
    with checkpoint.claim(scratch), reproducible(threads, device), Interruption() as stop:
        try:
            run = _TextRun(
                model=model,
                training=training,
                validation=validation,
                recipe=recipe,
                seed=seed,
                run_dir=run_dir,
                scratch=scratch,
                threads=threads,
                keep=keep,
                logits=logits,
                device=device,
                observers=observers,
                info=dict(info or {}),
                checkpoint_every_s=checkpoint_every_s,
                stop=stop,
            )
            resumed = run.resume()
            parameters = {**asdict(recipe), "seed": seed, "threads": threads, "device": device, **run.info}
            for observer in observers:
                observer.on_start(parameters, resumed)
            final = run.to_the_end()
        except Interrupted as interrupted:
            for observer in observers:
                observer.on_stop("KILLED", interrupted.reason)
            raise
        except BaseException as error:
            for observer in observers:
                observer.on_stop("FAILED", f"{type(error).__name__}: {error}")
            raise
        for observer in observers:
            observer.on_end(final)
    shutil.rmtree(scratch, ignore_errors=True)
    return final


@dataclass(kw_only=True)
class _TextRun:
    """A run in the making; the arguments are those of `train_on_text`."""

    model: nn.Module
    training: InitVar[Sequence[Tensor]]
    validation: InitVar[Sequence[Tensor]]
    recipe: LanguageRecipe
    seed: int
    run_dir: Path
    scratch: Path
    threads: int
    keep: Keep
    logits: Logits
    device: str
    observers: Sequence[Observer]
    info: dict[str, Any]
    checkpoint_every_s: float
    stop: Interruption

    def __post_init__(self, training: Sequence[Tensor], validation: Sequence[Tensor]) -> None:
        recipe = self.recipe
        self.model.to(self.device)
        self.windows = TokenWindows(training, recipe.context + 1, "training text")
        self.held_out = TokenWindows(validation, recipe.context + 1, "held-out text")
        self.rows = recipe.batch_tokens // recipe.context
        groups = param_groups_weight_decay(self.model, recipe.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.lr)
        self.schedule = CosineLRScheduler(
            self.optimizer,
            t_initial=recipe.steps - recipe.warmup_steps,
            lr_min=recipe.min_lr,
            warmup_t=recipe.warmup_steps,
            warmup_lr_init=recipe.min_lr,
            warmup_prefix=True,
            t_in_epochs=False,
        )
        self.progress = Progress()
        self._last_tick = self._last_saved = time.perf_counter()

    def resume(self) -> bool:
        """Take up the newest checkpoint if there is one; UserError if it belongs to another run."""
        state = checkpoint.load_newest(self.scratch)
        if state is None:
            return False
        for key, ours in self._identity().items():
            theirs = state["identity"].get(key)
            if theirs != ours:
                what = f"the checkpoint in {self.scratch} was made with {key} = {theirs}, not {ours}"
                raise UserError(what, f"run with the former {key}, or delete that folder to start afresh")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        self.progress.resumed += 1
        say(f"resuming after step {self.progress.step} of {self.recipe.steps}")
        return True

    def to_the_end(self) -> dict[str, Any]:
        """Take the steps that are left, keep what is to be kept, and write final.json."""
        progress, recipe = self.progress, self.recipe
        try:
            with step_bar(recipe.steps, progress.step) as bar:
                while True:
                    if self.stop.number:
                        raise Interrupted(self.stop.number)
                    self._report_if_due()
                    if progress.step == recipe.steps:
                        break
                    loss = self._step()
                    bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
                    bar.update()
                    if time.perf_counter() - self._last_saved >= self.checkpoint_every_s:
                        self._save()
        except Interrupted:
            self._save()
            raise
        return self._finish()

    def _step(self) -> float:
        """One update; the batch's mean loss before it. UserError where it, or the gradient, is not finite."""
        progress, recipe = self.progress, self.recipe
        self._tick()
        self.model.train()
        seed_everything(derive_seed(self.seed, "text step", progress.step))  # for dropout, if the model has some
        self.schedule.step_update(progress.step)
        windows = self.windows.drawn(self.rows, generator(self.seed, "text windows", progress.step)).to(self.device)
        self.optimizer.zero_grad(set_to_none=True)
        loss = cross_entropy(self.logits(self.model, windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        norm = clip_grad_norm_(self.model.parameters(), recipe.clip_grad or math.inf).item()
        value = loss.item()
        if not (math.isfinite(value) and math.isfinite(norm)):
            raise UserError(
                f"loss {value} and gradient norm {norm} at step {progress.step}", "lower lr, or clip the gradient"
            )
        self.optimizer.step()
        progress.step += 1
        progress.loss_sum += value
        progress.loss_steps += 1
        progress.train_s += self._tick()
        return value

    def _report_if_due(self) -> None:
        """Evaluate and keep the model if this step asks for it and has not been reported."""
        progress, step = self.progress, self.progress.step
        kept = step in self.recipe.kept_steps
        if not (kept or step % self.recipe.log_every == 0):
            return
        if progress.history and progress.history[-1]["step"] == step:
            return
        held_out = self.held_out.consecutive()
        loss = self._mean_loss(held_out)
        line = {
            "step": step,
            "tokens_seen": step * self.recipe.batch_tokens,
            "train_loss": progress.loss_sum / progress.loss_steps if progress.loss_steps else math.nan,
            "val_loss": loss,
            "val_perplexity": math.exp(loss) if loss < 700 else math.inf,
            "lr": self.optimizer.param_groups[0]["lr"],
            "tokens_per_s": step * self.recipe.batch_tokens / progress.train_s if step else math.nan,
            "wall_s": progress.wall_s,
        }
        if kept:
            numbers = {
                "step": step,
                "steps": self.recipe.steps,
                "seed": self.seed,
                "tokens_seen": line["tokens_seen"],
                "training_loss": self._mean_loss(self.windows.consecutive(len(held_out))),
                "validation_loss": loss,
                "validation_perplexity": line["val_perplexity"],
                "validation_tokens": held_out[:, 1:].numel(),
            }
            self._keep(step, numbers)
        progress.history.append(line)
        self._write_history()
        progress.loss_sum, progress.loss_steps = 0.0, 0
        for observer in self.observers:
            observer.on_epoch(line)
        if kept:
            self._save()
        of_steps = f"loss {line['train_loss']:.4f}  {line['tokens_per_s']:.0f} tokens/s  " if step else ""
        say(
            f"step {step}/{self.recipe.steps}  {of_steps}validation {loss:.4f} nats a token"
            + ("  kept" if kept else "")
        )

    @torch.no_grad()
    def _mean_loss(self, windows: Tensor) -> float:
        """Mean over all predicted tokens of windows [n, context + 1], in nats."""
        self.model.eval()
        total = 0.0
        for part in windows.split(self.rows):
            part = part.to(self.device)
            scores = self.logits(self.model, part[:, :-1]).flatten(0, 1)
            total += cross_entropy(scores.double(), part[:, 1:].flatten(), reduction="sum").item()
        return total / windows[:, 1:].numel()

    def _keep(self, step: int, numbers: dict[str, Any]) -> None:
        """Have the model written to a folder of the scratch, where no rerun of the workflow removes it."""
        folder = self._kept(step)
        aside = folder.with_name(f"{folder.name}.aside")
        for left_over in (aside, folder):
            shutil.rmtree(left_over, ignore_errors=True)
        aside.mkdir(parents=True)
        self.keep(aside, step, numbers)
        aside.rename(folder)

    def _kept(self, step: int) -> Path:
        return self.scratch / "kept" / f"step{step}"

    def _save(self) -> None:
        """Write a checkpoint of this moment, which must lie between two steps."""
        self._tick()
        state = {
            "identity": self._identity(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
        }
        checkpoint.save(self.scratch, state, self.progress.step)
        self._last_saved = time.perf_counter()

    def _finish(self) -> dict[str, Any]:
        """Copy what was kept to its place, then write final.json; what it holds."""
        progress, last = self.progress, self.progress.history[-1]
        for step in self.recipe.kept_steps:
            for file in sorted(self._kept(step).iterdir()):
                with path_aside(self.run_dir / f"step{step}" / file.name) as aside:
                    shutil.copyfile(file, aside)
        self._write_history()
        self._tick()
        on_gpu = torch.device(self.device).type == "cuda"
        used = torch.cuda.max_memory_allocated(self.device) if on_gpu else _resident_bytes()
        final = {
            **self.info,
            "status": "FINISHED" if math.isfinite(last["val_loss"]) else "DIVERGED",
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "steps": progress.step,
            "kept_steps": list(self.recipe.kept_steps),
            "tokens_seen": last["tokens_seen"],
            "training_tokens": len(self.windows.stream),
            "train_loss": last["train_loss"],
            "loss": last["val_loss"],
            "perplexity": last["val_perplexity"],
            "lowest_val_loss": min(line["val_loss"] for line in progress.history),
            "n_eval": self.held_out.consecutive()[:, 1:].numel(),
            "tokens_per_s": last["tokens_seen"] / progress.train_s,
            "wall_s": progress.wall_s,
            "peak_memory_mib": used / 2**20,  # of the GPU, or of this process since it started
            "resumed": progress.resumed,
            "threads": self.threads,
            "device": f"{self.device} {torch.cuda.get_device_name(self.device)}" if on_gpu else self.device,
            "torch": torch.__version__,
            "seed": self.seed,
        }
        write_json(self.run_dir / "final.json", final)
        return final

    def _write_history(self) -> None:
        with write_aside(self.run_dir / "metrics.jsonl") as stream:
            stream.writelines(json_line(line) + "\n" for line in self.progress.history)

    def _identity(self) -> dict[str, Any]:
        """What must not change between the parts of a run."""
        streams = (self.windows.stream, self.held_out.stream)
        text = hashlib.sha256(b"|".join(stream.numpy().tobytes() for stream in streams)).hexdigest()
        kept = {"threads": self.threads, "seed": self.seed, "device": self.device, "digest": self.info.get("digest")}
        return {**kept, "torch": str(torch.__version__), "text": text, **asdict(self.recipe)}

    def _tick(self) -> float:
        """Seconds since the last tick, also added to the wall time of the run."""
        now = time.perf_counter()
        passed, self._last_tick = now - self._last_tick, now
        self.progress.wall_s += passed
        return passed


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
