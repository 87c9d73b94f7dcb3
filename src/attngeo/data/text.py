"""English prose for the analyses of language models, shipped with the project: no download."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from attngeo.errors import UserError

COLLECTIONS = ("public-domain", "moby-dick", "state-of-the-union")


def load(name: str = "public-domain") -> list[str]:
    """The documents of a collection, in order of their file names; about 8 000 characters each.

    "moby-dick" and "state-of-the-union" hold six each, "public-domain" all twelve. UserError for another name.
    """
    if name not in COLLECTIONS:
        raise UserError(f"no text collection is called {name!r}", f"use one of: {', '.join(COLLECTIONS)}")
    prefix = "" if name == "public-domain" else name
    folder = resources.files("attngeo.data").joinpath("text")
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".txt")), key=lambda file: file.name)
    return [file.read_text(encoding="utf-8").strip() for file in files if file.name.startswith(prefix)]


def documents(source: str, root: Path) -> list[str]:
    """The embedded texts ("embedded"), a text file, or a folder's .txt files in order of their names.

    A relative path is below `root`. UserError for a folder without such files, and for a file that is empty or no
    UTF-8 text.
    """
    if source == "embedded":
        return load()
    place = root / Path(source).expanduser()
    read: list[str] = []
    for file in [place] if place.is_file() else sorted(place.glob("*.txt")):
        try:
            read.append(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(
                f"texts: {file} is not UTF-8 text ({error.reason} at byte {error.start})",
                "save it as UTF-8, or take it out of the folder",
            ) from error
        if not read[-1].strip():
            raise UserError(f"texts: {file} holds no text", "fill it, or take it out of the folder")
    if not read:
        raise UserError(f"texts: {place} holds no text file", "name a .txt file, a folder of them, or 'embedded'")
    return read


def held_out(documents: Sequence[str], share: float) -> tuple[list[str], list[str]]:
    """Every document in two parts: what comes first, and the last `share` of its characters, both whole words."""
    first, last = [], []
    for document in documents:
        cut = round(len(document) * (1 - share))
        while cut < len(document) and not document[cut - 1].isspace():
            cut += 1
        first.append(document[:cut])
        last.append(document[cut:])
    return first, last
