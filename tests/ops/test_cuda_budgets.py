"""Registers, spills and issue slots of the CUDA kernels that were built stay within cuda_ext/budgets.toml."""

import json
import tomllib
from typing import Any

import pytest

from tests.ops import sass, slots

BUDGETS: dict[str, Any] = tomllib.loads((slots.EXTENSION.parent / "budgets.toml").read_text())
# Room for another patch release of the compiler: a few instructions of the code around the loops.
COMPILER_NOISE = 1.02

# Two blocks with a loop in a loop, a branch around the inner one and code after a return, as nvdisasm prints it.
LISTING = """\
\t.target\tsm_90
.text._ZN7attngeo4loopILi3EfEEvPT0_:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_3) ;
.L_x_0:
        /*0020*/                   LDG.E R2, [R4] ;
.L_x_1:
        /*0030*/                   FFMA R2, R2, R2, R3 ;
        /*0040*/                   FADD R3, R3, |R2| ;
        /*0050*/               @P1 BRA `(.L_x_1) ;
        /*0060*/                   BRA.DIV UR4, `(.L_x_4) ;
        /*0070*/               @P2 BRA `(.L_x_2) ;
        /*0080*/                   STG.E [R4], R3 ;
        /*0090*/                   STG.E [R4+0x4], R3 ;
.L_x_2:
        /*00a0*/                   BRA.U UP0, `(.L_x_0) ;
.L_x_3:
        /*00b0*/                   EXIT ;
.L_x_4:
        /*00c0*/                   SHFL.BFLY R2, R2, 0x1, 0x1f ;
        /*00d0*/                   BRA `(.L_x_2) ;
.L_x_5:
        /*00e0*/                   NOP ;
"""


def test_loops_and_the_longest_way_are_read_from_machine_code() -> None:
    (function,) = sass.functions(LISTING).values()
    assert str(slots.demangle(function.name)) == "loop<3, float>"
    whole = function.loops
    (outer,) = whole.inner
    (inner,) = outer.inner
    assert dict(inner.own) == {"FFMA": 1, "FADD": 1, "BRA": 1}
    assert inner.trip == 3
    # Load, two branches, two stores, the branch back; nothing of the way for threads that have parted.
    assert outer.trip == 6
    assert outer.own["SHFL"] == 0
    assert whole.trip == 3
    assert function.longest_way(outer, lambda one: one.name == "STG") == 4
    assert function.longest_way(outer, lambda one: one.name == "LDG") == 6  # no way leads past it


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        ("_ZN7attngeo13pairwise_tileILi0ELi13EfEEvNS_13TileArgumentsIT1_EE", "pairwise_tile<0, 13, float>"),
        ("_ZN7attngeo8inverses9eliminateIdLi4ELi160ELNS0_11EliminationE1EEEvPKT_", "eliminate<double, 4, 160, 1>"),
        ("_ZN41_GLOBAL__N__5b3613d6_9_device_cu_d9c4fea75probeEv", "probe"),
    ],
)
def test_mangled_names_are_read(mangled: str, name: str) -> None:
    assert str(slots.demangle(mangled)) == name


@pytest.fixture(scope="module")
def report() -> list[dict[str, Any]]:
    """What the compiler said of every kernel of the built extension."""
    path = slots.EXTENSION / "build.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    if not record.get("built") or not record["cuda"]["built"]:
        pytest.skip("the extension was built without CUDA")
    entries: list[dict[str, Any]] = record["cuda"]["ptxas"]
    return entries


@pytest.fixture(scope="module")
def budgeted_compiler(report: list[dict[str, Any]]) -> None:
    version = json.loads((slots.EXTENSION / "build.json").read_text())["cuda"]["version"]
    if version != BUDGETS["cuda"]:
        pytest.skip(f"the budgets are for nvcc {BUDGETS['cuda']}, the extension was built by {version}")


def test_no_kernel_spills_registers(report: list[dict[str, Any]]) -> None:
    assert report
    spilling = [
        f"{slots.demangle(entry['kernel'])} on {entry['architecture']}"
        for entry in report
        if entry["spill_stores_bytes"] or entry["spill_loads_bytes"]
    ]
    assert spilling == []


@pytest.mark.usefixtures("budgeted_compiler")
def test_every_kernel_keeps_its_budget_of_registers(report: list[dict[str, Any]]) -> None:
    over = []
    for name, counts in slots.registers(report).items():
        for architecture, count in counts.items():
            budget = BUDGETS["registers"].get(name, {}).get(architecture)
            if architecture in BUDGETS["architectures"] and (budget is None or count > budget):
                over.append(f"{name} on {architecture}: {count} registers, budget {budget}")
    assert over == []


@pytest.mark.usefixtures("budgeted_compiler")
def test_every_kernel_keeps_its_budget_of_instructions() -> None:
    if sass.tool("nvdisasm") is None or sass.tool("cuobjdump") is None:
        pytest.skip("no nvdisasm and cuobjdump")
    found = slots.slots(slots.EXTENSION / "_C.abi3.so")
    assert found
    over = []
    for part, kernels in found.items():
        for name, counts in kernels.items():
            for architecture, count in counts.items():
                budget = BUDGETS[part].get(name, {}).get(architecture)
                if architecture in BUDGETS["architectures"] and (budget is None or count > budget * COMPILER_NOISE):
                    over.append(f"{name} on {architecture}: {part} {count:.3f}, budget {budget}")
    assert over == []


@pytest.mark.parametrize("limit", BUDGETS["limits"], ids=lambda limit: str(limit["what"]))
def test_budgets_are_within_the_limits_that_the_design_promises(limit: dict[str, Any]) -> None:
    counts = BUDGETS[limit["part"]][limit["kernel"]]
    assert sorted(counts) == sorted(BUDGETS["architectures"])
    assert max(counts.values()) <= limit["most"]
