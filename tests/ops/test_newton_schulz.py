"""Laws of the landmark solvers: convergence, reported failure, and both gradients."""

import pytest
import torch
from torch import Tensor

from attngeo.ops import laplacian_kernel, newton_schulz_inverse, spd_inverse
from attngeo.ops.newton_schulz import Start
from tests.tolerances import CONVERGED_RESIDUAL_FLOAT64, FLOAT64_RELATIVE


def landmark_matrix(landmarks: int = 49, std: float = 0.3, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = std * torch.randn(2, 3, landmarks, 8, generator=generator, dtype=torch.float64)
    return laplacian_kernel(tokens, tokens, backend="naive")


@pytest.mark.parametrize("start", ["paper", "identity"])
@pytest.mark.parametrize("landmarks", [1, 2, 7, 49])
def test_enough_iterations_give_the_inverse(start: Start, landmarks: int) -> None:
    W = landmark_matrix(landmarks)
    inverse, residual = newton_schulz_inverse(W, 40, start=start, backend="naive")
    assert residual.shape == W.shape[:2]
    assert not residual.requires_grad
    assert residual.max() <= CONVERGED_RESIDUAL_FLOAT64
    P = W + 0.01 * torch.eye(landmarks, dtype=W.dtype)
    torch.testing.assert_close(inverse, torch.linalg.inv(P), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(spd_inverse(W), torch.linalg.inv(P), rtol=1e-9, atol=1e-9)


def test_the_residual_is_that_of_the_result_and_falls_with_the_iterations() -> None:
    W = landmark_matrix()
    residuals = []
    for iterations in (0, 5, 10, 20, 30):
        inverse, residual = newton_schulz_inverse(W, iterations)
        P = W + 0.01 * torch.eye(49, dtype=W.dtype)
        direct = torch.linalg.matrix_norm(torch.eye(49, dtype=W.dtype) - P @ inverse)
        torch.testing.assert_close(residual, direct, rtol=1e-6, atol=CONVERGED_RESIDUAL_FLOAT64)
        residuals.append(float(residual.max()))
    assert residuals == sorted(residuals, reverse=True)
    assert residuals[1] > 0.1  # five iterations are not an inverse, and say so


def test_the_identity_start_needs_fewer_iterations() -> None:
    W = landmark_matrix()
    assert (
        newton_schulz_inverse(W, 10, start="identity")[1].max() < newton_schulz_inverse(W, 10, start="paper")[1].min()
    )


def test_the_printed_start_diverges_and_is_reported() -> None:
    W = landmark_matrix().float()
    assert newton_schulz_inverse(W, 5, start="printed")[1].min() > 1e3
    residual = newton_schulz_inverse(W, 20, start="printed")[1]
    assert torch.isinf(residual).all()  # never NaN: a comparison with a tolerance must fail


@pytest.mark.parametrize("start", ["paper", "identity", "printed"])
@pytest.mark.parametrize("eps", [0.0, 0.01])
def test_a_zero_matrix_gives_a_finite_answer_or_a_reported_residual(start: Start, eps: float) -> None:
    W = torch.zeros(1, 2, 5, 5)
    inverse, residual = newton_schulz_inverse(W, 20, eps, start=start)
    assert torch.isfinite(inverse).all()
    assert torch.isfinite(residual).all()
    if eps == 0 or start == "printed":  # no inverse, or a start that the printed formula does not have
        assert (residual > 1).all()


@pytest.mark.parametrize("eps", [0.0, 0.01])
def test_singular_and_asymmetric_matrices_are_finite_and_reported(eps: float) -> None:
    generator = torch.Generator().manual_seed(5)
    factor = torch.randn(1, 1, 7, 3, generator=generator)
    singular = factor @ factor.mT
    asymmetric = torch.zeros(1, 1, 7, 7)
    asymmetric[..., 0] = 1.0  # ||P||_2 exceeds ||P||_inf: the start as printed for symmetric P would diverge
    asymmetric += 0.1 * torch.randn(1, 1, 7, 7, generator=generator)
    for W in (singular, asymmetric):
        inverse, residual = newton_schulz_inverse(W, 20, eps)
        assert torch.isfinite(inverse).all()
        assert torch.isfinite(residual).all()
    singular_residual = newton_schulz_inverse(singular, 20, 0.0)[1]
    assert singular_residual.item() == pytest.approx(2.0, abs=0.01)  # sqrt(7 - 3): the null space stays
    assert newton_schulz_inverse(asymmetric, 40, 0.0)[1].item() < 1e-3


def test_both_starting_norms_agree_on_symmetric_matrices_with_the_paper() -> None:
    W = landmark_matrix()
    P = W + 0.01 * torch.eye(49, dtype=W.dtype)
    alpha = 1.8 / P.abs().sum(-1).amax(-1).square()
    torch.testing.assert_close(newton_schulz_inverse(W, 0)[0], alpha[..., None, None] * P.mT, rtol=1e-14, atol=0)


def test_nan_reaches_the_residual_as_infinity_and_only_in_its_own_matrix() -> None:
    W = landmark_matrix(7).float()
    W[1, 2, 3, 4] = torch.nan
    inverse, residual = newton_schulz_inverse(W, 20)
    assert inverse[1, 2].isnan().any()
    assert torch.isinf(residual[1, 2])
    assert torch.isfinite(residual.flatten()[:-1]).all()


@pytest.mark.parametrize("start", ["paper", "identity", "printed"])
@pytest.mark.parametrize("iterations", [0, 3])
def test_the_loop_gradient_is_exact_before_convergence(start: Start, iterations: int) -> None:
    W = (landmark_matrix(4)[:1, :1] + 0.01 * torch.rand(4, 4, dtype=torch.float64)).requires_grad_()

    def inverse(matrix: Tensor) -> Tensor:
        return newton_schulz_inverse(matrix, iterations, 0.1, start=start, backward="loop")[0]

    assert torch.autograd.gradcheck(inverse, (W,))


def test_the_implicit_gradient_is_exact_once_converged_and_not_before() -> None:
    W = landmark_matrix(5).requires_grad_()
    assert torch.autograd.gradcheck(lambda matrix: newton_schulz_inverse(matrix, 40, 0.1)[0], (W,))
    (implicit,) = torch.autograd.grad(newton_schulz_inverse(W, 5)[0].square().sum(), W)
    (loop,) = torch.autograd.grad(newton_schulz_inverse(W, 5, backward="loop")[0].square().sum(), W)
    assert (implicit - loop).abs().max() > 1e-3 * loop.abs().max()


def test_autocast_does_not_reach_the_products() -> None:
    W = landmark_matrix(7).float()
    expected = newton_schulz_inverse(W, 20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = newton_schulz_inverse(W, 20)
        assert torch.equal(spd_inverse(W), spd_inverse(W))
    assert all(torch.equal(first, second) for first, second in zip(inside, expected, strict=True))


@pytest.mark.parametrize("shape", [(0, 2, 3, 3), (2, 2, 0, 0)])
def test_empty_batches_and_matrices(shape: tuple[int, ...]) -> None:
    W = torch.zeros(shape, requires_grad=True)
    for backward in ("implicit", "loop"):
        inverse, residual = newton_schulz_inverse(W, 3, backward=backward)  # type: ignore[arg-type]
        assert inverse.shape == W.shape
        assert residual.shape == W.shape[:2]
        inverse.sum().backward()
    assert spd_inverse(W).shape == W.shape


def test_vmap_and_compile_agree_with_eager() -> None:
    W = landmark_matrix(5)
    expected = newton_schulz_inverse(W, 20)
    mapped = torch.vmap(lambda matrix: newton_schulz_inverse(matrix, 20))(W)
    torch.compiler.reset()
    compiled = torch.compile(lambda matrix: newton_schulz_inverse(matrix, 20), fullgraph=True, backend="aot_eager")(W)
    for result in (mapped, compiled):
        for value, reference in zip(result, expected, strict=True):
            torch.testing.assert_close(value, reference, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)


def test_cholesky_refuses_an_indefinite_matrix() -> None:
    with pytest.raises(torch.linalg.LinAlgError):
        spd_inverse(-torch.eye(3).reshape(1, 1, 3, 3))


def test_bad_arguments_are_named() -> None:
    W = torch.eye(3).reshape(1, 1, 3, 3)
    with pytest.raises(ValueError, match=r"\(1, 1, 3, 2\)"):
        newton_schulz_inverse(W[..., :2])
    with pytest.raises(ValueError, match="iterations"):
        newton_schulz_inverse(W, -1)
    with pytest.raises(ValueError, match="'paper', 'identity' or 'printed', not 'warm'"):
        newton_schulz_inverse(W, start="warm")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'implicit' or 'loop'"):
        newton_schulz_inverse(W, backward="none")  # type: ignore[arg-type]
