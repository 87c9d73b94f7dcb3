"""Attention of every kind trained here is a connection walk, signed and unnormalised rows included."""

from typing import Any

import pytest
import timm
import torch
from torch import nn

import attngeo  # noqa: F401  names the models to timm
from attngeo.connection_walk import identities
from attngeo.connection_walk.own_vision import analyze_pyramid
from attngeo.errors import UserError
from attngeo.language_models.own_vision import BlockCapture, opened_pyramid, stream_blocks
from attngeo.models import registry  # noqa: F401
from attngeo.training.seeding import generator, seeded_globals
from tests.tolerances import WALK_IDENTITY_FLOAT64

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("softmax", {}),
    ("gaussian", {}),
    ("gaussian", {"form": "soft++", "local_convolution": True}),
    ("gaussian", {"normalization": "row_sum", "landmark_map": "convolution"}),
    ("laplacian", {}),
    ("laplacian", {"normalization": "none"}),
    ("laplacian", {"normalization": "row_sum", "iterations": 5}),
    ("laplacian", {"normalization": "injective_row", "local_convolution": False}),
    ("laplacian", {"shared_query_key": False, "separate_landmarks": True, "statistics": "batch"}),
    ("laplacian_exact", {}),
    ("laplacian_exact", {"normalization": "row_sum", "shared_query_key": False}),
    ("linear_injective", {"feature_map": "exp"}),
    ("riemannian", {}),
    ("riemannian", {"metric": "mean", "metric_per_head": True}),
    ("softmax,laplacian", {}),
]


def pyramid(kind: str, seed: int = 0, **options: Any) -> nn.Module:
    """A tiny pyramid with every parameter drawn anew, so that no bias is 0 and no gain 1."""
    with seeded_globals(seed):
        model = timm.create_model("softmaxformer_nano", attention=kind, attention_options=options, num_classes=3)
    draw = generator(seed, "tiny pyramid")
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=draw)
        parameter.data = parameter.data + (0.3 if "norm" in name or "bias" in name else 0.1) * noise
    return model.eval().requires_grad_(False)


def blocks_of(model: nn.Module) -> list[BlockCapture]:
    found: list[BlockCapture] = []
    image = torch.randn(3, 26, 22, dtype=torch.float64, generator=generator(0, "image"))
    stream_blocks(opened_pyramid(model.double(), "m"), image, found.append)
    return found


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=[f"{kind} {options}" for kind, options in KINDS])
def test_attention_of_every_kind_is_the_connection_walk(kind: str, options: dict[str, Any]) -> None:
    model = pyramid(kind, **options)
    sites = opened_pyramid(model, "m").sites
    found = blocks_of(model)
    assert [block.walk.layer for block in found] == list(range(len(sites)))
    for block, site in zip(found, sites, strict=True):
        weights = site.weights()
        assert block.walk.output.norm() > 0
        assert identities.walk_error(block.walk, site, weights) <= WALK_IDENTITY_FLOAT64
        assert max(identities.head_walk_errors(block.walk, site, weights)) <= WALK_IDENTITY_FLOAT64


def test_the_local_convolution_stands_beside_the_walk_and_both_make_the_output() -> None:
    model = pyramid("laplacian")
    outputs: list[torch.Tensor] = []
    for stage in model.stages:  # type: ignore[union-attr]
        stage.blocks[0].attention.register_forward_hook(lambda *found: outputs.append(found[2][0]))
    for block, output in zip(blocks_of(model), outputs, strict=True):
        assert block.beside is not None
        assert block.beside.norm() > 1e-3 * output.norm()
        torch.testing.assert_close(block.walk.output + block.beside, output)
    assert all(block.beside is None for block in blocks_of(pyramid("softmax")))


def test_keys_from_a_pooled_grid_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="'softmax_sr' is no sum of rows times values"):
        _ = opened_pyramid(pyramid("softmax_sr"), "m").sites


def analyzed(kind: str, model: nn.Module | None = None, **options: Any) -> Any:
    images = torch.randn(2, 3, 26, 22, generator=generator(1, "images"))
    return analyze_pyramid(
        model or pyramid(kind, **options), images, lambda index: pyramid(kind, 1 + index, **options), model_id="run"
    )


def value(frame: Any, metric: str, control: str = "trained") -> list[float]:
    """The numbers of whole blocks, first block first."""
    rows = frame[(frame["metric"] == metric) & (frame["control"] == control) & (frame["head"] == -1)]
    return list(rows[rows["layer"] >= 0].sort_values("layer")["value"])


def test_signed_and_unnormalised_rows_are_reported_as_such() -> None:
    signed, chain, kernel = analyzed("laplacian"), analyzed("softmax"), analyzed("gaussian")
    assert max(value(signed, "negative_share")) > 0
    assert max(value(signed, "stochasticity_defect")) > 0.01
    assert min(value(signed, "beside_share")) > 0
    assert set(value(chain, "negative_share")) == set(value(chain, "beside_share")) == {0.0}
    assert max(value(chain, "stochasticity_defect")) < 1e-12
    assert max(value(kernel, "stochasticity_defect")) > 0.01
    for frame in (signed, chain, kernel):
        assert max(value(frame, "identity_error")) <= WALK_IDENTITY_FLOAT64
    assert set(signed["family"]) == {"laplacian pyramid"}


def test_an_isometry_that_is_planted_exceeds_the_null_and_the_untrained_models() -> None:
    model = pyramid("riemannian")
    for stage in model.stages:  # type: ignore[union-attr]
        block = stage.blocks[0]
        width = block.attention.dim
        block.norm1.weight.data.fill_(1)
        # Orthogonal W_V and W_O: every head maps its own subspace to another one without stretching.
        for part in (block.attention.query_key_value.weight[2 * width :], block.attention.projection.weight):
            part.data.copy_(torch.linalg.qr(torch.randn(width, width, generator=generator(2, "planted"))).Q)
    frame = analyzed("riemannian", model)
    assert value(frame, "isometry_score") == pytest.approx([1.0, 1.0], abs=1e-6)
    # One head in the first block: an edge's transport is the head's. In the second, gates make the spectrum of an edge.
    assert value(frame, "transport_isometry_score") == [pytest.approx(1.0, abs=1e-6), pytest.approx(0.9, abs=0.1)]
    for control in ("excess", "excess_same_gain"):
        assert min(value(frame, "isometry_score", control)) > 0.01
    untrained = frame[frame["control"] == "random_init"]
    assert set(untrained["n"]) == {5}
    assert max(untrained["value"]) < 0.99


def test_the_model_is_left_as_it_was_and_numbers_repeat() -> None:
    model = pyramid("laplacian")
    before = {name: parameter.clone() for name, parameter in model.state_dict().items()}
    first = analyzed("laplacian", model)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    assert first.equals(analyzed("laplacian", model))
