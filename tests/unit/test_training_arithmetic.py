"""Memory layout, precision and the cutting of batches change how a run is computed, not what it computes."""

import json
import math
import signal
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from attngeo.errors import UserError
from attngeo.training import arithmetic
from attngeo.training.arithmetic import Arithmetic
from attngeo.training.display import EpochBar
from attngeo.training.interruption import Interrupted, Interruption
from tests.tolerances import AUTOCAST_AGREEMENT, SHARED_BATCH_LOSS
from tests.unit.test_training_resume import results
from tests.unit.test_training_team import assert_same_gradients
from tests.unit.training_support import MemoryBatches, TinyModel, stop_at, tiny_recipe, train_tiny
from tests.unit.training_team import Independent, uneven


def weights(folder: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(folder / "run/weights.safetensors")


@pytest.mark.parametrize("accumulation", [2, 3, 7])
def test_a_batch_cut_into_parts_trains_as_the_whole_does(tmp_path: Path, accumulation: int) -> None:
    whole = uneven(tmp_path / "whole", tiny_recipe(epochs=1), None)
    parts = uneven(tmp_path / "parts", tiny_recipe(epochs=1, accumulation=accumulation), None)
    assert parts["accumulation"] == accumulation
    assert parts["steps"] == whole["steps"] == 4
    assert_same_gradients(tmp_path / "whole", tmp_path / "parts")
    assert parts["loss"] == pytest.approx(whole["loss"], rel=SHARED_BATCH_LOSS)


def test_recomputed_activations_give_the_same_bits_with_drop_path_and_accumulation(tmp_path: Path) -> None:
    for name, again in (("kept", False), ("again", True)):
        recipe = tiny_recipe(epochs=1, activation_checkpointing=again, accumulation=2)
        final = train_tiny(tmp_path / name, model=Independent(drop_path=0.5), recipe=recipe)
        assert final["activation_checkpointing"] is again
    kept, again = weights(tmp_path / "kept"), weights(tmp_path / "again")
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_a_model_that_cannot_recompute_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="TinyModel cannot checkpoint its activations"):
        train_tiny(tmp_path, recipe=tiny_recipe(activation_checkpointing=True))


def test_images_and_convolutions_are_laid_out_channels_last(tmp_path: Path) -> None:
    strides: list[bool] = []

    class Watching(TinyModel):
        def forward(self, images: Tensor) -> Tensor:
            strides.append(images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous())
            return super().forward(images)

    last = train_tiny(tmp_path / "last", model=Watching(), recipe=tiny_recipe(epochs=1, channels_last=True))
    assert strides
    assert all(strides)
    assert last["channels_last"] is True
    assert train_tiny(tmp_path / "first", recipe=tiny_recipe(epochs=1))["channels_last"] is False
    expected = weights(tmp_path / "first")
    assert weights(tmp_path / "last").keys() == expected.keys()


@pytest.mark.parametrize(
    "changes", [{"channels_last": True}, {"accumulation": 2}, {"autocast": "bfloat16"}, {"autocast": "float16"}]
)
def test_a_stopped_run_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr(arithmetic, "FLOAT16_DEVICES", ("cpu", "cuda"))
    recipe = tiny_recipe(**changes)
    train_tiny(tmp_path / "whole", recipe=recipe)
    with pytest.raises(Interrupted):
        train_tiny(tmp_path / "parts", recipe=recipe, on_batch=stop_at(1, 3))
    train_tiny(tmp_path / "parts", recipe=recipe)
    assert results(tmp_path / "parts") == results(tmp_path / "whole")


def test_float16_is_refused_on_a_cpu_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="autocast float16 needs a GPU, and the run is on cpu"):
        train_tiny(tmp_path, recipe=tiny_recipe(autocast="float16"))


class Limited(TinyModel):
    """Scaled gradients above a limit overflow, as those above 65504 do in float16."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        if self.training:
            logits.register_hook(lambda gradient: gradient.where(gradient.abs() <= self.limit, torch.inf))
        return logits


def test_the_scale_of_the_loss_falls_until_gradients_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "FLOAT16_DEVICES", ("cpu",))
    final = train_tiny(tmp_path, model=Limited(1e3), recipe=tiny_recipe(autocast="float16"))
    assert 1 <= final["overflowed_steps"] <= 8  # the scale begins at 2^16 and is halved each time
    assert (final["skipped_steps"], final["steps"], final["autocast"]) == (0, 21, "float16")
    assert math.isfinite(final["loss"])


def test_gradients_that_no_scale_saves_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "FLOAT16_DEVICES", ("cpu",))
    long_epoch = MemoryBatches(7 * 18, 7, shuffle=True)
    with pytest.raises(UserError, match=r"gradient norm (nan|inf) at step 16"):  # after the scales 2^16 .. 2
        train_tiny(tmp_path, model=Limited(0.0), recipe=tiny_recipe(autocast="float16"), batches=long_epoch)


def test_kernels_and_solver_run_in_float32_whatever_the_precision() -> None:
    images, _ = next(iter(MemoryBatches(7, 7, shuffle=False)))
    model = Independent().eval()
    exact = Arithmetic().forward(model, images)
    half = Arithmetic(autocast="bfloat16").forward(model, images)
    assert half.dtype == torch.float32
    assert not torch.equal(half, exact)
    torch.testing.assert_close(half, exact, rtol=AUTOCAST_AGREEMENT, atol=AUTOCAST_AGREEMENT)
    residuals = [block.attention.solver_residual for stage in model.pyramid.stages for block in stage.blocks]
    assert {residual.dtype for residual in residuals} == {torch.float32}


def test_65_images_in_batches_of_64_and_batches_of_one_train_with_mixing(tmp_path: Path) -> None:
    for size in (64, 1):
        final = train_tiny(
            tmp_path / str(size),
            recipe=tiny_recipe(batch_size=size, epochs=1),
            batches=MemoryBatches(65, size, shuffle=True),
            val_batches=MemoryBatches(65, 64, shuffle=False),
        )
        assert (final["steps"], final["n_eval"]) == (65 // size, 65)


def test_a_second_signal_is_the_same_wish_at_first_and_an_order_later(monkeypatch: pytest.MonkeyPatch) -> None:
    # Python's own handler, which it does not set where a shell's background job is told to ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Interruption() as stop:
            assert stop.number == 0
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
            assert stop.number == signal.SIGINT
            later = time.monotonic() + 60
            monkeypatch.setattr(time, "monotonic", lambda: later)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_tells_loss_accuracy_speed_and_time_left() -> None:
    terminal = Terminal()
    with EpochBar(1, 3, images=1000, done=200, shown=True, stream=terminal) as bar:
        time.sleep(0.15)
        bar.advance(100, 1.23456, 45.6)
    shown = terminal.getvalue()
    for words in ("epoch 2/3", "300/1.00k", "img/s", "loss 1.2346", "top-1 45.6 %", "run ends in 0:00:0"):
        assert words in shown


@pytest.mark.parametrize(("stream", "shown"), [(StringIO(), True), (Terminal(), False)])
def test_without_a_terminal_or_beside_the_leader_there_is_no_bar(stream: StringIO, shown: bool) -> None:
    with EpochBar(0, 1, images=10, done=0, shown=shown, stream=stream) as bar:
        bar.advance(10, 1.0, 50.0)
    assert stream.getvalue() == ""


def test_without_a_terminal_there_is_one_line_an_epoch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train_tiny(tmp_path)
    out, err = capfd.readouterr()
    assert [line.split("  ")[0] for line in out.splitlines()] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert "img/s" in out
    assert err == ""
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(0 <= line["train_top1"] <= 100 for line in lines)
