"""Commands: timings."""

import typer

from attngeo.cli.common import PresetOption, StampOption, ThreadsOption, begin, digest_of, preset_of, require_writable

app = typer.Typer(help="Timings; records are written under results/PRESET, most in benchmarks/.", no_args_is_help=True)


@app.command("operators")
def benchmark_operators(preset: PresetOption = "demo", stamp: StampOption = None) -> None:
    """Time the operators against torch, SciPy and scikit-learn, each checked against float64 first; one thread."""
    config = preset_of(preset)
    digest = begin(config, stamp, "benchmarks/operators", threads=1)
    from attngeo.jobs.operator_benchmark import operator_benchmark

    for line in operator_benchmark(config, digest):
        typer.echo(line)


@app.command("solver")
def benchmark_solver(preset: PresetOption = "demo", stamp: StampOption = None, threads: ThreadsOption = None) -> None:
    """Residuals of Newton-Schulz, conjugate gradient and direct solvers at equal numbers of matrix products."""
    config = preset_of(preset)
    digest = begin(config, stamp, "benchmarks/solver", threads)
    from attngeo.jobs.solver_benchmark import solver_benchmark

    solver_benchmark(config, digest)


@app.command("edge")
def benchmark_edge(preset: PresetOption = "demo", stamp: StampOption = None) -> None:
    """Latency and memory of one image at a time for every attention kind; one thread, a process each."""
    config = preset_of(preset)
    digest = begin(config, stamp, "benchmarks/edge", threads=1)
    from attngeo.jobs.edge_benchmark import edge_benchmark

    for line in edge_benchmark(config, digest):
        typer.echo(line)


@app.command("tokens")
def benchmark_tokens(preset: PresetOption = "demo", stamp: StampOption = None) -> None:
    """Time and memory of one layer of every attention kind by number of tokens, and of a training step; one thread."""
    config = preset_of(preset)
    digest = begin(config, stamp, "benchmarks/tokens", threads=1)
    from attngeo.jobs.token_benchmark import token_benchmark

    for line in token_benchmark(config, digest):
        typer.echo(line)


@app.command("metric-costs")
def benchmark_metric_costs(preset: PresetOption = "demo", stamp: StampOption = None) -> None:
    """Time inverse, log-determinant and distance of metrics against dense forms, and a block with them; one thread."""
    config = preset_of(preset)
    digest = begin(config, stamp, "benchmarks/metric_costs", threads=1)
    from attngeo.jobs.metric_costs import metric_costs

    for line in metric_costs(config, digest):
        typer.echo(line)


@app.command("gpu")
def benchmark_gpu(preset: PresetOption = "demo", stamp: StampOption = None) -> None:
    """Gather what `make gpu-check` measured on GPUs and left under docs/measured."""
    config = preset_of(preset)
    require_writable(config)
    from attngeo.jobs.gpu_timings import gpu_timings

    for device in gpu_timings(config, digest_of(config, stamp, "benchmarks/gpu")) or ["no GPU has been measured"]:
        typer.echo(device)
