"""Laws of the choice of an implementation: it is stated, recorded, and never silently another."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from attngeo import ops
from attngeo.errors import UserError
from attngeo.ops import backend as ops_backend
from attngeo.ops import laplacian_kernel
from attngeo.ops.__main__ import HEADINGS, main
from attngeo.ops.backend import COMPILED_OPERATORS, OPERATORS, ran, resolve, table


@pytest.fixture(autouse=True)
def fresh_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_backend, "_ran", {})


def call(backend: str) -> None:
    laplacian_kernel(torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 3), backend=backend)


def test_what_ran_is_recorded_with_the_instruction_set(extension: None) -> None:
    call("auto")
    assert ran()["laplacian_kernel"] in ("compiled cpu portable", "compiled cpu avx2", "compiled cpu avx512")
    call("naive")
    assert ran()["laplacian_kernel"].endswith(" + naive cpu")


def test_the_record_is_kept_under_torch_compile(extension: None) -> None:
    torch.compiler.reset()
    torch.compile(call, backend="aot_eager")("auto")
    assert ran()["laplacian_kernel"].startswith("compiled cpu")


def test_without_an_extension_auto_says_why_and_compiled_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_backend, "_extension_problem", "stale: run `make env`")
    call("auto")
    assert ran() == {"laplacian_kernel": "naive cpu (stale: run `make env`)"}
    with pytest.raises(UserError, match="stale") as caught:
        call("compiled")
    assert caught.value.remedy == "run `make env`"
    assert str(caught.value).count("make env") == 1


def test_a_device_without_a_kernel_is_refused_by_name(extension: None) -> None:
    meta = torch.ones(1, 1, 2, 3, device="meta")
    with pytest.raises(UserError, match="no kernels for meta"):
        resolve("laplacian_kernel", "compiled", meta)


def test_a_gpu_that_the_binary_has_no_code_for_is_named_beside_what_was_built(
    extension: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a GPU is made up: what CUDA says of it, its capability, and a tensor that lies on it."""
    import attngeo_ext

    built = {"cuda": {"built": True, "reason": "", "architectures": ["7.0"]}}
    library = SimpleNamespace(attngeo_cuda_problem=lambda device: b"no kernel image is available")
    monkeypatch.setattr(attngeo_ext, "_info", built)
    monkeypatch.setattr(attngeo_ext, "_library", lambda: library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    there = cast(torch.Tensor, SimpleNamespace(device=torch.device("cuda", 0)))
    why = "no kernel image is available: built for 7.0, the device is sm_90"
    assert resolve("spd_inverse", "auto", there) == "naive"
    assert ran() == {"spd_inverse": f"naive cuda ({why})"}
    with pytest.raises(UserError, match=why):
        resolve("spd_inverse", "compiled", there)


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match="not 'cuda'"):
        call("cuda")


def test_every_operator_records_the_form_that_ran(extension: None) -> None:
    q, v = torch.randn(1, 1, 5, 3), torch.randn(1, 1, 5, 2)
    W = torch.eye(4).reshape(1, 1, 4, 4)
    calls = {
        "laplacian_kernel": lambda name: ops.laplacian_kernel(q, q, backend=name),
        "laplacian_kernel_matmul": lambda name: ops.laplacian_kernel_matmul(q, q, v, backend=name),
        "gaussian_kernel": lambda name: ops.gaussian_kernel(q, q, backend=name),
        "gaussian_kernel_matmul": lambda name: ops.gaussian_kernel_matmul(q, q, v, backend=name),
        "newton_schulz_inverse": lambda name: ops.newton_schulz_inverse(W, backend=name),
        "spd_inverse": lambda name: ops.spd_inverse(W, backend=name),
    }
    assert set(calls) == set(COMPILED_OPERATORS)
    for op, run in calls.items():
        for name in ("auto", "compiled", "naive"):
            ops_backend.forget()
            run(name)
            assert ran()[op].startswith("naive cpu" if name == "naive" else "compiled cpu ")


def test_the_table_has_every_operator_and_type_and_a_reason(extension: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {row[0] for row in table()} == set(OPERATORS)
    chosen = {(op, name): (backend, why) for op, device, types, backend, why in table() for name in types.split(", ")}
    backend, why = chosen["gaussian_kernel", "float64"]
    assert (backend, why.split()[0]) == ("compiled", "cpu")
    assert chosen["gaussian_kernel", "bfloat16"] == ("compiled", f"{why}, computed in float32")
    assert chosen["nystrom_attention", "float32"][0] == "naive"
    monkeypatch.setattr(ops_backend, "_extension_problem", "extension not built: no C++ compiler")
    types = "float32, float64, bfloat16, float16"
    assert ("spd_inverse", "cpu", types, "naive", "extension not built: no C++ compiler") in table()


def test_the_module_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert tuple(lines[0].split()) == HEADINGS
    assert {line.split()[0] for line in lines[1:]} == set(OPERATORS)


def test_the_module_explains_itself_and_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "backend chosen for each operator" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["bogus"])
    assert "unrecognized arguments: bogus" in capsys.readouterr().err


def test_a_reader_that_stops_early_sees_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", "attngeo.ops"], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.stderr == ""
