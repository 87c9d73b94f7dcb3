"""The analysis of attention matrices on features."""

import numpy as np
import pandas as pd
import pytest
import torch

from attngeo.errors import UserError
from attngeo.evaluation.injectivity import analyze

NYSTROM = ("injective", "injective_row", "row_sum", "none")


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    features = torch.randn(3, 49, 40, generator=torch.Generator().manual_seed(1))
    return analyze({"random": features}, 0, landmark_grids=(1, 2, 3, 7, 9))


def values(frame: pd.DataFrame, metric: str, **labels: object) -> pd.Series:
    chosen = frame["metric"] == metric
    for name, value in labels.items():
        chosen &= frame[name] == value
    return frame.loc[chosen, "value"]


def test_no_nystrom_form_exceeds_its_rank_bound(frame: pd.DataFrame) -> None:
    keys = ["control", "tokens", "form", "landmarks"]
    ranks = frame[frame["metric"] == "numerical_rank"].set_index(keys)["value"]
    bounds = frame[frame["metric"] == "rank_bound"].set_index(keys)["value"]
    assert (ranks.loc[bounds.index] <= bounds).all()
    assert (
        bounds == np.minimum(bounds.index.get_level_values("tokens"), bounds.index.get_level_values("landmarks") + 1)
    ).all()


def test_the_exact_kernel_has_full_rank_and_linear_attention_has_not(frame: pd.DataFrame) -> None:
    assert set(values(frame, "numerical_rank", form="laplacian", tokens=49, control="features")) == {49.0}
    assert (values(frame, "numerical_rank", form="linear_row_sum", tokens=49) <= 32).all()


def test_linear_attention_confuses_collinear_tokens_and_the_injective_form_does_not(frame: pd.DataFrame) -> None:
    assert (values(frame, "collisions", form="linear_row_sum", control="collinear_copies") > 0).all()
    assert (values(frame, "collisions", form="linear_row_sum", control="features") == 0).all()
    injective = frame[(frame["form"] == "injective") & (frame["landmarks"] > 1)]
    assert (values(injective, "collisions") == 0).all()
    assert (values(injective, "smallest_separation") > 1e-6).all()


def test_every_form_control_and_capacity_has_its_row(frame: pd.DataFrame) -> None:
    assert set(frame["form"]) == {"softmax", "gaussian", "laplacian", "linear_row_sum", *NYSTROM}
    assert set(frame["control"]) == {"features", "gaussian_noise", "collinear_copies"}
    assert set(frame["tokens"]) == {9, 49}
    assert set(frame.loc[frame["tokens"] == 49, "landmarks"]) == {0, 1, 4, 9, 49}
    assert (frame["n"] == 3).all()
    assert not frame.duplicated().any()
    assert frame.loc[frame["metric"] != "rank_bound", "spread"].notna().all()


def test_the_numbers_depend_on_the_seed_alone() -> None:
    features = {"random": np.random.default_rng(2).standard_normal((2, 16, 8))}
    first, second, other = (analyze(features, seed, landmark_grids=(2,)) for seed in (4, 4, 5))
    pd.testing.assert_frame_equal(first, second)
    assert not first["value"].equals(other["value"])


def test_odd_inputs_are_measured_or_refused_by_name() -> None:
    one_token = analyze({"one": torch.randn(1, 1, 5)}, 0)
    assert set(values(one_token, "numerical_rank")) <= {0.0, 1.0}
    oblong = analyze({"oblong": torch.randn(1, 6, 5)}, 0, grids={"oblong": (2, 3)}, landmark_grids=(2,))
    assert set(oblong["tokens"]) == {6}
    with pytest.raises(UserError, match="'six' have 6 tokens"):
        analyze({"six": torch.randn(1, 6, 5)}, 0)
    with pytest.raises(UserError, match="NaN"):
        analyze({"broken": torch.full((1, 4, 5), torch.nan)}, 0)
    with pytest.raises(UserError, match="shape"):
        analyze({"flat": torch.randn(4, 5)}, 0)
