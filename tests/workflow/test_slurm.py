"""The same DAG on Slurm: killed jobs are reported and come again, trainings go on where they were, to the same bits."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import safetensors.numpy

from tests.workflow.project_copy import ProjectCopy, copy_project
from tests.workflow.slurm_cluster import LIMITED, cluster, why_not
from tests.workflow.test_interruption import processes_in, wait_until

pytestmark = [
    pytest.mark.soak,
    pytest.mark.workflow,
    pytest.mark.network,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "can run"),
]

FIRST, SECOND, TOGETHER = "fashion-softmax-s0", "fashion-laplacian-s0", "fashion-gaussian-s0"
STARVED = "fashion-riemannian-s0"
TOO_LITTLE_MB = 500  # for a training and the Snakemake around it; twice as much suffices
QUICK = "--slurm-init-seconds-before-status-checks 2 --seconds-between-status-checks 2 --latency-wait 5"
ON_SLURM = f"snakemake --workflow-profile profiles/slurm {QUICK} --config preset=smoke"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProjectCopy]:
    """A copy on a running cluster, whose trainings are long enough to be killed."""
    base = tmp_path_factory.mktemp("slurm")
    copy = copy_project(base / "attn geo")
    recipe = copy.root / "config/recipes/smoke.yaml"
    recipe.write_text(re.sub(r"(?m)^epochs: .*$", "epochs: 12", recipe.read_text()))
    with cluster(base / "cluster"):
        yield copy
    shutil.rmtree(copy.root, ignore_errors=True)


def result(run: str, name: str = "final.json") -> str:
    return f"results/smoke/runs/{run}/{name}"


@contextmanager
def started(copy: ProjectCopy, command: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A running command whose output goes to a file; ended, where a test fails before it does."""
    with log.open("wb") as stream:
        running = subprocess.Popen(
            f"exec {command}", shell=True, cwd=copy.root, env=copy.environment(), stdout=stream, stderr=stream
        )
    try:
        yield running
    finally:
        if running.poll() is None:
            running.kill()
            running.wait()


def trainings(copy: ProjectCopy, run: str) -> list[psutil.Process]:
    """The Python processes that train a run."""
    found = []
    for process in processes_in(copy.root):
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if {"train", run} <= set(words) and "python" in Path(words[0]).name:
            found.append(process)
    return found


def has_checkpoint(copy: ProjectCopy, run: str) -> bool:
    return any((copy.root / "results/smoke/.scratch").glob(f"{run}-*/checkpoint-*.pt"))


def job_of(text: str, rule: str, wildcard: str) -> str:
    """Slurm's number of the newest job of a rule, from what the executor said."""
    found = re.findall(
        rf"(?m)^Job \d+ has been submitted with SLURM jobid (\d+) \(log: .*rule_{rule}.*{wildcard}.*\)", text
    )
    assert found, text[-4000:]
    return str(found[-1])


def test_a_killed_job_is_reported_with_its_logs_and_the_others_go_on(project: ProjectCopy, tmp_path: Path) -> None:
    log = tmp_path / "snakemake.log"
    with started(project, f"{ON_SLURM} --retries 0 -- {result(FIRST)} {result(SECOND)}", log) as running:
        wait_until(lambda: has_checkpoint(project, FIRST) and trainings(project, FIRST), 600, "a checkpoint")
        for process in trainings(project, FIRST):
            process.kill()  # as the kernel does when memory is short
        assert running.wait(timeout=600) != 0
    text = log.read_text()
    assert re.search(r"SLURM-job '\d+' failed, SLURM status is: 'FAILED'", text), text[-4000:]
    assert f"results/smoke/logs/train/{FIRST}.log" in text, "the job's own log is not named"
    assert re.search(r"slurm_logs/.*\.log", text), "Slurm's log is not named"
    assert not (project.root / result(FIRST)).exists()
    assert json.loads((project.root / result(SECOND)).read_text())["status"] == "FINISHED"
    assert has_checkpoint(project, FIRST), "the checkpoint must outlive the job"


def test_a_cancelled_job_comes_again_with_more_memory_and_ends_with_the_same_bits(
    project: ProjectCopy, tmp_path: Path
) -> None:
    log = tmp_path / "snakemake.log"
    with started(project, f"{ON_SLURM} -- {result(FIRST)}", log) as running:
        wait_until(lambda: trainings(project, FIRST), 300, "the job to start")
        first = job_of(log.read_text(), "train", FIRST)
        subprocess.run(["scancel", first], check=True)
        assert running.wait(timeout=600) == 0, log.read_text()[-4000:]
    text = log.read_text()
    assert f"SLURM-job '{first}' failed, SLURM status is: 'CANCELLED'" in text
    second = job_of(text, "train", FIRST)
    assert second != first
    asked = [
        re.search(r"MinMemoryNode=(\S+)", subprocess.check_output(["scontrol", "show", "job", job], text=True))
        for job in (first, second)
    ]
    assert [found and found[1] for found in asked] == ["1000M", "2000M"]
    assert json.loads((project.root / result(FIRST)).read_text())["resumed"] >= 1
    resumed = safetensors.numpy.load_file(project.root / result(FIRST, "weights.safetensors"))
    shutil.rmtree((project.root / result(FIRST)).parent)
    project.run(f"attngeo train {FIRST} --preset smoke --threads 1")
    undisturbed = safetensors.numpy.load_file(project.root / result(FIRST, "weights.safetensors"))
    assert resumed.keys() == undisturbed.keys()
    assert all((resumed[name] == undisturbed[name]).all() for name in resumed)


@pytest.mark.skipif(not LIMITED, reason="no control groups of the first form, by which Slurm would limit memory")
def test_a_job_out_of_memory_is_reported_and_comes_again_with_twice_as_much(
    project: ProjectCopy, tmp_path: Path
) -> None:
    resources = json.dumps({"train": {"threads": 1, "mem_mb": TOO_LITTLE_MB, "runtime": 10, "device": "cpu"}})
    log = tmp_path / "snakemake.log"
    with started(project, f"{ON_SLURM} 'resources={resources}' -- {result(STARVED)}", log) as running:
        assert running.wait(timeout=600) == 0, log.read_text()[-4000:]
    text = log.read_text()
    starved, _ = re.findall(rf"(?m)^Job \d+ has been submitted with SLURM jobid \d+ \(log: (.*{STARVED}.*)\)", text)
    assert "oom-kill" in Path(starved).read_text(), "Slurm's log, which the report names, does not say why"
    assert text.count(starved) > 1, "the report does not name Slurm's log"
    assert json.loads((project.root / result(STARVED)).read_text())["status"] == "FINISHED"


def test_two_processes_of_a_training_share_a_job_with_two_gpus(project: ProjectCopy, tmp_path: Path) -> None:
    wanted = {"threads": 1, "processes": 2, "gpu": 2, "mem_mb": 1500, "runtime": 10, "device": "cpu"}
    log = tmp_path / "snakemake.log"
    resources = json.dumps({"train": wanted, "analyze": {"mem_mb": 1500, "runtime": 10}})
    with started(project, f"{ON_SLURM} 'resources={resources}' -- {result(TOGETHER)}", log) as running:
        assert running.wait(timeout=600) == 0, log.read_text()[-4000:]
    job = subprocess.check_output(["scontrol", "show", "job", job_of(log.read_text(), "train", TOGETHER)], text=True)
    assert "Partition=gpu" in job
    assert "gres/gpu=2" in job or "TresPerJob=gres:gpu:2" in job, job
    assert "NumNodes=1" in job
    assert json.loads((project.root / result(TOGETHER)).read_text())["world_size"] == 2
