"""Reading YAML and text, and one message for everything that is wrong in a file: key, what it got, what is allowed."""

import difflib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import TypeAdapter, ValidationError

from attngeo.errors import UserError


def allowed(values: Sequence[str], given: object = "") -> str:
    """The values that there are, and the one that was probably meant."""
    close = difflib.get_close_matches(str(given), values, n=1)
    return ("did you mean " + repr(close[0]) + "? " if close else "") + "allowed: " + ", ".join(values)


def _unwrap(annotation: Any, step: Any) -> Any:
    """The annotation one step of an error's location further down."""
    while True:
        origin = typing.get_origin(annotation)
        if origin is Annotated:
            annotation = typing.get_args(annotation)[0]
        elif origin in (typing.Union, types.UnionType):
            models = [a for a in typing.get_args(annotation) if a is not type(None)]
            annotation = models[0]
        else:
            break
    arguments = typing.get_args(annotation)
    if origin is dict:
        return arguments[1]
    if origin in (tuple, list):
        return arguments[0]
    fields = getattr(annotation, "model_fields", None) or getattr(annotation, "__dataclass_fields__", {})
    field = fields.get(step)
    return getattr(field, "annotation", None) or getattr(field, "type", None)


def _allowed_keys(model: Any, location: Sequence[Any]) -> list[str]:
    """The keys allowed at the parent of an error's location."""
    annotation: Any = model
    for step in location[:-1]:
        annotation = _unwrap(annotation, step)
    while typing.get_origin(annotation) in (Annotated, typing.Union, types.UnionType):
        annotation = typing.get_args(annotation)[0]
    fields = getattr(annotation, "model_fields", None) or getattr(annotation, "__dataclass_fields__", {})
    return list(fields)


def _explain(error: ValidationError, model: Any, file: str, where: str = "") -> UserError:
    """One message for everything wrong in a file: key, what it got, what is allowed."""
    lines = []
    for item in error.errors():
        key = ".".join(str(step) for step in item["loc"]) or "(whole file)"
        if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            lines.append(f"key {key!r} is unknown; {allowed(_allowed_keys(model, item['loc']), str(item['loc'][-1]))}")
        elif item["type"] == "missing":
            lines.append(f"key {key!r} is missing")
        elif item["type"] == "literal_error":
            lines.append(f"key {key!r}: {item['input']!r} is not allowed; use {item['ctx']['expected']}")
        else:
            lines.append(f"key {key!r}: got {item['input']!r}: {item['msg'].removeprefix('Value error, ')}")
    return UserError(f"{file}{where}: " + "; ".join(lines), f"correct {file} and run the same command again")


def validate(model: Any, data: Any, file: str, where: str = "") -> Any:
    """The data as the model has it; UserError naming the file, the place in it, the keys and what is allowed."""
    try:
        return TypeAdapter(model).validate_python(data)
    except UserError as error:  # a check of the model's own, which does not know the file
        raise UserError(f"{file}{where}: {error.what}", error.remedy) from None
    except ValidationError as error:
        raise _explain(error, model, file, where) from None


def read_text(path: Path, name: str) -> str:
    """The text of a file; UserError where it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 text: {error}", "save it as UTF-8") from None


def read_yaml(path: Path, name: str) -> dict[str, Any]:
    """The mapping in a YAML file; UserError where there is none."""
    try:
        content = yaml.safe_load(read_text(path, name))
    except yaml.YAMLError as error:
        raise UserError(f"{name} is not valid YAML: {error}", "correct the line it names") from error
    if not isinstance(content, dict):
        raise UserError(f"{name} must be a mapping of keys to values", "see config/demo/config.yaml for an example")
    return content
