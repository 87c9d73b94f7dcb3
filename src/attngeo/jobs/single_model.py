"""Job: measure the connection walk of any one model, outside of a preset."""

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attngeo.config import PHOTOGRAPHS, ConnectionWalkConfig
from attngeo.connection_walk import analyze
from attngeo.connection_walk.weights_only import analyze_weights
from attngeo.data import text
from attngeo.errors import UserError
from attngeo.files import write_aside
from attngeo.jobs import sources
from attngeo.jobs.stamps import digest_outside_presets
from attngeo.language_models.loading import LoadedModel, load
from attngeo.ops import backend
from attngeo.paper import records
from attngeo.tracking.provenance import provenance

if TYPE_CHECKING:
    import pandas as pd

DTYPES = ("float64", "float32", "bfloat16", "float16")
SCORES = (
    "isometry_score",
    "transport_isometry_score",
    "transport_gain_variation",
    "graph_change",
    "spectral_gap",
    "reversibility_defect",
    "first_token_share",
    "identity_error",
)
"""Lines of the printed summary, where they were measured."""
LARGEST = ("identity_error",)
CONTROLS = ("trained", "null", "excess", "excess_same_gain", "random_init", "shuffled_tokens", "depth_shuffled")
"""Columns of the printed summary."""
_FEATURES = "give --features FILE.npy, log-mel features [recordings, mel bins, frames]"
PRINTED_WIDTH = 160  # characters, where the output is no terminal


@dataclass(frozen=True)
class Measured:
    """What was measured, where it is, and what to know about it."""

    frame: "pd.DataFrame"
    paths: tuple[Path, Path]
    notes: list[str]


def summary(frame: "pd.DataFrame") -> dict[str, dict[str, tuple[float, float, int]]]:
    """By score and control: mean over layers, standard deviation over them (NaN for one), number of layers.

    Of the errors of identities the largest, without a deviation.
    """
    whole = frame[(frame["head"] < 0) & (frame["layer"] >= 0)]
    lines: dict[str, dict[str, tuple[float, float, int]]] = {}
    for keys, values in whole.groupby(["metric", "control"])["value"]:
        metric, control = map(str, keys)
        mean = (float(values.mean()), float(values.std()), len(values))
        largest = (float(values.max()), math.nan, len(values))
        lines.setdefault(metric, {})[control] = largest if metric in LARGEST else mean
    return {metric: lines[metric] for metric in SCORES if metric in lines}


def print_summary(measured: Measured) -> None:
    """Print the main scores with their controls, and where all numbers are."""
    from rich.console import Console
    from rich.table import Table

    frame = measured.frame
    table = Table(
        title=f"{frame['model'].iloc[0]} ({frame['family'].iloc[0]}, {frame['precision'].iloc[0]})",
        caption="mean over layers ± standard deviation over them; identity_error: the largest",
        box=None,
        pad_edge=False,
    )
    lines = summary(frame)
    shown = [control for control in CONTROLS if any(control in line for line in lines.values())]
    for heading in ("score", "layers", *shown):
        name = heading.replace("_", " ")
        table.add_column(name, justify="left" if heading == "score" else "right", no_wrap=True)
    for metric, line in lines.items():
        cells = [_cell(line[control]) if control in line else "" for control in shown]
        table.add_row(metric, str(max(n for _, _, n in line.values())), *cells)
    console = Console(width=None if sys.stdout.isatty() else PRINTED_WIDTH)
    console.print(table)
    for told in (*measured.notes, *measured.paths):
        console.print(str(told), soft_wrap=True, markup=False, highlight=False)


def _cell(cell: tuple[float, float, int]) -> str:
    value, spread, _ = cell
    return f"{value:.2g}" if math.isnan(spread) else f"{value:.3f} ± {spread:.3f}"


def measure(
    model: str,
    *,
    settings: ConnectionWalkConfig,
    model_id: str | None = None,
    texts: Path | None = None,
    features: Path | None = None,
    revision: str | None = None,
    dtype: str | None = None,
    offline: bool = False,
    weights_only: bool = False,
    out: Path | None = None,
    seed: int = 0,
) -> Measured:
    """Measure a folder, a GGUF file or a hub name and write records and, beside them, the same numbers as CSV.

    Without `out` they are written to results/connection_walk/<id>.json. UserError for a model, a text or a precision
    that there is not, and for a file of that name with another model's numbers.
    """
    if dtype not in (None, *DTYPES):
        raise UserError(f"there is no precision {dtype!r}", f"use one of: {', '.join(DTYPES)}")
    if out is not None and out.suffix != ".json":
        raise UserError(f"records are JSON, not {out.name}", "name a file that ends in .json")
    documents = text.documents("embedded" if texts is None else str(texts), Path.cwd())
    loaded = load(
        model,
        None if dtype is None else getattr(torch, dtype),
        model_id=model_id,
        revision=revision,
        offline=offline,
        on_demand=True if weights_only else None,
    )
    out = out or Path("results") / "connection_walk" / f"{loaded.id}.json"
    identity = {"model": str(Path(model).resolve()) if Path(model).exists() else model, "revision": loaded.revision}
    _require_a_place(out)
    _refuse_another_model(out, identity)
    params = identity | {"dtype": dtype or "as stored", "precision": loaded.precision, "weights_only": weights_only}
    params |= settings.model_dump() | {"seed": seed, "text": "embedded" if texts is None else str(texts)}
    params |= {} if features is None else {"features": str(features)}
    notes = _notes(loaded)
    if weights_only:
        frame = analyze_weights(loaded, seed=seed, null_draws=settings.null_draws, inits=settings.inits)
    else:
        frame = analyze(
            loaded,
            **_read(loaded, documents, texts is not None, features, settings.windows),
            windows=settings.windows,
            window_tokens=settings.window_tokens,
            null_draws=settings.null_draws,
            edges=settings.edges,
            inits=settings.inits,
            seed=seed,
        )
    digest = digest_outside_presets(Path(__file__).resolve().parents[3], __name__, params)
    origin = provenance(digest) | {"settings": params, "ran": backend.ran()}
    _refuse_another_model(out, identity)  # another command may have been quicker
    table = out.with_suffix(".csv")
    try:
        records.write(out, records.from_frame(frame, provenance=origin, source=f"connection walk of {loaded.id}"))
        with write_aside(table) as stream:
            frame.to_csv(stream, index=False)
    except OSError as error:
        raise UserError(f"cannot write {out} and its CSV: {error.strerror}", "name another file with --out") from error
    return Measured(frame, (out, table), notes)


def _read(
    loaded: LoadedModel, documents: list[str], own_text: bool, features: Path | None, windows: int
) -> dict[str, Any]:
    """What the model is shown, as an argument of `analyze`."""
    reads = loaded.adapter.reads
    if own_text and reads != "tokens":
        kind, shown = ("vision", "it is shown embedded photographs") if reads == "images" else ("speech", _FEATURES)
        raise UserError(f"{loaded.id} is a {kind} model", f"leave out the text: {shown}")
    if features is not None and reads != "audio":
        raise UserError(f"{loaded.id} reads {reads}, no log-mel features", "leave out --features")
    if reads == "tokens":
        return {"texts": documents}
    if reads == "images":
        if windows > PHOTOGRAPHS:
            raise UserError(f"there are {PHOTOGRAPHS} photographs, not {windows}", f"--windows {PHOTOGRAPHS} or fewer")
        return {"images": sources.photographs(windows)}
    if features is None:
        raise UserError(f"{loaded.id} is a speech model", f"{_FEATURES}, or --weights-only")
    return {"features": _features(features)}


def _features(path: Path) -> Tensor:
    try:
        array = np.load(path, allow_pickle=False)
        if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
            raise ValueError("it holds no array of floating-point numbers")
    except (OSError, ValueError, EOFError) as error:
        raise UserError(
            f"the features {path} cannot be read: {error}", f"{_FEATURES}, written by numpy.save"
        ) from error
    found = torch.from_numpy(array).float()
    return found[None] if found.dim() == 2 else found


def _require_a_place(out: Path) -> None:
    """Said before the hours that a measurement may take; nothing is made."""
    there = next(folder for folder in out.absolute().parents if folder.exists())
    if out.is_dir() or not there.is_dir() or not os.access(there, os.W_OK):
        what = f"{out} is a folder" if out.is_dir() else f"{there} is no folder that can be written"
        raise UserError(f"{what}, and the records are to be {out}", "name another file with --out")


def _refuse_another_model(out: Path, identity: dict[str, str]) -> None:
    if not out.exists() and not out.with_suffix(".csv").exists():
        return
    try:
        settings: dict[str, Any] = records.read_file(out).provenance.get("settings", {})
    except UserError:
        settings = {}
    if any(settings.get(key) != value for key, value in identity.items()):
        of = settings.get("model", "something else")
        raise UserError(f"{out} or its CSV is there, with numbers of {of}", "name another file with --out")


def _notes(loaded: LoadedModel) -> list[str]:
    if not loaded.quantised:
        return []
    return [f"{loaded.quantised} weights: not to be compared with spectra of full precision"]
