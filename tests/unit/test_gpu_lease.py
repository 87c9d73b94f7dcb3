"""Two processes never lease the same GPU, and a GPU is free again when its process has ended."""

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from attngeo import cli, gpu_lease
from attngeo.cli.common import use_device
from attngeo.errors import UserError
from attngeo.gpu_lease import SCHEDULED, VISIBLE, lease_gpu


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that shows two GPUs: only the list of devices is a stand-in, the locks are real."""
    show(monkeypatch, [0, 1])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(gpu_lease, "_held", {})
    monkeypatch.delenv(SCHEDULED, raising=False)
    # Set first, so that what the lease sets is undone as well.
    monkeypatch.setenv(VISIBLE, "")
    monkeypatch.delenv(VISIBLE)


def show(monkeypatch: pytest.MonkeyPatch, numbers: list[int], uuids: dict[str, int] | None = None) -> None:
    monkeypatch.setattr(gpu_lease, "device_numbers", lambda: numbers)
    monkeypatch.setattr(gpu_lease, "device_uuids", lambda: uuids or {})


def _lease(answer: Connection, hold: Connection) -> None:
    answer.send(lease_gpu(wait_s=5, poll_s=0.05))
    hold.recv()


@contextmanager
def another_process() -> Iterator[tuple[multiprocessing.process.BaseProcess, str]]:
    """A process that leased a GPU under the present environment and holds it, and the GPU's name."""
    context = multiprocessing.get_context("fork")
    answer, answer_child = context.Pipe()
    hold, hold_child = context.Pipe()
    process = context.Process(target=_lease, args=(answer_child, hold_child))
    process.start()
    try:
        yield process, answer.recv()
    finally:
        if process.is_alive():
            hold.send(None)
        process.join()


def impatient() -> str:
    return lease_gpu(wait_s=0.1, poll_s=0.02)


def test_processes_get_different_gpus_and_leave_them_free() -> None:
    with another_process() as (first, one), another_process() as (_, two):
        assert {one, two} == {"0", "1"}
        with pytest.raises(UserError, match="got free"):
            impatient()
        first.kill()
        first.join()
        assert lease_gpu(wait_s=5, poll_s=0.02) == one


def test_a_process_that_asks_again_keeps_its_gpu() -> None:
    assert impatient() == "0"
    assert os.environ[VISIBLE] == "0"
    assert impatient() == "0"


def test_a_container_that_shows_only_the_sixth_gpu_calls_it_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, [5])
    assert impatient() == "0"


def test_containers_that_share_a_folder_wait_only_for_the_same_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, [5])
    with another_process() as (_, name):
        assert name == "0"
        with pytest.raises(UserError, match="got free"):
            impatient()
        show(monkeypatch, [6])
        assert impatient() == "0"


def test_of_several_gpus_that_are_listed_each_process_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, [0, 1, 2, 3])
    monkeypatch.setenv(VISIBLE, "2, GPU-f00,2")
    with another_process() as (_, name):
        assert name == "2"
        assert impatient() == "GPU-f00"
        assert os.environ[VISIBLE] == "GPU-f00"


def test_a_single_gpu_is_shared_by_nobody_under_any_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, [3, 5], {"GPU-abc-1": 3, "GPU-abd-2": 5})
    monkeypatch.setenv(VISIBLE, "1")
    with another_process() as (process, name):
        assert name == "1"
        for same in ("1", "GPU-abd"):
            monkeypatch.setenv(VISIBLE, same)
            with pytest.raises(UserError, match="got free"):
                impatient()
        process.kill()
        process.join()
        assert impatient() == "GPU-abd"


def test_a_single_gpu_that_a_scheduler_chose_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "0")
    with another_process():
        monkeypatch.setenv(SCHEDULED, "77")
        assert impatient() == "0"


def test_of_several_that_a_scheduler_gave_the_processes_of_that_job_take_one_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VISIBLE, "0,1")
    monkeypatch.setenv(SCHEDULED, "77")
    with another_process() as (_, name):
        assert name == "0"
        assert impatient() == "1"
        monkeypatch.setenv(VISIBLE, "0,1")
        monkeypatch.setenv(SCHEDULED, "78")
        assert impatient() == "0", "two jobs may call different GPUs by one name"


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles", " ", "-1,0"])
def test_a_value_that_hides_every_gpu_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(VISIBLE, value)
    for job in ("", "77"):
        monkeypatch.setenv(SCHEDULED, job)
        with pytest.raises(UserError, match="device: cpu") as told:
            impatient()
        assert repr(value) in str(told.value)


def test_no_gpu_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, [])
    with pytest.raises(UserError, match="device: cpu"):
        impatient()


@pytest.mark.parametrize(("cuda", "built"), [(None, "built without CUDA"), ("13.0", "built for CUDA 13.0")])
def test_a_gpu_that_torch_cannot_use_is_an_error_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, built: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=rf"{built}[\s\S]*TORCH_INDEX[\s\S]*device: cpu"):
        use_device("cuda", torch.get_num_threads())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    use_device("cuda", torch.get_num_threads())
    assert os.environ[VISIBLE] == "0"


def test_a_gpu_without_memory_is_two_lines_and_every_other_error_is_raised(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(error: Exception) -> None:
        def app() -> None:
            raise error

        monkeypatch.setattr(cli, "app", app)

    failing(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "attngeo: error: the GPU has too little memory: CUDA out of memory. Tried to allocate 2.00 GiB."
    for key in ("accumulation", "activation_checkpointing", "batch_size", "processes", "--batch-size"):
        assert key in told[1]
    failing(RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        cli.main()
