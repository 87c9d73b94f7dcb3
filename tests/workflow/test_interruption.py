"""A workflow that is killed leaves nothing behind, and the next command goes on where it was."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.workflow.project_copy import ProjectCopy

pytestmark = [pytest.mark.workflow, pytest.mark.network, pytest.mark.timeout(900)]

RUN = "fashion-laplacian-s0"


def processes_in(root: Path) -> list[psutil.Process]:
    """Processes whose working folder is the copy or below it."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()).is_relative_to(root):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def wait_until(condition: object, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)


def forget(copy: ProjectCopy, run_id: str) -> Path:
    """Remove a run and all that shows it, since Snakemake remakes what is missing only where something needs it."""
    folder = copy.root / "results/demo/runs" / run_id
    for path in (folder, copy.root / "results/demo/figures", copy.root / "results/demo/tables"):
        shutil.rmtree(path)
    (copy.root / "results/demo/claims.html").unlink()
    for path in (copy.root / "paper_figures").iterdir():
        path.unlink()
    return folder


def start(copy: ProjectCopy, command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, shell=True, cwd=copy.root, env=copy.environment(), start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def snakemake_in(copy: ProjectCopy) -> psutil.Process:
    return next(
        process
        for process in processes_in(copy.root)
        if any(argument.endswith("bin/snakemake") for argument in process.cmdline()[:2])
    )


def test_kill_9_leaves_no_orphan_and_the_next_run_ends_with_the_same_bits(finished_copy: ProjectCopy) -> None:
    runs = finished_copy.root / "results/demo/runs"
    undisturbed = (runs / RUN / "weights.safetensors").read_bytes()
    forget(finished_copy, RUN)
    scratch = finished_copy.root / "results/demo/.scratch"
    shell = start(finished_copy, "snakemake --cores 2 all")
    wait_until(lambda: list(scratch.glob("*/checkpoint-*.pt")), 120, "the first checkpoint")
    snakemake_in(finished_copy).kill()
    shell.wait(timeout=60)
    wait_until(lambda: not processes_in(finished_copy.root), 10, "every job to end")
    assert not (runs / RUN / "final.json").exists()
    assert list((finished_copy.root / ".snakemake/locks").iterdir()), "the test must find a stale lock"

    done = finished_copy.run("python tools/reproduce.py --preset demo")
    assert "lock" in done.stdout + done.stderr, "clearing a lock must be said"
    assert (runs / RUN / "weights.safetensors").read_bytes() == undisturbed
    assert json.loads((runs / RUN / "final.json").read_text())["resumed"] == 1
    assert not list(scratch.glob(f"{RUN}-*")), "a finished run leaves no checkpoints"
    with sqlite3.connect(finished_copy.root / "results/mlflow.db") as store:
        rows = store.execute("select status from runs where name = ?", (RUN,)).fetchall()
    assert [status for (status,) in rows] == ["FINISHED", "FINISHED"], "the resumed run continues its tracked run"


def test_ctrl_c_ends_everything_and_the_run_resumes_by_itself(finished_copy: ProjectCopy) -> None:
    run = forget(finished_copy, RUN)
    scratch = finished_copy.root / "results/demo/.scratch"
    shell = start(finished_copy, "exec env --default-signal=INT snakemake --cores 2 all")
    wait_until(lambda: list(scratch.glob("*/checkpoint-*.pt")), 120, "the first checkpoint")
    os.killpg(shell.pid, signal.SIGINT)
    shell.wait(timeout=60)
    wait_until(lambda: not processes_in(finished_copy.root), 10, "every job to end")
    finished_copy.run("snakemake --cores 2 all")
    assert (run / "final.json").exists()


def test_a_second_reproduce_at_once_is_refused(finished_copy: ProjectCopy) -> None:
    run = forget(finished_copy, RUN)
    first = start(finished_copy, "python tools/reproduce.py --preset demo")
    lock = finished_copy.root / "results/.reproduce.lock"
    wait_until(lambda: lock.exists() and lock.read_text().strip(), 30, "the first to hold its lock")
    second = finished_copy.run("python tools/reproduce.py --preset demo", check=False)
    assert second.returncode != 0
    assert "another" in second.stdout + second.stderr
    assert first.wait(timeout=300) == 0
    assert (run / "final.json").exists()


def mount_tmpfs(path: Path, options: str) -> None:
    path.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True, capture_output=True)


@pytest.mark.skipif(
    os.environ.get("ATTNGEO_ALLOW_SYSTEM_TESTS") != "1" or os.getuid() != 0,
    reason="mounts file systems: needs root and ATTNGEO_ALLOW_SYSTEM_TESTS=1, which .ci/run sets",
)
def test_a_full_disk_and_a_read_only_folder_are_explained_and_lose_nothing(finished_copy: ProjectCopy) -> None:
    results = finished_copy.root / "results"
    kept = finished_copy.root / "kept"
    results.rename(kept)
    mount_tmpfs(results, "size=512k")
    try:
        (results / "ballast").write_bytes(b"x" * 490_000)  # leaves room for folders, not for records
        full = finished_copy.run("attngeo analyze variational", check=False)
        assert full.returncode == 2, full.stderr
        assert "No space left" in full.stderr
        assert "remedy" in full.stderr
        assert not list(results.glob("demo/analyses/*")), "no part of a file may remain"
        subprocess.run(["mount", "-o", "remount,ro", str(results)], check=True)
        for command in ("attngeo analyze variational", "attngeo train fashion-laplacian-s0"):
            refused = finished_copy.run(command, check=False)
            assert refused.returncode == 2, refused.stderr
            assert "Read-only" in refused.stderr
            assert "results" in refused.stderr
        planned = finished_copy.run("snakemake --cores 1 all", check=False)
        assert planned.returncode != 0
        assert "Traceback" not in planned.stdout + planned.stderr
        assert "Read-only" in planned.stdout + planned.stderr
    finally:
        subprocess.run(["umount", "-l", str(results)], check=True)
    results.rmdir()
    kept.rename(results)
    assert finished_copy.planned() == []


def test_no_other_parse_changes_what_a_running_snakemake_planned_with(fresh: ProjectCopy) -> None:
    """A kill -9 leaves the lock just as a run that goes on does."""
    target = "snakemake --cores 1 --config preset=smoke -- results/smoke/analyses/variational.json"
    shell = start(fresh, target)
    wait_until(lambda: list((fresh.root / ".snakemake/locks").glob("*.input.lock")), 60, "the lock")
    snakemake_in(fresh).kill()
    shell.wait(timeout=60)
    wait_until(lambda: not processes_in(fresh.root), 30, "every job to end")
    stamp = fresh.root / "results/smoke/.code/variational.txt"
    planned = stamp.read_text()
    code = fresh.root / "src/attngeo/variational/sphere.py"
    code.write_text(code.read_text() + "\n_CHANGED = 1\n")
    dry_run = target.replace("snakemake", "snakemake -n", 1)
    for command in (target, dry_run):
        refused = fresh.run(command, check=False)
        assert refused.returncode != 0
        assert "behind variational changed" in refused.stdout + refused.stderr
        assert "snakemake --unlock" in refused.stdout + refused.stderr
        assert stamp.read_text() == planned
    fresh.run("snakemake --unlock --config preset=smoke")
    assert stamp.read_text() == planned
    fresh.run(dry_run)
    assert stamp.read_text() != planned
