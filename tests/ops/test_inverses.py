"""Laws of the inverses: convergence, reported failure, gradients; Newton-Schulz and the direct one, both backends."""

import pytest
import torch
from torch import Tensor

from attngeo.errors import UserError
from attngeo.ops import backend as ops_backend
from attngeo.ops import conjugate_gradient_inverse, laplacian_kernel, newton_schulz_inverse, spd_inverse
from attngeo.ops.newton_schulz import CONVERGED_RESIDUAL, Start, inverse_residual
from tests.tolerances import (
    BFLOAT16_ROUNDING,
    FLOAT64_RELATIVE,
    INVERSE_CONDITIONED_ROUNDINGS,
)

SIZES = [1, 2, 3, 7, 16, 31, 33, 49, 64, 65, 96, 128, 257]


def landmark_matrix(landmarks: int = 49, std: float = 0.3, seed: int = 0) -> Tensor:
    """Kernel matrices [2,3,M,M] of random tokens, float64."""
    generator = torch.Generator().manual_seed(seed)
    tokens = std * torch.randn(2, 3, landmarks, 8, generator=generator, dtype=torch.float64)
    return laplacian_kernel(tokens, tokens, backend="naive")


def matrix_of_condition(kappa: float, size: int, seed: int = 0) -> Tensor:
    """A symmetric positive definite matrix [M,M] with eigenvalues 1 to 1 / kappa."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    matrix = basis * torch.logspace(0, -torch.tensor(kappa).log10().item(), size, dtype=torch.float64) @ basis.mT
    return (matrix + matrix.mT) / 2


def shifted(W: Tensor, eps: float = 0.01) -> Tensor:
    return W.double() + eps * torch.eye(W.shape[-1], dtype=torch.float64)


def norm(matrix: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrix.double())


def conditioned_rounding(P: Tensor, dtype: torch.dtype) -> Tensor:
    """What rounding leaves of I - P X, relative to an inverse, for every matrix."""
    condition = torch.linalg.cond(P.double()) if P.shape[-1] else torch.ones(P.shape[:-2], dtype=torch.float64)
    return INVERSE_CONDITIONED_ROUNDINGS * P.shape[-1] * torch.finfo(dtype).eps * condition


def invert(solver: str, W: Tensor, eps: float = 0.01, backend: str = "auto") -> Tensor:
    """By one of "paper", "identity" (40 iterations) and "spd"."""
    if solver == "spd":
        return spd_inverse(W, eps, backend=backend)
    return newton_schulz_inverse(W, 40, eps, start=solver, backend=backend).inverse  # type: ignore[arg-type]


def check_inverse_and_gradient(solver: str, landmarks: int, dtype: torch.dtype, backend: str) -> None:
    matrices = landmark_matrix(landmarks)
    W = matrices[:1, :2].to(dtype).requires_grad_()
    P = shifted(W.detach())
    inverse = invert(solver, W, backend=backend)
    limit = conditioned_rounding(P, dtype)
    assert inverse.dtype == dtype
    assert (norm(torch.eye(landmarks) - P @ inverse.detach().double()) <= limit).all()
    expected = torch.linalg.inv(P)
    assert (norm(inverse.detach() - expected) <= limit * norm(expected)).all()
    weight = torch.randn(inverse.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    weight = weight + weight.mT  # of a symmetric weight: then all conventions for symmetric matrices agree
    (grad,) = torch.autograd.grad(inverse, W, weight)
    assert (norm(grad + expected @ weight.double() @ expected) <= 3 * limit * norm(expected) ** 2 * norm(weight)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", ["paper", "identity", "spd"])
@pytest.mark.parametrize("landmarks", SIZES)
def test_inverse_and_gradient_equal_the_definition(
    solver: str, landmarks: int, dtype: torch.dtype, backend: str
) -> None:
    check_inverse_and_gradient(solver, landmarks, dtype, backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_instruction_set_obeys_the_same_laws(variant: str, dtype: torch.dtype) -> None:
    for solver in ("paper", "identity", "spd"):
        for landmarks in SIZES:
            check_inverse_and_gradient(solver, landmarks, dtype, "compiled")
        test_the_bits_do_not_depend_on_batch_or_threads(solver, dtype, None)
    test_nan_reaches_the_residual_as_infinity_and_only_in_its_own_matrix("compiled")
    test_the_direct_inverse_names_the_matrix_that_is_not_positive_definite(float("nan"), "compiled")
    assert f"compiled cpu {variant}" in ops_backend.ran()["spd_inverse"]


def test_the_residual_is_that_of_the_result_and_falls_with_the_iterations(backend: str) -> None:
    for dtype in (torch.float32, torch.float64):
        W = landmark_matrix().to(dtype)
        residuals = []
        for iterations in (0, 5, 10, 20, 30):
            found = newton_schulz_inverse(W, iterations, backend=backend)
            direct = norm(torch.eye(49) - shifted(W) @ found.inverse.double())
            assert ((found.residual - direct).abs() <= conditioned_rounding(shifted(W), dtype) + 1e-6 * direct).all()
            assert not found.residual.requires_grad
            residuals.append(float(found.residual.max()))
            assert torch.equal(found.converged, found.residual <= CONVERGED_RESIDUAL)
        assert residuals[:4] == sorted(residuals[:4], reverse=True)
        assert residuals[1] > 0.1  # five iterations are not an inverse, and say so
        assert not newton_schulz_inverse(W, 5, backend=backend).converged.any()
        assert found.converged.all()


def test_the_identity_start_needs_fewer_iterations(backend: str) -> None:
    W = landmark_matrix()
    identity, paper = (newton_schulz_inverse(W, 10, start=s, backend=backend).residual for s in ("identity", "paper"))
    assert identity.max() < paper.min()


def test_the_printed_start_diverges_and_is_reported() -> None:
    W = landmark_matrix().float()
    assert newton_schulz_inverse(W, 5, start="printed").residual.min() > 1e3
    found = newton_schulz_inverse(W, 20, start="printed")
    assert torch.isinf(found.residual).all()  # never NaN: a comparison with a tolerance must fail
    assert not found.converged.any()


def test_the_printed_start_and_the_loops_gradient_are_naive_and_say_so(
    extension: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    W = landmark_matrix(3)
    for options, what in (({"start": "printed"}, "start='printed'"), ({"backward": "loop"}, "backward='loop'")):
        monkeypatch.setattr(ops_backend, "_ran", {})
        newton_schulz_inverse(W, 2, **options)  # type: ignore[arg-type]
        assert ops_backend.ran() == {"newton_schulz_inverse": f"naive cpu (no compiled form of {what})"}
        with pytest.raises(UserError, match=f"no compiled form of {what}") as caught:
            newton_schulz_inverse(W, 2, backend="compiled", **options)  # type: ignore[arg-type]
        assert caught.value.remedy == "use backend='auto' or backend='naive'"


@pytest.mark.parametrize("eps", [0.0, 0.01])
def test_a_zero_matrix_gives_a_finite_answer_or_a_reported_failure(eps: float, backend: str) -> None:
    W = torch.zeros(1, 2, 5, 5)
    for start in ("paper", "identity"):
        found = newton_schulz_inverse(W, 20, eps, start=start, backend=backend)  # type: ignore[arg-type]
        assert found.inverse.isfinite().all()
        assert found.residual.isfinite().all()
        assert (found.converged == (eps > 0)).all()
    if eps > 0:
        torch.testing.assert_close(spd_inverse(W, eps, backend=backend), torch.eye(5).expand(1, 2, 5, 5) / eps)
    else:
        with pytest.raises(torch.linalg.LinAlgError):
            spd_inverse(W, eps, backend=backend)


def test_singular_and_asymmetric_matrices_are_finite_and_reported(backend: str) -> None:
    generator = torch.Generator().manual_seed(5)
    factor = torch.randn(1, 1, 7, 3, generator=generator)
    singular = factor @ factor.mT
    asymmetric = torch.zeros(1, 1, 7, 7)
    asymmetric[..., 0] = 1.0  # ||P||_2 exceeds ||P||_inf: the start as printed for symmetric P would diverge
    asymmetric += 0.1 * torch.randn(1, 1, 7, 7, generator=generator)
    for W in (singular, asymmetric):
        for eps in (0.0, 0.01):
            found = newton_schulz_inverse(W, 20, eps, backend=backend)
            assert found.inverse.isfinite().all()
            assert found.residual.isfinite().all()
    found = newton_schulz_inverse(singular, 20, 0.0, backend=backend)
    assert found.residual.item() == pytest.approx(2.0, abs=0.01)  # sqrt(7 - 3): the null space stays
    assert not found.converged
    assert newton_schulz_inverse(asymmetric, 40, 0.0, backend=backend).converged
    # The direct inverse of a matrix that is not symmetric is that of another, symmetric one: its residual tells.
    lopsided = torch.eye(7) + 0.5 * torch.ones(7, 7).tril(-1)
    inverse = spd_inverse(lopsided, backend=backend)
    assert inverse.isfinite().all()
    assert inverse_residual(lopsided, inverse) > CONVERGED_RESIDUAL


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identical_landmarks_are_inverted_by_the_shift_alone(dtype: torch.dtype, backend: str) -> None:
    W = torch.ones(1, 1, 49, 49, dtype=dtype)  # rank one, condition 4901 with the shift
    expected = torch.linalg.inv(shifted(W))
    for solver in ("paper", "identity", "spd"):
        inverse = invert(solver, W, backend=backend)
        assert (norm(inverse - expected) <= conditioned_rounding(shifted(W), dtype) * norm(expected)).all()


@pytest.mark.parametrize("kappa", [1e1, 1e2, 1e4, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_badly_conditioned_matrices_are_inverted_or_reported(kappa: float, dtype: torch.dtype, backend: str) -> None:
    W = matrix_of_condition(kappa, 49).to(dtype)
    for iterations, start in ((50, "paper"), (30, "identity"), (20, "paper")):
        found = newton_schulz_inverse(W, iterations, 0.0, start=start, backend=backend)  # type: ignore[arg-type]
        true_residual = norm(torch.eye(49) - W.double() @ found.inverse.double())
        assert found.inverse.isfinite().all()
        assert found.residual.isfinite()
        assert (found.residual - true_residual).abs() <= conditioned_rounding(W, dtype) + 1e-5 * true_residual
        if found.converged:
            expected = torch.linalg.inv(W.double())
            error = norm(found.inverse - expected) / norm(expected)
            assert error <= CONVERGED_RESIDUAL + conditioned_rounding(W, dtype)
        assert found.converged or dtype == torch.float32 or iterations == 20
        assert found.converged or kappa > 100
    if kappa < 1e6 or dtype == torch.float64:  # at 1e6 float32 has no digit left, and may have no positive pivot
        inverse = spd_inverse(W, 0.0, backend=backend)
        assert inverse_residual(W, inverse, 0.0) <= conditioned_rounding(W, dtype)


def test_both_starting_norms_agree_on_symmetric_matrices_with_the_paper(backend: str) -> None:
    W = landmark_matrix()
    P = shifted(W)
    alpha = 1.8 / P.abs().sum(-1).amax(-1).square()
    start = newton_schulz_inverse(W, 0, backend=backend).inverse
    torch.testing.assert_close(start, alpha[..., None, None] * P.mT, rtol=1e-14, atol=0)


def test_nan_reaches_the_residual_as_infinity_and_only_in_its_own_matrix(backend: str) -> None:
    W = landmark_matrix(7).float()
    W[1, 2, 3, 4] = torch.nan
    found = newton_schulz_inverse(W, 20, backend=backend)
    assert found.inverse[1, 2].isnan().any()
    assert torch.isinf(found.residual[1, 2])
    assert not found.converged[1, 2]
    assert found.residual.flatten()[:-1].isfinite().all()


@pytest.mark.parametrize("wrong", [-3.0, float("nan")])
def test_the_direct_inverse_names_the_matrix_that_is_not_positive_definite(wrong: float, backend: str) -> None:
    W = landmark_matrix(7)
    W[1, 0, 2, 2] = wrong
    with pytest.raises(torch.linalg.LinAlgError, match=r"matrix \(1, 0\)" if backend == "compiled" else "element 3"):
        spd_inverse(W, backend=backend)
    W[:, 2, 0, 0] = wrong
    with pytest.raises(torch.linalg.LinAlgError):
        torch.vmap(lambda matrix: spd_inverse(matrix, backend=backend))(W)
    alone = -torch.eye(3)
    with pytest.raises(torch.linalg.LinAlgError):
        spd_inverse(alone, backend=backend)


def test_the_direct_inverse_is_exactly_symmetric(extension: None) -> None:
    for landmarks in (7, 49, 130):
        inverse = spd_inverse(landmark_matrix(landmarks).float(), backend="compiled")
        assert torch.equal(inverse, inverse.mT)


@pytest.mark.parametrize("start", ["paper", "identity", "printed"])
@pytest.mark.parametrize("iterations", [0, 3])
def test_the_loop_gradient_is_exact_before_convergence(start: Start, iterations: int) -> None:
    W = (landmark_matrix(4)[:1, :1] + 0.01 * torch.rand(4, 4, dtype=torch.float64)).requires_grad_()

    def inverse(matrix: Tensor) -> Tensor:
        return newton_schulz_inverse(matrix, iterations, 0.1, start=start, backward="loop").inverse

    assert torch.autograd.gradcheck(inverse, (W,))


@pytest.mark.parametrize("solver", ["paper", "identity", "spd"])
def test_first_and_second_derivatives_of_a_converged_inverse_are_exact(solver: str, backend: str) -> None:
    W = landmark_matrix(4)[:1, :2].requires_grad_()

    def inverse(matrix: Tensor) -> Tensor:
        # Through the symmetric part, which is what the direct inverse is a function of.
        return invert(solver, (matrix + matrix.mT) / 2, 0.1, backend)

    assert torch.autograd.gradcheck(inverse, (W,))
    assert torch.autograd.gradgradcheck(inverse, (W,))


def test_the_implicit_gradient_is_not_that_of_the_loop_before_convergence(backend: str) -> None:
    W = landmark_matrix(5).requires_grad_()
    found = newton_schulz_inverse(W, 5, backend=backend)
    (implicit,) = torch.autograd.grad(found.inverse.square().sum(), W)
    (loop,) = torch.autograd.grad(newton_schulz_inverse(W, 5, backward="loop").inverse.square().sum(), W)
    assert (implicit - loop).abs().max() > 1e-3 * loop.abs().max()


def test_the_gradients_of_both_backends_are_the_same(extension: None) -> None:
    W = landmark_matrix(9).requires_grad_()
    weight = torch.randn(9, 9, dtype=torch.float64)  # not symmetric: conventions show
    for solver in ("paper", "identity", "spd"):
        naive, compiled = (
            torch.autograd.grad((invert(solver, W, backend=name) * weight).sum(), W)[0]
            for name in ("naive", "compiled")
        )
        torch.testing.assert_close(compiled, naive, rtol=1e-8, atol=1e-8 * naive.abs().max().item())


def test_strided_matrices_equal_their_copies(backend: str) -> None:
    W = landmark_matrix(13)
    spaced = torch.zeros(2, 3, 13, 26, dtype=W.dtype)[..., ::2].copy_(W)
    for view in (W.mT, W.transpose(0, 1), spaced, W[:1, :1].expand(2, 3, 13, 13)):
        for solver in ("paper", "spd"):
            found, expected = invert(solver, view, backend=backend), invert(solver, view.contiguous(), backend=backend)
            torch.testing.assert_close(found, expected, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)
            assert backend == "naive" or torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", ["paper", "identity", "spd"])
def test_the_bits_do_not_depend_on_batch_or_threads(solver: str, dtype: torch.dtype, extension: None) -> None:
    threads = torch.get_num_threads()
    for landmarks in (33, 130):
        W = landmark_matrix(landmarks).to(dtype)
        runs = []
        try:
            for count in (1, 2, 3, 3):
                torch.set_num_threads(count)
                runs.append(invert(solver, W, backend="compiled"))
        finally:
            torch.set_num_threads(threads)
        assert all(torch.equal(runs[0], other) for other in runs[1:])
        assert torch.equal(invert(solver, W[1, 2], backend="compiled"), runs[0][1, 2])


def test_autocast_changes_no_bit_and_half_precision_is_computed_in_float32(backend: str) -> None:
    W = landmark_matrix(7).float().requires_grad_()
    half = W.detach().bfloat16()
    for solver in ("paper", "identity", "spd"):
        expected = invert(solver, W, backend=backend)
        (expected_grad,) = torch.autograd.grad(expected.square().sum(), W)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = invert(solver, W, backend=backend)
            of_half = invert(solver, half, backend=backend)
        (grad,) = torch.autograd.grad(inside.square().sum(), W)
        assert torch.equal(inside, expected)
        assert torch.equal(grad, expected_grad)
        assert of_half.dtype == torch.float32
        rounded = invert(solver, half, backend=backend)
        assert rounded.dtype == torch.bfloat16
        assert ((rounded.float() - of_half).abs() <= BFLOAT16_ROUNDING * of_half.abs()).all()
    assert newton_schulz_inverse(half, backend=backend).residual.dtype == torch.float32


@pytest.mark.parametrize("solver", ["paper", "spd"])
def test_a_backward_pass_inside_autocast_is_the_one_outside(solver: str, extension: None) -> None:
    W = landmark_matrix(7).float().requires_grad_()
    (outside,) = torch.autograd.grad(invert(solver, W, backend="compiled").square().sum(), W)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (inside,) = torch.autograd.grad(invert(solver, W, backend="compiled").square().sum(), W)
    assert torch.equal(inside, outside)


def test_what_tells_of_failure_carries_no_gradient(extension: None) -> None:
    W = landmark_matrix(5).requires_grad_()
    for outputs in (
        torch.ops.attngeo.newton_schulz_inverse(W, 3, 0.01, "paper"),
        torch.ops.attngeo.spd_inverse(W, 0.01),
    ):
        assert [output.requires_grad for output in outputs] == [True, False]


def test_autocast_reaches_the_registered_operators_themselves(extension: None) -> None:
    half = landmark_matrix(5).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.ops.attngeo.newton_schulz_inverse(half, 3, 0.01, "paper")[0].dtype == torch.float32
        assert torch.ops.attngeo.spd_inverse(half, 0.01)[0].dtype == torch.float32


def test_torchs_faster_products_change_nothing(backend: str) -> None:
    W = landmark_matrix().float().requires_grad_()
    for solver in ("paper", "spd"):
        usual = invert(solver, W, backend=backend)
        (usual_grad,) = torch.autograd.grad(usual.square().sum(), W)
        try:
            torch.set_float32_matmul_precision("medium")
            found = invert(solver, W, backend=backend)
            (grad,) = torch.autograd.grad(found.square().sum(), W)
        finally:
            torch.set_float32_matmul_precision("highest")
        limit = conditioned_rounding(shifted(W.detach()), torch.float32)
        assert (norm(found - usual) <= limit * norm(usual)).all()
        assert (norm(grad - usual_grad) <= 3 * limit * norm(usual_grad)).all()
        assert backend == "naive" or torch.equal(found, usual)


@pytest.mark.parametrize("shape", [(0, 2, 3, 3), (2, 2, 0, 0)])
def test_empty_batches_and_matrices(shape: tuple[int, ...], backend: str) -> None:
    W = torch.zeros(shape, requires_grad=True)
    found = newton_schulz_inverse(W, 3, backend=backend)
    assert found.inverse.shape == W.shape
    assert found.residual.shape == W.shape[:2]
    assert (found.residual == 0).all()
    found.inverse.sum().backward()
    inverse = spd_inverse(W, backend=backend)
    assert inverse.shape == W.shape
    inverse.sum().backward()
    assert W.grad is not None
    assert newton_schulz_inverse(W, 3, backward="loop").inverse.shape == W.shape


@pytest.mark.parametrize("shape", [(2, 5, 5), (4, 4), (0, 3, 3)])
def test_opcheck(shape: tuple[int, ...], extension: None) -> None:
    W = torch.eye(shape[-1]).expand(shape).contiguous().requires_grad_()
    torch.library.opcheck(torch.ops.attngeo.newton_schulz_inverse, (W, 3, 0.01, "paper"))
    torch.library.opcheck(torch.ops.attngeo.spd_inverse, (W, 0.01))


def test_vmap_equals_eager(backend: str) -> None:
    W = landmark_matrix(5).requires_grad_()
    expected = newton_schulz_inverse(W, 20, backend=backend)
    mapped = torch.vmap(lambda matrix: newton_schulz_inverse(matrix, 20, backend=backend), in_dims=1, out_dims=1)(W)
    for value, reference in zip(mapped, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)
    inverse = torch.vmap(lambda matrix: spd_inverse(matrix, backend=backend))(W)
    (grad,) = torch.autograd.grad(inverse.square().sum(), W)
    (expected_grad,) = torch.autograd.grad(spd_inverse(W, backend=backend).square().sum(), W)
    torch.testing.assert_close(grad, expected_grad, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)


@pytest.mark.parametrize(
    ("backend", "compiler"),
    [("naive", "aot_eager"), ("compiled", "aot_eager"), ("compiled", "inductor")],
)
def test_torch_compile_takes_them_whole_and_agrees(backend: str, compiler: str, request: pytest.FixtureRequest) -> None:
    if backend == "compiled":
        request.getfixturevalue("extension")

    def step(W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = newton_schulz_inverse(W, 20, backend=backend)
        return found.inverse, found.converged, spd_inverse(W, backend=backend)

    W = landmark_matrix(5).requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    found, expected = compiled(W), step(W)
    for value, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)
    grads = [torch.autograd.grad((out[0] * out[2]).sum(), W)[0] for out in (found, expected)]
    torch.testing.assert_close(*grads, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)
    with pytest.raises(RuntimeError, match="not positive"):
        compiled(-W)


def test_bad_arguments_are_named() -> None:
    W = torch.eye(3).reshape(1, 1, 3, 3)
    for solver in (newton_schulz_inverse, spd_inverse):
        with pytest.raises(ValueError, match=r"\(1, 1, 3, 2\)"):
            solver(W[..., :2])
    with pytest.raises(ValueError, match="iterations"):
        newton_schulz_inverse(W, -1)
    with pytest.raises(ValueError, match="'paper', 'identity' or 'printed', not 'warm'"):
        newton_schulz_inverse(W, start="warm")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'implicit' or 'loop'"):
        newton_schulz_inverse(W, backward="none")  # type: ignore[arg-type]


@pytest.mark.parametrize("solver", ["paper", "identity", "conjugate_gradient"])
def test_an_inverse_that_half_precision_cannot_hold_is_reported(solver: str, backend: str) -> None:
    W = torch.stack([torch.eye(3), 1e-6 * torch.eye(3)]).half()
    if solver == "conjugate_gradient":
        result = conjugate_gradient_inverse(W, eps=0.0)
    else:
        result = newton_schulz_inverse(W, 60, eps=0.0, start=solver, backend=backend)  # type: ignore[arg-type]
    assert result.inverse.dtype == torch.float16
    assert result.inverse[1].isinf().any()
    assert result.residual[1] == torch.inf
    assert result.converged.tolist() == [True, False]
    inverse = spd_inverse(W, 0.0, backend=backend)
    assert inverse_residual(W, inverse, 0.0)[1] == torch.inf
    assert inverse_residual(W, inverse, 0.0)[0] == 0.0


@pytest.mark.parametrize("start", ["paper", "identity", "printed"])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_no_number_is_an_infinite_residual_and_nothing_else(
    start: Start, wrong: float, capfd: pytest.CaptureFixture[str]
) -> None:
    W = torch.eye(4).repeat(2, 1, 1)
    W[1, 0, 1] = wrong
    residual = newton_schulz_inverse(W, 3, start=start).residual
    assert residual[1] == torch.inf
    assert residual[0].isfinite()
    assert capfd.readouterr() == ("", "")
