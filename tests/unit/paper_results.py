"""Made-up results of a preset, for tests of figures, tables and the ledger; no number here was ever measured."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from attngeo.files import json_line, read_json, write_json
from attngeo.paper import records
from attngeo.paper.targets import FIGURES, TABLES
from attngeo.run_options import options_text, parse_options

KINDS = {
    "softmax": "softmaxformer",
    "gaussian": "gaussianformer",
    "laplacian": "laplacianformer",
    "riemannian": "fiberformer",
}
DEVICE = "invented device"
CAUSAL = "one-way by construction, an invented convention"
SEPARATE = "shared_query_key=false; separate_landmarks=true"
NO_SCALE = "scale_start=one; learn_scale=false"
ALL_FIVE = f"iterations=5; {SEPARATE}; statistics=batch; {NO_SCALE}; init=default"
ABLATION = {
    "": (80.0, 81.0, 79.0),
    "iterations=5": (78.0, 78.9, 77.2),
    "init=default; recipe.non_finite=record": (79.8, 81.2, 79.0),
    ALL_FIVE: (70.0, 71.5, 68.0),
}


@dataclass(frozen=True)
class Run:
    """A row of a run sheet, as far as targets look at it."""

    run_id: str
    model: str
    dataset: str
    seed: int
    feeds: tuple[str, ...] = ("fig2", "fig3", "tab1")
    options: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Dataset:
    """A data set of a preset, as far as targets look at it."""

    hold_out: float = 0.0


@dataclass(frozen=True)
class Model:
    """A pretrained model of a preset, as far as targets look at it."""

    id: str


@dataclass(frozen=True)
class Preset:
    """A preset, as far as targets look at it."""

    name: str
    runs: tuple[Run, ...] = ()
    datasets: Mapping[str, Dataset] = field(default_factory=dict)
    language_models: tuple[Model, ...] = ()
    decoder_models: tuple[Model, ...] = ()
    finished_decoders: tuple[Model, ...] = ()
    vision_models: tuple[Model, ...] = ()
    fiber_task_runs: Mapping[str, object] = field(default_factory=dict)
    fiber_rate_tasks: Sequence[str] = ()
    rank_collapse_seeds: tuple[int, ...] = ()
    figures: tuple[str, ...] = tuple(FIGURES)
    tables: tuple[str, ...] = tuple(TABLES)


def write_runs(
    folder: Path,
    *,
    datasets: Iterable[str] = ("invented-a", "invented-b"),
    seeds: int = 3,
    laplacian_lead: float = 0.3,
    nan_run: bool = False,
    recipe: str = "invented",
    size: str = "micro",
    n_eval: int = 1000,
    lr: float = 3e-3,
    hold_out: float = 0.0,
) -> list[Path]:
    """metrics.jsonl and final.json of every attention kind; `laplacian_lead` is in points over softmax."""
    paths = []
    for dataset in datasets:
        for index, (kind, family) in enumerate(KINDS.items()):
            for seed in range(seeds):
                run_id = f"{dataset}-{kind}-{recipe}-{size}-s{seed}" + (f"-lr{lr}" if hold_out else "")
                rng = np.random.default_rng([seed, index, len(dataset)])
                lead = laplacian_lead if kind == "laplacian" else 0.0
                final = 80 + lead + float(np.random.default_rng(seed).normal(0, 0.4)) - 2.0 * (index in (1, 3))
                lines = []
                for epoch in range(1, 8):
                    share = 1 - math.exp(-epoch / 2)
                    diverged = nan_run and kind == "riemannian" and seed == 0 and epoch > 4
                    loss = math.nan if diverged else 2.3 - 1.8 * share + float(rng.normal(0, 0.03))
                    top1 = final * share + float(rng.normal(0, 0.5))
                    seen = {"epoch": epoch, "step": 10 * epoch, "images_seen": 1700 * epoch}
                    lines.append(json_line(seen | {"train_loss": loss, "val_loss": loss, "val_top1": top1}) + "\n")
                run = folder / "runs" / run_id
                run.mkdir(parents=True)
                (run / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
                write_json(
                    run / "final.json",
                    {
                        "run_id": run_id,
                        "model": f"{family}_{size}",
                        "attention": kind,
                        "dataset": dataset,
                        "recipe": recipe,
                        "seed": seed,
                        "accuracy": math.nan if nan_run and kind == "riemannian" and seed == 0 else final,
                        "n_eval": n_eval,
                        "parameters": 340_000 + 1000 * index,
                        "gmac": 0.011 + 0.001 * index,
                        "gmac_with_apart": 0.011 + 0.0015 * index,
                        "gmac_uncounted": [],
                        "device": DEVICE,
                        "status": "finished",
                        "recipe_values": {"lr": lr},
                        "loader": {"hold_out": hold_out},
                    },
                )
                paths += [run / "metrics.jsonl", run / "final.json"]
    return paths


def write_tuning(folder: Path, accuracies: Mapping[float, float], **options: Any) -> list[Path]:
    """final.json of one seed of every kind at each peak learning rate, with that held-out accuracy for every kind."""
    finals = []
    for lr, accuracy in accuracies.items():
        written = write_runs(folder, datasets=["held"], seeds=1, lr=lr, hold_out=0.1, **options)
        for path in written:
            if path.name == "final.json":
                write_json(path, read_json(path) | {"accuracy": accuracy})
                finals.append(path)
    return finals


def write_ablation(
    folder: Path,
    accuracies: Mapping[str, Sequence[float]],
    *,
    kind: str = "laplacian",
    dataset: str = "invented-a",
    recipe: str = "invented-ablation",
    residual: float | None = 0.005,
    diverged: Iterable[int] = (),
) -> list[Path]:
    """final.json of runs by their options ("" is the reference), an accuracy a seed; `diverged` seeds ended in NaN."""
    paths = []
    for number, (options, values) in enumerate(accuracies.items()):
        for seed, accuracy in enumerate(values):
            run_id = f"{dataset}-{kind}-{recipe}-{options_text(parse_options(options)) or 'plain'}-s{seed}"
            lost = bool(options) and seed in diverged
            path = folder / "runs" / run_id.replace("; ", "-").replace("/", "") / "final.json"
            write_json(
                path,
                {
                    "run_id": path.parent.name,
                    "model": f"{KINDS[kind]}_micro",
                    "attention": kind,
                    "dataset": dataset,
                    "recipe": recipe,
                    "options": options_text(parse_options(options)),
                    "recipe_values": {"lr": 0.003},
                    "seed": seed,
                    "accuracy": accuracy,
                    "loss": math.nan if lost else 0.5,
                    "n_eval": 1000,
                    "parameters": 340_000 + 1000 * number,
                    "gmac": 0.011,
                    "gmac_with_apart": 0.0115,
                    "gmac_uncounted": [],
                    "solver_residual_max": math.inf if lost else residual,
                    "solver_converged": None if residual is None else not lost and residual <= 0.01,
                    "skipped_steps": 7 if lost else 0,
                    "device": DEVICE,
                    "status": "DIVERGED" if lost else "FINISHED",
                },
            )
            paths.append(path)
    return paths


def write_connection_walk(
    folder: Path,
    model: str,
    *,
    family: str = "",
    layers: int = 7,
    heads: int = 4,
    excess: float = 0.01,
    trend: float = -0.9,
    windows: int = 32,
    window_tokens: int = 256,
    null_draws: int = 64,
    parameters: float = 0.0,
    causal: bool = False,
) -> Path:
    """Connection-walk records of one invented model, by default of a family of its own.

    The precision is what follows "@" in the model's id; the number of parameters, unless given, a million a letter.
    """
    rng = np.random.default_rng(len(model))
    rows = [_walk_row(model, -1, -1, "parameters", "trained", parameters or 1e6 * len(model), 1)]
    for control, value, spread in (
        ("trained", trend, 0.05),
        ("depth_shuffled", 0.0, 0.2),
        ("random_init", 0.1, 0.05),
    ):
        rows.append(
            _walk_row(
                model, -1, -1, "graph_change_trend", control, value, windows, spread, "standard deviation over windows"
            )
        )
    for layer in range(layers):
        scores = 0.95 + excess + rng.normal(0, 0.002, heads)
        for head, score in enumerate(scores):
            rows.append(_walk_row(model, layer, head, "isometry_score", "trained", float(score), 1))
            rows.append(_walk_row(model, layer, head, "identity_error", "trained", 1e-15, 2))
        null = rng.normal(0.95, 1e-4, null_draws)
        for control, values in (("trained", scores), ("null", null), ("excess", scores - 0.95)):
            spread = float(values.std(ddof=1)) if len(values) > 1 else math.nan
            over = "Gaussian draws of the same shape" if control == "null" else "heads"
            rows.append(
                _walk_row(
                    model,
                    layer,
                    -1,
                    "isometry_score",
                    control,
                    float(values.mean()),
                    len(values),
                    spread,
                    f"standard deviation over {over}",
                )
            )
        rows.append(_walk_row(model, layer, -1, "identity_error", "float64_softmax", 2e-15, 1))
        rows.append(_walk_row(model, layer, -1, "connection_laplacian_error", "conditions_hold", 3e-16, 1))
        rows.append(_walk_row(model, layer, -1, "reversibility_defect", "trained", 0.3, 2))
        over = "standard deviation over windows"
        rows.append(_walk_row(model, layer, -1, "spectral_gap", "trained", 0.5, windows, 0.1, over))
        if layer:
            for control in ("trained", "depth_shuffled", "random_init", "shuffled_tokens"):
                rows.append(_walk_row(model, layer, -1, "graph_change", control, 1 / layer, windows, 0.1, over))
    path = folder / "analyses" / "connection_walk" / f"{model}.json"
    frame = pd.DataFrame(rows).assign(
        family=family or f"{model}-family",
        precision=model.partition("@")[2] or "float32",
        convention=[CAUSAL if row["metric"] == "reversibility_defect" and causal else "" for row in rows],
    )
    provenance = {"device": DEVICE, "settings": {"windows": windows, "window_tokens": window_tokens}}
    records.write(path, records.from_frame(frame, provenance=provenance, source="invented"))
    return path


def write_decoders(folder: Path, *, sizes: int = 3, seeds: int = 2, steps: Sequence[int] = (0, 100)) -> list[Path]:
    """Connection-walk records of an invented family trained here: excess and convergence grow with size and step."""
    paths = []
    for size in range(sizes):
        for seed in range(seeds):
            for step in steps:
                path = write_connection_walk(
                    folder,
                    f"decoder-size{size}-s{seed}-step{step}",
                    family="decoder" if step == steps[-1] else f"decoder at step {step}",
                    excess=0.01 * (1 + size) * (step > 0),
                    trend=-0.2 * (1 + size) * (step > 0),
                    parameters=3e5 * 4.0**size,
                    causal=True,
                )
                paths.append(path)
    return paths


def write_run_walks(folder: Path, *, seeds: int = 3, datasets: Sequence[str] = ("invented-a", "invented-b")) -> Path:
    """Connection-walk records of invented pyramids of three kinds; the Laplacian one has signed maps."""
    rng = np.random.default_rng(0)
    rows = []
    for dataset in datasets:
        for kind, excess in (("softmax", 0.01), ("laplacian", -0.02), ("riemannian", 0.03)):
            for seed in range(seeds):
                run = f"{dataset}-{kind}-s{seed}"
                found = [_walk_row(run, -1, -1, "parameters", "trained", 3.4e5, 1)]
                for layer, heads in enumerate((1, 2, 4)):
                    scores = 0.9 + excess + rng.normal(0, 0.002, heads)
                    for head, score in enumerate(scores):
                        found.append(_walk_row(run, layer, head, "isometry_score", "trained", float(score), 1))
                        found.append(_walk_row(run, layer, head, "identity_error", "trained", 1e-15, 2))
                    over = "standard deviation over heads"
                    for control, values in (("trained", scores), ("null", scores * 0 + 0.9), ("excess", scores - 0.9)):
                        spread = float(values.std(ddof=1)) if heads > 1 else math.nan
                        mean = float(values.mean())
                        found.append(_walk_row(run, layer, -1, "isometry_score", control, mean, heads, spread, over))
                    found.append(_walk_row(run, layer, -1, "identity_error", "trained", 2e-15, 2))
                    signed = 0.4 if kind == "laplacian" else 0.0
                    found.append(_walk_row(run, layer, -1, "negative_share", "trained", signed, 2))
                labels = {"dataset": dataset, "attention": kind, "family": f"{kind} pyramid", "seed": seed}
                rows += [row | labels for row in found]
    path = folder / "analyses" / "connection_walk_runs.json"
    provenance = {"device": DEVICE, "settings": {}}
    records.write(path, records.from_frame(pd.DataFrame(rows), provenance=provenance, source="invented"))
    return path


def write_variational(
    folder: Path,
    *,
    orders: tuple[float, float] = (1.0, 4.0),
    variation_slopes: tuple[float, float] = (2.0, 1.0),
    shift_slope: float = 1.0,
    euler_lagrange: float = 4.0,
    softmax_obeys: bool = True,
    standard_error: float = 0.001,
    seeds: int = 10,
    nan: bool = False,
) -> Path:
    """Variational records; `orders` are those of Euler and RK4 in the energy-dissipation balance.

    Softmax-normalised attention does as the gradient flow, or violates every law.
    """
    rows = []

    def series(check: str, method: str, control: str, quantity: str, slope: float, expected: float) -> None:
        for step in (0.5, 0.25, 0.125):
            value = math.nan if nan and control == "one_over_n" else 0.1 * step**slope
            rows.append(
                _variational_row(check, method, control, quantity, step, value, seeds, 0.01 * value, "std over seeds")
            )
        slope_row = _variational_row(
            check, method, control, "slope", math.nan, slope, 3 * seeds, standard_error, "standard error"
        )
        rows.append(slope_row | {"expected": expected})

    rows.append(
        _variational_row("tangency", "softmax_flow", "none", "defect", math.nan, 2e-16, seeds, 1e-17, "std over seeds")
    )
    for method, order in zip(("projected_euler", "projected_rk4"), orders, strict=True):
        expected = 1.0 if method == "projected_euler" else 4.0
        series("energy_dissipation", method, "none", "relative_imbalance", order, expected)
        series("energy_dissipation", method, "one_over_n", "relative_imbalance", 0.0, 0.0)
        softmax = order if softmax_obeys else 0.0
        series("energy_dissipation", method, "softmax_normalised", "relative_imbalance", softmax, 0.0)
    residuals = (euler_lagrange, euler_lagrange if softmax_obeys else 0.0)
    series("euler_lagrange", "projected_rk4+5_points", "none", "relative_residual", residuals[0], 4.0)
    series("euler_lagrange", "projected_rk4+5_points", "softmax_normalised", "relative_residual", residuals[1], 0.0)
    series("euler_lagrange", "projected_rk4+5_points", "one_over_n", "relative_residual", 0.0, 0.0)
    series("first_variation", "flow_path", "none", "action_change", variation_slopes[0], 2.0)
    along_softmax = variation_slopes[0] if softmax_obeys else 1.0
    series("first_variation", "flow_path", "softmax_normalised", "action_change", along_softmax, 1.0)
    series("first_variation", "generic_path", "none", "action_change", variation_slopes[1], 1.0)
    series("minimiser_shift", "newton", "none", "shift", shift_slope, 1.0)
    series("minimiser_shift_predicted", "newton", "none", "error", 1.0, 1.0)
    series("stationary_path", "free_end", "none", "distance", 2.0, 2.0)
    series("stationary_path", "free_end", "one_over_n", "distance", 0.0, 0.0)
    over_seeds: dict[str, Any] = {"n": seeds, "spread": 0.5, "spread_kind": "std over seeds"}
    for beta, control in ((0, "uniform_weights"), (4, "none"), (16, "none")):
        for time in (1, 16, 256):
            count = max(1.0, beta - 0.01 * time)
            rows.append(_variational_row("clusters", f"beta_{beta}", control, "clusters", time, count, **over_seeds))
    for method in ("softmax_flow", "quadrature"):
        for beta in (1, 2, 4):
            rows.append(_variational_row("clustering_time", method, "none", "time", beta, 2.0**beta, **over_seeds))
    path = folder / "analyses" / "variational.json"
    records.write(path, records.from_frame(pd.DataFrame(rows), provenance={"device": DEVICE}, source="invented"))
    return path


def write_trajectories(
    folder: Path,
    model: str,
    *,
    layers: int = 5,
    windows: int = 32,
    excess: float = -0.01,
    closer: float = -0.1,
    run: tuple[str, str] | None = None,
    nan: bool = False,
) -> Path:
    """Trajectory records of one invented model, or of one invented run of a (data set, attention kind)."""
    rows: list[dict[str, object]] = []
    interval = {"spread": 0.002, "spread_kind": "half-width of the 95 % bootstrap interval over windows and draws"}
    labels: dict[str, object] = {"model": model, "unit": "1"}
    labels |= {"dataset": run[0], "attention": run[1]} if run else {}
    metrics = {
        "step_size": 0.3,
        "tangential_share": 0.95,
        "el_residual_free": 0.6,
        "el_residual_potential": 0.5,
        "geodesic_curvature": 4.0,
    }
    for place, control in enumerate(("trained", "random_init", "random_walk", "depth_shuffled")):
        for metric, value in metrics.items():
            for layer in range(layers):
                low = {} if control == "random_init" else {"low": value + 0.05 * place, "high": value + 0.06 * place}
                missing = nan and control == "trained" and layer == 1
                measured = {"value": math.nan if missing else value + 0.055 * place, "n": windows, "spread": 0.02}
                rows.append(labels | low | measured | {"metric": metric, "control": control, "layer": layer})
            if place:
                bounds = {"value": closer, "low": closer - 0.002, "high": closer + 0.002, "n": windows}
                rows.append(
                    labels | interval | bounds | {"metric": f"{metric}_difference", "control": control, "layer": -1}
                )
    share = {"metric": "tangential_share_excess", "control": "random_walk", "value": excess, "n": windows, "layer": -1}
    rows.append(labels | interval | share)
    for layer in range(layers):
        gain = {"metric": "norm_gain_cv", "control": "trained", "value": 0.2, "n": 1, "layer": layer}
        rows.append(labels | gain)
    path = folder / "analyses" / ("trajectories_runs.json" if run else f"trajectories/{model}.json")
    records.write(path, records.from_frame(pd.DataFrame(rows), provenance={"device": DEVICE}, source="invented"))
    return path


def write_injectivity(
    folder: Path, *, recall: float = 0.8, collisions: float = 64.0, ours: float = 0.0, images: int = 32
) -> Path:
    """Injectivity records of one invented feature set; `recall` and `ours` (collisions) are the injective form's."""
    rows = []
    for control in ("features", "gaussian_noise", "collinear_copies"):
        shared = {"feature_set": "invented features", "control": control, "tokens": 64, "unit": "", "n": images}
        for form in ("softmax", "gaussian", "laplacian", "linear_row_sum"):
            pairs = collisions if control == "collinear_copies" and form == "linear_row_sum" else 0.0
            values = {"numerical_rank": 64, "smallest_separation": 0.2, "identity_recall": 0.9, "collisions": pairs}
            rows += [_injectivity_row(shared, form, 0, metric, value) for metric, value in values.items()]
        for landmarks in (4, 9, 16):
            for form in ("injective", "injective_row", "row_sum", "none"):
                whole = form == "injective"
                values = {
                    "numerical_rank": landmarks + whole,
                    "rank_bound": landmarks + 1,
                    "smallest_separation": 0.01 * landmarks if whole else 0.001,
                    "identity_recall": recall if whole else 0.3,
                    "collisions": ours if whole and control == "collinear_copies" else 0.0,
                }
                rows += [_injectivity_row(shared, form, landmarks, metric, value) for metric, value in values.items()]
    path = folder / "analyses" / "injectivity.json"
    records.write(path, records.from_frame(pd.DataFrame(rows), provenance={"device": DEVICE}, source="invented"))
    return path


def write_attention_distance(
    folder: Path,
    *,
    excess: tuple[float, ...] = (0.02, 0.02, 0.02),
    half: float = 0.005,
    images: int = 32,
    reversed_at: float | None = None,
    nan: bool = False,
) -> Path:
    """Attention by distance on invented feature sets; `excess` holds the ledger's number of each, `half` its interval.

    Noise does as the features do, and so do they at every mean similarity but `reversed_at`, where the sign is turned.
    """
    rows: list[dict[str, object]] = []
    for index, found in enumerate(excess):
        shared = {"features": f"invented set {index}", "layer": "mean", "unit": "1", "n": images}
        interval = {"spread": half, "spread_kind": "half-width of the 95 % bootstrap interval over images"}
        value = math.nan if nan and index == 0 else found
        rows.append(shared | interval | {"metric": "middle_tercile_mass_excess", "value": value})
        for control, scale, levels in (
            ("features", "matched", (0.1, 0.4, 0.8)),
            ("features", "fixed", (None,)),
            ("gaussian_noise", "matched", (0.4,)),
        ):
            for level in levels:
                labels = shared | interval | {"control": control, "scale": scale, "matched_at": level}
                for partition in ("l2", "l1"):
                    case = labels | {"partition": partition}
                    difference = -found if level and level == reversed_at else found
                    rows.append(case | {"metric": "middle_mass_difference", "value": difference})
                    for kernel in ("laplacian", "gaussian"):
                        for tercile, mass in (("near", 0.5), ("middle", 0.3), ("far", 0.2)):
                            of = {"kernel": kernel, "tercile": tercile, "value": mass}
                            rows.append(case | of | {"metric": "tercile_mass"})
                for kernel in ("laplacian", "gaussian"):
                    for metric in ("bandwidth", "median_over_bandwidth", "mean_similarity", "mean_attention_distance"):
                        rows.append(labels | {"kernel": kernel, "metric": metric, "value": 0.9})
        for tercile in ("near", "middle", "far"):
            uniform = shared | {"control": "uniform", "kernel": "uniform", "value": 1 / 3, "tercile": tercile}
            rows.append(uniform | {"metric": "tercile_mass"})
        rows.append(
            shared | {"control": "uniform", "kernel": "uniform", "metric": "mean_attention_distance", "value": 7.0}
        )
        for distance in ("l1", "squared_l2"):
            labels = shared | {"control": "features", "distance": distance}
            for metric in ("cv", "skewness", "excess_kurtosis", "dynamic_range"):
                rows.append(labels | {"metric": f"distance_{metric}", "value": 1.5})
        for distance, where in (
            ("l1", "standard deviations"),
            ("squared_l2", "standard deviations"),
            ("l1", "medians"),
            ("l2", "medians"),
        ):
            labels = shared | {"control": "features", "distance": distance, "in": where, "metric": "distance_density"}
            rows += [labels | {"at": at, "value": 0.5 - 0.1 * abs(at - 1)} for at in (0.5, 1.0, 1.5)]
    path = folder / "analyses" / "attention_distance.json"
    records.write(path, records.from_frame(pd.DataFrame(rows), provenance={"device": DEVICE}, source="invented"))
    return path


def write_attention_maps(folder: Path, *, datasets: dict[str, tuple[str, ...]] | None = None) -> list[Path]:
    """Maps of two images at two stages, by data set and attention kind, with the arrays beside the records."""
    rows: list[dict[str, object]] = []
    arrays: dict[str, np.ndarray] = {}
    rng = np.random.default_rng(5)
    for dataset, kinds in (datasets or {"invented": ("softmax", "laplacian")}).items():
        arrays[f"{dataset}/images"] = rng.integers(0, 255, (2, 12, 12, 3), dtype=np.uint8)
        for kind in (*kinds, "uniform"):
            run = "" if kind == "uniform" else f"{dataset}-{kind}"
            top1 = {"metric": "top1", "value": 60.0, "n": 500, "image": "all", "control": "trained"}
            rows += [{"dataset": dataset, "run": run, "attention": kind, **top1}] if run else []
            for stage, side in ((1, 6), (2, 3)):
                labels = {"dataset": dataset, "run": run, "attention": kind, "stage": stage, "heads": 1}
                labels |= {"rows": side, "columns": side, "token_row": side // 2, "token_column": side // 2}
                arrays[f"{run}/stage {stage}"] = rng.normal(1 / side**2, 0.01, (2, side, side)).astype(np.float32)
                controls = ("uniform",) if kind == "uniform" else ("trained", "random_init")
                cases = [({"image": "all", "control": control}, 16) for control in controls]
                if run:
                    cases += [({"image": str(index), "class": "hat", "control": "trained"}, 1) for index in range(2)]
                for case, n in cases:
                    shared = labels | case | {"n": n}
                    rows.append(shared | {"metric": "effective_tokens", "value": 5.0, "spread": 0.5})
                    rows.append(shared | {"metric": "negative_share", "value": 0.1})
                    share = {"metric": "spatial_tercile_share", "tercile": "far", "value": 0.3, "spread": 0.1}
                    rows.append(shared | share)
    path = folder / "analyses" / "attention_maps.json"
    records.write(path, records.from_frame(pd.DataFrame(rows), provenance={"device": DEVICE}, source="invented"))
    np.savez(path.with_suffix(".npz"), **arrays)
    return [path, path.with_suffix(".npz")]


def write_operator_timings(folder: Path, *, ratio: float = 5.0, repeats: int = 10) -> Path:
    """Timings of this machine's processor: `ratio` times faster than torch at every size."""
    rows = [
        row
        for operation in ("laplacian_kernel", "newton_schulz_inverse")
        for tokens in (16, 32, 64, 128, 784)
        for row in _timing_rows(operation, tokens, ratio, repeats, {"device_kind": "cpu", "device": DEVICE})
    ]
    path = folder / "benchmarks" / "operators.json"
    frame = pd.DataFrame([*rows, *_step_rows()]).convert_dtypes()
    records.write(path, records.from_frame(frame, provenance={"device": DEVICE}, source="invented"))
    return path


def write_gpu_timings(
    folder: Path,
    *,
    devices: Iterable[str] = (),
    ratio: float = 9.0,
    repeats: int = 20,
    tokens: Iterable[int] = (16, 32, 64, 128),
    same_sources: bool = True,
) -> Path:
    """Timings gathered from GPUs; without devices a file without records, as where none has been measured."""
    rows = []
    for device in devices:
        labels = {"device_kind": "cuda", "device": device, "same_sources": same_sources}
        for operation in ("laplacian_kernel", "newton_schulz_inverse"):
            for n in tokens:
                rows += _timing_rows(operation, n, ratio, repeats, labels)
    frame = pd.DataFrame(rows) if rows else pd.DataFrame(columns=["metric", "value", "n"])
    path = folder / "benchmarks" / "gpu.json"
    records.write(path, records.from_frame(frame, provenance={"device": DEVICE}, source="invented"))
    return path


def _timing_rows(
    operation: str, tokens: int, ratio: float, repeats: int, labels: dict[str, object]
) -> list[dict[str, object]]:
    channels = 32 if operation == "laplacian_kernel" else 0
    rows: list[dict[str, object]] = []
    for direction in ("forward", "backward"):
        case = labels | {"operation": operation, "direction": direction, "slices": 64, "channels": channels}
        case |= {"tokens": tokens, "landmarks": tokens, "unit": "ms", "n": repeats}
        spread = {"spread": 0.001 * tokens, "spread_kind": "median minus minimum over repeats"}
        for contestant, role, time_ms in (
            ("attngeo", "ours", 0.01 * tokens),
            ("torch.cdist(p=1) + exp", "peer", 0.01 * tokens * ratio),
            ("torch broadcasting, in blocks", "peer", 0.05 * tokens * ratio),
            ("scipy cdist + exp", "peer", 0.001),
        ):
            backend = "compiled invented" if role == "ours" else ""
            who = {"contestant": contestant, "role": role, "backend": backend}
            rows.append(case | spread | who | {"metric": "time_ms", "value": time_ms})
        speedup = {"metric": "speedup", "value": ratio, "role": "ours", "contestant": "attngeo"}
        rows.append(case | speedup | {"unit": "1", "against": "torch.cdist(p=1) + exp"})
    return rows


def write_solver(
    folder: Path,
    *,
    newton_schulz: float = 0.5,
    conjugate_gradient: float = 0.25,
    rounding: float = 1e-6,
    matrices: int = 48,
    trained: bool = True,
) -> Path:
    """Residuals that fall by a factor a matrix product, down to rounding; the start as printed overflows."""
    rows: list[dict[str, object]] = []
    for matrix in ("random", "kappa_50", *(["trained"] if trained else [])):
        shared = {"matrix": matrix, "landmarks": "16", "eps": 0.01, "seeds": 3, "unit": "1", "n": matrices}
        rows.append(shared | {"metric": "condition", "value": 50.0})
        for solver, factor in (
            ("newton_schulz", newton_schulz),
            ("newton_schulz_identity", newton_schulz**2),
            ("newton_schulz_printed", math.inf),
            ("conjugate_gradient", conjugate_gradient),
        ):
            each = 1 if solver == "conjugate_gradient" else 2
            for iteration in range(1, 1 + 40 // each):
                products = each * iteration
                residual = math.inf if math.isinf(factor) else max(rounding, 3.0 * factor**products)
                labels = shared | {"solver": solver, "products": products, "iterations": iteration}
                rows += _residual_rows(labels, residual)
        for solver in ("cholesky", "pinv"):
            rows += _residual_rows(shared | {"solver": solver}, rounding)
    path = folder / "benchmarks" / "solver.json"
    provenance = {"device": DEVICE, "settings": {"runs": ["invented-run"]}}
    records.write(path, records.from_frame(pd.DataFrame(rows), provenance=provenance, source="invented"))
    return path


def write_edge(folder: Path) -> Path:
    """Latency and memory of two kinds at two image sizes."""
    rows: list[dict[str, object]] = []
    for image_size in (64, 32):
        for attention, factor in (("softmax", 2.0), ("laplacian", 1.0)):
            labels = {
                "size": "micro",
                "attention": attention,
                "image_size": image_size,
                "backend": "",
                "device": DEVICE,
            }
            latency = {"metric": "latency_ms", "value": factor * image_size, "unit": "ms", "n": 50, "spread": 0.5}
            rows.append(labels | latency | {"spread_kind": "range between quartiles"})
            values = {"memory_mib": 3.0, "weights_mib": 1.5, "parameters": 3.6e5, "gmac": 0.01, "gmac_with_apart": 0.02}
            rows += [labels | {"metric": metric, "value": value, "n": 1} for metric, value in values.items()]
    path = folder / "benchmarks" / "edge.json"
    records.write(path, records.from_frame(pd.DataFrame(rows), provenance={"device": DEVICE}, source="invented"))
    return path


def write_tokens(
    folder: Path,
    *,
    exponents: dict[str, tuple[float, float]] | None = None,
    tokens: Iterable[int] = (64, 256, 1024, 1600, 2304, 4096, 6400, 9216, 16384),
    largest_plain: int = 9216,
) -> Path:
    """Cost of one layer by kind: exponents of (time, memory), plain softmax with its backward up to `largest_plain`."""
    exponents = exponents or {"softmax": (1.9, 2.0), "laplacian": (1.05, 1.0), "softmax_fused": (1.8, 1.0)}
    tokens = list(tokens)
    rows: list[dict[str, object]] = []
    for attention, powers in exponents.items():
        for direction in ("forward", "forward and backward"):
            case = {"attention": attention, "pass": direction, "control": "none"}
            last = largest_plain if attention == "softmax" and direction != "forward" else max(tokens)
            for n in tokens:
                at = case | {"tokens": n, "heads": 1, "head_dim": 32, "landmarks": 49, "backend": ""}
                if n > last:
                    why = {"metric": "left_out", "value": math.nan, "unit": "1", "n": 0, "why": "more than 9 MiB"}
                    rows.append(case | {"tokens": n} | why)
                    continue
                spread = {"spread": 0.1, "spread_kind": "median minus minimum over repeats"}
                rows.append(at | spread | {"metric": "time_ms", "value": 1e-3 * n ** powers[0], "unit": "ms", "n": 5})
                memory = 1e-2 * n ** powers[1]
                rows.append(at | {"metric": "peak_memory_mib", "value": memory, "unit": "MiB", "n": 1})
            fitted = [n for n in tokens if 1024 <= n <= last]
            if len(fitted) < 3:
                continue
            between = {"from_tokens": min(fitted), "to_tokens": max(fitted), "unit": "1", "n": len(fitted)}
            for metric, power in zip(("time_exponent", "memory_exponent"), powers, strict=True):
                error = {"spread": 0.01, "spread_kind": "standard error of the slope"}
                rows.append(case | between | error | {"metric": metric, "value": power})
    path = folder / "benchmarks" / "tokens.json"
    frame = pd.DataFrame(rows).convert_dtypes()
    records.write(path, records.from_frame(frame, provenance={"device": DEVICE}, source="invented"))
    return path


def _step_rows() -> list[dict[str, object]]:
    """A training step of a model with our operators, with their naive forms, and of softmax."""
    rows: list[dict[str, object]] = []
    for attention, form, milliseconds, share in (
        ("laplacian", "attngeo", 50.0, 0.2),
        ("laplacian", "attngeo naive", 75.0, 0.0),
        ("softmax", "torch", 60.0, 0.0),
    ):
        backend = "compiled invented" if form == "attngeo" else ""
        case = {"model_size": "micro", "batch": 64, "attention": attention, "form": form, "backend": backend}
        case |= {"device_kind": "cpu", "device": DEVICE, "n": 5, "spread": 0.5}
        rows.append(case | {"metric": "step_ms", "value": milliseconds, "unit": "ms"})
        for operators, part in (("attngeo::", share), ("scaled_dot_product", 0.1)):
            rows.append(case | {"metric": "operator_share", "value": part, "unit": "1", "operators": operators})
    return rows


def _residual_rows(labels: dict[str, object], residual: float) -> list[dict[str, object]]:
    factors = {"": 1.0, "_lower_quartile": 0.5, "_upper_quartile": 2.0, "_largest": 4.0}
    return [labels | {"metric": f"solver_residual{name}", "value": f * residual} for name, f in factors.items()]


def _injectivity_row(
    shared: dict[str, object], form: str, landmarks: int, metric: str, value: float
) -> dict[str, object]:
    spread = {"spread": 0.05 * value, "spread_kind": "std over images"}
    return shared | {"form": form, "landmarks": landmarks, "metric": metric, "value": float(value)} | spread


def _walk_row(
    model: str,
    layer: int,
    head: int,
    metric: str,
    control: str,
    value: float,
    n: int,
    spread: float = math.nan,
    spread_kind: str = "",
) -> dict[str, object]:
    return {
        "model": model,
        "precision": "float32",
        "layer": layer,
        "head": head,
        "metric": metric,
        "control": control,
        "value": value,
        "unit": "1",
        "n": n,
        "spread": spread,
        "spread_kind": spread_kind,
    }


def write_score_rank(folder: Path, *, off: int = 0) -> Path:
    """Ranks of three forms; with `off`, the mean metric's are that far from the prediction."""
    rows = []
    for form, rank in (("dot", lambda d: d), ("query", lambda d: 1 + d + d * (d + 1) // 2), ("mean", lambda d: 2 * d)):
        for dimension in (2, 4, 8):
            for tokens in (16, 64):
                predicted = min(tokens, rank(dimension))
                rows.append(
                    {"metric": "score_rank", "form": form, "dimension": dimension, "tokens": tokens, "n": 3}
                    | {"value": float(predicted - (off if form == "mean" else 0)), "predicted": predicted, "unit": "1"}
                    | {"spread": 0.0, "spread_kind": "range over seeds", "control": form == "dot"}
                    | {"smallest_counted": 1e-4, "largest_left_out": 2e-16}
                )
    path = folder / "analyses" / "score_rank.json"
    provenance = {"device": DEVICE, "settings": {"rule": "invented values above a floor"}}
    records.write(path, records.from_frame(pd.DataFrame(rows), provenance=provenance, source="invented"))
    return path


def write_metric_costs(folder: Path, *, exponent_r: float = 2.0, overhead: float = 0.08) -> Path:
    """Times, exponents and overheads of metrics at two widths."""
    timing: dict[str, Any] = {"n": 7, "spread": 0.1, "spread_kind": "median minus minimum over repeats"}
    rows: list[dict[str, Any]] = []
    for operation in ("solve", "logdet", "distance"):
        for dimension in (256, 1024):
            labels = {"metric": "time_us", "operation": operation, "dimension": dimension, "unit": "us"} | timing
            rows += [
                labels | {"form": "low rank", "rank": rank, "value": 1e-4 * dimension * rank**2} for rank in (4, 16, 64)
            ]
            rows.append(labels | {"form": "dense", "value": 1e-6 * dimension**3})
    for metric, value in (("inversion_exponent_d", 1.0), ("inversion_exponent_r", exponent_r)):
        rows.append(
            {"metric": metric, "operation": "solve", "value": value, "unit": "1", "n": 4, "smallest": 16}
            | {"largest": 4096, "spread": 0.01, "spread_kind": "standard error of the slope"}
        )
    for dimension, shape in ((1024, "1B"), (2048, "8B")):
        for rank in (2, 8):
            labels = {"dimension": dimension, "rank": rank, "tokens": 256, "n": 7, "unit": "1"}
            rows.append(labels | {"metric": "block_overhead", "value": overhead})
            for part in ("distance", "solve", "metric of heads", "metric of the feed-forward"):
                rows.append(labels | {"metric": "part_overhead", "part": part, "value": overhead / 4})
                rows.append(labels | {"metric": "projected_overhead", "part": part, "value": overhead, "shape": shape})
    path = folder / "benchmarks" / "low_rank_metric.json"
    records.write(path, records.from_frame(pd.DataFrame(rows), provenance={"device": DEVICE}, source="invented"))
    return path


def _variational_row(
    check: str,
    method: str,
    control: str,
    quantity: str,
    step: float,
    value: float,
    n: int,
    spread: float,
    spread_kind: str,
) -> dict[str, object]:
    return {
        "check": check,
        "method": method,
        "control": control,
        "quantity": quantity,
        "step": step,
        "value": value,
        "unit": "1",
        "n": n,
        "spread": spread,
        "spread_kind": spread_kind,
        "expected": math.nan,
    }


def write_fiber_tasks(folder: Path, *, seeds: int = 5, nan: bool = False) -> list[Path]:
    """Record files of two invented tasks, a file a task and seed: losses, costs and geometry."""
    paths = []
    for task in ("recall", "characters"):
        for seed in range(seeds):
            rows: list[dict[str, object]] = []
            for place, model in enumerate(("dot", "more_heads", "constant", "fiber")):
                for budget in ("steps", "time") if model == "fiber" else ("steps",):
                    labels = {"task": task, "model": model, "budget": budget, "seed": seed, "n": 100}
                    loss = math.nan if nan and model == "constant" else 1.0 - 0.1 * place + 0.01 * seed
                    costs = {"parameters": 1e5 + place, "gmac": 0.01, "steps": 900.0, "processor_time": 30.0}
                    finished = "training_finished" if model == "fiber" else "baseline_finished"
                    numbers = {"task_loss": loss, "task_accuracy": 60.0, finished: 1.0, **costs}
                    rows += [labels | {"metric": metric, "value": value} for metric, value in numbers.items()]
            shared = {"task": task, "model": "fiber", "budget": "steps", "seed": seed, "n": 10}
            for metric, control in (("curvature_proxy", "flat"), ("torsion_proxy", "symmetric")):
                for step in (0, 450, 900):
                    for layer in range(3):
                        at = shared | {"metric": metric, "step": step, "layer": layer}
                        rows.append(at | {"control": "none", "value": 0.1 + step / 900 + 0.01 * layer})
                        rows.append(at | {"control": control, "value": 0.0})
            paths.append(folder / "analyses" / "fiber_tasks" / f"{task}-s{seed}.json")
            provenance = {"device": DEVICE, "settings": {}}
            records.write(paths[-1], records.from_frame(pd.DataFrame(rows), provenance=provenance, source="invented"))
    return paths


def write_fiber_bundle(folder: Path) -> list[Path]:
    """What invented trainings say together: differences, gradients and two predictions."""
    difference = {"metric": "loss_difference", "budget": "steps", "value": -0.1, "n": 5, "p": 0.01, "p_adjusted": 0.02}
    half = {"spread": 0.01, "spread_kind": "half-width of the 95 % Student interval over seeds"}
    rows = [difference | half | {"task": task, "against": "dot"} for task in ("recall", "characters")]
    gradients = [{"metric": "gradient_error", "part": "decoder", "value": 1e-7, "n": 8}]
    judged = [
        {"metric": "prediction_met", "prediction": name, "value": value, "n": 5, "finding": "invented"}
        for name, value in (("first", 1.0), ("second", -1.0))
    ]
    paths = []
    for name, found in (("fiber_bundle", rows + gradients), ("predictions", judged)):
        paths.append(folder / "analyses" / f"{name}.json")
        provenance = {"device": DEVICE, "settings": {}}
        records.write(paths[-1], records.from_frame(pd.DataFrame(found), provenance=provenance, source="invented"))
    return paths


def write_rank_collapse(folder: Path, *, seeds: int = 5, nan: bool = False) -> list[Path]:
    """Invented residuals and ranks by depth, a file a seed."""
    paths = []
    for seed in range(seeds):
        rows: list[dict[str, object]] = []
        for wiring in ("pure", "skip", "skip_mlp"):
            for form in ("dot", "euclidean", "constant", "heterogeneous"):
                for phase in ("init", "trained", "wide 16"):
                    shared = {"wiring": wiring, "form": form, "phase": phase, "seed": seed, "n": 8}
                    for depth in range(5):
                        residual = 10.0 ** (-depth) if wiring == "pure" else 0.7
                        value = math.nan if nan and form == "constant" and depth == 3 else residual
                        rows.append(shared | {"metric": "relative_residual", "depth": depth, "value": value})
                        rows.append(shared | {"metric": "effective_rank", "depth": depth, "value": 1 + residual})
                    if wiring == "pure":
                        rows.append(shared | {"metric": "last_layer_relative_residual", "depth": 4, "value": 1e-4})
        bound = {"metric": "cubic_bound", "wiring": "pure", "form": "bound", "phase": "init", "seed": seed, "n": 1}
        rows += [bound | {"depth": depth, "value": 10.0 ** (-(3**depth))} for depth in range(5)]
        paths.append(folder / "analyses" / "rank_collapse" / f"s{seed}.json")
        settings = {"depth": 4, "dim": 8, "length": 5, "steps": 10}
        provenance = {"device": DEVICE, "settings": settings}
        records.write(paths[-1], records.from_frame(pd.DataFrame(rows), provenance=provenance, source="invented"))
    return paths


def write_everything(folder: Path, *, nan_run: bool = False) -> dict[str, list[Path]]:
    """Results that every target can be made of, by target."""
    runs = write_runs(folder, nan_run=nan_run)
    walks = [write_connection_walk(folder, model) for model in ("invented-encoder", "invented-decoder@4bit")]
    run_walks, decoders = write_run_walks(folder), write_decoders(folder)
    variational, injectivity = write_variational(folder, nan=nan_run), write_injectivity(folder)
    timings, gpu = write_operator_timings(folder), write_gpu_timings(folder, devices=["Invented GPU"])
    solver, tokens = write_solver(folder), write_tokens(folder)
    score_rank, costs = write_score_rank(folder), write_metric_costs(folder)
    ablation = write_ablation(folder, ABLATION)
    ablation += write_ablation(folder, {"": (84.0, 84.5, 83.0)}, kind="softmax", residual=None)
    lambdas = write_ablation(folder, {"lambda_=2": (78.0, 79.0, 77.5)})
    paths = [write_trajectories(folder, model, nan=nan_run) for model in ("invented-encoder", "invented-decoder@4bit")]
    paths.append(write_trajectories(folder, "invented-run", run=("invented-a", "softmax")))
    distance, maps = write_attention_distance(folder, nan=nan_run), write_attention_maps(folder)
    fiber, collapse = write_fiber_tasks(folder, nan=nan_run), write_rank_collapse(folder, nan=nan_run)
    together = write_fiber_bundle(folder)
    return {
        "fig1": [distance],
        "fig2": runs,
        "fig3": runs,
        "tab1": runs,
        "fig4": [tokens],
        "fig5": [timings, gpu],
        "tab5": [timings, gpu],
        "fig6": [solver],
        "fig7": [injectivity],
        "fig8": maps,
        "fig9": walks,
        "fig10": [*walks, run_walks],
        "fig11": [*walks, *decoders],
        "fig12": [score_rank],
        "fig13": [costs],
        "fig14": collapse,
        "fig15": fiber,
        "tab8": [*fiber, together[0]],
        "fig16": [variational],
        "fig17": paths,
        "edge": [write_edge(folder)],
        "tuning": write_tuning(folder, {1e-3: 70.0, 3e-3: 80.0, 1e-2: 75.0}),
        "tab2": [*ablation, *lambdas],
        "tab3": [path for path in ablation if "init" not in path.parent.name],
        "tab4": ablation,
        "tab6": [*walks, *decoders, run_walks],
        "tab7": [*walks, run_walks],
        "tab9": [
            *runs,
            *walks,
            variational,
            *paths,
            injectivity,
            timings,
            gpu,
            solver,
            tokens,
            distance,
            score_rank,
            costs,
        ],
        "findings": [*(path for path in ablation if path.name == "final.json"), *walks, *decoders],
    }
