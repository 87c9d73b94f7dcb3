"""What is exported is what was trained, or nothing."""

from pathlib import Path

import pytest
import timm
import torch

from attngeo.errors import UserError
from attngeo.files import read_json
from attngeo.layers.registry import ATTENTION_KINDS
from attngeo.models.export import CONFIG, WEIGHTS, export, load_exported
from attngeo.models.pyramid import Pyramid


def trained(name: str = "laplacianformer_nano", **options: object) -> Pyramid:
    """A model whose weights are not those that its seed draws."""
    model = timm.create_model(name, num_classes=5, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("kind", list(ATTENTION_KINDS))
def test_a_model_read_back_gives_the_same_bits(kind: str, tmp_path: Path) -> None:
    model = trained(attention=kind, in_chans=1, img_size=(33, 20), drop_path_rate=0.1)
    folder = export(model, tmp_path / "new" / "model", classes=[*"abcde"], mean=[0.5], std=[0.2])
    images = torch.randn(3, 1, 47, 30)
    reloaded = load_exported(folder)
    assert model.training
    assert not reloaded.training
    assert torch.equal(reloaded(images), model.eval()(images))
    config = read_json(folder / CONFIG)
    assert config["classes"] == [*"abcde"]
    assert config["normalisation"] == {"mean": [0.5], "std": [0.2]}
    assert sorted(path.name for path in tmp_path.glob("new/*")) == ["model"]


def test_every_option_of_the_model_comes_back(tmp_path: Path) -> None:
    model = trained(
        "fiberformer_micro",
        attention="laplacian,gaussian,riemannian",
        attention_options={"lambda_": 2.0, "landmark_map": "convolution", "rank": 3, "landmarks": [2, 3]},
        fiber_rank=3,
        init="default",
    ).to(torch.bfloat16)
    model.reset_classifier(7)
    reloaded = load_exported(export(model, tmp_path / "model"))
    assert reloaded.attention_kinds() == ("laplacian", "gaussian", "riemannian")
    assert reloaded.options == model.options
    assert reloaded.head.weight.dtype == torch.bfloat16
    assert reloaded.num_classes == 7


def test_a_model_that_was_changed_after_it_was_made_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    model = trained()
    model.stages[0].blocks[0].attention.lambda_ = 1.0
    with pytest.raises(UserError, match="answers differently"):
        export(model, tmp_path / "model")
    broken = trained()
    torch.nn.init.constant_(broken.head.bias, torch.nan)
    with pytest.raises(UserError, match=r"not finite: head\.bias"):
        export(broken, tmp_path / "model")
    with pytest.raises(UserError, match="3 names for a model of 5"):
        export(trained(), tmp_path / "model", classes=[*"abc"])
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_overwritten_and_what_is_damaged_not_loaded(tmp_path: Path) -> None:
    folder = export(trained(), tmp_path / "model")
    with pytest.raises(UserError, match="exists already"):
        export(trained(), folder)
    with pytest.raises(UserError, match="holds no exported model"):
        load_exported(tmp_path)
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (folder / WEIGHTS).write_bytes(bytes(content))
    with pytest.raises(UserError, match="not the file that was exported"):
        load_exported(folder)
    (folder / CONFIG).write_text('{"format": 2}')
    with pytest.raises(UserError, match="format 2"):
        load_exported(folder)
