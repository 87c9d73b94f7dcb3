"""Laws of attention flows, action functionals and their Euler-Lagrange equation."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attngeo.evaluation.apart import apart
from attngeo.evaluation.timing import peak_memory_mib, return_pages
from attngeo.training.seeding import generator
from attngeo.variational import flow
from attngeo.variational.euler_lagrange import (
    euler_lagrange_residual,
    first_variation_formula,
    midpoint_action,
    minimise,
    relative_residual,
)
from attngeo.variational.flow import (
    ORDERS,
    Velocity,
    attention_output,
    energy,
    energy_gradient,
    gradient_flow,
    integrate,
    one_over_n_flow,
    softmax_flow,
    tangency_defect,
    unnormalised_flow,
)
from attngeo.variational.lagrangian import (
    action,
    central_difference,
    deviation,
    energy_dissipation,
    energy_imbalance,
    first_variation,
    kinetic,
    path_velocity,
    quadrature_weights,
    running_imbalance,
    smooth_variation,
    varied_path,
)
from attngeo.variational.sphere import distance, exponential, random_points, tangent_projection
from attngeo.variational.stationary import stationary_path
from tests.tolerances import (
    DIFFERENCE_QUOTIENT,
    ENERGY_GRADIENT_ROUNDING,
    FITTED_ORDER,
    FLOW_PEAK_PAIRS,
    SPHERE_ROUNDING,
    STENCIL_ROUNDING,
    TANGENCY,
)

NOW = torch.zeros((), dtype=torch.float64)


def _tokens(tokens: int, dimension: int, seed: int = 0) -> Tensor:
    return random_points(tokens, dimension, generator=generator(seed, "test tokens"))


@pytest.mark.parametrize(("tokens", "dimension"), [(1, 2), (2, 3), (7, 5)])
@pytest.mark.parametrize("beta", [0.3, 1.0, 4.0])
def test_the_flow_scaled_by_one_over_n_squared_is_the_gradient_of_the_energy(
    tokens: int, dimension: int, beta: float
) -> None:
    x = _tokens(tokens, dimension).requires_grad_()
    (ambient,) = torch.autograd.grad(energy(x, beta), x)
    expected = tangent_projection(x, ambient)
    torch.testing.assert_close(energy_gradient(x, beta), expected, atol=ENERGY_GRADIENT_ROUNDING, rtol=1e-12)
    torch.testing.assert_close(one_over_n_flow(beta)(NOW, x), tokens * expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("normalised", [True, False])
def test_multi_head_attention_is_the_sum_of_its_heads_and_of_its_definition(normalised: bool) -> None:
    x, beta = _tokens(5, 4), 1.7
    query, key = torch.randn(2, 3, 2, 4, generator=generator(0, "test maps"), dtype=torch.float64)
    value = torch.randn(3, 4, 4, generator=generator(1, "test maps"), dtype=torch.float64)
    expected = torch.zeros_like(x)
    for head in range(3):
        for i in range(5):
            weights = [math.exp(beta * float((query[head] @ x[i]) @ (key[head] @ x[j]))) for j in range(5)]
            total = sum(weights) if normalised else 25
            expected[i] += sum(weights[j] / total * (value[head] @ x[j]) for j in range(5))
    found = attention_output(x, beta, query, key, value, normalised=normalised)
    torch.testing.assert_close(found, expected, atol=SPHERE_ROUNDING, rtol=SPHERE_ROUNDING)
    single = [attention_output(x, beta, query[h], key[h], value[h], normalised=normalised) for h in range(3)]
    torch.testing.assert_close(torch.stack(single).sum(dim=0), expected, atol=SPHERE_ROUNDING, rtol=SPHERE_ROUNDING)


@pytest.mark.parametrize("normalised", [True, False])
def test_attention_has_exact_derivatives_by_every_way_of_differentiating(normalised: bool) -> None:
    x, direction = _tokens(4, 3), _tokens(4, 3, 1)
    maps = torch.randn(3, 2, 3, 3, generator=generator(0, "test maps"), dtype=torch.float64)

    def output(y: Tensor, query: Tensor) -> Tensor:
        return attention_output(y, 1.3, query, maps[1], maps[2], normalised=normalised)

    variables = (x.clone().requires_grad_(), maps[0].clone().requires_grad_())
    assert torch.autograd.gradcheck(output, variables, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(output, variables)
    small = 1e-6
    expected = (output(x + small * direction, maps[0]) - output(x - small * direction, maps[0])) / (2 * small)
    found = torch.func.jvp(lambda y: output(y, maps[0]), (x,), (direction,))[1]
    torch.testing.assert_close(found, expected, atol=DIFFERENCE_QUOTIENT, rtol=0)
    batch = torch.stack([x, direction])
    mapped = torch.func.vmap(lambda y: output(y, maps[0]))(batch)
    torch.testing.assert_close(mapped, output(batch, maps[0]), atol=SPHERE_ROUNDING, rtol=0)


def test_softmax_attention_survives_scores_whose_exponential_overflows() -> None:
    x = _tokens(5, 3)
    sharp = softmax_flow(1e5)(NOW, x)
    # Every token attends to itself alone, and stays where it is.
    torch.testing.assert_close(sharp, torch.zeros_like(x), atol=SPHERE_ROUNDING, rtol=0)


def test_unnormalised_heads_with_symmetric_maps_are_the_gradient_of_their_energy() -> None:
    x, beta = _tokens(5, 3).requires_grad_(), 1.3
    root = torch.randn(2, 3, 3, generator=generator(0, "test maps"), dtype=torch.float64)
    maps = root + root.mT
    total = torch.exp(beta * x @ maps @ x.mT).sum() / (2 * beta * 25)
    (ambient,) = torch.autograd.grad(total, x)
    found = unnormalised_flow(beta, maps, None, maps)(NOW, x)
    torch.testing.assert_close(found, tangent_projection(x, ambient), atol=SPHERE_ROUNDING, rtol=SPHERE_ROUNDING)
    torch.testing.assert_close(unnormalised_flow(beta)(NOW, x), energy_gradient(x, beta), atol=1e-14, rtol=1e-12)


@pytest.mark.parametrize("flow", [softmax_flow, unnormalised_flow])
def test_maps_that_depend_on_time_are_taken_at_the_time_of_every_node(flow: Callable[..., Velocity]) -> None:
    fixed = torch.randn(2, 3, 3, generator=generator(0, "test maps"), dtype=torch.float64)
    velocity = flow(1.5, lambda t: torch.cos(t) * fixed, None, lambda t: t * fixed[0])
    path = torch.stack([_tokens(5, 3, seed) for seed in range(4)])
    times = torch.linspace(0, 1, 4, dtype=torch.float64)
    each = [flow(1.5, torch.cos(t) * fixed, None, t * fixed[0])(NOW, x) for t, x in zip(times, path, strict=True)]
    torch.testing.assert_close(velocity(times, path), torch.stack(each), atol=SPHERE_ROUNDING, rtol=0)
    torch.testing.assert_close(velocity(times[2], path[2]), each[2], atol=SPHERE_ROUNDING, rtol=0)


@pytest.mark.parametrize("method", ORDERS)
def test_values_scaled_by_a_function_of_time_run_the_same_path_at_another_pace(method: str) -> None:
    start, identity = _tokens(5, 3), torch.eye(3, dtype=torch.float64)
    paced = softmax_flow(1.0, value=lambda t: (1 + torch.sin(3 * t)) * identity)
    # The time of the flow with constant values that has passed at 2.
    expected = integrate(softmax_flow(1.0), start, (2 + (1 - math.cos(6)) / 3) / 400, 400)[-1]
    errors = [float(distance(integrate(paced, start, 2 / n, n, method)[-1], expected).amax()) for n in (40, 80)]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(ORDERS[method], abs=FITTED_ORDER)


def test_the_lie_group_scheme_leaves_the_sphere_in_no_stage_and_follows_great_circles_exactly() -> None:
    norms = []

    def velocity(t: Tensor, x: Tensor) -> Tensor:
        norms.append(torch.linalg.vector_norm(x, dim=-1))
        return x @ torch.tensor([[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)

    start = torch.tensor([[0.6, 0.8, 0.0]], dtype=torch.float64)
    path = integrate(velocity, start, 1.0, 5, "lie_rk4")
    torch.testing.assert_close(torch.stack(norms), torch.ones(20, 1, dtype=torch.float64), atol=SPHERE_ROUNDING, rtol=0)
    time = torch.arange(6, dtype=torch.float64)[:, None, None]
    torch.testing.assert_close(path, exponential(start, time * velocity(NOW, start)), atol=SPHERE_ROUNDING, rtol=0)


@pytest.mark.parametrize("method", ORDERS)
@pytest.mark.parametrize("sign", [1, -1])
def test_rounding_of_the_norms_does_not_grow_over_many_steps(method: str, sign: int) -> None:
    velocity = softmax_flow(6.0, value=sign * torch.eye(7, dtype=torch.float64))
    path = integrate(velocity, torch.eye(5, 7, dtype=torch.float64), 0.125, 400, method)
    norms = torch.linalg.vector_norm(path, dim=-1)
    torch.testing.assert_close(norms, torch.ones_like(norms), atol=SPHERE_ROUNDING, rtol=0)


@pytest.mark.parametrize("tokens", [8, 2048])
def test_one_step_keeps_every_token_on_the_sphere_from_8_to_2048_tokens(tokens: int) -> None:
    start = _tokens(tokens, 16).float()
    for method in ORDERS:
        end = integrate(softmax_flow(4.0), start, 0.5, 1, method)[-1]
        norms = torch.linalg.vector_norm(end, dim=-1)
        torch.testing.assert_close(norms, torch.ones(tokens), atol=1e-6, rtol=0)


def peak_of_a_step(tokens: int, dimension: int) -> float:
    """MiB that one step of softmax attention takes."""
    torch.set_num_threads(1)
    return_pages()
    start = _tokens(tokens, dimension)
    return peak_memory_mib(lambda: integrate(softmax_flow(1.0), start, 0.1, 1, "lie_rk4"), start.device)


def test_a_step_of_2048_tokens_takes_a_few_weights_of_all_pairs_and_no_channels_of_them() -> None:
    peak = apart(peak_of_a_step, 2048, 64)
    if math.isnan(peak):
        pytest.skip("this system does not tell a peak")
    assert peak < FLOW_PEAK_PAIRS * 2048**2 * 8 / 2**20


def test_functions_along_a_path_are_the_same_by_blocks_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    path = integrate(softmax_flow(1.0), _tokens(5, 3), 0.1, 12)
    lagrangian = energy_dissipation(1.0)
    functions = (
        lambda: action(lagrangian, path, 0.1),
        lambda: euler_lagrange_residual(lagrangian, path, 0.1),
        lambda: running_imbalance(path, 0.1, 1.0),
    )
    whole = [function() for function in functions]
    monkeypatch.setattr(flow, "_PAIRS_AT_ONCE", 60)  # two nodes
    for function, expected in zip(functions, whole, strict=True):
        torch.testing.assert_close(function(), expected, atol=SPHERE_ROUNDING, rtol=0)


@pytest.mark.parametrize("velocity", [gradient_flow(2.0), one_over_n_flow(2.0), softmax_flow(2.0)])
def test_energy_never_decreases_along_any_flow_that_moves_each_token_along_its_gradient(velocity: Velocity) -> None:
    values = energy(integrate(velocity, _tokens(7, 3), 0.1, 100), 2.0)
    assert (values.diff() > -ENERGY_GRADIENT_ROUNDING).all()
    assert float(values[-1] - values[0]) > 0.1


def test_energy_never_decreases_along_the_gradient_flow_and_tokens_cluster() -> None:
    path = integrate(gradient_flow(1.0), _tokens(5, 3), 0.5, 200)
    assert (energy(path, 1.0).diff() > -ENERGY_GRADIENT_ROUNDING).all()
    assert float(distance(path[-1][:1], path[-1][1:]).amax()) < 1e-2


def test_softmax_flow_is_tangent_for_random_maps_and_a_single_token() -> None:
    maps = torch.randn(3, 5, 5, generator=generator(0, "test maps"), dtype=torch.float64)
    for tokens in (1, 7):
        x = _tokens(tokens, 5)
        assert float(tangency_defect(x, softmax_flow(2.0, *maps)(NOW, x))) <= TANGENCY


def test_flows_are_equivariant_under_rotation_and_permutation() -> None:
    x = _tokens(7, 5)
    rotation = torch.linalg.qr(torch.randn(5, 5, generator=generator(0, "test rotation"), dtype=torch.float64)).Q
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    for velocity in (gradient_flow(1.5), softmax_flow(1.5)):
        torch.testing.assert_close(
            velocity(NOW, x @ rotation), velocity(NOW, x) @ rotation, atol=SPHERE_ROUNDING, rtol=0
        )
        torch.testing.assert_close(velocity(NOW, x[order]), velocity(NOW, x)[order], atol=SPHERE_ROUNDING, rtol=0)


def test_a_single_token_rests_under_gradient_flow() -> None:
    path = integrate(gradient_flow(1.0), _tokens(1, 3), 0.5, 4)
    torch.testing.assert_close(path, path[:1].expand_as(path), atol=SPHERE_ROUNDING, rtol=0)


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (torch.zeros(0, 3, dtype=torch.float64), r"points \[N, D\].*not \[0, 3\] of float64"),
        (torch.ones(3, dtype=torch.float64), r"not \[3\]"),
        (torch.ones(2, 1, dtype=torch.float64), "D at least 2"),
        (torch.eye(3, dtype=torch.int64), "not .* of int64"),
        (3 * torch.eye(3, dtype=torch.float64), "off by 2: apply sphere.project"),
        (torch.full((2, 3), math.nan, dtype=torch.float64), "off by nan"),
    ],
)
def test_what_is_no_configuration_on_the_sphere_is_refused_by_flow_and_solver(start: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        integrate(softmax_flow(1.0), start, 0.1, 3)
    with pytest.raises(ValueError, match=words.replace("N, D", "T, N, D").replace("not \\[", "not \\[5, ")):
        stationary_path(kinetic, start.expand(5, *start.shape), 0.1)


def test_steps_and_maps_that_fit_nothing_are_refused_with_what_does() -> None:
    start = _tokens(2, 3)
    for step, steps in ((0.1, -1), (math.nan, 2), (math.inf, 2)):
        with pytest.raises(ValueError, match=f"{steps} steps of {step}"):
            integrate(softmax_flow(1.0), start, step, steps)
    for step in (0.0, -0.5, math.nan):
        with pytest.raises(ValueError, match=f"a step of {step}"):
            stationary_path(kinetic, start.expand(5, -1, -1), step)
    for wrong in (torch.eye(2).double(), torch.eye(3), torch.zeros(1, 1, 3, 3).double()):
        with pytest.raises(ValueError, match=r"\[E, 3\] or \[H, E, 3\] of torch.float64.*not"):
            softmax_flow(1.0, wrong)(NOW, start)
        with pytest.raises(ValueError, match=r"\[E, 3\]"):
            softmax_flow(1.0, value=lambda t, wrong=wrong: wrong)(NOW, start)


@pytest.mark.parametrize("tokens", [1, 2, 2048])
def test_flow_and_solver_take_any_number_of_tokens(tokens: int) -> None:
    start = _tokens(tokens, 7)
    for method in ORDERS:
        norms = torch.linalg.vector_norm(integrate(softmax_flow(1.0), start, 0.1, 2, method), dim=-1)
        torch.testing.assert_close(norms, torch.ones_like(norms), atol=SPHERE_ROUNDING, rtol=0)
    found = stationary_path(
        energy_dissipation(1.0),
        start.expand(4, -1, -1),
        tokens / 8,
        terminal=lambda x: -energy(x, 1.0),
        max_iterations=5,
        tolerance=1e-3,
    )
    assert found.path.isfinite().all()
    assert found.gradient_norm <= 1e-3


def test_unknown_integrator_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"heun.*projected_rk4"):
        integrate(gradient_flow(1.0), _tokens(2, 3), 0.1, 1, "heun")


@pytest.mark.parametrize("method", ORDERS)
def test_integrators_have_their_order_on_a_rotation_whose_flow_is_known(method: str) -> None:
    turn = torch.tensor([[0.0, -1.0, 0.0], [1.0, 0.0, 0.5], [0.0, -0.5, 0.0]], dtype=torch.float64)
    x = _tokens(3, 3)
    exact = x @ torch.linalg.matrix_exp(turn).mT
    errors = [
        float(distance(integrate(lambda t, y: y @ turn.mT, x, 1 / n, n, method)[-1], exact).amax()) for n in (16, 32)
    ]
    # A rotation is so symmetric that the projected steps may do better than their order, never worse.
    assert math.log2(errors[0] / errors[1]) > ORDERS[method] - FITTED_ORDER


@pytest.mark.parametrize("points", [3, 5])
def test_stencils_are_exact_on_polynomials_of_their_degree(points: int) -> None:
    time = torch.arange(9, dtype=torch.float64)[:, None, None] / 10
    degree = points - 1
    path = time**degree
    inner = time[points // 2 : 9 - points // 2]
    first, second = degree * inner ** (degree - 1), degree * (degree - 1) * inner ** (degree - 2)
    for derivative, expected in ((1, first), (2, second)):
        found = central_difference(path, 0.1, derivative, points)
        torch.testing.assert_close(found, expected, atol=STENCIL_ROUNDING, rtol=0)


def test_path_velocity_is_exact_to_degree_four_up_to_both_ends() -> None:
    time = torch.arange(7, dtype=torch.float64)[:, None, None] / 10
    found = path_velocity(time**4 - time, 0.1)
    torch.testing.assert_close(found, 4 * time**3 - 1, atol=STENCIL_ROUNDING, rtol=0)


def test_paths_too_short_for_a_stencil_are_refused() -> None:
    with pytest.raises(ValueError, match="4 nodes is too short for a stencil of 5"):
        central_difference(torch.zeros(4, 1, 2, dtype=torch.float64), 0.1, 1, 5)


@pytest.mark.parametrize("intervals", [2, 3, 7, 10])
def test_quadrature_is_exact_on_cubics_for_even_and_odd_counts(intervals: int) -> None:
    time = torch.linspace(0, 2, intervals + 1, dtype=torch.float64)
    assert float(quadrature_weights(intervals, 2 / intervals) @ time**3) == pytest.approx(4.0, rel=1e-14)


def test_energy_dissipation_action_completes_the_square_on_any_path() -> None:
    start = _tokens(5, 3)
    path = integrate(softmax_flow(1.0), start, 0.05, 80)
    square = action(deviation(gradient_flow(1.0)), path, 0.05)
    imbalance = energy_imbalance(path, 0.05, 1.0)
    assert float(imbalance) > 0.1
    assert float(imbalance) == pytest.approx(float(square), rel=1e-6)


@pytest.mark.parametrize("steps", [10, 13])
def test_the_running_imbalance_is_that_of_the_path_up_to_each_second_node_and_the_last(steps: int) -> None:
    path = integrate(softmax_flow(1.0), _tokens(5, 3), 0.1, steps)
    velocities = path_velocity(path, 0.1)
    ends = [*range(2, steps + 1, 2), steps]
    expected = torch.stack([energy_imbalance(path[: end + 1], 0.1, 1.0, velocities[: end + 1]) for end in ends])
    torch.testing.assert_close(running_imbalance(path, 0.1, 1.0, velocities), expected, atol=SPHERE_ROUNDING, rtol=0)
    torch.testing.assert_close(running_imbalance(path, 0.1, 1.0), expected, atol=SPHERE_ROUNDING, rtol=0)


def test_every_flow_has_zero_action_for_its_own_deviation() -> None:
    velocity = softmax_flow(1.0)
    assert float(action(deviation(velocity), integrate(velocity, _tokens(5, 3), 0.05, 40), 0.05)) < 1e-10


def test_great_circles_satisfy_the_kinetic_equation_and_small_circles_do_not() -> None:
    time = torch.arange(33, dtype=torch.float64)[:, None, None] / 16
    x = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    v = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
    height = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    great = exponential(x, time * v)
    assert float(euler_lagrange_residual(kinetic, great, 1 / 16, points=3).abs().amax()) < STENCIL_ROUNDING
    small = 0.8 * great + 0.6 * height
    # Geodesic curvature tan(latitude) times the squared speed: 0.75 * 0.64.
    residual = euler_lagrange_residual(kinetic, small, 1 / 16, points=5)
    assert float(torch.linalg.vector_norm(residual, dim=-1).mean()) == pytest.approx(0.48, rel=1e-5)


def test_residual_is_tangent_and_independent_of_the_extension_off_the_sphere() -> None:
    path = varied_path(
        base := integrate(gradient_flow(1.0), _tokens(5, 3), 0.1, 20),
        smooth_variation(base, generator(0, "test bend")),
        0.3,
    )
    lagrangian = energy_dissipation(1.0)

    def extended(t: Tensor, x: Tensor, v: Tensor) -> Tensor:
        radius = x.square().sum(dim=-1) - 1
        return lagrangian(t, x, v) + (radius * (2 + x[..., 0])).sum(dim=-1)

    plain, other = (euler_lagrange_residual(each, path, 0.1) for each in (lagrangian, extended))
    torch.testing.assert_close(plain, other, atol=STENCIL_ROUNDING, rtol=0)
    assert float((plain * path[2:-2]).sum(dim=-1).abs().amax()) < STENCIL_ROUNDING


def test_first_variation_by_formula_meets_automatic_and_finite_differences() -> None:
    step = 1 / 32
    path = integrate(gradient_flow(1.0), _tokens(5, 3), step, 128)
    path = varied_path(path, smooth_variation(path, generator(0, "test bend")), 0.3)
    variation = smooth_variation(path, generator(0, "test variation"))
    lagrangian = energy_dissipation(1.0)
    automatic = float(first_variation(lagrangian, path, step, variation))
    both = [float(action(lagrangian, varied_path(path, variation, epsilon), step)) for epsilon in (1e-5, -1e-5)]
    assert (both[0] - both[1]) / 2e-5 == pytest.approx(automatic, rel=1e-6)
    assert float(first_variation_formula(lagrangian, path, step, variation)) == pytest.approx(automatic, rel=1e-4)


def test_smooth_variation_is_tangent_vanishes_at_both_ends_and_does_not_depend_on_the_step() -> None:
    fine = integrate(gradient_flow(1.0), _tokens(5, 3), 0.05, 40)
    field = smooth_variation(fine, generator(0, "test variation"))
    assert float((field * fine).sum(dim=-1).abs().amax()) < SPHERE_ROUNDING
    assert float(field[[0, -1]].abs().amax()) < SPHERE_ROUNDING
    coarse = smooth_variation(fine[::2], generator(0, "test variation"))
    ratio = coarse[1:-1] / field[2:-2:2]
    torch.testing.assert_close(ratio, ratio[:1, :1, :1].expand_as(ratio), atol=0, rtol=1e-9)


def test_minimising_the_action_from_rest_finds_the_attention_flow_at_the_order_of_the_midpoint_rule() -> None:
    beta, horizon = 1.0, 4.0
    start = _tokens(3, 3)
    away, above = [], []
    for steps in (10, 20):
        step = horizon / steps
        found = minimise(
            lambda path, step=step: midpoint_action(energy_dissipation(beta), path, step, lambda x: -energy(x, beta)),
            start.expand(steps + 1, -1, -1).contiguous(),
        )
        assert found.converged
        away.append(float(distance(found.path, integrate(gradient_flow(beta), start, step, steps)).amax()))
        above.append(abs(found.value + float(energy(start, beta))))
    assert math.log2(away[0] / away[1]) == pytest.approx(2, abs=FITTED_ORDER)
    assert math.log2(above[0] / above[1]) == pytest.approx(2, abs=FITTED_ORDER)


def test_a_minimisation_cut_short_says_so() -> None:
    start = _tokens(3, 3).expand(5, -1, -1).contiguous()
    found = minimise(
        lambda path: midpoint_action(energy_dissipation(1.0), path, 1.0, lambda x: -energy(x, 1.0)),
        start,
        max_iterations=1,
    )
    assert not found.converged
    assert found.iterations == 1
    assert found.gradient_norm > 1e-10


def test_relative_residual_lies_between_zero_and_one() -> None:
    path = integrate(softmax_flow(1.0), _tokens(5, 3), 0.1, 20)
    assert 0 < float(relative_residual(energy_dissipation(1.0), path, 0.1)) <= 1
