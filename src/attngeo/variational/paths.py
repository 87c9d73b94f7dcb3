"""Discrete paths of tokens on the sphere, such as hidden states by depth, and how far they are from stationary.

One step of a path is the unit of time. The discrete action sum_l d(x_l, x_(l+1))^2 / 2 - sum_l V(x_l) has the
derivative -(log_x(x_(l-1)) + log_x(x_(l+1)) + P_x grad V(x)) at x = x_l, so the sum of the two logarithms is the path's
acceleration, and the projected Euler-Lagrange equation of L = |xdot|^2 / 2 - V holds exactly, for steps of any size,
where acceleration and force cancel; with V = 0, on great circles run at constant speed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attngeo.variational.sphere import distance, dot, exponential, logarithm, project, random_points, tangent_projection

DIRECTIONS = 16  # in which the fitted potential acts: few enough that a window of 32 tokens determines it
RIDGES = (1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 1.0, 100.0)
_SPARE_DIRECTIONS, _ITERATIONS = 8, 4  # of the subspace iteration that finds them


@dataclass(frozen=True)
class TokenPath:
    """Tokens by depth: points [T, N, D] on the unit sphere, and the steps [T - 1, K, N, D] taken off it.

    A step is what a layer adds to the stream before it is normalised, `starts` where it starts; K steps make a layer.
    """

    points: Tensor
    starts: Tensor
    steps: Tensor


def sphere_coordinates(states: Tensor, centred: bool) -> Tensor:
    """[..., C] as the norm sees them: without their mean, in coordinates of that hyperplane [..., C - 1], if `centred`.

    The reflection that takes (1, ..., 1) / sqrt(C) to the first axis, whose entry is then left out: an isometry.
    """
    if not centred:
        return states
    root = math.sqrt(states.shape[-1])
    mean_part = states.sum(dim=-1, keepdim=True) / root
    return states[..., 1:] - (mean_part - states[..., :1]) / (root - 1)


def token_path(states: Tensor, starts: Tensor, steps: Tensor, centred: bool) -> TokenPath:
    """The path of states [T, N, C] with the steps [T - 1, K, N, C] that lead from one to the next."""
    points, starts, steps = (sphere_coordinates(tensor.double(), centred) for tensor in (states, starts, steps))
    return TokenPath(project(points), starts, steps)


def random_walk(path: TokenPath, generator: torch.Generator) -> TokenPath:
    """From the same first points, geodesic steps of the same angles in uniformly random directions; steps off the
    sphere keep their lengths and starts and point anywhere, of which the share that is tangent does not depend.
    """
    points = [path.points[0]]
    for angle in distance(path.points[:-1], path.points[1:]).unsqueeze(-1):
        noise = torch.randn(points[-1].shape, generator=generator, dtype=torch.float64)
        points.append(project(exponential(points[-1], angle * project(tangent_projection(points[-1], noise)))))
    directions = random_points(*path.steps.shape, generator=generator)
    lengths = torch.linalg.vector_norm(path.steps, dim=-1, keepdim=True)
    return TokenPath(torch.stack(points), path.starts, lengths * directions)


def depth_shuffled(path: TokenPath, generator: torch.Generator) -> TokenPath:
    """The same points in one random order of depth; the steps of other layers taken from where this layer starts."""
    points = path.points[torch.randperm(len(path.points), generator=generator)]
    return replace(path, points=points, steps=path.steps[torch.randperm(len(path.steps), generator=generator)])


def step_measures(path: TokenPath) -> dict[str, Tensor]:
    """What a step from each node to the next is like, means over tokens, [T - 1] each.

    step_size: angle (rad); kinetic_energy: half its square; tangential_share: |P_x s|^2 / |s|^2 of the steps s off the
    sphere; norm_growth: log(|start + s| / |start|). A token that does not move has no share.
    """
    angle = distance(path.points[:-1], path.points[1:])
    radial = dot(project(path.starts), path.steps).squeeze(-1)
    share = 1 - radial.square() / path.steps.square().sum(dim=-1)
    grown = torch.linalg.vector_norm(path.starts + path.steps, dim=-1) / torch.linalg.vector_norm(path.starts, dim=-1)
    return {
        "step_size": angle.mean(dim=-1),
        "kinetic_energy": angle.square().mean(dim=-1) / 2,
        "tangential_share": share.nanmean(dim=(1, 2)),
        "norm_growth": grown.log().sum(dim=1).mean(dim=-1),
    }


@dataclass(frozen=True)
class Acceleration:
    """At the inner nodes of a path, [T - 2, N, D] each: the points, and the logarithms of their neighbours there."""

    x: Tensor
    backward: Tensor
    forward: Tensor

    @property
    def value(self) -> Tensor:
        """Covariant acceleration: 0 along a geodesic run at constant speed."""
        return self.backward + self.forward

    @property
    def scale(self) -> Tensor:
        """Sum of the root mean squares over tokens of its two terms, [T - 2]."""
        return _root_mean_square(self.backward) + _root_mean_square(self.forward)

    def relative(self, residual: Tensor) -> Tensor:
        """Root mean square of a residual over tokens, relative to the two terms of the acceleration, [T - 2].

        Of the acceleration itself: 0 on a geodesic, about 1 / sqrt(2) on a random walk of equal steps, 1 where every
        step is taken back.
        """
        return _root_mean_square(residual) / self.scale


def acceleration(points: Tensor) -> Acceleration:
    """Of a path [T, N, D] with at least 3 nodes."""
    x = points[1:-1]
    return Acceleration(x, logarithm(x, points[:-2]), logarithm(x, points[2:]))


def bend_measures(bend: Acceleration) -> dict[str, Tensor]:
    """How the path turns at its inner nodes, means over tokens, [T - 2] each; of a token that rests there is nothing.

    turning_angle (rad) between the direction of arrival and that of departure; geodesic_curvature (1 / rad): that angle
    over the mean of both steps, whatever the speed; el_residual_free: the relative acceleration.
    """
    turning = distance(project(-bend.backward), project(bend.forward))
    lengths = torch.linalg.vector_norm(bend.backward, dim=-1) + torch.linalg.vector_norm(bend.forward, dim=-1)
    return {
        "turning_angle": turning.nanmean(dim=-1),
        "geodesic_curvature": (2 * turning / lengths).nanmean(dim=-1),
        "el_residual_free": bend.relative(bend.value),
    }


@dataclass(frozen=True)
class QuadraticPotential:
    """V(x) = <b, U^T x> + <U^T x, A U^T x> / 2 with orthonormal directions U [D, k], b [k], symmetric A [k, k]."""

    directions: Tensor
    linear: Tensor
    quadratic: Tensor

    def gradient(self, x: Tensor) -> Tensor:
        """Ambient gradient of V, [..., D]."""
        return (self.linear + (x @ self.directions) @ self.quadratic) @ self.directions.mT

    def residual(self, bend: Acceleration) -> Tensor:
        """P_x (acceleration + grad V): 0 where the Euler-Lagrange equation of |xdot|^2 / 2 - V holds."""
        return bend.value + tangent_projection(bend.x, self.gradient(bend.x))


def fit_potential(bends: Sequence[Acceleration], generator: torch.Generator) -> QuadraticPotential:
    """The quadratic potential in `DIRECTIONS` directions that leaves the smallest sum of squared relative residuals.

    The directions are those that hold most of points and relative accelerations together, each of unit sum of squares.
    Every node counts by 1 / scale^2, or the largest steps alone would decide. The ridge is the one of `RIDGES` with
    which each half of the paths (of a single path, of its tokens) predicts the other half best: where nothing is to be
    found, the potential is flat.
    """
    x = torch.cat([bend.x.flatten(0, 1) for bend in bends])
    weight = torch.cat([(1 / bend.scale).repeat_interleave(bend.x.shape[1]) for bend in bends])[:, None]
    a = weight * torch.cat([bend.value.flatten(0, 1) for bend in bends])
    directions = _leading_directions(torch.cat([_scaled(x), _scaled(a)]), DIRECTIONS, generator)
    z, pull = x @ directions, a @ directions
    if len(bends) > 1:
        half = torch.cat([torch.full((bend.x.shape[:2].numel(),), place % 2) for place, bend in enumerate(bends)])
    else:
        half = torch.arange(len(x)) % bends[0].x.shape[1] % 2
    first, second = (_normal_equations(z[half == k], weight[half == k], pull[half == k]) for k in (0, 1))
    losses = [
        sum(tested.loss(fitted.solution(ridge)) for fitted, tested in ((first, second), (second, first)))
        for ridge in RIDGES
    ]
    both = _NormalEquations(first.matrix + second.matrix, first.right + second.right)
    k = directions.shape[1]
    entries = _symmetric_entries(k) @ both.solution(RIDGES[losses.index(min(losses))])
    return QuadraticPotential(directions, entries.reshape(k, k + 1)[:, 0], entries.reshape(k, k + 1)[:, 1:])


@dataclass(frozen=True)
class _NormalEquations:
    """Of a sum of squares <p, matrix p> - 2 <right, p> + constant in the parameters p."""

    matrix: Tensor
    right: Tensor

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(self.matrix)
        return values, vectors

    def solution(self, ridge: float) -> Tensor:
        """The minimiser with `ridge` times the mean eigenvalue added to every eigenvalue."""
        values, vectors = self._spectrum
        return vectors @ ((vectors.mT @ self.right) / (values.clamp_min(0) + ridge * values.mean()))

    def loss(self, parameters: Tensor) -> float:
        return float(parameters @ self.matrix @ parameters - 2 * self.right @ parameters)


def _normal_equations(z: Tensor, weight: Tensor, pull: Tensor) -> _NormalEquations:
    """For b and A, from z = U^T x [n, k], the weights of its rows [n, 1] and the weighted U^T a [n, k].

    With w = b + A z and a the acceleration, a tangent vector, |a + P_x U w|^2 = |a|^2 + 2 <U^T a, w> + |w|^2 -
    <z, w>^2.
    """
    k = z.shape[1]
    extended = weight * torch.cat([torch.ones_like(z[:, :1]), z], dim=1)
    entries = _symmetric_entries(k)  # of the free parameters into W = [b A], so that w = W (1, z)
    gram = torch.block_diag(*[extended.mT @ extended] * k)
    radial = (z[:, :, None] * extended[:, None, :]).flatten(1) @ entries
    matrix = entries.mT @ gram @ entries - radial.mT @ radial
    return _NormalEquations(matrix, -entries.mT @ (pull.mT @ extended).flatten())


def potential_residuals(bends: Sequence[Acceleration], generator: torch.Generator) -> Tensor:
    """Relative residual of every path under the potential fitted to the others of the other parity, [paths, T - 2].

    Even paths are measured by the potential of the odd ones and the other way round, so none is measured by what was
    fitted to it; NaN for a single path.
    """
    residuals = torch.full((len(bends), len(bends[0].x)), math.nan, dtype=torch.float64)
    for parity in (0, 1):
        fitted_on, tested_on = bends[1 - parity :: 2], range(parity, len(bends), 2)
        if fitted_on:
            potential = fit_potential(fitted_on, generator)
            for place in tested_on:
                residuals[place] = bends[place].relative(potential.residual(bends[place]))
    return residuals


def _root_mean_square(vectors: Tensor) -> Tensor:
    return vectors.square().sum(dim=-1).mean(dim=-1).sqrt()


def _scaled(rows: Tensor) -> Tensor:
    return rows / torch.linalg.vector_norm(rows).clamp_min(torch.finfo(rows.dtype).tiny)


def _leading_directions(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Orthonormal right singular vectors of [n, D] with the largest values, by subspace iteration, [D, count]."""
    width = rows.shape[1]
    count = min(count, width)
    start = torch.randn(width, min(count + _SPARE_DIRECTIONS, width), generator=generator, dtype=rows.dtype)
    basis = torch.linalg.qr(start).Q
    for _ in range(_ITERATIONS):
        basis = torch.linalg.qr(rows.mT @ (rows @ basis)).Q
    rotation = torch.linalg.svd(rows @ basis, full_matrices=False).Vh
    return basis @ rotation[:count].mT


def _symmetric_entries(k: int) -> Tensor:
    """0/1 matrix [k (k + 1), k + k (k + 1) / 2] from b and the upper half of A to the entries of [b A], row by row."""
    upper = torch.triu_indices(k, k)
    entries = torch.zeros(k, k + 1, k + upper.shape[1], dtype=torch.float64)
    rows = torch.arange(k)
    entries[rows, 0, rows] = 1
    places = k + torch.arange(upper.shape[1])
    entries[upper[0], 1 + upper[1], places] = 1
    entries[upper[1], 1 + upper[0], places] = 1
    return entries.flatten(0, 1)
