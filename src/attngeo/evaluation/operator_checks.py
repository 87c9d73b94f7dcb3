"""Every operator against its definition in float64, on the sizes and inputs that break implementations; torch alone.

The test suite asks more, with tighter bounds; this is what a machine with a GPU can be asked in a minute.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from attngeo import ops
from attngeo.evaluation.operator_benchmarks import EPS, LAMBDA, LARGEST_ERROR, LARGEST_ERROR_OF_AN_INVERSE
from attngeo.ops import backend
from attngeo.training.seeding import generator

# Slices, tokens, landmarks, channels, values: ones, primes, sizes beside those of vectors, warps and blocks, more rows
# than a block takes, more landmarks than fit at once, empty axes.
SIZES = (
    (1, 1, 1, 1, 1),
    (6, 7, 5, 33, 3),
    (2, 17, 13, 31, 64),
    (2, 16, 64, 16, 16),
    (1, 67, 1, 257, 5),
    (2, 523, 49, 32, 32),
    (3, 129, 257, 65, 33),
    (1, 5, 1031, 8, 130),
    (0, 3, 4, 5, 2),
    (2, 0, 4, 5, 2),
    (2, 3, 0, 5, 2),
    (2, 3, 4, 0, 2),
    (2, 3, 4, 5, 0),
)
QUICK_SIZES = (SIZES[0], SIZES[1], SIZES[5], SIZES[10])
MATRIX_SIZES = (0, 1, 2, 7, 16, 31, 49, 64, 97, 128, 196, 256)
QUICK_MATRIX_SIZES = (0, 1, 17, 49)
# Largest error in units of the largest number expected: float32 as in the benchmarks, float64 with some thousand
# roundings, half precision by the one rounding of the result (twice, to allow for a tie).
_BOUNDS = {
    torch.float64: 1e-11,
    torch.float32: LARGEST_ERROR,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
}
_HALF = (torch.bfloat16, torch.float16)
_LARGE = 46349  # squared just above 2^31


class Check(NamedTuple):
    """One law and whether it held."""

    name: str
    passed: bool
    detail: str


def check_operators(device: torch.device, *, quick: bool = False) -> Iterator[Check]:
    """Check every operator on a device; what ran naively counts as failed, since that is not what is being checked."""
    yield from _kernels(device, QUICK_SIZES if quick else SIZES)
    yield from _layouts(device)
    yield from _ties(device)
    yield from _far_apart(device)
    yield from _offsets(device)
    yield from _same_bits(device)
    yield from _inverses(device, QUICK_MATRIX_SIZES if quick else MATRIX_SIZES)
    yield from _hard_matrices(device)
    if device.type == "cuda":
        yield from _side_stream(device)
        if not quick:
            yield from _long_offsets(device)


def distances(kind: str, q: Tensor, k: Tensor) -> Tensor:
    """The distance of every pair, by its definition."""
    difference = q[..., :, None, :] - k[..., None, :, :]
    return (difference.abs() if kind == "laplacian" else difference.square()).sum(-1)


def exponents(kind: str, q: Tensor, k: Tensor) -> Tensor:
    """The logarithm of a kernel."""
    return distances(kind, q, k) * (-1.0 / LAMBDA if kind == "laplacian" else -0.5)


def _operators(kind: str) -> dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]]:
    """Compiled operator and definition by name, both functions of q, k and for products v."""
    kernel = partial(ops.laplacian_kernel, lambda_=LAMBDA) if kind == "laplacian" else ops.gaussian_kernel
    matmul = partial(ops.laplacian_kernel_matmul, lambda_=LAMBDA) if kind == "laplacian" else ops.gaussian_kernel_matmul
    return {
        f"{kind}_kernel": (
            partial(kernel, backend="compiled"),
            lambda q, k: exponents(kind, q, k).exp(),
        ),
        f"{kind}_kernel_matmul": (
            partial(matmul, backend="compiled"),
            lambda q, k, v: exponents(kind, q, k).exp() @ v,
        ),
        f"{kind}_kernel_matmul normalized": (
            partial(matmul, normalize=True, backend="compiled"),
            lambda q, k, v: torch.softmax(exponents(kind, q, k), -1) @ v,
        ),
    }


def _draw(purpose: str, index: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(0, f"check {purpose}", index), dtype=torch.float64)


def _tokens(sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in float64 on the CPU, scaled as the layers do, with a whole tie and ties in single channels."""
    slices, tokens, landmarks, channels, values = sizes
    spread = max(channels, 1) ** -0.25
    q = spread * _draw(f"q {sizes}", 0, slices, tokens, channels)
    k = spread * _draw(f"k {sizes}", 0, slices, landmarks, channels)
    if min(q.numel(), k.numel()) > 0:
        k[:, 0] = q[:, 0]
        k[:, -1, ::2] = q[:, -1, ::2]
    return q, k, _draw(f"v {sizes}", 0, slices, landmarks, values)


def _compare(
    name: str,
    function: Callable[..., Tensor],
    definition: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    device: torch.device,
    bound: float | None = None,
) -> Check:
    """Output and gradients on the inputs as `dtype` rounds them, against the definition in float64 on the CPU."""
    rounded = [x.to(dtype) for x in inputs]
    leaves = [x.to(device).detach().requires_grad_() for x in rounded]
    exact = [x.double().detach().requires_grad_() for x in rounded]
    output, expected = function(*leaves), definition(*exact)
    grad = _draw(f"gradient {name}", 0, *expected.shape).to(dtype)
    found = [output, *torch.autograd.grad(output, leaves, grad.to(device))]
    wanted = [expected, *torch.autograd.grad(expected, exact, grad.double())]
    # A gradient that cancels to 0 is held to the rounding of what cancelled.
    least = 1e-2 * max((float(x.detach().abs().max()) for x in wanted if x.numel()), default=0.0)
    error = max(_error(a, b, least) for a, b in zip(found, wanted, strict=True))
    bound = _BOUNDS[dtype] if bound is None else bound
    return Check(f"{name} {str(dtype).removeprefix('torch.')}", error <= bound, f"error {error:.1e} of {bound:.0e}")


def _error(found: Tensor, expected: Tensor, least: float = 1e-30) -> float:
    """Largest difference over the largest number expected, or `least`; infinite for another shape or a NaN."""
    if found.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    scale = expected.detach().abs().max().clamp_min(max(least, 1e-30))
    difference = float(((found.detach().double().cpu() - expected.detach()).abs().max()) / scale)
    return math.inf if math.isnan(difference) else difference


def _kernels(device: torch.device, sizes: Sequence[Sequence[int]]) -> Iterator[Check]:
    for kind in ("laplacian", "gaussian"):
        for name, (function, definition) in _operators(kind).items():
            for number, size in enumerate(sizes):
                q, k, v = _tokens(size)
                inputs = (q, k, v) if "matmul" in name else (q, k)
                wide = (torch.float32, torch.float64)
                for dtype in (*wide, *_HALF) if number == 1 else wide:
                    if 0 in size and "normalized" in name and size[2] == 0:
                        definition_here: Callable[..., Tensor] = _empty_product
                    else:
                        definition_here = definition
                    yield _compare(f"{name} {tuple(size)}", function, definition_here, inputs, dtype, device)


def _empty_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Without landmarks a product is 0, whatever it would be divided by; it still depends on its inputs in name."""
    return q.sum(-1, keepdim=True) * 0 @ v.sum(-2, keepdim=True) + k.sum() * 0


def _layouts(device: torch.device) -> Iterator[Check]:
    """Transposed and broadcast inputs."""
    q, k, v = _tokens((6, 37, 11, 20, 8))
    for kind in ("laplacian", "gaussian"):
        for name, (function, definition) in _operators(kind).items():
            inputs = [q, k[:1].expand_as(k), v] if "matmul" in name else [q, k[:1].expand_as(k)]

            def transposed(*tensors: Tensor, function: Callable[..., Tensor] = function) -> Tensor:
                return function(*(x.mT.contiguous().mT for x in tensors))

            yield _compare(f"{name} transposed", transposed, definition, inputs, torch.float32, device)


def _ties(device: torch.device) -> Iterator[Check]:
    """Where queries and landmarks are equal, no gradient at all."""
    q = _draw("ties", 0, 2, 5, 7).float().to(device)
    leaves = [q.clone().requires_grad_(), q.clone().requires_grad_()]
    for kind in ("laplacian", "gaussian"):
        kernel, _ = _operators(kind)[f"{kind}_kernel"]
        diagonal = kernel(*leaves).diagonal(dim1=-2, dim2=-1)
        gradients = torch.autograd.grad(diagonal.sum(), leaves)
        largest = max(float(gradient.abs().max()) for gradient in gradients)
        yield Check(f"{kind}_kernel gradient at ties", largest == 0.0, f"largest {largest:g}")


def _far_apart(device: torch.device) -> Iterator[Check]:
    """Rows whose every value underflows are still normalised exactly, and no product is NaN."""
    tokens, k, v = _tokens((2, 19, 13, 16, 8))
    for kind, step in (("laplacian", 40.0), ("gaussian", 5.0)):
        q = tokens + step * (torch.arange(19) % 4)[:, None]  # beyond the first, exponents of -128 and less
        for name, (function, definition) in _operators(kind).items():
            if "matmul" in name:
                yield _compare(f"{name} far apart", function, definition, (q, k, v), torch.float32, device, 1e-3)


def _offsets(device: torch.device) -> Iterator[Check]:
    """A large common offset costs no digits: the definition sees the same rounded inputs."""
    q, k, v = _tokens((2, 43, 17, 24, 8))
    for kind in ("laplacian", "gaussian"):
        for name, (function, definition) in _operators(kind).items():
            inputs = [q + 1000.0, k + 1000.0, v] if "matmul" in name else [q + 1000.0, k + 1000.0]
            yield _compare(f"{name} offset", function, definition, inputs, torch.float32, device)


def _same_bits(device: torch.device) -> Iterator[Check]:
    """Twice the same, and the same alone as in a batch: outputs and gradients."""
    q, k, v = (x.float().to(device) for x in _tokens((5, 523, 49, 32, 32)))
    W = _landmark_matrices(5, 49).float().to(device)
    for kind in ("laplacian", "gaussian"):
        for name, (function, _) in _operators(kind).items():
            yield _bits(name, function, (q, k, v) if "matmul" in name else (q, k))
    for name, inverse in _inverse_operators().items():
        yield _bits(name, inverse, (W,))


def _bits(name: str, function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Check:
    def passes(tensors: Sequence[Tensor]) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        output = function(*leaves)
        grad = _draw(f"bits {name}", 0, 5, *output.shape[1:])[-len(output) :].to(output)
        return [output, *torch.autograd.grad(output, leaves, grad)]

    first, second = passes(inputs), passes(inputs)
    alone = passes([x[-1:] for x in inputs])
    twice = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    batch = all(torch.equal(a[-1:], b) for a, b in zip(first, alone, strict=True))
    return Check(f"{name} bits", twice and batch, f"twice the same: {twice}; alone as in a batch: {batch}")


def _inverse_operators() -> dict[str, Callable[..., Tensor]]:
    return {
        "spd_inverse": partial(ops.spd_inverse, eps=EPS, backend="compiled"),
        "newton_schulz_inverse from the paper's start": partial(_newton_schulz, start="paper", iterations=40),
        "newton_schulz_inverse from the identity": partial(_newton_schulz, start="identity", iterations=30),
    }


def _newton_schulz(W: Tensor, start: str, iterations: int) -> Tensor:
    inverse, _ = ops.newton_schulz_inverse(W, iterations, EPS, start=start, backend="compiled")  # type: ignore[arg-type]
    return inverse


def _landmark_matrices(count: int, size: int) -> Tensor:
    x = _draw("landmark matrices", size, count, size, 16)
    W = torch.exp(-torch.cdist(x, x, p=1.0) / 16.0)
    return (W + W.mT) / 2


def _inverses(device: torch.device, sizes: Sequence[int]) -> Iterator[Check]:
    for name, inverse in _inverse_operators().items():
        for size in sizes:
            for dtype in (torch.float32, torch.float64):
                W = _landmark_matrices(3, size)
                bound = LARGEST_ERROR_OF_AN_INVERSE if dtype == torch.float32 else 1e-9

                def symmetric(W: Tensor, inverse: Callable[..., Tensor] = inverse) -> Tensor:
                    X = inverse(W)
                    return X + X.mT  # so that the gradient of X is symmetric, as some inverses take it to be

                def definition(W: Tensor) -> Tensor:
                    X = torch.linalg.inv(W + EPS * torch.eye(W.shape[-1], dtype=W.dtype))
                    return X + X.mT

                yield _compare(f"{name} of {size}", symmetric, definition, (W,), dtype, device, bound)


def _hard_matrices(device: torch.device) -> Iterator[Check]:
    """What cannot be inverted is reported: by the residual, or by an error that names the matrix."""
    good, ones = _landmark_matrices(1, 17)[0], torch.ones(17, 17, dtype=torch.float64)
    basis, _ = torch.linalg.qr(_draw("basis", 0, 17, 17))
    steep = basis * torch.logspace(0, -6, 17, dtype=torch.float64) @ basis.mT
    zero = torch.zeros_like(good)
    batch = torch.stack([good, ones, steep, zero]).float().to(device)
    inverse, residual = ops.newton_schulz_inverse(batch, 20, 0.0, backend="compiled")
    told = bool(torch.isfinite(inverse[[0, 2, 3]]).all()) and bool((residual[1:] > 0.5).all())
    yield Check("newton_schulz_inverse of singular matrices", told, f"residuals {residual.cpu().tolist()}")
    try:
        ops.spd_inverse(torch.stack([good, -good]).float().to(device), 0.0, backend="compiled")
    except torch.linalg.LinAlgError as error:
        yield Check("spd_inverse of an indefinite matrix", "1" in str(error), str(error))
    else:
        yield Check("spd_inverse of an indefinite matrix", False, "no error")


def _side_stream(device: torch.device) -> Iterator[Check]:
    """On another stream, behind work that has not yet written the inputs, the bits of the usual stream."""
    q, k, v = (x.float().to(device) for x in _tokens((2, 67, 13, 32, 32)))
    W = _landmark_matrices(3, 49).float().to(device)
    functions: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]
    functions = {name: (inverse, (W,)) for name, inverse in _inverse_operators().items()}
    for kind in ("laplacian", "gaussian"):
        for name, (function, _) in _operators(kind).items():
            functions[name] = (function, (q, k, v) if "matmul" in name else (q, k))
    stream = torch.cuda.Stream(device)
    for name, (function, inputs) in functions.items():
        expected = function(*inputs)
        late = [torch.zeros_like(x) for x in inputs]
        torch.cuda.synchronize(device)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10**8)  # cycles
            for unwritten, x in zip(late, inputs, strict=True):
                unwritten.copy_(x)
            try:
                found = function(*late)
            except torch.linalg.LinAlgError:  # of zeros
                found = None
        torch.cuda.synchronize(device)
        same = found is not None and torch.equal(found, expected)
        yield Check(f"{name} on another stream", same, f"the same bits: {same}")


def _long_offsets(device: torch.device) -> Iterator[Check]:
    """More than 2^31 kernel values: the last ones are in their place. Left out where the memory does not suffice."""
    free, _ = torch.cuda.mem_get_info(device)
    if free < 3 * 4 * _LARGE**2:
        return
    backend.forget()
    q, k, v = (x.float().to(device) for x in _tokens((1, _LARGE, _LARGE, 4, 4)))
    last = slice(_LARGE - 3, None)
    for kind in ("laplacian", "gaussian"):
        for name, (function, definition) in _operators(kind).items():
            if "matmul" in name:
                found = function(q, k, v)[:, last]
                expected = definition(q[:, last].double(), k.double(), v.double())
            else:
                kernel = function(q, k)
                found, expected = kernel[:, last], definition(q[:, last].double(), k.double())
                del kernel
            error = _error(found, expected.cpu())
            yield Check(f"{name} beyond 2^31 values", error <= LARGEST_ERROR, f"error {error:.1e}")
