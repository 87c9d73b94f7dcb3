"""Table edge: latency and memory of one image at a time, by model size, image size and attention kind."""

from collections.abc import Sequence
from pathlib import Path

from attngeo.paper import records
from attngeo.paper.render import Tabulated
from attngeo.paper.results import count_non_finite, non_finite_sentence, preset_name, span

CASE = ["size", "image_size", "attention"]


def tabulate(inputs: Sequence[Path]) -> Tabulated:
    """Tabulate benchmarks/edge.json, a row a model."""
    import pandas as pd

    (path,) = inputs
    frame = records.read(path)
    # In the order of the measurements: sizes, image sizes and kinds as the preset lists them.
    order = frame[CASE].drop_duplicates()
    values = frame.pivot(index=CASE, columns="metric", values="value").loc[list(map(tuple, order.to_numpy()))]
    latency = frame[frame["metric"] == "latency_ms"].set_index(CASE)
    table = pd.DataFrame(
        {
            "model": order["size"].to_numpy(),
            "image (px)": order["image_size"].astype(int).to_numpy(),
            "attention": order["attention"].to_numpy(),
            "params (M)": values["parameters"].to_numpy() / 1e6,
            "MACs (G)": values["gmac"].to_numpy(),
            "MACs, all (G)": values["gmac_with_apart"].to_numpy(),
            "latency (ms)": values["latency_ms"].to_numpy(),
            "quartiles (ms)": latency["spread"].to_numpy(),
            "n": latency["n"].astype(int).to_numpy(),
            "memory (MiB)": values["memory_mib"].to_numpy(),
            "weights (MiB)": values["weights_mib"].to_numpy(),
        }
    )
    caption = (
        "One image at a time on one thread, in float32 and inference mode, each model in a process of its own. "
        f"latency: median of n = {span(int(n) for n in latency['n'])} passes on the wall clock, quartiles: the range "
        "between the lower and the upper one. memory: the peak of a pass beyond the weights. MACs, all: with solver, "
        "distances and Nystrom products. The backend of every operator is in benchmarks/edge.csv. Preset "
        f"{preset_name(inputs)} on {frame['device'].iloc[0]}."
    ) + non_finite_sentence(count_non_finite(frame["value"]))
    return Tabulated(
        table,
        caption,
        "edge",
        formats={
            "params (M)": ".2f",
            "MACs (G)": ".3g",
            "MACs, all (G)": ".3g",
            "latency (ms)": ".3g",
            "quartiles (ms)": ".2g",
            "memory (MiB)": ".1f",
            "weights (MiB)": ".1f",
        },
        long=True,
    )
