"""The bootstrap says in one line what is missing, never changes a machine unasked, and is safe in awkward folders."""

import os
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What the script may find on its PATH besides the fakes of a test: no compiler, no Python, no package manager.
ORDINARY = "bash awk cat chmod cp cut date df dirname du env find grep head id ls mkdir mktemp mv paste printf rm sed"
ORDINARY += " sh sha256sum sort tail tr uname xargs ldconfig ldd flock"


def executable(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture(params=["plain", "it's a test ü"])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A project folder with the bootstrap and lock files only, and beside it a folder of commands."""
    folder = tmp_path / request.param
    (folder / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "bootstrap.sh", folder / "tools")
    for lock in ROOT.glob("requirements*.lock"):
        shutil.copy(lock, folder)
    commands = tmp_path / "commands"
    commands.mkdir()
    for name in ORDINARY.split():
        found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        if found:
            # A script, not a link: a fake written over a link would overwrite the command of the machine.
            executable(commands / name, f'exec {found} "$@"')
    executable(commands / "uname", 'case "$1" in -s) echo Linux ;; *) echo x86_64 ;; esac')
    executable(commands / "id", "echo 1000")
    executable(commands / "apt-get", f'echo "$@" >>"{tmp_path}/apt.log"')
    return folder


def commands_of(project: Path) -> Path:
    return project.parent / "commands"


def fake_python(project: Path, *, venv: bool, stop: bool = True) -> None:
    """A Python 3.12 that answers the script's questions; `venv` says whether that module is there."""
    executable(
        commands_of(project) / "python3",
        f"""case "$*" in
*_base_executable*) echo python3 ;;
*"import venv"*) exit {0 if venv else 1} ;;
*python_version*) echo 3.12.1 ;;
*"-m venv"*) echo "making an environment"; exit {3 if stop else 0} ;;
*) exit 0 ;;
esac""",
    )


def bootstrap(project: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [shutil.which("bash") or "bash", "tools/bootstrap.sh"],
        cwd=project,
        env={"PATH": str(commands_of(project)), "HOME": str(project), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_shell_scripts_parse() -> None:
    for script in ("tools/bootstrap.sh", "workflow/bin/with-parent.sh", ".ci/run"):
        subprocess.run(["bash", "-n", ROOT / script], check=True)
        assert os.access(ROOT / script, os.X_OK), f"{script} cannot be executed"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shell_scripts_pass_shellcheck() -> None:
    scripts = [ROOT / name for name in ("tools/bootstrap.sh", "workflow/bin/with-parent.sh", ".ci/run")]
    subprocess.run(["shellcheck", *scripts], check=True)


def test_no_python_is_fatal_and_one_line_installs_everything(project: Path) -> None:
    done = bootstrap(project)
    assert done.returncode == 1
    lines = [line for line in done.stdout.splitlines() if "apt-get" in line]
    assert len(lines) == 1
    for package in ("python3 ", "python3-venv", "make", "g++", "libopencv-imgproc-dev", "libturbojpeg0-dev"):
        assert package in lines[0]
    assert "Python 3.11 to 3.13" in done.stderr
    assert not (project / ".venv").exists()


def test_no_venv_module_is_fatal(project: Path) -> None:
    fake_python(project, venv=False)
    done = bootstrap(project)
    assert done.returncode == 1
    assert "python3-venv" in done.stdout
    assert "venv module" in done.stderr


def test_an_interpreter_named_and_missing_is_not_replaced_by_another(project: Path) -> None:
    fake_python(project, venv=True)
    done = bootstrap(project, PYTHON="python3.13")
    assert done.returncode == 1
    assert "python3.13-venv" in done.stdout


def test_no_compiler_is_said_and_not_fatal(project: Path) -> None:
    fake_python(project, venv=True)
    done = bootstrap(project)
    assert "a C++ compiler (without it the naive operators run)" in done.stdout
    assert "making an environment" in done.stdout, "the bootstrap must go on to make .venv"


def test_without_root_nothing_is_installed_and_the_line_is_printed(project: Path) -> None:
    fake_python(project, venv=True)
    done = bootstrap(project)
    assert not (project.parent / "apt.log").exists()
    assert "as root:  apt-get update && apt-get install -y --no-install-recommends" in done.stdout


def test_as_root_the_packages_are_installed_and_the_switch_is_named(project: Path) -> None:
    fake_python(project, venv=True)
    executable(commands_of(project) / "id", "echo 0")
    done = bootstrap(project)
    assert "SYSTEM_PACKAGES=0 switches this off" in done.stdout
    calls = (project.parent / "apt.log").read_text().splitlines()
    assert calls[0].startswith("update")
    assert "--no-install-recommends" in calls[1]
    assert "libopencv-imgproc-dev" in calls[1]


def test_the_switch_keeps_root_from_installing(project: Path) -> None:
    fake_python(project, venv=True)
    executable(commands_of(project) / "id", "echo 0")
    bootstrap(project, SYSTEM_PACKAGES="0")
    assert not (project.parent / "apt.log").exists()


def test_a_full_disk_is_said_before_anything_is_made(project: Path) -> None:
    fake_python(project, venv=True)
    executable(commands_of(project) / "df", "echo head; echo /dev/sda1 100 90 5000000 95% /")
    done = bootstrap(project)
    assert done.returncode == 1
    assert "12 GB of disk are needed here, 5 GB are free" in done.stderr
    assert not (project / ".venv").exists()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a:b", "a colon"),
        ('6" wide, 4" high', "a blank and one of"),
        ("a $HOME", "a blank and one of"),
        ("a `b", "a blank and one of"),
        ("a\tb", "a tab"),
        ("x" * 120 + "'s", "100 bytes"),
    ],
)
def test_a_path_that_python_cannot_bear_is_refused_at_once_in_one_line(project: Path, name: str, reason: str) -> None:
    fake_python(project, venv=True)
    moved = project.with_name(name)
    project.rename(moved)
    done = bootstrap(moved)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (moved / ".venv").exists()


@pytest.mark.parametrize("name", ['6"', "$HOME", "it's; a (path) & more", "ü" * 60, "x" * 120])
def test_a_path_that_only_looks_odd_is_not_refused(project: Path, name: str) -> None:
    fake_python(project, venv=True)
    moved = project.with_name(name)
    project.rename(moved)
    assert "making an environment" in bootstrap(moved).stdout


def ffcv_machine(project: Path, loader: Path) -> None:
    """A machine that has FFCV's libraries, as a compiler, pkg-config and a ldconfig at `loader` say."""
    fake_python(project, venv=True)
    for name in ("g++", "pkg-config", "make"):
        executable(commands_of(project) / name, "exit 0")
    # So many lines that a reader which stops at the first match breaks the pipe.
    lines = "libGL.so.1 (libc6,x86-64) => /a\nlibgthread-2.0.so.0 (libc6,x86-64) => /b"
    executable(loader, f"printf '{lines}\\n'; i=0; while [ $i -lt 20000 ]; do echo lib$i; i=$((i + 1)); done")


def test_libraries_are_found_however_long_their_list(project: Path) -> None:
    ffcv_machine(project, commands_of(project) / "ldconfig")
    done = bootstrap(project)
    assert "libraries of FFCV" not in done.stdout
    assert "making an environment" in done.stdout


def test_libraries_are_found_by_a_user_whose_path_lacks_sbin(project: Path) -> None:
    sbin = project.parent / "sbin"
    sbin.mkdir()
    ffcv_machine(project, sbin / "ldconfig")
    (commands_of(project) / "ldconfig").unlink()
    script = project / "tools" / "bootstrap.sh"
    text = script.read_text()
    assert ":/usr/sbin:/sbin" in text
    script.write_text(text.replace(":/usr/sbin:/sbin", f":{sbin}"))
    assert "libraries of FFCV" not in bootstrap(project).stdout
    (sbin / "ldconfig").unlink()
    assert "libraries of FFCV" in bootstrap(project).stdout


@pytest.mark.parametrize(
    ("ldd", "status"),
    [
        ("echo 'libturbojpeg.so.0 => not found'; i=0; while [ $i -lt 20000 ]; do echo $i; i=$((i + 1)); done", 1),
        ("echo 'ldd: ffcv/_libffcv.so: No such file or directory' >&2; exit 1", 1),
        ("echo 'libturbojpeg.so.0 => /usr/lib/libturbojpeg.so.0'", 0),
    ],
)
def test_an_ffcv_that_lost_a_library_or_a_file_is_noticed(project: Path, ldd: str, status: int) -> None:
    executable(commands_of(project) / "ldd", ldd)
    text = (project / "tools" / "bootstrap.sh").read_text()
    (project / "check.sh").write_text(text.replace('main "$@"', "ffcv_is_whole"))
    bash = shutil.which("bash") or "bash"
    done = subprocess.run([bash, "check.sh"], cwd=project, env={"PATH": str(commands_of(project))}, check=False)
    assert done.returncode == status


@pytest.mark.parametrize(
    ("setup", "status", "told"),
    [
        ("print('attngeo_ext: ERROR: MAX_JOBS=0 is none'); sys.exit(2)", 1, ["MAX_JOBS=0 is none", "could not begin"]),
        ("print('attngeo_ext: ERROR: no_such_name'); sys.exit(1)", 0, ["no_such_name", "the naive forms run"]),
        ("print('attngeo_ext: up to date: CPU')", 0, []),
    ],
)
def test_a_build_that_cannot_begin_ends_the_bootstrap_and_a_failed_one_is_a_warning(
    project: Path, setup: str, status: int, told: list[str]
) -> None:
    (project / "cuda_ext").mkdir()
    (project / "cuda_ext" / "setup.py").write_text(f"import sys\n{setup}\n")
    (project / ".venv" / "bin").mkdir(parents=True)
    (project / ".venv" / ".attngeo").mkdir()
    executable(project / ".venv" / "bin" / "python", f'exec {shlex.quote(sys.executable)} "$@"')
    text = (project / "tools" / "bootstrap.sh").read_text()
    (project / "check.sh").write_text(text.replace('main "$@"', "build_extension"))
    done = subprocess.run(
        [shutil.which("bash") or "bash", "check.sh"],
        cwd=project,
        env={"PATH": str(commands_of(project))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status
    for words in told:
        assert words in done.stderr
    assert bool(told) == bool(done.stderr)
    assert [path.name for path in (project / "cuda_ext").iterdir()] == ["setup.py"]


def test_a_stage_that_was_interrupted_leaves_no_stamp(project: Path) -> None:
    fake_python(project, venv=True)
    assert bootstrap(project).returncode != 0
    assert not (project / ".venv" / ".attngeo" / "base").exists()


def test_an_unknown_argument_is_refused(project: Path) -> None:
    done = subprocess.run(
        ["bash", "tools/bootstrap.sh", "--everything"], cwd=project, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "--everything" in done.stderr
