"""Laws of the Laplacian kernel, of both implementations unless a test says otherwise."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from attngeo.ops import laplacian_kernel
from attngeo.ops.backend import ran
from tests.ops.references import laplacian_bound, laplacian_reference
from tests.tolerances import BFLOAT16_ROUNDING, FLOAT16_ROUNDING, KERNEL_PEAK_SCORES

# (B, H, N, M, D): one, primes, sizes around a vector, more than one chunk of rows, empty axes.
SIZES = [
    (1, 1, 1, 1, 1),
    (2, 3, 7, 5, 33),
    (1, 2, 17, 13, 31),
    (2, 1, 16, 64, 16),
    (1, 1, 67, 1, 257),
    (1, 2, 523, 49, 32),
    (1, 1, 5, 131, 8),
    (0, 2, 3, 4, 5),
    (2, 2, 0, 4, 5),
    (2, 2, 3, 0, 5),
    (2, 2, 3, 4, 0),
]


def tokens(sizes: tuple[int, int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    batch, heads, rows, landmarks, channels = sizes
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(batch, heads, rows, channels, generator=generator, dtype=torch.float64).to(dtype)
    k = torch.randn(batch, heads, landmarks, channels, generator=generator, dtype=torch.float64).to(dtype)
    if min(q.numel(), k.numel()) > 0:
        k[..., 0, :] = q[..., 0, :]  # a whole tie
        k[..., -1, ::2] = q[..., -1, ::2]  # and ties in single channels
    return q.requires_grad_(), k.requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", SIZES)
def test_values_and_gradients_equal_the_definition(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype, backend: str
) -> None:
    q, k = tokens(sizes, dtype)
    lambda_ = 4.0
    kernel = laplacian_kernel(q, k, lambda_, backend=backend)
    weight = torch.randn(kernel.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    grad_q, grad_k = torch.autograd.grad(kernel, (q, k), weight)

    q_wide, k_wide = q.detach().double().requires_grad_(), k.detach().double().requires_grad_()
    expected = laplacian_reference(q_wide, k_wide, lambda_)
    expected_q, expected_k = torch.autograd.grad(expected, (q_wide, k_wide), weight.double())
    bound = laplacian_bound(expected.detach(), sizes[4], dtype)
    assert kernel.dtype == dtype
    assert kernel.shape == expected.shape
    assert ((kernel - expected).abs() <= bound).all()
    # A gradient sums |g| K / lambda over the other side: each term is off by its kernel's bound, each partial sum by
    # one rounding.
    share = weight.double().abs() / lambda_
    eps = torch.finfo(dtype).eps
    for grad, expected_grad, axis, summands in ((grad_q, expected_q, -1, sizes[3]), (grad_k, expected_k, -2, sizes[2])):
        limit = (share * (bound + (summands + 4) * eps * expected.detach())).sum(axis).unsqueeze(-1)
        assert ((grad - expected_grad).abs() <= limit).all()


def test_gradient_is_exactly_zero_at_ties(backend: str) -> None:
    q = torch.full((1, 1, 5, 19), 0.3, requires_grad=True)
    k = torch.full((1, 1, 3, 19), 0.3, requires_grad=True)
    kernel = laplacian_kernel(q, k, backend=backend)
    assert (kernel == 1).all()
    grad_q, grad_k = torch.autograd.grad(kernel.sum(), (q, k))
    assert (grad_q == 0).all()
    assert (grad_k == 0).all()


def test_sign_of_the_smallest_difference_counts_in_full(extension: None) -> None:
    smallest = 2.0**-149
    q = torch.zeros(1, 1, 1, 3)
    k = torch.tensor([smallest, 0.0, -smallest]).reshape(1, 1, 1, 3).requires_grad_()
    (grad_k,) = torch.autograd.grad(laplacian_kernel(q, k, 1.0, backend="compiled").sum(), k)
    assert grad_k.flatten().tolist() == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_apart_tokens_underflow_to_zero(dtype: torch.dtype, backend: str) -> None:
    q = torch.zeros(1, 1, 1, 1, dtype=dtype, requires_grad=True)
    k = torch.tensor([88.0, 100.0, 110.0, 740.0, 800.0, 1e30, torch.inf], dtype=dtype).reshape(1, 1, 7, 1)
    kernel = laplacian_kernel(q, k, 1.0, backend=backend)
    expected = torch.exp(-k.double().flatten())
    spacing = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((kernel.flatten() - expected).abs() <= laplacian_bound(expected, 1, dtype) + spacing).all()
    assert kernel.flatten()[-3:].tolist() == [0.0, 0.0, 0.0]
    assert kernel.flatten()[1] > 0  # below the normal numbers of float32, and not flushed
    (grad_q,) = torch.autograd.grad(kernel[..., :-1].sum(), q)
    assert torch.isfinite(grad_q).all()


def test_nan_stays_in_its_own_pairs_and_is_never_hidden(backend: str) -> None:
    q, k = (tensor.detach() for tensor in tokens((1, 1, 7, 5, 33), torch.float32))
    clean = laplacian_kernel(q, k, backend=backend)
    q[0, 0, 3, 2] = torch.nan
    kernel = laplacian_kernel(q, k, backend=backend)
    assert kernel[0, 0, 3].isnan().all()
    others = [0, 1, 2, 4, 5, 6]
    assert torch.equal(kernel[:, :, others], clean[:, :, others])


def test_gradcheck(backend: str) -> None:
    q, k = (tensor.detach().requires_grad_() for tensor in tokens((1, 2, 5, 3, 7), torch.float64))
    k = (k.detach() + 0.05).requires_grad_()  # away from the kinks, where finite differences mean nothing
    assert torch.autograd.gradcheck(lambda a, b: laplacian_kernel(a, b, 2.0, backend=backend), (q, k))


def test_strided_and_expanded_tensors_equal_their_copies(backend: str) -> None:
    q = torch.randn(2, 11, 3, 5).permute(0, 2, 1, 3)  # as a projection split into heads
    k = torch.randn(1, 1, 4, 10)[..., ::2].expand(2, 3, 4, 5)
    assert not q.is_contiguous()
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k)]
    copies = [tensor.contiguous().detach().requires_grad_() for tensor in (q, k)]
    kernel = laplacian_kernel(*leaves, backend=backend)
    expected = laplacian_kernel(*copies, backend=backend)
    assert torch.equal(kernel, expected)
    weight = torch.randn(()).expand(kernel.shape)  # the gradient of a sum: stride 0
    for grad, expected_grad in zip(
        torch.autograd.grad(kernel, leaves, weight),
        torch.autograd.grad(expected, copies, weight.contiguous()),
        strict=True,
    ):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-7)


def test_leading_axes_broadcast(backend: str) -> None:
    q, k = torch.randn(2, 3, 7, 5), torch.randn(1, 4, 5)
    kernel = laplacian_kernel(q, k, backend=backend)
    torch.testing.assert_close(kernel, laplacian_reference(q, k).float())


def test_a_sample_does_not_depend_on_its_batch_mates(backend: str) -> None:
    q, k = tokens((3, 2, 301, 7, 33), torch.float32)
    weight = torch.randn(3, 2, 301, 7)
    kernel = laplacian_kernel(q, k, backend=backend)
    whole = torch.autograd.grad(kernel, (q, k), weight)
    alone_q, alone_k = (tensor[1:2].detach().requires_grad_() for tensor in (q, k))
    alone = laplacian_kernel(alone_q, alone_k, backend=backend)
    assert torch.equal(alone, kernel[1:2])
    for part, full in zip(torch.autograd.grad(alone, (alone_q, alone_k), weight[1:2]), whole, strict=True):
        assert torch.equal(part, full[1:2])


@pytest.mark.parametrize("sizes", [(1, 1, 2003, 49, 33), (4, 2, 67, 13, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_bits_for_any_number_of_threads(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype, extension: None
) -> None:
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            q, k = tokens(sizes, dtype)
            kernel = laplacian_kernel(q, k, backend="compiled")
            results.append((kernel.detach(), *torch.autograd.grad(kernel.square().sum(), (q, k))))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(first, second) for first, second in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.bfloat16, BFLOAT16_ROUNDING), (torch.float16, FLOAT16_ROUNDING)]
)
def test_half_precision_is_computed_in_float32(dtype: torch.dtype, rounding: float, backend: str) -> None:
    q, k = tokens((2, 3, 17, 5, 33), dtype)
    expected = laplacian_reference(q, k).detach()
    kernel = laplacian_kernel(q, k, backend=backend)
    assert kernel.dtype == dtype
    assert ((kernel - expected).abs() <= rounding * expected + torch.finfo(dtype).smallest_normal).all()
    with torch.autocast("cpu", dtype=dtype):
        inside = laplacian_kernel(q, k, backend=backend)
    assert inside.dtype == torch.float32
    assert ((inside - expected).abs() <= laplacian_bound(expected, 33, torch.float32)).all()
    for grad in torch.autograd.grad(inside.sum(), (q, k)):
        assert grad.dtype == dtype
        assert torch.isfinite(grad).all()


def test_autocast_reaches_the_registered_operator_itself(extension: None) -> None:
    q, k = tokens((1, 1, 3, 2, 5), torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.ops.attngeo.laplacian_kernel(q, k, 4.0).dtype == torch.float32


@pytest.mark.parametrize("sizes", [(1, 2, 7, 5, 3), (2, 1, 3, 0, 5), (0, 1, 3, 2, 5)])
def test_opcheck(sizes: tuple[int, int, int, int, int], extension: None) -> None:
    q, k = tokens(sizes, torch.float32)
    torch.library.opcheck(torch.ops.attngeo.laplacian_kernel, (q, k, 2.0))
    kernel = laplacian_kernel(q, k, 2.0, backend="compiled").detach()
    arguments = (torch.ones_like(kernel), q.detach(), k.detach(), kernel, 2.0)
    torch.library.opcheck(torch.ops.attngeo.laplacian_kernel_backward, arguments)


# The second size makes the graph dynamic.
@pytest.mark.parametrize(("compiler", "sizes"), [("aot_eager", (7, 12)), ("inductor", (7,))])
def test_torch_compile_takes_it_whole_and_agrees(compiler: str, sizes: tuple[int, ...], extension: None) -> None:
    def step(q: Tensor, k: Tensor) -> Tensor:
        return (laplacian_kernel(2.0 * q, k, backend="auto") @ k).square().sum()

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    for rows in sizes:
        q, k = tokens((1, 2, rows, 5, 3), torch.float32)
        value, expected = compiled(q, k), step(q, k)
        torch.testing.assert_close(value, expected)
        for grad, expected_grad in zip(
            torch.autograd.grad(value, (q, k)), torch.autograd.grad(expected, (q, k)), strict=True
        ):
            torch.testing.assert_close(grad, expected_grad)


def test_vmap_equals_a_loop(extension: None) -> None:
    def compiled(q: Tensor, k: Tensor) -> Tensor:
        return laplacian_kernel(q, k, backend="compiled")

    q, k = tokens((3, 2, 5, 4, 7), torch.float64)
    mapped = torch.vmap(compiled, in_dims=(0, None))(q, k[0])
    looped = torch.stack([compiled(one, k[0]) for one in q])
    assert torch.equal(mapped, looped)
    for grad, expected in zip(
        torch.autograd.grad(mapped.sum(), (q, k)), torch.autograd.grad(looped.sum(), (q, k)), strict=True
    ):
        torch.testing.assert_close(grad, expected)


def test_functional_gradients_are_refused_by_the_compiled_form_and_work_in_the_naive_one(extension: None) -> None:
    q, k = (tensor.detach() for tensor in tokens((1, 1, 3, 2, 5), torch.float64))
    gradient = torch.func.grad(lambda a: laplacian_kernel(a, k, backend="naive").sum())(q)
    assert torch.isfinite(gradient).all()
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda a: laplacian_kernel(a, k, backend="compiled").sum())(q)


def test_a_second_derivative_is_exact_in_the_naive_form_and_refused_by_the_compiled_one(extension: None) -> None:
    q, k = tokens((1, 1, 3, 2, 5), torch.float64)
    apart = (k.detach() + 0.05).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda a, b: laplacian_kernel(a, b, backend="naive"), (q, apart))
    kernel = laplacian_kernel(q, k, backend="compiled")
    (grad_q,) = torch.autograd.grad(kernel.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        grad_q.sum().backward()


@pytest.mark.parametrize("lambda_", [0.0, -1.0, float("nan")])
def test_lambda_must_be_positive(lambda_: float, backend: str) -> None:
    with pytest.raises(ValueError, match="lambda_ must be positive"):
        laplacian_kernel(torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 3), lambda_, backend=backend)


def test_shapes_that_do_not_fit_are_named(backend: str) -> None:
    with pytest.raises(ValueError, match=r"\(1, 1, 2, 3\) and \(1, 1, 2, 4\)"):
        laplacian_kernel(torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 4), backend=backend)


MEMORY_SCRIPT = """
import ctypes, json, pathlib, torch
from attngeo.ops import laplacian_kernel
from attngeo.ops.backend import ran

def status(key):
    text = pathlib.Path("/proc/self/status").read_text()
    return int(text.split(key + ":")[1].split()[0]) / 1024

torch.set_num_threads(2)
peaks = {}
for backend in %r:
    def step(heads):
        q = torch.randn(4, heads, 3136, 32, requires_grad=True)
        k = torch.randn(4, heads, 49, 32, requires_grad=True)
        ctypes.CDLL(None).malloc_trim(0)  # what an earlier step freed must not hide what this one takes
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        laplacian_kernel(q, k, backend=backend).sum().backward()
        return status("VmHWM") - before
    step(1)
    peaks[backend] = step(8)
print(json.dumps(peaks))
"""


def test_peak_memory_is_a_few_scores_and_has_no_feature_axis() -> None:
    """Batch 4, 8 heads, 3136 tokens, 49 landmarks, head size 32: scores 19 MiB, with a feature axis 600 MiB."""
    from attngeo.ops import backend

    names = ["naive"] if backend._extension_problem else ["naive", "compiled"]
    result = subprocess.run([sys.executable, "-c", MEMORY_SCRIPT % names], capture_output=True, text=True, check=True)
    scores_mib = 32 * 3136 * 49 * 4 / 2**20
    peaks = json.loads(result.stdout)
    print({name: f"{peak:.0f} MiB = {peak / scores_mib:.1f} scores" for name, peak in peaks.items()})
    assert all(peak <= KERNEL_PEAK_SCORES * scores_mib for peak in peaks.values()), peaks


@pytest.fixture(params=["portable", "avx2", "avx512"])
def variant(request: pytest.FixtureRequest, extension: None) -> Iterator[str]:
    """Each instruction set in turn; one that the processor lacks is skipped visibly."""
    import attngeo_ext

    try:
        attngeo_ext.use_cpu_variant(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield str(request.param)
    attngeo_ext.use_cpu_variant("")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_instruction_set_obeys_the_same_laws(variant: str, dtype: torch.dtype) -> None:
    for sizes in SIZES:
        test_values_and_gradients_equal_the_definition(sizes, dtype, "compiled")
    test_gradient_is_exactly_zero_at_ties("compiled")
    test_sign_of_the_smallest_difference_counts_in_full(None)
    test_far_apart_tokens_underflow_to_zero(dtype, "compiled")
    test_nan_stays_in_its_own_pairs_and_is_never_hidden("compiled")
    assert f"compiled cpu {variant}" in ran()["laplacian_kernel"]


def test_an_unknown_instruction_set_is_refused(extension: None) -> None:
    import attngeo_ext

    with pytest.raises(ValueError, match="'avx4096'"):
        attngeo_ext.use_cpu_variant("avx4096")
