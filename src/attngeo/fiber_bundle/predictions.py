"""Every prediction of PREDICTIONS.md by its own rule: met, contradicted, or open."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from attngeo.fiber_bundle.rank_collapse import RESIDUAL_FLOOR
from attngeo.fiber_bundle.significance import SUBJECT

if TYPE_CHECKING:
    import pandas as pd

MET, OPEN, CONTRADICTED = 1.0, 0.0, -1.0
MOST_RUNS = 0.8
GROWS = 2.0  # the end is at least so many times the start
# and at least so much: a metric's or a transport's difference from the others by a tenth; below a hundredth is nothing.
DIFFERS, ALIKE = 0.1, 0.01
TORSION = 1e-2
NO_TORSION = 1e-3
FLAT = 1e-6  # what a control that must vanish may be
WELL_CONDITIONED = 1e4
KEEPS_RANK = 10.0
SOLVED = 0.01  # nats, below which losses are noise
GUESSING = 0.98  # of the loss of a guess: what is not below has learnt nothing of the task
EQUAL_TIME = 0.1  # how far the times of two trainings may lie apart to be called equal


class Judged(NamedTuple):
    """How a prediction stands, on how many runs, tasks or seeds, and in words."""

    value: float
    n: int
    finding: str


class Evidence(NamedTuple):
    """Records of the trainings on tasks, the paired differences, and the records of rank collapse."""

    tasks: "pd.DataFrame"
    differences: "pd.DataFrame"
    collapse: "pd.DataFrame"


def judge(evidence: Evidence) -> list[dict[str, Any]]:
    """Rows of metric `prediction_met` (1, 0, -1) by `prediction`, with n and a finding in words."""
    rows = []
    for name, rule in PREDICTIONS.items():
        judged = rule(evidence)
        rows.append(
            {
                "metric": "prediction_met",
                "prediction": name,
                "value": judged.value,
                "n": judged.n,
                "finding": judged.finding,
            }
        )
    return rows


def _share(holds: list[bool], against: list[bool], finding: str, what: str) -> Judged:
    """Met, or contradicted, where at least 80 % are; open with one seed, where seeds are counted."""
    if not holds:
        return Judged(OPEN, 0, f"no {what} measured")
    if what == "seeds" and len(holds) == 1:
        return Judged(OPEN, 1, f"{finding}; one seed")
    for value, of in ((MET, holds), (CONTRADICTED, against)):
        if sum(of) >= MOST_RUNS * len(of):
            return Judged(value, len(of), finding)
    return Judged(OPEN, len(holds), finding)


def _grows(metric: str, control: str | None, parts: tuple[str, ...] = ()) -> Callable[[Evidence], Judged]:
    """A number, mean over layers, that at the end of each run is at least twice that at the start, and not small."""

    def rule(evidence: Evidence) -> Judged:
        found = _rows(evidence.tasks, metric, model=SUBJECT, budget="steps")
        flat = float(_rows(found, metric, control=control)["value"].abs().max(skipna=False)) if control else 0.0
        lost = _diverged(evidence)
        needed = "".join(f"; loss without {part}: {_added(evidence, part)} nats" for part in parts)
        ratios: list[float] = []
        ends: list[float] = []
        for run, values in _by_step(evidence, metric).items():
            if run in lost:
                ratios.append(math.nan)
                ends.append(math.nan)
            elif len(values) > 1:
                ratios.append(values[-1] / values[0] if values[0] else math.inf)
                ends.append(values[-1])
        finding = f"end by start {_span(ratios)}, end {_span(ends)}" + (f", control {flat:.1e}" if control else "")
        runs = list(zip(ratios, ends, strict=True))
        holds = [ratio >= GROWS and end >= DIFFERS and flat < FLAT for ratio, end in runs]
        return _share(holds, [ratio <= 1 or end < ALIKE for ratio, end in runs], finding + needed, "runs")

    return rule


def _torsion_grows(evidence: Evidence) -> Judged:
    """Mean over layers at the end of each run, against bounds: the connection starts at exactly 0."""
    found = _rows(evidence.tasks, "torsion_proxy", model=SUBJECT, budget="steps", control="symmetric")
    symmetric = float(found["value"].abs().max(skipna=False))
    lost = _diverged(evidence)
    ends = [math.nan if run in lost else values[-1] for run, values in _by_step(evidence, "torsion_proxy").items()]
    finding = f"at the end {_span(ends)}, control {symmetric:.1e}"
    finding += f"; loss without transport: {_added(evidence, 'transport')} nats"
    holds = [end >= TORSION and symmetric < FLAT for end in ends]
    return _share(holds, [end < NO_TORSION for end in ends], finding, "runs")


def _well_conditioned(evidence: Evidence) -> Judged:
    found = _rows(evidence.tasks, "metric_condition_p99", model=SUBJECT, budget="steps", control="none")
    lost = _diverged(evidence)
    ends: list[list[float]] = []  # of every run its layers; a number below 1 is that of a metric that is not positive
    for run, rows in found.groupby(["task", "seed"], sort=True):
        last = rows[rows["step"] == rows["step"].max()]["value"].tolist()
        ends.append([math.nan] if run in lost else last)
    if not ends:
        return Judged(OPEN, 0, "no runs measured")
    bad = sum(not all(0 < value <= WELL_CONDITIONED for value in layers) for layers in ends)
    value = MET if not bad else CONTRADICTED if 2 * bad > len(ends) else OPEN
    return Judged(value, len(ends), f"condition number {_span([max(layers) for layers in ends])}")


def _sides(found: "pd.DataFrame") -> tuple[int, int]:
    """On how many tasks a difference lies below 0 with its interval, and above."""
    return int((found["value"] + found["spread"] < 0).sum()), int((found["value"] - found["spread"] > 0).sum())


def _lower_loss(against: str, budget: str = "steps") -> Callable[[Evidence], Judged]:
    """A difference below 0 with its interval on most tasks and above 0 on none; the reverse contradicts.

    Tasks that tell the two apart by nothing (`_uninformative`) or, at equal time, were not trained as long, are left
    out. A training that diverged counts for neither side.
    """

    def rule(evidence: Evidence) -> Judged:
        found = _rows(evidence.differences, "loss_difference", against=against, budget=budget)
        if not len(found):
            return Judged(OPEN, 0, "no tasks measured")
        left_out = _uninformative(evidence, against, budget)
        if budget == "time":
            left_out |= _unequal_time(evidence)
        counted = found[~found["task"].isin(left_out)]
        below, above = _sides(counted)
        finding = f"below 0 on {below}, above 0 on {above} of {len(counted)} tasks"
        if left_out:
            finding += f" (left out: {', '.join(f'{task}, {why}' for task, why in sorted(left_out.items()))})"
        alone = _rows(evidence.differences, "metric_alone_difference", against=against)
        if len(alone):
            finding += ", metrics alone below 0 on {}, above 0 on {}".format(*_sides(alone))
        if lost := int((~counted["value"].map(math.isfinite)).sum()):
            finding += f"; on {lost} a training diverged"
        elif not bool(counted["spread"].map(math.isfinite).all()):
            return Judged(OPEN, len(counted), f"{finding}; one seed has no interval")
        if 2 * below > len(counted) and not above:
            return Judged(MET, len(counted), finding)
        return Judged(CONTRADICTED if 2 * above > len(counted) and not below else OPEN, len(counted), finding)

    return rule


def _recall_gains_most(evidence: Evidence) -> Judged:
    losses = _rows(evidence.tasks, "loss_on_the_way", budget="steps")
    table = losses.pivot_table(index="seed", columns=["task", "model"], values="value")
    wanted = [(task, model) for task in ("recall", "characters") for model in (SUBJECT, "dot")]
    if any(pair not in table for pair in wanted):
        return Judged(OPEN, 0, "recall and characters have not both been trained on")
    ratios = {task: table[(task, SUBJECT)] / table[(task, "dot")] for task in ("recall", "characters")}
    pairs = list(zip(ratios["recall"], ratios["characters"], strict=True))
    finding = ", ".join(f"{task} {_span(ratio.tolist())}" for task, ratio in ratios.items())
    finding += f" (recall, dot: {_span(table[('recall', 'dot')].tolist())} nats)"
    gains, behind = [ours < other for ours, other in pairs], [ours >= other for ours, other in pairs]
    return _share(gains, behind, f"loss on the way of fiber by that of dot: {finding}", "seeds")


def _rank_survives_training(evidence: Evidence) -> Judged:
    found = _rows(evidence.collapse, "last_layer_relative_residual", phase="trained")
    if not len(found):
        return Judged(OPEN, 0, "not measured")
    table = found.pivot_table(index="seed", columns="form", values="value").clip(lower=RESIDUAL_FLOOR)
    if not {"heterogeneous", "dot"} <= set(table):
        return Judged(OPEN, 0, "not measured")
    ratios = (table["heterogeneous"] / table["dot"]).tolist()
    finding = f"residual by that of dot {_span(ratios)}"
    return _share([r >= KEEPS_RANK for r in ratios], [r <= 1 for r in ratios], finding, "seeds")


def _by_step(evidence: Evidence, metric: str) -> dict[tuple[str, int], list[float]]:
    """Of every run, by task and seed, the mean over layers at each step watched; NaN with one layer that is."""
    found = _rows(evidence.tasks, metric, model=SUBJECT, budget="steps", control="none")
    return {
        (str(task), int(str(seed))): [
            float(values.mean(skipna=False)) for _, values in rows.groupby("step", sort=True)["value"]
        ]
        for (task, seed), rows in found.groupby(["task", "seed"], sort=True)
    }


def _uninformative(evidence: Evidence, against: str, budget: str) -> dict[str, str]:
    """Tasks that both models have solved, or on which neither does better than a guess, mean over seeds."""
    losses, guesses = (_rows(evidence.tasks, metric) for metric in ("task_loss", "guess_loss"))
    found = {}
    for task in losses["task"].unique() if len(losses) else ():
        pair = [
            _rows(losses, "task_loss", task=task, model=model, budget=of)["value"].mean()
            for model, of in ((SUBJECT, budget), (against, "steps"))
        ]
        guess = _rows(guesses, "guess_loss", task=task)["value"].mean()
        if max(pair) < SOLVED:
            found[str(task)] = "solved"
        elif min(pair) > GUESSING * guess:
            found[str(task)] = "no better than a guess"
    return found


def _added(evidence: Evidence, part: str) -> str:
    """What the full model's loss rises by without a part of its geometry, by task, mean over seeds."""
    found = _rows(evidence.tasks, "loss_without", model=SUBJECT, budget="steps", part=part)
    if not len(found):
        return "not measured"
    return ", ".join(f"{task} {values.mean():+.3g}" for task, values in found.groupby("task", sort=True)["value"])


def _unequal_time(evidence: Evidence) -> dict[str, str]:
    """Tasks on which the full model's training took another time than softmax's, mean over seeds."""
    times = _rows(evidence.tasks, "processor_time")
    ratios = {}
    for task in times["task"].unique() if len(times) else ():
        ours = _rows(times, "processor_time", task=task, model=SUBJECT, budget="time")["value"].mean()
        theirs = _rows(times, "processor_time", task=task, model="dot", budget="steps")["value"].mean()
        ratios[str(task)] = float(ours / theirs)
    return {t: f"{ratio:.2f} of the time" for t, ratio in ratios.items() if not abs(ratio - 1) <= EQUAL_TIME}


def _diverged(evidence: Evidence) -> set[tuple[str, int]]:
    """Task and seed of the runs that did not come to their end: what was watched last is not how they ended."""
    found = _rows(evidence.tasks, "training_finished", model=SUBJECT, budget="steps")
    lost = found[found["value"] == 0]
    return set(zip(lost["task"], lost["seed"], strict=True)) if len(lost) else set()


def _rows(frame: "pd.DataFrame", metric: str, **labels: Any) -> "pd.DataFrame":
    """Records of a metric with these labels; what is not finite stays, and holds for no rule."""
    found = frame[frame["metric"] == metric] if "metric" in frame else frame
    for name, value in labels.items():
        found = found[found[name] == value] if name in found else found.iloc[:0]
    return found


def _span(values: list[float]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "–"
    low, high = min(finite), max(finite)
    lost = f" ({len(values) - len(finite)} not finite)" if len(finite) < len(values) else ""
    return (f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}") + lost


PREDICTIONS: dict[str, Callable[[Evidence], Judged]] = {
    "metrics_differ": _grows("metric_heterogeneity", None, ("attention metrics", "feed-forward metrics")),
    "curvature_grows": _grows("curvature_proxy", "flat"),
    "torsion_grows": _torsion_grows,
    "well_conditioned": _well_conditioned,
    "better_at_equal_parameters": _lower_loss("dot"),
    "not_more_heads": _lower_loss("more_heads"),
    "heterogeneity_matters": _lower_loss("constant"),
    "better_at_equal_time": _lower_loss("dot", "time"),
    "recall_gains_most": _recall_gains_most,
    "rank_survives_training": _rank_survives_training,
}
