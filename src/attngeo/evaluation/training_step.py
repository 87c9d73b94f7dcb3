"""A training step of one attention layer: the Laplacian kind against exact softmax, plain and fused.

Each is compared with float64 before it is timed; the ratios come from one run, in which all are timed in turn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngeo.evaluation.apart import apart
from attngeo.evaluation.operator_benchmarks import LARGEST_ERROR
from attngeo.evaluation.single_layer import build, draw_tokens, pass_of, square_grid
from attngeo.evaluation.timing import Call, interleaved, keep_pages, peak_memory_mib, processor_time, return_pages
from attngeo.evaluation.token_sizes import FUSED_SOFTMAX, PLAIN_SOFTMAX
from attngeo.layers.attention import Attention
from attngeo.ops import backend

Row = dict[str, Any]

LAPLACIAN = "laplacian"
KINDS = (LAPLACIAN, PLAIN_SOFTMAX, FUSED_SOFTMAX)
LANDMARKS = (7, 7)
# As drawn, all landmarks are alike: the matrix that is inverted has a condition of up to 49 / 0.01, which multiplies
# float32's rounding, in the gradients twice (measured: 6e-4).
LARGEST_ERRORS = {LAPLACIAN: 3e-3, PLAIN_SOFTMAX: LARGEST_ERROR, FUSED_SOFTMAX: LARGEST_ERROR}
_LEARNING_RATE = 1e-6  # the update costs the same at any rate; at this one the weights stay what was checked


class LayerSize(NamedTuple):
    """Images, heads, tokens and head width of a layer's input."""

    batch: int
    heads: int
    tokens: int
    head_dim: int


@dataclass(frozen=True)
class Goal:
    """A number of a training step that should stay at or below `at_most`."""

    metric: str
    at_most: float
    text: str


# What the goals are set for: the pyramid's first stage at 224 pixels, and a model in the loop with its batch.
GOAL_SIZE = LayerSize(2, 2, 3136, 32)
GOAL_MODEL = {"model": "laplacianformer_micro", "batch": 64}
GOALS = (
    Goal("step_time_ratio", 0.5, "time of a laplacian step / plain softmax"),
    Goal("step_memory_ratio", 0.25, "peak memory of a laplacian step / plain softmax"),
    Goal("loop_overhead", 0.05, "the training loop beyond a bare step, share of it"),
)


def measure(size: LayerSize, *, repeats: int, seconds: float) -> list[Row]:
    """Rows of one step of each kind: forward, backward with the input's gradient, AdamW; one thread from here on.

    Metrics: `step_ms` (smallest of the repeats, processor time), `step_memory_mib` (beyond weights, optimizer state and
    input, in a process of its own), `error` against float64 relative to the largest number of each output or gradient,
    and `step_time_ratio`, `step_memory_ratio` of each kind `against` another. A kind that is wrong is `not_timed`.
    """
    torch.set_num_threads(1)
    keep_pages()
    labels = dict(size._asdict())
    rows: list[Row] = []
    steps: dict[str, Call] = {}
    ran: dict[str, str] = {}
    for kind in KINDS:
        error = error_of(kind, size)
        named = labels | {"attention": kind}
        rows.append(named | {"metric": "error", "value": error, "unit": "relative to the largest", "n": 1})
        if error <= LARGEST_ERRORS[kind]:
            steps[kind], ran[kind] = _step(kind, size)
        else:
            why = f"wrong: error {error:.1e} of at most {LARGEST_ERRORS[kind]:.0e}"
            rows.append(named | {"metric": "not_timed", "value": error, "unit": "1", "n": 0, "why": why})
    timings = interleaved(steps, processor_time, repeats=repeats, seconds=seconds)
    memory = {kind: apart(step_memory, kind, size) for kind in steps}
    for kind, timing in timings.items():
        named = labels | {"attention": kind, "backend": ran[kind]}
        spread = {"spread": timing.spread_ms, "spread_kind": "median minus minimum over repeats"}
        rows.append(
            named | {"metric": "step_ms", "value": timing.minimum_ms, "unit": "ms", "n": timing.repeats} | spread
        )
        rows.append(named | {"metric": "step_memory_mib", "value": memory[kind], "unit": "MiB", "n": 1})
    times = {kind: timing.minimum_ms for kind, timing in timings.items()}
    for kind, against in ((LAPLACIAN, PLAIN_SOFTMAX), (LAPLACIAN, FUSED_SOFTMAX), (FUSED_SOFTMAX, PLAIN_SOFTMAX)):
        if kind in steps and against in steps:
            named = labels | {"attention": kind, "against": against, "unit": "1"}
            n = min(timings[kind].repeats, timings[against].repeats)
            rows.append(named | {"metric": "step_time_ratio", "value": times[kind] / times[against], "n": n})
            rows.append(named | {"metric": "step_memory_ratio", "value": memory[kind] / memory[against], "n": 1})
    return rows


def step_memory(kind: str, size: LayerSize) -> float:
    """Peak memory (MiB) of a step beyond what the process holds between steps."""
    torch.set_num_threads(1)
    return_pages()
    return peak_memory_mib(_step(kind, size)[0], torch.device("cpu"))


def error_of(kind: str, size: LayerSize) -> float:
    """Largest error of output and gradients against the naive form in float64; infinite for a NaN."""
    layer = _layer(kind, size)
    exact = (_layer(kind, size, backend="naive") if kind == LAPLACIAN else _layer(PLAIN_SOFTMAX, size)).double()
    x = _input(size)
    found = [_output(layer, x), *_gradients(layer, x)]
    expected = [_output(exact, x.double()), *_gradients(exact, x.double())]
    errors = [
        float((one.double() - other).abs().max() / other.abs().max())
        for one, other in zip(found, expected, strict=True)
    ]
    return max(math.inf if math.isnan(error) else error for error in errors)


def judge(rows: Sequence[Row]) -> list[tuple[Goal, float, str]]:
    """What a run measured of each goal, NaN where it did not, and met, missed or not measured."""
    judged = []
    for goal in GOALS:
        values = [row["value"] for row in rows if row["metric"] == goal.metric and _is_judged(row)]
        value = float(values[0]) if values else math.nan
        verdict = "not measured" if math.isnan(value) else "met" if value <= goal.at_most else "missed"
        judged.append((goal, value, verdict))
    return judged


def _is_judged(row: Row) -> bool:
    wanted = GOAL_MODEL
    if row["metric"] != "loop_overhead":
        wanted = GOAL_SIZE._asdict() | {"attention": LAPLACIAN, "against": PLAIN_SOFTMAX}
    return all(row[name] == value for name, value in wanted.items())


def _layer(kind: str, size: LayerSize, **options: str) -> Attention:
    return build(kind, heads=size.heads, head_dim=size.head_dim, landmarks=LANDMARKS, **options)


def _input(size: LayerSize) -> Tensor:
    return draw_tokens("training step", size.batch, size.tokens, size.heads * size.head_dim)


def _output(layer: Attention, x: Tensor) -> Tensor:
    output = pass_of(layer, x, "forward")()
    assert isinstance(output, Tensor)
    return output


def _gradients(layer: Attention, x: Tensor) -> tuple[Tensor, ...]:
    gradients = pass_of(layer, x, "forward and backward")()
    assert isinstance(gradients, tuple)
    return gradients


def _step(kind: str, size: LayerSize) -> tuple[Call, str]:
    """A training step, taken once, and the implementations that ran."""
    layer, x, grid = _layer(kind, size), _input(size).requires_grad_(), square_grid(size.tokens)
    grad = draw_tokens("gradients", *x.shape)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=_LEARNING_RATE)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        x.grad = None
        layer(x, grid).backward(grad)
        optimizer.step()

    backend.forget()
    step()
    return step, "; ".join(f"{operator}: {what}" for operator, what in backend.ran().items())
