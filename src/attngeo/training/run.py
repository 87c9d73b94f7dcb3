"""One training run: its state, its steps, its checkpoints and the files it leaves."""

import math
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm

from attngeo.errors import UserError
from attngeo.files import json_line, write_aside, write_json
from attngeo.models.pyramid import solver_residuals
from attngeo.ops import backend
from attngeo.training import checkpoint
from attngeo.training.interruption import Interruption
from attngeo.training.mixing import make_mixer
from attngeo.training.optimization import make_average, make_optimizer, make_schedule
from attngeo.training.protocols import Batches, Observer
from attngeo.training.recipe import Recipe
from attngeo.training.seeding import derive_seed, seed_everything
from attngeo.training.validation import Score, validate, worse

# What `Batches.describe()` says of the pixels that a run sees: its parts must not see different ones.
_DATA_IDENTITY = ("loader", "manifest_sha256", "storage", "num_images", "pixels", "versions")


@dataclass
class Progress:
    """How far a run has come; a checkpoint holds it beside the weights, their average and the optimizer's state."""

    step: int = 0  # of the optimizer, those left out as non-finite included
    images_seen: int = 0
    skipped_steps: int = 0
    epoch_loss: float = 0.0  # sum over the images of this epoch
    epoch_images: int = 0  # those that epoch_loss counts
    epoch_residual: float | None = None  # the largest in this epoch
    epoch_train_s: float = 0.0  # without evaluation
    train_s: float = 0.0  # all epochs
    wall_s: float = 0.0
    resumed: int = 0  # times
    ran: dict[str, str] = field(default_factory=dict)  # operator -> what ran, in every process of this run
    history: list[dict[str, Any]] = field(default_factory=list)  # the lines of metrics.jsonl


@dataclass(kw_only=True)
class Run:
    """A run in the making; the arguments are those of `attngeo.training.loop.train`.

    No state of a random generator is kept: each step seeds all of them from (seed, "step", step), so dropout, drop-path
    and mixing are the same whether or not, and with whatever loader, the run was interrupted before that step.
    """

    model: nn.Module
    train_batches: Batches
    val_batches: Batches
    recipe: Recipe
    seed: int
    run_dir: Path
    scratch: Path
    threads: int
    device: str
    observers: Sequence[Observer]
    info: dict[str, Any]
    checkpoint_every_s: float
    stop: Interruption

    def __post_init__(self) -> None:
        self.steps_per_epoch = len(self.train_batches)
        if self.steps_per_epoch == 0:
            what = f"{self.train_batches.num_images} training images do not fill a batch of {self.recipe.batch_size}"
            raise UserError(what, "lower batch_size in the recipe")
        self.model.to(self.device)
        self.average = make_average(self.model, self.recipe)
        self.optimizer = make_optimizer(self.model, self.recipe)
        self.schedule = make_schedule(self.optimizer, self.recipe, self.steps_per_epoch)
        self.mixer = make_mixer(self.recipe, self.train_batches.num_classes)
        self.progress = Progress()
        self._last_tick = self._last_saved = time.perf_counter()

    @property
    def epoch(self) -> int:
        """Index of the epoch in work; an epoch ends with its evaluation."""
        return len(self.progress.history)

    def parameters(self) -> dict[str, Any]:
        """All that observers record before the first step."""
        return {**asdict(self.recipe), "seed": self.seed, "threads": self.threads, "device": self.device, **self.info}

    def resume(self) -> bool:
        """Take up the newest checkpoint if there is one; UserError if it belongs to another run or thread count."""
        state = checkpoint.load_newest(self.scratch)
        if state is None:
            return False
        for key, ours in self._identity().items():
            theirs = state["identity"].get(key)
            if theirs != ours:
                what = f"the checkpoint in {self.scratch} was made with {key} = {theirs}, not {ours}"
                raise UserError(what, f"run with the former {key}, or delete that folder to start afresh")
        self.model.load_state_dict(state["model"])
        self.average.module.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        self.progress.resumed += 1
        self._write_history()
        return True

    def save(self) -> None:
        """Write a checkpoint of this moment, which must lie between two steps."""
        self._tick()
        self._note_what_ran()
        state = {
            "identity": self._identity(),
            "model": self.model.state_dict(),
            "average": self.average.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
        }
        checkpoint.save(self.scratch, state, self.progress.step)
        self._last_saved = time.perf_counter()

    def train_epoch(self) -> None:
        """Take the steps of this epoch that have not been taken."""
        progress = self.progress
        done = progress.step - self.epoch * self.steps_per_epoch
        if done == self.steps_per_epoch:
            return
        self.train_batches.set_epoch(self.epoch, skip_batches=done)
        self.model.train()
        self._tick()
        with tqdm(
            total=self.steps_per_epoch, initial=done, unit="step", leave=False, disable=not _on_terminal()
        ) as bar:
            for images, labels in self.train_batches:
                self.stop.check()
                self._step(images.to(self.device), labels.to(self.device))
                progress.epoch_train_s += self._tick()
                bar.update()
                if time.perf_counter() - self._last_saved >= self.checkpoint_every_s:
                    self.save()
        if progress.step != (self.epoch + 1) * self.steps_per_epoch:
            raise ValueError(
                f"the loader ended epoch {self.epoch} at step {progress.step}: fewer batches than its length"
            )
        if progress.epoch_images == 0:
            raise UserError(f"all steps of epoch {self.epoch + 1} were non-finite", "lower lr in the recipe")

    def evaluate_epoch(self) -> None:
        """Evaluate the averaged weights, then record, report and save the finished epoch."""
        progress = self.progress
        score = self._validate(self.average.module)
        progress.train_s += progress.epoch_train_s
        self._tick()
        metrics = {
            "epoch": self.epoch + 1,
            "step": progress.step,
            "images_seen": progress.images_seen,
            "train_loss": progress.epoch_loss / progress.epoch_images,
            "val_loss": score.loss,
            "val_top1": score.accuracy,
            "lr": self.optimizer.param_groups[0]["lr"],
            "img_per_s": self._epoch_img_per_s(),
            "wall_s": progress.wall_s,
            "solver_residual_max": worse(progress.epoch_residual, score.residual),
            "skipped_steps": progress.skipped_steps,
        }
        progress.history.append(metrics)
        progress.epoch_loss, progress.epoch_images, progress.epoch_train_s = 0.0, 0, 0.0
        progress.epoch_residual = None
        self._write_history()
        for observer in self.observers:
            observer.on_epoch(metrics)
        self.save()
        tqdm.write(
            f"epoch {self.epoch}/{self.recipe.epochs}  step {progress.step}  loss {metrics['train_loss']:.4f}  "
            f"validation {score.loss:.4f}  top-1 {score.accuracy:.2f} %  {metrics['img_per_s']:.0f} img/s"
        )

    def finish(self) -> dict[str, Any]:
        """Write weights.safetensors and final.json."""
        progress, last = self.progress, self.progress.history[-1]
        raw = self._validate(self.model)
        weights = {name: tensor.cpu().clone() for name, tensor in self.average.module.state_dict().items()}
        with write_aside(self.run_dir / "weights.safetensors", "wb") as stream:
            stream.write(safetensors.torch.save(weights, {"format": "pt"}))
        self._tick()
        self._note_what_ran()
        residual = raw.residual
        for line in progress.history:
            residual = worse(residual, line["solver_residual_max"])
        final = {
            **self.info,
            "status": "FINISHED",
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "accuracy": last["val_top1"],
            "accuracy_raw": raw.accuracy,
            "loss": last["val_loss"],
            "n_eval": raw.n,
            "images_seen": progress.images_seen,
            "steps": progress.step,
            "skipped_steps": progress.skipped_steps,
            "epochs": self.epoch,
            "wall_s": progress.wall_s,
            "img_per_s": progress.images_seen / progress.train_s,
            "peak_memory_mib": self._peak_memory_mib(),
            "resumed": progress.resumed,
            "solver_residual_max": residual,
            "ran": progress.ran,
            "loader": self.train_batches.describe(),
            "threads": self.threads,
            "device": self._device_name(),
            "torch": torch.__version__,
            "seed": self.seed,
        }
        write_json(self.run_dir / "final.json", final)
        return final

    def _step(self, images: Tensor, labels: Tensor) -> None:
        """One forward and backward pass, and one update unless something is not finite."""
        progress, recipe = self.progress, self.recipe
        seed_everything(derive_seed(self.seed, "step", progress.step))
        self.schedule.step_update(progress.step)
        targets, smoothing = labels, recipe.label_smoothing
        if self.mixer is not None:
            images, targets = self.mixer(images, labels, seed=self.seed, step=progress.step)
            smoothing = 0.0  # the mixed labels are smoothed already
        with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=recipe.autocast == "bfloat16"):
            logits: Tensor = self.model(images)
        loss = cross_entropy(logits.float(), targets, label_smoothing=smoothing)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = clip_grad_norm_(self.model.parameters(), recipe.clip_grad or math.inf).item()
        if math.isfinite(loss.item()) and math.isfinite(norm):
            self.optimizer.step()
            self.average.update(self.model, step=progress.step + 1)
            progress.epoch_loss += loss.item() * len(labels)
            progress.epoch_images += len(labels)
        elif recipe.non_finite == "skip":
            progress.skipped_steps += 1
        else:
            what = f"loss {loss.item()} and gradient norm {norm} at step {progress.step} (epoch {self.epoch + 1})"
            raise UserError(what, "lower lr, clip the gradient, or set non_finite: skip in the recipe")
        progress.epoch_residual = worse(progress.epoch_residual, solver_residuals(self.model))
        progress.images_seen += len(labels)
        progress.step += 1

    def _validate(self, model: nn.Module) -> Score:
        seed_everything(derive_seed(self.seed, "evaluation"))
        return validate(
            model,
            self.val_batches,
            device=self.device,
            max_images=self.recipe.max_eval_images,
            autocast=self.recipe.autocast == "bfloat16",
            stop=self.stop,
        )

    def _identity(self) -> dict[str, Any]:
        """What must not change between the parts of a run."""
        kept = {"threads": self.threads, "seed": self.seed, "device": self.device, "digest": self.info.get("digest")}
        kept |= {"torch": str(torch.__version__), "steps_per_epoch": self.steps_per_epoch}
        for split, batches in (("train", self.train_batches), ("val", self.val_batches)):
            described = batches.describe()
            kept |= {f"{split} {fact}": described.get(fact) for fact in _DATA_IDENTITY}
        return {**kept, **asdict(self.recipe)}

    def _note_what_ran(self) -> None:
        """Add what ran in this process to what ran before an interruption: a change of it must show."""
        for operator, what in backend.ran().items():
            parts = dict.fromkeys([*filter(None, self.progress.ran.get(operator, "").split(" + ")), *what.split(" + ")])
            self.progress.ran[operator] = " + ".join(sorted(parts))

    def _write_history(self) -> None:
        with write_aside(self.run_dir / "metrics.jsonl") as stream:
            stream.writelines(json_line(metrics) + "\n" for metrics in self.progress.history)

    def _epoch_img_per_s(self) -> float:
        before = self.progress.history[-1]["images_seen"] if self.progress.history else 0
        return (self.progress.images_seen - before) / self.progress.epoch_train_s

    def _tick(self) -> float:
        """Seconds since the last tick, also added to the wall time of the run."""
        now = time.perf_counter()
        passed, self._last_tick = now - self._last_tick, now
        self.progress.wall_s += passed
        return passed

    def _peak_memory_mib(self) -> float:
        """Of the GPU, or of this process since it started (a resumed run: of its last process)."""
        if torch.device(self.device).type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

    def _device_name(self) -> str:
        if torch.device(self.device).type == "cuda":
            return f"{self.device} {torch.cuda.get_device_name(self.device)}"
        return self.device


def _on_terminal() -> bool:
    return sys.stderr.isatty()
