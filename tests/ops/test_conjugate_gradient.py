"""Laws of the inverse by conjugate gradients: the definition, its gradients, reported failure, equal cost."""

import pytest
import torch
from torch import Tensor

from attngeo.errors import UserError
from attngeo.ops import backend as ops_backend
from attngeo.ops import conjugate_gradient_inverse, newton_schulz_inverse
from attngeo.ops.conjugate_gradient.macs import conjugate_gradient_macs
from attngeo.ops.conjugate_gradient.naive import iterates
from attngeo.ops.newton_schulz.macs import newton_schulz_macs
from tests.ops.test_inverses import conditioned_rounding, landmark_matrix, matrix_of_condition, norm, shifted
from tests.tolerances import CONVERGED_RESIDUAL_FLOAT64, FLOAT64_RELATIVE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("landmarks", [1, 2, 3, 7, 16, 31, 49])
def test_inverse_and_gradient_equal_the_definition(landmarks: int, dtype: torch.dtype) -> None:
    W = landmark_matrix(landmarks).to(dtype).requires_grad_()
    P = shifted(W.detach())
    found = conjugate_gradient_inverse(W, 4 * landmarks)
    limit = conditioned_rounding(P, dtype)
    expected = torch.linalg.inv(P)
    assert found.inverse.dtype == dtype
    assert (norm(found.inverse.detach() - expected) <= limit * norm(expected)).all()
    assert found.converged.all()
    assert not found.residual.requires_grad
    weight = torch.randn(found.inverse.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (grad,) = torch.autograd.grad(found.inverse, W, weight.to(dtype))
    error = norm(grad + expected.mT @ weight @ expected.mT)
    assert (error <= 3 * limit * norm(expected) ** 2 * norm(weight)).all()


def test_as_many_iterations_as_rows_reach_the_inverse_and_more_change_nothing() -> None:
    P = matrix_of_condition(50.0, 7)
    steps = list(iterates(P, 12))
    assert len(steps) == 12
    identity = torch.eye(7, dtype=torch.float64)
    assert norm(identity - P @ steps[6]) < CONVERGED_RESIDUAL_FLOAT64
    assert norm(identity - P @ steps[2]) > 1e-3
    assert torch.equal(steps[-1], steps[-2]), "columns at rounding stay as they are"


@pytest.mark.parametrize("iterations", [0, 1, 3, 5, 40])
def test_the_loop_gradient_is_exact_before_and_after_convergence(iterations: int) -> None:
    W = landmark_matrix(5)[:1, :2].requires_grad_()

    def inverse(matrix: Tensor) -> Tensor:
        symmetric = (matrix + matrix.mT) / 2
        return conjugate_gradient_inverse(symmetric, iterations, 0.1, backward="loop").inverse

    assert torch.autograd.gradcheck(inverse, (W,))


def test_derivatives_of_a_converged_inverse_are_exact_and_differ_from_the_loops_before() -> None:
    W = landmark_matrix(4)[:1, :2].requires_grad_()

    def inverse(matrix: Tensor) -> Tensor:
        return conjugate_gradient_inverse((matrix + matrix.mT) / 2, 12, 0.1).inverse

    assert torch.autograd.gradcheck(inverse, (W,))
    assert torch.autograd.gradgradcheck(inverse, (W,))
    implicit, loop = (
        torch.autograd.grad(conjugate_gradient_inverse(W, 2, backward=mode).inverse.square().sum(), W)[0]
        for mode in ("implicit", "loop")
    )
    assert (implicit - loop).abs().max() > 1e-3 * loop.abs().max()


@pytest.mark.parametrize("backward", ["implicit", "loop"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_matrices_and_identical_landmarks_are_finite_with_their_gradients(
    dtype: torch.dtype, backward: str
) -> None:
    zero = torch.zeros(1, 2, 5, 5, dtype=dtype, requires_grad=True)
    found = conjugate_gradient_inverse(zero, 40, 0.0, backward=backward)  # type: ignore[arg-type]
    assert torch.equal(found.inverse, torch.zeros_like(zero))
    assert (found.residual - 5**0.5).abs().max() < 1e-6
    assert not found.converged.any()
    same = torch.ones(1, 1, 49, 49, dtype=dtype, requires_grad=True)  # rank one: two iterations, then nothing moves
    for iterations in (2, 40):
        found = conjugate_gradient_inverse(same, iterations, backward=backward)  # type: ignore[arg-type]
        expected = torch.linalg.inv(shifted(same.detach()))
        limit = conditioned_rounding(shifted(same.detach()), dtype)
        assert (norm(found.inverse.detach() - expected) <= limit * norm(expected)).all()
        assert torch.autograd.grad(found.inverse.sum(), same)[0].isfinite().all()


@pytest.mark.parametrize("kappa", [1e1, 1e3, 1e6])
def test_the_loop_gradient_stays_finite_however_long_it_runs_on(kappa: float) -> None:
    W = matrix_of_condition(kappa, 16).float().requires_grad_()
    found = conjugate_gradient_inverse(W, 200, 0.0, backward="loop")
    assert found.inverse.isfinite().all()
    assert torch.autograd.grad(found.inverse.sum(), W)[0].isfinite().all()
    true = norm(torch.eye(16) - W.detach().double() @ found.inverse.detach().double())
    assert abs(float(found.residual) - float(true)) <= float(conditioned_rounding(W.detach(), torch.float32)) + 1e-5


def test_what_is_not_positive_definite_or_not_a_number_is_reported() -> None:
    W = landmark_matrix(7).float()
    W[0, 1] = -torch.eye(7)
    W[1, 2, 3, 4] = torch.nan
    found = conjugate_gradient_inverse(W)
    assert found.inverse[0, 1].isfinite().all()
    assert not found.converged[0, 1]
    assert torch.isinf(found.residual[1, 2])
    assert found.residual.isfinite().sum() == found.residual.numel() - 1


def test_equal_matrix_products_are_20_iterations_of_newton_schulz() -> None:
    assert conjugate_gradient_macs(49, 40) == newton_schulz_macs(49, 20)
    W = landmark_matrix().float()
    assert conjugate_gradient_inverse(W).residual.shape == newton_schulz_inverse(W).residual.shape


def test_autocast_half_precision_and_faster_products_change_nothing() -> None:
    W = landmark_matrix(7).float()
    expected = conjugate_gradient_inverse(W).inverse
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(conjugate_gradient_inverse(W).inverse, expected)
        assert conjugate_gradient_inverse(W.bfloat16()).inverse.dtype == torch.float32
    assert conjugate_gradient_inverse(W.bfloat16()).inverse.dtype == torch.bfloat16


def test_vmap_and_torch_compile_equal_eager() -> None:
    W = landmark_matrix(5).requires_grad_()
    expected = conjugate_gradient_inverse(W, 6).inverse
    mapped = torch.vmap(lambda matrix: conjugate_gradient_inverse(matrix, 6).inverse)(W)
    torch.compiler.reset()
    compiled = torch.compile(lambda m: conjugate_gradient_inverse(m, 6).inverse, fullgraph=True, backend="aot_eager")(W)
    for found in (mapped, compiled):
        torch.testing.assert_close(found, expected, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)
        grads = [torch.autograd.grad(out.square().sum(), W, retain_graph=True)[0] for out in (found, expected)]
        torch.testing.assert_close(*grads, rtol=1e3 * FLOAT64_RELATIVE, atol=1e3 * FLOAT64_RELATIVE)


@pytest.mark.parametrize("shape", [(0, 2, 3, 3), (2, 2, 0, 0)])
def test_empty_batches_and_matrices(shape: tuple[int, ...]) -> None:
    W = torch.zeros(shape, requires_grad=True)
    for backward in ("implicit", "loop"):
        found = conjugate_gradient_inverse(W, 3, backward=backward)  # type: ignore[arg-type]
        assert found.inverse.shape == W.shape
        assert (found.residual == 0).all()
        found.inverse.sum().backward()


def test_bad_arguments_are_named_and_a_compiled_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    W = torch.eye(3).reshape(1, 1, 3, 3)
    with pytest.raises(ValueError, match=r"\(1, 1, 3, 2\)"):
        conjugate_gradient_inverse(W[..., :2])
    with pytest.raises(ValueError, match="iterations"):
        conjugate_gradient_inverse(W, -1)
    with pytest.raises(ValueError, match="'implicit' or 'loop'"):
        conjugate_gradient_inverse(W, backward="none")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no compiled form exists"):
        conjugate_gradient_inverse(W, backend="compiled")
    monkeypatch.setattr(ops_backend, "_ran", {})
    conjugate_gradient_inverse(W)
    assert ops_backend.ran() == {"conjugate_gradient_inverse": "naive cpu"}
