"""Build the extension: `python cuda_ext/setup.py build_ext --inplace`.

One binary for CPU and, where nvcc is found and torch has CUDA, GPUs. It is torch-free CUDA code behind plain C
functions and one file on torch's stable ABI, so that it takes seconds to build and imports on a CPU-only torch.

Environment: CXX, NVCC, CUDA_HOME, MAX_JOBS, TORCH_CUDA_ARCH_LIST (for example "9.0;12.0+PTX"), ATTNGEO_CUDA=0 (CPU
only), ATTNGEO_REQUIRE_EXTENSION=1 (fail instead of warn where there is nothing to build with).

A binary that is current needs no compiler and no write: it stays. Otherwise, without torch or a compiler, the build
warns, records why, and ends with status 0. A compiler that fails on the CPU part is an error, status 1, that leaves an
earlier binary and its record as they are; one that fails on the CUDA part leaves a CPU build whose record says so. A
setting with no meaning, or a folder that cannot be written, is an error before any work, status 2.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "attngeo_ext"
SCRATCH = ROOT / "build"
# By its path: importing the package would import torch.
SHARED = runpy.run_path(str(PACKAGE / "record.py"))
BINARY = PACKAGE / SHARED["BINARY"]
RECORD = PACKAGE / SHARED["RECORD"]

# torch 2.10 is the first whose stable ABI has everything that the files beside csrc/ops.cpp use.
COMMON_FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden"]
TORCH_FLAGS = ["-DTORCH_TARGET_VERSION=0x020a000000000000"]
VARIANTS = {
    "portable": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"],
}
SWITCHES = ("ATTNGEO_CUDA", "ATTNGEO_REQUIRE_EXTENSION")
# Code of 8.0 runs on all of 8.x and code of 12.0 on 12.x; what lies between and beyond (10.x, 11.x) compiles the PTX.
DEFAULT_ARCHITECTURES = ["8.0", "9.0+PTX", "12.0+PTX"]
JOB_MEMORY = 2 * 2**30
GROUPS = Path("/sys/fs/cgroup")


class CannotBuild(Exception):
    """Nothing can be built here; the naive forms will run."""


class CannotBegin(Exception):
    """The user has to put something right first: a setting, a permission."""


class CompilerFailed(Exception):
    """There is a compiler and it failed: an error of the sources or of the machine, never passed over."""


@dataclass(frozen=True)
class Torch:
    """The installed torch: its folder, version and CUDA version (None for a CPU build)."""

    folder: Path
    version: str
    cuda: str | None


@dataclass(frozen=True)
class Cuda:
    """A usable CUDA toolkit, or the reason why there is none."""

    nvcc: str = ""
    version: str = ""
    include: str = ""
    library: str = ""
    architectures: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Means:
    """What there is to compile with; `missing` says what is wanting, if anything, and the rest is then empty."""

    torch: Torch | None = None
    compiler: tuple[str, ...] = ()
    compiler_version: str = ""
    cuda: Cuda = Cuda()
    missing: str = ""


def say(message: str) -> None:
    """Print one line of the build's report."""
    print(f"attngeo_ext: {message}", flush=True)


def check_settings() -> None:
    """Raise CannotBegin naming a variable whose value has no meaning, and the values that have one."""
    jobs = os.environ.get("MAX_JOBS", "")
    if not re.fullmatch(r"([1-9][0-9]*)?", jobs):
        raise CannotBegin(f"MAX_JOBS={jobs} is not a number of compilers: set 1, 2, 3, ... or leave it unset")
    for name in SWITCHES:
        if (value := os.environ.get(name, "")) not in ("", "0", "1"):
            raise CannotBegin(f"{name}={value} has no meaning: set 0 or 1 or leave it unset")


def output_of(command: list[str]) -> str:
    """Standard output and error of a command together; CannotBuild if it cannot be run."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotBuild(f"`{shlex.join(command)}` failed ({error})") from error
    return result.stdout + result.stderr


def find_torch() -> Torch:
    """The installed torch, read from its version file: importing it would take seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise CannotBuild("torch is not installed: run `make env`")
    folder = Path(spec.origin).parent
    version = runpy.run_path(str(folder / "version.py"))
    return Torch(folder, version["__version__"], version["cuda"])


def find_compiler() -> tuple[list[str], str]:
    """The C++ compiler as a command, from CXX or PATH, and its version line."""
    wanted = os.environ.get("CXX")
    command = shlex.split(wanted) if wanted else next(([name] for name in ("g++", "c++") if shutil.which(name)), [])
    if not command or shutil.which(command[0]) is None:
        what = f"CXX={wanted} is not a program" if wanted else "no C++ compiler (g++ or c++) on PATH"
        raise CannotBuild(f"{what}: install g++, then run `make env`")
    return command, output_of([*command, "--version"]).splitlines()[0]


def find_cuda(torch: Torch) -> Cuda:
    """The CUDA toolkit if it can serve this torch; its want is no error, since the CPU part does not need it.

    Raises CannotBegin for architectures that are none.
    """
    if os.environ.get("ATTNGEO_CUDA") == "0":
        return Cuda(reason="ATTNGEO_CUDA=0")
    if torch.cuda is None:
        return Cuda(reason=f"torch {torch.version} has no CUDA")
    home = os.environ.get("CUDA_HOME")
    candidates = [os.environ.get("NVCC"), f"{home}/bin/nvcc" if home else None, "nvcc", "/usr/local/cuda/bin/nvcc"]
    nvcc = next((found for name in candidates if name and (found := shutil.which(name))), None)
    if nvcc is None:
        return Cuda(reason="nvcc not found")
    try:
        release = re.search(r"release (\d+)\.(\d+)", output_of([nvcc, "--version"]))
        top = re.search(r"#\$ TOP=(.+)", output_of([nvcc, "--dryrun", "-c", "any.cu", "-o", "any.o"]))
        known = {int(arch) for arch in re.findall(r"compute_(\d+)\b", output_of([nvcc, "--list-gpu-arch"]))}
    except CannotBuild as error:
        return Cuda(reason=str(error))
    if release is None or top is None:
        return Cuda(reason=f"{nvcc} does not say its version or folder")
    version = ".".join(release.groups())
    if release[1] != torch.cuda.split(".")[0]:
        return Cuda(
            reason=f"nvcc is {version} but torch {torch.version} was built with CUDA {torch.cuda}: install a CUDA "
            f"{torch.cuda.split('.')[0]} toolkit (and set CUDA_HOME) or a torch for CUDA {release[1]}"
        )
    folder = Path(os.path.realpath(top[1]))
    library = next((lib for lib in (folder / "lib64", folder / "lib") if (lib / "libcudart_static.a").exists()), None)
    if library is None:
        return Cuda(reason=f"no libcudart_static.a below {folder}")
    wanted = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if wanted:
        architectures = [arch for arch in re.split(r"[;,\s]+", wanted) if arch]
        if bad := [arch for arch in architectures if not re.fullmatch(r"\d+\.\d[a-z]?(\+PTX)?", arch)]:
            raise CannotBegin(f"TORCH_CUDA_ARCH_LIST has {', '.join(bad)}: write numbers such as 9.0 or 12.0+PTX")
    else:
        usual = {arch: int(arch.removesuffix("+PTX").replace(".", "")) for arch in DEFAULT_ARCHITECTURES}
        architectures = [arch for arch, number in usual.items() if number in known]
        if not architectures:
            return Cuda(
                reason=f"{nvcc} {version} knows none of the architectures {', '.join(usual)}: set TORCH_CUDA_ARCH_LIST "
                f"to one that it knows ({', '.join(map(str, sorted(known))) or 'it lists none'})"
            )
        if not architectures[-1].endswith("+PTX"):
            architectures[-1] += "+PTX"
    return Cuda(nvcc, version, str(folder / "include"), str(library), tuple(architectures))


def find_means() -> Means:
    """The installed torch and compilers, or what is wanting; CannotBegin for architectures that are none."""
    torch = None
    try:
        torch = find_torch()
        compiler, version = find_compiler()
        return Means(torch, tuple(compiler), version, find_cuda(torch))
    except CannotBuild as error:
        return Means(torch, missing=str(error))


def nvcc_flags(cuda: Cuda) -> list[str]:
    """Flags of the CUDA file: one code object an architecture, PTX where asked for, and the register report."""
    flags = ["-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-Xptxas", "-v", "--threads", "0"]
    for entry in cuda.architectures:
        number = entry.removesuffix("+PTX").replace(".", "")
        code = f"[sm_{number},compute_{number}]" if entry.endswith("+PTX") else f"sm_{number}"
        flags.append(f"-gencode=arch=compute_{number},code={code}")
    return flags


def free_memory() -> int:
    """Bytes that this process may still use: of the machine and of its control group, of either form."""
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    free = [int(available[1]) * 1024 if available else JOB_MEMORY]
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # there is no such file, or it says "max"
            free.append(int((GROUPS / limit).read_text()) - int((GROUPS / used).read_text()))
    return min(free)


def job_count() -> int:
    """Compilers to run at once: MAX_JOBS, or as many as cores and memory allow."""
    if wanted := os.environ.get("MAX_JOBS"):
        return int(wanted)
    return max(1, min(len(os.sched_getaffinity(0)), free_memory() // JOB_MEMORY))


def run_compiler(command: list[str]) -> str:
    """Run one compiler in ROOT with relative paths (nvcc does not survive spaces) and return what it printed.

    Raises CompilerFailed with its first line that tells of an error, after its whole output.
    """
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    printed = result.stdout + result.stderr
    if result.returncode == 0:
        return printed
    killed = result.returncode < 0 or "Killed" in printed
    print(f"{shlex.join(command)}\n{printed}", flush=True)
    if killed:
        raise CompilerFailed(f"{command[0]} was killed, probably for want of memory: set MAX_JOBS=1")
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    telling = (line for line in lines if re.search(r"\berror\b|undefined reference|cannot find", line, re.IGNORECASE))
    raise CompilerFailed(next(telling, lines[-1] if lines else f"{command[0]} ended with status {result.returncode}"))


def stopping_at_a_failure() -> Callable[[list[str]], str]:
    """`run_compiler` for a group of commands: once one has failed, those that still wait fail without being run."""
    failures: list[CompilerFailed] = []

    def run(command: list[str]) -> str:
        if failures:
            raise failures[0]
        try:
            return run_compiler(command)
        except CompilerFailed as error:
            failures.append(error)
            raise

    return run


def ptxas_report(printed: str) -> list[dict[str, Any]]:
    """Registers and spills of every kernel and architecture, from what `-Xptxas -v` printed."""
    report = []
    for part in re.split(r"(?=Compiling entry function)", printed):
        entry = re.search(r"Compiling entry function '(\S+)' for '(\w+)'", part)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        registers = re.search(r"Used (\d+) registers", part)
        if entry and spills and registers:
            report.append(
                {
                    "kernel": entry[1],
                    "architecture": entry[2],
                    "registers": int(registers[1]),
                    "spill_stores_bytes": int(spills[1]),
                    "spill_loads_bytes": int(spills[2]),
                }
            )
    return report


def sources(pattern: str) -> list[Path]:
    """Source files below the root that match, relative to it, in a fixed order."""
    return sorted(path.relative_to(ROOT) for path in ROOT.glob(pattern))


def compile_all(compiler: tuple[str, ...], torch: Torch, cuda: Cuda) -> tuple[list[dict[str, Any]], Cuda]:
    """Compile, link aside and rename the binary; returns the ptxas report and what became of CUDA."""
    run_cuda, run_cpu = stopping_at_a_failure(), stopping_at_a_failure()
    with tempfile.TemporaryDirectory(dir=SCRATCH, prefix="tmp") as folder:
        objects = Path(folder).relative_to(ROOT)
        x86 = platform.machine() in ("x86_64", "AMD64")
        variants = VARIANTS if x86 else {"portable": []}
        cpu_flags = [*COMMON_FLAGS, "-DATTNGEO_X86_VARIANTS"] if x86 else COMMON_FLAGS
        commands = {}
        for source in sources("csrc/cpu/*.cpp"):
            for name, flags in variants.items():
                command = [*compiler, *cpu_flags, *flags, f"-DATTNGEO_VARIANT={name}", "-c", str(source)]
                commands[f"{source.stem}.{name}.o"] = command
        with ThreadPoolExecutor(job_count()) as pool:
            # nvcc first: it takes longest, and whether it succeeds decides what the torch side is compiled with.
            cuda_jobs = {}
            for source in sources("csrc/cuda/*.cu") if cuda.nvcc else []:
                command = [cuda.nvcc, "-ccbin", compiler[0], *nvcc_flags(cuda), "-c", str(source)]
                cuda_jobs[f"{source.stem}.cuda.o"] = pool.submit(
                    run_cuda, [*command, "-o", f"{objects}/{source.stem}.cuda.o"]
                )
            jobs = [pool.submit(run_cpu, [*command, "-o", f"{objects}/{name}"]) for name, command in commands.items()]
            report: list[dict[str, Any]] = []
            try:
                for job in cuda_jobs.values():
                    report += ptxas_report(job.result())
            except CompilerFailed as error:
                say(f"WARNING: the CUDA part did not compile, the CPU part is built alone: {error}")
                cuda, cuda_jobs, report = Cuda(reason=f"nvcc failed: {error}"), {}, []
            torch_side = [*compiler, *cpu_flags, *TORCH_FLAGS, "-isystem", str(torch.folder / "include")]
            if cuda.nvcc:
                torch_side += ["-DATTNGEO_WITH_CUDA", "-DUSE_CUDA"]
            for source in sources("csrc/*.cpp"):
                commands[f"{source.stem}.o"] = [*torch_side, "-c", str(source)]
                jobs.append(pool.submit(run_cpu, [*commands[f"{source.stem}.o"], "-o", f"{objects}/{source.stem}.o"]))
            for job in jobs:
                job.result()
        linked = f"{objects}/{BINARY.name}"
        names = [*commands, *cuda_jobs]
        link = [*compiler, "-shared", *(f"{objects}/{name}" for name in names), "-o", linked]
        link += [f"-L{torch.folder / 'lib'}", "-lc10", "-ltorch_cpu"]
        if cuda.nvcc:
            # The static runtime keeps its names to itself: torch's shared one lives in the same process.
            link += [f"-L{cuda.library}", "-lcudart_static", "-Wl,--exclude-libs,ALL", "-ldl", "-lrt", "-lpthread"]
        run_compiler([*link, "-Wl,--no-undefined"])
        replace(ROOT / linked, BINARY)
    return report, cuda


def replace(new: Path, old: Path) -> None:
    """Rename a file to a place where a folder may lie, as container engines make one for a mount without a source."""
    if old.is_dir():
        shutil.rmtree(old)
    os.replace(new, old)


def write_record(record: dict[str, Any]) -> None:
    """Write build.json aside and rename it."""
    aside = RECORD.with_name(f".build.{os.getpid()}.json")
    aside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    replace(aside, RECORD)


def describe(record: dict[str, Any]) -> str:
    """What a record's binary holds, in one line."""
    cuda = record["cuda"]
    if cuda["built"]:
        gpu = f"CUDA {cuda['version']} ({', '.join(cuda['architectures'])})"
    else:
        gpu = f"no CUDA: {cuda['reason']}"
    return f"CPU ({', '.join(record['cpu_variants'])}); {gpu}"


def conditions(means: Means) -> dict[str, Any]:
    """What shapes the binary besides the sources and torch, which the loader looks at too."""
    cuda = means.cuda
    return {
        "compiler": [*means.compiler, means.compiler_version],
        "flags": [COMMON_FLAGS, TORCH_FLAGS, VARIANTS],
        "cuda": [cuda.nvcc, cuda.version, nvcc_flags(cuda)],
        "machine": platform.machine(),
    }


def is_current(record: dict[str, Any], means: Means) -> bool:
    """Whether a build would make nothing better: a compiler or nvcc that is gone is no reason to give a binary up."""
    if SHARED["why_unusable"](record, PACKAGE, means.torch and means.torch.version) is not None:
        return False
    if means.missing:
        return True
    if record["cuda"]["built"] and not means.cuda.nvcc:
        return os.environ.get("ATTNGEO_CUDA") != "0"
    then, now = record.get("conditions"), conditions(means)
    if not isinstance(then, dict):
        return False
    if not means.cuda.nvcc:
        now["cuda"] = then.get("cuda")
    return then == now


def build(torch: Torch, means: Means) -> dict[str, Any]:
    """Compile, and return the record of it; CompilerFailed leaves the former binary and record as they are."""
    digest = SHARED["source_digest"](ROOT / "csrc")
    started = time.monotonic()
    report, cuda = compile_all(means.compiler, torch, means.cuda)
    record = {
        "built": True,
        "conditions": conditions(means),
        "source_digest": digest,
        "binary_sha256": hashlib.sha256(BINARY.read_bytes()).hexdigest(),
        "torch": torch.version,
        "compiler": means.compiler_version,
        "cpu_variants": list(VARIANTS) if platform.machine() in ("x86_64", "AMD64") else ["portable"],
        "cuda": {
            "built": bool(cuda.nvcc),
            "reason": cuda.reason,
            "version": cuda.version,
            "architectures": list(cuda.architectures),
            "ptxas": report,
        },
        "seconds": round(time.monotonic() - started, 1),
    }
    write_record(record)
    return record


@contextmanager
def only_one(wait: bool) -> Iterator[None]:
    """Hold the lock of the builds; without `wait` BlockingIOError while another holds it."""
    SCRATCH.mkdir(exist_ok=True)
    with open(SCRATCH / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def remains() -> list[Path]:
    """What builds have written aside; while the lock is held, all of it was left by builds that were killed."""
    return [*SCRATCH.glob("tmp*"), *PACKAGE.glob(".build.*.json")]


def remove_remains() -> None:
    """Remove what killed builds have left; the lock must be held."""
    for path in remains():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def keep_if_current(means: Means) -> bool:
    """Say that the binary is up to date, if it is."""
    record = SHARED["read_record"](PACKAGE)
    if not is_current(record, means):
        return False
    note = f" (nothing could be compiled now: {means.missing})" if means.missing else ""
    say(f"up to date: {describe(record)}{note}")
    return True


def bring_up_to_date() -> None:
    """Build if a build would make another binary; CannotBegin, CannotBuild or CompilerFailed if that cannot be.

    Only what has to be written needs the lock, so that a current binary can lie on a read-only disk.
    """
    check_settings()
    means = find_means()
    if keep_if_current(means):
        if remains():
            with suppress(OSError), only_one(wait=False):
                remove_remains()
        return
    not_built = {"built": False, "reason": means.missing}
    if means.missing and SHARED["read_record"](PACKAGE) == not_built:
        raise CannotBuild(means.missing)
    try:
        with only_one(wait=True):
            remove_remains()
            if keep_if_current(means):
                return
            if means.missing or means.torch is None:
                write_record(not_built)
                raise CannotBuild(means.missing)
            record = build(means.torch, means)
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise CannotBegin(f"a build is due but {what}: make {ROOT} writable for you, with space left") from error
    say(f"built in {record['seconds']} s: {describe(record)}")


class BuildExtension(build_ext):
    """`build_ext`, replaced: one build at a time, and no failure where there is nothing to build with."""

    def run(self) -> None:
        """Build if that is due; exit with status 2 for what the user has to put right, 1 for a compiler's failure."""
        try:
            bring_up_to_date()
        except CannotBegin as error:
            say(f"ERROR: {error}")
            sys.exit(2)
        except CannotBuild as error:
            say(f"WARNING: not built, the slower naive forms will run: {error}")
            if os.environ.get("ATTNGEO_REQUIRE_EXTENSION") == "1":
                sys.exit(1)
        except CompilerFailed as error:
            say(f"ERROR: the compiler failed: {error}")
            sys.exit(1)


if __name__ == "__main__":
    os.chdir(ROOT)
    setup(cmdclass={"build_ext": BuildExtension})
