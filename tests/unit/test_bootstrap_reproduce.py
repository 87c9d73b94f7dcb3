"""`make reproduce` clears what a killed run left, never disturbs a running one, and leaves no process behind."""

import importlib.util
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
WITH_PARENT = ROOT / "workflow" / "bin" / "with-parent.sh"
# Logs its arguments; unlocks as Snakemake does; then does what the file `then` says.
FAKE_SNAKEMAKE = """\
import os, pathlib, sys
with open("calls.txt", "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
if "--unlock" in sys.argv:
    for lock in pathlib.Path(".snakemake/locks").glob("*"):
        lock.unlink()
elif os.path.exists("then"):
    exec(open("then").read())
"""


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reproduce", ROOT / "tools" / "reproduce.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "it's a project ü"
    (folder / "config" / "demo").mkdir(parents=True)
    (folder / "config" / "demo" / "config.yaml").touch()
    (folder / ".snakemake" / "locks").mkdir(parents=True)
    (folder / "snakemake").write_text(FAKE_SNAKEMAKE)
    return folder


def reproduce(project: Path, preset: str = "demo") -> int:
    return int(load().reproduce(project, preset, 2, [sys.executable, str(project / "snakemake")]))


def start_reproduce(project: Path) -> subprocess.Popen[str]:
    code = (
        "import importlib.util as u, pathlib, sys\n"
        f"s = u.spec_from_file_location('reproduce', {str(ROOT / 'tools' / 'reproduce.py')!r})\n"
        "m = u.module_from_spec(s); s.loader.exec_module(m)\n"
        f"p = pathlib.Path({str(project)!r})\n"
        "sys.exit(m.reproduce(p, 'demo', 2, [sys.executable, str(p / 'snakemake')]))"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)


def calls(project: Path) -> list[str]:
    return (project / "calls.txt").read_text().splitlines()


@pytest.fixture
def running_snakemake(project: Path) -> Iterator[int]:
    """A process that is called snakemake and works in the project's folder."""
    (project / "then").write_text("import time; open('up', 'w').close(); time.sleep(60)")
    process = subprocess.Popen([sys.executable, str(project / "snakemake")], cwd=project)
    wait_for(project / "up")
    yield process.pid
    process.kill()
    process.wait()


def test_one_call_with_the_preset_and_where_the_results_lie(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "paper_figures").mkdir()
    (project / "paper_figures" / "claims.html").touch()
    assert reproduce(project) == 0
    assert calls(project) == ["--cores 2 --rerun-incomplete all --config preset=demo"]
    printed = capsys.readouterr().out
    assert "paper_figures/claims.html" in printed
    assert "make ui" in printed


def test_a_stale_lock_is_cleared_with_a_message(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / ".snakemake" / "locks" / "0.input.lock").touch()
    (project / ".snakemake" / "incomplete").mkdir()
    (project / ".snakemake" / "incomplete" / "cnVu").touch()
    assert reproduce(project) == 0
    assert calls(project)[0] == "--unlock --config preset=demo"
    printed = capsys.readouterr().out
    assert "clearing it" in printed
    assert "1 outputs of an interrupted run" in printed


def test_the_lock_of_a_running_snakemake_is_left_alone(
    project: Path, running_snakemake: int, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = project / ".snakemake" / "locks" / "0.input.lock"
    lock.touch()
    assert reproduce(project) == 2
    assert lock.exists()
    assert f"process {running_snakemake}" in capsys.readouterr().err


def test_a_snakemake_in_another_folder_does_not_count(project: Path, tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "snakemake"], cwd=tmp_path)
    try:
        assert load().running_snakemake(project) == []
    finally:
        other.kill()
        other.wait()


def test_two_at_once_the_second_says_so(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "then").write_text("import time; open('up', 'w').close(); time.sleep(60)")
    first = start_reproduce(project)
    wait_for(project / "up")
    assert reproduce(project) == 2
    assert f"another `make reproduce` (process {first.pid})" in capsys.readouterr().err
    first.terminate()
    first.wait(10)
    (project / "then").unlink()
    assert reproduce(project) == 0


def test_an_interrupt_reaches_every_job_and_a_killed_command_takes_snakemake_with_it(project: Path) -> None:
    (project / "then").write_text(
        "import subprocess\n"
        f"job = subprocess.Popen('touch up; sleep 60; echo', shell=True, executable={str(WITH_PARENT)!r})\n"
        "job.wait()"
    )
    for number, status in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        (project / "up").unlink(missing_ok=True)
        command = start_reproduce(project)
        wait_for(project / "up")
        descendants = psutil.Process(command.pid).children(recursive=True)
        assert any("sleep" in process.cmdline() for process in descendants)
        command.send_signal(number)
        assert command.wait(10) == status
        _, alive = psutil.wait_procs(descendants, timeout=5)
        assert alive == []


def test_a_failure_is_passed_on(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "then").write_text("raise SystemExit(7)")
    assert reproduce(project) == 7
    assert "the same command continues" in capsys.readouterr().out


def test_an_unknown_preset_names_the_known_ones(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce(project, "dmeo") == 2
    printed = capsys.readouterr().err
    assert "'dmeo'" in printed
    assert "presets: demo" in printed


def test_results_that_cannot_be_written_are_named(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "results").write_text("a file where the folder should be")
    assert reproduce(project) == 2
    assert "results" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "status"), [("false | true", 1), ("exit 7", 7), ("echo $UNSET_NAME", 1), (":", 0)])
def test_jobs_run_in_strict_mode_and_keep_their_status(command: str, status: int) -> None:
    done = subprocess.run(command, shell=True, executable=WITH_PARENT, capture_output=True, check=False)
    assert done.returncode == status


def test_jobs_end_within_two_seconds_when_their_parent_is_killed(tmp_path: Path) -> None:
    command = f"touch '{tmp_path}/up'; sleep 61 | sleep 62; echo end"
    code = f"import subprocess; subprocess.run({command!r}, shell=True, executable={str(WITH_PARENT)!r})"
    parent = subprocess.Popen([sys.executable, "-c", code])
    wait_for(tmp_path / "up")
    time.sleep(0.2)
    children = psutil.Process(parent.pid).children(recursive=True)
    assert len(children) >= 3
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(children, timeout=2)
    assert alive == []
