"""The CUDA launchers and kernels, run unchanged on the host by csrc/emulator, are right and race nowhere."""

import re
import shutil
from pathlib import Path

import pytest

from tests.ops import emulator
from tests.ops.cuda_mutants import MUTANTS, Mutant
from tests.ops.emulator import Workshop

# Kernels with one fault each (csrc/emulator/check_emulator.cpp) and what must be said of them, by mode. An empty text
# means that the fault cannot be seen, or that there is none.
VALUE = r"FAIL value \d+ is "
RACE = r"WARNING: ThreadSanitizer: data race"
OVERFLOW = r"ERROR: AddressSanitizer: heap-buffer-overflow|runtime error: index \d+ out of bounds"
FAULTS = {
    "none": {"plain": "", "address": "", "thread": ""},
    "missing_barrier": {"plain": VALUE, "thread": RACE},
    "missing_second_barrier": {"plain": VALUE, "thread": RACE},
    "divergent_barrier": {"plain": r"block \d+ thread \d+ at __syncthreads .*: a barrier after other threads have"},
    "barrier_after_return": {"plain": r"block \d+ thread 5: returned while others wait at .*check_emulator.cpp:\d+"},
    "two_barriers": {"plain": r"block \d+ thread \d+ at __syncthreads .*: others wait at another barrier"},
    "lane_missing": {"plain": r"at __shfl_down_sync .*: others of its mask wait at __syncwarp"},
    "lane_outside_its_mask": {"plain": r"at __shfl_sync .*: its lane \d+ is not in its mask 0xffff"},
    "source_outside_mask": {"plain": r"at __shfl_sync .*: reads lane 20, which is not in mask 0xffff"},
    "overlapping_masks": {"plain": r"thread \d+ .*: (waits for ever: not every lane of mask|others of its mask wait)"},
    "returned_lane": {"plain": r"(names lane 31, which is not running|returned while its warp waits for it)"},
    "different_shuffles": {"plain": r"at __shfl_xor_sync .*: others of its mask wait at __shfl_xor_sync"},
    "shared_overrun": {
        "plain": r"block \d+: wrote at byte 384 of its shared memory, which has 384",
        "address": OVERFLOW,
    },
    "shared_overread": {"plain": VALUE, "address": OVERFLOW},
    "shared_of_the_block_before": {"plain": VALUE},
    "missing_syncwarp": {"plain": VALUE, "thread": RACE},
    "shuffle_for_syncwarp": {"plain": "", "thread": RACE},
    "plain_sum_across_blocks": {"plain": "", "thread": RACE},
    "atomic_sum_across_blocks": {"plain": "", "thread": ""},
    "misaligned_vector": {"plain": "", "address": r"runtime error: .*misaligned address"},
    "output_overrun": {"plain": "", "address": OVERFLOW},
    "too_much_shared": {"plain": r"FAIL more shared memory than the device has"},
}


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """One folder for all workers of a session."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "emulator"
    folder.mkdir(exist_ok=True)
    return Workshop(folder)


def need(mode: str) -> None:
    reason = emulator.missing(mode)
    if reason is not None:
        pytest.skip(reason)


def check(workshop: Workshop, name: str, mode: str, *arguments: str) -> None:
    need(mode)
    result = emulator.run(workshop.program(name, mode), *arguments)
    if result.returncode == emulator.LACKING:
        pytest.skip(emulator.end_of(result))
    assert result.returncode == 0, emulator.end_of(result)
    assert re.search(r"^[1-9]\d* cases, 0 failures$", result.stdout, re.MULTILINE)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_sees_each_fault(fault: str, workshop: Workshop) -> None:
    for mode, pattern in FAULTS[fault].items():
        need(mode)
        program = workshop.program("emulator", mode)
        runs = [emulator.run(program, fault, str(order)) for order in (range(4) if mode == "plain" else (3,))]
        if pattern == "":
            assert [result.returncode for result in runs] == [0] * len(runs), emulator.end_of(runs[0])
        else:
            assert any(result.returncode != 0 and re.search(pattern, result.stdout) for result in runs), (
                emulator.end_of(runs[-1])
            )


@pytest.mark.parametrize("name", ["pairwise", "inverse"])
def test_values_and_gradients_are_right_in_every_order_of_threads(name: str, workshop: Workshop) -> None:
    check(workshop, name, "plain", "--orders", "2,3")


@pytest.mark.parametrize("name", ["pairwise", "inverse"])
def test_no_access_is_outside_or_misaligned(name: str, workshop: Workshop) -> None:
    only = {"pairwise": "laplacian float32", "inverse": "float32"}[name]
    check(workshop, name, "address", "--orders", "2,3", "--only", only)


@pytest.mark.parametrize(
    ("name", "only"),
    [
        ("pairwise", "float32 ordinary slices 2 rows 67"),
        ("pairwise", "float32 ordinary slices 1 rows 70"),
        ("inverse", "float32 paper start, kernel first of 5, size 33, 3 iter"),
        ("inverse", "spd-inverse float32 kernel, 3 of size 33"),
    ],
)
def test_no_two_threads_race(name: str, only: str, workshop: Workshop) -> None:
    check(workshop, name, "thread", "--orders", "3", "--only", only)


@pytest.mark.parametrize("name", ["pairwise", "inverse"])
def test_offsets_beyond_32_bits_are_right(name: str, workshop: Workshop) -> None:
    check(workshop, name, "plain", "--large", "--orders", "0")


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", list(emulator.SANITIZERS))
@pytest.mark.parametrize("name", ["pairwise", "inverse"])
def test_every_shape(name: str, mode: str, workshop: Workshop) -> None:
    orders = {"plain": "0,1,2,3,4,5,6,7", "address": "2,3", "thread": "3"}[mode]
    check(workshop, name, mode, "--full", "--orders", orders)


def mutate(mutant: Mutant, folder: Path) -> Path:
    """A copy of the sources with the mutant's bug."""
    csrc = Path(shutil.copytree(emulator.CSRC, folder / "csrc"))
    for file, find, replacement in mutant.edits:
        path = csrc / "cuda" / file
        text = path.read_text()
        assert text.count(find) == 1, f"{mutant.name}: {file} holds {text.count(find)} times:\n{find}"
        path.write_text(text.replace(find, replacement))
    return csrc


def catch(mutant: Mutant, mode: str, workshop: Workshop, csrc: Path) -> None:
    need(mode)
    orders = "0" if mutant.arguments[0] == "--large" else "2,3" if mode == "address" else "0,1,2,3"
    arguments = [*mutant.arguments, "--orders", "3" if mode == "thread" else orders]
    # Without the bug the same program finds nothing.
    sound = emulator.run(workshop.program(mutant.check, mode, "-O0"), *arguments)
    assert sound.returncode == 0, emulator.end_of(sound)
    result = emulator.run(workshop.program(mutant.check, mode, "-O0", csrc), *arguments)
    assert result.returncode != 0, f"{mutant.name} survives in mode {mode}"
    assert re.search(mutant.caught[mode], result.stdout), f"{mutant.name}, mode {mode}:\n{emulator.end_of(result)}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_planted_bug_is_caught(mutant: Mutant, workshop: Workshop, tmp_path: Path) -> None:
    catch(mutant, next(iter(mutant.caught)), workshop, mutate(mutant, tmp_path))


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_planted_bug_is_caught_in_every_mode_that_can_see_it(
    mutant: Mutant, workshop: Workshop, tmp_path: Path
) -> None:
    csrc = mutate(mutant, tmp_path)
    for mode in mutant.caught:
        catch(mutant, mode, workshop, csrc)


def test_every_planted_bug_changes_a_cuda_file_and_has_a_name_of_its_own() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 10
    assert all(mutant.caught for mutant in MUTANTS)
