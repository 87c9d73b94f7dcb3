"""The doctor reports every part of a machine, also one where nothing is installed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attngeo import doctor

ROOT = Path(__file__).resolve().parents[2]


def test_every_check_answers_and_a_limit_comes_with_a_remedy() -> None:
    checks = doctor.report()
    assert [check.name for check in checks] == [name for name, _ in doctor.CHECKS]
    for check in checks:
        assert check.status in ("ok", "warn", "missing")
        assert check.detail
        assert check.status == "ok" or check.remedy, check.name


def test_it_works_on_a_bare_python() -> None:
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('doctor', {str(ROOT / 'src/attngeo/doctor.py')!r})\n"
        "doctor = importlib.util.module_from_spec(spec); sys.modules['doctor'] = doctor\n"
        "spec.loader.exec_module(doctor)\n"
        "checks = doctor.report(); doctor.print_report(checks); sys.exit(doctor.exit_status(checks))"
    )
    # Isolated and without site-packages: as before the environment exists.
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "missing torch: not installed -> run `make env`" in done.stdout


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> doctor.Check:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(doctor, "CHECKS", (("torch", broken),))
    (check,) = doctor.report()
    assert (check.name, check.status) == ("torch", "missing")
    assert "libcudart" in check.detail
    assert doctor.exit_status([check]) == 1


def test_no_compiler_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    check = doctor._compiler()
    assert check.status == "warn"
    assert "naive" in check.detail
    assert "g++" in check.remedy


@pytest.mark.parametrize("content", [None, "", "[]", '{"built": true}', '{"built": false, "reason": "no nvcc"}'])
def test_a_broken_record_of_the_build_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None
) -> None:
    package = tmp_path / "attngeo_ext"
    package.mkdir()
    shutil.copy(ROOT / "cuda_ext/attngeo_ext/record.py", package)
    (package / "__init__.py").touch()
    if content is not None:
        (package / "build.json").write_text(content)
    monkeypatch.delitem(sys.modules, "attngeo_ext", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    found = doctor._extension()
    assert found.status == "warn"
    assert "naive operators run" in found.detail
    assert found.remedy


def test_jobs_that_cannot_be_tied_to_snakemake_are_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    check = doctor._setpriv()
    assert check.status == "warn"
    assert "util-linux" in check.remedy
    (tmp_path / "setpriv").write_text("#!/bin/sh\nexit 1\n")  # as busybox answers to --pdeathsig
    (tmp_path / "setpriv").chmod(0o755)
    assert doctor._setpriv().status == "warn"


def test_the_report_prints_every_finding(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.print_report([doctor.Check("disk", "warn", "1.0 GB free", "make space")])
    printed = capsys.readouterr().out
    for text in ("warn", "disk", "1.0 GB free", "make space"):
        assert text in printed
