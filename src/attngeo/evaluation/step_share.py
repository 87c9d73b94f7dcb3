"""What the operators take of a training step of a whole model, compiled and naive."""

import os
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import timm
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from attngeo.evaluation.timing import Call, interleaved, processor_time
from attngeo.models import registry  # noqa: F401  names the models to timm
from attngeo.models.sizes import PYRAMID_SIZES
from attngeo.ops import backend
from attngeo.training.bare import COST_RECIPE, BareStep
from attngeo.training.seeding import generator, seed_everything

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes a line at every start and stop

Row = dict[str, Any]

CLASSES = 10
OURS, NAIVE, TORCH = "attngeo", "attngeo naive", "torch"
OWN_OPERATORS, FUSED_SOFTMAX = "attngeo::", "scaled_dot_product"  # in the names that the profiler gives
# Kinds with operators of their own, and softmax, whose share of them is 0.
KERNEL_KINDS, CONTROL = ("laplacian", "gaussian"), "softmax"
_STEP = "training step"


def measure(size: str, images: int, *, repeats: int, seconds: float) -> list[Row]:
    """Rows of a training step of a pyramid size on a batch of images of its own size, by kind and form; one thread.

    Forms: `attngeo` (the operators that are chosen by themselves), `attngeo naive`, and `torch` for softmax.
    `step_ms` is the smallest processor time of the repeats, without the profiler; `operator_share` the part of a
    profiled step's time inside the operators whose names hold `operators`, forward and backward, each without what it
    calls (median over profiled steps; the gradient of an inverse is made of torch's products and not in it);
    `step_ratio` the naive form's step over the compiled one's.
    """
    torch.set_num_threads(1)
    steps: dict[tuple[str, str], Call] = {}
    ran: dict[tuple[str, str], str] = {}
    for kind in (*KERNEL_KINDS, CONTROL):
        for form in (OURS, NAIVE) if kind != CONTROL else (TORCH,):
            backend.forget()
            steps[kind, form] = _step(size, kind, form, images)
            steps[kind, form]()
            ran[kind, form] = "; ".join(f"{operator}: {what}" for operator, what in backend.ran().items())
    timings = interleaved(
        {"|".join(case): call for case, call in steps.items()}, processor_time, repeats=repeats, seconds=seconds
    )
    shared = {"model_size": size, "batch": images, "device_kind": "cpu", "dtype": "float32", "threads": 1}
    rows = []
    for (kind, form), call in steps.items():
        labels = shared | {"attention": kind, "form": form, "backend": ran[kind, form]}
        timing = timings[f"{kind}|{form}"]
        spread = {"spread": timing.spread_ms, "spread_kind": "median minus minimum over repeats"}
        rows.append(
            labels | {"metric": "step_ms", "value": timing.minimum_ms, "unit": "ms", "n": timing.repeats} | spread
        )
        for operators in (OWN_OPERATORS,) if kind != CONTROL else (OWN_OPERATORS, FUSED_SOFTMAX):
            rows.append(labels | _share(call, operators, max(2, min(repeats, 5))))
    rows += [shared | row for row in _ratios(timings)]
    return rows


def shares(rows: Sequence[Row]) -> dict[str, float]:
    """The share of every kind's step that its operators take, by a description."""
    return {
        f"of a {row['attention']} step in {row['operators']}* ({row['form']})": row["value"]
        for row in rows
        if row["metric"] == "operator_share"
    }


def _ratios(timings: dict[str, Any]) -> Iterator[Row]:
    for kind in KERNEL_KINDS:
        naive, ours = timings[f"{kind}|{NAIVE}"], timings[f"{kind}|{OURS}"]
        row = {"metric": "step_ratio", "value": naive.minimum_ms / ours.minimum_ms, "unit": "1"}
        yield row | {"n": min(naive.repeats, ours.repeats), "attention": kind, "form": OURS, "against": NAIVE}


def _step(size: str, kind: str, form: str, images: int) -> Call:
    """A training step of a model as drawn, on a batch of its own."""
    pixels = PYRAMID_SIZES[size].image_size
    seed_everything(0)
    options = {"attention_options": {"backend": "naive"}} if form == NAIVE else {}
    model = timm.create_model(f"softmaxformer_{size}", attention=kind, num_classes=CLASSES, img_size=pixels, **options)
    step = BareStep(model, COST_RECIPE)
    batch = torch.randn(images, 3, pixels, pixels, generator=generator(0, "step share"))
    labels = torch.arange(images) % CLASSES
    return lambda: step(batch, labels)


def _share(step: Call, operators: str, repeats: int) -> Row:
    shares = []
    for _ in range(repeats):
        with profile(activities=[ProfilerActivity.CPU]) as profiled, record_function(_STEP):
            step()
        events = profiled.key_averages()
        (whole,) = (event.cpu_time_total for event in events if event.key == _STEP)
        inside = sum(event.self_cpu_time_total for event in events if operators in event.key)
        shares.append(inside / whole)
    low, middle, high = statistics.quantiles(shares, n=4, method="inclusive")
    spread = {"spread": high - low, "spread_kind": "range between quartiles"}
    row = {"metric": "operator_share", "value": middle, "unit": "1", "n": repeats, "operators": operators}
    return row | spread
