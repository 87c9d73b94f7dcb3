"""A recipe says everything, means something, and is refused by name where it does not."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pydantic
import pytest
import yaml

from attngeo.errors import UserError
from attngeo.training.recipe import Recipe, read_recipe
from tests.unit.training_support import tiny_recipe

RECIPES = sorted((Path(__file__).parents[2] / "config/recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_are_read_alike_by_both_readers(path: Path) -> None:
    by_pydantic = pydantic.TypeAdapter(Recipe).validate_python(yaml.safe_load(path.read_text()))
    assert read_recipe(path) == by_pydantic


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "recipe.yaml"
    values = {key: value for key, value in {**asdict(tiny_recipe()), **changes}.items() if value != "left out"}
    path.write_text(yaml.safe_dump(values))
    return path


def test_a_recipe_survives_its_file(tmp_path: Path) -> None:
    assert read_recipe(written(tmp_path)) == tiny_recipe()


def test_numbers_that_yaml_takes_for_text_are_numbers(tmp_path: Path) -> None:
    recipe = read_recipe(written(tmp_path, lr="1e-3", min_lr="1e-5", epochs="2"))
    assert (recipe.lr, recipe.min_lr, recipe.epochs) == (0.001, 0.00001, 2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"learning_rate": 1}, "unknown key learning_rate"),
        ({"lr": "left out"}, "missing lr"),
        ({"lr": "fast"}, "lr is 'fast'"),
        ({"lr": 0}, "lr is 0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"min_lr": 1.0}, "not below min_lr"),
        ({"epochs": 2.5}, "epochs is 2.5"),
        ({"epochs": 0}, "epochs is 0"),
        ({"epochs": True}, "epochs is True"),
        ({"epochs": None}, "epochs is None"),
        ({"images_per_epoch": 0}, "images_per_epoch is 0"),
        ({"warmup_epochs": 3}, "smaller than epochs"),
        ({"ema_decay": 1.0}, "ema_decay is 1.0"),
        ({"augment": "yes"}, "augment is 'yes'"),
        ({"mixup": -0.1}, "mixup is -0.1"),
        ({"autocast": "float8"}, "autocast is 'float8'"),
        ({"accumulation": 0}, "accumulation is 0"),
        ({"accumulation": 8}, "accumulation is 8"),
        ({"channels_last": "yes"}, "channels_last is 'yes'"),
        ({"rand_augment": "rand-z9"}, "rand_augment is 'rand-z9'"),
        ({"rand_augment": 9}, "rand_augment is 9"),
        ({"random_erasing": 1.5}, "random_erasing is 1.5"),
        ({"color_jitter": -0.1}, "color_jitter is -0.1"),
        ({"color_jitter": 0.4, "augment": False}, "off where augment is false"),
        ({"interpolation": "nearest"}, "interpolation is 'nearest'"),
        ({"non_finite": "ignore"}, "non_finite is 'ignore'"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as error:
        read_recipe(written(tmp_path, **changes))
    assert named in str(error.value)
    assert "recipe.yaml" in error.value.what


@pytest.mark.parametrize("text", ["", "- 1\n", "a: [", "just words"])
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"recipe.yaml"):
        read_recipe(path)
    with pytest.raises(UserError, match="does not exist"):
        read_recipe(tmp_path / "absent.yaml")
