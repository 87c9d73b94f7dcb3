"""From the files of config/ to a checked preset, and the JSON schemas of these files."""

import csv
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from attngeo.config.checks import (
    check_compared,
    check_looked_into,
    check_runs,
    check_solver_runs,
    check_sources,
    with_targets,
)
from attngeo.config.explain import allowed, read_text, read_yaml, validate
from attngeo.config.preset import Preset, PresetFile, RunRow
from attngeo.config.settings import IDENTIFIER
from attngeo.errors import UserError
from attngeo.files import write_json
from attngeo.training.recipe import Recipe

_OPTIONAL_COLUMNS = ("attention", "options")
_RESERVED = ("recipes", "embedded", "logs", "mlflow-artifacts")  # folders that are there already


def load_recipe(root: Path, name: str) -> Recipe:
    """Read config/recipes/<name>.yaml; UserError naming file, key and allowed values."""
    path = root / "config" / "recipes" / f"{name}.yaml"
    if not path.is_file():
        known = sorted(p.stem for p in path.parent.glob("*.yaml"))
        raise UserError(f"there is no recipe {name!r} (no file config/recipes/{name}.yaml)", allowed(known, name))
    recipe: Recipe = validate(Recipe, read_yaml(path, f"config/recipes/{name}.yaml"), f"config/recipes/{name}.yaml")
    return recipe


def _load_runs(root: Path, preset: str) -> tuple[RunRow, ...]:
    name = f"config/{preset}/runs.tsv"
    path = root / name
    if not path.is_file():
        raise UserError(f"{name} does not exist", "add the run sheet; a header line alone means no training runs")
    lines = [line for line in read_text(path, name).splitlines() if line.strip() and not line.startswith("#")]
    rows: list[RunRow] = []
    for number, row in enumerate(csv.DictReader(lines, delimiter="\t"), start=1):
        missing = [key for key, value in row.items() if value is None and key not in _OPTIONAL_COLUMNS]
        if None in row or missing:
            raise UserError(f"{name}, run {number}: it has more or fewer columns than the header", "separate by tabs")
        data: dict[str, Any] = {key: value for key, value in row.items() if value or key == "run_id"}
        data["feeds"] = tuple(item.strip() for item in (row.get("feeds") or "").split(",") if item.strip())
        rows.append(validate(RunRow, data, name, f", run {number}"))
    ids = [row.run_id for row in rows]
    for duplicate in {run_id for run_id in ids if ids.count(run_id) > 1}:
        raise UserError(
            f"{name}: run_id {duplicate!r} appears {ids.count(duplicate)} times", "give each run its own id"
        )
    return tuple(rows)


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return merged


def preset_names(root: Path) -> list[str]:
    """Presets under config/."""
    return sorted(path.parent.name for path in (root / "config").glob("*/config.yaml"))


def load_current(root: Path, name: str) -> Preset:
    """The preset with the keys that the workflow was given on its command line, where it started this process."""
    return load_preset(root, name, json.loads(os.environ.get("ATTNGEO_OVERRIDES", "{}")))


def load_preset(root: Path, name: str, overrides: Mapping[str, Any] | None = None) -> Preset:
    """Read and check config/<name>/config.yaml, runs.tsv and every recipe that a run names.

    `overrides` replaces keys of config.yaml. Raises UserError naming file, key and the allowed values.
    """
    root = root.resolve()
    name = str(name)
    file = f"config/{name}/config.yaml"
    if not IDENTIFIER.fullmatch(name) or name in _RESERVED:
        raise UserError(
            f"a preset cannot be called {name!r}",
            f"use letters, digits, '.', '_', '-' and '@' only, and none of {', '.join(_RESERVED)}",
        )
    if not (root / file).is_file():
        raise UserError(f"there is no preset {name!r} (no file {file})", allowed(preset_names(root), name))
    for key in overrides or {}:
        if key not in PresetFile.model_fields:
            raise UserError(
                f"key {key!r}, given to --config, is neither 'preset' nor a key of {file}",
                allowed(["preset", *PresetFile.model_fields], key),
            )
    content = _merge(read_yaml(root / file, file), overrides or {})
    checked: PresetFile = validate(
        PresetFile, content, f"{file} with the keys given to --config" if overrides else file
    )
    runs = _load_runs(root, name)
    recipes = {recipe: load_recipe(root, recipe) for recipe in sorted({row.recipe for row in runs})}
    preset = Preset.model_construct(
        **{key: getattr(checked, key) for key in PresetFile.model_fields}
        | {
            key: tuple(model for model in getattr(checked, key) if not model.is_away(root))
            for key in ("language_models", "vision_models")
        },
        name=name,
        root=root,
        runs=runs,
        recipes=recipes,
    )
    sheet = f"config/{name}/runs.tsv"
    check_sources(preset, file)
    check_runs(preset, file, sheet)
    check_solver_runs(preset, file)
    check_compared(preset, sheet)
    check_looked_into(preset, sheet)
    return with_targets(preset, checked.model_fields_set, file, sheet)


def write_schemas(folder: Path) -> list[Path]:
    """Write the JSON schemas of the preset file, the run sheet and the recipes, for editors that check as you type."""
    paths = []
    for name, model in (("config", PresetFile), ("runs", RunRow), ("recipe", Recipe)):
        path = folder / f"{name}.schema.json"
        content = {"$schema": "https://json-schema.org/draft/2020-12/schema", **TypeAdapter(model).json_schema()}
        if not path.is_file() or json.loads(path.read_text(encoding="utf-8")) != content:
            write_json(path, content)
        paths.append(path)
    return paths
