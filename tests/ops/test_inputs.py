"""Laws of all public operators at once: what does not fit is refused by name, and no derivative is silently lost."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from attngeo import ops
from attngeo.errors import UserError
from attngeo.ops import backend as ops_backend
from attngeo.ops import low_rank_metric
from tests.tolerances import FLOAT64_RELATIVE

# What an operator is asked with: any inverse of an inverse problem is one tensor, as any kernel's output is.
OPERATORS: dict[str, Callable[..., Tensor]] = {
    "laplacian_kernel": ops.laplacian_kernel,
    "laplacian_kernel_matmul": ops.laplacian_kernel_matmul,
    "gaussian_kernel": ops.gaussian_kernel,
    "gaussian_kernel_matmul": ops.gaussian_kernel_matmul,
    "newton_schulz_inverse": lambda W, **options: ops.newton_schulz_inverse(W, 12, start="identity", **options).inverse,
    "conjugate_gradient_inverse": lambda W, **options: ops.conjugate_gradient_inverse(W, 8, **options).inverse,
    "spd_inverse": ops.spd_inverse,
    "nystrom_attention": lambda q, k, v, **options: ops.nystrom_attention(q, k, v, ops.laplacian_kernel, **options),
    "nystrom_matrix": lambda q, k, **options: ops.nystrom_matrix(q, k, ops.laplacian_kernel, **options),
}
NAMES = {"nystrom_attention": ("q", "landmarks", "v"), "nystrom_matrix": ("q", "landmarks")}
COMPILED = ops_backend.COMPILED_OPERATORS


def names_of(op: str) -> tuple[str, ...]:
    if op.endswith("_inverse"):
        return ("W",)
    return NAMES.get(op, ("q", "k", "v") if op.endswith("_matmul") else ("q", "k"))


def inputs_of(op: str) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    if op.endswith("_inverse"):
        root = torch.randn(2, 5, 5, generator=generator, dtype=torch.float64)
        return (root @ root.mT + torch.eye(5, dtype=torch.float64),)
    q = 0.5 * torch.randn(2, 1, 7, 3, generator=generator, dtype=torch.float64)
    k = 0.5 * torch.randn(2, 1, 4, 3, generator=generator, dtype=torch.float64)
    rows = 7 if op == "nystrom_attention" else 4
    return (q, k, torch.randn(2, 1, rows, 5, generator=generator, dtype=torch.float64))[: len(names_of(op))]


def directional(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], tangents: tuple[Tensor, ...]) -> Tensor:
    """The derivative by central differences."""
    step = 1e-5
    ahead, behind = (
        function(*(x + sign * step * t for x, t in zip(inputs, tangents, strict=True))) for sign in (1, -1)
    )
    return (ahead - behind) / (2 * step)


@pytest.mark.parametrize("backend", ["auto", "naive"])
@pytest.mark.parametrize("op", OPERATORS)
def test_forward_mode_derivatives_are_those_of_differences(op: str, backend: str) -> None:
    inputs = inputs_of(op)
    generator = torch.Generator().manual_seed(6)
    tangents = tuple(torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in inputs)
    if op.endswith("_inverse"):  # as of a function of symmetric matrices
        tangents = tuple(t + t.mT for t in tangents)

    def function(*leaves: Tensor) -> Tensor:
        return OPERATORS[op](*leaves, backend=backend)

    expected = directional(function, inputs, tangents)
    _, tangent = torch.func.jvp(function, inputs, tangents)
    torch.testing.assert_close(tangent, expected, rtol=1e-6, atol=1e-6)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(inputs, tangents, strict=True)]
        dual = forward_ad.unpack_dual(function(*duals)).tangent
    torch.testing.assert_close(dual, tangent, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)
    forward = torch.func.jacfwd(function)(*inputs)
    reverse = torch.func.jacrev(function)(*inputs)
    torch.testing.assert_close(forward, reverse, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("op", COMPILED)
def test_the_compiled_form_refuses_what_it_cannot_differentiate_by_name(op: str, extension: None) -> None:
    inputs = inputs_of(op)

    def function(first: Tensor) -> Tensor:
        return OPERATORS[op](first, *inputs[1:], backend="compiled").sum()

    def dual() -> None:
        with forward_ad.dual_level():
            function(forward_ad.make_dual(inputs[0], inputs[0]))

    for derivative, kind in (
        (lambda: torch.func.jvp(function, inputs[:1], inputs[:1]), "forward-mode derivatives"),
        (lambda: torch.func.jacfwd(function)(inputs[0]), "forward-mode derivatives"),
        (dual, "forward-mode derivatives"),
        (lambda: torch.func.grad(function)(inputs[0]), "torch.func's derivatives"),
        (lambda: torch.func.jacrev(function)(inputs[0]), "torch.func's derivatives"),
        (lambda: torch.func.hessian(function)(inputs[0]), "derivatives"),
        (lambda: torch.vmap(torch.func.grad(function))(inputs[0][None]), "torch.func's derivatives"),
    ):
        with pytest.raises(UserError, match=rf"^{op}: backend='compiled'.* {kind}\n.*backend='naive'"):
            derivative()
    function(inputs[0])  # outside them it runs


@pytest.mark.parametrize("op", COMPILED)
def test_auto_differentiates_by_the_naive_form_and_says_so(op: str, extension: None) -> None:
    inputs = inputs_of(op)

    def function(first: Tensor, backend: str = "auto") -> Tensor:
        return OPERATORS[op](first, *inputs[1:], backend=backend).square().sum()

    ops_backend.forget()
    gradient = torch.func.grad(function)(inputs[0])
    assert "no compiled form of torch.func's derivatives" in ops_backend.ran()[op]
    assert torch.equal(gradient, torch.func.grad(lambda x: function(x, "naive"))(inputs[0]))
    assert torch.func.hessian(function)(inputs[0]).isfinite().all()
    torch.compiler.reset()
    compiled = torch.compile(lambda x: torch.func.grad(function)(x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(inputs[0]), gradient, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)


@pytest.mark.parametrize("backend", ["auto", "naive", "compiled"])
@pytest.mark.parametrize("op", OPERATORS)
def test_what_is_no_dense_floating_point_tensor_is_refused_by_name(op: str, backend: str) -> None:
    inputs = inputs_of(op)
    for place, name in enumerate(names_of(op)):

        def call(wrong: Any, place: int = place) -> Tensor:
            return OPERATORS[op](*inputs[:place], wrong, *inputs[place + 1 :], backend=backend)

        right = inputs[place]
        for dtype in (torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn):
            with pytest.raises(TypeError, match=rf"^{op}: {name} is {dtype}: convert it to one of float32, "):
                call(right.to(dtype))
        for wrong, what in ((None, "None"), ([1.0], "a list"), (right.numpy(), "a ndarray"), ("q", "'q'")):
            with pytest.raises(TypeError, match=rf"^{op}: {name} must be a tensor, not {what}$"):
                call(wrong)
        with pytest.raises(TypeError, match=rf"^{op}: {name} is of layout torch.sparse_coo: give a dense"):
            call(right.to_sparse())
        with pytest.raises(TypeError, match=rf"^{op}: {name} is a nested tensor: give a dense"):
            call(torch.nested.nested_tensor([right[0], right[0]], layout=torch.jagged))


@pytest.mark.parametrize("backend", ["auto", "naive", "compiled"])
@pytest.mark.parametrize("op", [op for op in OPERATORS if not op.endswith("_inverse")])
def test_tensors_on_different_devices_are_refused_by_name(op: str, backend: str) -> None:
    first, *others = inputs_of(op)
    with pytest.raises(ValueError, match=rf"^{op}: the tensors are on different devices: q on meta, .* on cpu"):
        OPERATORS[op](first.to("meta"), *others, backend=backend)


@pytest.mark.parametrize("op", OPERATORS)
def test_tensors_without_data_give_shapes(op: str) -> None:
    inputs = inputs_of(op)
    output = OPERATORS[op](*(x.to("meta") for x in inputs))
    assert output.is_meta
    assert output.shape == OPERATORS[op](*inputs).shape


@pytest.mark.parametrize("lambda_", [0, -1.0, float("nan"), float("inf"), 1e-300, 1e300])
def test_lambda_must_be_positive_and_finite_in_the_compute_type(lambda_: float, backend: str) -> None:
    q = torch.ones(1, 2, 3)
    for call in (
        lambda: ops.laplacian_kernel(q, q, lambda_, backend=backend),
        lambda: ops.laplacian_kernel_matmul(q, q, q, lambda_, backend=backend),
    ):
        with pytest.raises(ValueError, match=r"^lap.*: lambda_ must be positive and finite in float32, not"):
            call()
    if lambda_ in (1e-300, 1e300):
        assert ops.laplacian_kernel(q.double(), q.double(), lambda_, backend=backend).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_smallest_and_largest_lambda_give_numbers(dtype: torch.dtype, backend: str) -> None:
    q = torch.tensor([[0.0], [1.0]], dtype=dtype)
    for lambda_, apart in ((torch.finfo(dtype).tiny, 0.0), (torch.finfo(dtype).max, 1.0)):
        kernel = ops.laplacian_kernel(q, q, lambda_, backend=backend)
        assert kernel.tolist() == [[1.0, apart], [apart, 1.0]]


@pytest.mark.parametrize("wrong", [None, "4", torch.tensor(4.0), torch.ones(2), [4.0], True, 1j], ids=repr)
def test_numbers_must_be_numbers(wrong: Any, backend: str) -> None:
    q, W = torch.ones(1, 2, 3), torch.eye(3)
    remedy = "divide q and k by it" if isinstance(wrong, Tensor) else ""
    for call, name, hint in (
        (lambda: ops.laplacian_kernel(q, q, wrong, backend=backend), "lambda_", remedy),
        (lambda: ops.laplacian_kernel_matmul(q, q, q, wrong, backend=backend), "lambda_", remedy),
        (lambda: ops.newton_schulz_inverse(W, eps=wrong, backend=backend), "eps", ""),
        (lambda: ops.spd_inverse(W, wrong, backend=backend), "eps", ""),
        (lambda: ops.conjugate_gradient_inverse(W, eps=wrong), "eps", ""),
    ):
        with pytest.raises(TypeError, match=rf"_(kernel|matmul|inverse): {name} must be a number, not .*{hint}"):
            call()


@pytest.mark.parametrize("eps", [float("inf"), float("-inf"), float("nan"), 1e300])
def test_eps_must_be_finite(eps: float, backend: str) -> None:
    W = torch.eye(3)
    for call in (
        lambda: ops.newton_schulz_inverse(W, eps=eps, backend=backend),
        lambda: ops.spd_inverse(W, eps, backend=backend),
        lambda: ops.conjugate_gradient_inverse(W, eps=eps),
    ):
        with pytest.raises(ValueError, match="_inverse: eps must be finite in float32, not"):
            call()


@pytest.mark.parametrize("wrong", [2.5, None, "20", torch.tensor(20), True], ids=repr)
def test_iterations_are_a_whole_number(wrong: Any) -> None:
    for inverse in (ops.newton_schulz_inverse, ops.conjugate_gradient_inverse):
        with pytest.raises(TypeError, match="_inverse: iterations must be a whole number, not"):
            inverse(torch.eye(3), wrong)


@pytest.mark.parametrize("op", [op for op in OPERATORS if not op.endswith("_inverse")])
def test_leading_axes_that_do_not_broadcast_are_named_with_their_shapes(op: str) -> None:
    first, *others = inputs_of(op)
    with pytest.raises(ValueError, match=rf"^{op}: the leading axes do not broadcast: q \(3, 7, 3\), \w+ \(2, 4, 3\)"):
        OPERATORS[op](first[0].expand(3, 7, 3), *(other[:, 0] for other in others))


# 256 TiB of kernel values, more than a process can address, from 32 MiB of tokens.
@pytest.mark.parametrize("name", ["laplacian_kernel", "gaussian_kernel"])
def test_a_kernel_that_does_not_fit_in_memory_is_refused_with_the_way_out(
    name: str, backend: str, capfd: pytest.CaptureFixture[str]
) -> None:
    tokens = torch.zeros(2**23, 1)
    message = rf"^{name}: no memory for the 8388608 x 8388608 kernel values \(262,144.0 GiB\): {name}_matmul"
    with pytest.raises(torch.OutOfMemoryError, match=message):
        getattr(ops, name)(tokens, tokens, backend=backend)
    assert capfd.readouterr() == ("", "")


def test_the_metrics_refuse_by_the_same_words() -> None:
    a, U, x = torch.ones(4, dtype=torch.int64), torch.ones(4, 2), torch.ones(4)
    for call in (
        lambda: low_rank_metric.solve(a, U, x),
        lambda: low_rank_metric.logdet(a, U),
        lambda: low_rank_metric.quadratic_form(a, U, x),
        lambda: low_rank_metric.pairwise_squared_distance(x, x, a, U),
    ):
        with pytest.raises(TypeError, match=r"^low_rank_metric.*: a is torch\.int64"):
            call()


@pytest.mark.parametrize("op", OPERATORS)
def test_the_checks_pass_torch_compile_and_vmap(op: str) -> None:
    inputs = inputs_of(op)
    torch.compiler.reset()
    compiled = torch.compile(OPERATORS[op], fullgraph=True, backend="aot_eager")
    expected = OPERATORS[op](*inputs)
    torch.testing.assert_close(compiled(*inputs), expected, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)
    mapped = torch.vmap(OPERATORS[op])(*inputs)
    torch.testing.assert_close(mapped, expected, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)
