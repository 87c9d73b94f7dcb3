// Small kernels, each with one fault or none, that show what the emulator and the sanitizers see.
// Usage: check_emulator NAME SEED. Status 0: nothing was seen. 1: a value is wrong. Else a fault or a report.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../cuda/launch.cuh"

namespace {

using attngeo::emulator::set_order;

constexpr int kThreads = 96;  // three warps
constexpr int kBlocks = 4;

struct Cells {
  float cell[kThreads];
};

enum Fault {
  kNone,
  kMissingBarrier,
  kMissingSecondBarrier,
  kDivergentBarrier,
  kBarrierAfterReturn,
  kTwoBarriers,
  kLaneMissing,
  kLaneOutsideItsMask,
  kSourceOutsideMask,
  kOverlappingMasks,
  kReturnedLane,
  kDifferentShuffles,
  kSharedOverrun,
  kSharedOverread,
  kSharedOfTheBlockBefore,
  kMissingSyncwarp,
  kShuffleForSyncwarp,
  kPlainSumAcrossBlocks,
  kAtomicSumAcrossBlocks,
  kMisalignedVector,
  kOutputOverrun,
  kTooMuchShared,
};

constexpr const char* kNames[] = {
    "none",
    "missing_barrier",
    "missing_second_barrier",
    "divergent_barrier",
    "barrier_after_return",
    "two_barriers",
    "lane_missing",
    "lane_outside_its_mask",
    "source_outside_mask",
    "overlapping_masks",
    "returned_lane",
    "different_shuffles",
    "shared_overrun",
    "shared_overread",
    "shared_of_the_block_before",
    "missing_syncwarp",
    "shuffle_for_syncwarp",
    "plain_sum_across_blocks",
    "atomic_sum_across_blocks",
    "misaligned_vector",
    "output_overrun",
    "too_much_shared",
};

// out[i] = 96 times the sum of x over the block of i, found in three ways that must agree.
__global__ void __launch_bounds__(kThreads) sums(const float* __restrict__ x, float* out, float* total, Fault fault) {
  ATTNGEO_SHARED(Cells, shared);
  const int thread = int(threadIdx.x), lane = thread % 32;
  const int64_t own = int64_t(blockIdx.x) * kThreads + thread;
  constexpr unsigned all = 0xffffffffu;
  if (fault == kSharedOfTheBlockBefore && blockIdx.x > 0) {
    out[own] = shared.cell[thread];
    return;
  }
  shared.cell[thread] = x[own];
  if (fault == kBarrierAfterReturn && thread == 5) return;
  if (fault == kDivergentBarrier) {
    if (thread < 32) __syncthreads();
    return;
  }
  if (fault == kTwoBarriers && thread < 32) {
    __syncthreads();
  } else if (fault != kMissingBarrier) {
    __syncthreads();
  }
  float sum = 0.0f;
  for (int i = 0; i < kThreads; ++i) sum += shared.cell[(thread + i) % kThreads];
  if (fault != kMissingSecondBarrier) __syncthreads();

  // The same by warps: a shuffle within each, then one through shared memory within the first lanes.
  float part = x[own];
  for (int distance = 16; distance > 0; distance /= 2) part += __shfl_xor_sync(all, part, distance);
  if (fault == kLaneMissing && lane < 16) part += __shfl_down_sync(all, part, 1) * 0.0f;
  if (fault == kLaneOutsideItsMask) part = __shfl_sync(0xffffu, part, 0);
  if (fault == kSourceOutsideMask && lane < 16) part = __shfl_sync(0xffffu, part, 20);
  if (fault == kOverlappingMasks) part = __shfl_sync(lane < 16 ? 0xffffu : 0xffffff00u, part, 12);
  if (fault == kReturnedLane) {
    if (lane == 31) return;
    part += __shfl_up_sync(all, part, 1);
  }
  if (fault == kDifferentShuffles) {
    if (lane < 16) {
      part += __shfl_xor_sync(all, part, 1);
    } else {
      part += __shfl_xor_sync(all, part, 2);
    }
  }
  shared.cell[thread] = part;
  if (fault == kShuffleForSyncwarp) {
    part += 0.0f * __shfl_sync(all, part, 0);
  } else if (fault != kMissingSyncwarp) {
    __syncwarp();
  }
  // Groups of 8 lanes pass on what another lane of the warp wrote.
  part = __shfl_sync(all, shared.cell[thread ^ 1], 3, 8);
  __syncthreads();
  shared.cell[thread] = lane == 0 ? part : 0.0f;
  __syncthreads();
  float second = 0.0f;
  for (int i = 0; i < kThreads; i += 32) second += shared.cell[i];
  const bool complete = __syncthreads_count(1) == kThreads && __all_sync(all, 1) != 0;
  out[own] = sum == second && complete ? kThreads * sum : -1.0f;

  if (fault == kSharedOverrun && thread == 7) shared.cell[kThreads + int(gridDim.x) - kBlocks] = 0.0f;
  if (fault == kSharedOverread && thread == 7) out[own] += shared.cell[kThreads + int(gridDim.x) - kBlocks];
  if (fault == kOutputOverrun && own == kBlocks * kThreads - 1) out[own + 1] = 0.0f;
  if (fault == kPlainSumAcrossBlocks && thread == 0) *total += sum;
  if (fault == kAtomicSumAcrossBlocks && thread == 0) atomicAdd(total, sum);
  if (fault == kMisalignedVector && thread == 0) out[own] += 0.0f * reinterpret_cast<const float4*>(x + own + 1)->x;
}

int check(Fault fault) {
  constexpr int count = kBlocks * kThreads;
  std::vector<float> x(count), out(count), total(1);
  std::vector<float> expected(kBlocks);
  for (int i = 0; i < count; ++i) {
    x[i] = float(i % 7 - 2);
    expected[i / kThreads] += x[i];
  }
  const int64_t shared = fault == kTooMuchShared ? attngeo::shared_memory_limit() + 1 : int64_t(sizeof(Cells));
  const char* problem = attngeo::launch(sums, kBlocks, kThreads, shared, nullptr, x.data(), out.data(), total.data(),
                                        fault);
  if (problem != nullptr) {
    std::printf("FAIL %s\n", problem);
    return 1;
  }
  float sum = 0.0f;
  for (int i = 0; i < count; ++i) {
    if (!(out[i] == kThreads * expected[i / kThreads])) {
      std::printf("FAIL value %d is %g, not %g\n", i, out[i], kThreads * expected[i / kThreads]);
      return 1;
    }
  }
  for (float part : expected) sum += part;
  const bool totals = fault == kPlainSumAcrossBlocks || fault == kAtomicSumAcrossBlocks;
  if (!(total[0] == (totals ? sum : 0.0f))) {
    std::printf("FAIL total %g, not %g\n", total[0], sum);
    return 1;
  }
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  set_order(std::strtoull(arguments[2], nullptr, 10));
  for (int i = 0; i < int(sizeof(kNames) / sizeof(*kNames)); ++i) {
    if (std::strcmp(kNames[i], arguments[1]) == 0) return check(Fault(i));
  }
  return 2;
}
