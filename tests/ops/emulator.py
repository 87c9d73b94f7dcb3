"""Compiles and runs csrc/emulator: the shipped CUDA files on the host, plain or under a sanitizer."""

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).parents[2] / "cuda_ext" / "csrc"
WARNINGS = ["-Wall", "-Wextra", "-Wno-unknown-pragmas"]
COMPILE = ["-std=c++17", "-g1", "-DATTNGEO_EMULATOR"]
# Beside memory errors the indexes within the struct in shared memory, vector alignment and 32-bit overflow.
ADDRESS = ["-fsanitize=address,alignment,bounds,signed-integer-overflow,shift", "-fno-sanitize-recover=all"]
SANITIZERS = {"plain": [], "address": ADDRESS, "thread": ["-fsanitize=thread"]}
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1:exitcode=66:history_size=1"}
LACKING = 77  # exit status of a check that found no failure, and not all that it needs
# What a check runs: its own file, and the CUDA files that it calls.
CUDA_FILES = {"emulator": [], "pairwise": ["cuda/pairwise_kernel.cu"], "inverse": ["cuda/inverse.cu"]}


def compiler() -> str | None:
    """The C++ compiler; only g++ has been tried."""
    return shutil.which("g++")


@functools.cache
def missing(mode: str) -> str | None:
    """Why programs of a mode cannot be built and run here, None if they can."""
    found = compiler()
    if found is None:
        return "no g++"
    program = ["-x", "c++", "-", "-o", "/dev/null"]
    result = subprocess.run(
        [found, *SANITIZERS[mode], *program], input="int main() {}", capture_output=True, text=True, check=False
    )
    return None if result.returncode == 0 else f"g++ cannot link with {' '.join(SANITIZERS[mode])}"


@dataclass(frozen=True)
class Workshop:
    """A folder of object files and programs, each named by the digest of all that it was made from."""

    folder: Path

    def program(self, check: str, mode: str, optimize: str = "-O1", csrc: Path = CSRC) -> Path:
        """The program of one check; `csrc` may hold changed CUDA files, which may cause warnings."""
        # Without a sanitizer: the scheduler must be no event to them, references would only get slow.
        objects = [self._object(CSRC / "emulator" / "scheduler.cpp", ["-O2"])]
        if check == "emulator":
            objects.append(self._object(CSRC / "emulator" / "check_emulator.cpp", [optimize, *SANITIZERS[mode]]))
        else:
            objects += [
                self._object(CSRC / "emulator" / f"{name}.cpp", ["-O2"]) for name in ("check", f"check_{check}")
            ]
        for name in CUDA_FILES[check]:
            flags = ["-x", "c++", optimize, *SANITIZERS[mode]]
            objects.append(self._object(csrc / name, flags if csrc == CSRC else [*flags, "-w"]))
        return self._make(objects, SANITIZERS[mode], objects, "")

    def _object(self, source: Path, flags: list[str]) -> Path:
        # Every header counts: which ones a file includes is not worth finding out.
        headers = sorted(p for p in source.parents[1].rglob("*") if p.suffix in (".h", ".cuh") and "cpu" not in p.parts)
        return self._make([source, *headers], [*COMPILE, *WARNINGS, *flags, "-c"], [source], ".o")

    def _make(self, contents: list[Path], flags: list[str], inputs: list[Path], suffix: str) -> Path:
        found = compiler()
        assert found is not None
        digest = hashlib.sha256(repr(flags).encode())
        for path in contents:
            digest.update(path.read_bytes())
        target = self.folder / f"{inputs[-1].stem}-{digest.hexdigest()[:20]}{suffix}"
        with open(self.folder / f"{target.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                aside = target.with_suffix(".new")
                command = [found, *flags, *map(str, inputs), "-o", str(aside)]
                result = subprocess.run(command, capture_output=True, text=True, check=False)
                assert result.returncode == 0, result.stderr
                assert result.stderr == "", result.stderr
                aside.rename(target)
        return target


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program; its output and errors come together in stdout."""
    command = [str(program), *arguments]
    variables = {**os.environ, **OPTIONS}

    def start(words: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables, check=False
        )

    result = start(command)
    if "unexpected memory mapping" in result.stdout:  # the thread sanitizer on a system that scatters addresses widely
        result = start(["setarch", platform.machine(), "-R", *command])
    return result


def end_of(result: subprocess.CompletedProcess[str]) -> str:
    """What is worth reading of a run that failed."""
    lines = result.stdout.splitlines()
    failures = [line for line in lines if line.startswith("FAIL")]
    return "\n".join([f"status {result.returncode}", *failures[:20], *lines[-40:]])
