"""The DAG trains our own decoders and analyses every step that they keep."""

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
