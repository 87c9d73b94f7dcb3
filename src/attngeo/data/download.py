"""Bringing an archive of known hash onto this machine: resumed downloads, the package index and the distribution's
mirror.

Nothing fetched here is installed, imported or executed; pip is asked for an address or a file only, and never for a
source distribution, whose metadata would have to be built by running it.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import url2pathname

from attngeo.errors import UserError
from attngeo.files import explain_os_errors, sha256_file

if TYPE_CHECKING:
    import requests

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 60
MAX_ATTEMPTS = 5
BLOCK_BYTES = 1 << 16  # what a dropped connection can lose
SPACE_MARGIN_BYTES = 64 << 20
PIP_USAGE_ERROR = 2


class Unreachable(Exception):
    """A source did not answer, or has no such file; another source may still serve."""


class Rejected(Unreachable):
    """A source served something else than what is expected of it; another source may still serve."""


def require_space(folder: Path, needed_bytes: int) -> None:
    """UserError before any work when the disk of `folder` cannot hold `needed_bytes` more."""
    with explain_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + SPACE_MARGIN_BYTES:
        raise UserError(
            f"{folder} has {free >> 20} MiB free and {(needed_bytes + SPACE_MARGIN_BYTES) >> 20} MiB are needed",
            "make space, or set ATTNGEO_CACHE to a folder on a larger disk; what is already there is kept",
        )


def download(
    url: str, destination: Path, *, sha256: str | None, md5: str | None = None, size_bytes: int | None = None
) -> None:
    """Bring `url` to `destination`, resuming a `.part` left by an earlier try; hashes are checked before the rename.

    Raises Unreachable when the source does not answer, Rejected when the bytes have not the `md5` that it lists, and
    UserError when they have not the pinned `sha256` or cannot be written; of rejected bytes nothing is left.
    """
    part = destination.with_name(destination.name + ".part")
    with explain_os_errors(destination):
        destination.parent.mkdir(parents=True, exist_ok=True)
        if urlsplit(url).scheme == "file":
            _copy_local(url, part)
        else:
            _transfer(url, part, size_bytes)
        found = sha256_file(part)
        if sha256 is not None and found != sha256:
            part.unlink()
            raise UserError(
                f"{destination.name}: SHA-256 is {found}, not the pinned {sha256}; the file was removed",
                "run the command again; if the hash is wrong again the source has changed: do not use it, report it",
            )
        if md5 is not None and (found := _md5_file(part)) != md5:
            part.unlink()
            raise Rejected(f"{Path(urlsplit(url).path).name}: MD5 is {found}, not the listed {md5}")
        os.replace(part, destination)


def _md5_file(path: Path) -> str:
    """Hexadecimal MD5 of a file: finds damage, not forgery; what is used is pinned by SHA-256 later."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _copy_local(url: str, part: Path) -> None:
    try:
        shutil.copyfile(url2pathname(urlsplit(url).path), part)
    except FileNotFoundError as error:
        raise Unreachable(f"{error.filename} does not exist") from error


def _transfer(url: str, part: Path, size_bytes: int | None) -> None:
    """Append to `part` until it is complete, starting again where a dropped connection left it."""
    import requests

    failure = ""
    for attempt in range(MAX_ATTEMPTS):
        if attempt:
            time.sleep(min(2.0**attempt, 10.0) / 4)
        have = part.stat().st_size if part.exists() else 0
        if size_bytes is not None and have > size_bytes:
            part.unlink()
            have = 0
        try:
            # "identity": a body compressed on the way would make byte ranges meaningless.
            headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
            timeout = (CONNECT_TIMEOUT_S, READ_TIMEOUT_S)
            with requests.get(url, headers=headers, stream=True, timeout=timeout) as answer:
                if answer.status_code == 416:  # nothing beyond what is here: complete, or not the same file any more
                    if size_bytes == have:
                        return
                    part.unlink(missing_ok=True)
                    continue
                answer.raise_for_status()
                total = _append(answer, part, have)
        except requests.ConnectionError as error:
            failure = type(error).__name__
            if not part.exists() and attempt >= 1:
                break
            continue
        except requests.RequestException as error:
            status = getattr(error.response, "status_code", None)
            failure = f"HTTP {status}" if status else type(error).__name__
            if status and status < 500:
                break
            continue
        if total is None or part.stat().st_size == total:
            return
        failure = "the connection closed early"
    raise Unreachable(f"{Path(urlsplit(url).path).name}: {failure or 'no complete answer'}")


def _append(answer: "requests.Response", part: Path, have: int) -> int | None:
    """Write the body of `answer` behind the `have` bytes of `part`; the full size that the server names, if any."""
    resumed = answer.status_code == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
    length = answer.headers.get("Content-Length")
    start = have if resumed else 0
    if resumed:
        log.info("resuming %s at %.1f MB", part.name, have / 1e6)
    with part.open("ab" if resumed else "wb") as stream:
        for block in answer.iter_content(BLOCK_BYTES):
            stream.write(block)
        stream.flush()
        os.fsync(stream.fileno())
    return start + int(length) if length is not None else None


def fetch_wheel(name: str, version: str, destination: Path, *, sha256: str, size_bytes: int) -> str:
    """Bring the wheel NAME==VERSION to `destination`; the words say how it came. Raises Unreachable."""
    requirement = f"{name}=={version}"
    url = _wheel_address(requirement)
    if url is not None:
        try:
            download(url, destination, sha256=sha256, size_bytes=size_bytes)
            return "package index"
        except Unreachable as error:
            log.info("%s; asking pip to download it", error)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".pip-") as folder:
        arguments = ["download", "--no-deps", "--only-binary=:all:", "--quiet", "--dest", folder, requirement]
        finished = _pip(arguments)
        wheels = sorted(Path(folder).glob("*.whl"))
        if finished.returncode or len(wheels) != 1:
            raise Unreachable(_last_error(finished))
        download(wheels[0].as_uri(), destination, sha256=sha256)
    return "package index (pip download)"


def _wheel_address(requirement: str) -> str | None:
    """Ask pip which file it would install, without installing it; None when pip cannot say.

    The first try lets pip read the metadata by byte ranges, since it would otherwise download the whole wheel to
    answer.
    """
    arguments = ["install", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:", "--quiet"]
    for extra in (["--use-feature=fast-deps"], []):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            finished = _pip([*arguments, *extra, "--report", str(report), requirement])
            if finished.returncode == 0 and report.exists():
                installs = json.loads(report.read_text(encoding="utf-8"))["install"]
                return str(installs[0]["download_info"]["url"]) if len(installs) == 1 else None
        if finished.returncode != PIP_USAGE_ERROR:  # a pip that has no such feature is asked again without it
            return None
    return None


def _pip(arguments: list[str]) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_NO_COLOR": "1"}
    command = [sys.executable, "-m", "pip", "--retries", "2", "--timeout", "10", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)


def _last_error(finished: "subprocess.CompletedProcess[str]") -> str:
    lines = [line for line in finished.stderr.splitlines() if line.strip() and "WARNING" not in line]
    return lines[-1].strip() if lines else f"exit status {finished.returncode}"


def fetch_debian_package(name: str, destination: Path) -> str:
    """Bring a Debian package here through apt, without installing it; the words say how. Raises Unreachable."""
    apt = shutil.which("apt-get")
    if apt is None:
        raise Unreachable("apt-get is not on this machine")
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".apt-") as folder:
        command = [apt, "download", "-q", name]
        finished = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
        packages = sorted(Path(folder).glob("*.deb"))
        if finished.returncode or len(packages) != 1:
            if "No space left" in finished.stderr:
                raise UserError(f"cannot write {folder}: {os.strerror(errno.ENOSPC)}", "make space and run it again")
            raise Unreachable(f"apt-get download {name}: {_last_error(finished)}")
        os.replace(packages[0], destination)
    return "Debian mirror"


def sha256_of(content: bytes) -> str:
    """Hexadecimal SHA-256 of bytes in memory."""
    return hashlib.sha256(content).hexdigest()
