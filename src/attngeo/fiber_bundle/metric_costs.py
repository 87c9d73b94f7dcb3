"""What metrics cost: inverse, log-determinant and distance against dense forms, and their share of a block (P4.b).

Times are the smallest processor time of one thread, float32, forward passes without gradients.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attngeo.evaluation.slopes import fit_slope
from attngeo.evaluation.timing import Call, Timing, interleaved, keep_pages, processor_time
from attngeo.layers.riemannian import RiemannianAttention
from attngeo.layers.softmax import SoftmaxAttention
from attngeo.layers.token_metric import TokenMetric
from attngeo.ops.low_rank_metric import logdet, pairwise_squared_distance, solve
from attngeo.ops.low_rank_metric.macs import pairwise_macs
from attngeo.ops.riemannian_attention import riemannian_attention
from attngeo.training.seeding import derive_seed, generator, seeded_globals

Row = dict[str, Any]

HEAD_DIM = 64
MLP_RATIO = 4
# The claimed exponents are those of d r^2, beside which there are d r (reading U), r^3 (the root) and what any call
# takes: r is fitted from this number on, and d where it is as many times r.
ASYMPTOTIC = 16
LARGE_RANK = 128  # from about here on the products take most of the time: a fit from here on is told beside the other
# Numbers in U of all tokens of one call: larger than the second cache would time the memory, not the algorithm.
_NUMBERS = 1 << 18
_DENSE_NUMBERS = 1 << 22
_PAIRS = 64  # tokens of the all-pairs distance
_AGREES = 1e-3  # float32 against the dense form in float64, relative: nothing is timed that is not right
# Known decoder shapes: width, layers, tokens of context.
SHAPES = {"1B": (2048, 16, 2048), "8B": (4096, 32, 8192)}


def measure(
    dimensions: Sequence[int],
    ranks: Sequence[int],
    block_dimensions: Sequence[int],
    block_ranks: Sequence[int],
    *,
    tokens: int,
    dense_to: int,
    repeats: int,
    seconds: float,
) -> Iterator[list[Row]]:
    """Rows of each operation and size, then exponents, then shares of a block and projections; one thread from here on.

    Dense forms are timed up to `dense_to` channels. `tokens` are those of a block.
    """
    torch.set_num_threads(1)
    keep_pages()
    clock = partial(interleaved, clock=processor_time, repeats=repeats, seconds=seconds)
    timed: list[Row] = []
    for dimension in dimensions:
        for rank in ranks:
            rows = _operations(dimension, rank, dimension <= dense_to and rank == ranks[0], clock)
            timed += rows
            yield rows
    yield exponents(timed)
    blocks: list[Row] = []
    for dimension in block_dimensions:
        for rank in block_ranks:
            rows = _block(dimension, rank, tokens, clock)
            blocks += rows
            yield rows
    yield projections(blocks)


def exponents(rows: Sequence[Row]) -> list[Row]:
    """Slopes of time on d and r of every operation: `inversion_exponent_d`, `inversion_exponent_r` and so on.

    On d at the largest rank up to 16, over d of 16 r and more; on r at the largest d, from 16 on, and apart those up to
    16 (`small_r`) and from 128 on (`large_r`). n counts sizes, the spread is a standard error.
    """
    found = []
    times = [row for row in rows if row["metric"] == "time_us" and row["form"] == "low rank"]
    for operation, name in {"solve": "inversion", "logdet": "logdet", "distance": "distance"}.items():
        own = [row for row in times if row["operation"] == operation]
        rank = max((row["rank"] for row in own if row["rank"] <= ASYMPTOTIC), default=0)
        largest = [row for row in own if row["dimension"] == max(row["dimension"] for row in own)]
        lines: dict[str, tuple[str, list[Row]]] = {
            "d": ("dimension", [row for row in own if row["rank"] == rank and row["dimension"] >= ASYMPTOTIC * rank]),
            "r": ("rank", [row for row in largest if row["rank"] >= ASYMPTOTIC]),
            "small_r": ("rank", [row for row in largest if row["rank"] <= ASYMPTOTIC]),
            "large_r": ("rank", [row for row in largest if row["rank"] >= LARGE_RANK]),
        }
        for axis, (label, points) in lines.items():
            if len(points) < 2:
                continue
            sizes = [row[label] for row in points]
            slope, error = fit_slope(sizes, [row["value"] for row in points], [0] * len(points))
            spread = {} if math.isnan(error) else {"spread": error, "spread_kind": "standard error of the slope"}
            row: Row = {"metric": f"{name}_exponent_{axis}", "operation": operation, "value": slope, "unit": "1"}
            found.append(row | spread | {"n": len(points), "smallest": min(sizes), "largest": max(sizes)})
    return found


def _operations(dimension: int, rank: int, dense: bool, clock: Callable[..., dict[str, Timing]]) -> list[Row]:
    """Time a token (a pair, for the distance) of each operation, low rank and, if asked for, dense."""
    source = generator(0, f"metric costs {dimension}", rank)
    count = max(1, _NUMBERS // (dimension * rank))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source)

    a, x = 0.5 + draw(count, dimension).square(), draw(count, dimension)
    U = draw(count, dimension, rank) / math.sqrt(dimension)
    few = min(_PAIRS, count)
    q, k = draw(1, 1, few, dimension), draw(1, 1, _PAIRS, dimension)
    own = a[None, None, :few], U[None, None, :few]
    calls: dict[tuple[str, str], tuple[Call, int]] = {
        ("solve", "low rank"): (lambda: solve(a, U, x), count),
        ("logdet", "low rank"): (lambda: logdet(a, U), count),
        ("distance", "low rank"): (lambda: pairwise_squared_distance(q, k, *own), few * _PAIRS),
    }
    if dense:
        some = max(1, min(count, _DENSE_NUMBERS // dimension**2))
        G = torch.diag_embed(a[:some]) + U[:some] @ U[:some].mT
        y = x[:some].unsqueeze(-1)
        one = G[0]

        def dense_distance() -> Tensor:
            step = q[0, 0, 0] - k[0, 0]
            return ((step @ one) * step).sum(-1)

        _require_agreement("solve", solve(a[:1], U[:1], x[:1]), torch.linalg.solve(one.double(), x[0].double())[None])
        _require_agreement("logdet", logdet(a[:1], U[:1]), torch.linalg.slogdet(one.double()).logabsdet[None])
        first = pairwise_squared_distance(q[:, :, :1], k, own[0][:, :, :1], own[1][:, :, :1])[0, 0, 0]
        _require_agreement("distance", first, dense_distance().double())
        calls["solve", "dense"] = (lambda: torch.cholesky_solve(y, torch.linalg.cholesky_ex(G)[0]), some)
        calls["logdet", "dense"] = (lambda: torch.linalg.cholesky_ex(G)[0].diagonal(dim1=-2, dim2=-1).log().sum(), some)
        calls["distance", "dense"] = (dense_distance, _PAIRS)
    with torch.no_grad():
        timings = clock({" ".join(name): call for name, (call, _) in calls.items()})
    rows = []
    for (operation, form), (_, units) in calls.items():
        timing = timings[f"{operation} {form}"]
        labels = {"operation": operation, "form": form, "dimension": dimension}
        # A dense matrix has no rank: it is timed once.
        labels |= {"rank": rank} if form == "low rank" else {}
        labels["of"] = "pair" if operation == "distance" else "token"
        rows.append(labels | _time("time_us", timing, 1e3 / units))
    return rows


def _block(dimension: int, rank: int, tokens: int, clock: Callable[..., dict[str, Timing]]) -> list[Row]:
    """`block_overhead`: what a whole block takes longer with metrics, and `part_overhead` of each part by itself.

    The plain block is softmax attention, its weights in memory, and an MLP of ratio 4; the other has attention in the
    query's metric, one for all heads, and G(x)^-1 after the same MLP. Without norms, which both have.
    """
    heads = dimension // HEAD_DIM
    with seeded_globals(derive_seed(0, f"metric costs block {dimension}")):
        softmax = SoftmaxAttention(dimension, heads, rotary=False)
        riemannian = RiemannianAttention(dimension, heads, rotary=False, rank=rank)
        mlp = nn.Sequential(
            nn.Linear(dimension, MLP_RATIO * dimension), nn.GELU(), nn.Linear(MLP_RATIO * dimension, dimension)
        )
        wide = TokenMetric(dimension, dimension, rank)
    # One set of weights of the projections: what differs are the metrics.
    riemannian.query_key_value, riemannian.projection = softmax.query_key_value, softmax.projection
    x = torch.randn(1, tokens, dimension, generator=generator(0, "metric costs tokens", tokens))
    grid = (1, tokens)
    narrow = riemannian.token_metric
    assert isinstance(narrow, TokenMetric)

    def plain_attention(x: Tensor) -> Tensor:
        q, k, v = (softmax.split_heads(part) for part in softmax.query_key_value(x).chunk(3, dim=-1))
        return softmax.projection(softmax.merge_heads(torch.softmax(q @ k.mT * HEAD_DIM**-0.5, -1) @ v))

    def plain() -> Tensor:
        y = x + plain_attention(x)
        return y + mlp(y)

    def fiber() -> Tensor:
        y = x + riemannian(x, grid)
        diagonal, factor = wide(y)
        return y + solve(diagonal, factor, mlp(y))

    with torch.no_grad():
        q, k, v = (softmax.split_heads(part) for part in softmax.query_key_value(x).chunk(3, dim=-1))
        a, U = riemannian._metric(x)
        tau = riemannian.log_temperature.exp()
        a_wide, U_wide = wide(x)
        calls: dict[str, Call] = {
            "plain block": plain,
            "fiber block": fiber,
            "softmax": lambda: torch.softmax(q @ k.mT * HEAD_DIM**-0.5, -1) @ v,
            "distance": lambda: riemannian_attention(q, k, v, a, U, tau),
            "metric of heads": lambda: narrow(x),
            "metric of the feed-forward": lambda: wide(x),
            "solve": lambda: solve(a_wide, U_wide, x),
        }
        timings = clock(calls)
    whole = timings["plain block"]
    labels: Row = {"dimension": dimension, "rank": rank, "tokens": tokens}
    rows = [labels | {"part": name} | _time("block_time_ms", timing, 1.0) for name, timing in timings.items()]
    relative = {name: timing.minimum_ms / whole.minimum_ms for name, timing in timings.items()}
    parts = {name: relative[name] for name in ("metric of heads", "metric of the feed-forward", "solve")}
    parts["distance"] = relative["distance"] - relative["softmax"]
    shares: Row = labels | {"n": min(timing.repeats for timing in timings.values()), "unit": "1"}
    rows.append(shares | {"metric": "block_overhead", "value": relative["fiber block"] - 1.0})
    rows.append(shares | {"metric": "operations_overhead", "value": parts["solve"] + parts["distance"]})
    return rows + [shares | {"metric": "part_overhead", "part": part, "value": value} for part, value in parts.items()]


def projections(rows: Sequence[Row]) -> list[Row]:
    """`projected_overhead` of the shapes of models with 1 and 8 billion parameters, by part, from measured rates.

    Rates are those of the largest block measured: time of a multiply-accumulate of linear layers, of softmax's pairs
    and of the distance's, and of the solve by d. Layers are alike, so that a model's share is a block's.
    """
    found = []
    times = [row for row in rows if row["metric"] == "block_time_ms"]
    for rank in dict.fromkeys(row["rank"] for row in times):
        largest = max(row["dimension"] for row in times if row["rank"] == rank)
        ms = {row["part"]: row["value"] for row in times if (row["rank"], row["dimension"]) == (rank, largest)}
        tokens = next(row["tokens"] for row in times)
        n = min(row["n"] for row in times if row["rank"] == rank)
        linear = (ms["plain block"] - ms["softmax"]) / _linear_macs(largest, tokens)
        of_softmax = ms["softmax"] / (2 * tokens**2 * largest)
        of_distance = ms["distance"] / (tokens**2 * largest + pairwise_macs(tokens, tokens, largest, rank, "query"))
        for shape, (dimension, _, context) in SHAPES.items():
            pairs = context**2 * dimension
            block = linear * _linear_macs(dimension, context) + of_softmax * 2 * pairs
            parts = {
                "distance": of_distance * (rank + 3) * pairs - of_softmax * 2 * pairs,
                "solve": ms["solve"] * context / tokens * dimension / largest,
                "metric of heads": linear * context * dimension * HEAD_DIM * (rank + 1),
                "metric of the feed-forward": linear * context * dimension**2 * (rank + 1),
            }
            labels = {
                "metric": "projected_overhead",
                "shape": shape,
                "rank": rank,
                "tokens": context,
                "unit": "1",
                "n": n,
            }
            labels |= {"dimension": dimension, "measured_at": largest}
            found += [labels | {"part": part, "value": value / block} for part, value in parts.items()]
            found.append(labels | {"part": "all", "value": sum(parts.values()) / block})
    return found


def _linear_macs(dimension: int, tokens: int) -> int:
    return (4 + 2 * MLP_RATIO) * dimension**2 * tokens


def _time(metric: str, timing: Timing, factor: float) -> Row:
    spread = {"spread": timing.spread_ms * factor, "spread_kind": "median minus minimum over repeats"}
    unit = metric.rpartition("_")[2]
    return {"metric": metric, "value": timing.minimum_ms * factor, "unit": unit, "n": timing.repeats} | spread


def _require_agreement(what: str, found: Tensor, expected: Tensor) -> None:
    error = float((found.double() - expected).abs().max() / expected.abs().max())
    if not error < _AGREES:
        raise AssertionError(f"{what} differs from its dense form by {error:.1e} relative: nothing is timed")
