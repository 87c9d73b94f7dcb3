"""Twenty kills at random moments leave what an undisturbed run leaves, in a folder with a difficult name."""

import json
import random
import shutil
import signal
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import safetensors.numpy

from tests.workflow.project_copy import ProjectCopy, copy_project
from tests.workflow.test_interruption import processes_in, wait_until

pytestmark = [pytest.mark.soak, pytest.mark.workflow, pytest.mark.network, pytest.mark.timeout(7200)]

KILLS, SEED = 20, 20
PRESET = "killed"
COMMAND = f"python tools/reproduce.py --preset {PRESET} --cores 2"
CONFIG = """\
description: two trainings, a figure and a table
expected: a minute
datasets:
  fashion-mnist: {source: embedded, storage: arrays}
figures: [fig2]
tables: [tab1]
resources:
  train: {threads: 1, mem_mb: 1000, runtime: 10, device: cpu}
  draw: {mem_mb: 700, runtime: 10}
"""
RUNS = """\
run_id model dataset recipe seed feeds
softmax softmaxformer_nano fashion-mnist killed 0 tab1,fig2
laplacian laplacianformer_nano fashion-mnist killed 0 tab1,fig2
"""


@pytest.fixture
def project(tmp_path: Path) -> Iterator[ProjectCopy]:
    copy = copy_project(tmp_path / 'it\'s a "difficult" näme 名')
    folder = copy.root / "config" / PRESET
    folder.mkdir()
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "runs.tsv").write_text(RUNS.replace(" ", "\t"))
    recipe = (copy.root / "config/recipes/smoke.yaml").read_text()
    (copy.root / "config/recipes/killed.yaml").write_text(recipe.replace("epochs: 2\n", "epochs: 4\n"))
    yield copy
    shutil.rmtree(copy.root, ignore_errors=True)


def forget(copy: ProjectCopy) -> None:
    """Remove what was made, but not the memory of what ran, the data, the tracking store and the lock of a kill."""
    for name in ("runs", "figures", "tables", "logs"):
        shutil.rmtree(copy.root / "results" / PRESET / name, ignore_errors=True)
    (copy.root / "results" / PRESET / "claims.html").unlink(missing_ok=True)
    for path in (copy.root / "paper_figures").glob("*"):
        path.unlink()


WALL = ("wall_s", "img_per_s", "peak_memory_mib", "resumed")


def outcome(copy: ProjectCopy) -> dict[str, Any]:
    """Everything that must be the same: weights, curves without wall times, and the bytes of figures and tables."""
    results = copy.root / "results" / PRESET
    found: dict[str, Any] = {}
    for run in sorted((results / "runs").iterdir()):
        found[f"{run.name} weights"] = (run / "weights.safetensors").read_bytes()
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        found[f"{run.name} curve"] = [{k: v for k, v in line.items() if k not in WALL} for line in lines]
        final = json.loads((run / "final.json").read_text())
        found[f"{run.name} final"] = {k: v for k, v in final.items() if k not in WALL}
    for name in ("fig2.pdf", "fig2.png", "tab1.tex", "tab1.md"):
        found[name] = (copy.root / "paper_figures" / name).read_bytes()
    return found


def require_no_half_written_file(copy: ProjectCopy) -> None:
    """Every file under its final name is complete."""
    results = copy.root / "results"
    for path in results.rglob("*.json"):
        if ".aside" not in path.name:
            json.loads(path.read_text())
    for path in results.rglob("*.jsonl"):
        for line in path.read_text().splitlines():
            json.loads(line)
    for path in results.rglob("weights.safetensors"):
        safetensors.numpy.load_file(path)
    for path in results.rglob("*.pdf"):
        assert path.read_bytes().rstrip().endswith(b"%%EOF"), path


def victims(copy: ProjectCopy) -> dict[str, list[psutil.Process]]:
    """What can be killed: Snakemake, trainings, and the command that the user typed."""
    found: dict[str, list[psutil.Process]] = {"snakemake": [], "training": [], "make reproduce": []}
    for process in processes_in(copy.root):
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if "tools/reproduce.py" in words:
            found["make reproduce"].append(process)
        elif "snakemake" in words and "-m" in words:
            found["snakemake"].append(process)
        elif any(Path(word).name == "attngeo" for word in words[:2]) and "train" in words:
            found["training"].append(process)
    return found


def run_and_kill(copy: ProjectCopy, at_s: float, kind: str) -> tuple[str, str]:
    """Start the command and kill one process after a while; what was killed (empty: it had finished) and the output."""
    command = subprocess.Popen(
        f"exec {COMMAND}", shell=True, cwd=copy.root, env=copy.environment(), start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    killed = ""
    deadline = time.monotonic() + at_s
    while command.poll() is None and not killed:
        time.sleep(max(0.0, min(0.05, deadline - time.monotonic())))
        if time.monotonic() >= deadline:
            found = victims(copy)
            if found[kind]:  # of trainings there may be none yet
                with suppress(psutil.NoSuchProcess):
                    found[kind][0].send_signal(signal.SIGKILL)
                    killed = kind
    output, _ = command.communicate(timeout=900)
    return killed, output


def test_twenty_kills_change_nothing(project: ProjectCopy) -> None:
    first = project.run(COMMAND, timeout=1800)
    assert "complete" in first.stdout
    undisturbed = outcome(project)
    forget(project)
    begin = time.monotonic()
    project.run(COMMAND, timeout=1800)
    took = time.monotonic() - begin
    assert outcome(project) == undisturbed, "two undisturbed runs differ: nothing can be said about killed ones"
    forget(project)

    draw = random.Random(SEED)
    hit: Counter[str] = Counter()
    finished = locks = 0
    while hit.total() < KILLS:
        kind = draw.choice(["snakemake", "training", "make reproduce"])
        at_s = draw.uniform(0.05, 0.5) * took  # what is finished is kept, so later moments are reached all the same
        locked = any((project.root / ".snakemake/locks").glob("*.lock"))
        killed, output = run_and_kill(project, at_s, kind)
        wait_until(lambda: not processes_in(project.root), 90, "every process to end")
        require_no_half_written_file(project)
        told = "left its lock: clearing it" in output
        locks += told
        print(f"kill {hit.total() + 1}: {killed or 'finished first'} after {at_s:.1f} s, lock cleared: {told}")
        if killed:
            hit[killed] += 1
            if locked and not told:  # killed again before it came to say so
                assert any((project.root / ".snakemake/locks").glob("*.lock")), output[-3000:]
        else:
            assert outcome(project) == undisturbed
            finished += 1
            forget(project)
    done = project.run(COMMAND, timeout=1800)
    assert "complete" in done.stdout
    assert outcome(project) == undisturbed
    assert not list((project.root / ".snakemake/locks").glob("*.lock"))
    left = [path for path in (project.root / "results").rglob("*.aside*")]
    assert left == [], "files aside of killed jobs remain"
    assert not any((project.root / "results" / PRESET / ".scratch").glob("*")), "checkpoints of finished runs remain"
    with sqlite3.connect(project.root / "results/mlflow.db") as store:
        states = Counter(status for (status,) in store.execute("select status from runs"))
        whole = store.execute("pragma integrity_check").fetchone()
    assert whole == ("ok",)
    assert states["RUNNING"] == 0, states
    assert "Nothing to be done" in project.run(COMMAND).stderr
    print(f"{KILLS} kills (seed {SEED}): {dict(hit)}; {finished} runs finished in between; {locks} locks cleared;")
    print(f"an undisturbed run took {took:.0f} s; tracked runs: {dict(states)}")
