"""Job: how far each solver gets with an equal number of matrix products, also on matrices of this preset's models."""

import time

from torch import Tensor

from attngeo.config import Preset, RunRow
from attngeo.evaluation import solver_convergence
from attngeo.evaluation.solver_convergence import KAPPA, RANDOM, TRAINED
from attngeo.jobs.analysis import keep
from attngeo.jobs.trained import load_trained


def solver_benchmark(preset: Preset, code_digest: str) -> None:
    """Write benchmarks/solver.json and .csv."""
    import pandas as pd

    started = time.monotonic()
    settings = preset.benchmarks.solver
    kinds: dict[str, list[Tensor]] = {
        RANDOM: [
            solver_convergence.random_landmark_matrices(settings.matrices, settings.landmarks, seed)
            for seed in settings.seeds
        ],
        KAPPA: [
            solver_convergence.matrices_of_condition(settings.matrices, settings.landmarks, seed, settings.eps)
            for seed in settings.seeds
        ],
    }
    trained = [matrices for row in preset.solver_runs for matrices in _trained(preset, row)]
    if trained:
        count = settings.matrices * len(settings.seeds)
        kinds[TRAINED] = solver_convergence.evenly_chosen(trained, count)
    rows = solver_convergence.analyze(kinds, iterations=settings.iterations, eps=settings.eps)
    runs = [row.run_id for row in preset.solver_runs]
    frame = pd.DataFrame(rows)
    frame["seeds"] = frame["matrix"].map({kind: len(settings.seeds) for kind in kinds} | {TRAINED: len(runs)})
    keep(
        preset,
        frame,
        preset.results / "benchmarks" / "solver.json",
        experiment="LaplacianFormer",
        name="solver convergence",
        code_digest=code_digest,
        params=settings.model_dump(mode="json") | {"runs": runs},
        metrics={},
        started=started,
        table=True,
    )


def _trained(preset: Preset, row: RunRow) -> list[Tensor]:
    """Landmark matrices of a finished run for the first validation images, one tensor a layer."""
    model, batches = load_trained(preset, row, batch_size=preset.benchmarks.solver.images)
    images, _ = next(iter(batches))
    return solver_convergence.trained_landmark_matrices(model, images)
