"""A Slurm cluster of one node on this machine: munged, slurmctld and slurmd, without systemd and without accounting.

It needs root, since its configuration must be /etc/slurm: the executor strips SLURM_CONF inside of its jobs. Jobs that
take more memory than they asked for are killed by the kernel where it has the first form of control groups (`LIMITED`).
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.mlflow_server import free_port

CONFIG = Path("/etc/slurm")
CPUS, GPUS, MEMORY_MB = 8, 2, 16000
PACKAGES = ("slurm-wlm", "munge")
_GROUPS = Path("/sys/fs/cgroup")  # the second form wants systemd
LIMITED = all(os.access(_GROUPS / name, os.W_OK) for name in ("memory", "cpuset", "freezer"))
_START_S = 60.0
_SLURM = """
ClusterName=attngeo
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={control_port}
SlurmdPort={node_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin={task}
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=200
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
ReturnToService=2
MinJobAge=86400
KillWait=5
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 \
RealMemory={memory_mb} Gres=gpu:{gpus} State=UNKNOWN
PartitionName=cpu Nodes={host} Default=YES MaxTime=1440 State=UP
PartitionName=gpu Nodes={host} MaxTime=1440 State=UP
"""


def why_not() -> str:
    """Why no cluster can be started here; empty where one can."""
    if os.environ.get("ATTNGEO_ALLOW_SYSTEM_TESTS") != "1" or os.getuid() != 0:
        return "writes to /etc and starts daemons: needs root and ATTNGEO_ALLOW_SYSTEM_TESTS=1"
    if (CONFIG / "slurm.conf").exists():
        return f"{CONFIG}/slurm.conf is there: this machine belongs to a cluster"
    return ""


@contextmanager
def cluster(folder: Path) -> Iterator[Path]:
    """A running cluster whose logs and state are in `folder`; all of it is gone afterwards."""
    if shutil.which("slurmctld") is None or shutil.which("munged") is None:
        install = ["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES]
        subprocess.run(["apt-get", "update", "-qq"], check=True, capture_output=True)
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(install, check=True, capture_output=True, env=environment)
    folder.mkdir(parents=True)
    folder.chmod(0o755)  # munged refuses a socket in a folder that others may write to
    for name in ("state", "spool"):
        (folder / name).mkdir()
    host = socket.gethostname().split(".")[0]
    hosts = Path("/etc/hosts")
    hosts_before = hosts.read_text()
    made = [CONFIG / name for name in ("slurm.conf", "gres.conf", "cgroup.conf")]
    try:
        if subprocess.run(["getent", "hosts", host], capture_output=True, check=False).returncode != 0:
            hosts.write_text(f"{hosts_before}127.0.0.1 {host}\n")
        _munge(folder)
        _configure(folder, host, made)
        subprocess.run(["slurmctld", "-c"], check=True)
        subprocess.run(["slurmd"], check=True)
        _wait_until_idle(folder)
        yield folder
    finally:
        subprocess.run(["scancel", "--user", "root"], capture_output=True, check=False)
        for daemon in ("slurmd", "slurmctld", "munged"):
            _end(folder / f"{daemon}.pid")
        for path in made:
            path.unlink(missing_ok=True)
        hosts.write_text(hosts_before)


def _munge(folder: Path) -> None:
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    named = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munged.pid"}
    named |= {"log-file": folder / "munged.log", "seed-file": folder / "munge.seed"}
    subprocess.run(["munged", "--force", *(f"--{name}={path}" for name, path in named.items())], check=True)


def _configure(folder: Path, host: str, files: list[Path]) -> None:
    for number in range(GPUS):  # Slurm wants a device: these are as good as /dev/null
        os.mknod(folder / f"fakegpu{number}", 0o666 | 0o020000, os.makedev(1, 3))
    values = {"cpus": CPUS, "gpus": GPUS, "memory_mb": MEMORY_MB, "host": host, "folder": folder}
    values["task"] = "task/cgroup" if LIMITED else "task/none"
    ports = {"control_port": free_port(), "node_port": free_port()}
    CONFIG.mkdir(exist_ok=True)
    slurm, gres, cgroup = files
    slurm.write_text(_SLURM.format(**values, **ports))
    gres.write_text(f"AutoDetect=off\nNodeName={host} Name=gpu File={folder}/fakegpu[0-{GPUS - 1}]\n")
    limits = f"CgroupMountpoint={_GROUPS}\nCgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes\n"
    cgroup.write_text(limits if LIMITED else "CgroupPlugin=autodetect\n")


def _wait_until_idle(folder: Path) -> None:
    deadline = time.monotonic() + _START_S
    command = ["sinfo", "-h", "-N", "-p", "cpu", "-o", "%T"]
    while subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() != "idle":
        logs = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.log")))
        assert time.monotonic() < deadline, f"Slurm did not come up:\n{logs}"
        time.sleep(0.5)


def _end(pid_file: Path) -> None:
    """End the daemon that wrote this file, and wait for it."""
    try:
        process = psutil.Process(int(pid_file.read_text()))
        process.terminate()
        process.wait(timeout=20)
    except (OSError, ValueError, psutil.NoSuchProcess):
        return
    except psutil.TimeoutExpired:
        process.kill()
