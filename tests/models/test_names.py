"""Names and kinds are known without torch."""

import subprocess
import sys

import pytest

from attngeo.errors import UserError
from attngeo.models.names import FAMILIES, SIZES, attention_kind_of, model_names


def test_names_and_attention_registry_import_neither_torch_nor_timm() -> None:
    code = (
        "import sys, attngeo.models.names, attngeo.layers.registry;"
        "assert not {'torch', 'timm', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_layer_module_can_be_imported_before_timm() -> None:
    code = "import attngeo.layers.attention, timm; timm.create_model('softmaxformer_nano')"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_family_runs_its_own_kind_unless_another_is_asked_for() -> None:
    assert attention_kind_of("fiberformer_tiny") == "riemannian"
    assert attention_kind_of("laplacianformer_nano", {"attention": None}) == "laplacian"
    assert attention_kind_of("laplacianformer_nano", {"attention": "mine.py:Mine"}) == "mine.py:Mine"
    three = "laplacian, laplacian,softmax"
    assert attention_kind_of("laplacianformer_micro", {"attention": three}) == "laplacian,laplacian,softmax"
    assert attention_kind_of("laplacianformer_micro", {"attention": ["softmax"] * 3}) == "softmax"
    with pytest.raises(UserError, match="names 3 kinds for 4 stages"):
        attention_kind_of("laplacianformer_tiny", {"attention": three})
    assert len(model_names()) == len(FAMILIES) * len(SIZES)


@pytest.mark.parametrize("name", ["laplaceformer_tiny", "laplacianformer_giant", "laplacianformer", ""])
def test_an_unknown_model_is_refused_with_the_names_there_are(name: str) -> None:
    with pytest.raises(UserError, match="unknown model") as caught:
        attention_kind_of(name)
    assert "laplacianformer" in caught.value.remedy
    assert "micro" in caught.value.remedy
