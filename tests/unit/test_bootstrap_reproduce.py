"""`make reproduce` clears what a killed run left, never disturbs a running one, and leaves no process behind."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
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


def wait_until(happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline, f"{what} did not appear"
        time.sleep(0.05)


def wait_for(path: Path) -> None:
    wait_until(path.exists, str(path))


def sleeps(command: subprocess.Popen[str]) -> bool:
    """Whether a descendant of the command has become `sleep`."""
    with suppress(psutil.NoSuchProcess):
        return any("sleep" in process.cmdline() for process in psutil.Process(command.pid).children(recursive=True))
    return False


def still_running(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that have not ended within `seconds`; a zombie has, though its adopted parent may be slow to notice."""

    def runs(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    deadline = time.monotonic() + seconds
    while (alive := [process for process in processes if runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


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
    assert reproduce(project) == 0
    assert calls(project) == ["--cores 2 --rerun-incomplete all --config preset=demo"]
    printed = capsys.readouterr().out
    for absent in ("paper_figures", "results/demo", "make ui"):
        assert absent not in printed
    (project / "paper_figures").mkdir()
    for page in ("index", "claims"):
        (project / "paper_figures" / f"{page}.html").touch()
    (project / "results" / "demo").mkdir()
    (project / "results" / "mlflow.db").touch()
    printed = load().places(project, "demo")
    places = [line.split("  ")[-1].strip() for line in printed.splitlines()[1:]]
    assert places == ["paper_figures/index.html", "paper_figures/claims.html", "results/demo/", "make ui"]
    (project / "results" / "smoke").mkdir()
    assert load().places(project, "smoke").endswith("make ui PRESET=smoke")


def test_operators_that_are_not_compiled_are_told_at_the_end(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = project / "cuda_ext" / "attngeo_ext" / "build.json"
    record.parent.mkdir(parents=True)
    for content in ('{"built": true}', "{"):
        record.write_text(content)
        assert reproduce(project) == 0
        assert "not compiled" not in capsys.readouterr().err
    record.write_text('{"built": false, "reason": "no C++ compiler: install g++, then run `make env`"}')
    assert reproduce(project) == 0
    assert "not compiled" in (told := capsys.readouterr().err)
    assert told.endswith("install g++, then run `make env`\n")


def test_a_build_that_found_no_compiler_is_told_at_the_end(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The build is a job, as in the workflow: its own warning goes to the job's log."""
    shutil.copytree(
        ROOT / "cuda_ext", project / "cuda_ext", ignore=shutil.ignore_patterns("build", "build.json", "*.so")
    )
    (project / "then").write_text(
        "import subprocess\n"
        "command = [sys.executable, 'cuda_ext/setup.py', 'build_ext', '--inplace']\n"
        f"variables = {{**os.environ, 'PATH': {str(project)!r}, 'CXX': ''}}\n"
        "log = open('log', 'w')\n"
        "sys.exit(subprocess.run(command, stdout=log, stderr=log, env=variables).returncode)\n"
    )
    assert reproduce(project) == 0
    told = capfd.readouterr().err.splitlines()
    assert "the slower naive forms will run: no C++ compiler" in (project / "log").read_text()
    assert told[-1].startswith("warning: the operators are not compiled, the slower naive forms run")
    assert "no C++ compiler (g++ or c++) on PATH: install g++" in told[-1]


def test_a_stale_lock_is_cleared_with_a_message(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / ".snakemake" / "locks" / "0.input.lock").touch()
    (project / ".snakemake" / "incomplete").mkdir()
    (project / ".snakemake" / "incomplete" / "cnVu").touch()
    assert reproduce(project) == 0
    assert calls(project)[0] == "--unlock --config preset=demo"
    printed = capsys.readouterr().out
    assert "clearing it" in printed
    assert "1 outputs of an interrupted run" in printed


def test_files_that_a_killed_job_was_writing_are_removed_and_those_of_a_living_one_left(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = project / "results/demo/runs/a.b"
    folder.mkdir(parents=True)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone = [folder / f".final.{ended.pid}.aside.json", folder / f".x.y.{ended.pid}.aside"]
    kept = [folder / f".final.{os.getpid()}.aside.json", folder / ".mine.aside.json", folder / "final.json"]
    for path in (*gone, *kept):
        path.touch()
    assert reproduce(project) == 0
    assert not any(path.exists() for path in gone)
    assert all(path.exists() for path in kept)
    assert "2 files that a killed job had not finished are removed" in capsys.readouterr().out


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
        wait_until(partial(sleeps, command), "sleep")
        descendants = psutil.Process(command.pid).children(recursive=True)
        command.send_signal(number)
        assert command.wait(10) == status
        assert still_running(descendants, 5) == []


# A time that no other process sleeps for.
SLEEP = ["sleep", f"63.{os.getpid():07}"]


def deaf_job(project: Path, first: str) -> None:
    """Make the fake Snakemake start a job that takes no notice of signals and do `first` while it runs."""
    (project / "then").write_text(
        "import os, signal, subprocess, time\n"
        "signal.signal(signal.SIGINT, lambda *_: open('asked', 'w').close())\n"
        'command = \'trap "" INT TERM HUP; touch up; ' + " ".join(SLEEP) + " | sleep 64; sleep 65'\n"
        f"job = subprocess.Popen(command, shell=True, executable={str(WITH_PARENT)!r})\n"
        f"{first}\n"
        "job.wait()"
    )


def test_a_second_interrupt_leaves_no_job_however_deaf(project: Path) -> None:
    deaf_job(project, "")
    command = start_reproduce(project)
    wait_for(project / "up")
    time.sleep(0.2)
    descendants = psutil.Process(command.pid).children(recursive=True)
    assert SLEEP in [process.cmdline() for process in descendants]
    command.send_signal(signal.SIGINT)
    wait_for(project / "asked")
    assert command.poll() is None
    command.send_signal(signal.SIGINT)
    assert command.wait(15) == 130
    assert still_running(descendants, 0.5) == []


def test_jobs_that_outlive_a_killed_snakemake_are_waited_for(project: Path) -> None:
    deaf_job(project, "while not os.path.exists('up'): time.sleep(0.05)\nos.kill(os.getpid(), signal.SIGKILL)")
    command = start_reproduce(project)
    assert command.stdout is not None
    assert "outlive Snakemake" in command.stdout.readline()
    for _ in range(2):
        assert command.poll() is None
        command.send_signal(signal.SIGINT)
        time.sleep(0.5)
    assert command.wait(15) == 130
    assert SLEEP not in [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]


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
    assert still_running(children, 2) == []


def start_job(command: str, wrapper: Path = WITH_PARENT) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, shell=True, executable=wrapper)


@pytest.mark.parametrize("deaf", [True, False])
def test_a_job_ends_with_its_wrapper_that_is_killed(tmp_path: Path, deaf: bool) -> None:
    ignore = 'trap "" TERM INT HUP; ' if deaf else ""
    wrapper = start_job(f"{ignore}touch '{tmp_path}/up'; sleep 66 | sleep 67; echo end")
    wait_for(tmp_path / "up")
    time.sleep(0.2)
    processes = psutil.Process(wrapper.pid).children(recursive=True)
    assert {"66", "67"} <= {word for process in processes for word in process.cmdline()}
    wrapper.kill()
    wrapper.wait()
    assert still_running(processes, 6) == []


def test_a_training_told_to_stop_has_the_time_to_write_its_checkpoint(tmp_path: Path) -> None:
    code = (
        "import pathlib, signal, time\n"
        "signals = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: signals.append(1))\n"
        "pathlib.Path('up').touch()\n"
        "while not signals: time.sleep(0.05)\n"
        "time.sleep(3)\n"
        "pathlib.Path('checkpoint').write_text(str(len(signals)))"
    )
    (tmp_path / "train.py").write_text(code)
    wrapper = start_job(f"cd '{tmp_path}'; '{sys.executable}' train.py; echo end")
    wait_for(tmp_path / "up")
    for _ in range(3):  # as the kernel does when a parent of several threads dies
        wrapper.terminate()
        time.sleep(0.3)
    assert wrapper.wait(10) == 143
    assert (tmp_path / "checkpoint").read_text() == "1", "a second signal would have cut the checkpoint short"


def test_a_job_that_takes_no_notice_of_being_told_to_stop_is_killed_in_the_end(tmp_path: Path) -> None:
    impatient = tmp_path / "with-parent.sh"
    text = WITH_PARENT.read_text()
    assert "checkpoint_half_seconds=120" in text
    impatient.write_text(text.replace("checkpoint_half_seconds=120", "checkpoint_half_seconds=1"))
    impatient.chmod(0o755)
    wrapper = start_job(f"trap '' TERM; touch '{tmp_path}/up'; sleep 68; sleep 69", impatient)
    wait_for(tmp_path / "up")
    wrapper.terminate()
    assert wrapper.wait(10) == 137


@pytest.mark.parametrize("child", ["sleep 60", "(trap '' TERM; sleep 60)"])
def test_children_that_linger_neither_hold_an_ended_job_nor_outlive_it(child: str) -> None:
    started = time.monotonic()
    done = subprocess.run(
        f"{child} >/dev/null & echo $!; exit 3", shell=True, executable=WITH_PARENT, capture_output=True, check=False
    )
    assert done.returncode == 3
    assert time.monotonic() - started < 10
    number = int(done.stdout)
    assert not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE


def test_a_job_that_is_stopped_and_continued_keeps_its_status(tmp_path: Path) -> None:
    wrapper = start_job(f"touch '{tmp_path}/up'; sleep 1; exit 5")
    wait_for(tmp_path / "up")
    (job,) = (process for process in psutil.Process(wrapper.pid).children() if "pipefail" in process.cmdline())
    job.suspend()
    time.sleep(1.5)
    assert wrapper.poll() is None
    job.resume()
    assert wrapper.wait(10) == 5


def without_setpriv(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "setpriv").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "setpriv").chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.parametrize("setpriv", [True, False])
def test_a_job_reads_nothing_and_works_without_setpriv(tmp_path: Path, setpriv: bool) -> None:
    environment = dict(os.environ) if setpriv else without_setpriv(tmp_path)
    done = subprocess.run(
        "readlink /proc/self/fd/0; exit 7",
        shell=True, executable=WITH_PARENT, env=environment, input="typed", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("/dev/null\n", 7)


def test_an_interrupt_ends_everything_without_setpriv_too(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", without_setpriv(tmp_path)["PATH"])
    deaf_job(project, "")
    command = start_reproduce(project)
    wait_for(project / "up")
    descendants = psutil.Process(command.pid).children(recursive=True)
    command.send_signal(signal.SIGINT)
    wait_for(project / "asked")
    command.send_signal(signal.SIGINT)
    assert command.wait(15) == 130
    assert still_running(descendants, 0.5) == []


def test_what_a_killed_run_left_unsent_is_sent_where_nothing_was_to_be_done(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{project}/store.db")
    unsent = project / "results/demo/.tracking/unsent"
    unsent.parent.mkdir(parents=True)
    unsent.touch()
    (project / "then").write_text("sys.exit(1)")
    assert reproduce(project) == 1
    assert unsent.exists(), "Snakemake itself sends at the end of a run that failed"
    (project / "then").write_text("")
    assert reproduce(project) == 0
    assert not unsent.exists()
    assert "0 left for later" in capfd.readouterr().out
    unsent.touch()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert reproduce(project) == 0
    assert unsent.exists()
    assert "`attngeo track sync demo` sends it" in capfd.readouterr().err
