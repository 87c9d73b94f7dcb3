"""Laws of the Laplacian kernel alone; those of all pairwise kernels are in test_pairwise_kernels.py."""

import pytest
import torch

from attngeo.ops import laplacian_kernel, laplacian_kernel_matmul


@pytest.mark.parametrize("smallest", [2.0**-149, 2.0**-126])
def test_the_sign_of_the_smallest_difference_counts_in_full(smallest: float, extension: None) -> None:
    q = torch.zeros(1, 1, 1, 3)
    k = torch.tensor([smallest, 0.0, -smallest]).reshape(1, 1, 1, 3).requires_grad_()
    v = torch.ones(1, 1, 1, 1)
    for output in (
        laplacian_kernel(q, k, 1.0, backend="compiled"),
        laplacian_kernel_matmul(q, k, v, 1.0, backend="compiled"),
    ):
        (grad_k,) = torch.autograd.grad(output.sum(), k)
        assert grad_k.flatten().tolist() == [-1.0, 0.0, 1.0]


def test_every_instruction_set_counts_the_smallest_difference(variant: str) -> None:
    test_the_sign_of_the_smallest_difference_counts_in_full(2.0**-149, None)


@pytest.mark.parametrize("lambda_", [0.0, -1.0, float("nan")])
def test_lambda_must_be_positive(lambda_: float, backend: str) -> None:
    tokens = torch.ones(1, 1, 2, 3)
    with pytest.raises(ValueError, match="lambda_ must be positive"):
        laplacian_kernel(tokens, tokens, lambda_, backend=backend)
    with pytest.raises(ValueError, match="lambda_ must be positive"):
        laplacian_kernel_matmul(tokens, tokens, tokens, lambda_, backend=backend)
