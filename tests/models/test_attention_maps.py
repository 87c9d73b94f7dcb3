"""Maps of one token: rows of the real layers, shares that sum to 1, known answers."""

import math

import pytest
import timm
import torch

from attngeo.errors import UserError
from attngeo.evaluation.attention_maps import StageMap, centre, stage_maps, statistics, uniform_map
from attngeo.layers.registry import ATTENTION_KINDS
from tests.tolerances import MASSES_FLOAT64


def numbers(of: StageMap) -> dict[str, torch.Tensor]:
    return {labels["metric"] + labels.get("tercile", ""): values for labels, values in statistics(of)}


@pytest.mark.parametrize("attention", ATTENTION_KINDS)
def test_rows_of_every_kind_sum_to_one_and_are_those_of_the_stage(attention: str) -> None:
    model = timm.create_model("softmaxformer_micro", num_classes=3, attention=attention)
    maps = stage_maps(model, torch.randn(2, 3, 32, 48), (1, -1))
    assert [(of.stage, of.grid, of.heads) for of in maps] == [(1, (16, 24), 1), (3, (4, 6), 4)]
    for of in maps:
        assert of.rows.shape == (2, of.grid[0] * of.grid[1])
        assert float((of.rows.sum(-1) - 1).abs().max()) < MASSES_FLOAT64
        found = numbers(of)
        shares = sum(found[f"spatial_tercile_share{tercile}"] for tercile in ("near", "middle", "far"))
        assert float((shares - 1).abs().max()) < MASSES_FLOAT64
        assert (found["effective_tokens"] <= of.rows.shape[-1] + MASSES_FLOAT64).all()
        assert (found["largest_weight"] >= 1 - MASSES_FLOAT64).all()
        assert ((found["negative_share"] > 0) == (found["smallest_weight"] < 0)).all()


def test_first_and_last_stage_of_one_stage_are_one_map() -> None:
    model = timm.create_model("softmaxformer_nano", num_classes=3)
    assert [of.stage for of in stage_maps(model, torch.randn(1, 3, 32, 32), (2, -1))] == [2]


def test_uniform_attention_reaches_every_token_alike() -> None:
    of = uniform_map(StageMap(1, (5, 7), 1, torch.zeros(1, 35, dtype=torch.float64)))
    found = numbers(of)
    assert float(found["effective_tokens"]) == pytest.approx(35)
    assert float(found["largest_weight"]) == pytest.approx(1)
    assert float(found["negative_share"]) == 0
    for tercile in ("near", "middle", "far"):
        assert float(found[f"spatial_tercile_share{tercile}"]) == pytest.approx(1 / 3)
    rows, columns = centre((5, 7))
    assert (rows, columns) == (2, 3)
    distance = sum(math.hypot(i - rows, j - columns) for i in range(5) for j in range(7)) / 35
    assert float(found["mean_distance"]) == pytest.approx(distance)


def test_signed_rows_count_by_their_absolute_weights() -> None:
    row = torch.zeros(1, 9, dtype=torch.float64)
    row[0, 4], row[0, 0] = 2.0, -1.0  # the token itself, and a corner
    found = numbers(StageMap(1, (3, 3), 1, row))
    assert float(found["negative_share"]) == pytest.approx(1 / 3)
    assert float(found["effective_tokens"]) == pytest.approx(math.exp(-(2 / 3) * math.log(2 / 3) + math.log(3) / 3))
    # Of the four corners, equally far, three make the farthest third and the fourth belongs to the next.
    assert float(found["spatial_tercile_sharefar"]) == pytest.approx(1 / 3 * 3 / 4)
    assert float(found["spatial_tercile_sharenear"]) == pytest.approx(2 / 3)
    assert float(found["smallest_weight"]) == pytest.approx(-9)


def test_a_kind_without_rows_is_refused_by_name(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from torch import nn\n\n\nclass Mine(nn.Module):\n    kind = 'mine'\n\n"
        "    def __init__(self, dim, heads, *, landmarks=(7, 7)):\n        super().__init__()\n"
        "        self.value = nn.Linear(dim, dim)\n\n    def forward(self, x, grid):\n        return self.value(x)\n"
    )
    model = timm.create_model("softmaxformer_nano", num_classes=3, attention=f"{file}:Mine")
    with pytest.raises(UserError, match="'mine' gives no rows"):
        stage_maps(model, torch.randn(1, 3, 32, 32), (1,))
