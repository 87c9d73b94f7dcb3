"""Laws of the Gaussian kernel."""

import pytest
import torch
from torch import Tensor

from attngeo.errors import UserError
from attngeo.ops import gaussian_kernel
from tests.tolerances import BFLOAT16_ROUNDING, FLOAT64_RELATIVE, GAUSSIAN_FLOAT32_ABSOLUTE


def reference(q: Tensor, k: Tensor) -> Tensor:
    return torch.exp(-0.5 * (q.double().unsqueeze(-2) - k.double().unsqueeze(-3)).square().sum(-1))


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1, 1), (2, 3, 17, 5, 33), (0, 1, 2, 3, 4), (1, 2, 0, 3, 4), (1, 2, 3, 0, 4)]
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, GAUSSIAN_FLOAT32_ABSOLUTE), (torch.float64, FLOAT64_RELATIVE)]
)
def test_values_and_gradients_equal_the_definition(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype, tolerance: float
) -> None:
    batch, heads, rows, landmarks, channels = sizes
    q = (0.3 * torch.randn(batch, heads, rows, channels, dtype=dtype)).requires_grad_()
    k = (0.3 * torch.randn(batch, heads, landmarks, channels, dtype=dtype)).requires_grad_()
    kernel = gaussian_kernel(q, k)
    q_wide, k_wide = q.detach().double().requires_grad_(), k.detach().double().requires_grad_()
    expected = reference(q_wide, k_wide)
    torch.testing.assert_close(kernel.double(), expected, rtol=0, atol=tolerance)
    for grad, expected_grad in zip(
        torch.autograd.grad(kernel.sum(), (q, k)), torch.autograd.grad(expected.sum(), (q_wide, k_wide)), strict=True
    ):
        torch.testing.assert_close(grad.double(), expected_grad, rtol=0, atol=tolerance * 10)


@pytest.mark.parametrize("offset", [1.0, 1e3, 1e4])
def test_tokens_far_from_the_origin_lose_no_digits(offset: float) -> None:
    generator = torch.Generator().manual_seed(3)
    q = offset + torch.randn(1, 2, 11, 7, generator=generator)
    k = offset + torch.randn(1, 2, 5, 7, generator=generator)
    error = (gaussian_kernel(q, k) - reference(q, k)).abs().max()
    assert error <= GAUSSIAN_FLOAT32_ABSOLUTE


def test_gradcheck_through_the_detached_centre() -> None:
    q = (2.0 + torch.randn(1, 2, 5, 3, dtype=torch.float64)).requires_grad_()
    k = (2.0 + torch.randn(1, 2, 4, 3, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(gaussian_kernel, (q, k))


def test_ties_give_one_and_no_gradient() -> None:
    q = torch.full((1, 1, 3, 5), 0.7, requires_grad=True)
    kernel = gaussian_kernel(q, q.detach())
    assert (kernel == 1).all()
    (grad,) = torch.autograd.grad(kernel.sum(), q)
    assert (grad == 0).all()


def test_autocast_does_not_reach_the_matrix_product() -> None:
    q, k = torch.randn(1, 2, 17, 33), torch.randn(1, 2, 5, 33)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = gaussian_kernel(0.3 * q, 0.3 * k)
    torch.testing.assert_close(inside, gaussian_kernel(0.3 * q, 0.3 * k), rtol=0, atol=0)
    half = gaussian_kernel(q.bfloat16(), k.bfloat16())
    assert half.dtype == torch.bfloat16
    expected = reference(q.bfloat16(), k.bfloat16())
    assert ((half - expected).abs() <= BFLOAT16_ROUNDING * expected + GAUSSIAN_FLOAT32_ABSOLUTE).all()


def test_torch_compile_takes_it_whole() -> None:
    q, k = torch.randn(1, 2, 7, 5), torch.randn(1, 2, 4, 5)
    torch.compiler.reset()
    compiled = torch.compile(gaussian_kernel, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k), gaussian_kernel(q, k))


def test_asking_for_a_compiled_form_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(UserError, match="no compiled form exists"):
        gaussian_kernel(torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 3), backend="compiled")
