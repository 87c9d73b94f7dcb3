"""Run the whole workflow for a preset, as `make reproduce` does.

What a killed run left is dealt with first: the lock of a Snakemake that is gone is cleared, with a message, unless a
Snakemake really runs in this folder. Two of these commands at once are refused by a lock of their own. Ctrl-C is passed
on to every job, and the same command continues later.
"""

import argparse
import fcntl
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130
# Set to a value of its own in every process that a run starts, so that those whose parent is gone are found too.
MARK = "ATTNGEO_REPRODUCE_MARK"
CHECKPOINT_S = 60.0  # for jobs that outlive Snakemake; they got TERM when it ended
KILL_S = 10.0


class RefusedError(Exception):
    """The run cannot start; the message says why and what to do."""


def say(text: str) -> None:
    """Print at once, so that the order with Snakemake's own output is right."""
    print(f"==> {text}", flush=True)


@contextmanager
def only_one(root: Path) -> Iterator[None]:
    """Hold results/.reproduce.lock, or raise RefusedError when another process holds it or it cannot be written."""
    path = root / "results" / ".reproduce.lock"
    try:
        path.parent.mkdir(exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RefusedError(f"cannot write {path} ({error.strerror}): make the results folder writable") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise RefusedError(
                f"another `make reproduce` (process {holder}) runs in this folder: wait for it, or stop it with Ctrl-C"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def running_snakemake(root: Path) -> list[int]:
    """Process ids of the Snakemakes whose working folder is `root`; this process and its parents are not counted."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()[:4]
            is_snakemake = any(Path(word).name == "snakemake" for word in words) and process.pid not in own
            if is_snakemake and process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()) == root:
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def clear_stale_lock(root: Path, unlock: Sequence[str], environment: dict[str, str]) -> None:
    """Remove the lock of a Snakemake that is gone, with a message; RefusedError if one is really running here."""
    state = root / ".snakemake"
    if any(state.glob("locks/*.lock")):
        running = running_snakemake(root)
        if running:
            numbers = ", ".join(map(str, running))
            raise RefusedError(
                f"a Snakemake (process {numbers}) runs in this folder: wait for it, or stop it with Ctrl-C"
            )
        say("an earlier run was killed and left its lock: clearing it")
        done = subprocess.run(unlock, cwd=root, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RefusedError(f"the lock could not be cleared:\n{done.stdout}{done.stderr}")
    unfinished = sum(1 for path in state.glob("incomplete/**/*") if path.is_file())
    if unfinished:
        say(f"{unfinished} outputs of an interrupted run are made again; trainings resume from their checkpoints")


def remove_half_written(root: Path) -> None:
    """Remove what killed jobs were writing: files aside (.NAME.PID.aside.SUFFIX) whose process is gone."""
    removed = 0
    for path in root.joinpath("results").rglob(".*.aside*"):
        words = path.name.split(".aside")[0].rpartition(".")
        if path.is_file() and words[2].isdecimal() and not psutil.pid_exists(int(words[2])):
            path.unlink(missing_ok=True)
            removed += 1
    if removed:
        say(f"{removed} files that a killed job had not finished are removed")


def can_die_with_parent() -> bool:
    """Whether util-linux's setpriv is here; busybox has one that cannot do this."""
    try:
        done = subprocess.run(["setpriv", "--pdeathsig", "KILL", "true"], capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0


def marked_processes(mark: str) -> list[psutil.Process]:
    """The running processes that carry `mark` in their environment, whoever their parent is by now."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def run_passing_signals(command: Sequence[str], root: Path, environment: dict[str, str]) -> int:
    """Run `command` in a process group of its own and pass INT and TERM on to all of it; a second one kills it.

    Snakemake waits for its jobs when it alone gets INT, so the whole group gets it. Jobs have groups of their own, and
    wrappers that end them but may be killed too: after a second signal, or when Snakemake was killed, every process
    that it started is looked for and ended. Returns the exit status.
    """
    if can_die_with_parent():
        # If this process is killed outright, so is Snakemake, and its jobs end through workflow/bin/with-parent.sh.
        command = ["setpriv", "--pdeathsig", "KILL", "--", *command]
    mark = secrets.token_hex(8)
    signals_seen = 0
    process: subprocess.Popen[bytes] | None = None

    def pass_on(_number: int, _frame: object) -> None:
        nonlocal signals_seen
        signals_seen += 1
        if process is None:
            return
        if signals_seen == 1:
            say("stopping: trainings write a checkpoint first (once more to kill)")
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT if signals_seen == 1 else signal.SIGKILL)

    def end_what_is_left() -> None:
        deadline = time.monotonic() + CHECKPOINT_S
        told = False
        while left := marked_processes(mark):
            if signals_seen > 1 or time.monotonic() > deadline:
                for one in left:
                    with suppress(psutil.Error):
                        one.kill()
            elif not told:
                say(f"waiting for {len(left)} processes that outlive Snakemake")
                told = True
            if time.monotonic() > deadline + KILL_S:
                numbers = ", ".join(str(one.pid) for one in left)
                print(f"warning: these processes cannot be ended: {numbers}", file=sys.stderr)
                return
            psutil.wait_procs(left, timeout=0.5)

    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        process = subprocess.Popen(
            command, cwd=root, env={**environment, MARK: mark}, stdin=subprocess.DEVNULL, process_group=0
        )
        if signals_seen:
            os.killpg(process.pid, signal.SIGINT)
        status = process.wait()
        if status != 0 or signals_seen:
            end_what_is_left()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if signals_seen:
        return EXIT_INTERRUPTED
    return status if status >= 0 else 128 - status


def mark_killed_runs(root: Path) -> None:
    """Mark the tracked runs whose process is gone as killed; a failure is a warning, since files are the truth."""
    if not (root / "results" / "mlflow.db").exists():
        return
    try:
        from attngeo.tracking.mlflow_run import reap

        killed = reap(root)
        if killed:
            say(f"{killed} tracked runs of killed processes are now marked KILLED")
    except Exception as error:
        print(f"warning: the tracking database could not be checked: {error}", file=sys.stderr)


def send_unsent(root: Path, preset: str, environment: dict[str, str]) -> None:
    """Send to MLflow what a killed run left: Snakemake does it itself, but not where nothing was to be done."""
    from attngeo.tracking.journal import has_unsent

    if not has_unsent(root, preset):
        return
    say("sending to MLflow what an earlier run left")
    command = [sys.executable, "-m", "attngeo", "track", "sync", preset]
    if subprocess.run(command, cwd=root, env=environment, check=False).returncode:
        print(f"warning: MLflow lacks some of this run, `attngeo track sync {preset}` sends it", file=sys.stderr)


def places(root: Path, preset: str) -> str:
    """What the run made and how to look at it: only what exists."""
    suffix = "" if preset == "demo" else f" PRESET={preset}"
    known = (
        ("figures and tables", "paper_figures/index.html", "paper_figures/index.html"),
        ("claims ledger", "paper_figures/claims.html", "paper_figures/claims.html"),
        ("all behind them", f"results/{preset}", f"results/{preset}/"),
        ("compare the trainings", "results/mlflow.db", f"make ui{suffix}"),
    )
    lines = [f"  {label:<24} {shown}" for label, path, shown in known if (root / path).exists()]
    return "\n".join([f"preset {preset} is complete.", *lines])


def warn_of_naive_operators(root: Path) -> None:
    """Say that the operators were not compiled, if the last build says so: that it did is deep in a job's log."""
    try:
        build = json.loads((root / "cuda_ext" / "attngeo_ext" / "build.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        build = {}
    if build.get("built") is False:
        reason = build.get("reason", "unknown reason")
        print(
            f"warning: the operators are not compiled, the slower naive forms run, as every record says: {reason}",
            file=sys.stderr,
        )


def check_preset(root: Path, preset: str) -> None:
    """RefusedError naming the presets that exist when `preset` is not one of them."""
    if not (root / "config" / preset / "config.yaml").is_file():
        known = ", ".join(sorted(path.parent.name for path in root.glob("config/*/config.yaml"))) or "none"
        raise RefusedError(f"there is no preset {preset!r} (config/{preset}/config.yaml); presets: {known}")


def reproduce(root: Path, preset: str, cores: int, snakemake: Sequence[str]) -> int:
    """Run every stage of `preset`; `snakemake` is the command's beginning. Returns the exit status."""
    environment = {**os.environ, "PATH": f"{root / '.venv' / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}
    configuration = ["--config", f"preset={preset}"]
    try:
        check_preset(root, preset)
        with only_one(root):
            clear_stale_lock(root, [*snakemake, "--unlock", *configuration], environment)
            remove_half_written(root)
            mark_killed_runs(root)
            command = [*snakemake, "--cores", str(cores), "--rerun-incomplete", "all", *configuration]
            status = run_passing_signals(command, root, environment)
            mark_killed_runs(root)
            if status == 0:
                send_unsent(root, preset, environment)
    except RefusedError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_REFUSED
    if status == 0:
        say(places(root, preset))
    else:
        say("not complete. What is finished is kept: the same command continues from there")
    warn_of_naive_operators(root)
    return status


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="run the whole workflow for a preset")
    parser.add_argument("--preset", default="demo")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    return reproduce(ROOT, arguments.preset, arguments.cores, [sys.executable, "-m", "snakemake"])


if __name__ == "__main__":
    sys.exit(main())
