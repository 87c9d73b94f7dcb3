"""Geometry of the unit sphere S^(D-1) in R^D, accurate for coincident and for nearly antipodal points.

Points are unit vectors, tangent vectors at x are orthogonal to x; both have shape [..., D]. A configuration of tokens
[N, D] is a point of the product of N spheres, on which every function here acts token by token.
"""

import torch
from torch import Tensor

# Below this squared angle the series is used: its first dropped term is under 1e-21, so values and the derivatives
# that automatic differentiation takes of them agree with the closed form to rounding.
_SERIES_BELOW = 1e-2
# Taylor coefficients of z / sin z at z^2, z^4, ..., z^12.
_ANGLE_OVER_SINE = (1 / 6, 7 / 360, 31 / 15120, 127 / 604800, 73 / 3421440, 1414477 / 653837184000)


def dot(x: Tensor, y: Tensor) -> Tensor:
    """Inner product over the last axis, which is kept: [..., D], [..., D] -> [..., 1]."""
    return (x * y).sum(dim=-1, keepdim=True)


def project(x: Tensor) -> Tensor:
    """Nearest point of the sphere, x / |x|; a zero vector has none and gives NaN."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def require_points(x: Tensor, what: str, dimensions: str) -> None:
    """ValueError unless x has these named axes, such as "N, D", is not empty and holds unit vectors along the last."""
    if x.ndim != dimensions.count(",") + 1 or x.numel() == 0 or x.shape[-1] < 2 or not x.is_floating_point():
        raise ValueError(f"{what} must be points [{dimensions}], D at least 2, in floating point, not {_said(x)}")
    away = float((torch.linalg.vector_norm(x, dim=-1) - 1).abs().amax())
    # Rounding of half a type's digits is a point's; anything more was never normalised. NaN is refused as well.
    if not away <= torch.finfo(x.dtype).eps ** 0.5:
        raise ValueError(f"{what} must be unit vectors, and a norm is off by {away:.2g}: apply sphere.project first")


def _said(x: Tensor) -> str:
    return f"{list(x.shape)} of {x.dtype}".replace("torch.", "")


def tangent_projection(x: Tensor, v: Tensor) -> Tensor:
    """P_x v = v - <x, v> x, the part of v that is tangent at the unit vector x."""
    return v - dot(x, v) * x


def _cos_of_root(square: Tensor) -> Tensor:
    """cos(sqrt(s)), smooth at s = 0, where differentiating through the square root would give NaN."""
    small = square < _SERIES_BELOW
    series = torch.ones_like(square)
    for k in range(6, 0, -1):
        series = 1 - square / (2 * k * (2 * k - 1)) * series
    return torch.where(small, series, torch.cos(torch.sqrt(torch.where(small, torch.ones_like(square), square))))


def _sinc_of_root(square: Tensor) -> Tensor:
    """sin(sqrt(s)) / sqrt(s), smooth at s = 0."""
    small = square < _SERIES_BELOW
    series = torch.ones_like(square)
    for k in range(6, 0, -1):
        series = 1 - square / (2 * k * (2 * k + 1)) * series
    root = torch.sqrt(torch.where(small, torch.ones_like(square), square))
    return torch.where(small, series, torch.sin(root) / root)


def _angle_over_sine_of_chord(square: Tensor) -> Tensor:
    """Angle over its sine as a series in the squared chord, smooth at 0; for squares below `_SERIES_BELOW`."""
    series = torch.ones_like(square)
    for k in range(7, 0, -1):
        series = 1 + k / (4 * k + 2) * square * series
    return series


def _angle_over_sine_excess(square: Tensor) -> Tensor:
    """(sqrt(s) / sin(sqrt(s)) - 1) / s, smooth at s = 0, for s < pi^2."""
    small = square < _SERIES_BELOW
    series = torch.zeros_like(square)
    for coefficient in reversed(_ANGLE_OVER_SINE):
        series = coefficient + square * series
    safe = torch.where(small, torch.ones_like(square), square)
    root = torch.sqrt(safe)
    return torch.where(small, series, (root / torch.sin(root) - 1) / safe)


def exponential(x: Tensor, v: Tensor) -> Tensor:
    """End of the geodesic that starts at x with velocity v and runs for unit time: cos|v| x + (sin|v| / |v|) v."""
    square = dot(v, v)
    return _cos_of_root(square) * x + _sinc_of_root(square) * v


def distance(x: Tensor, y: Tensor) -> Tensor:
    """Angle between x and y in radians, [..., D], [..., D] -> [...].

    2 atan2(|x - y|, |x + y|) keeps full relative accuracy near 0 and near pi, where acos<x, y> loses half the digits.
    """
    return 2 * torch.atan2(torch.linalg.vector_norm(x - y, dim=-1), torch.linalg.vector_norm(x + y, dim=-1))


def _refuse_antipodes(chord_sum: Tensor, what: str) -> None:
    if bool((chord_sum == 0).all(dim=-1).any()):
        raise ValueError(f"antipodal points have no unique {what}")


def logarithm(x: Tensor, y: Tensor) -> Tensor:
    """Velocity at x of the shortest geodesic that reaches y in unit time, the inverse of `exponential` for |v| < pi.

    The direction is P_x y, computed as P_x(y - x) in the near half and P_x(y + x) in the far half: the differences are
    exact when the points nearly coincide or nearly oppose, P_x y itself is not. ValueError for antipodal points.
    """
    _refuse_antipodes(x + y, "logarithm")
    cosine = dot(x, y)
    chord = y - x
    direction = tangent_projection(x, torch.where(cosine >= 0, chord, y + x))
    square = dot(chord, chord)
    near = square < _SERIES_BELOW
    sine = torch.linalg.vector_norm(torch.where(near, torch.ones_like(direction), direction), dim=-1, keepdim=True)
    angle = torch.atan2(sine, torch.where(near, torch.ones_like(cosine), cosine))
    return torch.where(near, _angle_over_sine_of_chord(square), angle / sine) * direction


def parallel_transport(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """Transport the tangent vector v from x to y along the shortest geodesic.

    The transport is the reflection v - 2 <s, v> / <s, s> s with s = x + y, which takes x to -y: an isometry in exact
    arithmetic for any s, so it does not blow up near antipodes as 1 / (1 + <x, y>) does. ValueError for antipodes.
    """
    chord_sum = x + y
    _refuse_antipodes(chord_sum, "geodesic to transport along")
    # Only the direction of s matters, and a normalised one cannot underflow when squared.
    unit = project(chord_sum)
    return v - 2 * dot(unit, v) * unit


def pull_back(x: Tensor, v: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Inverse of the exponential's differential at v: tangent w at y = exponential(x, v), |v| < pi, to tangent at x.

    Along the geodesic vectors are carried by parallel transport, across it they shrink by sin|v| / |v|.
    """
    carried = parallel_transport(y, x, w)
    square = dot(v, v)
    excess = _angle_over_sine_excess(square)
    return carried + excess * (square * carried - dot(v, carried) * v)


def tangent_basis(x: Tensor) -> Tensor:
    """Orthonormal basis of the tangent space at x, [..., D] -> [..., D, D-1], from a Householder reflection."""
    size = x.shape[-1]
    identity = torch.eye(size, dtype=x.dtype, device=x.device)
    first = identity[0].expand_as(x)
    # Adding with the sign of the first entry keeps the reflector away from zero.
    sign = torch.where(x[..., :1] >= 0, 1.0, -1.0).to(x.dtype)
    unit = project(x + sign * first)
    reflection = identity - 2 * unit.unsqueeze(-1) * unit.unsqueeze(-2)
    return reflection[..., 1:]


def random_points(*shape: int, generator: torch.Generator, dtype: torch.dtype = torch.float64) -> Tensor:
    """Independent uniform points, shape [..., D]."""
    return project(torch.randn(*shape, generator=generator, dtype=dtype))
