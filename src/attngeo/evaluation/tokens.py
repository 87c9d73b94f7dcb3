"""Time and peak memory of one attention layer against the number of tokens, and the exponents fitted to them (P2.a)."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from attngeo.evaluation.apart import Killed, apart, limit_memory
from attngeo.evaluation.single_layer import build, draw_tokens, pass_of
from attngeo.evaluation.slopes import fit_slope
from attngeo.evaluation.timing import interleaved, keep_pages, peak_memory_mib, processor_time, return_pages
from attngeo.evaluation.token_sizes import FITTED_FROM, FITTED_TO, PLAIN_SOFTMAX, Pass
from attngeo.layers.attention import Grid
from attngeo.ops import backend

Row = dict[str, Any]

_LEAST_SIZES = 3  # of which a line has a slope and a standard error
_WARM_UP_TOKENS = 16
# What the exponents are held against: kinds that are linear and quadratic by their formula.
CONTROLS = {PLAIN_SOFTMAX: "quadratic by construction", "linear_injective": "linear by construction"}


def measure(
    kind: str,
    tokens: int,
    direction: Pass,
    *,
    heads: int,
    head_dim: int,
    landmarks: Grid,
    repeats: int,
    seconds: float,
    memory_mib: float,
) -> list[Row]:
    """Rows of one layer, pass and number of tokens: one image, float32, one thread from here on.

    `peak_memory_mib` is what the pass takes beyond the process's memory before it, `time_ms` the smallest processor
    time of at most `repeats` passes, which end after `seconds`, with memory reused between them. A pass that asks for
    more than `memory_mib` beyond the process gives a row `left_out` alone, which says so.
    """
    torch.set_num_threads(1)
    return_pages()
    backend.forget()
    layer = build(kind, heads=heads, head_dim=head_dim, landmarks=landmarks)
    pass_of(layer, draw_tokens("warm-up", 1, _WARM_UP_TOKENS, layer.dim), direction)()  # threads and code come first
    labels = _labels(kind, tokens, direction) | {"heads": heads, "head_dim": head_dim}
    labels["landmarks"] = landmarks[0] * landmarks[1]
    limit_memory(memory_mib)
    try:
        call = pass_of(layer, draw_tokens("tokens", 1, tokens, layer.dim), direction)
        memory = peak_memory_mib(call, torch.device("cpu"))
        keep_pages()
        timing = interleaved({kind: call}, processor_time, repeats=repeats, seconds=seconds)[kind]
    except (MemoryError, RuntimeError) as error:
        if not _is_refused_memory(error):
            raise
        return [left_out(kind, tokens, direction, f"it needs more than {memory_mib:g} MiB")]
    labels["backend"] = "; ".join(f"{operator}: {what}" for operator, what in backend.ran().items())
    spread = {"spread": timing.spread_ms, "spread_kind": "median minus minimum over repeats"}
    time = {"metric": "time_ms", "value": timing.minimum_ms, "unit": "ms", "n": timing.repeats} | spread
    return [labels | time, labels | {"metric": "peak_memory_mib", "value": memory, "unit": "MiB", "n": 1}]


def suite(
    tokens: Sequence[int],
    kinds: Sequence[str],
    passes: Sequence[Pass],
    *,
    heads: int,
    head_dim: int,
    landmarks: Grid,
    repeats: int,
    seconds: float,
    longest_s: float,
    memory_mib: float,
) -> Iterator[list[Row]]:
    """The rows of every kind, pass and number of tokens, each measured in a process of its own.

    Once a pass has taken longer than `longest_s` or has been refused memory, larger ones of its kind are left out, and
    their rows say so: nothing is extrapolated.
    """
    patience = {"repeats": repeats, "seconds": seconds, "memory_mib": memory_mib}
    shape = {"heads": heads, "head_dim": head_dim, "landmarks": landmarks}
    for kind in kinds:
        for direction in passes:
            why = ""
            for count in sorted(tokens):
                if why:
                    yield [left_out(kind, count, direction, why)]
                    continue
                try:
                    rows = apart(measure, kind, count, direction, **shape, **patience)  # type: ignore[arg-type]
                except Killed:
                    rows = [left_out(kind, count, direction, "its process was killed, probably for want of memory")]
                why = _why_no_more(rows, longest_s)
                yield rows


def left_out(kind: str, tokens: int, direction: Pass, why: str) -> Row:
    """The row of a case that was not measured."""
    return _labels(kind, tokens, direction) | {"metric": "left_out", "value": math.nan, "unit": "1", "n": 0, "why": why}


def exponents(rows: Sequence[Row]) -> list[Row]:
    """`time_exponent` and `memory_exponent` of every kind and pass: slopes over FITTED_FROM to FITTED_TO tokens.

    n is the number of sizes, the spread the slope's standard error; where fewer than three sizes were measured there
    is no row.
    """
    fitted = []
    for kind, direction in dict.fromkeys((row["attention"], row["pass"]) for row in rows):
        for measured, metric in (("time_ms", "time_exponent"), ("peak_memory_mib", "memory_exponent")):
            points = [
                (row["tokens"], row["value"])
                for row in rows
                if (row["attention"], row["pass"], row["metric"]) == (kind, direction, measured)
                and FITTED_FROM <= row["tokens"] <= FITTED_TO
                and row["value"] > 0
            ]
            if len(points) < _LEAST_SIZES:
                continue
            counts, values = zip(*points, strict=True)
            slope, error = fit_slope(counts, values, [0] * len(points))
            labels = {"attention": kind, "pass": direction, "control": CONTROLS.get(kind, "none")}
            labels |= {"from_tokens": min(counts), "to_tokens": max(counts)}
            spread = {"spread": error, "spread_kind": "standard error of the slope"}
            fitted.append(labels | {"metric": metric, "value": slope, "unit": "1", "n": len(points)} | spread)
    return fitted


def _labels(kind: str, tokens: int, direction: Pass) -> Row:
    return {"attention": kind, "pass": direction, "tokens": tokens, "control": CONTROLS.get(kind, "none")}


def _why_no_more(rows: Sequence[Row], longest_s: float) -> str:
    """Why larger sizes are not tried after these rows of one; empty if they are."""
    for row in rows:
        if row["metric"] == "left_out":
            return f"not tried: at {row['tokens']} tokens {row['why']}"
        if row["metric"] == "time_ms" and row["value"] > 1e3 * longest_s:
            return f"not tried: at {row['tokens']} tokens a pass took {row['value'] / 1e3:.2f} s of {longest_s:g} s"
    return ""


def _is_refused_memory(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, MemoryError) or "allocate memory" in text or "bad_alloc" in text
