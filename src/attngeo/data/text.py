"""English prose for the analyses of language models, shipped with the project: no download."""

from importlib import resources

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
