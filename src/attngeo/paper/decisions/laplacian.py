"""Rules for LaplacianFormer (P2)."""

import math
from typing import TYPE_CHECKING

from attngeo.paper.decisions.rule import (
    Finding,
    Lacking,
    Number,
    Outcome,
    Part,
    contradicted,
    decision,
    held,
    one_each,
    optional_rows,
    part,
    rows,
    side_of_zero,
    tally,
    unanimous,
)
from attngeo.paper.intervals import student_half_width
from attngeo.paper.results import listed, rows_of

if TYPE_CHECKING:
    import pandas as pd

UNWHITENED = ("injective_row", "row_sum", "none")  # forms through landmarks whose rows are not whitened
CONSTRUCTED = "collinear_copies"  # features of which half are copies times 2, made so that linear attention collides


@decision
def cost_exponents(frame: "pd.DataFrame") -> Finding:
    """P2.a: metrics `time_exponent` and `memory_exponent` by `attention` (laplacian, softmax: the plain one).

    Of several passes the worst counts: the largest exponent of Laplacian, the smallest of softmax.
    Against: a Laplacian exponent of 1.8 or more, or one of plain softmax of at most 1.15.
    """
    parts: dict[str, Part] = {}
    numbers: dict[str, Number] = {}
    for metric in ("time_exponent", "memory_exponent"):
        laplacian = float(rows(frame, metric, attention="laplacian")["value"].max())
        softmax = float(rows(frame, metric, attention="softmax")["value"].min())
        word = metric.split("_")[0]
        numbers |= {f"{word} exponent, Laplacian": laplacian, f"{word} exponent, softmax": softmax}
        parts[f"Laplacian {word}"] = part(laplacian <= 1.15, laplacian >= 1.8)
        parts[f"softmax {word}"] = part(softmax >= 1.8, softmax <= 1.15)
    return tally(parts, ", ".join(f"{name} {value:.2f}" for name, value in numbers.items()), numbers)


@decision
def middle_distance_mass(frame: "pd.DataFrame") -> Finding:
    """P2.b: metric `middle_tercile_mass_excess`, Laplacian minus Gaussian, a record for each of `features`.

    Two feature sets above and none below meet the rule, unless another mean similarity of the kernels (metric
    `middle_mass_difference`, label `matched_at`) reverses the sign in most feature sets: then it is mixed.
    Against: a difference below 0 with its interval. The reason also says how it is on Gaussian noise.
    """
    found = one_each(rows(frame, "middle_tercile_mass_excess"), "features")
    if len(found) < 2:
        raise Lacking(f"underpowered: {len(found)} feature sets of at least 2")
    parts = {name: side_of_zero(row, f"the mass excess on {name}") for name, row in found.items()}
    numbers: dict[str, Number] = {name: row["value"] for name, row in found.items()}
    above, below = held(parts), contradicted(parts)
    reason = f"above 0 in {above} of {len(parts)} feature sets, below in {below}"
    beside = optional_rows(frame, "middle_mass_difference", layer="mean", scale="matched")
    beside = beside[beside[["value", "spread"]].map(math.isfinite).all(axis=1)]
    elsewhere: dict[Part, list[str]] = {Part.HOLDS: [], Part.AGAINST: []}  # where most feature sets lie on that side
    features = optional_rows(beside, "middle_mass_difference", control="features")
    for level, chosen in features.groupby("matched_at", sort=True) if len(features) else ():
        sides = _sides(chosen, f"the mass difference at mean similarity {level:g}")
        up, down = sides.count(Part.HOLDS), sides.count(Part.AGAINST)
        numbers[f"feature sets above and below 0 at mean similarity {level:.2g}"] = f"{up} and {down} of {len(sides)}"
        for side in elsewhere:
            if 2 * sides.count(side) > len(sides):
                elsewhere[side].append(f"at {level:.2g} above in {up}, below in {down}")
    noise = optional_rows(beside, "middle_mass_difference", control="gaussian_noise")
    if len(noise):
        sides = _sides(noise, "the mass difference on Gaussian noise")
        up, down = sides.count(Part.HOLDS), sides.count(Part.AGAINST)
        numbers["feature sets above and below 0 on Gaussian noise"] = f"{up} and {down} of {len(sides)}"
        reason += f"; on Gaussian noise of the same covariance above in {up}, below in {down}"
    finding = tally(parts, reason, numbers)
    if above >= 2 and not below:
        finding = Finding(Outcome.MET, reason, numbers)
    other = {Outcome.MET: Part.AGAINST, Outcome.REVERSE: Part.HOLDS}.get(finding.outcome)
    if other is None or not elsewhere[other]:
        return finding
    told = f"the sign depends on the mean similarity at which the kernels are matched ({', '.join(elsewhere[other])})"
    return Finding(Outcome.MIXED, f"{finding.reason}; {told}", numbers)


def _sides(found: "pd.DataFrame", of: str) -> list[Part]:
    """On which side of 0 each feature set lies by all partitions into terciles, each with its interval."""
    return [
        unanimous(side_of_zero(row, f"{of}, {name}") for row in rows_of(group))
        for name, group in found.groupby("features", sort=True)
    ]


@decision
def injective_features(frame: "pd.DataFrame") -> Finding:
    """P2.c: metrics `collisions` (row pairs closer than 1e-6) and `identity_recall` by `form` and `control`.

    Against: as many collisions as linear attention or more; recall below the un-whitened form both on average and in
    more than half of the settings.
    """
    case = ["feature_set", "control", "tokens"]
    linear = rows(frame, "collisions", form="linear_row_sum").set_index(case)["value"]
    confused = linear[linear > 0]
    if not len(confused):
        raise Lacking("plain linear attention had no collisions on these features, so there is nothing to compare")
    ours = rows(frame, "collisions", form="injective").set_index(case)["value"]
    missing = [index for index in confused.index if index not in ours.index]
    if missing:
        raise Lacking(
            f"the whitened form has not been measured in {len(missing)} cases where linear attention collides"
        )
    there = float(ours[ours.index.isin(confused.index)].max())
    settings = ["feature_set", "tokens", "landmarks"]
    whitened, plain = (
        rows(frame, "identity_recall", form=form, control="features")[[*settings, "value"]]
        for form in ("injective", "none")
    )
    pairs = whitened.merge(plain, on=settings, suffixes=("", "_plain"))
    if len(pairs) < max(len(whitened), len(plain)):
        raise Lacking("identity recall has not been measured in the same settings with and without whitening")
    wins, losses = (
        int((pairs["value"] > pairs["value_plain"]).sum()),
        int((pairs["value"] < pairs["value_plain"]).sum()),
    )
    ours_mean, plain_mean = float(pairs["value"].mean()), float(pairs["value_plain"].mean())
    numbers: dict[str, Number] = {
        "cases in which linear attention collides": len(confused),
        "colliding pairs an image there, linear attention (largest)": float(confused.max()),
        "colliding pairs an image there, injective (largest)": there,
        "mean identity recall, whitened": ours_mean,
        "mean identity recall, un-whitened": plain_mean,
        "settings with whitened above un-whitened": f"{wins} of {len(pairs)}",
    }
    parts = {
        "separation": part(there == 0, there >= float(confused.max())),
        "identity recall": part(ours_mean > plain_mean, ours_mean < plain_mean and 2 * losses > len(pairs)),
    }
    everywhere = optional_rows(frame, "collisions")
    without = everywhere[everywhere["form"].isin(UNWHITENED)].set_index(case)["value"]
    theirs = float(without[without.index.isin(confused.index)].max()) if len(without) else math.nan
    if math.isfinite(theirs):
        numbers["colliding pairs an image there, un-whitened (largest)"] = theirs
    where = sorted(set(confused.index.get_level_values("control").map(str)))
    place = "only the constructed copies" if where == [CONSTRUCTED] else listed(one.replace("_", " ") for one in where)
    reason = (
        f"{there:g} collisions where plain linear attention has some ({len(confused)} of {len(linear)} cases: {place})"
        + (f"; un-whitened forms have {theirs:g} there" if math.isfinite(theirs) else "")
        + f"; recall {ours_mean:.3f} whitened against {plain_mean:.3f}, higher in {wins} of {len(pairs)} settings"
    )
    return tally(parts, reason, numbers)


@decision
def solver_residuals(frame: "pd.DataFrame") -> Finding:
    """P2.d: metric `solver_residual` by `solver` (newton_schulz, conjugate_gradient), `matrix` and `products`.

    The reason also counts the comparisons in which one of the two is still above rounding, taken as twice the residual
    of a Cholesky inverse: below it, who is ahead says nothing about the solver.
    Against: a larger residual than that of conjugate gradient.
    """
    parts: dict[str, Part] = {}
    numbers: dict[str, Number] = {}
    unsettled: dict[str, Part] = {}
    for matrix in ("trained", "kappa_50"):
        ours, theirs = (
            rows(frame, "solver_residual", matrix=matrix, solver=solver).groupby("products")["value"].max()
            for solver in ("newton_schulz", "conjugate_gradient")
        )
        shared = sorted(set(ours.index) & set(theirs.index))
        if not shared:
            raise Lacking(f"the solvers share no number of matrix products on {matrix} matrices")
        direct = optional_rows(frame, "solver_residual", matrix=matrix, solver="cholesky")["value"]
        rounding = 2 * float(direct.max()) if len(direct) else 0.0
        for products in shared:
            name = f"{matrix}, {products:g} products"
            parts[name] = part(ours[products] < theirs[products], ours[products] > theirs[products])
            if max(ours[products], theirs[products]) > rounding:
                unsettled[name] = parts[name]
        for name, residuals in (("Newton-Schulz", ours), ("conjugate gradient", theirs)):
            numbers[f"products to reach 0.01, {name}, {matrix}"] = _products_to_reach(residuals, 0.01)
    reason = (
        f"Newton-Schulz ahead in {held(parts)} of {len(parts)} comparisons, in {held(unsettled)} of the "
        f"{len(unsettled)} where either is above rounding"
    )
    return tally(parts, reason, numbers)


@decision
def gpu_speedup(frame: "pd.DataFrame") -> Finding:
    """P2.e: metric `speedup` over the fastest form in torch, by `device_kind`, `operation`, `direction`, `tokens`.

    Against: slower than torch.
    """
    found = rows(frame, "speedup", device_kind="cuda")
    parts: dict[str, Part] = {}
    numbers: dict[str, Number] = {}
    for operation in ("laplacian_kernel", "newton_schulz_inverse"):
        for direction in ("forward", "backward"):
            for tokens in (16, 32, 64, 128):
                labels = {"operation": operation, "direction": direction, "tokens": tokens}
                smallest = float(rows(found, "speedup", **labels)["value"].min())
                name = f"{operation} {direction}, N = {tokens}"
                numbers[name], parts[name] = smallest, part(smallest > 1, smallest < 1)
    return tally(parts, f"faster than torch in {held(parts)} of {len(parts)} cases", numbers)


@decision
def accuracy_at_matched_parameters(frame: "pd.DataFrame") -> Finding:
    """P2.f: metrics `top1`, `parameters` of all runs, paired by `dataset`, `size`, `recipe` and `seed`.

    Comparisons with fewer than 5 seeds or unmatched parameters do not count; the reason names them.
    The whole 95 % interval of the paired differences at -0.5 points or above holds.
    Against: more than half a point below softmax with that whole interval.
    """
    size = rows(frame, "parameters").set_index("run_id")["value"]
    parts: dict[str, Part] = {}
    texts: list[str] = []
    left_out: list[str] = []
    numbers: dict[str, Number] = {}
    runs = optional_rows(frame, "top1")
    for (dataset, model_size, recipe), group in runs.groupby(["dataset", "size", "recipe"], sort=True):
        name = f"{dataset} {model_size} {recipe}"
        ours, baseline = (group[group["attention"] == kind] for kind in ("laplacian", "softmax"))
        if not len(ours) or not len(baseline):
            continue
        compared = rows(group[group["attention"].isin(["laplacian", "softmax"])], "top1")
        if compared.duplicated(["attention", "seed"]).any():
            left_out.append(f"{name} (several runs of one attention kind share a seed)")
            continue
        pairs = ours.merge(baseline, on="seed", suffixes=("", "_softmax"))
        ratios = [size[row["run_id"]] / size[row["run_id_softmax"]] for row in rows_of(pairs)]
        worst = max(ratios, key=lambda ratio: abs(ratio - 1), default=1.0)
        if abs(worst - 1) > 0.05:
            left_out.append(f"{name} (parameters are not matched, ratio {worst:.3f})")
            continue
        difference = pairs["value"] - pairs["value_softmax"]
        mean, n = float(difference.mean()), len(difference)
        if n:
            numbers |= {f"Laplacian minus softmax (points), {name}": mean, f"seeds, {name}": n}
        if n < 5:
            so_far = f", so far {mean:+.2f} points" if n else ""
            left_out.append(f"{name} ({n} seeds of at least 5{so_far})")
            continue
        half = student_half_width(list(difference))
        numbers[f"95 % half-width, {name}"] = half
        parts[name] = part(mean - half >= -0.5, mean + half < -0.5)
        texts.append(f"{name} {mean:+.2f} (± {half:.2f}) points")
    if not parts and not left_out:
        raise Lacking("no Laplacian and softmax runs of the same data set, size and recipe")
    if not parts:
        raise Lacking(f"underpowered: {'; '.join(left_out)} (Laplacian minus softmax)", numbers)
    reason = f"Laplacian minus softmax: {'; '.join(texts)}"
    if left_out:
        reason += f"; not counted: {'; '.join(left_out)}"
    return tally(parts, reason, numbers)


def _products_to_reach(residuals: "pd.Series[float]", level: float) -> float | str:
    """The smallest number of products from which on the residual stays at most `level`."""
    above = residuals.index[residuals > level]
    reached = residuals.index[residuals.index > above.max()] if len(above) else residuals.index
    return float(reached.min()) if len(reached) else f"more than {residuals.index.max():g}"
