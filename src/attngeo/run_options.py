"""Options of single runs: how a run sheet writes them, and which ones an attention class takes; loads no torch."""

import ast
import gc
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

OptionValue = bool | int | float | str | None

RECIPE_PREFIX = "recipe."
_KEY = re.compile(r"(recipe\.)?[A-Za-z_][A-Za-z0-9_]*")
_NUMBER_WITHOUT_POINT = re.compile(r"[-+]?\d+[eE][-+]?\d+")  # YAML 1.1 takes 1e-3 for a word
_PACKAGE = Path(__file__).resolve().parent
_GIVEN_BY_THE_MODEL = ("self", "dim", "heads", "landmarks")


def parse_options(text: str) -> dict[str, OptionValue]:
    """Options from `key=value` pairs between semicolons or spaces; values are YAML scalars.

    ValueError names a pair that is none, a key given twice, and a value that is a list, a mapping or a date.
    """
    options: dict[str, OptionValue] = {}
    for pair in re.split(r"[;\s]+", text):
        if not pair:
            continue
        key, _, value = pair.partition("=")
        if not value or not _KEY.fullmatch(key):
            raise ValueError(f"{pair!r} is not of the form key=value, with or without {RECIPE_PREFIX!r} before the key")
        if key in options:
            raise ValueError(f"{key!r} is given twice")
        options[key] = _scalar(value)
    return options


def options_text(options: dict[str, OptionValue]) -> str:
    """The one way to write options: sorted by key, as `parse_options` reads them; empty without options."""
    return "; ".join(f"{key}={_word(value)}" for key, value in sorted(options.items()))


def constructor_options(file: Path, name: str) -> tuple[list[str], bool]:
    """Options that the constructor of a class takes, read from its file without running it; whether any name is taken.

    Constructors that hand `**options` on are followed through the classes' bases, in this package and beside `file`.
    Mirrors `attngeo.layers.registry`, which asks the live class, and therefore needs torch.
    """
    names: list[str] = []
    order = list(_bases_first_to_last(file, name))
    last_seen = {place: index for index, place in enumerate(order)}  # in a diamond the shared base comes last
    for index, place in enumerate(order):
        if last_seen[place] != index:
            continue
        if place is None:  # a class from elsewhere
            return names, True
        constructor = _constructor(_classes(place[0])[place[1]])
        if constructor is None:
            continue
        arguments = constructor.args
        taken = (*arguments.args, *arguments.kwonlyargs)
        names += [a.arg for a in taken if a.arg not in (*_GIVEN_BY_THE_MODEL, *names)]
        if arguments.kwarg is None:
            return names, False
    return names, True


def module_file(module: str, beside: Path) -> Path | None:
    """The file of a module of this package, or of one in the folder of the file `beside`; None for another one."""
    parts = module.split(".")
    folder = _PACKAGE.parent if parts[0] == _PACKAGE.name else beside.parent
    file = folder.joinpath(*parts).with_suffix(".py")
    return file if file.is_file() else None


def _scalar(text: str) -> OptionValue:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"{text!r} is no plain value") from None
    if isinstance(value, str) and _NUMBER_WITHOUT_POINT.fullmatch(value):
        return float(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{text!r} is no plain value: give a number, a word, true, false or null")


def _word(value: OptionValue) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _bases_first_to_last(file: Path, name: str) -> Iterator[tuple[Path, str] | None]:
    """A class and its bases, depth first; None stands for a class whose source is not at hand."""
    found = _classes(file).get(name)
    if found is None:
        imported = _imported_from(file).get(name)
        source = module_file(imported[0], file) if imported else None
        if imported is None or source is None:
            yield None
        else:
            yield from _bases_first_to_last(source, imported[1])
        return
    yield file, name
    for base in found.bases:
        if isinstance(base, ast.Name):
            yield from _bases_first_to_last(file, base.id)
        else:
            yield None


@cache
def _tree(file: Path, changed_ns: int) -> ast.Module:
    """The syntax tree of a file as it was changed last."""
    # A garbage collection inside of the parser runs finalizers of any package, and one that fails breaks the parser.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(file.read_text("utf-8"))
    finally:
        if collecting:
            gc.enable()


def _classes(file: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in _tree(file, file.stat().st_mtime_ns).body if isinstance(node, ast.ClassDef)}


def _imported_from(file: Path) -> dict[str, tuple[str, str]]:
    """Local name -> (module, name there) of what a file imports by name."""
    imports = [node for node in ast.walk(_tree(file, file.stat().st_mtime_ns)) if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: (node.module or "", alias.name) for node in imports for alias in node.names}


def _constructor(found: ast.ClassDef) -> ast.FunctionDef | None:
    return next((n for n in found.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
