"""Latency and memory of one image at a time."""

import os
import signal
from pathlib import Path

import pandas as pd
import pytest

from attngeo.errors import UserError
from attngeo.evaluation import edge
from attngeo.paper.tables import edge as table
from tests.unit import paper_results


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_every_model_is_measured_alone_and_says_what_ran() -> None:
    kinds = ("softmax", "laplacian")
    found = list(edge.suite({"nano": (16, 32)}, kinds, repeats=4, seconds=0.01))
    frame = pd.DataFrame([row for rows in found for row in rows])
    assert [(rows[0]["image_size"], rows[0]["attention"]) for rows in found] == [
        (pixels, kind) for pixels in (16, 32) for kind in kinds
    ]
    latency = frame[frame["metric"] == "latency_ms"]
    assert (latency["value"] > 0).all()
    assert latency["n"].between(3, 4).all()
    assert (latency["spread"] >= 0).all()
    ran = dict(zip(latency["attention"], latency["backend"], strict=True))
    assert ran["softmax"] == ""
    assert "laplacian_kernel: " in ran["laplacian"]
    memory = frame[frame["metric"] == "memory_mib"]["value"]
    assert (memory.isna() | (memory < 200)).all()
    gmac = frame[frame["metric"] == "gmac"].set_index(["attention", "image_size"])["value"]
    assert (gmac[:, 32] > gmac[:, 16]).all()


def test_a_process_that_is_killed_names_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "measure", die)
    with pytest.raises(UserError, match="nano with softmax at 32 px was killed"):
        list(edge.suite({"nano": (32,)}, ("softmax",), repeats=3, seconds=0.1))


def test_the_table_keeps_the_order_of_the_measurements(tmp_path: Path) -> None:
    made = table.tabulate([paper_results.write_edge(tmp_path / "demo")])
    assert list(zip(made.frame["image (px)"], made.frame["attention"], strict=True)) == [
        (64, "softmax"),
        (64, "laplacian"),
        (32, "softmax"),
        (32, "laplacian"),
    ]
    assert list(made.frame["latency (ms)"]) == [128.0, 64.0, 64.0, 32.0]
    assert "n = 50 passes" in made.caption
