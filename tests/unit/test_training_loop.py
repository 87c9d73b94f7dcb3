"""Laws of one training run that is left alone."""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from attngeo.errors import UserError
from attngeo.ops.newton_schulz import CONVERGED_RESIDUAL
from attngeo.training.arithmetic import Arithmetic
from attngeo.training.distributed import ALONE
from attngeo.training.interruption import Interruption
from attngeo.training.mixing import Mixer
from attngeo.training.optimization import make_average, make_optimizer, make_schedule
from attngeo.training.sharing import evaluation_share
from attngeo.training.validation import validate, worse
from tests.tolerances import AVERAGE_RELATIVE, MIXED_IMAGE_ABSOLUTE, SCHEDULE_RELATIVE
from tests.unit.training_support import CLASSES, SEED, MemoryBatches, TinyModel, tiny_model, tiny_recipe, train_tiny


def test_two_runs_of_one_seed_have_the_same_bits(tmp_path: Path) -> None:
    for name in ("first", "second"):
        train_tiny(tmp_path / name)
    assert (tmp_path / "first/run/weights.safetensors").read_bytes() == (
        tmp_path / "second/run/weights.safetensors"
    ).read_bytes()


def test_the_files_of_a_run_tell_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    final = train_tiny(tmp_path)
    assert "solver not converged: residual" in capsys.readouterr().out
    assert json.loads((tmp_path / "run/final.json").read_text()) == final
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    assert [line["images_seen"] for line in lines] == [49, 98, 147]  # 53 images: 7 batches of 7, 4 images left over
    assert lines[-1]["val_top1"] == final["accuracy"]
    assert final["n_eval"] == 23
    assert final["solver_residual_max"] >= max(line["solver_residual_max"] for line in lines)
    for line in (*lines, final):
        assert line["solver_converged"] == (line["solver_residual_max"] <= CONVERGED_RESIDUAL)
    assert not (tmp_path / "scratch").exists()


def test_the_weights_written_are_the_weights_evaluated(tmp_path: Path) -> None:
    final = train_tiny(tmp_path)
    model = tiny_model()
    model.load_state_dict(safetensors.torch.load_file(tmp_path / "run/weights.safetensors"))
    score = validate(model, MemoryBatches(23, 11, shuffle=False), arithmetic=Arithmetic(), stop=Interruption())
    assert (score.accuracy, score.loss, score.n) == (final["accuracy"], final["loss"], 23)


def test_separable_classes_are_learned(tmp_path: Path) -> None:
    final = train_tiny(tmp_path, recipe=tiny_recipe(mixup=0.0, cutmix=0.0, epochs=5))
    assert final["accuracy"] == 100.0


def test_a_run_in_bfloat16_is_close_to_one_in_float32(tmp_path: Path) -> None:
    single = train_tiny(tmp_path / "single")
    half = train_tiny(tmp_path / "half", recipe=tiny_recipe(autocast="bfloat16"))
    assert half["loss"] != single["loss"]
    assert half["loss"] == pytest.approx(single["loss"], rel=0.1)


def test_too_few_images_for_one_batch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="5 training images do not fill a batch of 7"):
        train_tiny(tmp_path, batches=MemoryBatches(5, 7, shuffle=True))


class BlowsUp(TinyModel):
    """Gives NaN in the forward pass of one training step."""

    def __init__(self, at: int | None) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return super().forward(images) * (math.nan if self.training and self.calls - 1 == self.at else 1.0)


def test_a_non_finite_step_can_be_left_out(tmp_path: Path) -> None:
    final = train_tiny(tmp_path, model=BlowsUp(at=9), recipe=tiny_recipe(non_finite="skip"))
    assert final["skipped_steps"] == 1
    assert math.isfinite(final["loss"])


def test_an_epoch_of_non_finite_steps_stops_even_a_run_that_skips_them(tmp_path: Path) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.head.bias.fill_(torch.inf)
    with pytest.raises(UserError, match="all steps of epoch 1 were non-finite"):
        train_tiny(tmp_path, model=model, recipe=tiny_recipe(non_finite="skip"))


def test_a_run_that_only_records_its_divergence_ends_and_says_so(tmp_path: Path) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.head.bias.fill_(torch.inf)
    before = {name: value.clone() for name, value in model.named_parameters()}
    final = train_tiny(tmp_path, model=model, recipe=tiny_recipe(non_finite="record"))
    assert (final["status"], final["skipped_steps"], final["steps"]) == ("DIVERGED", 21, 21)
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert len(lines) == 3
    assert '"train_loss": "NaN"' in lines[0]
    recovered = train_tiny(tmp_path / "other", model=BlowsUp(at=9), recipe=tiny_recipe(non_finite="record"))
    assert (recovered["status"], recovered["skipped_steps"]) == ("FINISHED", 1)


def test_a_loader_shorter_than_its_length_is_an_error(tmp_path: Path) -> None:
    class Short(MemoryBatches):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            yield from list(super().__iter__())[:-1]

    with pytest.raises(ValueError, match="ended epoch 0 at step 6"):
        train_tiny(tmp_path, batches=Short(53, 7, shuffle=True))


def test_a_validation_subset_is_spread_evenly_over_the_set() -> None:
    seen: list[int] = []

    class Watcher(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            seen.extend(int(index) for index in images[:, 0, 0, 0])
            return torch.zeros(len(images), CLASSES)

    batches = MemoryBatches(23, 11, shuffle=False)
    batches.images[:, 0, 0, 0] = torch.arange(23.0)
    options: dict[str, Any] = {"arithmetic": Arithmetic(), "stop": Interruption()}
    score = validate(Watcher(), evaluation_share(batches, 7, ALONE), **options)
    assert score.n == len(seen) == 7
    assert {b - a for a, b in itertools.pairwise(seen)} == {3, 4}
    assert validate(Watcher(), evaluation_share(batches, 99, ALONE), **options).n == 23
    assert math.isnan(validate(Watcher(), MemoryBatches(0, 3, shuffle=False), **options).accuracy)


def test_a_nan_residual_is_the_worst_and_none_is_no_residual() -> None:
    assert worse(None, None) is None
    assert worse(None, 0.5) == worse(0.5, None) == worse(0.5, 0.1) == 0.5
    assert math.isnan(worse(math.nan, 0.5) or 0)
    assert math.isnan(worse(0.5, math.nan) or 0)


@pytest.mark.parametrize("n", [1, 2, 7, 64, 65])
@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_mixing_takes_batches_of_any_size(n: int, mixup: float, cutmix: float) -> None:
    images, labels = torch.randn(n, 3, 8, 8), torch.arange(n) % CLASSES
    before = images.clone()
    mixer = Mixer(tiny_recipe(mixup=mixup, cutmix=cutmix), CLASSES)
    mixed, targets = mixer(images, labels, seed=SEED, step=2)
    assert mixed.shape == images.shape
    assert targets.shape == (n, CLASSES)
    torch.testing.assert_close(targets.sum(1), torch.ones(n), rtol=0, atol=MIXED_IMAGE_ABSOLUTE)
    assert torch.equal(images, before)
    if n % 2:
        assert torch.equal(mixed[-1], images[-1])
        assert targets[-1].argmax() == labels[-1]
    again, _ = mixer(images, labels, seed=SEED, step=2)
    other, _ = mixer(images, labels, seed=SEED, step=3)
    assert torch.equal(mixed, again)
    assert n == 1 or not torch.equal(mixed, other)


def test_the_rate_warms_up_linearly_then_follows_a_half_cosine() -> None:
    recipe = tiny_recipe(epochs=5, warmup_epochs=1.5)
    optimizer = make_optimizer(tiny_model(), recipe)
    schedule = make_schedule(optimizer, recipe, 10)

    def rate(step: int) -> float:
        schedule.step_update(step)
        return optimizer.param_groups[-1]["lr"]

    assert rate(0) == pytest.approx(recipe.min_lr, rel=SCHEDULE_RELATIVE)
    assert rate(9) == pytest.approx(recipe.min_lr + 0.6 * (recipe.lr - recipe.min_lr), rel=SCHEDULE_RELATIVE)
    for step in range(15, 50):
        cosine = 0.5 * (1 + math.cos(math.pi * (step - 15) / 35))
        expected = recipe.min_lr + (recipe.lr - recipe.min_lr) * cosine
        assert rate(step) == pytest.approx(expected, rel=SCHEDULE_RELATIVE)


def test_a_run_of_one_step_has_a_schedule() -> None:
    recipe = tiny_recipe(epochs=1, warmup_epochs=0.9)
    optimizer = make_optimizer(tiny_model(), recipe)
    make_schedule(optimizer, recipe, 1).step_update(0)
    assert optimizer.param_groups[0]["lr"] == recipe.lr


def test_vectors_and_listed_parameters_do_not_decay() -> None:
    class Listed(TinyModel):
        def no_weight_decay(self) -> set[str]:
            return {"head.weight"}

    model = Listed()
    groups = make_optimizer(model, tiny_recipe()).param_groups
    decayed = {id(parameter) for group in groups if group["weight_decay"] > 0 for parameter in group["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in decayed}
    assert names == {"stem.weight", "branch.weight"}


def test_the_average_forgets_the_initial_weights_and_reaches_its_decay() -> None:
    model = nn.Linear(1, 1, bias=False)
    average = make_average(model, tiny_recipe(ema_decay=0.99))
    expected = model.weight.item()
    for update in range(1, 2001):
        with torch.no_grad():
            model.weight.fill_(float(update % 17))
        average.update(model, step=update)
        decay = min(0.99, 1 - 10 / (update - 1 + 10)) if update > 1 else 0.0
        expected = decay * expected + (1 - decay) * (update % 17)
        assert average.module.weight.item() == pytest.approx(expected, rel=AVERAGE_RELATIVE)
