"""What this machine has, what will run on it, and what to do about what is missing; works when anything is missing."""

import ctypes
import importlib
import importlib.util
import os
import platform
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "warn", "missing"]

BUILD_REMEDY = "run `make env`"
DISK_WANTED_GB = 12.0
MEMORY_WANTED_GB = 6.0
FFCV_SYSTEM_PACKAGES = ("g++", "pkg-config", "libopencv-imgproc-dev", "libturbojpeg0-dev", "libgl1", "libglib2.0-0")


@dataclass(frozen=True)
class Check:
    """One line of the report: `missing` stops something that was asked for, `warn` only limits it."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _first_line(*command: str) -> str | None:
    """First line that `command` prints, or None when it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return lines[0] if lines else ""


def _python() -> Check:
    detail = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}"
    if not (3, 11) <= sys.version_info < (3, 14):
        return Check("python", "warn", detail, "use Python 3.11 to 3.13: make env PYTHON=python3.12")
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return Check("python", "warn", detail, "only Linux on x86-64 is tested")
    return Check("python", "ok", detail)


def _torch() -> Check:
    if _version("torch") is None:
        return Check("torch", "missing", "not installed", BUILD_REMEDY)
    torch = importlib.import_module("torch")
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Check(
        "torch", "ok", f"{torch.__version__} ({cuda}), torchvision {_version('torchvision') or 'not installed'}"
    )


def _packages() -> Check:
    """Whether the workflow's packages are installed, by name only."""
    needed = ("snakemake", "mlflow", "transformers", "timm", "pandas", "scipy", "matplotlib", "pydantic", "typer")
    absent = [name for name in needed if _version(name) is None]
    if absent:
        return Check("packages", "missing", f"not installed: {', '.join(absent)}", BUILD_REMEDY)
    return Check("packages", "ok", f"snakemake {_version('snakemake')}, mlflow {_version('mlflow')}")


def _compiler() -> Check:
    for name in filter(None, (os.environ.get("CXX"), "g++", "c++")):
        if version := _first_line(name, "--version"):
            return Check("compiler", "ok", version)
    return Check(
        "compiler", "warn", "no C++ compiler: the naive operators run", f"install g++ (apt: g++), then {BUILD_REMEDY}"
    )


def _nvcc() -> Check:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    for name in ("nvcc", f"{home}/bin/nvcc"):
        try:
            lines = subprocess.run([name, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        release = next((line.strip() for line in lines.splitlines() if "release" in line), "found")
        return Check("nvcc", "ok", release)
    if shutil.which("nvidia-smi"):
        return Check(
            "nvcc", "warn", "not found: no CUDA kernels are built", f"install the CUDA toolkit, then {BUILD_REMEDY}"
        )
    return Check("nvcc", "ok", "not found; only a machine with an NVIDIA GPU needs it")


def _gpu() -> Check:
    seen = _first_line("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    if _version("torch") is None:
        return Check("gpu", "warn", seen or "none seen; torch is not installed", BUILD_REMEDY)
    torch = importlib.import_module("torch")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Check("gpu", "ok", ", ".join(names))
    if seen:
        remedy = "install a CUDA build of torch that this driver supports: make env TORCH_INDEX=..."
        return Check("gpu", "warn", f"{seen}, but torch cannot use it", remedy)
    return Check("gpu", "ok", "none: everything runs on the CPU; presets demo, study and smoke need no GPU")


def _extension() -> Check:
    try:
        found = importlib.util.find_spec("attngeo_ext")
    except (ImportError, ValueError):
        found = None
    if found is None or not found.submodule_search_locations:
        return Check("extension", "warn", "not installed: the naive operators run", BUILD_REMEDY)
    package = Path(next(iter(found.submodule_search_locations)))
    record = runpy.run_path(str(package / "record.py"))  # by its path: the package itself imports torch
    build: dict[str, Any] = record["read_record"](package)
    why = record["why_unusable"](build, package, None)  # whether torch is another one, the next check says
    if why:
        return Check("extension", "warn", f"{why}; the naive operators run", BUILD_REMEDY)
    cuda = build["cuda"]
    gpu = (
        f"CUDA {cuda['version']} for {', '.join(cuda['architectures'])}"
        if cuda["built"]
        else f"no CUDA: {cuda['reason']}"
    )
    return Check("extension", "ok", f"CPU ({', '.join(build['cpu_variants'])}); {gpu}; for torch {build['torch']}")


def _backends() -> Check:
    """What `backend="auto"` will choose, from the table that `python -m attngeo.ops` prints."""
    if _version("torch") is None:
        return Check("backends", "missing", "no operator can run without torch", BUILD_REMEDY)
    module = importlib.import_module("attngeo.ops.backend")
    found: dict[str, list[str]] = {}
    for op, device, _, backend, why in module.table():
        if op in module.COMPILED_OPERATORS:
            operators = found.setdefault(f"{backend} on {device} ({why.split(',')[0]})", [])
            operators += [op] if op not in operators else []
    detail = "; ".join(f"{choice}: {', '.join(operators)}" for choice, operators in found.items())
    if any(choice.startswith("naive") for choice in found):
        return Check("backends", "warn", detail, f"{BUILD_REMEDY}; until then naive forms run")
    return Check("backends", "ok", detail)


def _ffcv() -> Check:
    version = _version("ffcv")
    remedy = f"as root: apt-get install {' '.join(FFCV_SYSTEM_PACKAGES)}; then {BUILD_REMEDY}"
    if version is None:
        return Check("ffcv", "warn", "not installed: the torch loader runs", remedy)
    try:
        for library in sorted(Path(str(metadata.distribution("ffcv").locate_file("ffcv"))).glob("_libffcv*.so")):
            ctypes.CDLL(str(library))
    except OSError as error:
        return Check("ffcv", "warn", f"{version}, but it does not load ({error}): the torch loader runs", remedy)
    detail = f"{version}, numba {_version('numba')}, opencv-python {_version('opencv-python')}"
    if _version("numba") is None or _version("opencv-python") is None:
        return Check("ffcv", "warn", f"{detail}: the torch loader runs", remedy)
    if _version("opencv-python-headless"):
        return Check("ffcv", "warn", f"{detail} beside opencv-python-headless", "pip uninstall opencv-python-headless")
    return Check("ffcv", "ok", detail)


def _system_packages() -> Check:
    if shutil.which("dpkg-query") is None:
        return Check("system packages", "ok", "not a Debian system: not checked")
    done = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package} ${Provides} ${db:Status-Abbrev}\n"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    # Newer systems carry libglib2.0-0 under another name that provides the old one.
    installed = {
        word.strip(",")
        for line in done.stdout.splitlines()
        if line.rstrip().endswith("ii")
        for word in line.split()[:-1]
    }
    absent = [name for name in FFCV_SYSTEM_PACKAGES if name not in installed]
    if absent:
        return Check(
            "system packages",
            "warn",
            f"not installed: {' '.join(absent)}",
            f"as root: apt-get install -y --no-install-recommends {' '.join(absent)}",
        )
    return Check("system packages", "ok", " ".join(FFCV_SYSTEM_PACKAGES))


def _setpriv() -> Check:
    """Whether jobs can be made to end with Snakemake; busybox has a setpriv that cannot do it."""
    if _first_line("setpriv", "--pdeathsig", "TERM", "true") is None:
        return Check(
            "setpriv",
            "warn",
            "missing or too old: where Snakemake is killed outright, its jobs go on",
            "install util-linux 2.33 or newer (apt: util-linux)",
        )
    return Check("setpriv", "ok", "jobs end when Snakemake does")


def _disk() -> Check:
    free_gb = shutil.disk_usage(Path.cwd()).free / 1e9
    detail = f"{free_gb:.1f} GB free in {Path.cwd()}"
    if free_gb < DISK_WANTED_GB:
        return Check(
            "disk", "warn", detail, f"a fresh environment and the demo want {DISK_WANTED_GB:.0f} GB: make space"
        )
    return Check("disk", "ok", detail)


def _memory() -> Check:
    total_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    if total_gb < MEMORY_WANTED_GB:
        return Check("memory", "warn", f"{total_gb:.1f} GB", "the demo wants 6 GB: run it with CORES=1")
    return Check("memory", "ok", f"{total_gb:.1f} GB")


def _cores() -> Check:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    return Check("cores", "ok", f"{usable} usable of {present}")


def _cache() -> Check:
    if _version("PyYAML") is None:
        return Check("embedded data", "missing", "cannot be listed without PyYAML", BUILD_REMEDY)
    embedded = importlib.import_module("attngeo.data.embedded")
    root = embedded.cache_root()
    names = list(embedded.sources())
    here = [name for name in names if embedded.is_fetched(name)]
    absent = [name for name in names if name not in here]
    offline = os.environ.get("ATTNGEO_OFFLINE", "0") not in ("", "0")
    detail = f"cache {root}; fetched: {', '.join(here) or 'none'}; not yet: {', '.join(absent) or 'none'}"
    if absent and offline:
        remedy = "unset ATTNGEO_OFFLINE, or copy the cache folder from a machine with a network"
        return Check("embedded data", "warn", f"{detail}; ATTNGEO_OFFLINE forbids fetching", remedy)
    if not os.access(next(folder for folder in (root, *root.parents) if folder.exists()), os.W_OK):
        return Check(
            "embedded data", "warn", f"{detail}; the cache is not writable", "set ATTNGEO_CACHE to another folder"
        )
    return Check("embedded data", "ok", detail + ("; offline" if offline else ""))


CHECKS: tuple[tuple[str, Callable[[], Check]], ...] = (
    ("python", _python),
    ("torch", _torch),
    ("packages", _packages),
    ("compiler", _compiler),
    ("nvcc", _nvcc),
    ("gpu", _gpu),
    ("extension", _extension),
    ("backends", _backends),
    ("ffcv", _ffcv),
    ("system packages", _system_packages),
    ("setpriv", _setpriv),
    ("cores", _cores),
    ("memory", _memory),
    ("disk", _disk),
    ("embedded data", _cache),
)


def report() -> list[Check]:
    """Every check in a fixed order; one that fails itself is reported as missing with its error."""
    checks = []
    for name, check in CHECKS:
        try:
            checks.append(check())
        except Exception as error:  # the reason for a broken installation is what this command is asked for
            checks.append(Check(name, "missing", f"{type(error).__name__}: {error}", BUILD_REMEDY))
    return checks


def print_report(checks: list[Check]) -> None:
    """Print the report: a table where rich is installed, plain lines elsewhere."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        for check in checks:
            remedy = f" -> {check.remedy}" if check.remedy else ""
            print(f"{check.status:<8}{check.name}: {check.detail}{remedy}")
        return
    colours = {"ok": "green", "warn": "yellow", "missing": "red"}
    table = Table(box=None, pad_edge=False)
    for heading in ("", "what", "here", "what to do"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        table.add_row(Text(check.status, colours[check.status]), check.name, Text(check.detail), Text(check.remedy))
    Console().print(table)


def exit_status(checks: list[Check]) -> int:
    """1 if anything that the project cannot do without is missing, else 0."""
    return int(any(check.status == "missing" for check in checks))
