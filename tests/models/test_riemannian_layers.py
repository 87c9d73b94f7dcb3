"""Laws of the Riemannian layer's options and of connections: masks, geometries, transport, curvature and torsion."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attngeo.errors import UserError
from attngeo.layers import connection
from attngeo.layers.connection import Connection, curvature, dense_root, gamma, holonomy, polar_transport, torsion
from attngeo.layers.riemannian import GEOMETRIES, METRICS, RiemannianAttention
from attngeo.layers.token_metric import ConstantMetric
from tests.tolerances import ATTENTION_FLOAT64, FLAT_HOLONOMY

GRID = (1, 23)


def layer_of(**options: Any) -> RiemannianAttention:
    """A layer in float64 of two heads of width 8 whose metrics and connection are far from their start."""
    torch.manual_seed(2)
    layer = RiemannianAttention(16, 2, rotary=False, rank=3, **options).double()
    for name, parameter in layer.named_parameters():
        if "token_metric" in name or "connection" in name:
            nn.init.normal_(parameter, std=0.4)
    return layer


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 4}, {"causal": True, "window": 3}], ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("padded", [False, True])
def test_rows_times_values_are_the_output_for_every_geometry_and_mask(
    geometry: str, options: dict[str, Any], padded: bool
) -> None:
    key_mask = torch.arange(23).expand(2, -1) < torch.tensor([[23], [17]]) if padded else None
    for metric in METRICS if geometry == "heterogeneous" else ("query",):
        layer = layer_of(geometry=geometry, metric=metric, **options)
        x = draw(2, 23, 16)
        rows = layer.attention_rows(x, GRID, [0, 22, 5, -1], key_mask=key_mask)
        value = layer.split_heads(layer.query_key_value(x).chunk(3, dim=-1)[2])
        expected = layer.projection(layer.merge_heads(rows @ value))
        found = layer(x, GRID, key_mask=key_mask)[:, [0, 22, 5, -1]]
        torch.testing.assert_close(found, expected, rtol=0, atol=ATTENTION_FLOAT64)


@pytest.mark.parametrize("transport", [False, True])
def test_a_causal_layer_does_not_look_ahead_and_a_window_no_further(transport: bool) -> None:
    layer = layer_of(causal=True, window=5, transport=transport)
    x = draw(1, 23, 16).requires_grad_()
    (grad,) = torch.autograd.grad(layer(x, GRID)[0, 11].sum(), x)
    reached = grad[0].abs().amax(-1) > 0
    assert reached.tolist() == [7 <= index <= 11 for index in range(23)]


def test_one_constant_metric_is_the_heterogeneous_form_with_that_metric_at_every_token() -> None:
    layer = layer_of(geometry="constant", metric_per_head=True)
    assert isinstance(layer.token_metric, ConstantMetric)
    assert layer.token_metric.diagonal.shape == (16,)
    a, U = (part.detach() for part in layer.token_metric())
    other = RiemannianAttention(16, 2, rotary=False, rank=3, metric_per_head=True).double()
    other.load_state_dict({n: p for n, p in layer.state_dict().items() if "token_metric" not in n}, strict=False)
    assert other.token_metric is not None
    other.token_metric.register_forward_hook(  # every token gets that metric
        lambda module, inputs, output: (a.expand(*inputs[0].shape[:2], -1), U.expand(*inputs[0].shape[:2], -1, -1))
    )
    x = draw(2, 23, 16)
    torch.testing.assert_close(layer(x, GRID), other(x, GRID), rtol=0, atol=ATTENTION_FLOAT64)


def test_euclidean_geometry_has_no_metric_to_learn() -> None:
    layer = layer_of(geometry="euclidean")
    assert not any("token_metric" in name for name, _ in layer.named_parameters())
    x = draw(1, 23, 16)
    q, k, v = (layer.split_heads(part) for part in layer.query_key_value(x).chunk(3, dim=-1))
    weights = torch.softmax(-torch.cdist(q, k).square() / (2 * 8**0.5), dim=-1)
    expected = layer.projection(layer.merge_heads(weights @ v))
    torch.testing.assert_close(layer(x, GRID), expected, rtol=0, atol=ATTENTION_FLOAT64)


def test_pairs_are_counted_as_they_are_seen() -> None:
    layer = layer_of(geometry="euclidean", causal=True, window=4)
    seen = sum(min(index + 1, 4) for index in range(23))
    assert layer.token_macs(GRID).products == 2 * seen * 16
    assert layer_of(window=4).token_macs(GRID).products == (2 * seen - 23) * (3 + 2 + 1) * 16
    assert layer_of(transport=True).token_macs(GRID).products == 23 * 23 * (5 * 16 + 16 + 3 * (16 + 2))


def test_options_that_mean_nothing_are_refused() -> None:
    with pytest.raises(UserError, match="window is 0"):
        RiemannianAttention(16, 2, window=0)
    with pytest.raises(UserError, match="geometry is 'hyperbolic'"):
        RiemannianAttention(16, 2, geometry="hyperbolic")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="leave the attention option transport out"):
        layer_of(transport=True).attention_rows(draw(1, 23, 16), GRID, [0])


@pytest.mark.parametrize("metric_per_head", [False, True])
def test_transported_values_are_the_sum_over_edges(metric_per_head: bool) -> None:
    layer = layer_of(transport=True, metric_per_head=metric_per_head)
    assert layer.connection is not None
    x = draw(1, 23, 16)
    q, k, v = (layer.split_heads(part) for part in layer.query_key_value(x).chunk(3, dim=-1))
    outward, left, right = (layer._by_head(part) for part in layer.connection(x))
    step, value = q.unsqueeze(-2) - k.unsqueeze(-3), v.unsqueeze(-3)
    edges = value - gamma(outward.unsqueeze(-3), left.unsqueeze(-3), right.unsqueeze(-4), step, value)
    plain = layer_of(metric_per_head=metric_per_head)
    plain.load_state_dict(layer.state_dict(), strict=False)
    weights = plain.attention_rows(x, GRID, range(23))
    expected = layer.projection(layer.merge_heads((weights.unsqueeze(-1) * edges).sum(-2)))
    torch.testing.assert_close(layer(x, GRID), expected, rtol=0, atol=ATTENTION_FLOAT64)


def test_transport_starts_without_effect_and_with_a_gradient() -> None:
    torch.manual_seed(0)
    layer = RiemannianAttention(16, 2, transport=True)
    plain = RiemannianAttention(16, 2)
    plain.load_state_dict(layer.state_dict(), strict=False)
    x = draw(2, 15, 16).float()
    assert torch.equal(layer(x, (3, 5)), plain(x, (3, 5)))
    assert layer.connection is not None
    layer(x, (3, 5)).square().sum().backward()
    assert layer.connection.outward.weight.grad.abs().max() > 0  # type: ignore[union-attr]
    assert (layer.connection.left.weight.grad == 0).all()  # type: ignore[union-attr]


def rotation(*leading: int, width: int = 5) -> Tensor:
    return torch.linalg.qr(draw(*leading, width, width)).Q


def test_the_learned_connection_turns_with_a_rotation_of_every_fibre() -> None:
    """Under rotations g_x of each fibre, factors and vectors turned, Gamma(g u, g v) is g Gamma(u, v)."""
    factors = Connection(7, 5, 2).double()
    nn.init.normal_(factors.outward.weight)
    maps = factors(draw(11, 7))
    u, v, g = draw(11, 5), draw(1, 11, 5)[0], rotation(11)
    turned = gamma(*(g @ part for part in maps), (g @ u.unsqueeze(-1)).squeeze(-1), (g @ v.unsqueeze(-1)).squeeze(-1))
    expected = (g @ gamma(*maps, u, v).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(turned, expected, rtol=0, atol=ATTENTION_FLOAT64)
    # The control: turned vectors with factors that stay are another connection.
    assert (gamma(*maps, (g @ u.unsqueeze(-1)).squeeze(-1), v) - expected).abs().max() > 0.1


def test_torsion_vanishes_for_the_symmetric_connection_alone() -> None:
    for symmetric in (True, False):
        factors = Connection(7, 5, 2, symmetric=symmetric).double()
        nn.init.normal_(factors.outward.weight)
        found = float(torsion(*factors(draw(11, 7)), draw(11, 5), draw(1, 11, 5)[0]).detach())
        assert found == 0.0 if symmetric else found > 0.01


def metrics(isotropic: bool = False) -> tuple[Tensor, Tensor]:
    a = torch.full((11, 5), 0.7, dtype=torch.float64) if isotropic else 0.2 + draw(11, 5).square()
    return a, draw(11, 5, 2)


def triangles() -> Tensor:
    return connection.sample_triangles(11, 40, torch.Generator().manual_seed(3))


def test_triangles_have_three_different_corners() -> None:
    drawn = triangles()
    assert drawn.shape == (40, 3)
    assert all(len(set(corners)) == 3 for corners in drawn.tolist())


def test_metrics_have_curvature_and_flat_controls_have_none() -> None:
    a, U = metrics()
    assert curvature(a, U, triangles()) > 0.01
    assert curvature(a, torch.zeros_like(U), triangles()) < FLAT_HOLONOMY
    assert curvature(a[:1].expand_as(a), U[:1].expand_as(U), triangles()) < FLAT_HOLONOMY
    # Without the polar part, S_i^-1 S_j is flat for any metrics.
    first, second, third = dense_root(*(part[[0, 4, 7]] for part in (a, U))).unbind(0)
    around = torch.linalg.solve(first, second) @ torch.linalg.solve(second, third) @ torch.linalg.solve(third, first)
    assert (around - torch.eye(5)).abs().max() < FLAT_HOLONOMY


def test_the_polar_construction_is_invariant_under_one_rotation_of_all_fibres_and_not_under_one_each() -> None:
    a, U = metrics()
    roots = dense_root(a, U)
    torch.testing.assert_close(roots @ roots.mT, torch.diag_embed(a) + U @ U.mT, rtol=0, atol=ATTENTION_FLOAT64)
    common, own = rotation(), rotation(11)
    before = polar_transport(roots[:-1], roots[1:])
    after = polar_transport(common @ roots[:-1], common @ roots[1:])
    torch.testing.assert_close(after, before, rtol=0, atol=ATTENTION_FLOAT64)
    expected = holonomy(roots[triangles()])
    torch.testing.assert_close(holonomy((common @ roots)[triangles()]), expected, rtol=0, atol=ATTENTION_FLOAT64)
    assert (holonomy((own @ roots)[triangles()]) - expected).abs().max() > 0.1
    # The same of the metrics themselves, where the diagonal part lets them turn.
    a, U = metrics(isotropic=True)
    turned = curvature(a, common @ U, triangles())
    torch.testing.assert_close(turned, curvature(a, U, triangles()), rtol=0, atol=ATTENTION_FLOAT64)
