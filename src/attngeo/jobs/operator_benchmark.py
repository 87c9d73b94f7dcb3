"""Job: time the operators on this CPU against their peers and against what its registers allow."""

import time

import torch

from attngeo.config import Preset
from attngeo.evaluation import operator_benchmarks, step_share, timing
from attngeo.evaluation.operator_limits import measure_port_limit, port_limits, this_instruction_set
from attngeo.evaluation.operator_sizes import PUBLISHED_TOKENS, Size, square
from attngeo.jobs.analysis import keep
from attngeo.tracking.provenance import provenance


def operator_benchmark(preset: Preset, code_digest: str) -> list[str]:
    """Write benchmarks/operators.json and .csv; a line of each speed-up and of each kind's share of a training step."""
    import pandas as pd

    started = time.monotonic()
    settings, step = preset.benchmarks.operators, preset.benchmarks.training_step
    timing.keep_pages()
    limit = measure_port_limit(preset.root / "benchmarks" / "port_limit.cpp", this_instruction_set())
    kernels = [Size(*size) for size in settings.sizes]
    inverses = [square(settings.slices, tokens) for tokens in settings.inverse_tokens]
    published = [square(settings.slices, tokens) for tokens in PUBLISHED_TOKENS]
    sizes = {
        "laplacian_kernel": [*kernels, *(size._replace(channels=settings.channels) for size in published)],
        "laplacian_kernel_matmul": kernels,
        "gaussian_kernel": kernels,
        "gaussian_kernel_matmul": kernels,
        "newton_schulz_inverse": list(dict.fromkeys([*inverses, *published])),
        "spd_inverse": inverses,
    }
    rows = operator_benchmarks.suite(
        sizes,
        torch.device("cpu"),
        repeats=settings.repeats,
        seconds=settings.seconds,
        limits=port_limits(limit),
        tell=lambda line: print(line, flush=True),
    )
    shares = step_share.measure(step.model_size, step.images, repeats=step.repeats, seconds=step.seconds)
    frame = pd.DataFrame([*rows, *shares]).convert_dtypes().assign(device=provenance(code_digest)["device"])
    speedups = frame[frame["metric"] == "speedup"]
    texts = {
        f"{row['operation']} {row['direction']} "
        f"{Size(row['slices'], row['tokens'], row['landmarks'], row['channels']).label}": float(row["value"])
        for row in speedups.to_dict("records")
    }
    keep(
        preset,
        frame,
        preset.results / "benchmarks" / "operators.json",
        experiment="LaplacianFormer",
        name="operator timings",
        code_digest=code_digest,
        params=settings.model_dump(mode="json")
        | {"port_limit": limit.instruction_set or limit.why, "training_step": step.model_dump(mode="json")},
        metrics={f"speedup {text}": value for text, value in texts.items()},
        started=started,
        table=True,
    )
    lines = [f"{value:7.2f} x the best peer: {text}" for text, value in texts.items()]
    return [*lines, *(f"{100 * value:6.1f} % {text}" for text, value in step_share.shares(shares).items())]
