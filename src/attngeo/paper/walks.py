"""The connection walks of a preset: what each analysed model is, and the numbers of a whole model with intervals."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attngeo.paper import records
from attngeo.paper.intervals import interval_95, own_interval, student_half_width
from attngeo.paper.results import listed, rows_of
from attngeo.paper.targets import RUN_WALKS

if TYPE_CHECKING:
    import pandas as pd

ISOMETRY = "isometry_score"
TREND = "graph_change_trend"
LAYER_COLUMNS = ("model", "control", "layer", "value", "low", "high", "n", "interval", "non_finite")
MINIMAL_LAYER_CHANGES = 5  # a rank correlation of fewer numbers says nothing, whatever its value
MINIMAL_SIZES = 3  # likewise of a family's sizes
_FULL_PRECISIONS = {"float64", "float32", "float16", "bfloat16"}
_OF_A_STEP = re.compile(r" at step \d+$")
_OWN_MODEL = re.compile(r"(?P<size>.+)-s(?P<seed>\d+)-step(?P<step>\d+)$")


@dataclass(frozen=True)
class WalkedModel:
    """One analysed model, read from its labels; `step` and `seed` are those of models trained here, None for others.

    `family` is without the training step; `finished` is False for the states of a model before its last step.
    """

    id: str
    family: str
    precision: str
    size: str
    seed: int | None
    step: int | None
    finished: bool

    @property
    def quantised(self) -> bool:
        """Whether its weights went through a quantisation: spectra of such weights are not those of trained ones."""
        return not set(self.precision.split("+")) <= _FULL_PRECISIONS

    @property
    def counts(self) -> bool:
        """Whether it may stand in a trend: trained to its end, weights as trained."""
        return self.finished and self.step != 0 and not self.quantised


def read_walks(inputs: Sequence[Path]) -> "pd.DataFrame":
    """All record files as one frame; the devices that made them are in `attrs["devices"]`."""
    import pandas as pd

    read = [records.read(path) for path in sorted(inputs)]
    frame = pd.concat(read, ignore_index=True)
    frame.attrs = {"devices": listed(one.attrs["provenance"].get("device", "unknown device") for one in read)}
    return frame


def of_pretrained(inputs: Sequence[Path]) -> list[Path]:
    """The files of pretrained models among the inputs."""
    return [path for path in inputs if path.name != Path(RUN_WALKS).name]


def of_runs(inputs: Sequence[Path]) -> list[Path]:
    """The file of the runs trained here among the inputs, if it is there."""
    return [path for path in inputs if path.name == Path(RUN_WALKS).name]


def over_seeds(frame: "pd.DataFrame") -> "pd.DataFrame":
    """Isometry scores of runs by data set, attention kind, control and layer: the mean over seeds.

    Columns model (the kind on its data set), dataset, attention, control, layer, value, low, high (Student interval
    over seeds, NaN for one), n (seeds with a finite score) and non_finite.
    """
    import pandas as pd

    names = frame[["model", "dataset", "attention"]].drop_duplicates("model").set_index("model")
    layers = isometry_by_layer(frame)
    for key in ("dataset", "attention"):
        layers[key] = layers["model"].map(names[key])
    rows = []
    for (dataset, attention, control, layer), group in layers.groupby(
        ["dataset", "attention", "control", "layer"], sort=True
    ):
        values = [value for value in group["value"] if math.isfinite(value)]
        mean = sum(values) / len(values) if values else math.nan
        half = student_half_width(values)
        labels = (f"{attention} on {dataset}", dataset, attention, control, layer)
        rows.append((*labels, mean, mean - half, mean + half, len(values), len(group) - len(values)))
    columns = ["model", "dataset", "attention", "control", "layer", "value", "low", "high", "n", "non_finite"]
    found = pd.DataFrame(rows, columns=columns)
    found.attrs = dict(frame.attrs)
    return found


def walked_models(frame: "pd.DataFrame") -> dict[str, WalkedModel]:
    """Every model of the records by id, in the order of the ids; records without a family have the family ""."""
    found = {}
    columns = ["model", *(name for name in ("family", "precision") if name in frame)]
    for row in rows_of(frame[columns].drop_duplicates("model").sort_values("model")):
        name, family = str(row["model"]), row.get("family")
        family = family if isinstance(family, str) else ""
        own = _OWN_MODEL.fullmatch(name)
        found[name] = WalkedModel(
            id=name,
            family=family_of(family),
            precision=str(row.get("precision", "")),
            size=own["size"] if own else name,
            seed=int(own["seed"]) if own else None,
            step=int(own["step"]) if own else None,
            finished=not _OF_A_STEP.search(family),
        )
    return found


def family_of(label: str) -> str:
    """A family's label without the training step that it may name."""
    return _OF_A_STEP.sub("", label)


def one_a_size(frame: "pd.DataFrame") -> "pd.DataFrame":
    """The records of finished models, of several seeds of one size those of the lowest seed."""
    if "model" not in frame:
        return frame
    finished = [model for model in walked_models(frame).values() if model.finished]
    first: dict[tuple[str, str, str], WalkedModel] = {}
    for model in sorted(finished, key=lambda one: one.seed or 0):
        first.setdefault((model.family, model.precision, model.size), model)
    return frame[frame["model"].isin([model.id for model in first.values()])]


def sizes_of(frame: "pd.DataFrame") -> dict[str, str]:
    """The name of the size of every finished model by its id: of several seeds of a size that of the size."""
    if "model" not in frame:
        return {}
    finished = [model for model in walked_models(frame).values() if model.finished]
    keys = [(model.family, model.precision, model.size) for model in finished]
    return {
        model.id: model.size if keys.count(key) > 1 else model.id for model, key in zip(finished, keys, strict=True)
    }


def trained_here(frame: "pd.DataFrame") -> set[str]:
    """The ids of models of our own decoder family among the records."""
    return {model.id for model in walked_models(frame).values() if model.seed is not None}


def left_out_sentence(frame: "pd.DataFrame", shown: "pd.DataFrame") -> str:
    """Caption sentence on models of the records that are not shown; empty if all are."""
    count = frame["model"].nunique() - shown["model"].nunique()
    if not count:
        return ""
    what = "model trained here is" if count == 1 else "models trained here are"
    return f" {count} more {what} left out: earlier steps, and further seeds of a size."


def isometry_by_layer(frame: "pd.DataFrame") -> "pd.DataFrame":
    """Isometry scores, one row a model, control and layer (`LAYER_COLUMNS`).

    The layer's own record (head -1) is taken where there is one, with the interval that it holds, else one from its
    spread; where there is none, the mean over its heads with a Student interval over the heads. low and high are NaN
    where no interval can be had.
    """
    import pandas as pd

    rows = []
    if len(frame):
        frame = frame[frame["metric"] == ISOMETRY]
        for (model, control, layer), group in frame.groupby(["model", "control", "layer"], sort=True):
            whole = group[group["head"] == -1]
            chosen = whole if len(whole) else group
            values = chosen["value"][chosen["value"].map(math.isfinite)]
            mean = float(values.mean()) if len(values) else math.nan
            if len(whole):
                record = {str(name): value for name, value in whole.iloc[0].items()}
                (low, high), n = interval_95(record), int(record["n"])
                from_spread = f"95 % interval of the mean from the {record['spread_kind']}"
                interval = "95 % bootstrap interval of the mean" if own_interval(record) else from_spread
            else:
                half, n = student_half_width(list(values)), len(values)
                low, high = mean - half, mean + half
                interval = "95 % interval of the mean over heads"
            rows.append((model, control, layer, mean, low, high, n, interval, len(chosen) - len(values)))
    return pd.DataFrame(rows, columns=list(LAYER_COLUMNS))


def mean_over_layers(frame: "pd.DataFrame", control: str) -> "pd.DataFrame":
    """Mean isometry score of every model over its layers: columns model, value, low, high, n, non_finite.

    low and high are a Student interval over layers, NaN for one layer; n counts the layers with a finite score.
    """
    import pandas as pd

    rows = []
    layers = isometry_by_layer(frame[frame["control"] == control] if len(frame) else frame)
    for model, group in layers.groupby("model", sort=True):
        values = [value for value in group["value"] if math.isfinite(value)]
        mean = sum(values) / len(values) if values else math.nan
        half = student_half_width(values)
        rows.append((model, mean, mean - half, mean + half, len(values), len(group) - len(values)))
    return pd.DataFrame(rows, columns=["model", "value", "low", "high", "n", "non_finite"])


def depth_trends(frame: "pd.DataFrame", control: str = "trained", metric: str = TREND) -> "pd.DataFrame":
    """Trend of the graph change with depth of every model with enough layers: columns model, value, low, high, n."""
    import pandas as pd

    changes = frame[(frame["metric"] == "graph_change") & (frame["control"] == "trained")]
    deep = changes.groupby("model")["layer"].nunique() if len(changes) else pd.Series(dtype=float)
    names = set(deep[deep >= MINIMAL_LAYER_CHANGES].index)
    found = frame[(frame["metric"] == metric) & (frame["control"] == control) & frame["model"].isin(names)]
    rows = [
        (row["model"], row["value"], *interval_95(row), int(row["n"])) for row in rows_of(found.sort_values("model"))
    ]
    return pd.DataFrame(rows, columns=["model", "value", "low", "high", "n"])


def convergence(frame: "pd.DataFrame") -> "pd.DataFrame":
    """How much more the graph change falls with depth than in random order: trend at shuffled depth minus the trend."""
    trained, shuffled = depth_trends(frame), depth_trends(frame, "depth_shuffled")
    both = trained.merge(shuffled[["model", "value"]], on="model", suffixes=("", "_shuffled"))
    return both.assign(value=both["value_shuffled"] - both["value"])[["model", "value", "n"]]


def by_size(values: "pd.DataFrame", models: dict[str, WalkedModel], sizes: dict[str, float]) -> "pd.DataFrame":
    """Numbers of whole models (columns model, value) averaged over the seeds of a size, those that may be in a trend.

    Columns family, precision, parameters, value, seeds; sorted by them.
    """
    import pandas as pd

    rows = [
        (models[row["model"]].family, models[row["model"]].precision, sizes[row["model"]], row["value"])
        for row in rows_of(values)
        if models[row["model"]].counts
    ]
    table = pd.DataFrame(rows, columns=["family", "precision", "parameters", "value"])
    grouped = table.groupby(["family", "precision", "parameters"])["value"]
    return grouped.agg(value="mean", seeds="count").reset_index()


def parameters_of(frame: "pd.DataFrame") -> dict[str, float]:
    """Number of parameters of every model that has it."""
    found = frame[frame["metric"] == "parameters"]
    return {str(name): float(value) for name, value in found.groupby("model")["value"].first().items()}


def size_correlations(sized: "pd.DataFrame") -> dict[tuple[str, str], tuple[float, int]]:
    """Spearman correlation with size and the number of sizes of every family at one precision that has enough sizes.

    NaN where all values are equal. `sized` is a table of `by_size`.
    """
    from scipy import stats

    found: dict[tuple[str, str], tuple[float, int]] = {}
    for (family, precision), group in sized.groupby(["family", "precision"], sort=True):
        if len(group) >= MINIMAL_SIZES:
            equal = group["value"].nunique() == 1
            correlation = math.nan if equal else float(stats.spearmanr(group["parameters"], group["value"]).statistic)
            found[str(family), str(precision)] = correlation, len(group)
    return found


def seed_correlations(
    values: "pd.DataFrame", models: dict[str, WalkedModel], sizes: dict[str, float]
) -> dict[tuple[str, str], dict[int, float]]:
    """What `size_correlations` gives for each seed by itself that has enough sizes."""
    seeds = values["model"].map(lambda name: models[name].seed)
    found: dict[tuple[str, str], dict[int, float]] = {}
    for seed in sorted(set(seeds.dropna())):
        of_seed = size_correlations(by_size(values[seeds == seed], models, sizes))
        for family, (correlation, _) in of_seed.items():
            found.setdefault(family, {})[int(seed)] = correlation
    return found


def number_of_model(frame: "pd.DataFrame", metric: str) -> Any:
    """A model's own number (layer -1) as an integer; None where it was not measured."""
    found = frame[(frame["metric"] == metric) & (frame["control"] == "trained")]
    return int(found["value"].iloc[0]) if len(found) else None
