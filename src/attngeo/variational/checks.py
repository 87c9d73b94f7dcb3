"""Numerical checks of the variational claims on random token configurations (P1.a-c); all are tests derived here.

Every check comes with controls on which it must fail. Rows with control "none" are the object under test.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd
import torch
from torch import Tensor

from attngeo.errors import UserError
from attngeo.evaluation.slopes import fit_slope
from attngeo.training.seeding import generator
from attngeo.variational.clustering import cluster_count, clustering_time, equiangular_time
from attngeo.variational.euler_lagrange import (
    end_momenta,
    first_variation_formula,
    midpoint_action,
    minimise,
    multiplier,
    relative_residual,
    response,
)
from attngeo.variational.flow import (
    ORDERS,
    Velocity,
    attention_output,
    energy,
    gradient_flow,
    integrate,
    one_over_n_flow,
    path_times,
    softmax_flow,
    tangency_defect,
    unnormalised_flow,
)
from attngeo.variational.lagrangian import (
    Lagrangian,
    action,
    energy_dissipation,
    first_variation,
    kinetic,
    path_velocity,
    running_imbalance,
    smooth_variation,
    varied_path,
)
from attngeo.variational.sphere import (
    distance,
    exponential,
    logarithm,
    project,
    random_points,
    tangent_projection,
)
from attngeo.variational.stationary import stationary_path

NO_CONTROL = "none"
COLUMNS = [
    "check", "method", "control", "quantity", "step", "value", "unit", "n", "spread", "spread_kind", "expected",
]  # fmt: skip
"""`step` is the time step h, or what else the check varies: epsilon, beta (check clustering_time) or the time
(check clusters); `expected` is the derived value of a slope."""

# So small that the next order, which the weak field of E makes large, adds under 2 % to the leading one; so large that
# quadratic changes stay far above the discretisation of the stationary path and above rounding.
_EPSILONS = (1e-4, 5e-5, 2.5e-5, 1.25e-5)
# A path bent by this angle (root mean square per token) is smooth and plainly not a solution.
_BEND = 0.3
_MINIMISER_INTERVALS = (6, 12, 24)
_STATIONARY_INTERVALS = (16, 32, 64)
# Tokens closer than this angle (radians) are one cluster.
_CLUSTER = 0.1
# Many tokens in three dimensions, since few in many dimensions start as far apart as clusters end.
_CLUSTER_TOKENS, _CLUSTER_DIMENSION, _CLUSTER_STEP = 32, 3, 0.25
_CLUSTER_TIMES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CLUSTER_BETAS = (1.0, 4.0, 9.0, 16.0)
_EQUIANGULAR_BETAS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)


@dataclass(frozen=True)
class _Setting:
    seed: int
    tokens: int
    dimension: int
    beta: float
    horizon: float
    step_sizes: tuple[float, ...]

    def intervals(self, step: float) -> int:
        return round(self.horizon / step)

    def start(self) -> Tensor:
        """Uniform random tokens, [N, D]."""
        return random_points(self.tokens, self.dimension, generator=generator(self.seed, "variational start"))

    def random_maps(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value maps with entries of variance 1 / D, each [D, D]."""
        source = generator(self.seed, "variational maps")
        maps = torch.randn(3, self.dimension, self.dimension, generator=source, dtype=torch.float64)
        query, key, value = maps / math.sqrt(self.dimension)
        return query, key, value

    def moving_heads(self) -> Velocity:
        """Unnormalised attention of two heads whose query maps turn into each other's with time."""
        query, key, value = (torch.stack([each, each.mT]) for each in self.random_maps())
        return unnormalised_flow(self.beta, lambda t: torch.cos(t) * query + torch.sin(t) * query.flip(0), key, value)

    def path(self, velocity: Velocity, step: float, method: str = "projected_rk4") -> Tensor:
        return integrate(velocity, self.start(), step, self.intervals(step), method)

    def variation(self, path: Tensor, purpose: str) -> Tensor:
        return smooth_variation(path, generator(self.seed, f"variational {purpose}"))

    def bent(self, path: Tensor) -> Tensor:
        """A smooth path that is no solution: `path` moved along a random tangent field."""
        return varied_path(path, self.variation(path, "bend"), _BEND)

    def great_circles(self, step: float) -> tuple[Tensor, Tensor]:
        """Great circles through the random tokens, [T, N, D], and their constant speeds below 1, [N]."""
        start = self.start()
        source = generator(self.seed, "variational great circle")
        tangent = tangent_projection(start, random_points(*start.shape, generator=source))
        times = path_times(self.intervals(step) + 1, step, start)
        return exponential(start, times[:, None, None] * tangent), torch.linalg.vector_norm(tangent, dim=-1)

    def energy_flows(self) -> dict[str, Velocity]:
        """Control name -> flow: the gradient flow under test, and the two flows that are not grad E."""
        return {
            NO_CONTROL: gradient_flow(self.beta),
            "one_over_n": one_over_n_flow(self.beta),
            "softmax_normalised": softmax_flow(self.beta),
        }


@dataclass(frozen=True)
class _Measurement:
    """One number of one seed; `expected_slope` asks for a fit of log value against log step over the series."""

    check: str
    method: str
    control: str
    quantity: str
    value: float | Tensor
    unit: str
    step: float = math.nan
    expected_slope: float = math.nan


_Check = Callable[[_Setting], Iterator[_Measurement]]


def _tangency(setting: _Setting) -> Iterator[_Measurement]:
    """The flow's velocity is tangent at each token; attention's raw output is not (P1.a)."""
    row = partial(_Measurement, "tangency", quantity="defect", unit="relative to the largest speed")
    x, maps, time = setting.start(), setting.random_maps(), torch.zeros(())
    softmax = softmax_flow(setting.beta, *maps)
    yield row("gradient_flow", NO_CONTROL, value=tangency_defect(x, gradient_flow(setting.beta)(time, x)))
    yield row("softmax_flow", NO_CONTROL, value=tangency_defect(x, softmax(time, x)))
    yield row("multi_head_flow", NO_CONTROL, value=tangency_defect(x, setting.moving_heads()(time + 1, x)))
    yield row("softmax_flow", "unprojected_output", value=tangency_defect(x, attention_output(x, setting.beta, *maps)))


def _norm_drift(setting: _Setting) -> Iterator[_Measurement]:
    """Integrators that return to the sphere keep unit norms; straight steps alone drift by O(h) (P1.a)."""
    velocity = softmax_flow(setting.beta, *setting.random_maps())
    for method in [*ORDERS, "unprojected_euler"]:
        control = NO_CONTROL if method in ORDERS else "unprojected_step"
        for step in setting.step_sizes:
            norms = torch.linalg.vector_norm(setting.path(velocity, step, method), dim=-1)
            slope = math.nan if method in ORDERS else 1.0
            yield _Measurement("norm_drift", method, control, "drift", (norms - 1).abs().amax(), "1", step, slope)


def _integrator_order(setting: _Setting) -> Iterator[_Measurement]:
    """Error at the horizon against the finest Runge-Kutta path with a step 8 times smaller."""
    velocity = softmax_flow(setting.beta, *setting.random_maps())
    reference = setting.path(velocity, min(setting.step_sizes) / 8)[-1]
    for method, order in ORDERS.items():
        for step in setting.step_sizes:
            error = distance(setting.path(velocity, step, method)[-1], reference).amax()
            yield _Measurement("integrator_order", method, NO_CONTROL, "error", error, "rad", step, order)


def _step_local_error(setting: _Setting) -> Iterator[_Measurement]:
    """A residual step and renormalisation against the exponential map: O(h^2) for raw output, O(h^3) for tangent."""
    x, maps = setting.start(), setting.random_maps()
    raw = attention_output(x, setting.beta, *maps)
    tangent = tangent_projection(x, raw)
    for step in (0.1, 0.05, 0.025, 0.0125):
        geodesic = exponential(x, step * tangent)
        for method, update, order in (("raw_step", raw, 2), ("tangent_step", tangent, 3)):
            error = distance(project(x + step * update), geodesic).amax()
            yield _Measurement("step_local_error", method, NO_CONTROL, "error", error, "rad", step, order)


def _energy_dissipation(setting: _Setting) -> Iterator[_Measurement]:
    """Largest |A - E(x(t)) + E(x(0))| over times t, relative to the whole gain: 0 on the gradient flow alone (P1.b).

    "energy_dissipation" takes the flow's own velocities (order of the integrator), "energy_dissipation_path" those of
    the path (quadratic in the integrator's error, hence twice the order, capped by stencil and quadrature at 4).
    """
    for control, velocity in setting.energy_flows().items():
        for method in ("projected_euler", "projected_rk4"):
            order = ORDERS[method]
            for step in setting.step_sizes:
                path = setting.path(velocity, step, method)
                gained = energy(path[-1], setting.beta) - energy(path[0], setting.beta)
                for check, velocities, expected in (
                    ("energy_dissipation", velocity(path_times(len(path), step, path), path), order),
                    ("energy_dissipation_path", None, min(2 * order, 4)),
                ):
                    imbalance = running_imbalance(path, step, setting.beta, velocities).abs().amax() / gained
                    slope = float(expected) if control == NO_CONTROL else 0.0
                    yield _Measurement(check, method, control, "relative_imbalance", imbalance, "1", step, slope)


def _energy_monotone(setting: _Setting) -> Iterator[_Measurement]:
    """Smallest energy increment along the flow relative to the whole gain: positive for an ascent (P1.b)."""
    step = max(setting.step_sizes)
    ascent = gradient_flow(setting.beta)

    def descent(t: Tensor, x: Tensor) -> Tensor:
        return -ascent(t, x)

    flows: dict[str, Velocity] = {NO_CONTROL: ascent, "reversed_flow": descent}
    for control, flow in flows.items():
        values = energy(setting.path(flow, step), setting.beta)
        smallest = values.diff().amin() / (values[-1] - values[0]).abs()
        yield _Measurement("energy_monotone", "projected_rk4", control, "smallest_increment", smallest, "1", step)


def _first_variation(setting: _Setting) -> Iterator[_Measurement]:
    """|J_eps - J| is O(eps^2) at the stationary path, O(eps) elsewhere, and the formula gives its slope (P1.c)."""
    step = min(setting.step_sizes)
    lagrangian = energy_dissipation(setting.beta)
    paths = {control: setting.path(flow, step) for control, flow in setting.energy_flows().items()}
    generic = setting.bent(paths[NO_CONTROL])
    cases = [("flow_path", control, path) for control, path in paths.items()] + [("generic_path", NO_CONTROL, generic)]
    for method, control, path in cases:
        variation = setting.variation(path, "variation")
        before = action(lagrangian, path, step)
        slope = 2.0 if path is paths[NO_CONTROL] else 1.0
        for epsilon in _EPSILONS:
            change = (action(lagrangian, varied_path(path, variation, epsilon), step) - before).abs()
            yield _Measurement("first_variation", method, control, "action_change", change, "action", epsilon, slope)

    variation = setting.variation(generic, "variation")
    before = action(lagrangian, generic, step)
    derivative = first_variation(lagrangian, generic, step, variation)
    for epsilon in _EPSILONS:
        quotient = (action(lagrangian, varied_path(generic, variation, epsilon), step) - before) / epsilon
        error = (quotient - derivative).abs() / derivative.abs()
        yield _Measurement(
            "first_variation_formula", "difference_quotient", NO_CONTROL, "error", error, "1", epsilon, 1.0
        )
    # No slope is fitted: the gap is a difference of two quadratures that changes sign with h, so its log is not smooth.
    for spacing in setting.step_sizes:
        coarse = setting.bent(setting.path(gradient_flow(setting.beta), spacing))
        field = setting.variation(coarse, "variation")
        formula = first_variation_formula(lagrangian, coarse, spacing, field)
        gap = (formula - first_variation(lagrangian, coarse, spacing, field)).abs() / derivative.abs()
        yield _Measurement("first_variation_formula", "euler_lagrange_integral", NO_CONTROL, "gap", gap, "1", spacing)


def _free_end(setting: _Setting) -> Iterator[_Measurement]:
    """Transversality: the flow's path is stationary for A - E(x(T)) under variations that move its end too (P1.b).

    The momentum at the end, xdot - grad E, vanishes at the order of integrator and stencil on the gradient flow alone.
    """
    lagrangian, flows = energy_dissipation(setting.beta), setting.energy_flows()

    def terminal(x: Tensor) -> Tensor:
        return -energy(x, setting.beta)

    for control, flow in flows.items():
        for step in setting.step_sizes:
            path = setting.path(flow, step)
            speed = path_velocity(path, step)[-1].square().sum().sqrt()
            defect = end_momenta(lagrangian, path, step, terminal)[1].square().sum().sqrt() / speed
            slope = 4.0 if control == NO_CONTROL else 0.0
            yield _Measurement(
                "transversality", "projected_rk4", control, "end_momentum", defect, "relative to the speed", step, slope
            )

    step = min(setting.step_sizes)
    path = setting.path(flows[NO_CONTROL], step)
    # The end moves along the flow: a random move may be nearly orthogonal to it, and then nothing is of first order.
    onwards = path_velocity(path, step) * torch.linspace(0, 1, len(path), dtype=path.dtype)[:, None, None]
    variation = setting.variation(path, "free end") + onwards / onwards[-1].square().sum(dim=-1).mean().sqrt()
    for control, added, slope in ((NO_CONTROL, terminal, 2.0), ("without_terminal_term", None, 1.0)):
        before = action(lagrangian, path, step, terminal=added)
        for epsilon in _EPSILONS:
            varied = action(lagrangian, varied_path(path, variation, epsilon), step, terminal=added)
            yield _Measurement(
                "free_end_variation", "flow_path", control, "action_change", (varied - before).abs(), "action", epsilon,
                slope,
            )  # fmt: skip


def _euler_lagrange(setting: _Setting) -> Iterator[_Measurement]:
    """Projected Euler-Lagrange residual: order min(integrator, stencil) on the gradient flow alone (P1.c)."""
    lagrangian = energy_dissipation(setting.beta)
    flows = setting.energy_flows()
    unit = "relative to the terms of the equation"
    for step in setting.step_sizes:
        for integrator in ("projected_euler", "projected_rk4"):
            path = setting.path(flows[NO_CONTROL], step, integrator)
            for points, stencil_order in ((3, 2), (5, 4)):
                method = f"{integrator}+{points}_points"
                row = partial(
                    _Measurement, "euler_lagrange", method, quantity="relative_residual", unit=unit, step=step
                )
                residual = partial(relative_residual, lagrangian, step=step, points=points)
                order = min(ORDERS[integrator], stencil_order)
                yield row(NO_CONTROL, value=residual(path), expected_slope=order)
                if method == "projected_rk4+5_points":
                    controls = {
                        "perturbed_path": setting.bent(path),
                        "one_over_n": setting.path(flows["one_over_n"], step),
                        "softmax_normalised": setting.path(flows["softmax_normalised"], step),
                    }
                    for control, other in controls.items():
                        yield row(control, value=residual(other), expected_slope=0.0)


def _great_circle(setting: _Setting) -> Iterator[_Measurement]:
    """|xdot|^2 / 2 is stationary on great circles, where even 3 points are exact, and not on a bent one (P1.c).

    Its multiplier there is |xdot|^2. Between their ends L-BFGS finds them again from the bent paths.
    """
    step = min(setting.step_sizes)
    unit = "relative to the terms of the equation"
    great, speed = setting.great_circles(step)
    for control, path in ((NO_CONTROL, great), ("perturbed_path", setting.bent(great))):
        value = relative_residual(kinetic, path, step, points=3)
        yield _Measurement("great_circle", "3_points", control, "relative_residual", value, unit, step)
    for spacing in setting.step_sizes:
        found = multiplier(kinetic, setting.great_circles(spacing)[0], spacing)
        gap = ((found - speed**2).abs() / speed**2).amax()
        yield _Measurement("multiplier", "5_points", NO_CONTROL, "gap", gap, "1", spacing, 4.0)

    # In a time of 3 every token moves by less than pi, where its great circle is the shortest way.
    part = great[: max(3, round(3 / step))]
    found_path = stationary_path(kinetic, setting.bent(part), step, free=(False, False))
    away = distance(found_path.path, part).amax() if found_path.converged else math.nan
    yield _Measurement("stationary_path", "great_circle", NO_CONTROL, "distance", away, "rad", step)


def _stationary_path(setting: _Setting) -> Iterator[_Measurement]:
    """L-BFGS on A - E(x(T)), from a path that never moves, and on A between held ends, gives attention's path (P1.b).

    Both at the order 2 of the midpoint rule. Where it did not converge the distance is NaN.
    """
    lagrangian = energy_dissipation(setting.beta)
    for intervals in _STATIONARY_INTERVALS:
        step = setting.horizon / intervals
        row = partial(_Measurement, "stationary_path", step=step)
        flow_path = setting.path(gradient_flow(setting.beta), step)
        resting = flow_path[:1].expand_as(flow_path)
        free = stationary_path(lagrangian, resting, step, terminal=lambda x: -energy(x, setting.beta))
        held = stationary_path(lagrangian, torch.cat([resting[:-1], flow_path[-1:]]), step, free=(False, False))
        for method, found in (("free_end", free), ("held_ends", held)):
            away = distance(found.path, flow_path).amax() if found.converged else math.nan
            yield row(method, NO_CONTROL, "distance", away, "rad", expected_slope=2.0)
            yield row(method, NO_CONTROL, "converged", float(found.converged), "share of seeds")
            yield row(method, NO_CONTROL, "iterations", float(found.iterations), "iterations")
        for control, flow in setting.energy_flows().items():
            if control != NO_CONTROL:
                away = distance(free.path, setting.path(flow, step)).amax() if free.converged else math.nan
                yield row("free_end", control, "distance", away, "rad", expected_slope=0.0)


def _clustering(setting: _Setting) -> Iterator[_Measurement]:
    """Tokens of the softmax flow cluster, in a time that grows like exp(beta) where they start far apart.

    Orthogonal tokens have a known time. Random tokens first form several clusters, which then rest for long at large
    beta (metastability); with uniform weights, beta = 0, they form one at once.
    """
    source = generator(setting.seed, "variational clusters")
    frame = torch.linalg.qr(torch.randn(4, 4, generator=source, dtype=torch.float64)).Q
    for beta in _EQUIANGULAR_BETAS:
        derived = equiangular_time(beta, 4, 0.0, math.cos(_CLUSTER))
        time = clustering_time(softmax_flow(beta), frame, _CLUSTER_STEP, _CLUSTER, 2 * derived)
        row = partial(_Measurement, "clustering_time", control=NO_CONTROL, step=beta)
        yield row("softmax_flow", quantity="time", value=time, unit="time of the flow")
        yield row("quadrature", quantity="time", value=derived, unit="time of the flow")
        yield row("softmax_flow", quantity="relative_error", value=abs(time / derived - 1), unit="1")

    start = random_points(_CLUSTER_TOKENS, _CLUSTER_DIMENSION, generator=source)
    for beta in (0.0, *_CLUSTER_BETAS):
        path = integrate(softmax_flow(beta), start, _CLUSTER_STEP, round(max(_CLUSTER_TIMES) / _CLUSTER_STEP))
        control = NO_CONTROL if beta else "uniform_weights"
        for time in _CLUSTER_TIMES:
            count = cluster_count(path[round(time / _CLUSTER_STEP)], _CLUSTER)
            yield _Measurement("clusters", f"beta_{beta:g}", control, "clusters", float(count), "clusters", time)


def _perturbation(setting: _Setting) -> Lagrangian:
    """Smooth term g(x, xdot) that epsilon adds to L: sum_i sin<w_i, x_i> + <xdot_i, S xdot_i> / 2, S symmetric."""
    source = generator(setting.seed, "variational functional")
    directions = torch.randn(setting.tokens, setting.dimension, generator=source, dtype=torch.float64)
    root = torch.randn(setting.dimension, setting.dimension, generator=source, dtype=torch.float64)
    weight = (root + root.mT) / (2 * math.sqrt(setting.dimension))
    return lambda t, x, v: torch.sin((directions * x).sum(dim=-1)).sum(dim=-1) + (v @ weight * v).sum(dim=(-2, -1)) / 2


def _minimiser(setting: _Setting) -> Iterator[_Measurement]:
    """Minimising A - E(x(T)) numerically, from a path that never moves, gives attention's own path (P1.b).

    Adding epsilon g to L then moves minimiser and minimum by O(epsilon), and J_0 there by O(epsilon^2) (P1.c). With the
    action G of g and the Hessian H of J_0, perturbation theory predicts the shift -epsilon H^-1 grad G, the change
    epsilon G and the excess epsilon^2 <grad G, H^-1 grad G> / 2, up to O(epsilon) relative.
    Where Newton's method did not converge the value is NaN.
    """
    lagrangian, extra = energy_dissipation(setting.beta), _perturbation(setting)

    def functional(path: Tensor, step: float, epsilon: float) -> Tensor:
        def perturbed(t: Tensor, x: Tensor, v: Tensor) -> Tensor:
            return lagrangian(t, x, v) + epsilon * extra(t, x, v)

        return midpoint_action(perturbed, path, step, lambda x: -energy(x, setting.beta))

    row = partial(_Measurement, method="newton", control=NO_CONTROL)
    for intervals in _MINIMISER_INTERVALS:
        step = setting.horizon / intervals
        resting = setting.start().expand(intervals + 1, -1, -1).contiguous()
        found = minimise(partial(functional, step=step, epsilon=0.0), resting)
        for control, flow in setting.energy_flows().items():
            away = distance(found.path, setting.path(flow, step)).amax() if found.converged else math.nan
            slope = 2.0 if control == NO_CONTROL else 0.0
            yield _Measurement("minimiser", "newton", control, "distance_to_flow", away, "rad", step, slope)
        yield row("minimiser", quantity="gradient_norm", value=found.gradient_norm, unit="action", step=step)

        if intervals != _MINIMISER_INTERVALS[0]:
            continue
        minimum = functional(found.path, step, 0.0)
        perturbation = partial(midpoint_action, extra, step=step)
        derivative = response(partial(functional, step=step, epsilon=0.0), perturbation, found.path)
        slope_of_minimum = perturbation(found.path)
        curvature = -(torch.func.grad(perturbation)(found.path) * derivative).sum()
        for epsilon in _EPSILONS:
            moved = minimise(partial(functional, step=step, epsilon=epsilon), found.path)
            fine = found.converged and moved.converged
            change = functional(moved.path, step, epsilon) - minimum
            excess = functional(moved.path, step, 0.0) - minimum
            off = torch.linalg.vector_norm(logarithm(found.path, moved.path) / epsilon - derivative)
            for check, quantity, value, unit, slope in (
                ("minimiser_shift", "shift", distance(moved.path, found.path).square().mean().sqrt(), "rad", 1.0),
                ("minimum_change", "change", change.abs(), "action", 1.0),
                ("minimiser_excess", "excess", excess, "action", 2.0),
                ("minimiser_shift_predicted", "error", off / torch.linalg.vector_norm(derivative), "1", 1.0),
                ("minimum_change_predicted", "error", (change / (epsilon * slope_of_minimum) - 1).abs(), "1", 1.0),
                ("minimiser_excess_predicted", "error", (excess / (epsilon**2 * curvature / 2) - 1).abs(), "1", 1.0),
            ):
                yield row(
                    check,
                    quantity=quantity,
                    value=value if fine else math.nan,
                    unit=unit,
                    step=epsilon,
                    expected_slope=slope,
                )


_CHECKS: tuple[_Check, ...] = (
    _tangency,
    _norm_drift,
    _integrator_order,
    _step_local_error,
    _energy_dissipation,
    _energy_monotone,
    _first_variation,
    _free_end,
    _euler_lagrange,
    _great_circle,
    _minimiser,
    _stationary_path,
    _clustering,
)


def _validate(
    seeds: Sequence[int], tokens: int, dimension: int, beta: float, horizon: float, step_sizes: Sequence[float]
) -> None:
    if not seeds or len(set(seeds)) != len(seeds):
        raise UserError(f"seeds {list(seeds)} are empty or repeat", "give one or more different seeds")
    if tokens < 2 or dimension < 2:
        raise UserError(f"tokens {tokens}, dimension {dimension}: attention needs more", "give at least 2 of each")
    if not (0 < beta < math.inf and 0 < horizon < math.inf):
        raise UserError(f"beta {beta} and horizon {horizon} must be positive", "give positive numbers")
    if len(set(step_sizes)) < 3:
        raise UserError(f"step_sizes {list(step_sizes)}: a slope needs more", "give three different steps or more")
    for step in step_sizes:
        if not (step > 0 and horizon / step >= 8 and math.isclose(round(horizon / step) * step, horizon, rel_tol=1e-9)):
            raise UserError(
                f"step size {step} does not cut the horizon {horizon} into 8 or more equal intervals",
                "give steps that divide the horizon",
            )


def analyze_sphere(
    *,
    seeds: Sequence[int] = (0, 1, 2),
    tokens: int = 8,
    dimension: int = 4,
    beta: float = 1.0,
    horizon: float = 8.0,
    step_sizes: Sequence[float] = (0.5, 0.25, 0.125, 0.0625),
) -> pd.DataFrame:
    """Check P1.a-c on attention flows of random tokens in float64 and return one row a number (`COLUMNS`).

    A value is the mean over seeds, its spread their standard deviation. Each series over steps also has a row with
    quantity "slope": the fitted log-log slope, its standard error as the spread, n the number of points, and in
    `expected` the order that the derivation gives (0 for controls, which must not fall). `horizon` and `step_sizes`
    are in units of the flow's time; orders show only where the steps resolve it, and its fastest rate grows as
    exp(beta). UserError if the steps do not divide the horizon.
    """
    _validate(seeds, tokens, dimension, beta, horizon, step_sizes)
    ordered = tuple(sorted(set(step_sizes), reverse=True))
    measured = pd.DataFrame(
        [
            {**vars(measurement), "value": float(measurement.value), "seed": seed}
            for seed in seeds
            for check in _CHECKS
            for measurement in check(_Setting(seed, tokens, dimension, beta, horizon, ordered))
        ]
    )
    rows = []
    for key, series in measured.groupby(["check", "method", "control", "quantity"], sort=False):
        labels = dict(zip(("check", "method", "control", "quantity"), key, strict=True))
        unit = series["unit"].iloc[0]
        for step, values in series.groupby("step", sort=False, dropna=False)["value"]:
            many = len(values) > 1
            rows.append(
                labels
                | {"step": step, "value": values.mean(skipna=False), "unit": unit, "n": len(values)}
                | {"spread": values.std(skipna=False) if many else math.nan}
                | {"spread_kind": "std over seeds" if many else "none", "expected": math.nan}
            )
        expected = series["expected_slope"].iloc[0]
        if not math.isnan(expected):
            slope, error = fit_slope(series["step"].tolist(), series["value"].tolist(), series["seed"].tolist())
            rows.append(
                labels
                | {"quantity": "slope", "step": math.nan, "value": slope, "unit": "1", "n": len(series)}
                | {"spread": error, "spread_kind": "standard error", "expected": expected}
            )
    return pd.DataFrame(rows, columns=COLUMNS)
