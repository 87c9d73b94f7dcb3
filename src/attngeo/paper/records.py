"""The results schema: a number with its unit, n, spread, origin, labels and provenance, kept as strict JSON."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from attngeo.errors import UserError
from attngeo.files import json_line, read_json, write_aside

if TYPE_CHECKING:
    import pandas as pd

Origin = Literal["paper", "derived", "ours"]
Label = str | bool | int | float
FIXED_COLUMNS = ("metric", "value", "unit", "n", "spread", "spread_kind", "origin", "run_ids")
METRIC_COLUMNS = ("metric", "quantity")
SCHEMA_VERSION = 1
_NON_FINITE_WORDS = frozenset({"NaN", "Infinity", "-Infinity"})


class Record(BaseModel):
    """One number: `spread` is None where there is none, `n` counts what was averaged, `labels` say what it is of."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str = Field(min_length=1)
    value: float
    unit: str = ""
    n: int = Field(ge=0)
    spread: float | None = None
    spread_kind: str = ""
    origin: Origin = "ours"
    labels: dict[str, Label] = Field(default_factory=dict)
    run_ids: list[str] = Field(default_factory=list)

    @field_validator("labels")
    @classmethod
    def _labels_fit_a_table(cls, labels: dict[str, Label]) -> dict[str, Label]:
        for name, value in labels.items():
            if name in FIXED_COLUMNS:
                raise ValueError(f"label {name!r} would hide the column of that name")
            if value in _NON_FINITE_WORDS:
                raise ValueError(f"label {name!r}: the text {value!r} stands for a number in these files")
        return labels


class RecordFile(BaseModel):
    """What one analysis wrote: where the numbers come from (`provenance`, `source`) and the numbers."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = 1
    source: str = ""
    provenance: dict[str, Any] = Field(default_factory=dict)
    records: list[Record]


def from_frame(
    frame: "pd.DataFrame",
    *,
    provenance: Mapping[str, Any] | None = None,
    origin: Origin = "ours",
    source: str = "",
    run_ids: Iterable[str] = (),
) -> RecordFile:
    """Turn a tidy frame, one number a row, into records.

    The metric's name is in column `metric`, or else `quantity`; `value` and `n` are required; every column that is
    not a field of `Record` becomes a label. A missing cell (None, or NaN in a label or spread) is left out; NaN and
    infinity in `value` are kept.

    Raises:
        ValueError: a required column or cell is missing.
    """
    metric_column = next((name for name in METRIC_COLUMNS if name in frame.columns), None)
    if metric_column is None:
        raise ValueError(f"the frame needs a column named one of {METRIC_COLUMNS}, it has {list(frame.columns)}")
    for name in ("value", "n"):
        if name not in frame.columns:
            raise ValueError(f"the frame has no column {name!r}, it has {list(frame.columns)}")
    label_columns = [str(name) for name in frame.columns if name != metric_column and name not in FIXED_COLUMNS]
    shared_run_ids = list(run_ids)
    records = []
    for row in frame.to_dict(orient="records"):
        cells = {str(name): _plain(value) for name, value in row.items()}
        if cells["n"] is None or cells[metric_column] is None:
            raise ValueError(f"row without n or {metric_column}: {cells}")
        records.append(
            Record(
                metric=str(cells[metric_column]),
                value=math.nan if cells["value"] is None else cells["value"],
                unit=cells.get("unit") or "",
                n=int(cells["n"]),
                spread=cells.get("spread"),
                spread_kind=cells.get("spread_kind") or "",
                origin=cells.get("origin") or origin,
                labels={name: cells[name] for name in label_columns if cells[name] is not None},
                run_ids=shared_run_ids,
            )
        )
    return RecordFile(source=source, provenance=dict(provenance or {}), records=records)


def write(
    path: str | Path, records: RecordFile | Sequence[Record], provenance: Mapping[str, Any] | None = None
) -> None:
    """Write records as strict JSON, one record a line, complete or not at all; `provenance` adds to the file's own."""
    file = records if isinstance(records, RecordFile) else RecordFile(records=list(records))
    head = json_line(
        {
            "schema_version": SCHEMA_VERSION,
            "source": file.source,
            "provenance": {**file.provenance, **(provenance or {})},
        }
    )
    lines = [json_line(record.model_dump()) for record in file.records]
    with write_aside(path) as stream:
        stream.write(head[:-1] + ', "records": [\n' + ",\n".join(lines) + ("\n" if lines else "") + "]}\n")


def read_file(path: str | Path) -> RecordFile:
    """Read and validate a record file; UserError naming it when it is missing, damaged or of another schema."""
    try:
        return RecordFile.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"{path} is not a record file: {place}: {first['msg']}", "delete the file and run snakemake again"
        ) from error


def read(path: str | Path) -> "pd.DataFrame":
    """Read a record file as a frame: the fields of `Record`, a column a label.

    Its provenance is in `frame.attrs["provenance"]`, the source in `frame.attrs["source"]`.
    """
    return to_frame(read_file(path))


def to_frame(file: RecordFile) -> "pd.DataFrame":
    """The frame of `read`, from records in memory."""
    import pandas as pd

    rows = [{**{name: getattr(record, name) for name in FIXED_COLUMNS}, **record.labels} for record in file.records]
    frame = pd.DataFrame(rows) if rows else pd.DataFrame(columns=list(FIXED_COLUMNS))
    frame["spread"] = pd.to_numeric(frame["spread"])
    frame.attrs["provenance"] = file.provenance
    frame.attrs["source"] = file.source
    return frame


def _plain(value: Any) -> Any:
    """A cell as a plain Python value; missing cells (None, NaN, NA) as None."""
    import pandas as pd

    if pd.api.types.is_scalar(value) and pd.isna(value):
        return None
    return value.item() if hasattr(value, "item") else value
