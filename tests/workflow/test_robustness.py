"""What goes wrong on other people's machines: a job that lies, no display, too few cores or GPUs, a full disk."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from attngeo.config import load_preset
from tests.workflow.project_copy import ProjectCopy, copy_project
from tests.workflow.test_interruption import mount_tmpfs

pytestmark = [pytest.mark.workflow, pytest.mark.network, pytest.mark.timeout(1200)]

needs_root = pytest.mark.skipif(
    os.environ.get("ATTNGEO_ALLOW_SYSTEM_TESTS") != "1" or os.getuid() != 0,
    reason="mounts file systems: needs root and ATTNGEO_ALLOW_SYSTEM_TESTS=1, which .ci/run sets",
)


def edit_rule(copy: ProjectCopy, file: str, command: str, instead: str) -> None:
    rules = copy.root / "workflow/rules" / file
    text = rules.read_text()
    assert command in text, f"{command!r} not in {file}"
    rules.write_text(text.replace(command, instead, 1))


@pytest.mark.parametrize(
    ("instead", "said"),
    [
        ("true # attngeo analyze variational", "MissingOutputException"),
        ("kill -9 $$; attngeo analyze variational", "exit status 137"),
    ],
)
def test_a_job_that_is_killed_or_ends_well_without_its_output_fails_with_its_log_named(
    fresh: ProjectCopy, instead: str, said: str
) -> None:
    edit_rule(fresh, "variational.smk", "attngeo analyze variational", instead)
    target = "results/smoke/analyses/variational.json"
    done = fresh.run(f"snakemake --cores 1 --latency-wait 1 --config preset=smoke -- {target}", check=False)
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert "results/smoke/logs/variational.log" in output
    assert said in output or "Killed" in output, output[-3000:]
    assert not (fresh.root / target).exists()


def test_figures_are_drawn_without_a_display_and_without_a_home(fresh: ProjectCopy) -> None:
    fresh.run("attngeo analyze variational --preset smoke")
    fresh.run("env -u DISPLAY MPLBACKEND=TkAgg HOME=/nonexistent attngeo figure 16 --preset smoke")
    assert (fresh.root / "results/smoke/figures/fig16.pdf").stat().st_size > 0


def test_a_job_asks_for_more_memory_and_time_at_each_attempt_and_computes_with_its_rules_threads(
    fresh: ProjectCopy,
) -> None:
    failing = "echo threads $OMP_NUM_THREADS memory {resources.mem_mb} minutes {resources.runtime} >> asked; false #"
    edit_rule(fresh, "variational.smk", "attngeo analyze variational", failing)
    edit_rule(fresh, "benchmark.smk", "attngeo benchmark tokens", failing.replace("$OMP_NUM_THREADS", "1"))
    most = load_preset(fresh.root, "smoke").token_benchmark_mb
    for cores, target, memory in (
        (1, "analyses/variational.json", 1500),
        (8, "analyses/variational.json", 1500),
        (1, "benchmarks/tokens.json", most),
    ):
        (fresh.root / "asked").unlink(missing_ok=True)
        command = f"snakemake --cores {cores} --retries 2 --resources mem_mb=90000 gpu=1 --config preset=smoke"
        fresh.run(f"{command} -- results/smoke/{target}", check=False)
        asked = (fresh.root / "asked").read_text().splitlines()
        assert asked == [f"threads 1 memory {memory * n} minutes {10 * n}" for n in (1, 2, 3)], f"{target}, {cores}"


@needs_root
def test_a_workflow_whose_disk_is_full_goes_on_when_there_is_space(tmp_path: Path) -> None:
    copy = copy_project(tmp_path / "attn geo")
    results = copy.root / "results"
    command = "snakemake --cores 1 --config preset=smoke -- results/smoke/runs/textile-laplacian-s0/final.json"
    mount_tmpfs(results, "size=3m")  # less than the packed images and the tracking store
    try:
        full = copy.run(command, check=False, timeout=900)
        output = full.stdout + full.stderr
        assert full.returncode != 0
        assert re.search("No space left on device|could not write", output), output[-4000:]
        assert "remedy: make space" in output
        assert "Traceback" not in output, output[-4000:]
        for path in results.rglob("*.json"):
            json.loads(path.read_text())
        assert not (results / "smoke/data/textile/manifest.json").exists()
        subprocess.run(["mount", "-o", "remount,size=200m", str(results)], check=True)
        copy.run(command, timeout=900)
        final = json.loads((results / "smoke/runs/textile-laplacian-s0/final.json").read_text())
        assert final["status"] == "FINISHED"
        left = [path.name for path in results.rglob("*.aside*")]
        assert left == [], "parts of files remain"
    finally:
        subprocess.run(["umount", "-l", str(results)], check=True)
    shutil.rmtree(copy.root, ignore_errors=True)


@pytest.mark.soak
def test_two_trainings_that_want_the_gpu_never_run_at_once_on_a_machine_with_one(fresh: ProjectCopy) -> None:
    watched = "{{ echo begin >> order; {params.command} train"
    rules = fresh.root / "workflow/rules/train.smk"
    text = rules.read_text().replace('"{params.command} train', f'"{watched}')
    text = text.replace("> {log} 2>&1", "> {log} 2>&1; echo end >> order; }}")
    rules.write_text(text)
    resources = json.dumps({"train": {"threads": 1, "gpu": 1, "mem_mb": 1000, "runtime": 10, "device": "cpu"}})
    runs = [f"results/smoke/runs/fashion-{kind}-s0/final.json" for kind in ("softmax", "laplacian")]
    fresh.run(f"snakemake --cores 8 --config preset=smoke 'resources={resources}' -- {' '.join(runs)}", timeout=900)
    order = (fresh.root / "order").read_text().split()
    assert order == ["begin", "end", "begin", "end"]
