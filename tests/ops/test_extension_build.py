"""Laws of the build: it says what it made, repeats no work, fails plainly, and a stale binary is never used."""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attngeo.errors import UserError
from attngeo.jobs import extension

SOURCE = Path(__file__).parents[2] / "cuda_ext"
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def copy_sources(to: Path) -> Path:
    ignore = shutil.ignore_patterns("build", "build.json", "*.so", "*.egg-info", "__pycache__")
    return Path(shutil.copytree(SOURCE, to, ignore=ignore))


def build(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(folder / "setup.py"), "build_ext", "--inplace"]
    variables = {**os.environ, "ATTNGEO_CUDA": "0", **environment}
    return subprocess.run(command, capture_output=True, text=True, env=variables, check=False)


def record(folder: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((folder / "attngeo_ext" / "build.json").read_text())
    return content


def problem(folder: Path) -> str:
    """What the package in `folder` says of itself when imported; a usable one has to be asked in a new process."""
    spec = importlib.util.spec_from_file_location("copied_attngeo_ext", folder / "attngeo_ext" / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.problem)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CPU build made by two processes at once, in a folder whose name has spaces."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    folder = copy_sources(tmp_path_factory.mktemp("a b") / "cuda ext")
    command = [sys.executable, str(folder / "setup.py"), "build_ext", "--inplace"]
    variables = {**os.environ, "ATTNGEO_CUDA": "0"}
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) for _ in range(2)]
    printed = sorted(process.communicate()[0] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert re.search(r"built in [\d.]+ s: CPU \(.*\); no CUDA: ATTNGEO_CUDA=0", printed[0])
    assert "up to date" in printed[1]
    return folder


def test_a_finished_build_loads_and_leaves_nothing_behind(built: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(built)!r}); import attngeo_ext; print(attngeo_ext.problem)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "None"
    assert [path.name for path in (built / "build").iterdir()] == ["lock"]
    assert record(built)["cuda"] == {
        "built": False,
        "reason": "ATTNGEO_CUDA=0",
        "version": "",
        "architectures": [],
        "ptxas": [],
    }


def test_the_binary_needs_no_cuda_library(built: Path) -> None:
    for binary in (built / "attngeo_ext" / "_C.abi3.so", SOURCE / "attngeo_ext" / "_C.abi3.so"):
        if not binary.exists():
            continue
        needed = subprocess.run(["readelf", "-d", binary], capture_output=True, text=True, check=True).stdout
        assert not re.search(r"NEEDED.*(cuda|python)", needed)


def test_stale_sources_another_torch_and_a_foreign_binary_are_not_loaded(built: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cuda_ext"
    shutil.copytree(built, folder)
    source = folder / "csrc" / "ops.cpp"
    original = source.read_text()
    source.write_text(original + "// edited\n")
    assert problem(folder).startswith("stale: run `make env` (the sources changed")
    source.write_text(original)
    path = folder / "attngeo_ext" / "build.json"
    content = record(folder)
    path.write_text(json.dumps({**content, "torch": "1.0"}))
    assert "built for torch 1.0" in problem(folder)
    path.write_text(json.dumps(content))
    with open(folder / "attngeo_ext" / "_C.abi3.so", "ab") as binary:
        binary.write(b"\0")
    assert "not the one that build.json describes" in problem(folder)
    for key in ("torch", "binary_sha256", "source_digest", "cpu_variants", "cuda"):
        path.write_text(json.dumps({name: value for name, value in content.items() if name != key}))
        assert f"build.json lacks {key}" in problem(folder)
    for nonsense in ("[]", "{", '{"built": false}', '{"built": true, "cuda": 1}'):
        path.write_text(nonsense)
        assert "run `make env`" in problem(folder)
    path.unlink()
    assert problem(folder) == "extension not built: run `make env`"


def test_a_binary_that_cannot_be_loaded_is_a_problem_and_no_crash(built: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cuda_ext"
    shutil.copytree(built, folder)
    binary = folder / "attngeo_ext" / "_C.abi3.so"
    binary.write_bytes(binary.read_bytes()[:100])
    changed = {**record(folder), "binary_sha256": hashlib.sha256(binary.read_bytes()).hexdigest()}
    (folder / "attngeo_ext" / "build.json").write_text(json.dumps(changed))
    assert problem(folder).startswith("extension cannot be loaded here: ")
    code = (
        f"import sys; sys.path.insert(0, {str(folder)!r}); import torch, attngeo.ops as ops;"
        "a = torch.ones(1, 1, 2, 3); ops.laplacian_kernel(a, a); print(ops.backend.ran()['laplacian_kernel'])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("naive cpu (extension cannot be loaded here: ")


def test_sources_that_do_not_compile_are_an_error_and_the_former_build_stays(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNGEO_CUDA", "0")
    folder = tmp_path / "cuda_ext"
    shutil.copytree(built, folder)
    binary = (folder / "attngeo_ext" / "_C.abi3.so").read_bytes()
    before = record(folder)
    source = folder / "csrc" / "cpu" / "variant.h"  # which every source includes: all of them stop at once
    original = source.read_text()
    source.write_text(original + "inline int broken() { return no_such_name; }\n")
    result = build(folder)
    assert result.returncode == 1
    assert re.match(r"attngeo_ext: ERROR: the compiler failed: .*error: .*no_such_name", result.stdout.splitlines()[-1])
    assert record(folder) == before
    assert (folder / "attngeo_ext" / "_C.abi3.so").read_bytes() == binary
    assert "the sources changed since the build" in problem(folder)
    with pytest.raises(UserError, match="did not compile"):
        extension.build(tmp_path)
    source.write_text(original)
    assert "up to date" in build(folder).stdout


def test_without_a_compiler_the_build_warns_and_only_a_demand_fails(tmp_path: Path) -> None:
    folder = copy_sources(tmp_path / "cuda_ext")
    bare = {"PATH": str(tmp_path), "CXX": ""}
    result = build(folder, **bare)
    assert result.returncode == 0
    assert "WARNING: not built, the slower naive forms will run: no C++ compiler" in result.stdout
    assert record(folder)["built"] is False
    assert "install g++" in str(record(folder)["reason"])
    assert "no C++ compiler" in problem(folder)
    assert build(folder, **bare, ATTNGEO_REQUIRE_EXTENSION="1").returncode == 1


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [("CXX", "no-such-compiler", "CXX=no-such-compiler is not a program"), ("MAX_JOBS", "many", "MAX_JOBS=many")],
)
def test_bad_settings_are_named(variable: str, value: str, message: str, tmp_path: Path) -> None:
    result = build(copy_sources(tmp_path / "cuda_ext"), **{variable: value})
    assert message in result.stdout


def test_a_compiler_that_is_killed_names_max_jobs(tmp_path: Path) -> None:
    fake = tmp_path / "c++-that-dies"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && echo fake 1.0 && exit 0\nkill -9 $$\n')
    fake.chmod(0o755)
    folder = copy_sources(tmp_path / "cuda_ext")
    result = build(folder, CXX=str(fake))
    assert result.returncode == 1
    assert "set MAX_JOBS=1" in result.stdout.splitlines()[-1]
    assert not (folder / "attngeo_ext" / "build.json").exists()


def test_a_toolkit_of_another_major_version_leaves_the_cpu_part_and_says_both_versions(tmp_path: Path) -> None:
    import torch

    if torch.version.cuda is None:
        pytest.skip("this torch has no CUDA")
    fake = tmp_path / "nvcc"
    fake.write_text('#!/bin/sh\necho "Cuda compilation tools, release 9.2, V9.2.1"\necho "#\\$ TOP=/nowhere"\n')
    fake.chmod(0o755)
    code = (
        "import runpy, sys; sys.argv = ['setup.py', '--version']; m = runpy.run_path('setup.py');"
        "print(m['find_cuda'](m['find_torch']()).reason)"
    )
    folder = copy_sources(tmp_path / "cuda_ext")
    environment = {**os.environ, "NVCC": str(fake)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=folder, check=True
    )
    assert f"nvcc is 9.2 but torch {torch.__version__} was built with CUDA {torch.version.cuda}" in result.stdout
    assert "install a CUDA" in result.stdout


def test_the_installed_cuda_build_has_no_spills_on_any_architecture() -> None:
    import attngeo_ext

    cuda = attngeo_ext.build_info().get("cuda", {"built": False, "reason": attngeo_ext.problem})
    if not cuda["built"]:
        pytest.skip(f"no CUDA kernels: {cuda['reason']}")
    assert {entry["architecture"] for entry in cuda["ptxas"]} == {
        "sm_" + name.removesuffix("+PTX").replace(".", "") for name in cuda["architectures"]
    }
    assert [entry for entry in cuda["ptxas"] if entry["spill_stores_bytes"] + entry["spill_loads_bytes"] > 0] == []
