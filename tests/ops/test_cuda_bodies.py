"""The CUDA kernel bodies, run on the host by the emulator, obey the laws of the CPU kernels."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.ops.references import laplacian_bound, laplacian_reference

EMULATOR = Path(__file__).parents[2] / "cuda_ext" / "csrc" / "emulator"
# (slices, N, M, D): one, partial tiles on every side, more than one tile, more than one stage.
SIZES = [(1, 1, 1, 1), (2, 67, 5, 33), (1, 17, 131, 7), (2, 13, 49, 65), (1, 64, 64, 16), (2, 3, 4, 0)]


@pytest.fixture(scope="module")
def bodies(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    library = tmp_path_factory.mktemp("emulator") / "bodies.so"
    command = [compiler, "-O2", "-std=c++17", "-shared", "-fPIC", "-Wno-unknown-pragmas", "-Wno-attributes"]
    subprocess.run([*command, str(EMULATOR / "laplacian_kernel.cpp"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def call(bodies: ctypes.CDLL, name: str, tensors: list[Tensor], sizes: tuple[int, int, int, int]) -> None:
    suffix = "f32" if tensors[0].dtype == torch.float32 else "f64"
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    getattr(bodies, f"{name}_{suffix}")(*pointers, *(ctypes.c_int64(size) for size in sizes), ctypes.c_double(4.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", SIZES)
def test_values_and_gradients_equal_the_definition(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, bodies: ctypes.CDLL
) -> None:
    slices, rows, landmarks, channels = sizes
    generator = torch.Generator().manual_seed(9)
    q = torch.randn(slices, rows, channels, generator=generator, dtype=torch.float64).to(dtype)
    k = torch.randn(slices, landmarks, channels, generator=generator, dtype=torch.float64).to(dtype)
    k[:, 0] = q[:, 0]
    weight = torch.randn(slices, rows, landmarks, generator=generator, dtype=torch.float64).to(dtype)
    kernel = torch.full((slices, rows, landmarks), torch.nan, dtype=dtype)
    call(bodies, "forward", [q, k, kernel], sizes)
    grad_q, grad_k = torch.full_like(q, torch.nan), torch.full_like(k, torch.nan)
    call(bodies, "backward", [weight, kernel, q, k, grad_q, grad_k], sizes)

    q_wide, k_wide = q.double().requires_grad_(), k.double().requires_grad_()
    expected = laplacian_reference(q_wide, k_wide)
    expected_q, expected_k = torch.autograd.grad(expected, (q_wide, k_wide), weight.double())
    bound = laplacian_bound(expected.detach(), channels, dtype)
    assert ((kernel - expected).abs() <= bound).all()
    share, eps = weight.double().abs() / 4.0, torch.finfo(dtype).eps
    for grad, expected_grad, axis, summands in ((grad_q, expected_q, -1, landmarks), (grad_k, expected_k, -2, rows)):
        limit = (share * (bound + (summands + 4) * eps * expected.detach())).sum(axis).unsqueeze(-1)
        assert ((grad - expected_grad).abs() <= limit).all()


def test_ties_have_no_gradient_and_nan_is_not_hidden(bodies: ctypes.CDLL) -> None:
    sizes = (1, 5, 3, 7)
    q, k = torch.full((1, 5, 7), 0.3), torch.full((1, 3, 7), 0.3)
    weight, kernel = torch.ones(1, 5, 3), torch.empty(1, 5, 3)
    grad_q, grad_k = torch.empty_like(q), torch.empty_like(k)
    call(bodies, "forward", [q, k, kernel], sizes)
    call(bodies, "backward", [weight, kernel, q, k, grad_q, grad_k], sizes)
    assert (kernel == 1).all()
    assert (grad_q == 0).all()
    assert (grad_k == 0).all()
    q[0, 2, 3] = torch.nan
    call(bodies, "forward", [q, k, kernel], sizes)
    call(bodies, "backward", [weight, kernel, q, k, grad_q, grad_k], sizes)
    assert kernel[0, 2].isnan().all()
    assert torch.isfinite(kernel[0, [0, 1, 3, 4]]).all()
    assert grad_q[0, 2, 3].isnan()
    assert grad_k[0, :, 3].isnan().all()
