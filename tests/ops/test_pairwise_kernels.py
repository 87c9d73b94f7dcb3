"""Laws of the pairwise kernels and of their products with values: every kind, form and implementation."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attngeo.errors import UserError
from attngeo.ops import backend as ops_backend
from attngeo.ops.backend import ran
from tests.ops.references import FORMS, GAUSSIAN, KINDS, Kind, kernel_bound, relative_error, rounding_bounds
from tests.tolerances import (
    BFLOAT16_ROUNDING,
    FAR_ROWS_FLOAT32,
    FLOAT16_ROUNDING,
    FLOAT64_RELATIVE,
    KERNEL_PEAK_SCORES,
    MATMUL_PEAK_INPUTS,
)

# (B, H, N, M, D, V): one, primes, sizes around vectors and blocks, empty axes.
Sizes = tuple[int, int, int, int, int, int]
SIZES: list[Sizes] = [
    (1, 1, 1, 1, 1, 1),
    (2, 3, 7, 5, 33, 5),
    (1, 2, 17, 13, 31, 1),
    (2, 1, 16, 64, 16, 16),
    (1, 1, 67, 1, 257, 3),
    (1, 2, 523, 49, 32, 37),
    (1, 1, 5, 131, 8, 67),
    (1, 1, 3, 1031, 2, 2),
    (0, 2, 3, 4, 5, 6),
    (2, 2, 0, 4, 5, 6),
    (2, 2, 3, 0, 5, 6),
    (2, 2, 3, 4, 0, 6),
    (2, 2, 3, 4, 5, 0),
]


def tokens(sizes: Sizes, dtype: torch.dtype, offset: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """q [B,H,N,D], k [B,H,M,D] with whole ties and ties in single channels, and v [B,H,M,V]."""
    batch, heads, rows, landmarks, channels, values = sizes
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        return torch.randn(batch, heads, *shape, generator=generator, dtype=torch.float64)

    q = (offset + draw(rows, channels)).to(dtype)
    k = (offset + draw(landmarks, channels)).to(dtype)
    if min(q.numel(), k.numel()) > 0:
        k[..., 0, :] = q[..., 0, :]
        k[..., -1, ::2] = q[..., -1, ::2]
    return q.requires_grad_(), k.requires_grad_(), draw(landmarks, values).to(dtype).requires_grad_()


def like_outputs(output: Tensor, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)


def results(
    kind: Kind, form: str, backend: str, leaves: tuple[Tensor, ...], weight: Tensor | None = None
) -> list[Tensor]:
    """Output and gradients of the leaves that the form depends on."""
    output = kind.apply(form, *leaves, backend=backend)
    used = leaves[:2] if form == "kernel" else leaves
    grads = torch.autograd.grad(output, used, like_outputs(output) if weight is None else weight)
    return [output.detach(), *grads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values_and_gradients_equal_the_definition(
    sizes: Sizes, dtype: torch.dtype, kind: Kind, form: str, backend: str
) -> None:
    check_against_the_definition(sizes, dtype, kind, form, backend)


def check_against_the_definition(
    sizes: Sizes, dtype: torch.dtype, kind: Kind, form: str, backend: str, offset: float = 0.0
) -> None:
    leaves = tokens(sizes, dtype, offset)
    output, *grads = results(kind, form, backend, leaves)
    weight = like_outputs(output)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = kind.reference(form, *wide)
    expected_grads = torch.autograd.grad(expected, wide[: len(grads)], weight.double())
    assert output.dtype == dtype
    assert output.shape == expected.shape
    bounds = rounding_bounds(kind, form, *leaves, weight, dtype, centred=backend == "naive")
    assert ((output - expected).abs() <= bounds.output).all()
    for name, grad, expected_grad in zip("qkv", grads, expected_grads, strict=False):
        assert ((grad - expected_grad).abs() <= getattr(bounds, name)).all(), name


@pytest.mark.parametrize(("dtype", "offset"), [(torch.float32, 1e3), (torch.float32, -1e5), (torch.float64, 1e9)])
def test_what_all_tokens_have_in_common_costs_no_digit(
    dtype: torch.dtype, offset: float, kind: Kind, form: str, backend: str
) -> None:
    # The bounds are those of differences of the rounded tokens: they know nothing of the offset.
    check_against_the_definition((1, 2, 23, 11, 7, 3), dtype, kind, form, backend, offset)


def test_ties_are_one_and_get_no_gradient(kind: Kind, form: str, backend: str) -> None:
    q, k = (torch.full((1, 1, rows, 19), 0.375, requires_grad=True) for rows in (5, 3))
    v = torch.ones(1, 1, 3, 2)
    output = kind.apply(form, q, k, v, backend)
    expected = {"kernel": 1.0, "matmul": 3.0, "normalized": 1.0}[form]
    torch.testing.assert_close(output, torch.full_like(output, expected))
    assert form == "normalized" or (output == expected).all()
    for grad in torch.autograd.grad(output, (q, k), like_outputs(output)):
        assert (grad == 0).all()


def test_products_are_those_of_the_matrix(kind: Kind, backend: str) -> None:
    q, k, v = tokens((2, 3, 29, 13, 9, 5), torch.float64)
    K = kind.apply("kernel", q, k, v, backend)
    for form, weights in (("matmul", K), ("normalized", K / K.sum(-1, keepdim=True))):
        output = kind.apply(form, q, k, v, backend)
        torch.testing.assert_close(output, weights @ v, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)
    # The kernel is symmetric: exchanged tokens give the product with the transposed matrix, the landmarks' side.
    w = torch.randn(2, 3, 29, 4, dtype=torch.float64)
    back = kind.apply("matmul", k, q, w, backend)
    torch.testing.assert_close(back, K.mT @ w, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_underflow_are_zero_and_their_normalised_form_is_exact(
    dtype: torch.dtype, kind: Kind, backend: str
) -> None:
    # Rows 0 and 1 are so far from every landmark that all kernel values of theirs vanish; row 2 is a landmark.
    far = [1e5, -2e4] if kind.name == "laplacian" else [300.0, -60.0]
    q = torch.tensor([*far, 0.25], dtype=dtype).reshape(1, 1, 3, 1).requires_grad_()
    k = torch.tensor([[0.0], [0.25], [0.25 + 2.0**-10]], dtype=dtype).reshape(1, 1, 3, 1).requires_grad_()
    v = torch.tensor([[1.0, 2.0], [3.0, 5.0], [7.0, 11.0]], dtype=dtype).reshape(1, 1, 3, 2).requires_grad_()
    assert (kind.apply("kernel", q, k, v, backend)[0, 0, :2] == 0).all()
    plain, *grads = results(kind, "matmul", backend, (q, k, v))
    assert (plain[0, 0, :2] == 0).all()
    assert all(grad.isfinite().all() for grad in grads)
    output, *grads = results(kind, "normalized", backend, (q, k, v))
    wide = [leaf.detach().double().requires_grad_() for leaf in (q, k, v)]
    expected = kind.reference("normalized", *wide)
    weight = like_outputs(output)
    bounds = rounding_bounds(kind, "normalized", q, k, v, weight, dtype, centred=backend == "naive")
    assert ((output - expected).abs() <= bounds.output).all()
    for name, grad, expected_grad in zip(
        "qkv", grads, torch.autograd.grad(expected, wide, weight.double()), strict=True
    ):
        assert grad.isfinite().all()
        assert ((grad - expected_grad).abs() <= getattr(bounds, name)).all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("distance", [1e5, 1e7, 1e8, 1e10])
def test_equal_landmarks_share_the_gradient_of_rows_however_far(
    distance: float, dtype: torch.dtype, kind: Kind, backend: str
) -> None:
    # The logarithm of 64 is lost beside these distances: a row's sum has to be kept apart from them.
    q, k = torch.full((1, 1), distance, dtype=dtype), torch.zeros(64, 1, dtype=dtype)
    v = torch.ones(64, 1, dtype=dtype, requires_grad=True)
    output = kind.apply("normalized", q, k, v, backend)
    (grad,) = torch.autograd.grad(output.sum(), v)
    assert output.item() == 1.0
    assert (grad == 1.0 / 64).all()


def test_landmarks_that_round_to_one_distance_share_the_gradient(kind: Kind, backend: str) -> None:
    q, k = torch.tensor([[1e10, 1e10], [-1e10, -1e10]]), torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    v = torch.ones(2, 1, requires_grad=True)
    kind.apply("normalized", q, k, v, backend).sum().backward()
    assert v.grad is not None
    assert (v.grad == 1.0).all()


@pytest.mark.parametrize("spread", [10.0, 100.0, 300.0])
def test_gradients_of_rows_whose_kernel_underflows_are_exact(spread: float, backend: str) -> None:
    generator = torch.Generator().manual_seed(5)
    q, k = (spread * torch.randn(rows, 32, generator=generator) for rows in (37, 2))
    k = torch.cat([k[:1].expand(48, 32), k[1:]])  # the copies share what is nearest to them
    leaves = tuple(leaf.requires_grad_() for leaf in (q, k, torch.randn(49, 5, generator=generator)))
    output, _, *grads = results(GAUSSIAN, "normalized", backend, leaves)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = GAUSSIAN.reference("normalized", *wide)
    exact = torch.autograd.grad(expected, wide[1:], like_outputs(output).double())
    for value, reference in zip((output, *grads), (expected, *exact), strict=True):
        assert relative_error(value, reference) <= FAR_ROWS_FLOAT32


def test_a_row_whose_distances_all_overflow_is_nan(backend: str) -> None:
    # |q - k|^2 = 1e40 is no float32. Which landmark is nearest is unknown, and nothing hides that.
    q, k = torch.tensor([[1e20], [2.0], [0.0]], requires_grad=True), torch.tensor([[1.0], [3.0], [1e20]])
    v = torch.tensor([[1.0], [2.0], [4.0]])
    output = GAUSSIAN.apply("normalized", q[:2], k[:2], v[:2], backend)
    assert output[0].isnan().all()
    torch.testing.assert_close(output[1], torch.tensor([1.5]))
    # One that overflows beside others has no weight.
    beside = GAUSSIAN.apply("normalized", q[1:], k, v, backend)
    torch.testing.assert_close(beside, GAUSSIAN.reference("normalized", q[1:], k, v).detach().float())
    (grad,) = torch.autograd.grad(beside.sum(), q)
    assert grad.isfinite().all()


def test_the_smallest_kernel_values_are_gradual(kind: Kind, backend: str) -> None:
    # exp(-99) and exp(-740) lie below the normal numbers of float32 and float64: they are not flushed to zero.
    for dtype, exponent in ((torch.float32, 99.0), (torch.float64, 740.0)):
        distance = exponent / -kind.scale
        k = torch.tensor([distance if kind.name == "laplacian" else math.sqrt(distance)], dtype=dtype).reshape(
            1, 1, 1, 1
        )
        value = kind.apply("kernel", torch.zeros_like(k), k, k, backend)
        expected = kind.exponent(torch.zeros_like(k), k)
        spacing = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        assert value.item() > 0
        assert abs(value.item() - math.exp(expected.item())) <= kernel_bound(kind, expected, 1, dtype).item() + spacing


def test_infinitely_distant_tokens_give_zero(kind: Kind, backend: str) -> None:
    for distance in (1e30, math.inf):
        q, k = torch.zeros(1, 1, 1, 2), torch.tensor([0.0, distance]).reshape(1, 1, 1, 2)
        assert kind.apply("kernel", q, k, k, backend).item() == 0.0


def test_nan_stays_in_its_own_rows_and_is_never_hidden(kind: Kind, form: str, backend: str) -> None:
    q, k, v = (tensor.detach() for tensor in tokens((2, 1, 7, 5, 33, 3), torch.float32))
    clean = kind.apply(form, q, k, v, backend)
    poisoned = q.clone()
    poisoned[0, 0, 3, 2] = torch.nan
    output = kind.apply(form, poisoned, k, v, backend)
    others = [0, 1, 2, 4, 5, 6]
    assert output[0, 0, 3].isnan().all()
    torch.testing.assert_close(output[0, 0, others], clean[0, 0, others], rtol=1e-6, atol=0)
    assert output[1].isfinite().all()
    poisoned = k.clone()
    poisoned[0, 0, 1, 0] = torch.nan
    output = kind.apply(form, q, poisoned, v, backend)
    hit = output[0, 0, :, 1] if form == "kernel" else output[0, 0]
    assert hit.isnan().all()
    assert output[1].isfinite().all()


def test_gradcheck(kind: Kind, form: str, backend: str) -> None:
    q, k, v = (tensor.detach().requires_grad_() for tensor in tokens((1, 2, 5, 3, 7, 2), torch.float64))
    k = (k.detach() + 0.05).requires_grad_()  # away from the kinks, where finite differences mean nothing
    assert torch.autograd.gradcheck(lambda *leaves: kind.apply(form, *leaves, backend=backend), (q, k, v))


def test_a_second_derivative_is_exact_in_the_naive_form_and_refused_by_the_compiled_one(
    kind: Kind, form: str, extension: None
) -> None:
    q, k, v = (tensor.detach().requires_grad_() for tensor in tokens((1, 1, 3, 2, 5, 2), torch.float64))
    apart = k if kind.name == "gaussian" else (k.detach() + 0.05).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda *leaves: kind.apply(form, *leaves, backend="naive"), (q, apart, v))
    output = kind.apply(form, q, k, v, "compiled")
    (grad_q,) = torch.autograd.grad(output.square().sum(), q, create_graph=True)
    message = f"the compiled {kind.operator(form)} has no second derivative: use backend='naive'"
    with pytest.raises(NotImplementedError, match=message):
        grad_q.sum().backward()


def test_strided_and_expanded_tensors_equal_their_copies(kind: Kind, form: str, backend: str) -> None:
    q = torch.randn(2, 11, 3, 5).permute(0, 2, 1, 3)  # as a projection split into heads
    k = torch.randn(1, 1, 4, 10)[..., ::2].expand(2, 3, 4, 5)
    v = torch.randn(2, 3, 6, 4).mT.contiguous(memory_format=torch.channels_last).flip(-1)
    assert not q.is_contiguous()
    leaves = tuple(tensor.detach().requires_grad_() for tensor in (q, k, v))
    copies = tuple(tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for tensor in leaves)
    weight = torch.randn(()).expand(kind.apply(form, *copies, backend=backend).shape)  # as of a sum: stride 0
    found = results(kind, form, backend, leaves, weight)
    expected = results(kind, form, backend, copies, weight.contiguous())
    for value, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-6)
        assert backend == "naive" or torch.equal(value, reference)


def test_leading_axes_broadcast(kind: Kind, form: str, backend: str) -> None:
    q, k, v = torch.randn(2, 1, 7, 5), torch.randn(3, 4, 5), torch.randn(5, 1, 1, 4, 2)
    leaves = tuple(tensor.requires_grad_() for tensor in (q, k, v))
    output, *grads = results(kind, form, backend, leaves)
    leading = (2, 3) if form == "kernel" else (5, 2, 3)
    assert output.shape == (*leading, 7, 4 if form == "kernel" else 2)
    torch.testing.assert_close(output, kind.reference(form, q, k, v).detach().float(), rtol=1e-5, atol=1e-6)
    assert [grad.shape for grad in grads] == [leaf.shape for leaf in leaves[: len(grads)]]
    without_heads = kind.apply(form, q[0, 0], k[0], v[0, 0, 0], backend)
    assert without_heads.shape == output.shape[-2:]


def test_a_sample_does_not_depend_on_its_batch_mates(kind: Kind, form: str, extension: None) -> None:
    whole_leaves = tokens((3, 2, 301, 7, 33, 5), torch.float32)
    alone_leaves = tuple(leaf.detach()[1:2].requires_grad_() for leaf in whole_leaves)
    weight = like_outputs(kind.apply(form, *whole_leaves, backend="compiled"))
    whole = results(kind, form, "compiled", whole_leaves, weight)
    alone = results(kind, form, "compiled", alone_leaves, weight[1:2])
    assert all(torch.equal(part, full[1:2]) for part, full in zip(alone, whole, strict=True))


@pytest.mark.parametrize("sizes", [(1, 1, 2003, 49, 33, 17), (4, 2, 67, 13, 32, 32), (1, 1, 1031, 1031, 8, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bits_are_the_same_twice_and_for_any_number_of_threads(
    sizes: Sizes, dtype: torch.dtype, kind: Kind, form: str, extension: None
) -> None:
    leaves = tokens(sizes, dtype)
    threads = torch.get_num_threads()
    runs = []
    try:
        for count in (1, 2, 3, 3):
            torch.set_num_threads(count)
            runs.append(results(kind, form, "compiled", leaves))
    finally:
        torch.set_num_threads(threads)
    for other in runs[1:]:
        assert all(torch.equal(first, second) for first, second in zip(runs[0], other, strict=True))


@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.bfloat16, BFLOAT16_ROUNDING), (torch.float16, FLOAT16_ROUNDING)]
)
def test_half_precision_is_computed_in_float32(
    dtype: torch.dtype, rounding: float, kind: Kind, form: str, backend: str
) -> None:
    leaves = tokens((2, 3, 17, 5, 9, 7), dtype)
    expected = kind.reference(form, *leaves).detach()
    limit = rounding_bounds(
        kind, form, *leaves, torch.zeros_like(expected), torch.float32, centred=backend == "naive"
    ).output
    output, *grads = results(kind, form, backend, leaves)
    assert output.dtype == dtype
    assert ((output - expected).abs() <= rounding * expected.abs() + limit + torch.finfo(dtype).smallest_normal).all()
    assert all(grad.dtype == dtype and grad.isfinite().all() for grad in grads)
    with torch.autocast("cpu", dtype=dtype):
        inside, *grads = results(kind, form, backend, leaves)
    assert inside.dtype == torch.float32
    assert ((inside - expected).abs() <= limit).all()
    assert all(grad.dtype == dtype and grad.isfinite().all() for grad in grads)


def test_autocast_changes_no_bit_of_float32(kind: Kind, form: str, backend: str) -> None:
    leaves = tokens((1, 2, 17, 5, 33, 7), torch.float32)
    outside = results(kind, form, backend, leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = kind.apply(form, *leaves, backend=backend)
    grads = torch.autograd.grad(output, leaves[: len(outside) - 1], like_outputs(output))
    assert all(torch.equal(first, second) for first, second in zip(outside, (output, *grads), strict=True))


def operator(kind: Kind, form: str) -> torch._ops.OpOverloadPacket:
    found: torch._ops.OpOverloadPacket = getattr(torch.ops.attngeo, kind.operator(form))
    return found


def arguments(kind: Kind, form: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor | float | bool, ...]:
    """Arguments of the registered operator of a form."""
    if form == "kernel":
        return q, k, *kind.options
    return q, k, v, *kind.options, form == "normalized"


def test_autocast_reaches_the_registered_operators_themselves(kind: Kind, form: str, extension: None) -> None:
    half = tokens((1, 1, 3, 2, 5, 4), torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = operator(kind, form)(*arguments(kind, form, *half))
    assert {output.dtype for output in (outputs if isinstance(outputs, tuple) else (outputs,))} == {torch.float32}


def test_a_backward_pass_inside_autocast_is_the_one_outside(kind: Kind, form: str, extension: None) -> None:
    leaves = tokens((1, 2, 17, 5, 33, 7), torch.float32)
    outside = results(kind, form, "compiled", leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = results(kind, form, "compiled", leaves)
    assert all(torch.equal(first, second) for first, second in zip(outside, inside, strict=True))


def test_the_nearest_distances_and_row_sums_carry_no_gradient(kind: Kind, extension: None) -> None:
    leaves = tokens((1, 1, 7, 5, 3, 2), torch.float64)
    output, origin, total = operator(kind, "normalized")(*arguments(kind, "normalized", *leaves))
    assert output.requires_grad
    assert not origin.requires_grad
    assert not total.requires_grad
    exponent = kind.exponent(*leaves[:2]).detach()
    nearest = exponent.amax(-1, keepdim=True)
    for found, expected in ((kind.scale * origin, nearest.squeeze(-1)), (total, (exponent - nearest).exp().sum(-1))):
        torch.testing.assert_close(found, expected, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)
    _, origin, total = operator(kind, "matmul")(*arguments(kind, "matmul", *leaves))
    assert (origin == 0).all()
    assert (total == 1).all()


@pytest.mark.parametrize("sizes", [(1, 2, 7, 5, 3, 2), (2, 1, 3, 0, 5, 2), (0, 1, 3, 2, 5, 4)], ids=str)
def test_opcheck(sizes: Sizes, kind: Kind, form: str, extension: None) -> None:
    q, k, v = tokens(sizes, torch.float32)
    call = arguments(kind, form, q, k, v)
    torch.library.opcheck(operator(kind, form), call)
    name = f"{kind.operator(form)}_backward" if form == "kernel" else f"{kind.name}_kernel_relative_matmul_backward"
    backward = getattr(torch.ops.attngeo, name)
    q, k, v = q.detach(), k.detach(), v.detach()
    if form == "kernel":
        kernel = kind.apply(form, q, k, v, "compiled")
        torch.library.opcheck(backward, (torch.ones_like(kernel), q, k, kernel, *kind.options))
    else:
        output, origin, _ = operator(kind, form)(*(a.detach() if isinstance(a, Tensor) else a for a in call))
        grad = torch.ones_like(output)
        torch.library.opcheck(backward, (grad, q, k, v, origin, torch.zeros_like(origin), *kind.options))


# The second size makes the graph dynamic.
@pytest.mark.parametrize(
    ("backend", "compiler", "rows"),
    [("naive", "aot_eager", (7,)), ("compiled", "aot_eager", (7, 12)), ("compiled", "inductor", (7,))],
)
def test_torch_compile_takes_them_whole_and_agrees(
    backend: str, compiler: str, rows: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    if backend == "compiled":
        request.getfixturevalue("extension")

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outputs = [kind.apply(form, 2.0 * q, k, v, backend) for kind in KINDS for form in FORMS]
        return sum((output.square().sum() for output in outputs), torch.zeros(()))

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    # A graph on disk may be of an earlier build: torch does not look at how the operators are differentiated.
    with torch.compiler.config.patch(force_disable_caches=True):
        for count in rows:
            leaves = tokens((1, 2, count, 5, 3, 4), torch.float32)
            value, expected = compiled(*leaves), step(*leaves)
            torch.testing.assert_close(value, expected)
            for grad, expected_grad in zip(
                torch.autograd.grad(value, leaves), torch.autograd.grad(expected, leaves), strict=True
            ):
                torch.testing.assert_close(grad, expected_grad)


def test_vmap_equals_a_loop(kind: Kind, form: str, backend: str) -> None:
    q, k, v = tokens((3, 2, 5, 4, 7, 2), torch.float64)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kind.apply(form, q, k, v, backend)

    mapped = torch.vmap(call, in_dims=(0, None, 1))(q, k[0], v.transpose(0, 1))
    looped = torch.stack([call(one, k[0], values) for one, values in zip(q, v, strict=True)])
    torch.testing.assert_close(mapped, looped, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)
    leaves = (q, k) if form == "kernel" else (q, k, v)
    for grad, expected in zip(
        torch.autograd.grad(mapped.square().sum(), leaves),
        torch.autograd.grad(looped.square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(grad, expected, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)


def test_functional_gradients_are_refused_by_the_compiled_form_and_work_in_the_naive_one(
    kind: Kind, form: str, extension: None
) -> None:
    q, k, v = (tensor.detach() for tensor in tokens((1, 1, 3, 2, 5, 2), torch.float64))
    gradient = torch.func.grad(lambda a: kind.apply(form, a, k, v, "naive").sum())(q)
    assert gradient.isfinite().all()
    assert torch.equal(torch.func.grad(lambda a: kind.apply(form, a, k, v).sum())(q), gradient)
    with pytest.raises(UserError, match=rf"^{kind.operator(form)}: .*torch.func's derivatives\n.*backend='naive'"):
        torch.func.grad(lambda a: kind.apply(form, a, k, v, "compiled").sum())(q)


def test_shapes_that_do_not_fit_are_named(kind: Kind, form: str, backend: str) -> None:
    q, k, v = torch.ones(1, 1, 2, 3), torch.ones(1, 1, 4, 3), torch.ones(1, 1, 4, 5)
    with pytest.raises(ValueError, match=r"\(1, 1, 2, 3\) and \(1, 1, 4, 2\)"):
        kind.apply(form, q, k[..., :2], v, backend)
    if form != "kernel":
        with pytest.raises(ValueError, match=r"values \[\.\.\., 4, V\].*\(1, 1, 3, 5\)"):
            kind.apply(form, q, k, v[:, :, :3], backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_instruction_set_obeys_the_same_laws(variant: str, dtype: torch.dtype, kind: Kind, form: str) -> None:
    for sizes in SIZES:
        check_against_the_definition(sizes, dtype, kind, form, "compiled")
    test_ties_are_one_and_get_no_gradient(kind, form, "compiled")
    test_rows_that_underflow_are_zero_and_their_normalised_form_is_exact(dtype, kind, "compiled")
    for distance in (1e5, 1e7, 1e8, 1e10):
        test_equal_landmarks_share_the_gradient_of_rows_however_far(distance, dtype, kind, "compiled")
    test_landmarks_that_round_to_one_distance_share_the_gradient(kind, "compiled")
    for spread in (10.0, 100.0, 300.0):
        test_gradients_of_rows_whose_kernel_underflows_are_exact(spread, "compiled")
    test_a_row_whose_distances_all_overflow_is_nan("compiled")
    test_the_smallest_kernel_values_are_gradual(kind, "compiled")
    test_infinitely_distant_tokens_give_zero(kind, "compiled")
    test_nan_stays_in_its_own_rows_and_is_never_hidden(kind, form, "compiled")
    test_a_sample_does_not_depend_on_its_batch_mates(kind, form, None)
    assert f"compiled cpu {variant}" in ran()[kind.operator(form)]


def test_torchs_faster_products_change_nothing(kind: Kind, form: str, backend: str) -> None:
    leaves = tokens((1, 2, 17, 5, 33, 7), torch.float32)
    weight = like_outputs(kind.apply(form, *leaves, backend=backend))
    try:
        torch.set_float32_matmul_precision("medium")
        found = results(kind, form, backend, leaves, weight)
    finally:
        torch.set_float32_matmul_precision("highest")
    # Where torch would round the factors the naive form goes by float64, and so may differ in the last bits.
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = kind.reference(form, *wide)
    exact = [expected, *torch.autograd.grad(expected, wide[: len(found) - 1], weight.double())]
    bounds = rounding_bounds(kind, form, *leaves, weight, torch.float32, centred=backend == "naive")
    for name, value, reference in zip(("output", "q", "k", "v"), found, exact, strict=False):
        assert ((value - reference).abs() <= getattr(bounds, name)).all()
    if backend == "compiled":
        usual = results(kind, form, backend, leaves, weight)
        assert all(torch.equal(first, second) for first, second in zip(found, usual, strict=True))


# One channel and 46,349^2 > 2^31 pairs, so that it takes seconds.
MANY = 46_349


def far_rows(kind: Kind, tokens: Tensor, of: Tensor) -> Tensor:
    """Kernel values of the last tokens with all others, float64."""
    return kind.exponent(tokens[:, :, -2:], of).exp()[0, 0]


def test_more_pairs_than_32_bits_count(kind: Kind, extension: None) -> None:
    tokens, values = torch.linspace(-1, 1, MANY).reshape(1, 1, -1, 1), torch.linspace(0, 1, MANY).reshape(1, 1, -1, 1)
    output = kind.apply("matmul", tokens, tokens, values, "compiled")
    expected = far_rows(kind, tokens, tokens) @ values[0, 0].double()
    torch.testing.assert_close(output[0, 0, -2:].double(), expected, rtol=1e-4, atol=0)


@pytest.mark.soak
def test_more_elements_than_32_bits_count(kind: Kind, extension: None) -> None:
    available = int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) / 2**20
    if available < 12:
        pytest.skip(f"the kernel takes 8.6 GB and {available:.0f} GiB are free")
    q = torch.linspace(-1, 1, MANY).reshape(1, 1, -1, 1)
    k = torch.linspace(-0.7, 1.3, MANY).reshape(1, 1, -1, 1)
    kernel = kind.apply("kernel", q, k, k, "compiled")
    assert kernel.numel() > 2**31
    torch.testing.assert_close(kernel[0, 0, -2:].double(), far_rows(kind, q, k), rtol=1e-5, atol=0)
    operator = getattr(torch.ops.attngeo, f"{kind.operator('kernel')}_backward")
    grad_q, grad_k = operator(kernel, q, k, kernel, *kind.options)  # the gradient of half the sum of squares
    for grad, mine, others in ((grad_q, q, k), (grad_k, k, q)):
        leaf = mine[:, :, -2:].double().requires_grad_()
        half_squares = kind.exponent(leaf, others).exp().square().sum() / 2
        (expected,) = torch.autograd.grad(half_squares, leaf)
        torch.testing.assert_close(grad[:, :, -2:].double(), expected, rtol=1e-3, atol=0)
    del kernel
    values = torch.linspace(0, 1, MANY).reshape(1, 1, -1, 1)
    leaves = tuple(tensor.requires_grad_() for tensor in (q, k, values))
    _, *grads = results(kind, "matmul", "compiled", leaves, torch.ones_like(values))
    leaf = q.detach()[:, :, -2:].double().requires_grad_()
    (expected,) = torch.autograd.grad((kind.exponent(leaf, k).exp() @ values.double()).sum(), leaf)
    torch.testing.assert_close(grads[0][:, :, -2:].double(), expected, rtol=1e-3, atol=0)
    torch.testing.assert_close(
        grads[2][0, 0, -2:, 0].double(), far_rows(kind, k.detach(), q.detach()).sum(-1), rtol=1e-4, atol=0
    )


MEMORY_SCRIPT = """
import ctypes, json, pathlib, sys, torch
from attngeo.evaluation.timing import return_pages
from tests.ops.references import KINDS

def status(key):
    text = pathlib.Path("/proc/self/status").read_text()
    return int(text.split(key + ":")[1].split()[0]) / 1024

def step(kind, form, backend, batch, heads, rows, landmarks):
    q = torch.randn(batch, heads, rows, 32, requires_grad=True)
    k = torch.randn(batch, heads, landmarks, 32, requires_grad=True)
    v = torch.randn(batch, heads, landmarks, 32, requires_grad=True)
    ctypes.CDLL(None).malloc_trim(0)  # what an earlier step freed must not hide what this one takes
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    kind.apply(form, q, k, v, backend).sum().backward()
    return status("VmHWM") - before

torch.set_num_threads(2)
return_pages()
for kind in KINDS:
    for form, backend, small, large in json.loads(sys.argv[1]):
        step(kind, form, backend, *small)
        print(json.dumps([form, backend, kind.name, step(kind, form, backend, *large)]))
"""


def test_peak_memory_is_a_few_scores_for_a_kernel_and_a_few_inputs_for_a_product() -> None:
    """Forward and backward, head size 32. The kernel of 4 x 8 x 3136 x 49 scores (19 MiB; with a feature axis it would
    be 600 MiB), and the product of 8192 x 8192 (inputs 3 MiB; the kernel alone would be 256 MiB).
    """
    names = ["naive"] if ops_backend._extension_problem else ["naive", "compiled"]
    steps = [("kernel", name, (4, 1, 3136, 49), (4, 8, 3136, 49)) for name in names]
    steps += [(form, "compiled", (1, 1, 1024, 1024), (1, 1, 8192, 8192)) for form in FORMS[1:] if "compiled" in names]
    command = [sys.executable, "-c", MEMORY_SCRIPT, json.dumps(steps)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    print(result.stdout)
    scores_mib, inputs_mib = 32 * 3136 * 49 * 4 / 2**20, 3 * 8192 * 32 * 4 / 2**20
    limits = dict.fromkeys(FORMS, MATMUL_PEAK_INPUTS * inputs_mib) | {"kernel": KERNEL_PEAK_SCORES * scores_mib}
    for line in result.stdout.splitlines():
        form, _, _, peak_mib = json.loads(line)
        assert peak_mib <= limits[form], line
