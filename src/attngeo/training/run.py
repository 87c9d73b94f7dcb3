"""One training run: its state, its steps, its checkpoints and the files it leaves."""

import math
import resource
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

from attngeo.errors import UserError
from attngeo.files import json_line, write_aside, write_json
from attngeo.models.pyramid import solver_residuals
from attngeo.ops import backend
from attngeo.training import checkpoint
from attngeo.training.arithmetic import Arithmetic
from attngeo.training.display import EpochBar, say
from attngeo.training.distributed import Team
from attngeo.training.interruption import Interrupted, Interruption
from attngeo.training.mixing import make_mixer
from attngeo.training.optimization import make_average, make_optimizer, make_schedule
from attngeo.training.protocols import Batches, Observer
from attngeo.training.recipe import Recipe
from attngeo.training.seeding import derive_seed, seed_everything
from attngeo.training.sharing import evaluation_share, training_share
from attngeo.training.validation import NO_RESIDUAL, Score, converged, validate, worse, worst

# What `Batches.describe()` says of the pixels that a run sees: its parts must not see different ones.
_DATA_IDENTITY = ("loader", "manifest_sha256", "storage", "num_images", "pixels", "versions")


@dataclass
class Progress:
    """How far a run has come; a checkpoint holds it beside the weights, their average and the optimizer's state."""

    step: int = 0  # of the optimizer, those left out as non-finite included
    images_seen: int = 0
    skipped_steps: int = 0  # left out by the recipe's policy on non-finite numbers
    overflowed_steps: int = 0  # of float16: left out while the scale of the loss was too large
    epoch_loss: float = 0.0  # sum over the images of this epoch
    epoch_correct: int = 0  # of them, those whose likeliest class is right (of a mixed image: its larger part's)
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
    Of several processes each holds a Run; all take the same decisions, since all see the same sums, and the leader's
    alone writes.
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
    team: Team

    def __post_init__(self) -> None:
        self.steps_per_epoch = len(self.train_batches)
        if self.steps_per_epoch == 0:
            what = f"{self.train_batches.num_images} training images do not fill a batch of {self.recipe.batch_size}"
            raise UserError(what, "lower batch_size in the recipe")
        self.arithmetic = Arithmetic(self.device, self.recipe.autocast, self.recipe.channels_last)
        self.train_batches = training_share(self.train_batches, self.recipe, self.team)
        self.val_batches = evaluation_share(self.val_batches, self.recipe.max_eval_images, self.team)
        self.arithmetic.place_model(self.model)
        self.team.copy_from_leader(self.model.state_dict().values())
        if self.recipe.activation_checkpointing:
            _checkpoint_activations(self.model)
        self.average = make_average(self.model, self.recipe)
        self.scaler = self.arithmetic.loss_scaler()
        self.optimizer = make_optimizer(self.model, self.recipe)
        self.schedule = make_schedule(self.optimizer, self.recipe, self.steps_per_epoch)
        self.mixer = make_mixer(self.recipe, self.train_batches.num_classes)
        self.progress = Progress()
        self._last_tick = self._last_saved = time.perf_counter()
        self._asked_to_stop = 0  # the signal that all processes know of

    @property
    def epoch(self) -> int:
        """Index of the epoch in work; an epoch ends with its evaluation."""
        return len(self.progress.history)

    def parameters(self) -> dict[str, Any]:
        """All that observers record before the first step."""
        return {
            **asdict(self.recipe),
            "seed": self.seed,
            "threads": self.threads,
            "device": self.device,
            "world_size": self.team.size,
            **self.info,
        }

    def resume(self) -> bool:
        """Take up the newest checkpoint if there is one; UserError if it belongs to another run or thread count."""
        state = self.team.from_leader(checkpoint.load_newest(self.scratch) if self.team.leads else None)
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
        self.scaler.load_state_dict(state["scaler"])
        self.progress = Progress(**state["progress"])
        self.progress.resumed += 1
        self._say(f"resuming in epoch {self.epoch + 1} of {self.recipe.epochs}, after step {self.progress.step}")
        self._write_history()
        return True

    def save(self) -> None:
        """Write a checkpoint of this moment, which must lie between two steps."""
        if not self.team.leads:
            return
        self._tick()
        self._note_what_ran(backend.ran())
        state = {
            "identity": self._identity(),
            "model": self.model.state_dict(),
            "average": self.average.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
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
        size = self.recipe.batch_size
        with EpochBar(
            self.epoch,
            self.recipe.epochs,
            images=self.steps_per_epoch * size,
            done=done * size,
            shown=self.team.leads,
        ) as bar:
            for images, labels in self.train_batches:
                self._stop_if_asked()
                self._step(images, labels)
                progress.epoch_train_s += self._tick()
                counted = max(progress.epoch_images, 1)
                bar.advance(size, progress.epoch_loss / counted, 100 * progress.epoch_correct / counted)
                if time.perf_counter() - self._last_saved >= self.checkpoint_every_s:
                    self.save()
        self._stop_if_asked()
        if progress.step != (self.epoch + 1) * self.steps_per_epoch:
            raise ValueError(
                f"the loader ended epoch {self.epoch} at step {progress.step}: fewer batches than its length"
            )
        if progress.epoch_images == 0 and self.recipe.non_finite != "record":
            raise UserError(f"all steps of epoch {self.epoch + 1} were non-finite", "lower lr in the recipe")

    def evaluate_epoch(self) -> None:
        """Evaluate the averaged weights, then record, report and save the finished epoch."""
        progress = self.progress
        self._compare_weights()
        score = self._validate(self.average.module)
        progress.train_s += progress.epoch_train_s
        self._tick()
        residual = worse(progress.epoch_residual, score.residual)
        metrics = {
            "epoch": self.epoch + 1,
            "step": progress.step,
            "images_seen": progress.images_seen,
            "train_loss": progress.epoch_loss / progress.epoch_images if progress.epoch_images else math.nan,
            "train_top1": 100.0 * progress.epoch_correct / progress.epoch_images if progress.epoch_images else math.nan,
            "val_loss": score.loss,
            "val_top1": score.accuracy,
            "lr": self.optimizer.param_groups[0]["lr"],
            "img_per_s": self._epoch_img_per_s(),
            "wall_s": progress.wall_s,
            "solver_residual_max": residual,
            "solver_converged": converged(residual),
            "skipped_steps": progress.skipped_steps,
        }
        progress.history.append(metrics)
        progress.epoch_loss, progress.epoch_correct, progress.epoch_images = 0.0, 0, 0
        progress.epoch_train_s = 0.0
        progress.epoch_residual = None
        self._write_history()
        for observer in self.observers:
            observer.on_epoch(metrics)
        self.save()
        self._say(
            f"epoch {self.epoch}/{self.recipe.epochs}  step {progress.step}  loss {metrics['train_loss']:.4f}  "
            f"validation {score.loss:.4f}  top-1 {score.accuracy:.2f} %  {metrics['img_per_s']:.0f} img/s"
            + ("" if converged(residual) in (True, None) else f"  solver not converged: residual {residual:.2g}")
        )

    def finish(self) -> dict[str, Any]:
        """Write weights.safetensors and final.json; what final.json holds, in every process."""
        progress, last = self.progress, self.progress.history[-1]
        raw = self._validate(self.model)
        memory_mib = max(row[0] for row in self.team.gather([self._peak_memory_mib()]))
        if self.team.leads:
            self._write_weights()
        self._tick()
        for ran in self.team.gather_objects(backend.ran()):
            self._note_what_ran(ran)
        residual = raw.residual
        for line in progress.history:
            residual = worse(residual, line["solver_residual_max"])
        final = {
            **self.info,
            "status": "FINISHED" if math.isfinite(last["train_loss"] + last["val_loss"]) else "DIVERGED",
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "accuracy": last["val_top1"],
            "accuracy_raw": raw.accuracy,
            "loss": last["val_loss"],
            "n_eval": raw.n,
            "images_seen": progress.images_seen,
            "steps": progress.step,
            "skipped_steps": progress.skipped_steps,
            "overflowed_steps": progress.overflowed_steps,
            "epochs": self.epoch,
            "wall_s": progress.wall_s,
            "img_per_s": progress.images_seen / progress.train_s,
            "peak_memory_mib": memory_mib,
            "resumed": progress.resumed,
            "solver_residual_max": residual,
            "solver_converged": converged(residual),
            "ran": progress.ran,
            "loader": self.train_batches.describe(),
            "threads": self.threads,
            "device": self._device_name(),
            "world_size": self.team.size,
            "accumulation": self.recipe.accumulation,
            "activation_checkpointing": self.recipe.activation_checkpointing,
            **self.arithmetic.describe(),
            "torch": torch.__version__,
            "seed": self.seed,
        }
        if self.team.leads:
            write_json(self.run_dir / "final.json", final)
        return final

    def _step(self, images: Tensor, labels: Tensor) -> None:
        """One forward and backward pass of the whole batch, and one update unless something is not finite."""
        progress, recipe, team = self.progress, self.recipe, self.team
        # Processes must not drop the same paths; the first draws what it draws alone.
        purpose = "step" if team.leads else f"step of process {team.rank}"
        seed_everything(derive_seed(self.seed, purpose, progress.step))
        self.schedule.step_update(progress.step)
        images, labels = self.arithmetic.place(images, labels)
        batch = len(labels) if team.size == 1 else recipe.batch_size
        self.optimizer.zero_grad(set_to_none=True)
        done = team.gather([*self._backward(images, labels, batch), len(labels), self.stop.number])
        losses, corrects, residuals, counts, signals = zip(*done, strict=True)
        if sum(counts) != batch:
            raise ValueError(f"the processes had {counts} images of a batch of {batch}")
        self._asked_to_stop = int(max(signals))
        team.sum_gradients(list(self.model.parameters()))
        self.scaler.unscale_(self.optimizer)
        norm = clip_grad_norm_(self.model.parameters(), recipe.clip_grad or math.inf).item()
        loss = sum(losses)
        if math.isfinite(loss) and math.isfinite(norm):
            self.scaler.step(self.optimizer)
            self.average.update(self.model, step=progress.step + 1)
            progress.epoch_loss += loss * batch
            progress.epoch_correct += int(sum(corrects))
            progress.epoch_images += batch
        else:
            self._leave_step_out(loss, norm)
        self.scaler.update()
        progress.epoch_residual = worse(progress.epoch_residual, worst(residuals))
        progress.images_seen += batch
        progress.step += 1

    def _backward(self, images: Tensor, labels: Tensor, batch: int) -> tuple[float, float, float]:
        """Add this share's gradients, part by part: its part of the batch's mean loss, hits, and largest residual."""
        targets, smoothing = labels, self.recipe.label_smoothing
        if self.mixer is not None:
            images, targets = self.mixer(images, labels, seed=self.seed, step=self.progress.step)
            smoothing = 0.0  # the mixed labels are smoothed already
        loss = torch.zeros((), dtype=torch.float64, device=images.device)
        correct = torch.zeros((), dtype=torch.int64, device=images.device)
        residual: float | None = None
        parts = min(self.recipe.accumulation, len(labels))
        for part, part_targets in zip(images.tensor_split(parts), targets.tensor_split(parts), strict=True):
            logits = self.arithmetic.forward(self.model, part)
            part_loss = cross_entropy(logits, part_targets, label_smoothing=smoothing) * (len(part) / batch)
            self.scaler.scale(part_loss).backward()
            loss += part_loss.detach()
            likeliest = part_targets if part_targets.dim() == 1 else part_targets.argmax(1)
            correct += (logits.detach().argmax(1) == likeliest).sum()
            residual = worse(residual, solver_residuals(self.model))
        return float(loss), float(correct), NO_RESIDUAL if residual is None else residual

    def _leave_step_out(self, loss: float, norm: float) -> None:
        """Account for a step that is not finite; UserError where the recipe wants to stop.

        A finite loss whose scaled gradients overflow is how float16 finds its scale, until the scale is 1.
        """
        if self.scaler.is_enabled() and math.isfinite(loss) and self.scaler.get_scale() > 1:
            self.progress.overflowed_steps += 1
        elif self.recipe.non_finite in ("skip", "record"):
            self.progress.skipped_steps += 1
        else:
            what = f"loss {loss} and gradient norm {norm} at step {self.progress.step} (epoch {self.epoch + 1})"
            raise UserError(what, "lower lr, clip the gradient, or set non_finite: skip in the recipe")

    def _validate(self, model: nn.Module) -> Score:
        seed_everything(derive_seed(self.seed, "evaluation"))
        self.team.copy_from_leader(model.buffers())  # statistics of batch norms follow the leader's share
        score = validate(model, self.val_batches, arithmetic=self.arithmetic, team=self.team, stop=self.stop)
        expected = self.val_batches.num_images
        if self.recipe.max_eval_images is not None:
            expected = min(expected, self.recipe.max_eval_images)
        if score.n != expected:
            raise ValueError(f"{score.n} images were evaluated, not {expected}")
        return score

    def _stop_if_asked(self) -> None:
        """Raise Interrupted if a signal has come; of several processes, once all know of it and at the same step."""
        number = self._asked_to_stop if self.team.size > 1 else self.stop.number
        if number:
            raise Interrupted(number)

    def _compare_weights(self) -> None:
        """UserError if the weights of the processes have drifted apart."""
        if self.team.size == 1:
            return
        sums = [
            row[0] for row in self.team.gather([float(sum(p.detach().double().sum() for p in self.model.parameters()))])
        ]
        if any(other != sums[0] for other in sums):
            raise UserError(
                f"the processes hold different weights after step {self.progress.step}",
                "run all of them on processors of one kind; the last checkpoint is kept",
            )

    def _write_weights(self) -> None:
        """weights.safetensors: the averaged weights."""
        state = self.average.module.state_dict()
        weights = {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
        with write_aside(self.run_dir / "weights.safetensors", "wb") as stream:
            stream.write(safetensors.torch.save(weights, {"format": "pt"}))

    def _identity(self) -> dict[str, Any]:
        """What must not change between the parts of a run."""
        kept = {"threads": self.threads, "seed": self.seed, "device": self.device, "digest": self.info.get("digest")}
        kept["world_size"] = self.team.size
        kept |= {"torch": str(torch.__version__), "steps_per_epoch": self.steps_per_epoch}
        for split, batches in (("train", self.train_batches), ("val", self.val_batches)):
            described = batches.describe()
            kept |= {f"{split} {fact}": described.get(fact) for fact in _DATA_IDENTITY}
        return {**kept, **asdict(self.recipe)}

    def _note_what_ran(self, ran: dict[str, str]) -> None:
        """Add what ran here to what ran before an interruption and in other processes: a change of it must show."""
        for operator, what in ran.items():
            parts = dict.fromkeys([*filter(None, self.progress.ran.get(operator, "").split(" + ")), *what.split(" + ")])
            self.progress.ran[operator] = " + ".join(sorted(parts))

    def _say(self, text: str) -> None:
        if self.team.leads:
            say(text)

    def _write_history(self) -> None:
        if not self.team.leads:
            return
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


def _checkpoint_activations(model: nn.Module) -> None:
    """Have the model run its blocks again in the backward pass; UserError if it does not know how."""
    switch = getattr(model, "set_grad_checkpointing", None)
    if switch is None:
        raise UserError(
            f"{type(model).__name__} cannot checkpoint its activations",
            "set activation_checkpointing: false in the recipe, or give the model a set_grad_checkpointing(enable)",
        )
    switch(True)
