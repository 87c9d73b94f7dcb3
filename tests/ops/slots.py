"""Issue slots per pair (row, landmark, channel) or per multiplication of each CUDA kernel, from its loops.

`python -m tests.ops.slots` prints what the built extension has, in the form of cuda_ext/budgets.toml.

`main` is the innermost loops; `whole` adds everything else that a thread does for a full tile of the shape below, on
the longest way through the code and with loads of four numbers; `plain` is the same for a product with values without
normalisation, which passes by the largest exponent. A way that the shape never takes (rows that cannot be loaded
several numbers at a time, a tile with few rows) does not count, and what a share of the threads does counts by that
share. How many pairs a trip handles follows from the template arguments; csrc/cuda/README.md explains them.
"""

import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ops.sass import Function, Loop, functions, listings

EXTENSION = Path(__file__).parents[2] / "cuda_ext" / "attngeo_ext"
# The second shape of the benchmarks: 3136 rows, 49 landmarks, 64 channels; as many values.
CHANNELS = 64
# Channels in shared memory at a time, in groups of four that one trip of the innermost loop takes.
STAGE = 32


@dataclass(frozen=True)
class Kernel:
    """A kernel's name and template arguments, types as `f` and `d`."""

    name: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        types = {"f": "float", "d": "double"}
        arguments = ", ".join(types.get(argument, argument) for argument in self.arguments)
        return f"{self.name}<{arguments}>" if arguments else self.name


def demangle(mangled: str) -> Kernel:
    """The kernel of a mangled name: `_ZN7attngeo13pairwise_tileILi0ELi13EfEE...`."""
    position, name = len("_ZN"), ""
    while match := re.match(r"\d+", mangled[position:]):
        start = position + match.end()
        position = start + int(match[0])
        name = mangled[start:position]
    arguments = []
    rest = mangled[position + 1 :] if mangled[position] == "I" else "E"
    while not rest.startswith("E"):
        match = re.match(r"L(?:[a-z]|N\w+?E)(\d+)E|([fd])", rest)
        assert match, mangled
        arguments.append(match[1] or match[2])
        rest = rest[match.end() :]
    return Kernel(name, tuple(arguments))


def single(loops: list[Loop], what: str) -> Loop:
    assert len(loops) == 1, f"{len(loops)} loops look like {what}"
    return loops[0]


def innermost(loops: Loop) -> list[Loop]:
    return [loop for loop in loops.walk() if not loop.inner]


def parent_of(loops: Loop, child: Loop) -> Loop:
    return next(loop for loop in loops.walk() if child in loop.inner)


def arithmetic(loop: Loop) -> int:
    return sum(loop.own[name] for name in ("FADD", "FFMA", "DADD", "DFMA"))


def busiest(loops: Loop) -> Loop:
    return max(innermost(loops), key=arithmetic)


def is_scalar_staging(loop: Loop) -> bool:
    """The way for rows that cannot be loaded four numbers at a time: one group of four is stored, at most 16 bytes."""
    return not loop.inner and loop.own["LDG"] > 0 and loop.own["STS"] <= 2


def tile(kernel: Kernel, function: Function) -> dict[str, float]:
    """pairwise_tile<Op, ColumnsPerThread, T>: a thread has 4 rows and some columns."""
    loops, columns = function.loops, int(kernel.arguments[1])
    main = busiest(loops)
    stage = parent_of(loops, main)
    total = main.trip * CHANNELS / 4 + stage.trip * CHANNELS / STAGE + loops.trip
    # 32 rows are written by each warp, so many at once as the loop was unrolled.
    for loop in loops.inner:
        if loop is not stage and loop.own["STG"] > 0:
            total += loop.trip * 32 / loop.own["STG"]
    for loop in stage.inner:
        assert loop is main or is_scalar_staging(loop) or kernel.arguments[0] == "2", (
            "an unknown loop beside the main one"
        )
    return {"main": main.trip / (4 * columns * 4), "whole": total / (4 * columns * CHANNELS)}


def matmul(kernel: Kernel, function: Function) -> dict[str, float]:
    """pairwise_matmul<Kind, RowsPerThread, ColumnsPerThread, Splits, Warps, ValueQuads, T>, 16 values a quad."""
    loops = function.loops
    rows, columns, splits = (int(kernel.arguments[i]) for i in (1, 2, 3))
    products = single([loop for loop in innermost(loops) if loop.own["SHFL"] > 4], "the products with values")
    distances = max((loop for loop in innermost(loops) if loop is not products), key=arithmetic)
    stage = parent_of(loops, distances)
    for loop in stage.inner:
        assert loop is distances or is_scalar_staging(loop), "an unknown loop beside the main one"
    main = distances.trip * CHANNELS / 4 + products.trip * 4
    # One chunk has all of 49 landmarks, or there are 3136 of them in chunks of 4 * columns * splits.
    chunks = 1 if splits == 1 else -(-3136 // (4 * columns * splits))
    outer = parent_of(loops, stage)

    def everything(chunk: int) -> float:
        once = 0 if outer is loops else loops.trip / chunks
        return main + stage.trip * CHANNELS / STAGE + chunk + once

    pairs = rows * columns * CHANNELS
    plain = function.longest_way(outer, lambda one: one.name.startswith("FMNMX"))
    return {"main": main / pairs, "whole": everything(outer.trip) / pairs, "plain": everything(plain) / pairs}


def backward(kernel: Kernel, function: Function) -> dict[str, float]:
    """pairwise_backward<Kind, Half, T>: a thread has 2 channels of `Half` landmarks, 2 streams of 48 rows a block.

    All landmarks are one chunk, so that nothing is added to what grad_q holds.
    """
    loops = function.loops
    half, streams, stream_rows, tile_rows, warps = int(kernel.arguments[1]), 2, 48, 32, 4
    pair_of_numbers = ".64" if kernel.arguments[2] == "f" else ".128"

    def way(loop: Loop, *opcodes: str) -> int:
        """The longest way past opcodes, and past single numbers where pairs can be moved."""
        return function.longest_way(
            loop,
            lambda one: one.name in opcodes or (one.name in ("LDG", "STG") and pair_of_numbers not in one.opcode),
        )

    row_loops = [loop for loop in innermost(loops) if loop.own["FFMA"] + loop.own["DFMA"] >= 4 * half - 4]
    main = max(row_loops, key=lambda loop: loop.trip)
    rows = parent_of(loops, main)
    landmarks = parent_of(loops, rows)
    # Half of the warps sum the weights of every row, a thread half of one; the others sum those of every landmark.
    row_sums = rows.trip - function.longest_way(rows, lambda one: one.name == "SHFL")
    a_tile = rows.trip - row_sums / 2 + min(loop.trip for loop in row_loops) * tile_rows / streams
    for loop in rows.inner:
        if loop in row_loops or is_scalar_staging(loop):
            continue
        if loop.own["LDG"] > 0:  # weights of 8 rows a warp, 32 landmarks at a time, some rows a trip
            a_tile += loop.trip * 8 / (loop.own["STS"] / -(-2 * half // 32))
        elif loop.inner:  # sums over the rows of a stream, four landmarks a thread, by as many warps as that takes
            trip = loop.trip + sum(inner.trip * tile_rows / streams / 4 for inner in loop.inner)
            a_tile += trip * -(-streams * 2 * -(-half // 4) // 32) / warps
        else:  # rows that a full tile has
            assert loop.own["STS"] > 0, "an unknown loop beside the main one"
            assert arithmetic(loop) == 0, "an unknown loop beside the main one"
    once = way(landmarks, "STG") + (way(landmarks) - way(landmarks, "STG")) / streams  # one stream stores grad_k
    once += loops.trip if landmarks is not loops else 0
    for loop in landmarks.inner:
        if loop.own["BAR"] > 0 and loop is not rows:  # sums handed from stream to stream: one stores, one adds
            neither = way(loop, "STS", "LDS")
            once += neither * streams + (way(loop, "STS") + way(loop, "LDS") - 2 * neither) / streams
        elif loop is not rows:  # zeros before the first row, for every thread once or twice
            once += 2 * loop.trip
    pairs = half * 2
    return {"main": main.trip / pairs, "whole": (a_tile / (tile_rows / streams) + once / stream_rows) / pairs}


def multiplication(kernel: Kernel, function: Function) -> dict[str, float]:
    """The inverses: instructions for each multiplication and addition of the innermost loop."""
    name = "FFMA" if "f" in kernel.arguments else "DFMA"
    main = max(innermost(function.loops), key=lambda loop: loop.own[name])
    return {"main": main.trip / main.own[name]}


ACCOUNTS: dict[str, Callable[[Kernel, Function], dict[str, float]]] = {
    "pairwise_tile": tile,
    "pairwise_matmul": matmul,
    "pairwise_backward": backward,
    "newton_schulz_in_shared_memory": multiplication,
    "eliminate_in_registers": multiplication,
    "product_tile": multiplication,
}


def slots(binary: Path) -> dict[str, dict[str, dict[str, float]]]:
    """For each part, each kernel that has an account and each architecture: issue slots."""
    found: dict[str, dict[str, dict[str, float]]] = {"main": {}, "whole": {}, "plain": {}}
    with tempfile.TemporaryDirectory() as folder:
        for architecture, listing in listings(binary, Path(folder)).items():
            for function in functions(listing).values():
                kernel = demangle(function.name)
                account = ACCOUNTS.get(kernel.name)
                for part, count in (account(kernel, function) if account else {}).items():
                    found[part].setdefault(str(kernel), {})[architecture] = count
    return found


def registers(report: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Registers of each kernel and architecture from the compiler's report in build.json."""
    found: dict[str, dict[str, int]] = {}
    for entry in report:
        found.setdefault(str(demangle(entry["kernel"])), {})[entry["architecture"]] = entry["registers"]
    return found


def row(name: str, values: dict[str, str]) -> str:
    order = sorted(values, key=lambda architecture: int(architecture.removeprefix("sm_")))
    return f'"{name}" = {{ {", ".join(f"{key} = {values[key]}" for key in order)} }}'


def main() -> None:
    record = json.loads((EXTENSION / "build.json").read_text())
    print(f'cuda = "{record["cuda"]["version"]}"\n\n[registers]')
    for name, counts in sorted(registers(record["cuda"]["ptxas"]).items()):
        # The hardware gives a warp registers in steps of 8 a thread.
        print(row(name, {key: str(-(-value // 8) * 8) for key, value in counts.items()}))
    for part, kernels in slots(EXTENSION / "_C.abi3.so").items():
        print(f"\n[{part}]")
        for name, by_architecture in sorted(kernels.items()):
            print(row(name, {key: f"{value:.2f}" for key, value in by_architecture.items()}))


if __name__ == "__main__":
    main()
