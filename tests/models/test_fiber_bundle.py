"""Plain transformers by variant: matched in parameters, wired as named, causal where asked, any image size."""

import pytest
import timm
import torch
from torch import nn

from attngeo.errors import UserError
from attngeo.evaluation.macs import count_macs
from attngeo.evaluation.sequence_macs import count_sequence_macs
from attngeo.layers.masked_softmax import MaskedSoftmaxAttention
from attngeo.layers.softmax import SoftmaxAttention
from attngeo.models.fiber_bundle import (
    MATCHED_WITHIN,
    VARIANTS,
    FiberViT,
    TokenTransformer,
    Trunk,
    matched_hidden,
    parameters_at,
    vision_transformer,
)
from tests.tolerances import ATTENTION_FLOAT64, LATER_TOKENS_FLOAT64


def decoder(variant: str, hidden: int | None = None, **options: object) -> TokenTransformer:
    shape = {"vocabulary": 11, "context": 13, "dim": 16, "depth": 2, "heads": 2, "causal": True}
    return TokenTransformer(variant, hidden=hidden, **{**shape, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_have_the_same_number_of_parameters_within_a_hundredth(variant: str) -> None:
    def make(hidden: int | None) -> nn.Module:
        return decoder(variant, hidden, dim=32, heads=4)

    target = sum(parameter.numel() for parameter in decoder("dot", dim=32, heads=4).parameters())
    found = parameters_at(make, matched_hidden(make, target))
    assert abs(found - target) <= MATCHED_WITHIN * target


def test_a_width_that_cannot_match_is_refused_and_counting_draws_nothing() -> None:
    with pytest.raises(ValueError, match="within 1%"):
        matched_hidden(lambda hidden: decoder("fiber", hidden), 2000)
    with pytest.raises(ValueError, match="no feed-forward"):
        matched_hidden(lambda hidden: decoder("dot", hidden, wiring="skip"), 2000)
    before = torch.get_rng_state()
    parameters_at(lambda hidden: decoder("fiber", hidden), 7)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_decoder_never_looks_ahead(variant: str) -> None:
    model = decoder(variant).double().eval()
    tokens = torch.randint(11, (3, 13))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 11
    before, after = model(tokens), model(changed)
    assert (before - after)[:, :7].abs().max() <= LATER_TOKENS_FLOAT64
    assert (before - after)[:, 7:].abs().max() > LATER_TOKENS_FLOAT64


def test_an_encoder_looks_at_all_and_more_tokens_than_the_context_are_refused() -> None:
    model = decoder("fiber", causal=False).double().eval()
    tokens = torch.randint(11, (2, 13))
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 11
    assert (model(tokens) - model(changed))[:, 0].abs().max() > LATER_TOKENS_FLOAT64
    with pytest.raises(UserError, match="14 tokens are more than the context of 13"):
        model(torch.zeros(1, 14, dtype=torch.long))
    assert model(torch.zeros(2, 1, dtype=torch.long)).shape == (2, 1, 11)


def test_wirings_take_away_what_they_say() -> None:
    x = torch.randn(2, 5, 16)
    pure, skip, full = (Trunk("dot", 16, 1, 2, wiring=wiring) for wiring in ("pure", "skip", "skip_mlp"))  # type: ignore[arg-type]
    for trunk in (pure, skip, full):
        trunk.load_state_dict(full.state_dict(), strict=False)
    states = {trunk.wiring: trunk.states(x, (1, 5)) for trunk in (pure, skip, full)}
    assert all(len(found) == 2 and found[0] is x for found in states.values())
    mixed = full.blocks[0].attention(full.blocks[0].norm1(x), (1, 5))  # type: ignore[union-attr, operator]
    torch.testing.assert_close(states["pure"][1], mixed)
    torch.testing.assert_close(states["skip"][1], x + mixed)
    assert not torch.allclose(states["skip_mlp"][1], states["skip"][1])
    with pytest.raises(UserError, match="pure, skip, skip_mlp"):
        Trunk("dot", 16, 1, 2, wiring="none")  # type: ignore[arg-type]


def test_unknown_variants_and_options_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="choose one of dot, more_heads"):
        decoder("laplacian")
    with pytest.raises(UserError, match="no option 'solver'"):
        decoder("fiber", options={"solver": "cholesky"})


def test_masked_softmax_is_softmax_where_nothing_is_masked() -> None:
    plain, masked = SoftmaxAttention(16, 2).double(), MaskedSoftmaxAttention(16, 2).double()
    masked.load_state_dict(plain.state_dict())
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    torch.testing.assert_close(masked(x, (1, 7)), plain(x, (1, 7)), atol=ATTENTION_FLOAT64, rtol=0)
    all_seen = torch.ones(2, 7, dtype=torch.bool)
    torch.testing.assert_close(masked(x, (1, 7), key_mask=all_seen), plain(x, (1, 7)), atol=ATTENTION_FLOAT64, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_masked_softmax_times_values_are_its_output_and_padding_changes_nothing(causal: bool) -> None:
    layer = MaskedSoftmaxAttention(16, 2, causal=causal).double()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    values = layer.split_heads(layer.query_key_value(x).chunk(3, dim=-1)[2])
    rows = layer.attention_rows(x, (1, 7), [-1, 0, 3])
    found = layer.projection(layer.merge_heads(rows @ values))
    torch.testing.assert_close(found, layer(x, (1, 7))[:, [-1, 0, 3]], atol=ATTENTION_FLOAT64, rtol=0)
    padding = torch.tensor([[True] * 5 + [False] * 2] * 2)
    changed = torch.cat((x[:, :5], torch.randn(2, 2, 16, dtype=torch.float64)), dim=1)
    first, second = layer(x, (1, 7), key_mask=padding), layer(changed, (1, 7), key_mask=padding)
    torch.testing.assert_close(first[:, :5], second[:, :5], atol=ATTENTION_FLOAT64, rtol=0)
    nothing = layer(x, (1, 7), key_mask=torch.zeros(2, 7, dtype=torch.bool))
    torch.testing.assert_close(nothing, layer.projection.bias.expand_as(nothing))


@pytest.mark.parametrize("variant", ["dot", "fiber"])
def test_the_plain_vision_transformer_takes_any_image_and_is_known_to_timm(variant: str) -> None:
    model = timm.create_model("fibervit_micro", num_classes=5, in_chans=1, form=variant)
    assert isinstance(model, FiberViT)
    assert {"fibervit_micro", "fibervit_tiny"} <= set(timm.list_models("fibervit_*"))
    for height, width in ((1, 1), (28, 28), (17, 31)):
        assert model(torch.randn(2, 1, height, width)).shape == (2, 5)
    model.reset_classifier(0)
    assert model(torch.randn(2, 1, 9, 9)).shape == (2, 64)
    assert model.forward_features(torch.randn(2, 1, 28, 28)).shape == (2, 49, 64)
    with pytest.raises(UserError, match="micro, tiny"):
        vision_transformer("giant")


def test_gradients_reach_every_parameter_of_the_full_model() -> None:
    model = decoder("fiber")
    tokens = torch.randint(11, (3, 13))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):  # behind a connection that starts at 0 the factors get a gradient from the second step on
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, name


def test_multiply_accumulates_are_counted_by_formula() -> None:
    tokens, dim, depth, vocabulary = 13, 16, 2, 11
    counted = count_sequence_macs(decoder("dot"), tokens)
    linear = depth * tokens * (4 * dim * dim + 2 * dim * 4 * dim) + tokens * dim * vocabulary
    products = depth * tokens * (tokens + 1) * dim  # causal: a token sees itself and those before
    assert round(counted["gmac"] * 1e9) == linear + products
    assert counted["parameters"] == sum(parameter.numel() for parameter in decoder("dot").parameters())
    assert not counted["gmac_uncounted"]
    image = count_macs(vision_transformer("micro", "fiber", in_chans=1, num_classes=3), 28, in_chans=1)
    assert not image["gmac_uncounted"]
    assert image["gmac_metric"] > 0
