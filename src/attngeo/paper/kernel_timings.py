"""Kernel timings, published and ours, as one frame in which every number says whose it is and on which device."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attngeo.errors import UserError
from attngeo.paper import records
from attngeo.paper.results import read_published, rows_of

if TYPE_CHECKING:
    import pandas as pd

TORCH, OWN = "torch", "own"
PUBLISHED_TOKENS = (16, 32, 64, 128)
# The operators that the published table times, under the names that it gives them.
PUBLISHED_NAMES = {"L1 distance": "laplacian_kernel", "Newton-Schulz": "newton_schulz_inverse"}
NOT_MEASURED = "our GPU, not measured"
# How the records of training steps name our operators, in a step's profile and as a form.
OWN_OPERATORS, OURS = "attngeo::", "attngeo"
COLUMNS = (
    *("operation", "direction", "slices", "tokens", "landmarks", "channels", "form", "implementation"),
    *("time_ms", "spread_ms", "n", "backend", "device", "device_kind", "kind"),
)


def published() -> "pd.DataFrame":
    """The published timings; batch, heads and head width are not stated."""
    import pandas as pd

    frame = read_published("kernel_timings.csv")
    own = frame["implementation"] != TORCH
    return pd.DataFrame(
        {
            "operation": frame["operation"].map(PUBLISHED_NAMES),
            "direction": frame["direction"],
            "tokens": frame["n"],
            "landmarks": frame["n"],
            "form": own.map({True: OWN, False: TORCH}),
            "implementation": frame["implementation"],
            "time_ms": frame["time_ms"],
            "device": frame["device"],
            "device_kind": "cuda",
            "kind": frame["kind"],
        },
        columns=list(COLUMNS),
    )


def ours(frame: "pd.DataFrame") -> "pd.DataFrame":
    """The project's operator and the fastest form in torch of every operator, direction and size of a record file."""
    import pandas as pd

    if "role" not in frame:
        return pd.DataFrame(columns=list(COLUMNS))
    times = frame[frame["metric"] == "time_ms"]
    own = times[times["role"] == "ours"]
    peers = times[(times["role"] == "peer") & times["contestant"].str.startswith("torch")]
    case = ["device", "operation", "direction", "slices", "tokens", "landmarks", "channels"]
    fastest = peers.sort_values("value", kind="stable").drop_duplicates(case)
    chosen = pd.concat([own.assign(form=OWN), fastest.assign(form=TORCH)])
    chosen = chosen.rename(columns={"contestant": "implementation", "value": "time_ms", "spread": "spread_ms"})
    chosen = chosen.assign(kind="ours").sort_values([*case, "form"], kind="stable", ignore_index=True)
    whole = dict.fromkeys(("slices", "tokens", "landmarks", "channels", "n"), "Int64")
    return chosen[list(COLUMNS)].astype(whole)


def read(inputs: Sequence[Path]) -> "tuple[pd.DataFrame, pd.DataFrame]":
    """Our timings on this machine's CPU and on the GPUs that have been measured, from operators.json and gpu.json."""
    by_name = {path.name: path for path in inputs}
    for name in ("operators.json", "gpu.json"):
        if name not in by_name:
            raise UserError(f"no file {name} of the preset feeds the kernel timings", "let snakemake make it")
    return ours(records.read(by_name["operators.json"])), ours(records.read(by_name["gpu.json"]))


def training_steps(inputs: Sequence[Path]) -> "pd.DataFrame":
    """Training steps of whole models, ours, a row a kind and form, in the columns of the timings.

    Another column, `share`, is the part of the step inside our operators; the naive form stands where torch's does.
    """
    import pandas as pd

    frame = records.read(next(path for path in inputs if path.name == "operators.json"))
    columns = [*COLUMNS, "share"]
    if "form" not in frame or "model_size" not in frame:
        return pd.DataFrame(columns=columns)
    case = ["attention", "form"]
    own = frame[(frame["metric"] == "operator_share") & (frame["operators"] == OWN_OPERATORS)]
    shares = own.set_index(case)["value"]
    steps = frame[frame["metric"] == "step_ms"]
    return pd.DataFrame(
        [
            {
                "operation": f"training step, {row['model_size']} {row['attention']}, batch {int(row['batch'])}",
                "direction": "forward, backward, update",
                "form": OWN if row["form"] == OURS else TORCH,
                "implementation": row["form"],
                "time_ms": row["value"],
                "spread_ms": row["spread"],
                "n": row["n"],
                "backend": row["backend"],
                "device": row["device"],
                "device_kind": "cpu",
                "kind": "ours",
                "share": shares.get((row["attention"], row["form"])),
            }
            for row in rows_of(steps)
        ],
        columns=columns,
    )


def older_sources(inputs: Sequence[Path]) -> list[str]:
    """Devices that were measured with other sources of the operators than today's."""
    frame = records.read(next(path for path in inputs if path.name == "gpu.json"))
    if "same_sources" not in frame:
        return []
    return sorted(set(frame.loc[~frame["same_sources"].astype(bool), "device"]))
