"""Operators against their peers, forward and backward: checked against float64 first, then timed in turn.

A row is a number with its labels, ready for `attngeo.paper.records`. Needs torch alone; peers that are not installed,
and those that gave a wrong result, are reported and not timed.
"""

import importlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from attngeo import ops
from attngeo.evaluation.operator_sizes import ITERATIONS, Size
from attngeo.evaluation.timing import Call, Timing, clock_of, interleaved, peak_memory_mib, wall_time
from attngeo.ops import backend
from attngeo.training.seeding import generator

Row = dict[str, Any]
Direction = Literal["forward", "backward"]
Role = Literal["ours", "peer", "shown"]
Limits = Callable[[str, str, Size], Mapping[str, float]]

OURS = "attngeo"
NAIVE = "attngeo naive"
UNFUSED = "attngeo kernel, then bmm"
CDIST = "torch.cdist(p=1) + exp"
BMM_LOOP = "torch bmm loop"
LINALG_INV = "torch.linalg.inv"
LAMBDA = 4.0
EPS = 0.01
# Largest error of a contestant, in units of the largest number of the float64 result. Sums of some thousand float32
# terms reach 1e-5; a missing factor, a wrong sign at ties or a lost block is far above.
LARGEST_ERROR = 1e-4
# An inverse multiplies rounding by the condition number, here up to 100.
LARGEST_ERROR_OF_AN_INVERSE = 1e-3
# Broadcasting forms every |a - b|: rows are cut so that this many floats are in memory at once.
_BROADCAST_ELEMENTS = 2**22


@dataclass(frozen=True)
class Contestant:
    """A way to compute an operator. Ratios are taken to peers; what is only shown computes something else."""

    name: str
    forward: Call | None
    backward: Call | None = None
    role: Role = "peer"

    def call(self, direction: Direction) -> Call | None:
        """What is timed for a direction."""
        return self.forward if direction == "forward" else self.backward


@dataclass(frozen=True)
class Problem:
    """An operator on given inputs: the float64 result and gradients, and everyone who can compute them."""

    operation: str
    size: Size
    device: torch.device
    reference: Callable[[], tuple[Tensor, tuple[Tensor, ...]]]
    contestants: Sequence[Contestant]
    missing: Mapping[str, str] = field(default_factory=dict)
    largest_error: float = LARGEST_ERROR


def problem(operation: str, size: Size, device: torch.device) -> Problem:
    """The operator of that name at a size, with its inputs drawn."""
    return _PROBLEMS[operation](size, device)


def measure(problem: Problem, *, repeats: int, seconds: float, limits: Limits | None = None) -> list[Row]:
    """Check every contestant of a problem, then time those that are right; a call takes about `seconds` in all."""
    rows: list[Row] = []
    shared = _labels(problem)
    passed: dict[Direction, list[Contestant]] = {"forward": [], "backward": []}
    for name, why in problem.missing.items():
        rows.append(shared | _row("not_timed", math.nan, "1", 0) | {"contestant": name, "role": "peer", "why": why})
    errors = _gate(problem)
    for contestant in problem.contestants:
        labels = shared | {"contestant": contestant.name, "role": contestant.role}
        for direction in passed:
            if (contestant.name, direction) not in errors:
                continue
            error, said = errors[contestant.name, direction]
            rows.append(labels | _row("error", error, "relative to the largest", 1) | {"direction": direction})
            if error <= problem.largest_error:
                passed[direction].append(contestant)
            else:
                why = said or f"wrong: error {error:.1e} of at most {problem.largest_error:.0e}"
                rows.append(labels | _row("not_timed", error, "1", 0) | {"direction": direction, "why": why})
    implementations = {c.name: _implementation(c) for c in passed["forward"] if c.name in (OURS, NAIVE, UNFUSED)}
    for direction, contestants in passed.items():
        calls = {c.name: call for c in contestants if (call := c.call(direction)) is not None}
        timings = interleaved(calls, clock_of(problem.device), repeats=repeats, seconds=seconds)
        bounds = dict(limits(problem.operation, direction, problem.size)) if limits is not None else {}
        for limit, milliseconds in bounds.items():
            rows.append(shared | _row("limit_ms", milliseconds, "ms", 1) | {"direction": direction, "limit": limit})
        for contestant in contestants:
            timing = timings[contestant.name]
            labels = shared | {"direction": direction, "contestant": contestant.name, "role": contestant.role}
            labels["backend"] = implementations.get(contestant.name, "")
            rows += [labels | row for row in _of_timing(timing, problem.size, bounds, contestant.role == "ours")]
        rows += [shared | row for row in _speedups(contestants, timings, direction, implementations)]
    return rows


def _of_timing(timing: Timing, size: Size, bounds: Mapping[str, float], ours: bool) -> Iterator[Row]:
    spread = {"spread": timing.spread_ms, "spread_kind": "median minus minimum over repeats"}
    yield _row("time_ms", timing.minimum_ms, "ms", timing.repeats) | spread
    if size.pairs:
        yield _row("gpair_per_s", size.pairs / timing.minimum_ms / 1e6, "Gpair/s", timing.repeats)
    if ours and bounds:
        limit = max(bounds, key=lambda name: bounds[name])
        yield _row("limit_share", bounds[limit] / timing.minimum_ms, "1", timing.repeats) | {"limit": limit}


def _speedups(
    contestants: Sequence[Contestant], timings: Mapping[str, Timing], direction: str, ran: Mapping[str, str]
) -> Iterator[Row]:
    """Ours against the fastest peer, from the same run."""
    peers = [timings[c.name] for c in contestants if c.role == "peer"]
    if not peers:
        return
    fastest = min(peers, key=lambda timing: timing.minimum_ms)
    against = next(c.name for c in contestants if timings[c.name] is fastest)
    for contestant in contestants:
        if contestant.role == "ours":
            timing = timings[contestant.name]
            row = _row("speedup", fastest.minimum_ms / timing.minimum_ms, "1", min(timing.repeats, fastest.repeats))
            labels = {"direction": direction, "contestant": contestant.name, "role": "ours", "against": against}
            yield row | labels | {"backend": ran.get(contestant.name, "")}


def memory(size: Size, device: torch.device) -> list[Row]:
    """Peak memory of kernel times values, forward alone and with its backward, fused and through the kernel."""
    q, k, v, grad = _inputs("laplacian_kernel_matmul", size, device)
    shared = _labels(Problem("laplacian_kernel_matmul", size, device, lambda: (q, ()), ()))
    fused = partial(ops.laplacian_kernel_matmul, lambda_=LAMBDA)
    rows = []
    for name, role, function in ((OURS, "ours", fused), (UNFUSED, "shown", _kernel_then_bmm)):
        labels = shared | {"contestant": name, "role": role}
        for direction in ("forward", "forward and backward"):

            def call(backward: bool = direction != "forward", function: Callable[..., Tensor] = function) -> object:
                if not backward:
                    with torch.no_grad():
                        return function(q, k, v)
                leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                return torch.autograd.grad(function(*leaves), leaves, grad)

            rows.append(
                labels | _row("peak_memory_mib", peak_memory_mib(call, device), "MiB", 1) | {"direction": direction}
            )
    return rows


def threads_ratio(operation: str, size: Size, *, repeats: int) -> list[Row]:
    """Wall time with one thread over wall time with two, forward and backward; for an idle machine with two cores.

    The threads are there before a sample begins, and each sample is of ten calls.
    """
    chosen = problem(operation, size, torch.device("cpu"))
    ours = next(c for c in chosen.contestants if c.role == "ours")
    before = torch.get_num_threads()
    rows = []
    try:
        for direction in ("forward", "backward"):
            call = ours.call(direction)
            assert call is not None
            smallest = {1: math.inf, 2: math.inf}
            for _ in range(repeats):
                for count, known in smallest.items():
                    torch.set_num_threads(count)
                    call()
                    smallest[count] = min(known, wall_time(call, 10))
            row = _row("two_thread_ratio", smallest[1] / smallest[2], "1", repeats)
            rows.append(_labels(chosen) | row | {"direction": direction, "contestant": OURS, "role": "ours"})
    finally:
        torch.set_num_threads(before)
    return rows


def _row(metric: str, value: float, unit: str, n: int) -> Row:
    return {"metric": metric, "value": value, "unit": unit, "n": n}


def _labels(problem: Problem) -> Row:
    size = problem.size
    return {
        "operation": problem.operation,
        "device_kind": problem.device.type,
        "dtype": "float32",
        "threads": torch.get_num_threads() if problem.device.type == "cpu" else 0,
        "slices": size.slices,
        "tokens": size.tokens,
        "landmarks": size.landmarks,
        "channels": size.channels,
    }


def _implementation(contestant: Contestant) -> str:
    """Which of the project's implementations a contestant really runs, such as "compiled cpu avx512"."""
    backend.forget()
    if contestant.forward is not None:
        contestant.forward()
    return ", ".join(dict.fromkeys(backend.ran().values()))


def _gate(problem: Problem) -> dict[tuple[str, Direction], tuple[float, str]]:
    """The error of every contestant in every direction, relative to the largest number of the float64 result.

    One that raises, for want of memory or of a form for these inputs, has an infinite error and its message.
    """
    output, gradients = problem.reference()
    errors: dict[tuple[str, Direction], tuple[float, str]] = {}
    for contestant in problem.contestants:
        wanted: dict[Direction, tuple[Tensor, ...]] = {"forward": (output,), "backward": gradients}
        for direction, expected in wanted.items():
            call = contestant.call(direction)
            if call is None:
                continue
            try:
                found: Any = call()
            except RuntimeError as error:
                errors[contestant.name, direction] = math.inf, f"fails: {str(error).splitlines()[0]}"
                continue
            pairs = zip((found,) if direction == "forward" else found, expected, strict=True)
            errors[contestant.name, direction] = max(_error(one, other) for one, other in pairs), ""
    return errors


def _error(found: Any, expected: Tensor) -> float:
    """Largest difference over the largest magnitude expected; infinite for another shape or a NaN."""
    if isinstance(found, list):
        found = torch.stack([torch.as_tensor(one) for one in found])
    if found.shape != expected.shape:
        return math.inf
    difference = float((found.detach().to(expected) - expected).abs().max() / expected.abs().max())
    return math.inf if math.isnan(difference) else difference


def _draw(operation: str, size: Size, device: torch.device, index: int, *shape: int) -> Tensor:
    """Normal numbers that depend on the operation, the size and the index alone."""
    purpose = f"benchmark {operation} {size.label}"
    return torch.randn(*shape, generator=generator(0, purpose, index)).to(device)


def _inputs(operation: str, size: Size, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, landmarks, values and the gradient of the product; the first query equals the first landmark.

    Scaled as the layers do: larger numbers make kernel values that mean nothing in float32.
    """
    draw = partial(_draw, operation, size, device)
    q = size.channels**-0.25 * draw(0, size.slices, size.tokens, size.channels)
    k = size.channels**-0.25 * draw(1, size.slices, size.landmarks, size.channels)
    k[:, 0] = q[:, 0]
    v = draw(2, size.slices, size.landmarks, size.channels)
    return q, k, v, draw(3, size.slices, size.tokens, size.channels)


def _contestant(
    name: str,
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    grad: Tensor,
    *,
    role: Role = "peer",
    in_place: Callable[..., Tensor] | None = None,
) -> Contestant:
    """A differentiable function of the inputs; `in_place` is a form of it without gradients that needs less memory."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    graph: list[Tensor] = []

    def forward() -> Tensor:
        with torch.no_grad():
            return (in_place or function)(*inputs)

    def backward() -> tuple[Tensor, ...]:
        if not graph:
            graph.append(function(*leaves))
        return torch.autograd.grad(graph[0], leaves, grad, retain_graph=True)

    return Contestant(name, forward, backward, role)


def _float64(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, Any]:
    """Output and gradients of a function in float64."""
    leaves = [x.double().requires_grad_() for x in inputs]
    output = function(*leaves)
    return output.detach(), torch.autograd.grad(output, leaves, grad.double())


def _kernel_problem(kind: str, size: Size, device: torch.device) -> Problem:
    operation = f"{kind}_kernel"
    q, k, _, _ = _inputs(operation, size, device)
    grad = _draw(operation, size, device, 4, size.slices, size.tokens, size.landmarks)
    ours, naive = _our_kernel(kind), _naive(_our_kernel(kind))
    contestants = [
        _contestant(OURS, ours, (q, k), grad, role="ours"),
        _contestant(NAIVE, naive, (q, k), grad, role="shown"),
    ]
    if kind == "laplacian":
        contestants.append(_contestant(CDIST, _torch_kernel(kind), (q, k), grad, in_place=_cdist_in_place))
    else:
        contestants.append(_contestant("torch.cdist(p=2) + exp", _direct_gaussian, (q, k), grad))
        contestants.append(_contestant("torch matrix product + exp", _torch_kernel(kind), (q, k), grad))
    contestants.append(_broadcasting(kind, q, k, grad))
    peers, missing = _peers_in_numpy(kind, q, k)
    missing["pykeops"] = f"gives no kernel matrix, see {operation}_matmul"
    return Problem(operation, size, device, lambda: _float64(naive, (q, k), grad), [*contestants, *peers], missing)


def _matmul_problem(kind: str, size: Size, device: torch.device) -> Problem:
    operation = f"{kind}_kernel_matmul"
    q, k, v, grad = _inputs(operation, size, device)
    kernel, torch_kernel = _our_kernel(kind), _torch_kernel(kind)

    def unfused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernel(q, k) @ v

    def through_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch_kernel(q, k) @ v

    ours: Callable[..., Tensor] = ops.gaussian_kernel_matmul
    if kind == "laplacian":
        ours = partial(ops.laplacian_kernel_matmul, lambda_=LAMBDA)
    peer = f"{CDIST}, then bmm" if kind == "laplacian" else "torch matrix product + exp, then bmm"
    contestants = [
        _contestant(OURS, ours, (q, k, v), grad, role="ours"),
        _contestant(NAIVE, _naive(ours), (q, k, v), grad, role="shown"),
        _contestant(UNFUSED, unfused, (q, k, v), grad, role="shown"),
        _contestant(peer, through_torch, (q, k, v), grad),
    ]
    missing = {}
    lazy, why = _optional("pykeops.torch")
    if lazy is None:
        missing["pykeops"] = why
    else:
        contestants.append(_contestant("pykeops", partial(_keops, lazy, kind), (q, k, v), grad))
    return Problem(operation, size, device, lambda: _float64(_naive(ours), (q, k, v), grad), contestants, missing)


def _inverse_problem(operation: str, size: Size, device: torch.device) -> Problem:
    x = _draw(operation, size, device, 0, size.slices, size.tokens, 32)
    W = torch.exp(torch.cdist(x, x, p=1.0) / -16.0)
    W = (W + W.mT) / 2
    grad = _draw(operation, size, device, 1, *W.shape)
    grad = grad + grad.mT  # for other gradients a symmetric inverse may give the symmetric part alone
    shift = EPS * torch.eye(size.tokens, device=device)

    def inverse(W: Tensor) -> Tensor:
        return torch.linalg.inv(W + shift.to(W))

    def cholesky(W: Tensor) -> Tensor:
        return torch.cholesky_inverse(torch.linalg.cholesky(W + shift))

    if operation == "spd_inverse":
        direct = partial(ops.spd_inverse, eps=EPS)
        contestants = [
            _contestant(OURS, direct, (W,), grad, role="ours"),
            _contestant(NAIVE, _naive(direct), (W,), grad, role="shown"),
            _contestant(LINALG_INV, inverse, (W,), grad),
            _contestant("torch cholesky + cholesky_inverse", cholesky, (W,), grad),
        ]
    else:

        def ours(W: Tensor, backend: str = "auto") -> Tensor:
            return ops.newton_schulz_inverse(W, ITERATIONS, EPS, backend=backend)[0]

        loop = _contestant(BMM_LOOP, lambda W: _bmm_loop(W + shift), (W,), grad)
        inverted = inverse(W)
        implicit = Contestant("torch -X^T G X^T", None, lambda: (-inverted.mT @ grad @ inverted.mT,), role="shown")
        naive = _contestant(NAIVE, _naive(ours), (W,), grad, role="shown")
        contestants = [_contestant(OURS, ours, (W,), grad, role="ours"), naive, loop, implicit]
        contestants.append(_contestant(LINALG_INV, inverse, (W,), grad, role="shown"))
    return Problem(
        operation,
        size,
        device,
        lambda: _float64(inverse, (W,), grad),
        contestants,
        largest_error=LARGEST_ERROR_OF_AN_INVERSE,
    )


_PROBLEMS: dict[str, Callable[[Size, torch.device], Problem]] = {
    "laplacian_kernel": partial(_kernel_problem, "laplacian"),
    "laplacian_kernel_matmul": partial(_matmul_problem, "laplacian"),
    "gaussian_kernel": partial(_kernel_problem, "gaussian"),
    "gaussian_kernel_matmul": partial(_matmul_problem, "gaussian"),
    "newton_schulz_inverse": partial(_inverse_problem, "newton_schulz_inverse"),
    "spd_inverse": partial(_inverse_problem, "spd_inverse"),
}
OPERATIONS = tuple(_PROBLEMS)


def _our_kernel(kind: str) -> Callable[..., Tensor]:
    return partial(ops.laplacian_kernel, lambda_=LAMBDA) if kind == "laplacian" else ops.gaussian_kernel


def _naive(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The readable form of one of the project's operators."""
    return partial(operator, backend="naive")


def _kernel_then_bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ops.laplacian_kernel(q, k, LAMBDA) @ v


def _torch_kernel(kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The fastest form that torch has: a distance for the Laplacian kernel, one matrix product for the Gaussian."""
    return _cdist if kind == "laplacian" else _expanded_gaussian


def _cdist(q: Tensor, k: Tensor) -> Tensor:
    return torch.exp(torch.cdist(q, k, p=1.0) / -LAMBDA)


def _expanded_gaussian(q: Tensor, k: Tensor) -> Tensor:
    squares = q.square().sum(-1)[..., None] + k.square().sum(-1)[..., None, :]
    return torch.exp(torch.baddbmm(squares, q, k.mT, beta=-0.5))


def _cdist_in_place(q: Tensor, k: Tensor) -> Tensor:
    return torch.cdist(q, k, p=1.0).mul_(-1.0 / LAMBDA).exp_()


def _direct_gaussian(q: Tensor, k: Tensor) -> Tensor:
    distance = torch.cdist(q, k, p=2.0, compute_mode="donot_use_mm_for_euclid_dist")
    return torch.exp(-0.5 * distance.square())


def _bmm_loop(P: Tensor) -> Tensor:
    scale = 1.8 / (P.abs().sum(-1).amax(-1) * P.abs().sum(-2).amax(-1))
    X = scale[:, None, None] * P.mT
    for _ in range(ITERATIONS):
        X = torch.baddbmm(X, X, torch.bmm(P, X), beta=2.0, alpha=-1.0)
    return X


def _broadcasting(kind: str, q: Tensor, k: Tensor, grad: Tensor) -> Contestant:
    """q - k for every pair in memory, in blocks of rows, and the gradient by its formula."""
    slices, landmarks, channels = k.shape
    rows = max(1, _BROADCAST_ELEMENTS // (slices * landmarks * channels))
    scale = -1.0 / LAMBDA if kind == "laplacian" else -0.5
    kernel: list[Tensor] = []

    def block(start: int) -> Tensor:
        return q[:, start : start + rows, None] - k[:, None]

    def forward() -> Tensor:
        out = q.new_empty(slices, q.shape[1], landmarks)
        for start in range(0, q.shape[1], rows):
            difference = block(start)
            measure = difference.abs_() if kind == "laplacian" else difference.square_()
            out[:, start : start + rows] = measure.sum(-1).mul_(scale).exp_()
        return out

    def backward() -> tuple[Tensor, Tensor]:
        if not kernel:
            kernel.append(forward())
        grad_q, grad_k = torch.empty_like(q), torch.zeros_like(k)
        for start in range(0, q.shape[1], rows):
            weight = grad[:, start : start + rows] * kernel[0][:, start : start + rows] * scale
            difference = block(start)
            slope = difference.sign_() if kind == "laplacian" else difference.mul_(2.0)
            slope *= weight[..., None]
            grad_q[:, start : start + rows] = slope.sum(2)
            grad_k -= slope.sum(1)
        return grad_q, grad_k

    return Contestant("torch broadcasting, in blocks", forward, backward)


def _optional(module: str) -> tuple[Any, str]:
    """A peer's module, or None and why it is not there."""
    try:
        return importlib.import_module(module), ""
    except ImportError:
        return None, "not installed"


def _peers_in_numpy(kind: str, q: Tensor, k: Tensor) -> tuple[list[Contestant], dict[str, str]]:
    """SciPy (float64 inside) and scikit-learn, slice by slice, forward alone; they know no GPU."""
    names = ("scipy cdist + exp", "scikit-learn")
    if q.device.type != "cpu":
        return [], dict.fromkeys(names, "runs on the CPU alone")
    contestants, missing = [], {}
    distance, why = _optional("scipy.spatial.distance")
    if distance is None:
        missing[names[0]] = why
    else:
        import numpy as np

        doubled = [(a.double().numpy(), b.double().numpy()) for a, b in zip(q, k, strict=True)]
        metric, scale = ("cityblock", -1.0 / LAMBDA) if kind == "laplacian" else ("sqeuclidean", -0.5)
        contestants.append(
            Contestant(names[0], lambda: [np.exp(scale * distance.cdist(a, b, metric)) for a, b in doubled])
        )
    pairwise, why = _optional("sklearn.metrics.pairwise")
    if pairwise is None:
        missing[names[1]] = why
    else:
        pairs = [(a.numpy(), b.numpy()) for a, b in zip(q, k, strict=True)]
        kernel, gamma = (pairwise.laplacian_kernel, 1.0 / LAMBDA) if kind == "laplacian" else (pairwise.rbf_kernel, 0.5)
        contestants.append(Contestant(names[1], lambda: [kernel(a, b, gamma=gamma) for a, b in pairs]))
    return contestants, missing


def _keops(lazy: Any, kind: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    difference = lazy.LazyTensor(q[:, :, None].contiguous()) - lazy.LazyTensor(k[:, None].contiguous())
    scaled = difference.abs().sum(-1) / -LAMBDA if kind == "laplacian" else difference.square().sum(-1) / -2.0
    product: Tensor = scaled.exp() @ v
    return product


def suite(
    sizes: Mapping[str, Sequence[Size]],
    device: torch.device,
    *,
    repeats: int,
    seconds: float,
    limits: Limits | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """`measure` of every operator at its sizes, with a line told after each."""
    rows: list[Row] = []
    for operation, wanted in sizes.items():
        for size in wanted:
            start = time.monotonic()
            rows += measure(problem(operation, size, device), repeats=repeats, seconds=seconds, limits=limits)
            tell(f"{operation} {size.label}: {time.monotonic() - start:.1f} s")
    return rows
