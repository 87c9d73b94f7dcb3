"""Machine code of the CUDA kernels: functions, loops and instruction counts, from nvdisasm's listing."""

import importlib.util
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
# Instructions after which the next one is not reached, unless they have a condition.
ENDS = {"BRA", "EXIT", "RET", "BRX", "JMP", "KILL"}


@dataclass(frozen=True)
class Instruction:
    """One instruction; `target` is the label that it may jump to."""

    address: int
    opcode: str
    predicated: bool
    operands: str
    target: str | None

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.split(".")[0]

    @property
    def always_leaves(self) -> bool:
        """Whether the next instruction is never reached from here; a branch may carry its condition as an operand."""
        return self.name in ENDS and not self.predicated and not (self.name == "BRA" and "," in self.operands)


@dataclass(eq=False)
class Loop:
    """A loop: its blocks, the loops within it and the instructions that lie in no inner loop."""

    header: int
    blocks: frozenset[int]
    inner: list["Loop"] = field(default_factory=list)
    own: Counter[str] = field(default_factory=Counter)  # by opcode, outside of inner loops, both sides of branches
    trip: int = 0  # instructions of the longest way once through, outside of inner loops

    def walk(self) -> list["Loop"]:
        """This loop and all within it, outermost first."""
        return [self, *(loop for child in self.inner for loop in child.walk())]


@dataclass
class Function:
    """One kernel as basic blocks, in the order of their addresses."""

    name: str
    instructions: list[Instruction]
    labels: dict[str, int]  # label: index of the instruction that follows

    @cached_property
    def blocks(self) -> list[tuple[int, int]]:
        """First and last-but-one instruction of every basic block."""
        starts = {0, *self.labels.values()}
        starts |= {i + 1 for i, one in enumerate(self.instructions) if one.target is not None or one.name in ENDS}
        cuts = sorted(start for start in starts if start < len(self.instructions))
        return list(zip(cuts, [*cuts[1:], len(self.instructions)], strict=True))

    @cached_property
    def successors(self) -> list[list[int]]:
        """Blocks that may follow each block."""
        number = {first: i for i, (first, _) in enumerate(self.blocks)}
        result = []
        for i, (_, end) in enumerate(self.blocks):
            last = self.instructions[end - 1]
            next_blocks = []
            if last.target is not None:
                next_blocks.append(number[self.labels[last.target]])
            if not last.always_leaves and i + 1 < len(self.blocks):
                next_blocks.append(i + 1)
            result.append(next_blocks)
        return result

    def _reachable(self, without: int | None = None) -> set[int]:
        seen: set[int] = set()
        waiting = [] if without == 0 else [0]
        while waiting:
            block = waiting.pop()
            if block not in seen:
                seen.add(block)
                waiting += [other for other in self.successors[block] if other != without]
        return seen

    @cached_property
    def loops(self) -> Loop:
        """The whole function as a loop of one trip, with the natural loops in it by nesting."""
        everything = self._reachable()
        bodies: dict[int, set[int]] = {}
        for header in sorted({other for block in everything for other in self.successors[block] if other <= block}):
            # An edge back to a block without which its source is out of reach closes a loop.
            cut_off = everything - self._reachable(without=header)
            sources = [block for block in cut_off if header in self.successors[block]]
            if not sources:
                continue
            body = {header}
            waiting = sources
            before: dict[int, list[int]] = {}
            for block in everything:
                for other in self.successors[block]:
                    before.setdefault(other, []).append(block)
            while waiting:
                block = waiting.pop()
                if block not in body:
                    body.add(block)
                    waiting += before.get(block, [])
            bodies[header] = body
        root = Loop(0, frozenset(everything))
        for header, body in sorted(bodies.items(), key=lambda item: -len(item[1])):
            parent = root
            while (closer := next((loop for loop in parent.inner if body <= loop.blocks), None)) is not None:
                parent = closer
            parent.inner.append(Loop(header, frozenset(body)))
        for loop in root.walk():
            within = {block for child in loop.inner for block in child.blocks}
            for block in loop.blocks - within:
                loop.own.update(one.name for one in self._issued(block))
            loop.inner.sort(key=lambda child: min(child.blocks))
            loop.trip = self.longest_way(loop)
        return root

    def _issued(self, block: int) -> list[Instruction]:
        first, end = self.blocks[block]
        return [one for one in self.instructions[first:end] if one.name != "NOP"]

    def longest_way(self, loop: Loop, without: Callable[[Instruction], bool] = lambda _: False) -> int:
        """Instructions of the longest way through a loop's body, past all blocks with such instructions that can be."""
        # An inner loop stands as its header, at no cost.
        place = {block: child.header for child in loop.inner for block in child.blocks}
        members: dict[int, list[int]] = {}
        for block in loop.blocks:
            members.setdefault(place.get(block, block), []).append(block)
        best: dict[int, tuple[int, int]] = {}  # minus the number of blocks to be avoided, instructions
        for start in members:
            waiting = [start]
            while waiting:
                node = waiting[-1]
                following = {
                    place.get(other, other)
                    for block in members[node]
                    for other in self.successors[block]
                    if other in loop.blocks and other != loop.header and place.get(other, other) != node
                }
                unknown = [other for other in following if other not in best]
                if unknown:
                    waiting += unknown
                    continue
                issued = [] if node in place else self._issued(node)
                avoided, count = max((best[other] for other in following), default=(0, 0))
                best[node] = avoided - any(map(without, issued)), count + len(issued)
                waiting.pop()
        return best[place.get(loop.header, loop.header)][1]


def functions(listing: str) -> dict[str, Function]:
    """Every kernel of a listing by its (mangled) name."""
    found: dict[str, Function] = {}
    current: Function | None = None
    for line in listing.splitlines():
        if line.startswith(".text."):
            current = Function(line[len(".text.") :].rstrip(":"), [], {})
            found[current.name] = current
        elif current is None:
            continue
        elif label := re.match(r"^(\.L_x_\d+|\$[^:]+):", line):
            current.labels[label[1]] = len(current.instructions)
        elif match := INSTRUCTION.match(line):
            # Calls of a label are far jumps; those of a function come back, and what it runs is counted nowhere. A
            # branch for warps whose threads have parted leads to code that does the same lane by lane.
            jumps = match[3].split(".")[0] in ("BRA", "CALL") and not match[3].startswith("BRA.DIV")
            target = re.search(r"`\((\.L_x_\d+)\)", match[4]) if jumps else None
            current.instructions.append(
                Instruction(int(match[1], 16), match[3], match[2] is not None, match[4].strip(), target and target[1])
            )
        elif line.startswith("\t.section"):
            current = None
    return found


def tool(name: str) -> Path | None:
    """A CUDA binary tool: from PATH, a CUDA toolkit, or the ones that triton brings along."""
    found = shutil.which(name)
    if found is not None:
        return Path(found)
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin is not None:
        beside = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name
        if beside.exists():
            return beside
    return None


def listings(binary: Path, folder: Path) -> dict[str, str]:
    """The listing of all machine code for each architecture (`sm_90`) in a binary; works in an empty folder."""
    cuobjdump, nvdisasm = tool("cuobjdump"), tool("nvdisasm")
    assert cuobjdump is not None
    assert nvdisasm is not None
    subprocess.run([cuobjdump, "--extract-elf", "all", binary.resolve()], cwd=folder, check=True, capture_output=True)
    result: dict[str, str] = {}
    for cubin in sorted(folder.glob("*.cubin")):
        printed = subprocess.run([nvdisasm, "-c", cubin], check=True, capture_output=True, text=True).stdout
        architecture = re.search(r"\.target\s+(sm_\d+)", printed)
        assert architecture is not None
        result[architecture[1]] = result.get(architecture[1], "") + printed
    return result
