"""Read the files of a preset's results folder as frames, and say in words what was read."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attngeo.errors import UserError
from attngeo.files import decode_non_finite, read_json
from attngeo.run_options import RECIPE_PREFIX, options_text, parse_options

if TYPE_CHECKING:
    import pandas as pd

_FOLDERS_OF_A_PRESET = ("runs", "analyses", "benchmarks")
_FINAL_REQUIRED = (
    *("run_id", "model", "attention", "dataset", "recipe", "seed", "accuracy", "n_eval"),
    *("parameters", "gmac", "gmac_with_apart", "gmac_uncounted", "recipe_values"),
)
# Runs that differ in one of these are different experiments; runs that share them differ by seed and are averaged.
GROUP = ("dataset", "recipe", "attention", "model")
_EPOCH_REQUIRED = ("epoch", "images_seen", "train_loss", "val_top1")


def results_folder(paths: Iterable[Path]) -> Path:
    """The folder results/<preset> that the result files lie in; UserError when they do not share one."""
    folders = set()
    for path in paths:
        folder = next((parent for parent in path.parents if parent.name in _FOLDERS_OF_A_PRESET), None)
        if folder is None:
            raise UserError(f"{path} does not lie in a results folder", "give files under results/<preset>/")
        folders.add(folder.parent)
    if len(folders) != 1:
        raise UserError(
            f"the result files come from {len(folders)} results folders", "give the files of exactly one preset"
        )
    return folders.pop()


def preset_name(paths: Iterable[Path]) -> str:
    """Name of the preset whose results folder holds the files."""
    return results_folder(paths).resolve().name


def require_inputs(inputs: Sequence[Path], target: str, what: str) -> None:
    """UserError where nothing feeds a figure or a table; `what` is a "run", a "model" or a "file"."""
    if inputs:
        return
    if what == "run":
        remedy = f"add {target} to the feeds of runs in the preset's runs.tsv, or take it out of the preset's list"
    else:
        remedy = f"add to the preset's config.yaml what {target} shows, or take {target} out of the preset's list"
    raise UserError(f"no {what} of the preset feeds {target}", remedy)


def read_finals(paths: Iterable[Path]) -> "pd.DataFrame":
    """The final.json of every run among `paths`, a row a run, sorted by data set, recipe, attention, seed and run.

    Entries that are themselves tables (loader, ran) stay in the frame as dictionaries. A model with layers that could
    not be counted has no cost: gmac and gmac_with_apart are NaN. A run without options or status has "" for them.
    """
    import pandas as pd

    rows = []
    for path in sorted(path for path in paths if path.name == "final.json"):
        final = read_json(path)
        _require(path, final, _FINAL_REQUIRED)
        if final["gmac_uncounted"]:
            final |= {"gmac": math.nan, "gmac_with_apart": math.nan}
        rows.append({"options": "", "status": "", **final})
    frame = pd.DataFrame(rows, columns=None if rows else ["options", "status", *_FINAL_REQUIRED])
    return frame.sort_values(["dataset", "recipe", "attention", "seed", "run_id"], kind="stable", ignore_index=True)


def has_diverged(final: Mapping[str, Any]) -> bool:
    """Whether a run ended without finite numbers; its accuracy, a count, may look like one nevertheless."""
    return final["status"] == "DIVERGED" or not math.isfinite(float(final["accuracy"]))


def accuracies(finals: "pd.DataFrame") -> "pd.Series[float]":
    """The accuracy of every run, NaN where it diverged."""
    import pandas as pd

    values = [math.nan if has_diverged(run) else float(run["accuracy"]) for run in rows_of(finals)]
    return pd.Series(values, index=finals.index, dtype=float)


def read_seeds(paths: Iterable[Path], target: str) -> "pd.DataFrame":
    """`read_finals` of the runs that a target averages over seeds.

    UserError where there are none, or where two runs of one `GROUP` share a seed: they must differ in something that
    the run sheet does not name, and their mean would be of two experiments. A run whose model has options of its own
    is a kind of its own here: they stand beside its attention's name. The accuracy of a run that diverged is NaN.
    """
    paths = list(paths)
    require_inputs(paths, target, "run")
    finals = read_finals(paths)
    own = finals["options"].map(model_options_of)
    finals["attention"] = finals["attention"].where(own == "", finals["attention"] + " (" + own + ")")
    refuse_twins(finals, [*GROUP, "seed"], target)
    finals["accuracy"] = accuracies(finals)
    return finals


def model_options_of(options: str) -> str:
    """A run's options as text, without those that change its recipe alone: a kind keeps its name at its own rate."""
    kept = {key: value for key, value in parse_options(options).items() if not key.startswith(RECIPE_PREFIX)}
    return options_text(kept)


def refuse_twins(finals: "pd.DataFrame", by: Sequence[str], target: str) -> None:
    """UserError names runs that agree in all that tells the runs of a target apart."""
    twins = finals[finals.duplicated(list(by), keep=False)]
    if len(twins):
        first = twins[(twins[list(by)] == twins.iloc[0][list(by)]).all(axis=1)]
        raise UserError(
            f"{target}: runs {listed(first['run_id'])} share data set, recipe, model, attention and seed",
            f"let only one of them feed {target}",
        )


def panel_names(finals: "pd.DataFrame") -> dict[tuple[str, str], str]:
    """(data set, recipe) of every panel with its title: the data set, and the recipe where the set has several."""
    pairs = sorted({(str(row["dataset"]), str(row["recipe"])) for row in rows_of(finals)})
    counts = Counter(dataset for dataset, _ in pairs)
    return {pair: pair[0] if counts[pair[0]] == 1 else f"{pair[0]}, {pair[1]}" for pair in pairs}


def size_of(model: str) -> str:
    """The size in a model's name: "tiny" of "laplacianformer_tiny"."""
    return model.rsplit("_", 1)[-1]


def read_epochs(paths: Iterable[Path]) -> "pd.DataFrame":
    """The metrics.jsonl of every run among `paths`, a row a run and epoch, with the run's id."""
    import pandas as pd

    rows = []
    for path in sorted(path for path in paths if path.name == "metrics.jsonl"):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                epoch = decode_non_finite(json.loads(line))
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{path}: line {number} is not JSON ({error})", "delete the run's folder and run snakemake again"
                ) from error
            _require(path, epoch, _EPOCH_REQUIRED)
            rows.append({"run_id": path.parent.name, **epoch})
    return pd.DataFrame(rows, columns=None if rows else ["run_id", *_EPOCH_REQUIRED])


def read_published(name: str) -> "pd.DataFrame":
    """A transcribed table of published numbers from the package's `published` folder."""
    import pandas as pd

    with (files("attngeo.paper") / "published" / name).open(encoding="utf-8") as stream:
        return pd.read_csv(stream)


def summarise(frame: "pd.DataFrame", by: Sequence[str], column: str) -> "pd.DataFrame":
    """Mean, sample standard deviation (NaN for one value), n of the finite values and count of the others, by group."""
    import pandas as pd

    rows = []
    for key, group in frame.groupby(list(by), sort=True):
        values = pd.to_numeric(group[column])
        finite = values[values.map(math.isfinite)]
        rows.append(
            {
                **dict(zip(by, key, strict=True)),
                "mean": finite.mean() if len(finite) else math.nan,
                "std": finite.std(ddof=1) if len(finite) > 1 else math.nan,
                "n": len(finite),
                "non_finite": len(values) - len(finite),
            }
        )
    return pd.DataFrame(rows, columns=[*by, "mean", "std", "n", "non_finite"])


def rows_of(frame: "pd.DataFrame") -> list[dict[str, Any]]:
    """The frame's rows as dictionaries of plain values."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict(orient="records")]


def count_non_finite(values: "pd.Series[Any]") -> int:
    """How many values are NaN or infinite."""
    return int(sum(not math.isfinite(value) for value in values))


def listed(names: Iterable[Any], *, limit: int = 4) -> str:
    """Distinct names, sorted and shortened: "a, b, c and 9 more"."""
    distinct = sorted({str(name) for name in names})
    if len(distinct) <= limit:
        return ", ".join(distinct)
    return f"{', '.join(distinct[:limit])} and {len(distinct) - limit} more"


def span(values: Iterable[int]) -> str:
    """The smallest and the largest count as text: "3" or "2 to 3"."""
    distinct = sorted(set(values))
    if not distinct:
        return "0"
    return str(distinct[0]) if len(distinct) == 1 else f"{distinct[0]} to {distinct[-1]}"


def made_from(preset: str, finals: "pd.DataFrame") -> str:
    """Caption sentences: preset, device and runs, and whose validation images are none."""
    if not len(finals):
        return f"Preset {preset}; no runs."
    device = f" on {listed(finals['device'])}" if "device" in finals else ""
    loaders = finals["loader"] if "loader" in finals else [None] * len(finals)
    held_out = [
        name
        for name, loader in zip(finals["dataset"], loaders, strict=True)
        if isinstance(loader, dict) and loader.get("hold_out")
    ]
    scored = f" Validation images of {listed(held_out)} are training images that were held out." if held_out else ""
    return f"Preset {preset}{device}; runs {listed(finals['run_id'])}.{scored}"


def non_finite_sentence(count: int) -> str:
    """Caption sentence that owns up to values that could not be drawn; empty if there are none."""
    if not count:
        return ""
    return f" {count} value{'s were' if count > 1 else ' was'} not finite and could not be drawn."


def _require(path: Path, entries: dict[str, Any], names: Iterable[str]) -> None:
    missing = [name for name in names if name not in entries]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}", "delete the run's folder and run snakemake again")
