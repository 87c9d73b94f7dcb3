"""Laws of Nystrom attention: the linear form is the dense one, and the dense one is the definition."""

from typing import Any

import pytest
import torch
from torch import Tensor

from attngeo.ops import backend as ops_backend
from attngeo.ops import (
    gaussian_kernel,
    gaussian_kernel_matmul,
    laplacian_kernel,
    laplacian_kernel_matmul,
    newton_schulz_inverse,
    nystrom_attention,
    nystrom_matrix,
)
from attngeo.ops.nystrom import NORMALIZATIONS, Kernel, Normalization
from tests.ops.references import relative_error
from tests.tolerances import FLOAT64_RELATIVE, NYSTROM_FLOAT32_RELATIVE, NYSTROM_FLOAT64_RELATIVE


def problem(rows: int = 29, landmarks: int = 5, std: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    q = std * torch.randn(2, 3, rows, 8, generator=generator, dtype=torch.float64)
    pooled = std * torch.randn(2, 3, landmarks, 8, generator=generator, dtype=torch.float64)
    return q, pooled, torch.randn(2, 3, rows, 7, generator=generator, dtype=torch.float64)


def newton(W: Tensor) -> Tensor:
    return newton_schulz_inverse(W, 20)[0]


@pytest.mark.parametrize("kernel", [laplacian_kernel, gaussian_kernel])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize(("rows", "landmarks"), [(29, 5), (1, 1), (13, 1), (1, 3), (7, 11)])
def test_the_linear_form_equals_the_dense_form(
    kernel: Kernel, normalization: Normalization, rows: int, landmarks: int
) -> None:
    q, pooled, v = problem(rows, landmarks)
    scale = None if normalization == "row_sum" else torch.tensor([1.0, 0.1, 1.0 / rows], dtype=torch.float64)
    options = {"normalization": normalization, "solver": newton, "scale": scale}
    leaves = [tensor.requires_grad_() for tensor in (q, pooled, v)]
    output = nystrom_attention(q, pooled, v, kernel, **options)  # type: ignore[arg-type]
    expected = nystrom_matrix(q, pooled, kernel, **options) @ v  # type: ignore[arg-type]
    assert relative_error(output, expected) <= NYSTROM_FLOAT64_RELATIVE
    weight = torch.randn(output.shape, dtype=torch.float64)
    if normalization == "injective" and rows == 1:
        return  # the variance is 0 up to rounding: its gradient is rounding over rounding
    for grad, expected_grad in zip(
        torch.autograd.grad(output, leaves, weight), torch.autograd.grad(expected, leaves, weight), strict=True
    ):
        assert (grad - expected_grad).abs().max() <= 1e-8 * (1 + expected_grad.abs().max())


@pytest.mark.parametrize("name", ["laplacian", "gaussian"])
@pytest.mark.parametrize("normalization", ["injective_row", "row_sum", "none"])
def test_products_in_place_of_the_kernel_give_the_same(name: str, normalization: Normalization, backend: str) -> None:
    q, pooled, v = (tensor.requires_grad_() for tensor in problem())
    kernel, matmul = {
        "laplacian": (laplacian_kernel, laplacian_kernel_matmul),
        "gaussian": (gaussian_kernel, gaussian_kernel_matmul),
    }[name]
    scale = None if normalization == "row_sum" else torch.tensor([1.0, 0.1, 0.3], dtype=torch.float64)
    kept, saved = (
        nystrom_attention(
            q, pooled, v, kernel, kernel_matmul=m, normalization=normalization, scale=scale, backend=backend
        )
        for m in (None, matmul)
    )
    assert relative_error(saved, kept) <= NYSTROM_FLOAT64_RELATIVE
    weight = torch.randn(kept.shape, dtype=torch.float64)
    for grad, expected in zip(
        *(torch.autograd.grad(output, (q, pooled, v), weight) for output in (saved, kept)), strict=True
    ):
        assert (grad - expected).abs().max() <= 1e-8 * (1 + expected.abs().max())


def test_the_backend_reaches_kernel_and_solver(extension: None, monkeypatch: pytest.MonkeyPatch) -> None:
    q, pooled, v = problem()
    for name, beginning in (("naive", "naive cpu"), ("compiled", "compiled cpu")):
        monkeypatch.setattr(ops_backend, "_ran", {})
        output = nystrom_attention(q, pooled, v, laplacian_kernel, backend=name)
        ran = ops_backend.ran()
        assert ran["laplacian_kernel"].startswith(beginning)
        assert ran["spd_inverse"].startswith(beginning)
        Z = nystrom_matrix(q, pooled, laplacian_kernel, backend=name)
        assert relative_error(output, Z @ v) <= NYSTROM_FLOAT64_RELATIVE


def test_float32_keeps_the_promised_accuracy() -> None:
    q, pooled, v = problem(rows=251, std=0.1)  # small spread: E[g^2] - mean^2 would cancel here
    expected = nystrom_matrix(q, pooled, laplacian_kernel) @ v
    output = nystrom_attention(q.float(), pooled.float(), v.float(), laplacian_kernel)
    assert output.dtype == torch.float32
    assert relative_error(output, expected) <= NYSTROM_FLOAT32_RELATIVE


@pytest.mark.parametrize("normalization", ["injective", "injective_row"])
def test_injective_rows_equal_their_definition_entry_by_entry(normalization: Normalization) -> None:
    q, pooled, _ = problem(rows=11, landmarks=3)
    C, W = laplacian_kernel(q, pooled), laplacian_kernel(pooled, pooled)
    G = C @ torch.linalg.inv(W + 0.01 * torch.eye(3, dtype=W.dtype)) @ C.mT
    Z = nystrom_matrix(q, pooled, laplacian_kernel, normalization=normalization)
    g = G[1, 2]
    expected = torch.empty(11, 11, dtype=torch.float64)
    sigma = g.var(dim=0, correction=0)
    for i in range(11):
        for j in range(11):
            if normalization == "injective":
                eps = 1e-3 * sigma.mean() + 1e-12
                expected[i, j] = (g[i, j] - g[:, j].mean()) / (sigma[j] + eps).sqrt() + 1 / 11
            else:
                expected[i, j] = g[i, j] - g[i].mean() + 1 / 11
    torch.testing.assert_close(Z[1, 2], expected, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)
    means = Z.sum(-2) if normalization == "injective" else Z.sum(-1)
    torch.testing.assert_close(means, torch.ones_like(means), rtol=0, atol=FLOAT64_RELATIVE)


def test_rows_of_row_sum_sum_to_one_and_none_is_the_kernel_itself() -> None:
    q, pooled, _ = problem()
    Z = nystrom_matrix(q, pooled, laplacian_kernel, normalization="row_sum")
    torch.testing.assert_close(Z.sum(-1), torch.ones_like(Z[..., 0]), rtol=FLOAT64_RELATIVE, atol=0)
    # With the tokens themselves as landmarks and an exact inverse, Nystrom reproduces the kernel.
    G = nystrom_matrix(q, q, laplacian_kernel, normalization="none", solver=torch.linalg.inv)
    torch.testing.assert_close(G, laplacian_kernel(q, q), rtol=0, atol=1e-9)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_rank_is_at_most_landmarks_plus_one(normalization: Normalization) -> None:
    q, pooled, _ = problem(rows=29, landmarks=5)
    Z = nystrom_matrix(q, pooled, laplacian_kernel, normalization=normalization)
    assert (torch.linalg.matrix_rank(Z, rtol=1e-9) <= 6).all()


def test_a_sample_does_not_depend_on_its_batch_mates() -> None:
    q, pooled, v = problem()
    whole = nystrom_attention(q, pooled, v, laplacian_kernel)
    alone = nystrom_attention(q[1:], pooled[1:], v[1:], laplacian_kernel)
    torch.testing.assert_close(alone, whole[1:], rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_empty_batches_and_token_sets(normalization: Normalization) -> None:
    q, pooled, v = problem()
    for rows in (q[:0], q[:, :, :0]):
        values = v[: rows.shape[0], :, : rows.shape[2]]
        output = nystrom_attention(rows, pooled[: rows.shape[0]], values, laplacian_kernel, normalization=normalization)
        assert output.shape == values.shape


def test_autocast_keeps_the_algebra_in_float32() -> None:
    q, pooled, v = (tensor.float() for tensor in problem())
    expected = nystrom_attention(q, pooled, v, laplacian_kernel, solver=newton)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = nystrom_attention(q, pooled, v, laplacian_kernel, solver=newton)
        half = nystrom_attention(q.bfloat16(), pooled.bfloat16(), v.bfloat16(), laplacian_kernel, solver=newton)
    assert torch.equal(inside, expected)
    assert half.dtype == torch.bfloat16
    assert torch.isfinite(half).all()


def test_gradcheck_through_solver_scale_and_statistics() -> None:
    q, pooled, v = (tensor[:1, :1, :6].requires_grad_() for tensor in problem(landmarks=3))
    scale = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)

    def attention(q: Tensor, pooled: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        return nystrom_attention(q, pooled, v, gaussian_kernel, scale=scale)

    assert torch.autograd.gradcheck(attention, (q, pooled, v, scale))


def test_torch_compile_takes_it_whole() -> None:
    q, pooled, v = problem()
    torch.compiler.reset()
    compiled = torch.compile(nystrom_attention, fullgraph=True, backend="aot_eager")
    output = compiled(q, pooled, v, laplacian_kernel, solver=newton)
    torch.testing.assert_close(output, nystrom_attention(q, pooled, v, laplacian_kernel, solver=newton))


@pytest.mark.parametrize("std", [1e3, 1e4])
@pytest.mark.parametrize("products", [False, True])
def test_a_token_far_from_every_landmark_attends_to_all_alike(std: float, products: bool, backend: str) -> None:
    q, pooled, v = (tensor.float() for tensor in problem())
    q[0, 0, 3] = std
    leaves = tuple(tensor.requires_grad_() for tensor in (q, pooled, v))
    options = {"normalization": "row_sum", "backend": backend}
    matmul = laplacian_kernel_matmul if products else None
    output = nystrom_attention(*leaves, laplacian_kernel, kernel_matmul=matmul, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(output[0, 0, 3], v[0, 0].mean(0))
    Z = nystrom_matrix(q, pooled, laplacian_kernel, **options)  # type: ignore[arg-type]
    assert relative_error(output, Z.double() @ v.double()) <= NYSTROM_FLOAT32_RELATIVE
    for grad in torch.autograd.grad(output.square().sum(), leaves):
        assert grad.isfinite().all()


@pytest.mark.parametrize("distance", [60.0, 70.0, 80.0, 87.0, 95.0, 103.0, 110.0])
@pytest.mark.parametrize("products", [False, True])
def test_gradients_stay_finite_as_a_row_sum_underflows(distance: float, products: bool, backend: str) -> None:
    q, pooled, v = (tensor.float() for tensor in problem())
    q[:, :, 3] = 4.0 * distance / 8
    leaves = tuple(tensor.requires_grad_() for tensor in (q, pooled, v))
    matmul = laplacian_kernel_matmul if products else None
    output = nystrom_attention(
        *leaves, laplacian_kernel, kernel_matmul=matmul, normalization="row_sum", backend=backend
    )
    for grad in (output, *torch.autograd.grad(output.square().sum(), leaves)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("products", [False, True])
def test_without_landmarks_row_sum_gives_the_mean(products: bool, backend: str) -> None:
    q, pooled, v = problem()
    matmul = laplacian_kernel_matmul if products else None
    output = nystrom_attention(
        q, pooled[:, :, :0], v, laplacian_kernel, kernel_matmul=matmul, normalization="row_sum", backend=backend
    )
    torch.testing.assert_close(output, v.mean(-2, keepdim=True).expand_as(v))


@pytest.mark.parametrize("normalization", ["injective", "injective_row", "none"])
def test_a_scale_may_be_a_number_and_a_solver_may_tell_its_residual(normalization: Normalization) -> None:
    def attention(solver: Any = newton_schulz_inverse, scale: Any = 2.0) -> Tensor:
        q, pooled, v = problem()
        return nystrom_attention(
            q, pooled, v, laplacian_kernel, normalization=normalization, solver=solver, scale=scale
        )

    assert torch.equal(attention(), attention(newton, torch.full((3,), 2.0)))
    with pytest.raises(TypeError, match="solver must return a tensor or an IteratedInverse, not a tuple"):
        attention(lambda W: (newton(W), 0))
    with pytest.raises(TypeError, match="nystrom_attention: scale must be a number, not '2'"):
        attention(scale="2")
    for wrong in (torch.ones(5), torch.ones(1, 1, 3)):
        with pytest.raises(ValueError, match=r"nystrom_attention: scale .* does not broadcast to the heads \(2, 3\)"):
            attention(scale=wrong)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_shapes_that_do_not_fit_are_named(normalization: Normalization) -> None:
    q, pooled, v = problem()

    def attention(landmarks: Tensor, values: Tensor) -> Tensor:
        return nystrom_attention(q, landmarks, values, laplacian_kernel, normalization=normalization)

    for values in (v[:, :, :1], v[0, 0, 0], v[:, :, :28]):
        with pytest.raises(ValueError, match=r"^nystrom_attention: expected v \[\.\.\., 29, Dv\].*, not \(") as caught:
            attention(pooled, values)
        assert str(tuple(values.shape)) in str(caught.value)
    message = r"expected q .* and landmarks .*, not \(2, 3, 29, 8\) and \(2, 3, 5, 7\)"
    with pytest.raises(ValueError, match=message):
        attention(pooled[..., :7], v)
    with pytest.raises(ValueError, match=message):
        nystrom_matrix(q, pooled[..., :7], laplacian_kernel, normalization=normalization)


def test_bad_arguments_are_named() -> None:
    q, pooled, v = problem()
    with pytest.raises(ValueError, match="not 'softmax'"):
        nystrom_attention(q, pooled, v, laplacian_kernel, normalization="softmax")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="nystrom_attention: eps_relative must be a number, not None"):
        nystrom_attention(q, pooled, v, laplacian_kernel, eps_relative=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kernel_matmul must be None"):
        nystrom_attention(q, pooled, v, laplacian_kernel, kernel_matmul=laplacian_kernel_matmul)
    with pytest.raises(ValueError, match="scale must be None"):
        nystrom_attention(q, pooled, v, laplacian_kernel, normalization="row_sum", scale=torch.ones(3))
