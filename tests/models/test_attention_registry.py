"""Attention kinds are found by name, by module and by file, and what is missing is named."""

import pickle
from pathlib import Path

import pytest
import timm
import torch

from attngeo.errors import UserError
from attngeo.evaluation.macs import count
from attngeo.layers.registry import (
    ATTENTION_KINDS,
    attention_class,
    attention_options,
    build_attention,
    register_attention,
)
from attngeo.run_options import constructor_options, module_file

OWN_KIND = """
from torch import nn

class Mean(nn.Module):
    kind = "mean"

    def __init__(self, dim, heads, *, landmarks, gain=1.0):
        super().__init__()
        self.gain = gain
        self.value = nn.Linear(dim, dim)

    def forward(self, x, grid):
        assert x.shape[1] == grid[0] * grid[1]
        return x + self.gain * self.value(x).mean(1, keepdim=True)

class Unnamed(Mean):
    kind = None
"""


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    path = tmp_path / "own attention.py"
    path.write_text(OWN_KIND)
    return path


@pytest.mark.parametrize("kind", list(ATTENTION_KINDS))
def test_every_kind_says_its_own_name(kind: str) -> None:
    layer = build_attention(kind, 8, 2, landmarks=(2, 2))
    assert layer.kind == kind
    assert layer(torch.randn(3, 15, 8), (3, 5)).shape == (3, 15, 8)


def test_a_kind_from_a_file_runs_in_every_stage(own_file: Path) -> None:
    model = timm.create_model(
        "laplacianformer_micro", num_classes=3, attention=f"{own_file}:Mean", attention_options={"gain": 0.5}
    )
    assert model.attention_kinds() == ("mean", "mean", "mean")
    assert model.stages[1].blocks[0].attention.gain == 0.5
    assert model(torch.randn(2, 3, 20, 12)).shape == (2, 3)
    assert count(model, 32).uncounted == ("Mean",)


def test_a_kind_loaded_twice_from_a_file_is_one_class(own_file: Path) -> None:
    first = attention_class(f"{own_file}:Mean")
    assert attention_class(f"{own_file}:Mean") is first
    assert pickle.loads(pickle.dumps(first)) is first


def test_a_registered_name_stands_for_its_target(own_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attngeo.layers.registry.ATTENTION_KINDS", dict(ATTENTION_KINDS))
    register_attention("mean", f"{own_file}:Mean")
    assert attention_class("mean").__name__ == "Mean"
    with pytest.raises(UserError, match="already"):
        register_attention("softmax", f"{own_file}:Mean")
    with pytest.raises(UserError, match="names no class"):
        register_attention("other", str(own_file))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("laplacean", "unknown attention kind 'laplacean'"),
        ("nowhere.to_be_found:Thing", "module 'nowhere.to_be_found'"),
        ("attngeo.layers.softmax:Hardmax", "no class 'Hardmax'"),
        ("does/not/exist.py:Thing", "does not exist"),
    ],
)
def test_a_target_that_is_missing_is_named(target: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        attention_class(target)


def test_an_unknown_kind_lists_the_known_ones() -> None:
    with pytest.raises(UserError) as caught:
        timm.create_model("softmaxformer_nano", attention="cosine")
    assert all(kind in caught.value.remedy for kind in ATTENTION_KINDS)


def test_an_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match="'laplacian' has no option 'lamda'") as caught:
        timm.create_model("laplacianformer_nano", attention_options={"lamda": 2.0})
    assert "lambda_" in caught.value.remedy


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [("laplacian", "normalization", "batch"), ("gaussian", "solver", "svd"), ("riemannian", "metric", "flat")],
)
def test_a_value_that_an_option_does_not_take_is_named(kind: str, option: str, value: str) -> None:
    with pytest.raises(UserError, match=f"{option} is '{value}'"):
        build_attention(kind, 8, 2, landmarks=(2, 2), **{option: value})


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("shared_query_key", "fasle", "true or false"),
        ("iterations", 5.5, "a whole number"),
        ("iterations", True, "a whole number"),
        ("lambda_", "four", "a number"),
    ],
)
def test_a_flag_or_number_that_is_none_is_named(option: str, value: object, words: str) -> None:
    with pytest.raises(UserError, match=f"(?s){option} is .*{words}"):
        build_attention("laplacian", 8, 2, landmarks=(2, 2), **{option: value})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attention": "softmax", "attention_options": {"landmarks": 3}}, "softmax has no landmarks"),
        ({"fiber_rank": 3}, "feed_forward mlp has no fiber_rank"),
    ],
)
def test_an_option_that_nothing_in_the_model_uses_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        timm.create_model("laplacianformer_nano", **options)
    timm.create_model("laplacianformer_nano", attention_options={"landmarks": 3})
    timm.create_model("laplacianformer_nano", feed_forward="fiber", fiber_rank=3)


@pytest.mark.parametrize("kind", list(ATTENTION_KINDS))
def test_options_read_from_the_source_are_those_of_the_live_class(kind: str) -> None:
    module, _, name = ATTENTION_KINDS[kind].rpartition(":")
    file = module_file(module, Path())
    assert file is not None
    names, open_ended = constructor_options(file, name)
    assert set(names) == set(attention_options(kind))
    assert not open_ended


def test_options_of_an_own_class_are_read_through_its_bases(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text(
        "from torch import nn\n\nclass Base(nn.Module):\n    def __init__(self, dim, heads, *, depth=1): ...\n"
    )
    file = tmp_path / "mine.py"
    file.write_text(
        "from base import Base\nfrom attngeo.layers.laplacian import LaplacianAttention as L\n\n"
        "class Mine(Base):\n    def __init__(self, dim, heads, *, width=1, **options): ...\n\n"
        "class Wide(L):\n    def __init__(self, *args, width=1, **options): ...\n\n"
        "class Shut(L):\n    def __init__(self, dim, heads, *, width=1): ...\n"
    )
    assert constructor_options(file, "Mine") == (["width", "depth"], False)
    assert {"width", "lambda_", "iterations", "rotary"} <= set(constructor_options(file, "Wide")[0])
    assert constructor_options(file, "Shut") == (["width"], False)
    file.write_text("from elsewhere import Base\n\nclass Mine(Base):\n    pass\n")
    assert constructor_options(file, "Mine") == ([], True)


def test_a_class_that_does_not_say_its_kind_is_refused(own_file: Path) -> None:
    with pytest.raises(UserError, match="does not say its kind"):
        build_attention(f"{own_file}:Unnamed", 8, 2, landmarks=(2, 2))


def test_an_attention_that_changes_the_shape_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from torch import nn\n\n\nclass Mine(nn.Module):\n    kind = 'mine'\n\n"
        "    def __init__(self, dim, heads, *, landmarks=(7, 7)):\n        super().__init__()\n\n"
        "    def forward(self, x, grid):\n        return x[:, :-1]\n"
    )
    model = timm.create_model("laplacianformer_nano", attention=f"{file}:Mine")
    with pytest.raises(UserError, match=r"(?s)Mine returned .*shape it was given"):
        model(torch.zeros(1, 3, 32, 32))
