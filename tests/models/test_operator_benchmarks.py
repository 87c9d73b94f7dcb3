"""Benchmarks refuse what is wrong, time the rest in turn, and compare it with peers, limits and goals."""

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from attngeo import ops
from attngeo.evaluation import operator_benchmarks as benchmarks
from attngeo.evaluation import operator_checks, operator_limits, timing
from attngeo.evaluation.operator_goals import GOALS, judge
from attngeo.evaluation.operator_limits import PortLimit, measure_port_limit, port_limits
from attngeo.evaluation.operator_sizes import MEMORY_SIZES, PYRAMID_SIZES, Size, square
from attngeo.ops import backend
from benchmarks import operators

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SIZE = Size(2, 19, 7, 5)


def found(rows: list[benchmarks.Row], metric: str, **labels: object) -> list[benchmarks.Row]:
    chosen = [row for row in rows if row["metric"] == metric]
    return [row for row in chosen if all(row.get(name) == value for name, value in labels.items())]


def size_of(operation: str) -> Size:
    return square(3, 9) if operation.endswith("_inverse") else SIZE


def fast(problem: benchmarks.Problem, **options: object) -> list[benchmarks.Row]:
    return benchmarks.measure(problem, repeats=2, seconds=0.001, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("operation", benchmarks.OPERATIONS)
def test_every_contestant_gives_the_float64_result_and_is_timed(operation: str) -> None:
    problem = benchmarks.problem(operation, size_of(operation), CPU)
    rows = fast(problem)
    for contestant in problem.contestants:
        for direction in ("forward", "backward"):
            expected = int(contestant.call(direction) is not None)  # type: ignore[arg-type]
            for metric in ("error", "time_ms"):
                assert len(found(rows, metric, contestant=contestant.name, direction=direction)) == expected
    assert all(row["why"] for row in found(rows, "not_timed"))
    assert {row["contestant"] for row in found(rows, "not_timed")} <= set(problem.missing)
    (ours,) = found(rows, "time_ms", direction="forward", role="ours")
    assert ours["backend"]
    assert ours["n"] >= 1


@pytest.mark.parametrize(
    ("spoil", "refused"),
    [
        (lambda function, q, k: -function(q, k), {"forward", "backward"}),
        (lambda function, q, k: function(q, k)[:, :-1], {"forward", "backward"}),
        (lambda function, q, k: function(q, k) * float("nan"), {"forward", "backward"}),
        (lambda function, q, k: function(q, k.detach() + 0.0 * k), {"backward"}),
    ],
    ids=["sign", "shape", "nan", "gradient"],
)
def test_a_wrong_operator_is_reported_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[..., torch.Tensor], refused: set[str]
) -> None:
    right = ops.laplacian_kernel

    def spoilt(q: torch.Tensor, k: torch.Tensor, lambda_: float, **options: str) -> torch.Tensor:
        if options.get("backend") == "naive":  # the reference and the peer
            return right(q, k, lambda_, **options)
        return spoil(lambda q, k: right(q, k, lambda_), q, k)

    monkeypatch.setattr(ops, "laplacian_kernel", spoilt)
    rows = fast(benchmarks.problem("laplacian_kernel", SIZE, CPU))
    not_timed = found(rows, "not_timed", contestant="attngeo")
    assert {row["direction"] for row in not_timed} == refused
    assert all(row["why"].startswith(("wrong: error", "fails: ")) for row in not_timed)
    timed = {row["direction"] for row in found(rows, "time_ms", contestant="attngeo")}
    assert timed == {"forward", "backward"} - refused
    assert found(rows, "time_ms", contestant=benchmarks.CDIST)
    assert {row["direction"] for row in found(rows, "speedup")} == timed


def test_the_ratio_is_taken_to_the_fastest_peer_and_not_to_what_is_only_shown() -> None:
    output = torch.ones(2, 3, dtype=torch.float64)
    waits = {"attngeo": 3e-3, "slow": 2.4e-2, "fast": 1.2e-2, "other": 1e-4}

    def contestant(name: str, seconds: float) -> benchmarks.Contestant:
        role = {"attngeo": "ours", "other": "shown"}.get(name, "peer")

        def call() -> torch.Tensor:
            end = timing.time.process_time() + seconds
            while timing.time.process_time() < end:
                pass
            return output

        return benchmarks.Contestant(name, call, role=role)  # type: ignore[arg-type]

    problem = benchmarks.Problem(
        "laplacian_kernel", SIZE, CPU, lambda: (output, ()), [contestant(*item) for item in waits.items()]
    )

    def limits(operation: str, direction: str, size: object) -> dict[str, float]:
        return {"memory": 0.1, "issue rate": 1.5}

    rows = fast(problem, limits=limits)
    (speedup,) = found(rows, "speedup")
    assert speedup["against"] == "fast"
    assert speedup["value"] == pytest.approx(4.0, rel=0.2)
    (share,) = found(rows, "limit_share")
    assert share["limit"] == "issue rate"
    assert share["value"] == pytest.approx(0.5, rel=0.2)


def test_samples_are_taken_in_turn_and_the_smallest_counts() -> None:
    order: list[str] = []
    times = {"a": iter([9.0, 9.0, 3.0, 1.0, 2.0]), "b": iter([9.0, 9.0, 5.0, 6.0, 4.0])}

    def clock(call: timing.Call, count: int) -> float:
        assert count == 1
        name = str(call())
        order.append(name)
        return next(times[name])

    result = timing.interleaved({"a": lambda: "a", "b": lambda: "b"}, clock, repeats=3, seconds=100.0)
    assert order == ["a", "a", "b", "b", "a", "b", "a", "b", "a", "b"]
    assert result["a"] == timing.Timing(1000.0, 2000.0, 3)
    assert result["b"].minimum_ms == 4000.0
    assert result["b"].spread_ms == 1000.0


def test_a_slow_contestant_is_sampled_less_often_and_a_quick_one_in_bundles() -> None:
    counts: list[int] = []

    def clock(call: timing.Call, count: int) -> float:
        if call():
            return 10.0
        counts.append(count)
        return 1e-4 * count

    result = timing.interleaved({"slow": lambda: True, "quick": lambda: False}, clock, repeats=9, seconds=1.0)
    assert result["slow"].repeats == 1
    assert result["quick"].repeats == 9
    assert result["quick"].minimum_ms == pytest.approx(0.1)
    assert set(counts[2:]) == {20}


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_the_port_limit_is_measured_for_the_instruction_set_that_runs() -> None:
    source = ROOT / "benchmarks" / "port_limit.cpp"
    wanted = operator_limits.this_instruction_set() or "portable"
    limit = measure_port_limit(source, wanted)
    assert limit.instruction_set == wanted, limit.why
    forward, backward = (limit.best("laplacian_kernel", direction) for direction in ("forward", "backward"))
    assert forward is not None
    assert backward is not None
    assert 1.0 < backward[1] <= 1.2 * forward[1] < 1000.0
    milliseconds = port_limits(limit)("laplacian_kernel", "forward", PYRAMID_SIZES[0])
    assert list(milliseconds.values()) == [pytest.approx(PYRAMID_SIZES[0].pairs / forward[1] / 1e6)]


def test_without_a_limit_the_reason_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "no patterns for sve" in measure_port_limit(ROOT / "benchmarks/port_limit.cpp", "sve").why
    (tmp_path / "broken.cpp").write_text("int main( {")
    if shutil.which("g++"):
        assert measure_port_limit(tmp_path / "broken.cpp", "portable").why.startswith("broken.cpp does not run here: ")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert measure_port_limit(tmp_path / "broken.cpp", "portable").why == "no C++ compiler"
    assert port_limits(PortLimit(why="none"))("laplacian_kernel", "forward", SIZE) == {}
    assert PortLimit("avx2", {"laplacian forward: x": 1.0}).best("spd_inverse", "forward") is None


def test_gpu_limits_follow_from_the_devices_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    # An H200: 132 multiprocessors at 1.98 GHz, 6144 bits at 3.2 GHz, two transfers a clock.
    h200 = SimpleNamespace(
        multi_processor_count=132, clock_rate=1_980_000, memory_clock_rate=3_201_000, memory_bus_width=6144
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    size = Size(64, 3136, 49, 64)
    forward, backward = (
        operator_limits.gpu_limits("laplacian_kernel", direction, size, torch.device("cuda", 0))
        for direction in ("forward", "backward")
    )
    assert forward["issue rate"] == pytest.approx(0.0376, rel=0.01)
    assert backward["issue rate"] == pytest.approx(2 * forward["issue rate"])
    assert forward["memory"] == pytest.approx(91.5e6 / 4.917e12 * 1e3, rel=0.01)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=1))
    assert operator_limits.gpu_limits("spd_inverse", "forward", square(2, 3), torch.device("cuda", 0)) == {}


def test_goals_are_judged_on_what_was_measured() -> None:
    assert {judged.verdict for judged in judge([])} == {"not measured"}
    rows: list[benchmarks.Row] = []
    for goal in GOALS:
        for size in MEMORY_SIZES if goal.measure == "linear memory" else (goal.size,):
            shared = {"operation": goal.operation, "direction": goal.direction, **size._asdict()}
            for contestant, milliseconds in ((goal.against, 10.0), ("attngeo", 1.0)):
                rows.append(shared | {"contestant": contestant, "metric": "time_ms", "value": milliseconds})
            for metric, value in (("limit_share", 0.5), ("two_thread_ratio", 1.9), ("peak_memory_mib", size.tokens)):
                rows.append(shared | {"contestant": "attngeo", "metric": metric, "value": float(value)})
    verdicts = {judged.goal: judged.verdict for judged in judge(rows)}
    missed = [goal for goal, verdict in verdicts.items() if verdict == "missed"]
    assert {goal.at_least for goal in missed} == {14.0, 0.65}
    assert "not measured" not in verdicts.values()
    assert all(math.isfinite(judged.value) for judged in judge(rows))


def test_peak_memory_sees_what_a_call_takes() -> None:
    kept: list[torch.Tensor] = []
    peak = timing.peak_memory_mib(lambda: torch.ones(64, 2**20).sum(), CPU)
    if math.isnan(peak):
        pytest.skip("this system does not tell the peak")
    assert 250 < peak < 300
    assert not kept


def test_two_threads_are_compared_with_one_and_the_setting_restored() -> None:
    before = torch.get_num_threads()
    rows = benchmarks.threads_ratio("laplacian_kernel_matmul", SIZE, repeats=2)
    assert [row["direction"] for row in rows] == ["forward", "backward"]
    assert all(row["value"] > 0 for row in rows)
    assert torch.get_num_threads() == before


def test_the_checks_of_a_gpu_pass_on_the_cpu() -> None:
    if backend._extension_problem:
        pytest.skip(backend._extension_problem)
    failed = [check for check in operator_checks.check_operators(CPU, quick=True) if not check.passed]
    assert not failed


def test_the_checks_find_a_wrong_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    if backend._extension_problem:
        pytest.skip(backend._extension_problem)
    right = ops.laplacian_kernel_matmul

    def misplaced(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
        return right(q, k, v, **options) + 1e-3  # type: ignore[arg-type]

    monkeypatch.setattr(ops, "laplacian_kernel_matmul", misplaced)
    failed = {check.name for check in operator_checks.check_operators(CPU, quick=True) if not check.passed}
    assert any(name.startswith("laplacian_kernel_matmul (") for name in failed)
    assert any(name.startswith("laplacian_kernel_matmul normalized") for name in failed)
    assert not any(name.startswith(("gaussian", "spd", "newton")) for name in failed)


def test_the_check_of_streams_sees_an_operator_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where there are no streams to wait for: an operator that begins too early reads zeros."""
    if backend._extension_problem:
        pytest.skip(backend._extension_problem)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    for name in ("synchronize", "_sleep"):
        monkeypatch.setattr(torch.cuda, name, lambda argument: None)
    early: list[bool] = []

    @contextmanager
    def stream(side: None) -> Iterator[None]:
        early.append(True)
        yield
        early.clear()

    monkeypatch.setattr(torch.cuda, "stream", stream)
    assert all(check.passed for check in operator_checks._side_stream(CPU))
    kernel, inverse = ops.gaussian_kernel_matmul, ops.spd_inverse
    monkeypatch.setattr(ops, "gaussian_kernel_matmul", lambda q, k, v, **o: kernel(q, k, v * (not early), **o))
    monkeypatch.setattr(ops, "spd_inverse", lambda W, **o: inverse(W * (not early), **o | {"eps": 0.0}))
    failed = [check.name for check in operator_checks._side_stream(CPU) if not check.passed]
    assert failed == [
        f"{name} on another stream"
        for name in ("spd_inverse", "gaussian_kernel_matmul", "gaussian_kernel_matmul normalized")
    ]


# What a bare machine with a GPU lacks.
BLOCKED = """
import runpy, sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        absent = ("numpy", "pandas", "scipy", "sklearn", "timm", "torchvision", "pydantic", "yaml")
        return None if name.split(".")[0] in absent else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
sys.argv = {arguments!r}
runpy.run_path({script!r}, run_name="__main__")
"""


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "tools" / "gpu_check.py")
    program = BLOCKED.format(script=script, arguments=[script, *arguments])
    environment = os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)


def test_without_a_gpu_the_gpu_check_says_so_in_one_line() -> None:
    done = run_script()
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpu-check: no GPU that torch can use")


def gathered(root: Path, monkeypatch: pytest.MonkeyPatch, known: dict[str, str]) -> tuple[list[str], int]:
    """The devices and the number of records that the job gathers below a project's root."""
    from attngeo.jobs import analysis, gpu_timings
    from attngeo.paper import records

    counts: list[int] = []

    def keep(preset: object, frame: pd.DataFrame, out: Path, **rest: object) -> None:
        kept = records.from_frame(frame)
        assert all(record.labels["same_sources"] is True for record in kept.records)
        counts.append(len(kept.records))

    monkeypatch.setattr(analysis, "keep", keep)
    monkeypatch.setattr(gpu_timings.CodeDigest, "extension_digest", lambda self: known["extension_digest"])
    preset = SimpleNamespace(root=root, results=root / "results")
    return gpu_timings.gpu_timings(preset, "digest"), counts[0]  # type: ignore[arg-type]


def test_the_gpu_check_needs_torch_alone_and_writes_what_the_workflow_gathers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend._extension_problem:
        pytest.skip(backend._extension_problem)
    out = tmp_path / "docs" / "measured" / "invented-device"
    done = run_script("--device", "cpu", "--quick", "--no-build", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed" in done.stdout
    from attngeo.files import read_json
    from attngeo.jobs.gpu_timings import measured_files

    assert measured_files(tmp_path) == [out / "operators.csv", out / "operators.json"]
    frame = pd.read_csv(out / "operators.csv")
    assert {"time_ms", "speedup"} <= set(frame["metric"])
    assert set(frame["operation"]) == set(benchmarks.OPERATIONS)
    assert {"error", "attention_ratio", "memory_ratio"} <= set(pd.read_csv(out / "attention_by_metric.csv")["metric"])
    known = read_json(out / "operators.json")
    assert gathered(tmp_path, monkeypatch, known) == ([], 0), "a processor is no GPU"
    text = (out / "operators.csv").read_text().replace(",cpu,", ",cuda,")
    (out / "operators.csv").write_text(text)
    assert gathered(tmp_path, monkeypatch, known) == (["cpu"], len(frame))
    assert {"device", "torch", "nvcc", "git_revision", "extension_digest", "backend"} <= set(known)


def test_the_benchmark_prints_ratios_and_goals() -> None:
    command = [sys.executable, "-m", "benchmarks.operators", "spd_inverse", "--quick", "--repeats", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "spd_inverse forward, 5 matrices of 17 x 17" in done.stdout
    assert "x the best peer" in done.stdout
    assert "not measured" in done.stdout.partition("goals")[2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--repeats", "0"], "--repeats: must be a whole number of at least 1, not '0'"),
        (["--repeats", "2.5"], "not '2.5'"),
        (["--seconds", "0"], "--seconds: must be a positive number, not '0'"),
        (["softmax"], "no operator 'softmax' (choose from laplacian_kernel, "),
    ],
)
def test_what_the_benchmark_cannot_do_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        operators.main(arguments)
    error = capsys.readouterr().err
    assert said in error
    assert "[]" not in error.partition("error:")[2]


def test_the_benchmark_marks_what_is_no_peer() -> None:
    rows = fast(benchmarks.problem("newton_schulz_inverse", square(3, 9), CPU))
    forward = operators.tables(rows).partition("backward")[0].splitlines()[2:]
    marked = {line.strip().partition(" (")[0].partition(",")[0] for line in forward if ", no peer" in line}
    assert marked == {"attngeo naive", "torch.linalg.inv"}
    (loop,) = (line for line in forward if line.strip().startswith("torch bmm loop"))
    assert " 1.00 x the best peer" in loop
