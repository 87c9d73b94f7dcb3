"""Two processes never lease the same GPU, and a GPU is free again when its process has ended."""

import multiprocessing
import os
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from attngeo import gpu_lease
from attngeo.errors import UserError


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that shows two GPUs: only the list of devices is a stand-in, the locks are real."""
    monkeypatch.setattr(gpu_lease, "gpu_indices", lambda: [0, 1])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(gpu_lease.VISIBLE, raising=False)


def _lease(answer: Connection, hold: Connection) -> None:
    os.environ.pop(gpu_lease.VISIBLE, None)
    answer.send(gpu_lease.lease_gpu(wait_s=5, poll_s=0.05))
    hold.recv()


def test_processes_get_different_gpus_and_leave_them_free() -> None:
    context = multiprocessing.get_context("fork")
    started = []
    for _ in range(2):
        answer, answer_child = context.Pipe()
        hold, hold_child = context.Pipe()
        process = context.Process(target=_lease, args=(answer_child, hold_child))
        process.start()
        started.append((process, hold, answer.recv()))
    assert {index for _, _, index in started} == {"0", "1"}
    with pytest.raises(UserError, match="got free"):
        gpu_lease.lease_gpu(wait_s=0.1, poll_s=0.02)
    process, hold, index = started[0]
    process.kill()
    process.join()
    assert gpu_lease.lease_gpu(wait_s=5, poll_s=0.02) == index
    started[1][1].send(None)
    started[1][0].join()


def test_a_scheduler_that_chose_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpu_lease.VISIBLE, "5")
    assert gpu_lease.lease_gpu() == "5"


def test_no_gpu_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lease, "gpu_indices", list)
    with pytest.raises(UserError, match="device: cpu"):
        gpu_lease.lease_gpu()
