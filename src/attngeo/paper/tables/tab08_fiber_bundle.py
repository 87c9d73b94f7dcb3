"""Table 8: the Fiber Bundle Transformer against baselines that are matched in parameters or in time."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attngeo.paper import records
from attngeo.paper.render import Tabulated
from attngeo.paper.results import listed, preset_name, require_inputs, rows_of, span, summarise

if TYPE_CHECKING:
    import pandas as pd

MODELS = {
    "dot": "softmax",
    "more_heads": "softmax, twice the heads",
    "gated": "softmax, gated feed-forward",
    "euclidean": "Euclidean distance",
    "constant": "constant metric",
    "heterogeneous": "metric for each token",
    "fiber": "fiber bundle",
}
COLUMNS = {  # metric -> column, and what its unit is divided by
    "parameters": ("params (k)", 1e3),
    "gmac": ("MACs (M)", 1e-3),
    "rate": ("rate", 1),
    "steps": ("steps", 1),
    "processor_time": ("time (s)", 1),
}


def tabulate(inputs: Sequence[Path]) -> Tabulated:
    """Tabulate fiber_tasks/*.json and fiber_bundle.json: a row a task, model and budget, means over seeds."""
    import pandas as pd

    require_inputs(inputs, "tab8", "file")
    frames = [records.read(path) for path in inputs if path.parent.name == "fiber_tasks"]
    frame = pd.concat(frames, ignore_index=True)
    summary = next(records.read(path) for path in inputs if path.name == "fiber_bundle.json")
    differences = summary[summary["metric"] == "loss_difference"]
    runs = frame[frame["budget"].notna()]
    means = {
        metric: summarise(runs[runs["metric"] == metric], ["task", "model", "budget"], "value")
        for metric in ("task_loss", "task_accuracy", "loss_on_the_way", *COLUMNS)
    }
    rows = []
    order = {name: place for place, name in enumerate(MODELS)}
    losses = rows_of(means["task_loss"])
    for line in sorted(losses, key=lambda row: (row["task"], order[row["model"]], row["budget"])):
        key = (line["task"], line["model"], line["budget"])
        rows.append(
            {
                "task": line["task"],
                "model": MODELS[line["model"]] + (", equal time" if line["budget"] == "time" else ""),
                **{name: _of(means[metric], key, "mean") / unit for metric, (name, unit) in COLUMNS.items()},
                "accuracy (%)": _of(means["task_accuracy"], key, "mean"),
                "loss (nats)": line["mean"],
                "std": line["std"],
                "on the way": _of(means["loss_on_the_way"], key, "mean"),
                "n": line["n"],
                **_compared(differences, key),
            }
        )
    table = pd.DataFrame(rows)
    devices = listed(one.attrs["provenance"].get("device", "unknown device") for one in frames)
    lost = int((runs[runs["metric"].isin(["training_finished", "baseline_finished"])]["value"] == 0).sum())
    caption = (
        "Fiber Bundle Transformer (a metric for each token, attention by distance, transported values, preconditioned "
        "feed-forward) and decoders of the same number of parameters (within 1 %, by the width of the feed-forward) on "
        "the same batches; for images plain vision transformers. Loss on what is held out: the symbols that count, the "
        "next byte, or the class. Every model takes the same steps; equal time: as many as fit into the time that "
        "softmax took beside it. rate: peak learning rate. on the way: mean of the held-out losses after each part of "
        "the training. fiber minus: mean difference of the loss, paired by seed, of the fiber bundle minus this row's "
        "model (of the row with equal time: minus softmax), plus and minus half the 95 % Student interval; p by a "
        "paired t-test with Holm's correction over all comparisons (a prediction "
        f"goes by the interval, without it). A guess that binds nothing has a loss of {_guesses(frame)} nats. All "
        f"sizes, tasks and recipes are ours: the paper has no experiments; {_rates(inputs)}. Time is "
        f"processor time of one thread. {f'{lost} trainings diverged. ' if lost else ''}"
        f"n = {span(int(n) for n in table['n'])} seeds. Preset {preset_name(inputs)} on {devices}."
    )
    formats = {
        "params (k)": ".1f",
        "rate": "g",
        "MACs (M)": ".2f",
        "steps": ",.0f",
        "time (s)": ".0f",
        "accuracy (%)": ".1f",
        "loss (nats)": ".4f",
        "std": ".4f",
        "on the way": ".4f",
        "fiber minus": "+.4f",
        "±": ".4f",
        "p": ".2g",
    }
    return Tabulated(table, caption, "fiber-bundle", formats=formats, long=True)


def _guesses(frame: "pd.DataFrame") -> str:
    of_task = frame[frame["metric"] == "guess_loss"].groupby("task", sort=True)["value"].mean()
    return ", ".join(f"{value:.2f} ({task})" for task, value in of_task.items()) or "?"


def _rates(inputs: Sequence[Path]) -> str:
    tried = [records.read(path) for path in inputs if path.parent.name == "fiber_rates"]
    if not tried:
        return "tasks and the one learning rate were chosen with softmax alone"
    rates = sorted({float(rate) for frame in tried for rate in frame["rate"]})
    return (
        "sizes of tasks come from trials with seeds that are not among these; every model has the learning rate of "
        f"{', '.join(f'{rate:g}' for rate in rates)} at which the worse of two such seeds had the lowest training loss "
        "(those beyond a preset's own were tried where its lowest or highest was the best)"
    )


def _of(means: "pd.DataFrame", key: tuple[str, str, str], column: str) -> float:
    task, model, budget = key
    chosen = means[(means["task"] == task) & (means["model"] == model) & (means["budget"] == budget)]
    return float(chosen[column].iloc[0]) if len(chosen) else float("nan")


def _compared(differences: "pd.DataFrame", key: tuple[str, str, str]) -> dict[str, Any]:
    """How the full model differs from the row's; in its own row of equal time, from softmax."""
    task, model, budget = key
    against = "dot" if (model, budget) == ("fiber", "time") else model
    chosen = differences
    for name, value in (("task", task), ("against", against), ("budget", budget)):
        chosen = chosen[chosen[name] == value] if name in chosen else chosen.iloc[:0]
    if not len(chosen):
        return {"fiber minus": None, "±": None, "p": None}
    row = rows_of(chosen)[0]
    return {"fiber minus": row["value"], "±": row["spread"], "p": row.get("p_adjusted")}
