"""Stationary paths with known answers: explicit time, multipliers, free ends, perturbations, L-BFGS, clustering."""

import math

import pytest
import torch
from torch import Tensor

from attngeo.training.seeding import generator
from attngeo.variational.clustering import cluster_count, clustering_time, equiangular_time
from attngeo.variational.euler_lagrange import (
    end_momenta,
    euler_lagrange_residual,
    first_variation_formula,
    midpoint_action,
    minimise,
    multiplier,
    response,
)
from attngeo.variational.flow import (
    energy,
    energy_gradient,
    gradient_flow,
    integrate,
    one_over_n_flow,
    path_times,
    softmax_flow,
)
from attngeo.variational.lagrangian import (
    action,
    energy_dissipation,
    first_variation,
    kinetic,
    path_derivative,
    smooth_variation,
    varied_path,
)
from attngeo.variational.sphere import distance, dot, exponential, logarithm, random_points, tangent_projection
from attngeo.variational.stationary import stationary_path
from tests.tolerances import (
    CLUSTERING_TIME_RELATIVE,
    FITTED_ORDER,
    FLAT_SLOPE,
    SPHERE_ROUNDING,
    STATIONARY_DISTANCE,
    STENCIL_ROUNDING,
)


def _tokens(tokens: int, dimension: int, seed: int = 0) -> Tensor:
    return random_points(tokens, dimension, generator=generator(seed, "test tokens"))


def _tangents(x: Tensor, seed: int = 0) -> Tensor:
    return tangent_projection(x, torch.randn(*x.shape, generator=generator(seed, "test tangent"), dtype=torch.float64))


def _great_circles(x: Tensor, y: Tensor, nodes: int) -> Tensor:
    return exponential(x, torch.linspace(0, 1, nodes, dtype=torch.float64)[:, None, None] * logarithm(x, y))


def _minus_energy(x: Tensor) -> Tensor:
    return -energy(x, 1.0)


def _growing(t: Tensor, x: Tensor, v: Tensor) -> Tensor:
    """exp(t) |xdot|^2 / 2: great circles on which the speed falls like exp(-t)."""
    return torch.exp(t) * kinetic(t, x, v)


def _slowing(x: Tensor, v: Tensor, step: float, nodes: int) -> Tensor:
    return exponential(x, -torch.expm1(-path_times(nodes, step, x))[:, None, None] * v)


def _order(errors: list[float]) -> float:
    return math.log2(errors[0] / errors[1])


def test_a_lagrangian_that_depends_on_time_has_its_known_paths_action_and_residual() -> None:
    x = _tokens(3, 4)
    v = _tangents(x)
    residuals = []
    for nodes in (21, 41):
        step = 2 / (nodes - 1)
        residual = euler_lagrange_residual(_growing, _slowing(x, v, step, nodes), step)
        residuals.append(float(residual[len(residual) // 2].abs().amax()))
    assert _order(residuals) == pytest.approx(4, abs=FITTED_ORDER)
    path = _slowing(x, v, 0.01, 201)
    expected = float(v.square().sum()) / 2 * (1 - math.exp(-2))
    assert float(action(_growing, path, 0.01)) == pytest.approx(expected, rel=1e-7)
    # A great circle at constant speed is no solution.
    assert float(euler_lagrange_residual(_growing, _great_circles(x, _tokens(3, 4, 1), 201), 0.01).abs().amax()) > 0.1


def test_the_multiplier_is_the_squared_speed_and_the_normal_part_of_the_force() -> None:
    errors = []
    for nodes in (41, 81):
        step = 8 / (nodes - 1)
        path = integrate(gradient_flow(1.0), _tokens(5, 3), step, nodes - 1)
        inner, leaf = path[2:-2], path[2:-2].clone().requires_grad_()
        (force,) = torch.autograd.grad(energy_gradient(leaf, 1.0).square().sum() / 2, leaf)
        expected = energy_gradient(inner, 1.0).square().sum(dim=-1) + dot(inner, force).squeeze(-1)
        errors.append(float((multiplier(energy_dissipation(1.0), path, step) - expected).abs().amax()))
    assert _order(errors) == pytest.approx(4, abs=FITTED_ORDER)


def test_the_equation_with_its_multiplier_is_that_of_great_circles() -> None:
    x = _tokens(3, 4)
    path = _great_circles(x, _tokens(3, 4, 1), 41)
    acceleration = path_derivative(path, 1 / 40, 2)[2:-2]
    whole = acceleration + multiplier(kinetic, path, 1 / 40).unsqueeze(-1) * path[2:-2]
    torch.testing.assert_close(whole, torch.zeros_like(whole), atol=STENCIL_ROUNDING, rtol=0)


def test_a_path_is_stationary_at_its_free_end_for_the_gradient_flow_alone() -> None:
    lagrangian = energy_dissipation(1.0)
    defects: dict[str, list[float]] = {}
    flows = {"gradient": gradient_flow(1.0), "one_over_n": one_over_n_flow(1.0), "softmax": softmax_flow(1.0)}
    for name, velocity in flows.items():
        for step in (0.1, 0.05):
            path = integrate(velocity, _tokens(5, 3), step, round(2 / step))
            defects.setdefault(name, []).append(
                float(end_momenta(lagrangian, path, step, _minus_energy)[1].abs().amax())
            )
    assert _order(defects.pop("gradient")) == pytest.approx(4, abs=FITTED_ORDER)
    assert all(abs(_order(each)) < FLAT_SLOPE for each in defects.values())


@pytest.mark.parametrize("terminal", [None, _minus_energy])
def test_first_variation_by_parts_counts_ends_that_move(terminal) -> None:  # type: ignore[no-untyped-def]
    gaps = []
    lagrangian = energy_dissipation(1.0)
    for steps in (32, 64):
        step = 4 / steps
        path = integrate(gradient_flow(1.0), _tokens(5, 3), step, steps)
        path = varied_path(path, smooth_variation(path, generator(0, "test bend")), 0.3)
        field = tangent_projection(path, torch.cos(path_times(steps + 1, step, path))[:, None, None] * _tokens(5, 3, 2))
        automatic = float(first_variation(lagrangian, path, step, field, terminal))
        gaps.append(abs(float(first_variation_formula(lagrangian, path, step, field, terminal)) - automatic))
        both = [
            float(action(lagrangian, varied_path(path, field, epsilon), step, terminal=terminal))
            for epsilon in (1e-5, -1e-5)
        ]
        assert (both[0] - both[1]) / 2e-5 == pytest.approx(automatic, rel=1e-6)
    assert gaps[1] < 1e-2 * abs(automatic)
    assert _order(gaps) > 3


@pytest.mark.parametrize("derivative", [1, 2])
def test_derivatives_at_both_ends_are_exact_to_degree_four(derivative: int) -> None:
    time = torch.arange(7, dtype=torch.float64)[:, None, None] / 10
    expected = {1: 4 * time**3 - 1, 2: 12 * time**2}[derivative]
    torch.testing.assert_close(
        path_derivative(time**4 - time, 0.1, derivative), expected, atol=STENCIL_ROUNDING, rtol=0
    )


def test_perturbation_theory_predicts_how_far_the_minimiser_moves() -> None:
    step, start = 0.5, _tokens(3, 3)
    normal = _tokens(3, 3, 1)

    def functional(path: Tensor, epsilon: float = 0.0) -> Tensor:
        return midpoint_action(energy_dissipation(1.0), path, step, _minus_energy) + epsilon * extra(path)

    def extra(path: Tensor) -> Tensor:
        return midpoint_action(lambda t, x, v: t * (x * normal).sum(dim=(-2, -1)), path, step)

    found = minimise(functional, start.expand(9, -1, -1).contiguous())
    predicted = response(functional, extra, found.path)
    assert float(predicted.abs().amax()) > 1e-2
    errors = []
    for epsilon in (2e-4, 1e-4):
        moved = minimise(lambda path, epsilon=epsilon: functional(path, epsilon), found.path)
        assert moved.converged
        shift = logarithm(found.path, moved.path) / epsilon
        errors.append(float((shift - predicted).norm() / predicted.norm()))
    assert errors[1] < 0.1
    assert _order(errors) == pytest.approx(1, abs=FITTED_ORDER)


@pytest.mark.parametrize("seed", range(3))
def test_between_held_ends_the_shortest_way_is_found_from_any_first_path(seed: int) -> None:
    x, y = _tokens(5, 4, seed), _tokens(5, 4, seed + 10)
    expected = _great_circles(x, y, 33)
    start = varied_path(expected, smooth_variation(expected, generator(seed, "test bend"), modes=9), 0.5)
    found = stationary_path(kinetic, start, 1 / 32, free=(False, False))
    assert found.converged
    assert float(distance(found.path, expected).amax()) < STATIONARY_DISTANCE
    torch.testing.assert_close(found.path[[0, -1]], expected[[0, -1]], atol=SPHERE_ROUNDING, rtol=0)
    torch.testing.assert_close(
        torch.linalg.vector_norm(found.path, dim=-1), torch.ones(33, 5).double(), atol=1e-12, rtol=0
    )


def test_a_free_end_comes_to_rest_beside_the_held_one_and_free_ends_meet() -> None:
    start = _great_circles(_tokens(3, 4), _tokens(3, 4, 1), 17)
    for free, anchor in (((False, True), 0), ((True, False), -1)):
        found = stationary_path(kinetic, start, 1 / 16, free=free)
        assert found.converged
        assert float(distance(found.path, start[anchor]).amax()) < STATIONARY_DISTANCE
    both = stationary_path(kinetic, start, 1 / 16, free=(True, True))
    assert both.converged
    assert float(distance(both.path, both.path[:1]).amax()) < STATIONARY_DISTANCE


def test_with_a_lagrangian_that_depends_on_time_its_known_path_is_found_at_order_two() -> None:
    x = _tokens(3, 4)
    v = _tangents(x)
    away = []
    for nodes in (17, 33):
        step = 2 / (nodes - 1)
        expected = _slowing(x, v, step, nodes)
        found = stationary_path(
            _growing, _great_circles(x, expected[-1], nodes), step, free=(False, False), tolerance=1e-9
        )
        assert found.converged
        away.append(float(distance(found.path, expected).amax()))
    assert _order(away) == pytest.approx(2, abs=FITTED_ORDER)


def test_l_bfgs_and_newton_find_the_same_path_and_value() -> None:
    start = _tokens(3, 3).expand(11, -1, -1).contiguous()
    newton = minimise(lambda path: midpoint_action(energy_dissipation(1.0), path, 0.4, _minus_energy), start)
    found = stationary_path(energy_dissipation(1.0), start, 0.4, terminal=_minus_energy)
    assert newton.converged
    assert found.converged
    assert float(distance(newton.path, found.path).amax()) < STATIONARY_DISTANCE
    assert found.value == pytest.approx(newton.value, abs=1e-14)


def test_more_nodes_do_not_take_more_iterations() -> None:
    counts = []
    for steps in (16, 256):
        start = _tokens(5, 3).expand(steps + 1, -1, -1)
        found = stationary_path(energy_dissipation(1.0), start, 8 / steps, terminal=_minus_energy)
        assert found.converged
        counts.append(found.iterations)
    assert counts[1] <= counts[0] + 5


def test_a_search_cut_short_says_so_and_returns_what_it_reached() -> None:
    start = _tokens(3, 3).expand(9, -1, -1)
    found = stationary_path(energy_dissipation(1.0), start, 0.5, terminal=_minus_energy, max_iterations=2)
    assert not found.converged
    assert found.iterations == 2
    assert found.gradient_norm > 1e-8
    assert found.path.isfinite().all()


def test_a_functional_that_is_not_finite_does_not_converge() -> None:
    start = _great_circles(_tokens(3, 4), _tokens(3, 4, 1), 9)
    broken = stationary_path(lambda t, x, v: kinetic(t, x, v) * math.nan, start, 1 / 8, free=(False, False))
    assert not broken.converged
    assert broken.iterations == 0


def test_a_tolerance_below_rounding_is_never_reported_as_reached() -> None:
    x, y = _tokens(5, 4), _tokens(5, 4, 10)
    bent = varied_path(path := _great_circles(x, y, 17), smooth_variation(path, generator(0, "test bend")), 0.3)
    found = stationary_path(kinetic, bent, 1 / 16, free=(False, False), tolerance=0.0, max_iterations=200)
    assert not found.converged
    assert found.gradient_norm < 1e-10


def test_a_path_without_interior_is_refused() -> None:
    with pytest.raises(ValueError, match="2 nodes has no interior"):
        stationary_path(kinetic, _great_circles(_tokens(1, 3), _tokens(1, 3, 1), 2), 1.0)


@pytest.mark.parametrize(("tokens", "beta"), [(2, 1.0), (3, 4.0), (5, 6.0)])
def test_orthogonal_tokens_cluster_in_the_derived_time(tokens: int, beta: float) -> None:
    derived = equiangular_time(beta, tokens, 0.0, math.cos(0.1))
    start = torch.eye(tokens, 7, dtype=torch.float64)
    found = clustering_time(softmax_flow(beta), start, 0.125, 0.1, 2 * derived, "lie_rk4")
    assert found == pytest.approx(derived, rel=CLUSTERING_TIME_RELATIVE)
    assert clustering_time(softmax_flow(beta), start, 0.125, 0.1, derived / 2) == math.inf
    assert clustering_time(softmax_flow(beta), start, 0.125, 2.0, derived) == 0.0


def test_the_clustering_time_of_orthogonal_tokens_grows_exponentially_in_beta() -> None:
    times = [equiangular_time(beta, 4, 0.0, math.cos(0.1)) for beta in (20.0, 21.0)]
    # exp(beta) / beta up to 1 / beta relative.
    assert math.log(times[1] / times[0]) == pytest.approx(1 - 1 / 20, abs=0.02)


def test_clusters_are_counted_by_chains_of_near_tokens() -> None:
    angles = torch.tensor([0.0, 0.09, 0.18, 1.0, 1.2, 3.0, 6.25], dtype=torch.float64)
    circle = torch.stack([torch.cos(angles), torch.sin(angles)], dim=-1)
    assert cluster_count(circle, 0.1) == 4
    assert cluster_count(circle, 0.3) == 3
    assert cluster_count(circle[:1], 0.1) == 1


def test_few_clusters_outlast_at_large_beta_what_uniform_weights_join() -> None:
    start = _tokens(32, 3)
    counts = {
        beta: [cluster_count(node, 0.1) for node in integrate(softmax_flow(beta), start, 0.25, 400)[[0, 80, 400]]]
        for beta in (0.0, 16.0)
    }
    assert counts[0.0][1:] == [1, 1]
    assert counts[16.0][0] > counts[16.0][1] >= counts[16.0][2] > 2
