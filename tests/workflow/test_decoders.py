"""The DAG trains our own decoders and analyses every step that they keep; and what its jobs ask for."""

import json
import re

import pytest

from tests.workflow.project_copy import ProjectCopy

pytestmark = [pytest.mark.workflow, pytest.mark.timeout(300)]


def test_every_kept_step_of_every_decoder_is_analysed(fresh: ProjectCopy) -> None:
    jobs = fresh.planned("--config preset=smoke")
    assert sum(job.startswith("train_decoder") for job in jobs) == 1
    for step in (0, 2, 6):
        assert any(job.startswith("connection_walk") and f"decoder-6k-s0-step{step}.json" in job for job in jobs), step
    paths = [job for job in jobs if job.startswith("trajectories") and "decoder-" in job]
    assert len(paths) == 1, "figure 17 shows the last step"
    assert "decoder-6k-s0-step6.json" in paths[0]


def resources_of(fresh: ProjectCopy, changed: dict[str, object]) -> dict[str, str]:
    """Threads and resources that a dry run of the preset smoke prints for one job of each rule."""
    done = fresh.run(
        "snakemake -n --cores 32 --resources gpu=8 mem_mb=90000 --config preset=smoke "
        f"'resources={json.dumps(changed)}' -- all"
    )
    asked: dict[str, str] = {}
    rule = ""
    for line in (done.stdout + done.stderr).splitlines():
        if line.startswith("rule "):
            rule = line.split()[1].rstrip(":")
            asked[rule] = ""
        elif line.strip().startswith(("threads:", "resources:")) and rule:
            asked[rule] += line.strip() + "\n"
    return asked


def test_only_a_training_by_several_processes_takes_several_gpus(fresh: ProjectCopy) -> None:
    wanted = {"threads": 1, "gpu": 3, "processes": 3, "mem_mb": 1000, "runtime": 10, "device": "cuda"}
    asked = resources_of(fresh, {"train": wanted})
    assert "gpu=3" in asked["train"]
    assert "gpu=1" in asked["train_decoder"]


def test_what_packing_asks_for_is_asked_by_packing_alone(fresh: ProjectCopy) -> None:
    asked = resources_of(fresh, {"prepare": {"threads": 16, "mem_mb": 32000, "runtime": 600}})
    assert "threads: 16" in asked["pack"]
    assert "mem_mb=32000" in asked["pack"]
    for rule in ("extension", "tracking_store", "fetch"):
        assert "threads" not in asked[rule]
        assert int(re.search(r"mem_mb=(\d+)", asked[rule])[1]) <= 3000  # type: ignore[index]
