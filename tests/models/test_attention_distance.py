"""Attention by distance: masses are shares, matched kernels match, and known sets give known answers."""

import math

import numpy as np
import pandas as pd
import pytest
import timm
import torch

from attngeo.errors import UserError
from attngeo.evaluation import attention_distance as measurement
from attngeo.evaluation.attention_distance import RULE_METRIC, RULE_SIMILARITY, analyze, matched_bandwidths
from attngeo.evaluation.token_features import TokenLayer, trained_layers
from tests.tolerances import MASSES_FLOAT64, MATCHED_SIMILARITY_RELATIVE

SHARES = ["features", "layer", "control", "kernel", "scale", "matched_at", "partition"]


def layer(images: int = 3, heads: int = 2, grid: tuple[int, int] = (5, 7), width: int = 4, *, shared=True, seed=0):
    draws = torch.Generator().manual_seed(seed)
    shape = (images, heads, grid[0] * grid[1], width)
    queries = torch.randn(shape, generator=draws, dtype=torch.float64)
    keys = queries if shared else torch.randn(shape, generator=draws, dtype=torch.float64)
    return TokenLayer("only", queries, keys, grid)


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    sets = {"shared": [layer()], "apart": [layer(seed=1, shared=False), layer(seed=2, shared=False, heads=3)]}
    return analyze(sets, 0, queries=11, resamples=200)


def chosen(frame: pd.DataFrame, **labels: object) -> pd.DataFrame:
    for name, value in labels.items():
        frame = frame[frame[name] == value]
    return frame


def test_masses_of_the_terciles_sum_to_one(frame: pd.DataFrame) -> None:
    masses = frame[frame["metric"] == "tercile_mass"].fillna({"scale": "", "matched_at": 0, "partition": ""})
    sums = masses.groupby(SHARES)["value"].agg(["sum", "count"])
    assert (sums["count"] == 3).all()
    assert (sums["sum"] - 1).abs().max() < MASSES_FLOAT64
    assert (masses["value"] > 0).all()


def test_both_kernels_have_the_mean_similarity_that_they_are_matched_at(frame: pd.DataFrame) -> None:
    matched = frame[(frame["metric"] == "mean_similarity") & (frame["scale"] == "matched")]
    assert set(matched["kernel"]) == {"laplacian", "gaussian"}
    assert set(matched["matched_at"]) == set(measurement.SIMILARITIES)
    assert ((matched["value"] / matched["matched_at"] - 1).abs() < MATCHED_SIMILARITY_RELATIVE).all()
    assert (matched["spread"] < MATCHED_SIMILARITY_RELATIVE).all()
    fixed = frame[(frame["metric"] == "bandwidth") & (frame["scale"] == "fixed")].groupby("kernel")["value"]
    assert fixed.unique().map(list).to_dict() == {"laplacian": [4.0], "gaussian": [1.0]}


@pytest.mark.parametrize("similarity", [1e-3, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bandwidths_are_found_for_every_head_whatever_its_scale(similarity: float, dtype: torch.dtype) -> None:
    draws = torch.Generator().manual_seed(3)
    exponents = torch.rand(2, 4, 13, 17, generator=draws).to(dtype)
    exponents = exponents.pow(3) * torch.tensor([1e-6, 1.0, 50.0, 1e6])[:, None, None].to(dtype)
    theta = matched_bandwidths(exponents, similarity)
    mean = torch.exp(-exponents.double() / theta[:, None, None]).mean((0, 2, 3))
    assert ((mean / similarity - 1).abs() < MATCHED_SIMILARITY_RELATIVE).all()


def test_a_head_of_coinciding_tokens_has_no_bandwidth_and_spoils_no_other() -> None:
    exponents = torch.rand(1, 2, 10, 10, dtype=torch.float64)
    exponents[:, 0, :4] = 0.0
    theta = matched_bandwidths(exponents, 0.3)
    assert math.isnan(theta[0])
    assert theta[1] > 0
    assert torch.isfinite(matched_bandwidths(exponents, 0.6)).all()


def test_order_of_the_tokens_changes_no_number_but_those_of_the_grid() -> None:
    one = layer()
    order = torch.randperm(35, generator=torch.Generator().manual_seed(9))
    queries = one.queries[:, :, order]
    other = TokenLayer(one.name, queries, queries, one.grid)
    first, second = (analyze({"x": [given]}, 0, queries=35, resamples=50) for given in (one, other))
    spatial = first["metric"] == "mean_attention_distance"
    by_content = ~spatial & first["control"].ne("gaussian_noise") & first["metric"].ne(RULE_METRIC)
    difference = (first.loc[by_content, "value"] - second.loc[by_content, "value"]).abs()
    assert difference.max() < MASSES_FLOAT64
    of_features = spatial & (first["control"] == "features")
    assert not np.allclose(first.loc[of_features, "value"], second.loc[of_features, "value"])


def test_two_clusters_give_known_masses() -> None:
    """Tokens at 0 and 1 on a line: exp(-1 / lambda) and exp(-1 / (2 sigma^2)) are then the same number."""
    queries = torch.tensor([0.0] * 4 + [1.0] * 3, dtype=torch.float64).reshape(1, 1, 7, 1)
    found = analyze({"x": [TokenLayer("only", queries, queries, (1, 7))]}, 0, queries=7)
    pairs_apart, pairs = 24, 42
    for similarity in (0.6, 0.8):
        apart = (similarity * pairs - (pairs - pairs_apart)) / pairs_apart  # the kernel between the clusters
        for kernel in ("laplacian", "gaussian"):
            of = {"control": "features", "kernel": kernel, "matched_at": similarity, "layer": "mean"}
            bandwidth = float(chosen(found, metric="bandwidth", **of)["value"].iloc[0])
            exponent = 1 / bandwidth if kernel == "laplacian" else 1 / (2 * bandwidth**2)
            assert math.exp(-exponent) == pytest.approx(apart, rel=MATCHED_SIMILARITY_RELATIVE)
            masses = chosen(found, metric="tercile_mass", partition="l1", **of).set_index("tercile")["value"]
            # Of the six others a token of the four has three near ones, a token of the three has two.
            near = (4 * 2 / (3 + 3 * apart) + 3 * 2 / (2 + 4 * apart)) / 7
            middle = (4 * (1 + apart) / (3 + 3 * apart) + 3 * 2 * apart / (2 + 4 * apart)) / 7
            assert masses["near"] == pytest.approx(near, rel=MATCHED_SIMILARITY_RELATIVE)
            assert masses["middle"] == pytest.approx(middle, rel=MATCHED_SIMILARITY_RELATIVE)
        difference = chosen(found, metric="middle_mass_difference", matched_at=similarity, control="features")
        assert difference["value"].abs().max() < MATCHED_SIMILARITY_RELATIVE
    below = chosen(found, metric="middle_mass_difference", matched_at=0.1, control="features")
    assert below["value"].isna().all(), "18 of 42 pairs coincide"


def test_the_number_of_the_ledger_lies_on_a_side_only_where_both_partitions_do(frame: pd.DataFrame) -> None:
    for name in ("shared", "apart"):
        (rule,) = chosen(frame, metric=RULE_METRIC, features=name).to_dict("records")
        of = {"metric": "middle_mass_difference", "control": "features", "matched_at": RULE_SIMILARITY, "layer": "mean"}
        parts = chosen(frame, features=name, **of)
        assert set(parts["partition"]) == {"l2", "l1"}
        assert rule["value"] - rule["spread"] == pytest.approx(parts["low"].min())
        assert rule["value"] + rule["spread"] == pytest.approx(parts["high"].max())
        assert rule["n"] == 3
        assert "95 %" in rule["spread_kind"]


def test_noise_has_the_covariance_of_the_queries_and_keys() -> None:
    draws = torch.Generator().manual_seed(4)
    mixing = torch.randn(3, 3, generator=draws, dtype=torch.float64)
    queries = torch.randn(200, 1, 49, 3, generator=draws, dtype=torch.float64) @ mixing + 2.0
    given = TokenLayer("x", queries, 0.5 * queries + 1.0, (7, 7))
    drawn = measurement._noise(given, draws)
    flat, drawn_flat = (torch.cat([one.queries, one.keys], -1).reshape(-1, 6) for one in (given, drawn))
    assert not torch.equal(flat, drawn_flat)
    assert torch.allclose(flat.mean(0), drawn_flat.mean(0), atol=0.1)
    assert torch.allclose(flat.T.cov(), drawn_flat.T.cov(), atol=0.2)
    assert torch.allclose(drawn.keys, 0.5 * drawn.queries + 1.0, atol=1e-6), "keys that follow the queries still do"


def test_statistics_are_those_of_the_distances() -> None:
    one = layer(images=1, heads=1, grid=(3, 3))
    found = analyze({"x": [one]}, 0, queries=9)
    pairs = (one.queries[0, 0][:, None] - one.queries[0, 0][None])[~torch.eye(9, dtype=torch.bool)]
    for distance, values in (("l1", pairs.abs().sum(-1)), ("squared_l2", pairs.square().sum(-1))):
        of = chosen(found, distance=distance, control="features", layer="mean").set_index("metric")["value"]
        assert of["distance_mean"] == pytest.approx(float(values.mean()))
        assert of["distance_cv"] == pytest.approx(float(values.std(correction=0) / values.mean()))
    spatial = chosen(found, metric="mean_attention_distance", control="uniform")
    places = np.array([(i, j) for i in range(3) for j in range(3)], dtype=float)
    distances = np.linalg.norm(places[:, None] - places[None], axis=-1)
    assert float(spatial["value"].iloc[0]) == pytest.approx(distances.sum() / 72)
    densities = chosen(found, metric="distance_density", distance="l1", **{"in": "standard deviations"})
    assert float((densities["value"] * densities["width"]).sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("attention", ["softmax", "laplacian", "gaussian", "laplacian_exact"])
def test_trained_queries_and_keys_give_the_map_of_their_layer(attention: str) -> None:
    model = timm.create_model("softmaxformer_nano", num_classes=3, attention=attention)
    layers = trained_layers(model, torch.randn(2, 3, 32, 32))
    assert [(one.name, one.grid) for one in layers] == [("stage 1", (16, 16)), ("stage 2", (8, 8))]
    assert layers[0].queries.shape == (2, 1, 256, 16)
    assert all(one.shared == (attention != "softmax") for one in layers)
    if attention == "softmax":
        seen = []
        block = model.stages[0].blocks[-1].attention
        hook = block.register_forward_pre_hook(lambda module, arguments: seen.append(arguments))
        model(torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)))
        hook.remove()
        layers = trained_layers(model, torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)))
        rows = block.attention_rows(*seen[0], [5])
        products = layers[0].queries[:, :, [5]] @ layers[0].keys.mT
        assert torch.allclose(products.softmax(-1), rows, atol=1e-6)


def test_a_kind_without_queries_and_keys_is_refused_by_name() -> None:
    model = timm.create_model("fiberformer_nano", num_classes=3)
    with pytest.raises(UserError, match="'riemannian'"):
        trained_layers(model, torch.randn(1, 3, 32, 32))


def test_features_that_cannot_be_measured_are_refused_by_name() -> None:
    for given, words in (
        (layer(grid=(1, 3)), "3 tokens have no terciles"),
        (TokenLayer("only", torch.full((1, 1, 9, 2), math.nan), torch.zeros(1, 1, 9, 2), (3, 3)), "NaN"),
        (TokenLayer("only", torch.zeros(1, 1, 9, 2), torch.zeros(1, 1, 9, 2), (3, 3)), "all tokens of a head"),
    ):
        with pytest.raises(UserError, match=words):
            analyze({"x": [given]}, 0)
    with pytest.raises(UserError, match="of 2 images, not 3"):
        analyze({"x": [layer(), layer(images=2)]}, 0)


def test_numbers_depend_on_the_seed_alone() -> None:
    first, second, other = (analyze({"x": [layer(shared=False)]}, seed, queries=5, resamples=50) for seed in (1, 1, 2))
    pd.testing.assert_frame_equal(first, second)
    assert not first["value"].equals(other["value"])
