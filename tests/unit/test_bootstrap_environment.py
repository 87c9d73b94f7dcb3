"""Lock files, conda file and Makefile agree with each other and with what the project declares."""

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ("requirements.lock", "requirements-test.lock", "requirements-ffcv.lock")


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    for line in lines:
        assert re.fullmatch(r"[a-z0-9.-]+==[A-Za-z0-9.]+", line), f"{name}: {line!r} is not a bare pin"
    return dict(line.split("==") for line in lines)


@pytest.mark.parametrize(("lock", "extras"), [(LOCKS[0], ["workflow"]), (LOCKS[1], ["test"]), (LOCKS[2], ["ffcv"])])
def test_every_declared_dependency_is_pinned_within_its_bounds(lock: str, extras: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [text for extra in extras for text in project["optional-dependencies"][extra]]
    if lock == LOCKS[0]:
        declared += project["dependencies"]
    locked = {**pins(LOCKS[0]), **pins(lock)}
    for requirement in map(Requirement, declared):
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} against {version}"


def test_no_package_is_pinned_twice() -> None:
    names = [name for lock in LOCKS for name in pins(lock)]
    assert len(names) == len(set(names))


def test_torch_comes_first_and_a_cpu_build_can_use_the_same_lock() -> None:
    names = list(pins(LOCKS[0]))
    assert names[:2] == ["torch", "torchvision"]
    assert not [name for name in names if name.startswith(("nvidia-", "cuda-", "triton"))]


def test_the_locks_are_what_is_installed() -> None:
    for lock in LOCKS[:2]:
        for name, version in pins(lock).items():
            assert metadata.version(name).partition("+")[0] == version, f"{name}: the environment is not {lock}'s"


def test_the_conda_file_installs_the_same_pins() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["channels"] == ["conda-forge"]
    pip_lines = next(item["pip"] for item in environment["dependencies"] if isinstance(item, dict))
    assert pip_lines == ["-r requirements.lock", "-e ."]
    python = next(item for item in environment["dependencies"] if str(item).startswith("python "))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert python.split(" ")[1] == project["requires-python"]


def test_make_alone_lists_every_target() -> None:
    listed = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("env", "reproduce", "test", "soak", "lint", "ui"):
        assert f"make {target} " in listed
    for target in re.findall(r"^  make ([a-z-]+) ", listed, re.MULTILINE):
        subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, check=True)


def test_a_damaged_package_is_found(tmp_path: Path) -> None:
    package = tmp_path / "thing-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
    (package / "INSTALLER").write_text("pip\n")
    (package / "RECORD").write_text("thing.py,,5\nthing-1.0.dist-info/RECORD,,\n")

    def damaged() -> list[str]:
        command = [sys.executable, str(ROOT / "tools" / "damaged_packages.py")]
        done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True)
        return [line for line in done.stdout.splitlines() if line.startswith("thing")]

    assert damaged() == ["thing==1.0"], "a missing file"
    (tmp_path / "thing.py").write_text("1234")
    assert damaged() == ["thing==1.0"], "a short file"
    (tmp_path / "thing.py").write_text("12345")
    assert damaged() == []
    (package / "INSTALLER").unlink()
    assert damaged() == ["thing==1.0"], "an installer that did not finish"
