"""Time the connection walk of a pretrained model on this CPU, against a straightforward implementation of it.

The straightforward one keeps the attention maps of all layers and windows, forms W_V W_O and T_ij as C x C matrices and
decomposes these. Both must give the same numbers before either counts. The budget's time is that of the clock, with
two threads; other times are processor time of one thread, of one run each. Memory is the peak beyond the loaded model,
each in a process of its own, with freed memory given back at once and as few edges and null draws as there can be:
these cost time, not memory. The straightforward one's memory grows with the windows, and this project's does not, so
that the ratio is that of the windows measured. Compared are the trained network's graphs, transports and heads with
their nulls; the straightforward one does without whatever leaves the first token out and without intervals, which this
project's time includes. Run it on an idle machine, where it ends within three minutes after the budget's windows, a
part of their own: `python -m benchmarks.connection_walk --help`.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from attngeo.connection_walk import analysis, nulls, stationarity, transport, walk
from attngeo.connection_walk.measurements import Rows
from attngeo.evaluation import timing
from attngeo.evaluation.apart import apart
from attngeo.language_models.architectures import HeadWeights
from attngeo.language_models.loading import LoadedModel, load, random_init
from attngeo.language_models.windows import text_windows
from attngeo.processors import use_threads
from attngeo.training.seeding import generator
from benchmarks.output import goals, say, write

R = TypeVar("R")
Numbers = dict[tuple[int, int, str, str], float]

MODEL = "smollm2-135m-instruct@gguf-q4_1"
OPTIONS = {"seed": 0, "edges": 4, "null_draws": 16}
SPARING = OPTIONS | {"edges": 1, "null_draws": 2}  # where memory alone is measured
AGREEMENT = 1e-5  # both see the same float32 maps; of the numbers compared, angles and logs lose the most digits
SPECTRA_AGREEMENT = 1e-6
GOALS = {
    "budget_s": ("s of all measurements on the budget's windows, two threads", 180.0, True),
    "budget_mib": ("MiB at the peak of all measurements, the model included", 3 * 1024.0, True),
    "time_ratio": ("times faster than the straightforward implementation", 5.0, False),
    "memory_ratio": ("times less memory than the straightforward implementation", 5.0, False),
    "head_spectra_ratio": ("times faster: spectra of heads against an SVD of the product", 10.0, False),
    "edge_spectra_ratio": ("times faster: spectra of edges against an SVD of the product", 10.0, False),
}


def straightforward(
    loaded: LoadedModel, inputs: Sequence[Tensor], *, seed: int, null_draws: int, edges: int
) -> Numbers:
    """The trained numbers and nulls that need no streaming to write down, by layer, head, metric and control."""
    read: list[list[Tensor]] = []
    maps: list[Sequence[Tensor]] = []
    sites = loaded.sites
    for window in inputs:
        read.append([])
        handles = [
            site.attention.register_forward_pre_hook(
                lambda module, args, kwargs: read[-1].append(args[0] if args else kwargs["hidden_states"]),
                with_kwargs=True,
            )
            for site in sites
        ]
        with torch.no_grad():
            maps.append(loaded.model(input_ids=window[None], output_attentions=True, use_cache=False).attentions)
        for handle in handles:
            handle.remove()
    weights = [site.weights() for site in sites]
    products = [transport.head_transports(of_layer) for of_layer in weights]
    found: dict[tuple[int, int, str, str], list[Tensor]] = {}

    def note(layer: int, head: int, metric: str, control: str, value: Tensor | float) -> None:
        found.setdefault((layer, head, metric, control), []).append(torch.as_tensor(value).double())

    for index, of_window in enumerate(maps):
        before = None
        for layer, attention in enumerate(of_window):
            graph = walk.effective_graph(attention[0])
            spectrum = torch.linalg.eigvalsh(_normalised(graph))
            note(layer, -1, "spectral_gap", "trained", 1 - spectrum[-2])
            note(layer, -1, "first_token_share", "trained", graph[1:, 0].mean())
            if before is not None:
                note(layer, -1, "graph_change", "trained", (graph - before).norm() / before.norm())
                note(layer, -1, "row_jensen_shannon", "trained", stationarity.row_jensen_shannon(before, graph))
            before = graph
            states = sites[layer].states(read[index][layer][0])
            moved = torch.einsum("nc,hcd->hnd", states, products[layer]).norm(dim=2) / states.norm(dim=1)
            for head in range(len(moved)):
                note(layer, head, "directional_gain", "trained", moved[head].mean())
            draw = generator(seed, "edges", index * len(sites) + layer)
            rows, columns = walk.sample_edges(graph, edges, draw)
            gates = walk.gates(attention[0][:, rows, columns].double()).T
            rank = transport.edge_rank(weights[layer])
            dense = torch.einsum("eh,hcd->ecd", gates * weights[layer].heads, products[layer])
            note(layer, -1, "transport_isometry_score", "trained", _score(dense, rank).mean())
            along = torch.einsum("ec,ecd->ed", states[columns], dense).norm(dim=1) / states[columns].norm(dim=1)
            note(layer, -1, "transport_directional_gain", "trained", along.mean())
            for control, gain in (("null", None), ("null_same_gain", sites[layer].gain)):
                for edge in range(edges):
                    drawn = nulls.gaussian_like(weights[layer], draw, gain=gain)
                    dense = transport.edge_transports(drawn, gates[edge : edge + 1])
                    note(layer, -1, "transport_isometry_score", control, _score(dense, rank).mean())
    for layer, of_layer in enumerate(weights):
        rank = min(of_layer.model_dim, of_layer.head_dim)
        for head, score in enumerate(_score(products[layer], rank)):
            note(layer, head, "isometry_score", "trained", score)
        draw = generator(seed, "null-heads")
        for _ in range(null_draws):
            drawn = nulls.gaussian_heads(of_layer.model_dim, of_layer.head_dim, 1, draw)
            note(layer, -1, "isometry_score", "null", _score(transport.head_transports(drawn), rank).mean())
    return {key: torch.stack(values).mean().item() for key, values in found.items()}


def _normalised(graph: Tensor) -> Tensor:
    weights = stationarity.symmetrised(graph)
    scale = weights.sum(1).rsqrt()
    return scale[:, None] * weights * scale


def _score(dense: Tensor, rank: int) -> Tensor:
    return transport.isometry_score(torch.linalg.svdvals(dense)[..., :rank], rank)


def ours(loaded: LoadedModel, inputs: Sequence[Tensor], *, seed: int, null_draws: int, edges: int) -> Numbers:
    """The same by this project."""
    rows = Rows(loaded)
    analysis.measure_trained(rows, loaded, inputs, seed=seed, null_draws=null_draws, edges=edges)
    return {(row["layer"], row["head"], row["metric"], row["control"]): row["value"] for row in rows.rows}


def disagreement(expected: Numbers, found: Numbers) -> tuple[float, str]:
    """The largest difference of a trained number relative to its size, and which it is."""
    worst, where = 0.0, "none"
    for key, value in expected.items():
        if key[3] == "trained":
            difference = abs(found[key] - value) / max(abs(value), 1e-3)
            if not difference <= worst:
                worst, where = difference, f"{key[2]} of layer {key[0]}" + (f", head {key[1]}" if key[1] >= 0 else "")
    return worst, where


def spectra(weights: HeadWeights, edges: int, *, repeats: int, seconds: float) -> list[dict[str, Any]]:
    """Singular values of heads and of edges by thin factors, against torch's SVD of the C x C product."""
    gates = torch.rand(edges, weights.heads, dtype=torch.float64, generator=generator(0, "gates")).softmax(1)
    heads_rank, edge_rank = min(weights.model_dim, weights.head_dim), transport.edge_rank(weights)
    rows = []
    for name, thin, dense, rank in (
        ("head", lambda: transport.head_singular_values(weights), transport.head_transports(weights), heads_rank),
        (
            "edge",
            lambda: transport.edge_singular_values(weights, gates).flip(1),
            transport.edge_transports(weights, gates),
            edge_rank,
        ),
    ):
        full = torch.linalg.svdvals(dense)[:, :rank]
        error = ((thin() - full).abs() / full[:, :1]).max().item()
        contestants = {
            "thin": thin,
            "dense": lambda dense=dense: torch.linalg.svd(dense),
            "dense, values only": lambda dense=dense: torch.linalg.svdvals(dense),
        }
        taken = timing.interleaved(contestants, timing.processor_time, repeats=repeats, seconds=seconds)
        rows.append(_row(f"{name}_spectra_error", error, "1"))
        rows += [_row(f"{name}_spectra", taken[form].minimum_ms, "ms", form) for form in contestants]
        ratio = taken["dense"].minimum_ms / taken["thin"].minimum_ms
        rows.append(_row(f"{name}_spectra_ratio", ratio, "1"))
    return rows


def memory(model: str | None, quick: bool, straight: bool, windows: int, tokens: int) -> tuple[float, Numbers]:
    """MiB at the peak of one implementation beyond the loaded model, and its numbers; for a process of its own."""
    timing.return_pages()
    use_threads(1)
    loaded, texts = opened(model, quick)
    inputs = text_windows(loaded, texts, windows, tokens)
    form = straightforward if straight else ours
    form(loaded, [inputs[0][:5]], **SPARING)  # loads code and starts threads, which are nobody's memory
    numbers, _, mib, _ = measured(lambda: form(loaded, inputs, **SPARING))
    return mib, numbers


def budget(model: str | None, quick: bool, windows: int, tokens: int) -> tuple[float, float]:
    """Seconds of all measurements, and MiB at their peak with everything in it; for a process of its own.

    As a user runs it: freed pages are kept, which saves two fifths of the time and costs memory.
    """
    use_threads(2)
    loaded, texts = opened(model, quick)
    start = time.monotonic()
    _, _, _, peak = measured(lambda: analysis.analyze(loaded, texts, windows=windows, window_tokens=tokens))
    return time.monotonic() - start, peak


def measured(call: Callable[[], R]) -> tuple[R, float, float, float]:
    """What a call returns, its processor seconds, and its peak in MiB: beyond what was there, and in all."""
    Path("/proc/self/clear_refs").write_text("5")
    before = timing.status_kib("VmRSS")
    start = time.process_time()
    result = call()
    seconds = time.process_time() - start
    peak = timing.status_kib("VmHWM")
    return result, seconds, (peak - before) / 2**10, peak / 2**10


def opened(model: str | None, quick: bool) -> tuple[LoadedModel, Any]:
    """The model and what it reads."""
    if quick:
        return _tiny(), torch.randint(53, (8, 11), generator=generator(0, "tokens"))
    from attngeo.data import text
    from attngeo.data.embedded import fetch

    return load(model or fetch(MODEL)), text.load()


def compare_times(model: str | None, quick: bool, windows: int, tokens: int) -> list[dict[str, Any]]:
    """Spectra and processor seconds of both implementations on the same windows, and how far their numbers are apart.

    For a process of its own.
    """
    timing.return_pages()
    use_threads(1)
    loaded, texts = opened(model, quick)
    with phase("spectra"):
        rows = spectra(loaded.sites[0].weights(), 4, repeats=3 if quick else 10, seconds=0.1 if quick else 3.0)
    inputs = text_windows(loaded, texts, windows, tokens)
    ours(loaded, inputs[:1], **SPARING)  # loads code and starts threads, which is nobody's time
    found, seconds, _, _ = measured(lambda: ours(loaded, inputs, **OPTIONS))
    expected, dense_seconds, _, _ = measured(lambda: straightforward(loaded, inputs, **OPTIONS))
    worst, where = disagreement(expected, found)
    say(f"numbers differ by at most {worst:.1e} ({where})")
    return [
        *rows,
        _row("disagreement", worst, "1"),
        *(_row("time", value, "s", form) for form, value in (("ours", seconds), ("straightforward", dense_seconds))),
        _row("time_ratio", dense_seconds / seconds, "1"),
    ]


def compare_memory(model: str | None, quick: bool, windows: int, tokens: int) -> list[dict[str, Any]]:
    """Peaks of both implementations on the same windows, and how far their numbers are apart."""
    (mib, found), (dense_mib, expected) = (
        apart(memory, model, quick, straight, windows, tokens) for straight in (False, True)
    )
    worst, where = disagreement(expected, found)
    say(f"numbers differ by at most {worst:.1e} ({where})")
    return [
        _row("memory_disagreement", worst, "1"),
        *(_row("memory", value, "MiB", form) for form, value in (("ours", mib), ("straightforward", dense_mib))),
        _row("memory_ratio", dense_mib / max(mib, 1.0), "1"),
    ]


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Say what is measured, and how long it took."""
    say(name)
    start = time.monotonic()
    yield
    say(f"{name}: {time.monotonic() - start:.0f} s")


def _row(metric: str, value: float, unit: str, form: str = "") -> dict[str, Any]:
    return {"metric": metric, "form": form, "value": value, "unit": unit}


def wrong(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Which numbers are not the same."""
    limits = {
        "disagreement": AGREEMENT,
        "memory_disagreement": AGREEMENT,
        "head_spectra_error": SPECTRA_AGREEMENT,
        "edge_spectra_error": SPECTRA_AGREEMENT,
    }
    return [
        f"{row['metric']} {row['value']:.1e}, allowed {limits[row['metric']]:.0e}"
        for row in rows
        if row["metric"] in limits and not row["value"] <= limits[row["metric"]]
    ]


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """One line a number, then the goals."""
    lines = [f"  {row['metric']:22} {row['form']:18} {row['value']:12.4g} {row['unit']}" for row in rows]
    found = {row["metric"]: row["value"] for row in rows}
    judged = []
    for metric, (text, bound, at_most) in GOALS.items():
        value = found.get(metric, math.nan)
        met = value <= bound if at_most else value >= bound
        verdict = "not measured" if math.isnan(value) else "met" if met else "missed"
        judged.append((verdict, value, f"{text}: at {'most' if at_most else 'least'} {bound:g}"))
    return "\n".join([*lines, *goals(judged)])


def _tiny() -> LoadedModel:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=53, hidden_size=42, head_dim=6, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        intermediate_size=17, max_position_embeddings=64,
    )  # fmt: skip
    return random_init(config, 0, model_id="tiny")


def main(arguments: Sequence[str] | None = None) -> int:
    """Status 1 if a number is wrong; a goal that is missed is said and is no error."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.connection_walk",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", help=f"model folder or hub name (default: the embedded {MODEL})")
    parser.add_argument("--windows", type=int, default=1, help="windows that both are timed on, 0 for none (default 1)")
    parser.add_argument(
        "--memory-windows", type=int, default=4, help="windows that both take memory for, 0 for none (default 4)"
    )
    parser.add_argument("--budget-windows", type=int, default=32, help="windows of the budget, 0 for none (default 32)")
    parser.add_argument("--window-tokens", type=int, default=256, help="tokens a window (default 256)")
    parser.add_argument("--quick", action="store_true", help="a tiny random model: says nothing but runs in seconds")
    parser.add_argument("--out", type=Path, help="write every number to this CSV file")
    chosen = parser.parse_args(arguments)
    quick, tokens = chosen.quick, chosen.window_tokens
    most = 2 if quick else sys.maxsize
    windows, memory_windows, budget_windows = (
        min(asked, most) for asked in (chosen.windows, chosen.memory_windows, chosen.budget_windows)
    )
    use_threads(2)  # before the processes of the measurements load what reads it
    rows: list[dict[str, Any]] = []
    if budget_windows:
        with phase(f"all measurements, {budget_windows} windows"):
            seconds, peak = apart(budget, chosen.model, quick, budget_windows, tokens)
        rows += [_row("budget_s", seconds, "s"), _row("budget_mib", peak, "MiB")]
    if memory_windows:
        with phase(f"memory, {memory_windows} windows"):
            rows += compare_memory(chosen.model, quick, memory_windows, tokens)
    if windows:
        with phase(f"times, {windows} windows"):
            rows += apart(compare_times, chosen.model, quick, windows, tokens)
    print(tables(rows))
    if chosen.out is not None:
        write(rows, chosen.out)
    for line in wrong(rows):
        say(f"WRONG: {line}")
    return 1 if wrong(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
