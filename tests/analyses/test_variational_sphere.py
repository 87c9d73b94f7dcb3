"""Laws of the sphere's geometry, with geoopt as the independent oracle, and 60 digits where it loses its own."""

import math
import sys

import mpmath
import pytest
import torch
from torch import Tensor

from attngeo.training.seeding import generator
from attngeo.variational.sphere import (
    distance,
    dot,
    exponential,
    logarithm,
    parallel_transport,
    project,
    pull_back,
    random_points,
    tangent_basis,
    tangent_projection,
)
from tests.tolerances import SPHERE_NEAR_ANTIPODES, SPHERE_ROUNDING

SHAPES = [(1, 2), (7, 3), (2, 5, 13), (0, 4)]


def _point_and_tangent(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = random_points(*shape, generator=generator(seed, "test point"))
    v = tangent_projection(x, torch.randn(*shape, generator=generator(seed, "test tangent"), dtype=torch.float64))
    return x, v


def _at_angle(x: Tensor, v: Tensor, angle: float) -> tuple[Tensor, Tensor]:
    """The point at `angle` from x along v, and the tangent vector that reaches it."""
    unit = project(v)
    return math.cos(angle) * x + math.sin(angle) * unit, angle * unit


@pytest.fixture(scope="module")
def geoopt_sphere():  # type: ignore[no-untyped-def]
    geoopt = pytest.importorskip("geoopt")
    return geoopt.manifolds.SphereExact()


@pytest.mark.parametrize("shape", SHAPES)
def test_projection_is_idempotent_and_tangent_projection_is_orthogonal(shape: tuple[int, ...]) -> None:
    x, v = _point_and_tangent(*shape)
    torch.testing.assert_close(project(3 * x), x, atol=SPHERE_ROUNDING, rtol=0)
    torch.testing.assert_close(dot(x, v), torch.zeros_like(v[..., :1]), atol=SPHERE_ROUNDING, rtol=0)
    torch.testing.assert_close(tangent_projection(x, v), v, atol=SPHERE_ROUNDING, rtol=0)


def test_zero_vector_projects_to_nan_and_not_to_a_point() -> None:
    assert project(torch.zeros(3, dtype=torch.float64)).isnan().all()


@pytest.mark.parametrize("shape", SHAPES)
def test_exponential_stays_on_the_sphere_and_agrees_with_geoopt(shape: tuple[int, ...], geoopt_sphere) -> None:  # type: ignore[no-untyped-def]
    x, v = _point_and_tangent(*shape)
    y = exponential(x, v)
    torch.testing.assert_close(torch.linalg.vector_norm(y, dim=-1), torch.ones(shape[:-1], dtype=torch.float64))
    torch.testing.assert_close(y, geoopt_sphere.expmap(x, v), atol=SPHERE_ROUNDING, rtol=0)


def test_logarithm_distance_and_transport_agree_with_geoopt_away_from_the_ends(geoopt_sphere) -> None:  # type: ignore[no-untyped-def]
    x, v = _point_and_tangent(11, 5)
    y = random_points(11, 5, generator=generator(1, "test point"))
    torch.testing.assert_close(logarithm(x, y), geoopt_sphere.logmap(x, y), atol=SPHERE_NEAR_ANTIPODES, rtol=0)
    torch.testing.assert_close(distance(x, y), geoopt_sphere.dist(x, y), atol=SPHERE_NEAR_ANTIPODES, rtol=0)
    w = logarithm(x, y)
    torch.testing.assert_close(parallel_transport(x, y, w), -logarithm(y, x), atol=SPHERE_ROUNDING, rtol=0)
    # geoopt transports by projecting, which is parallel transport exactly for vectors orthogonal to the geodesic.
    across = v - dot(v, w) / dot(w, w) * w
    torch.testing.assert_close(
        parallel_transport(x, y, across), geoopt_sphere.transp(x, y, across), atol=SPHERE_ROUNDING, rtol=0
    )


@pytest.mark.parametrize("angle", [0.0, 1e-300, 1e-16, 1e-9, 1e-3, 0.0999, 0.1, 1.0, math.pi / 2, 3.0])
def test_logarithm_inverts_the_exponential_at_every_scale(angle: float) -> None:
    x, v = _point_and_tangent(7, 5)
    target = angle * project(v)
    # Coordinates far below rounding of x vanish in x + v: the law then holds absolutely.
    torch.testing.assert_close(logarithm(x, exponential(x, target)), target, atol=4e-16, rtol=SPHERE_ROUNDING)


@pytest.mark.parametrize("gap", [1e-6, 1e-3])
def test_logarithm_and_transport_stay_accurate_near_antipodes(gap: float) -> None:
    x, v = _point_and_tangent(7, 5)
    y, target = _at_angle(x, v, math.pi - gap)
    torch.testing.assert_close(logarithm(x, y), target, atol=SPHERE_NEAR_ANTIPODES, rtol=0)
    torch.testing.assert_close(
        distance(x, y), torch.full((7,), math.pi - gap, dtype=torch.float64), atol=SPHERE_ROUNDING, rtol=0
    )
    moved = parallel_transport(x, y, v)
    torch.testing.assert_close(dot(moved, moved), dot(v, v), atol=SPHERE_ROUNDING, rtol=SPHERE_ROUNDING)
    torch.testing.assert_close(dot(moved, y), torch.zeros(7, 1).double(), atol=SPHERE_NEAR_ANTIPODES, rtol=0)


@pytest.mark.parametrize("angle", [1e-12, 1e-8, 1.0, math.pi - 1e-8])
def test_distance_keeps_relative_accuracy(angle: float) -> None:
    x = torch.tensor([1.0, 0.0], dtype=torch.float64)
    y = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
    assert float(distance(x, y)) == pytest.approx(angle, rel=8 * sys.float_info.epsilon)


def test_antipodes_are_refused_by_name() -> None:
    x, v = _point_and_tangent(3, 4)
    with pytest.raises(ValueError, match="antipodal points have no unique logarithm"):
        logarithm(x, -x)
    with pytest.raises(ValueError, match="antipodal"):
        parallel_transport(x, -x, v)


def test_transport_is_an_isometry_and_returns() -> None:
    x, v = _point_and_tangent(11, 5)
    y, w = random_points(11, 5, generator=generator(1, "test point")), _point_and_tangent(11, 5)[1].flip(-1)
    w = tangent_projection(x, w)
    torch.testing.assert_close(dot(parallel_transport(x, y, v), parallel_transport(x, y, w)), dot(v, w))
    torch.testing.assert_close(parallel_transport(y, x, parallel_transport(x, y, v)), v)
    torch.testing.assert_close(parallel_transport(x, x, v), v, atol=SPHERE_ROUNDING, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_tangent_basis_is_orthonormal_and_tangent(shape: tuple[int, ...]) -> None:
    x, _ = _point_and_tangent(*shape)
    basis = tangent_basis(x)
    identity = torch.eye(shape[-1] - 1, dtype=torch.float64).expand(*shape[:-1], -1, -1)
    torch.testing.assert_close(basis.mT @ basis, identity, atol=SPHERE_ROUNDING, rtol=0)
    torch.testing.assert_close((x.unsqueeze(-2) @ basis).abs().sum(), x.new_zeros(()), atol=SPHERE_ROUNDING, rtol=0)


@pytest.mark.parametrize("first", [1.0, -1.0])
def test_tangent_basis_exists_at_and_beside_both_poles(first: float) -> None:
    for tilt in (0.0, 1e-9):
        x = project(torch.tensor([first, tilt, 0.0], dtype=torch.float64))
        basis = tangent_basis(x)
        torch.testing.assert_close(basis.mT @ basis, torch.eye(2).double(), atol=SPHERE_ROUNDING, rtol=0)
        torch.testing.assert_close(x @ basis, torch.zeros(2).double(), atol=SPHERE_ROUNDING, rtol=0)


@pytest.mark.parametrize("size", [0.0, 1e-8, 0.09, 0.11, 2.0])
def test_exponential_has_exact_first_and_second_derivatives_at_every_length(size: float) -> None:
    x, v = _point_and_tangent(1, 3)
    x, v = x[0], size * project(v)[0]
    direction = _point_and_tangent(1, 3, seed=1)[1][0]

    def along(t: Tensor) -> Tensor:
        return exponential(x, v + t * direction)

    zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(along, (zero,))
    assert torch.autograd.gradgradcheck(along, (zero,))


def _exactly(x: Tensor) -> list:  # type: ignore[type-arg]
    return [mpmath.mpf(float(value)) for value in x]


def _exact_dot(x: list, y: list):  # type: ignore[no-untyped-def, type-arg]
    return mpmath.fsum(a * b for a, b in zip(x, y, strict=True))


def _exact_geometry(x: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Distance, logarithm and transport of v with 60 digits, by the textbook formulae that lose digits in float64."""
    with mpmath.workdps(60):
        a, b, w = _exactly(x), _exactly(y), _exactly(v)
        lengths = [mpmath.sqrt(_exact_dot(each, each)) for each in (a, b)]
        a, b = ([value / length for value in each] for each, length in zip((a, b), lengths, strict=True))
        cosine = _exact_dot(a, b)
        angle = mpmath.acos(cosine)
        scale = angle / mpmath.sin(angle)
        logarithm_ = [scale * (q - cosine * p) for p, q in zip(a, b, strict=True)]
        factor = _exact_dot(b, w) / (1 + cosine)
        carried = [value - factor * (p + q) for value, p, q in zip(w, a, b, strict=True)]
        answers = ([angle], logarithm_, carried)
        return tuple(torch.tensor([float(value) for value in each], dtype=torch.float64) for each in answers)  # type: ignore[return-value]


@pytest.mark.parametrize("angle", [1e-7, 1e-3, 0.0999, 0.1001, 1.0, math.pi / 2, 3.0, math.pi - 1e-3, math.pi - 1e-6])
def test_distance_logarithm_and_transport_agree_with_sixty_digits(angle: float) -> None:
    x, v = (each[0] for each in _point_and_tangent(1, 5))
    y = project(_at_angle(x, v, angle)[0])
    far, log, carried = _exact_geometry(x, y, v)
    rounding = SPHERE_NEAR_ANTIPODES if angle > 3 else SPHERE_ROUNDING
    torch.testing.assert_close(distance(x, y)[None], far, atol=0, rtol=SPHERE_ROUNDING)
    torch.testing.assert_close(logarithm(x, y), log, atol=min(1.0, angle) * rounding, rtol=0)
    torch.testing.assert_close(parallel_transport(x, y, v), carried, atol=rounding, rtol=0)


def test_distance_is_symmetric_and_the_logarithms_length() -> None:
    x, y = (random_points(11, 5, generator=generator(seed, "test point")) for seed in (0, 1))
    torch.testing.assert_close(distance(x, y), distance(y, x), atol=0, rtol=0)
    torch.testing.assert_close(
        torch.linalg.vector_norm(logarithm(x, y), dim=-1), distance(x, y), atol=SPHERE_ROUNDING, rtol=0
    )


@pytest.mark.parametrize("angle", [0.0, 1e-9, 0.0999, 0.1001, 2.0, 3.0])
def test_logarithm_and_transport_have_exact_first_and_second_derivatives(angle: float) -> None:
    x, v = (each[0] for each in _point_and_tangent(1, 3))
    y, direction = _at_angle(x, v, angle)[0], _point_and_tangent(1, 3, seed=1)[1][0]
    zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
    for function in (
        lambda t: logarithm(x, exponential(y, tangent_projection(y, t * direction))),
        lambda t: parallel_transport(x, exponential(y, tangent_projection(y, t * direction)), v),
    ):
        assert torch.autograd.gradcheck(function, (zero,))
        assert torch.autograd.gradgradcheck(function, (zero,))


def test_derivative_of_the_distance_is_finite_for_coincident_and_near_antipodal_points() -> None:
    x, v = _point_and_tangent(3, 4)
    for y in (x.clone(), -_at_angle(x, v, 1e-8)[0]):
        y.requires_grad_()
        (gradient,) = torch.autograd.grad(distance(x, y).sum(), y)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("size", [0.0, 1e-8, 0.0999, 0.1001, 1.0, 3.0])
def test_pulling_back_inverts_the_differential_of_the_exponential(size: float) -> None:
    x, v = _point_and_tangent(7, 5)
    v, w = size * project(v), _point_and_tangent(7, 5, seed=1)[1]
    w = tangent_projection(x, w)
    y, moved = torch.func.jvp(lambda u: exponential(x, u), (v,), (w,))
    torch.testing.assert_close(pull_back(x, v, y, moved), w, atol=SPHERE_ROUNDING, rtol=SPHERE_ROUNDING)
