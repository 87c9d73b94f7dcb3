"""Attention kinds and feed-forwards by name, resolved lazily by string: naming one imports neither torch nor others."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, get_args

from attngeo.errors import UserError

ATTENTION_KINDS: dict[str, str] = {
    "softmax": "attngeo.layers.softmax:SoftmaxAttention",
    "softmax_sr": "attngeo.layers.softmax:SpatialReductionAttention",
    "gaussian": "attngeo.layers.gaussian:GaussianAttention",
    "laplacian": "attngeo.layers.laplacian:LaplacianAttention",
    "laplacian_exact": "attngeo.layers.laplacian_exact:LaplacianExactAttention",
    "linear_injective": "attngeo.layers.linear_injective:LinearInjectiveAttention",
    "riemannian": "attngeo.layers.riemannian:RiemannianAttention",
}

# Layers that stand in place of the pyramid's plain MLP.
FEED_FORWARDS: dict[str, str] = {"fiber": "attngeo.layers.fiber_feed_forward:FiberFeedForward"}

_CONSTRUCTOR_ARGUMENTS = ("self", "dim", "heads", "landmarks")


def register_attention(kind: str, target: str) -> None:
    """Give the class at `target` ("package.module:Class" or "path/to/file.py:Class") the short name `kind`.

    UserError if `target` has no class part, or if the name is taken by another target.
    """
    if not _is_target(target):
        raise UserError(
            f"attention target {target!r} names no class",
            'write it as "package.module:Class" or "path/to/file.py:Class"',
        )
    if ATTENTION_KINDS.get(kind, target) != target:
        raise UserError(
            f"attention kind {kind!r} is already {ATTENTION_KINDS[kind]!r}", "register yours under another name"
        )
    ATTENTION_KINDS[kind] = target


def attention_class(kind: str) -> type:
    """Import and return the class of a registered kind, or of a target given in place of a kind.

    UserError if the kind, the module, the file or the class does not exist.
    """
    target = ATTENTION_KINDS.get(kind, kind if _is_target(kind) else None)
    if target is None:
        raise UserError(
            f"unknown attention kind {kind!r}",
            f"choose one of {', '.join(ATTENTION_KINDS)}, or name your own class as path/to/file.py:Class",
        )
    return _class_at(target)


def feed_forward_class(name: str) -> type:
    """Import and return the class of a feed-forward; KeyError if there is none of that name."""
    return _class_at(FEED_FORWARDS[name])


def attention_options(kind: str) -> tuple[str, ...]:
    """Names of the options that a kind's constructor accepts beside dim, heads and landmarks."""
    return tuple(_constructor_options(attention_class(kind))[0])


def uses_landmarks(kind: str) -> bool:
    """Whether a landmark grid means anything to a kind; a class that does not say so is taken at its signature."""
    return bool(getattr(attention_class(kind), "uses_landmarks", True))


def accepts_option(kind: str, option: str) -> bool:
    """Whether a kind's constructor takes an option of that name."""
    options, open_ended = _constructor_options(attention_class(kind))
    return open_ended or option in options


def refuse_unknown_options(kinds: Iterable[str], options: Iterable[str]) -> None:
    """UserError names the options that none of the kinds has."""
    distinct = list(dict.fromkeys(kinds))
    unknown = [name for name in options if not any(accepts_option(kind, name) for kind in distinct)]
    if unknown:
        known = dict.fromkeys(name for kind in distinct for name in attention_options(kind))
        raise UserError(
            f"attention kind {' or '.join(map(repr, distinct))} has no option {', '.join(map(repr, unknown))}",
            f"its options are: {', '.join(known) or 'none'}",
        )


def build_attention(kind: str, dim: int, heads: int, *, landmarks: tuple[int, int], **options: Any) -> Any:
    """Construct one attention layer of a kind; UserError names an option that the kind does not have."""
    cls = attention_class(kind)
    refuse_unknown_options((kind,), options)
    _refuse_ill_typed_options(cls, options)
    layer = cls(dim, heads, landmarks=landmarks, **options)
    if not isinstance(getattr(layer, "kind", None), str):
        raise UserError(
            f"attention class {cls.__name__} of {kind!r} does not say its kind",
            f'give the class an attribute, for example: kind = "{cls.__name__.lower()}"',
        )
    return layer


def _refuse_ill_typed_options(cls: type, options: Mapping[str, Any]) -> None:
    """UserError where an option that is a flag or a number is given something else: "fasle" would count as true."""
    annotations = _constructor_options(cls)[0]
    for name, value in options.items():
        annotation = annotations.get(name)
        wanted = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
        plain = [kind for kind in wanted if kind in (bool, int, float)]
        accepted = (*plain, int) if float in plain else tuple(plain)
        fits = isinstance(value, accepted) and (bool in plain or not isinstance(value, bool))
        if plain and not fits and not (value is None and NoneType in wanted):
            words = {bool: "true or false", int: "a whole number", float: "a number"}
            raise UserError(f"attention option {name} is {value!r}", f"give {words[plain[0]]}")


def _constructor_options(cls: type) -> tuple[dict[str, Any], bool]:
    """Options, with types, of a constructor and of those it hands `**options` on to; whether any name is taken."""
    options: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        handed_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        options |= {
            parameter.name: parameter.annotation
            for parameter in parameters
            if parameter.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            and parameter.name not in (*_CONSTRUCTOR_ARGUMENTS, *options)
        }
        if not handed_on:
            return options, False
    return options, True


def _class_at(target: str) -> type:
    place, _, class_name = target.rpartition(":")
    module = _module_from_file(Path(place)) if place.endswith(".py") else _module_by_name(place)
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        raise UserError(f"attention target {target!r}: {place} has no class {class_name!r}", "correct the class name")
    return found


def _is_target(text: str) -> bool:
    place, colon, class_name = text.rpartition(":")
    return bool(place and colon and class_name.isidentifier())


def _module_by_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        raise UserError(
            f"attention module {name!r} cannot be imported", "install it, or name a file: path/to/file.py:Class"
        ) from error


def _module_from_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UserError(f"attention file {path} does not exist", "correct the path (relative to the current folder)")
    # The name is derived from the place, so that a class loaded twice is the same class and can be pickled.
    name = f"attngeo_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"attention file {path} cannot be loaded as Python", "give a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
