"""Bugs to plant into copies of csrc/cuda: test_cuda_bodies.py must see each. A text must occur exactly once."""

from dataclasses import dataclass

FAIL = r"^FAIL |\bFAIL "
BITS = r"FAIL .* has other bits in another order"
GUARD = r"FAIL .*: wrote past the end of "
BARRIER = r"emulator: block \d+ thread \d+.*(barrier|wait)"
MASK = r"emulator: block \d+ thread \d+ at __shfl_xor_sync .*: its lane \d+ is not in its mask"
RACE = r"WARNING: ThreadSanitizer: data race"
OUTSIDE = r"ERROR: AddressSanitizer: (heap-buffer-overflow|SEGV)|runtime error: index \d+ out of bounds"
WRONG_PLACE = r"FAIL|^(?![\s\S]*cases, )"  # wrong numbers, or the process was killed


@dataclass(frozen=True)
class Mutant:
    """A bug: edits (file, text, replacement), the check and its arguments, and what each mode must say of it."""

    name: str
    edits: tuple[tuple[str, str, str], ...]
    check: str
    arguments: tuple[str, ...]
    caught: dict[str, str]


PAIRS, PAIRS_CU = "pairwise_kernel.cuh", "pairwise_kernel.cu"
MATRICES, MATRICES_CU = "inverse.cuh", "inverse.cu"


def only(text: str) -> tuple[str, ...]:
    return ("--only", text)


MUTANTS = [
    # ---- barriers
    Mutant(
        "tile: no barrier after staging",
        (
            (
                PAIRS,
                "    __syncthreads();\n    if (first_row < rows) {\n      accumulate<Op,",
                "    if (first_row < rows) {\n      accumulate<Op,",
            ),
        ),
        "pairwise",
        only("forward laplacian float32 ordinary slices 2 rows 67"),
        {"plain": FAIL, "thread": RACE},
    ),
    Mutant(
        "tile: no barrier before the next channels are staged",
        (
            (
                PAIRS,
                "    const int width = at_most(left, kStage);\n    __syncthreads();\n    if (transposed) {",
                "    const int width = at_most(left, kStage);\n    if (transposed) {",
            ),
        ),
        "pairwise",
        only("forward laplacian float32 ordinary slices 2 rows 67"),
        {"plain": FAIL, "thread": RACE},
    ),
    Mutant(
        "tile: no barrier between a warp's stores and its reads across lanes",
        ((PAIRS, "  __syncwarp();  // a warp writes its own rows, a row at a time\n", ""),),
        "pairwise",
        only("forward laplacian float32 ordinary slices 2 rows 67"),
        {"plain": FAIL, "thread": RACE},
    ),
    Mutant(
        "backward: no barrier between streams that pass on their sums",
        (
            (
                PAIRS,
                "      __syncthreads();\n      if (idle || stream != turn) continue;",
                "      if (idle || stream != turn) continue;",
            ),
        ),
        "pairwise",
        only("backward laplacian float32 ordinary slices 2 rows 67"),
        {"plain": FAIL, "thread": RACE},
    ),
    Mutant(
        "backward: a barrier that idle threads do not reach",
        (
            (
                PAIRS,
                "      __syncthreads();\n      if (idle || stream != turn) continue;",
                "      if (idle || stream != turn) continue;\n      __syncthreads();",
            ),
        ),
        "pairwise",
        ("--full", *only("backward laplacian float32 ordinary slices 2 rows 13 landmarks 49 channels 65")),
        {"plain": BARRIER},
    ),
    Mutant(
        "newton: no barrier before X is overwritten, which later iterations mend",
        ((MATRICES, "    if (!with_P) __syncthreads();  // X is read until here\n", ""),),
        "inverse",
        only("newton-schulz float32 paper start, kernel first of 2, size 33, 30 iterations"),
        {"thread": RACE},
    ),
    Mutant(
        "spd: one buffer instead of two in turn",
        (
            (
                MATRICES,
                "T* const pivot_column = &numbers + offset % 2 * tiles * kSide;",
                "T* const pivot_column = &numbers;",
            ),
        ),
        "inverse",
        only("spd-inverse float32 kernel, 3 of size 33"),
        {"plain": FAIL, "thread": RACE},
    ),
    # ---- warps
    Mutant(
        "matmul: half of a shuffle's mask",
        (
            (
                PAIRS,
                "total[i] += __shfl_xor_sync(kFullWarp, total[i], other);",
                "total[i] += __shfl_xor_sync(0xffffu, total[i], other);",
            ),
        ),
        "pairwise",
        only("matmul-forward laplacian float32 ordinary slices 2 rows 67"),
        {"plain": MASK},
    ),
    # ---- sums across blocks
    Mutant(
        "backward: blocks add to one sum without atomics",
        (
            (
                PAIRS,
                "          if (j < first_stored) grad_k[0] = -q_factor * sums[j].x;\n"
                "          if (j < second_stored) grad_k[1] = -q_factor * sums[j].y;\n",
                "          if (j < first_stored) grad_k[0] += -q_factor * sums[j].x;\n"
                "          if (j < second_stored) grad_k[1] += -q_factor * sums[j].y;\n",
            ),
            (PAIRS_CU, "  a.grad_k_part = sizes.slices * a.k_slice;\n", "  a.grad_k_part = 0;\n"),
            (
                PAIRS_CU,
                "  T* k_target = plan.grad_k_partial > 0 ? workspace + plan.grad_q_partial : grad_k;\n",
                "  T* k_target = grad_k;\n  zero(grad_k, sizes.slices * sizes.landmarks * sizes.channels, stream);\n",
            ),
            (
                PAIRS_CU,
                "return problem != nullptr ? problem : sum_gradients(plan, q_target, k_target, grad_q, grad_k, sizes, "
                "stream);",
                "return problem;",
            ),
        ),
        "pairwise",
        ("--full", *only("backward laplacian float32 ordinary slices 1 rows 1025")),
        {"plain": BITS, "thread": RACE},
    ),
    Mutant(
        "backward: blocks add to one sum with atomics",
        (
            (
                PAIRS,
                "          if (j < first_stored) grad_k[0] = -q_factor * sums[j].x;\n"
                "          if (j < second_stored) grad_k[1] = -q_factor * sums[j].y;\n",
                "          if (j < first_stored) atomicAdd(grad_k, -q_factor * sums[j].x);\n"
                "          if (j < second_stored) atomicAdd(grad_k + 1, -q_factor * sums[j].y);\n",
            ),
            (PAIRS_CU, "  a.grad_k_part = sizes.slices * a.k_slice;\n", "  a.grad_k_part = 0;\n"),
            (
                PAIRS_CU,
                "  T* k_target = plan.grad_k_partial > 0 ? workspace + plan.grad_q_partial : grad_k;\n",
                "  T* k_target = grad_k;\n  zero(grad_k, sizes.slices * sizes.landmarks * sizes.channels, stream);\n",
            ),
            (
                PAIRS_CU,
                "return problem != nullptr ? problem : sum_gradients(plan, q_target, k_target, grad_q, grad_k, sizes, "
                "stream);",
                "return problem;",
            ),
        ),
        "pairwise",
        ("--full", *only("backward laplacian float32 ordinary slices 1 rows 1025")),
        {"plain": BITS},
    ),
    Mutant(
        "matmul: lanes store one number side by side",
        (
            (
                PAIRS,
                "      if (column == 0) {\n        shared.split.nearest[split][own_row] = nearest[i];",
                "      {\n        shared.split.nearest[split][own_row] = nearest[i];",
            ),
        ),
        "pairwise",
        only("matmul-forward laplacian float32 ordinary slices 1 rows 70"),
        {"thread": RACE},
    ),
    # ---- edges
    Mutant(
        "tile: a column past the end is stored",
        ((PAIRS, "if (j + lane < columns) out[j] = from[j];", "if (j + lane <= columns) out[j] = from[j];"),),
        "pairwise",
        only("forward laplacian float32 ordinary slices 2 rows 67"),
        {"plain": FAIL, "address": OUTSIDE},
    ),
    Mutant(
        "matmul: the last value's guard tests the one before",
        (
            (
                PAIRS,
                "if (g * kStep + 3 < own_values) to[g * kStep + 3]",
                "if (g * kStep + 2 < own_values) to[g * kStep + 3]",
            ),
        ),
        "pairwise",
        only("matmul-forward laplacian float32 ordinary slices 2 rows 67"),
        {"plain": FAIL, "address": OUTSIDE},
    ),
    Mutant(
        "staging: channels beyond the row's end are read",
        ((PAIRS, "      if (column + 3 < columns) value.w = from[3];\n", "      value.w = from[3];\n"),),
        "pairwise",
        only("forward laplacian float32 ordinary slices 1 rows 70"),
        {"plain": FAIL, "address": OUTSIDE},
    ),
    Mutant(
        "staging: alignment is not asked for",
        (
            (
                PAIRS,
                "return width % 4 == 0 && reinterpret_cast<uintptr_t>(matrix) % 16 == 0;",
                "return width % 4 == 0;",
            ),
        ),
        "pairwise",
        only("forward laplacian float32 ordinary slices 1 rows 13"),
        {"address": r"runtime error: .*misaligned address"},
    ),
    Mutant(
        "backward: pairs where rows are not aligned",
        (
            (
                PAIRS,
                "return width % 2 == 0 && reinterpret_cast<uintptr_t>(matrix) % sizeof(Pair<T>) == 0;",
                "return width % 2 == 0;",
            ),
        ),
        "pairwise",
        only("backward laplacian float32 ordinary slices 1 rows 13"),
        {"address": r"runtime error: .*misaligned address"},
    ),
    Mutant(
        "backward: copies of the last row have its weight",
        ((PAIRS, "row >= rows; row -= kBackwardWarps", "row > rows; row -= kBackwardWarps"),),
        "pairwise",
        only("backward laplacian float32 ordinary slices 2 rows 67"),
        {"plain": FAIL},
    ),
    Mutant(
        "backward: landmarks that there are not have weights",
        (
            (
                PAIRS,
                "for (int i = landmarks + warp; i < kLandmarks;",
                "for (int i = landmarks + 1 + warp; i < kLandmarks;",
            ),
        ),
        "pairwise",
        only("backward laplacian float32 ordinary slices 2 rows 67"),
        {"plain": FAIL},
    ),
    Mutant(
        "matmul: one landmark too many in a chunk",
        (
            (
                PAIRS,
                "const int own_landmarks = chunk - split * kLanes - column;",
                "const int own_landmarks = chunk + 1 - split * kLanes - column;",
            ),
        ),
        "pairwise",
        only("matmul-forward laplacian float32 ordinary slices 2 rows 67"),
        {"plain": FAIL},
    ),
    Mutant(
        "backward: the workspace lacks a part",
        (
            (
                PAIRS_CU,
                "plan.grad_q_partial = plan.landmark_parts > 1 ? plan.landmark_parts * q_size : 0;",
                "plan.grad_q_partial = plan.landmark_parts > 1 ? (plan.landmark_parts - 1) * q_size : 0;",
            ),
        ),
        "pairwise",
        only("backward laplacian float32 ordinary slices 1 rows 70"),
        {"plain": WRONG_PLACE, "address": OUTSIDE},
    ),
    Mutant(
        "offsets of 32 bits",
        (
            (
                PAIRS,
                "  return slice * slice_stride + row * width;\n",
                "  return int(unsigned(slice) * unsigned(slice_stride) + unsigned(row) * unsigned(width));\n",
            ),
        ),
        "pairwise",
        ("--large", *only("large laplacian float32")),
        {"plain": WRONG_PLACE},
    ),
    Mutant(
        "inverse: offsets of 32 bits",
        (
            (
                MATRICES,
                "  const int64_t entries = int64_t(size) * size;\n  W += blockIdx.x * entries;\n",
                "  const int entries = size * size;\n  W += int(blockIdx.x * unsigned(entries));\n",
            ),
        ),
        "inverse",
        ("--large", *only("large float32, 1048577 of size 49")),
        {"plain": WRONG_PLACE},
    ),
    # ---- values
    Mutant(
        "backward: ties count as positive",
        (
            (
                PAIRS,
                "{ return __saturatef(fmaf(x, 3e38f, 0.5f)); }",
                "{ return x >= 0.0f ? 1.0f : 0.0f; }",
            ),
        ),
        "pairwise",
        only("ties laplacian float32"),
        {"plain": r"FAIL .* a tie has a gradient"},
    ),
    Mutant(
        "matmul: far rows are normalised without their smallest distance",
        (
            (
                PAIRS,
                "  return nearest == T(INFINITY) ? T(0) : nearest;\n",
                "  return nearest == nearest ? T(0) : nearest;\n",
            ),
        ),
        "pairwise",
        only("matmul-forward laplacian float32 far"),
        {"plain": FAIL},
    ),
    Mutant(
        "matmul: a distance is scaled before the nearest one is subtracted",
        (
            (
                PAIRS,
                "multiply_add(sums[i][j] - origin, a.scale, blank[j])",
                "multiply_add(sums[i][j], a.scale, blank[j] - origin * a.scale)",
            ),
        ),
        "pairwise",
        only("far-sums laplacian float32"),
        {"plain": FAIL},
    ),
    Mutant(
        "matmul: the sum is not rescaled at a new smallest distance",
        ((PAIRS, "        total[i] *= rescale;\n", ""),),
        "pairwise",
        only("matmul-forward laplacian float32 ordinary slices 1 rows 70"),
        {"plain": FAIL},
    ),
    Mutant(
        "newton: a residual that is not a number stays so",
        (
            (
                MATRICES,
                "residual[blockIdx.x] = isfinite(squares) ? sqrt(squares) : T(INFINITY);",
                "residual[blockIdx.x] = sqrt(squares);",
            ),
        ),
        "inverse",
        only("newton-schulz float32 paper start, kernel first of 5, size 17"),
        {"plain": r"FAIL .* a NaN residual is not infinite"},
    ),
    Mutant(
        "spd: a pivot of zero passes",
        ((MATRICES, "*reciprocal = value > T(0) ?", "*reciprocal = value >= T(0) ?"),),
        "inverse",
        only("spd-inverse float32 failures, 6 of size 17"),
        {"plain": r"FAIL .* failed_pivot"},
    ),
    Mutant(
        "spd: a failed matrix is not zeroed",
        ((MATRICES, "to[j] = failed == 0 ? -a[i][j] : T(0);", "to[j] = -a[i][j];"),),
        "inverse",
        only("spd-inverse float32 failures, 6 of size 17"),
        {"plain": r"FAIL .* failed and is not 0"},
    ),
]
