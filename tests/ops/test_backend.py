"""Laws of the choice of an implementation: it is stated, recorded, and never silently another."""

import pytest
import torch

from attngeo.errors import UserError
from attngeo.ops import backend as ops_backend
from attngeo.ops import laplacian_kernel
from attngeo.ops.__main__ import main
from attngeo.ops.backend import OPERATORS, ran, resolve, table


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


def test_types_and_devices_without_a_kernel_are_refused_by_name(extension: None) -> None:
    integers = torch.ones(1, 1, 2, 3, dtype=torch.int64)
    with pytest.raises(UserError, match=r"no compiled form for torch\.int64"):
        resolve("laplacian_kernel", "compiled", integers)
    meta = torch.ones(1, 1, 2, 3, device="meta")
    with pytest.raises(UserError, match="no kernels for meta"):
        resolve("laplacian_kernel", "compiled", meta)
    with pytest.raises(UserError, match="different devices"):
        resolve("laplacian_kernel", "compiled", torch.ones(1), meta)


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match="not 'cuda'"):
        call("cuda")


def test_the_table_has_every_operator_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {row[0] for row in table()} == set(OPERATORS)
    monkeypatch.setattr(ops_backend, "_extension_problem", "extension not built: no C++ compiler")
    assert ("laplacian_kernel", "compiled", "cpu", "unavailable: extension not built: no C++ compiler") in table()


def test_the_module_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    printed = capsys.readouterr().out
    assert "newton_schulz_inverse" in printed
    assert printed.splitlines()[0].split() == ["operator", "backend", "device", "state"]
