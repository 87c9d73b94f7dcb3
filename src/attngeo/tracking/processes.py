"""Which process a run belongs to, said so that it can later be told alive from gone."""

import os
import socket
from pathlib import Path

# A process id is used again; with the boot and the time of its start, in clock ticks after it, it is unique.
PID, HOST, STARTED, BOOT = "attngeo.pid", "attngeo.host", "attngeo.process_started", "attngeo.boot"


def this_process() -> dict[str, str]:
    """Tags that identify the running process."""
    pid = os.getpid()
    return {PID: str(pid), HOST: socket.gethostname(), STARTED: _started(pid) or "", BOOT: _boot()}


def is_gone(tags: dict[str, str]) -> bool:
    """True if these tags name a process of this machine that no longer runs; False for other machines and no tags."""
    if not tags.get(PID, "").isdecimal() or tags.get(HOST) != socket.gethostname():
        return False
    return tags.get(BOOT) != _boot() or _started(int(tags[PID])) != tags.get(STARTED)


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _started(pid: int) -> str | None:
    """Start time in clock ticks after boot, from field 22 of /proc/PID/stat; None if it has ended (a zombie has)."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if after_name[0] in ("Z", "X") else after_name[19]
