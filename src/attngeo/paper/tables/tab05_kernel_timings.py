"""Table 5: kernel timings, published and ours; every number with its device and whose it is."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attngeo.paper.kernel_timings import (
    COLUMNS,
    NOT_MEASURED,
    OWN,
    TORCH,
    older_sources,
    published,
    read,
    training_steps,
)
from attngeo.paper.render import Tabulated
from attngeo.paper.results import count_non_finite, listed, non_finite_sentence, preset_name, span

if TYPE_CHECKING:
    import pandas as pd

CASE = ["kind", "device", "operation", "direction", "slices", "tokens", "landmarks", "channels"]


def tabulate(inputs: Sequence[Path]) -> Tabulated:
    """Tabulate the published timings, then ours on this CPU and on the GPUs that have been measured."""
    import pandas as pd

    cpu, gpu = read(inputs)
    if not len(gpu):
        gpu = pd.DataFrame([{"device": NOT_MEASURED, "kind": "ours"}], columns=list(COLUMNS))
    steps = training_steps(inputs)
    data = pd.concat([_with_ratio(frame) for frame in (published(), cpu, gpu, steps)], ignore_index=True)
    ours = data[data["kind"] == "ours"]
    table = pd.DataFrame(
        {
            "operation": data["operation"],
            "direction": data["direction"],
            "batch x heads": data["slices"],
            "tokens": data["tokens"],
            "landmarks": data["landmarks"],
            "head width": data["channels"].where(data["channels"].fillna(0) > 0),
            "implementation": data["implementation"],
            "time (ms)": data["time_ms"].astype(float),
            "median above (ms)": data["spread_ms"].astype(float),
            "n": data["n"],
            "torch / own": data["ratio"],
            "share of step (%)": 100 * data["share"].astype(float),
            "backend": data["backend"].replace("", None),
            "device": data["device"],
            "kind": data["kind"],
        }
    ).astype(dict.fromkeys(("batch x heads", "tokens", "landmarks", "head width", "n"), object))
    table = table.where(table.notna(), None)
    older = older_sources(inputs)
    caption = (
        "Kernel timings. kind: paper = as published (an A100; batch, heads, head width, repeats and spread not "
        "reported; distances without their exponential; two decimals), ours = measured by this project: the smallest "
        f"of n = {span(int(n) for n in ours['n'].dropna())} repeats and how far the median lies above it, in float32. "
        "implementation: attngeo, or the fastest form in torch that gives the same result; torch / own is the ratio "
        "of the two. Newton-Schulz takes 20 iterations; its backward pass in torch differentiates through them, ours "
        "is -X^T G X^T. On a CPU: processor time of one thread, memory reused between calls; every other contestant "
        f"is in benchmarks/operators.csv. {_steps_sentence(steps)}{_gpu_sentence(gpu, older)}"
        f"Preset {preset_name(inputs)} on {listed(set(cpu['device']))}."
    ) + non_finite_sentence(count_non_finite(data["time_ms"].dropna()))
    return Tabulated(
        table,
        caption,
        "kernel-timings",
        formats={"time (ms)": ".3g", "median above (ms)": ".2g", "torch / own": ".1f", "share of step (%)": ".1f"},
        widths={"implementation": "2.6cm", "device": "2.2cm", "backend": "1.8cm"},
        long=True,
    )


def _with_ratio(frame: "pd.DataFrame") -> "pd.DataFrame":
    """Each own time with the ratio of torch's time to it, where both are above 0."""
    times = frame.assign(time_ms=frame["time_ms"].astype(float))
    torch_times = times[times["form"] == TORCH].drop_duplicates(CASE)[[*CASE, "time_ms"]]
    both = times.merge(torch_times, on=CASE, how="left", suffixes=("", "_torch"))
    defined = (both["form"] == OWN) & (both["time_ms"] > 0)
    return both.assign(ratio=(both["time_ms_torch"] / both["time_ms"]).where(defined)).drop(columns="time_ms_torch")


def _steps_sentence(steps: "pd.DataFrame") -> str:
    """What the block of training steps shows."""
    if not len(steps):
        return ""
    return (
        "training step: a whole model on random images, one thread, timed without and profiled apart; share of step: "
        "the part of a profiled step inside our operators, forward and backward (the gradient of an inverse is made of "
        "torch's products and not in it); torch / own: the step with their "
        "naive forms over the one with ours. Softmax has none of them. "
    )


def _gpu_sentence(gpu: "pd.DataFrame", older: Sequence[str]) -> str:
    if not gpu["time_ms"].notna().any():
        return "No GPU has been measured by this project. "
    return f"With earlier sources of the operators: {listed(older)}. " if older else ""
