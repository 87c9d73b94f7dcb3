"""Rules for the Fiber Bundle Transformer (P4)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attngeo.paper.decisions.rule import (
    Finding,
    Lacking,
    Number,
    Part,
    decision,
    held,
    number,
    one_each,
    optional_rows,
    part,
    rows,
    tally,
)
from attngeo.paper.intervals import student_half_width
from attngeo.paper.results import rows_of

if TYPE_CHECKING:
    import pandas as pd

ROUNDING = 1e-12  # what smaller residuals are recorded as: nothing is left but rounding


@decision
def score_rank(frame: "pd.DataFrame") -> Finding:
    """P4.a: metric `score_rank` with labels `predicted` and `control`, by `form`, `dimension` and `tokens`.

    The reason counts heterogeneous metrics apart from the controls, forms of rank at most d + 2.

    Against: a rank of at most d + 2, that of a Euclidean distance, where a larger one is predicted.
    """
    found = rows_of(rows(frame, "score_rank"))
    parts = {
        f"{row['form']}, d = {row['dimension']}, N = {row['tokens']}": part(
            row["value"] == row["predicted"], row["value"] <= row["dimension"] + 2 < row["predicted"]
        )
        for row in found
    }
    controls, heterogeneous = ([row for row in found if bool(row["control"]) is one] for one in (True, False))
    capped = sum(row["predicted"] == row["tokens"] for row in heterogeneous)
    reason = (
        f"{_as_predicted(heterogeneous)} ranks of heterogeneous metrics as predicted ({capped} limited by the number "
        f"of tokens), {_as_predicted(controls)} of the controls, whose rank is at most d + 2"
    )
    return tally(parts, reason)


def _as_predicted(found: Sequence[Mapping[str, Any]]) -> str:
    return f"{sum(row['value'] == row['predicted'] for row in found)} of {len(found)}"


@decision
def metric_cost(frame: "pd.DataFrame") -> Finding:
    """P4.b: metrics `inversion_exponent_d`, `inversion_exponent_r`, and `block_overhead` by `dimension` and `rank`.

    The reason also tells `inversion_exponent_large_r`, fitted where d r^2 dominates.

    Against: an exponent a whole power above the claimed one; a block twice as slow or slower.
    """
    in_d = max(rows(frame, "inversion_exponent_d")["value"].tolist(), key=lambda value: abs(value - 1))
    in_r = max(rows(frame, "inversion_exponent_r")["value"].tolist(), key=lambda value: abs(value - 2))
    overheads = rows(frame, "block_overhead")
    overheads = overheads[(overheads["dimension"] >= 1024) & (overheads["rank"] <= 8)]
    if not len(overheads):
        raise Lacking("block overhead at d at least 1,024 and r at most 8 has not been measured")
    worst = float(overheads["value"].max())
    numbers: dict[str, Number] = {"exponent in d": in_d, "exponent in r": in_r, "largest block overhead": worst}
    parts = {
        "d": part(abs(in_d - 1) <= 0.15, in_d >= 2),
        "r": part(abs(in_r - 2) <= 0.3, in_r >= 3),
        "overhead": part(worst <= 0.1, worst >= 1),
    }
    reason = f"d^{in_d:.2f}, r^{in_r:.2f}, overhead {100 * worst:.0f} %"
    beyond = optional_rows(frame, "inversion_exponent_large_r")["value"]
    if len(beyond):
        numbers["exponent in r, from 128 on"] = float(beyond.max())
        reason += f" (r^{beyond.max():.2f} from 128 on)"
    return tally(parts, reason, numbers)


@decision
def fiber_bundle_trains(frame: "pd.DataFrame") -> Finding:
    """P4.c: metrics `training_finished` (1 or 0) by seed and `gradient_error` (relative) by part.

    Against: no run finishes; gradients off by a tenth or more.
    """
    finished = rows(frame, "training_finished")["value"]
    error = float(rows(frame, "gradient_error")["value"].max())
    done = int((finished == 1).sum())
    numbers: dict[str, Number] = {"runs": len(finished), "finished": done, "largest gradient error": error}
    parts = {"training": part(done == len(finished), done == 0), "gradients": part(error <= 1e-4, error >= 0.1)}
    return tally(parts, f"{done} of {len(finished)} runs finished, gradient error {number(error)}", numbers)


@decision
def predictions(frame: "pd.DataFrame") -> Finding:
    """P4.d: metric `prediction_met` by `prediction`: 1 met, 0 not met, -1 contradicted, each by its own rule.

    Against: a prediction that its own rule calls contradicted.
    """
    found = one_each(rows(frame, "prediction_met"), "prediction")
    parts = {name: part(row["value"] == 1, row["value"] == -1) for name, row in found.items()}
    words = {1: "met", 0: "open", -1: "contradicted"}
    numbers: dict[str, Number] = {
        name: f"{words.get(int(row['value']), '?')} ({row['finding']})"
        if row.get("finding")
        else words[int(row["value"])]
        for name, row in found.items()
    }
    return tally(parts, f"{held(parts)} of {len(parts)} predictions met", numbers)


@decision
def rank_collapse(frame: "pd.DataFrame") -> Finding:
    """P4.e: metric `last_layer_relative_residual` by `form` (heterogeneous and others), `seed` and `phase`.

    Against: at most the largest residual of the other metrics in 4 of 5 seeds. Beside it: `layers_kept` of wide phases,
    new and trained.
    """
    found = rows(frame, "last_layer_relative_residual")
    parts: dict[str, Part] = {}
    numbers: dict[str, Number] = {}
    texts: list[str] = []
    for phase in ("init", "trained"):
        table = rows(found, "last_layer_relative_residual", phase=phase).pivot_table(
            index="seed", columns="form", values="value", aggfunc="mean"
        )
        if "heterogeneous" not in table or len(table.columns) < 2:
            raise Lacking(f"{phase}: the heterogeneous metric and at least one other have to be measured", numbers)
        if len(table) < 5:
            raise Lacking(f"underpowered: {phase} has {len(table)} seeds of at least 5", numbers)
        if table.isna().any(axis=None):
            raise Lacking(f"{phase}: not every metric has been measured with every seed", numbers)
        others = table.drop(columns="heterogeneous").max(axis=1)
        wins, losses = (
            int(condition.sum())
            for condition in (table["heterogeneous"] >= 10 * others, table["heterogeneous"] <= others)
        )
        collapsed = int((table <= ROUNDING).all(axis=1).sum())
        numbers |= {
            f"seeds, {phase}": len(table),
            f"seeds with at least 10 times, {phase}": wins,
            f"seeds in which every metric has collapsed to rounding, {phase}": collapsed,
        }
        parts[phase] = part(wins >= 0.8 * len(table), losses >= 0.8 * len(table))
        texts.append(
            f"{phase}: tenfold in {wins} of {len(table)} seeds, every metric collapsed to rounding in {collapsed}"
        )
    reason = f"residual behind the last layer, heterogeneous against all others, {'; '.join(texts)}"
    kept = optional_rows(frame, "layers_kept")
    beside: list[str] = []
    for phase in sorted({str(name) for name in kept["phase"] if str(name).startswith("wide")} if len(kept) else ()):
        table = kept[kept["phase"] == phase].pivot_table(index="seed", columns="form", values="value")
        more = [float(v) for v in table["heterogeneous"] - table.drop(columns="heterogeneous").max(axis=1)]
        mean, half = sum(more) / len(more), student_half_width(more)
        numbers |= {f"layers kept, {phase}, {form}": float(table[form].mean()) for form in table}
        numbers[f"layers kept more than by the best other, {phase}"] = mean
        beside.append(f"{phase} {table['heterogeneous'].mean():.1f}, {mean:+.1f} (± {half:.1f}) against the best other")
    if beside:
        reason += f". Beside the rule, layers behind which tokens differ by 1e-6: {'; '.join(beside)}"
    return tally(parts, reason, numbers)
