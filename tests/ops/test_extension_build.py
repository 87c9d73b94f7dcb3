"""Laws of the build: it says what it made, repeats no work, fails plainly, and a stale binary is never used."""

import hashlib
import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
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


class Fake:
    """A folder of sources and a compiler for it that takes no time: what it makes has the sources' names in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = copy_sources(folder / "cuda_ext")
        self.compiler = folder / "fake-compiler"
        self.hangs = folder / "hangs"
        self._log = folder / "calls"
        self._version, self._body = "fake 1.0", ""
        self.work()

    def _write(self) -> None:
        aside = self.compiler.with_suffix(".new")
        aside.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && echo "{self._version}" && exit 0\n'
            f'echo "$@" >>{self._log}\n{self._body}\n'
            'for word; do [ "$last" = -o ] && out=$word; last=$word; done\necho made >"$out"\n'
        )
        aside.chmod(0o755)
        aside.replace(self.compiler)

    def say(self, version: str) -> None:
        self._version = version
        self._write()

    def work(self) -> None:
        self._body = ""
        self._write()

    def fail(self) -> None:
        self._body = "echo 'error: the fake fails' >&2; exit 1"
        self._write()

    def hang(self) -> None:
        """Wait until the folder that the object belongs in is gone, so that no process outlives the test."""
        self.hangs.unlink(missing_ok=True)
        self._body = f"touch {self.hangs}; for i in $(seq 600); do [ -d build/tmp* ] || break; sleep 0.05; done; exit 1"
        self._write()

    def calls(self) -> list[str]:
        return self._log.read_text().splitlines()

    def build(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return build(self.folder, CXX=str(self.compiler), **environment)

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(self.folder / "setup.py"), "build_ext", "--inplace"]
        variables = {**os.environ, "ATTNGEO_CUDA": "0", "CXX": str(self.compiler), "MAX_JOBS": "1"}
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, env=variables)


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    """A finished build of a fake compiler."""
    made = Fake(tmp_path)
    assert "built in" in made.build().stdout
    return made


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


def test_a_compiler_that_is_none_is_named(tmp_path: Path) -> None:
    result = build(copy_sources(tmp_path / "cuda_ext"), CXX="no-such-compiler")
    assert "CXX=no-such-compiler is not a program" in result.stdout


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("MAX_JOBS", "0", "set 1, 2, 3"),
        ("MAX_JOBS", "abc", "set 1, 2, 3"),
        ("MAX_JOBS", "-2", "set 1, 2, 3"),
        ("ATTNGEO_CUDA", "no", "set 0 or 1"),
        ("ATTNGEO_REQUIRE_EXTENSION", "yes", "set 0 or 1"),
    ],
)
def test_a_setting_without_a_meaning_is_an_error_before_any_work(
    variable: str, value: str, allowed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_sources(tmp_path / "cuda_ext")
    result = build(folder, **{variable: value})
    assert result.returncode == extension.EXIT_CANNOT_BEGIN
    assert result.stdout.splitlines()[-1].startswith(f"attngeo_ext: ERROR: {variable}={value} ")
    assert allowed in result.stdout
    assert not (folder / "build").exists()
    assert not (folder / "attngeo_ext" / "build.json").exists()
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match="could not begin"):
        extension.build(tmp_path)


def test_the_binary_is_made_again_exactly_when_the_loader_refuses_it(fake: Fake) -> None:
    binary, path = (fake.folder / "attngeo_ext" / name for name in ("_C.abi3.so", "build.json"))
    whole, good = binary.read_bytes(), record(fake.folder)
    assert problem(fake.folder).startswith("extension cannot be loaded here")  # no more than the fake's text is wrong
    assert "up to date" in fake.build().stdout
    damages: list[Callable[[], object]] = [
        lambda: binary.write_bytes(whole[: len(whole) // 2]),
        lambda: binary.write_bytes(b""),
        binary.unlink,
        lambda: (binary.unlink(), binary.mkdir()),
        lambda: path.write_text(""),
        lambda: path.write_text("{"),
        lambda: path.write_bytes(b"\xff"),
        lambda: path.write_text("[]"),
        lambda: path.write_text('{"built": true}'),
        lambda: path.write_text(json.dumps({**good, "torch": "1.0"})),
        lambda: path.write_text(json.dumps({**good, "cpu_variants": 5})),
        lambda: path.write_text(json.dumps({**good, "cuda": {}})),
        path.unlink,
        lambda: (path.unlink(), path.mkdir(), (path / "inside").touch()),
    ]
    for number, damage in enumerate(damages):
        damage()
        assert "run `make env`" in problem(fake.folder) or "cannot be read" in problem(fake.folder), number
        result = fake.build()
        assert result.returncode == 0, result.stdout + result.stderr
        assert "built in" in result.stdout, number
        assert binary.read_bytes() == whole
    assert "up to date" in fake.build().stdout


def test_a_current_binary_outlives_its_compilers(fake: Fake, tmp_path: Path) -> None:
    before = record(fake.folder)
    bare = {"PATH": str(tmp_path), "CXX": "", "ATTNGEO_REQUIRE_EXTENSION": "1"}
    for environment in (bare, {"CXX": "gone"}):
        result = build(fake.folder, **environment)
        assert result.returncode == 0
        assert "up to date" in result.stdout
        assert "nothing could be compiled now" in result.stdout
        assert record(fake.folder) == before
    fake.say("fake 2.0")
    assert "built in" in fake.build().stdout
    (fake.folder / "csrc" / "ops.cpp").write_text("int edited;\n")
    result = build(fake.folder, PATH=str(tmp_path), CXX="")
    assert result.returncode == 0
    assert "WARNING: not built, the slower naive forms will run: no C++ compiler" in result.stdout
    assert record(fake.folder)["built"] is False
    assert (fake.folder / "attngeo_ext" / "_C.abi3.so").exists()


def test_kernels_outlive_nvcc_unless_the_switch_asks_for_none(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    code = runpy.run_path(str(fake.folder / "setup.py"))
    nvcc = code["Cuda"]("/bin/nvcc", "13.0", architectures=("9.0",))
    means = {
        name: code["Means"](code["find_torch"](), (str(fake.compiler),), "fake 1.0", cuda)
        for name, cuda in (
            ("same", nvcc),
            ("newer", replace(nvcc, version="13.1")),
            ("other", replace(nvcc, architectures=("12.0",))),
            ("none", code["Cuda"](reason="nvcc not found")),
        )
    }
    content = {**record(fake.folder), "conditions": json.loads(json.dumps(code["conditions"](means["same"])))}
    with_kernels = {**content, "cuda": {"built": True, "reason": "", "version": "13.0", "architectures": ["9.0"]}}
    monkeypatch.delenv("ATTNGEO_CUDA", raising=False)
    current = {name: code["is_current"](with_kernels, found) for name, found in means.items()}
    assert current == {"same": True, "newer": False, "other": False, "none": True}
    assert code["is_current"](with_kernels, replace(means["none"], compiler_version="fake 2.0"))
    assert not code["is_current"](content, replace(means["none"], compiler_version="fake 2.0"))
    monkeypatch.setenv("ATTNGEO_CUDA", "0")
    assert not code["is_current"](with_kernels, means["none"])
    assert code["is_current"](content, means["none"])  # nvcc failed then: there are no kernels to leave out


def fake_nvcc(folder: Path, known: str = "") -> Path:
    """An nvcc of torch's CUDA version that says which architectures it knows, with a toolkit around it."""
    import torch

    if torch.version.cuda is None:
        pytest.skip("this torch has no CUDA")
    (folder / "lib64").mkdir()
    (folder / "lib64" / "libcudart_static.a").touch()
    fake = folder / "nvcc"
    fake.write_text(f'#!/bin/sh\necho "release {torch.version.cuda}, V1"\necho "#\\$ TOP={folder}"\necho {known}\n')
    fake.chmod(0o755)
    return fake


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ("compute_75 compute_80 compute_90 compute_100 compute_120", ("8.0", "9.0+PTX", "12.0+PTX")),
        ("compute_70 compute_80 compute_90", ("8.0", "9.0+PTX")),
        ("compute_70 compute_75 compute_80", ("8.0+PTX",)),
    ],
)
def test_without_a_gpu_to_ask_the_architectures_are_the_usual_ones_that_nvcc_knows(
    known: str, expected: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = runpy.run_path(str(SOURCE / "setup.py"))
    for name in ("TORCH_CUDA_ARCH_LIST", "ATTNGEO_CUDA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NVCC", str(fake_nvcc(tmp_path, known)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert code["find_cuda"](code["find_torch"]()).architectures == expected


def test_an_nvcc_that_knows_none_of_the_usual_architectures_is_left_out_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = runpy.run_path(str(SOURCE / "setup.py"))
    for name in ("TORCH_CUDA_ARCH_LIST", "ATTNGEO_CUDA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NVCC", str(fake_nvcc(tmp_path, "compute_70 compute_75")))
    reason = code["find_cuda"](code["find_torch"]()).reason
    assert "knows none of the architectures 8.0, 9.0+PTX, 12.0+PTX: set TORCH_CUDA_ARCH_LIST" in reason
    assert "(70, 75)" in reason
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5")
    assert code["find_cuda"](code["find_torch"]()).architectures == ("7.5",)


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        ({"memory.max": "max", "memory.current": "1"}, None),
        ({"memory.max": "5000", "memory.current": "1000"}, 4000),
        ({"memory/memory.limit_in_bytes": "7000", "memory/memory.usage_in_bytes": "1000"}, 6000),
        ({"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "1"}, None),
    ],
)
def test_memory_for_compilers_is_that_of_the_control_group_of_either_form(
    files: dict[str, str], free: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = runpy.run_path(str(SOURCE / "setup.py"))
    (tmp_path / "memory").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(f"{content}\n")
    monkeypatch.setitem(code["free_memory"].__globals__, "GROUPS", tmp_path)
    found = code["free_memory"]()
    assert found == free if free is not None else found > 2**20


@pytest.mark.parametrize(("gib", "jobs"), [(0.5, 1), (3.9, 1), (4, 2), (64, 3)])
def test_compilers_at_once_are_no_more_than_memory_and_cores_allow(
    gib: float, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = runpy.run_path(str(SOURCE / "setup.py"))
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 5})
    monkeypatch.setitem(code["job_count"].__globals__, "free_memory", lambda: int(gib * 2**30))
    assert code["job_count"]() == jobs
    monkeypatch.setenv("MAX_JOBS", "7")
    assert code["job_count"]() == 7


def test_architectures_that_are_none_are_an_error(tmp_path: Path) -> None:
    fake = fake_nvcc(tmp_path)
    result = build(
        copy_sources(tmp_path / "cuda_ext"), ATTNGEO_CUDA="", NVCC=str(fake), TORCH_CUDA_ARCH_LIST="9.0;Hopper"
    )
    assert result.returncode == extension.EXIT_CANNOT_BEGIN
    assert "TORCH_CUDA_ARCH_LIST has Hopper: write numbers such as 9.0" in result.stdout


def test_what_a_killed_build_left_is_removed_by_the_next_call(fake: Fake) -> None:
    source = fake.folder / "csrc" / "ops.cpp"
    original = source.read_text()
    for edited in (original + "// edited\n", original):  # the next call builds; it finds the binary up to date
        before = record(fake.folder)
        source.write_text(original + "// to be killed\n")
        fake.hang()
        killed = fake.start()
        deadline = time.monotonic() + 30
        while not fake.hangs.exists():
            assert time.monotonic() < deadline, "the compiler did not start"
            time.sleep(0.02)
        killed.kill()
        killed.communicate()
        assert any((fake.folder / "build").glob("tmp*"))
        (fake.folder / "attngeo_ext" / ".build.1.json").touch()
        assert record(fake.folder) == before
        fake.work()
        source.write_text(edited)
        assert fake.build().returncode == 0
        assert [path.name for path in (fake.folder / "build").iterdir()] == ["lock"]
        assert not list((fake.folder / "attngeo_ext").glob(".build.*"))
        source.write_text(original)
        fake.build()


def test_a_current_binary_needs_no_write_and_a_due_build_says_what_cannot_be_written(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = fake.folder / "build"
    shutil.rmtree(scratch)
    scratch.write_text("")  # nothing can be made below it, not even by root
    assert "up to date" in fake.build().stdout
    (fake.folder / "csrc" / "ops.cpp").write_text("int edited;\n")
    before = record(fake.folder)
    result = fake.build()
    assert result.returncode == extension.EXIT_CANNOT_BEGIN
    assert re.search(rf"ERROR: a build is due but {re.escape(str(scratch))}: .*: make .* writable", result.stdout)
    assert "Traceback" not in result.stdout + result.stderr
    assert record(fake.folder) == before
    monkeypatch.setenv("CXX", str(fake.compiler))
    with pytest.raises(UserError, match="could not begin"):
        extension.build(fake.folder.parent)


def test_compilers_that_wait_are_not_run_after_a_failure(fake: Fake) -> None:
    whole = len(fake.calls())
    assert whole > 5
    (fake.folder / "csrc" / "ops.cpp").write_text("int edited;\n")
    fake.fail()
    result = fake.build(MAX_JOBS="1")
    assert result.returncode == 1
    assert result.stdout.splitlines()[-1] == "attngeo_ext: ERROR: the compiler failed: error: the fake fails"
    assert len(fake.calls()) == whole + 1


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
