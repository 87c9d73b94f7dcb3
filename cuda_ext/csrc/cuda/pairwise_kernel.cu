// Launchers of the pairwise kernels: which instantiation, how many blocks, what lies where in the workspace. Everything
// that decides the order of a sum depends on the sizes of one slice alone.
#include "pairwise_kernel.h"

#include "pairwise_kernel.cuh"

namespace attngeo {
namespace {

// Gradients of few tokens are summed over so many parts of the other side, the rest over kMostParts: partial sums take
// memory in proportion to the tokens in both cases.
constexpr int64_t kFewTokens = 64;
constexpr int64_t kMostPartsOfFew = 64;
constexpr int64_t kMostParts = 8;
constexpr int64_t kFewestRowsAStream = 48;
// Landmarks whose weights are in memory at once in the gradient of a product, unless the rows are few.
constexpr int64_t kLandmarkGroup = 256;

int64_t padded(int64_t size, int64_t tile) { return tiles_of(size, tile) * tile; }
int64_t fewer(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t most_parts(int64_t tokens) { return tokens <= kFewTokens ? kMostPartsOfFew : kMostParts; }

template <typename T>
struct Instantiations;
template <>
struct Instantiations<float> {
  static constexpr bool kSeveral = true;
};
template <>
struct Instantiations<double> {
  static constexpr bool kSeveral = false;
};

// ---- pairwise_tile ----

template <int Op, int ColumnsPerThread, typename T>
const char* launch_tile_of(const TileArguments<T>& a, int64_t slices, void* stream) {
  using Memory = TileMemory<T, ColumnsPerThread>;
  const int64_t blocks = slices * a.parts * tiles_of(a.rows, kTileRows) * tiles_of(a.columns, Memory::kColumns);
  return launch(pairwise_tile<Op, ColumnsPerThread, T>, blocks, kTileThreads, sizeof(Memory), stream, a);
}

template <int Op, typename T>
const char* launch_tile(const TileArguments<T>& a, int64_t slices, void* stream) {
  if constexpr (Instantiations<T>::kSeveral) {
    if (a.columns <= 32) return launch_tile_of<Op, 8>(a, slices, stream);
    if (padded(a.columns, 52) < padded(a.columns, 64)) return launch_tile_of<Op, 13>(a, slices, stream);
    return launch_tile_of<Op, 16>(a, slices, stream);
  } else {
    return launch_tile_of<Op, 4>(a, slices, stream);
  }
}

// For every row of x the landmarks of y, or a part of them, dense: `landmarks` out of the sizes' from `first` on.
template <typename T>
TileArguments<T> dense_tiles(const T* x, const T* y, const T* offset, T* out, PairwiseSizes sizes, int64_t first,
                             int64_t landmarks, int64_t channels) {
  TileArguments<T> a = {};
  a.x = x;
  a.y = y + first * channels;
  a.offset = offset;
  a.out = out;
  a.rows = sizes.rows;
  a.columns = landmarks;
  a.channels = a.part_channels = a.x_width = a.y_width = channels;
  a.x_slice = sizes.rows * channels;
  a.y_slice = sizes.landmarks * channels;
  a.out_slice = sizes.rows * landmarks;
  a.parts = 1;
  return a;
}

// exp(scale * (distance - origin))
template <typename T>
const char* launch_kernel(PairwiseKind kind, const T* q, const T* k, const T* origin, T* out, PairwiseSizes sizes,
                          int64_t first, int64_t landmarks, double scale, void* stream) {
  TileArguments<T> a = dense_tiles(q, k, origin, out, sizes, first, landmarks, sizes.channels);
  a.scale = static_cast<T>(scale * kLog2E);
  return kind == kLaplacian ? launch_tile<kLaplacian>(a, sizes.slices, stream)
                            : launch_tile<kGaussian>(a, sizes.slices, stream);
}

// ---- sum_of_parts ----

template <typename T>
const char* launch_sum(const T* parts, T* out, int64_t part_count, int64_t size, void* stream) {
  return launch(sum_of_parts<T>, tiles_of(size, kSumThreads), kSumThreads, 0, stream, parts, out, part_count, size);
}

// ---- pairwise_backward ----

// How the sums of both gradients are cut up: rows into blocks, landmarks into parts of chunks dealt in turn.
struct BackwardPlan {
  int64_t row_blocks, rows_a_block, landmark_parts;
  int64_t grad_q_partial, grad_k_partial;  // numbers of workspace
};

template <typename T>
int64_t landmarks_a_chunk(int64_t landmarks) {
  if (!Instantiations<T>::kSeveral || landmarks <= 16) return 16;
  return padded(landmarks, 50) < padded(landmarks, 64) ? 50 : 64;
}

template <typename T>
BackwardPlan plan_backward(PairwiseSizes sizes, int64_t landmarks_at_once) {
  BackwardPlan plan = {};
  // Enough rows a stream to outweigh what a block does once; a block has as many streams as fit kBackwardThreads.
  const int64_t streams = sizes.channels <= 16 ? 8 : sizes.channels <= 32 ? 4 : sizes.channels <= 64 ? 2 : 1;
  const int64_t fewest = tiles_of(sizes.rows, most_parts(sizes.landmarks));
  plan.rows_a_block = padded(fewest > streams * kFewestRowsAStream ? fewest : streams * kFewestRowsAStream,
                             kBackwardRows);
  plan.row_blocks = tiles_of(sizes.rows, plan.rows_a_block);
  const int64_t chunks = tiles_of(landmarks_at_once, landmarks_a_chunk<T>(landmarks_at_once));
  plan.landmark_parts = fewer(chunks, most_parts(sizes.rows));
  const int64_t q_size = sizes.slices * sizes.rows * sizes.channels;
  const int64_t k_size = sizes.slices * sizes.landmarks * sizes.channels;
  plan.grad_q_partial = plan.landmark_parts > 1 ? plan.landmark_parts * q_size : 0;
  plan.grad_k_partial = plan.row_blocks > 1 ? plan.row_blocks * k_size : 0;
  return plan;
}

template <int Kind, int Half, typename T>
const char* launch_backward_of(BackwardArguments<T> a, int64_t slices, void* stream) {
  using Memory = BackwardMemory<T, Half>;
  a.landmark_parts = fewer(a.landmark_parts, tiles_of(a.landmarks, Memory::kLandmarks));
  const int64_t blocks = slices * a.row_blocks * a.landmark_parts * tiles_of(a.channels, kBackwardChannels);
  return launch(pairwise_backward<Kind, Half, T>, blocks, kBackwardThreads, sizeof(Memory), stream, a);
}

template <int Kind, typename T>
const char* launch_backward(const BackwardArguments<T>& a, int64_t slices, void* stream) {
  if constexpr (Instantiations<T>::kSeveral) {
    const int64_t chunk = landmarks_a_chunk<T>(a.landmarks);
    if (chunk == 50) return launch_backward_of<Kind, 25>(a, slices, stream);
    if (chunk == 64) return launch_backward_of<Kind, 32>(a, slices, stream);
  }
  return launch_backward_of<Kind, 8>(a, slices, stream);
}

// Both gradients, up to sum_gradients, from `landmarks` landmarks out of the sizes' from `first` on, whose weights are
// grad * kernel, dense.
template <typename T>
const char* launch_gradients(PairwiseKind kind, const BackwardPlan& plan, const T* grad, const T* kernel, const T* q,
                             const T* k, T* grad_q, T* grad_k, PairwiseSizes sizes, int64_t first, int64_t landmarks,
                             double scale, void* stream) {
  BackwardArguments<T> a = {};
  a.grad = grad;
  a.kernel = kernel;
  a.q = q;
  a.k = k + first * sizes.channels;
  a.grad_q = grad_q;
  a.grad_k = grad_k + first * sizes.channels;
  a.rows = sizes.rows;
  a.landmarks = landmarks;
  a.channels = sizes.channels;
  a.k_slice = sizes.landmarks * sizes.channels;
  a.row_blocks = plan.row_blocks;
  a.rows_a_block = plan.rows_a_block;
  a.grad_k_part = sizes.slices * a.k_slice;
  a.landmark_parts = plan.landmark_parts;
  a.grad_q_part = sizes.slices * sizes.rows * sizes.channels;
  a.scale = static_cast<T>(scale);
  a.accumulate = first > 0;
  return kind == kLaplacian ? launch_backward<kLaplacian>(a, sizes.slices, stream)
                            : launch_backward<kGaussian>(a, sizes.slices, stream);
}

template <typename T>
const char* sum_gradients(const BackwardPlan& plan, const T* q_partial, const T* k_partial, T* grad_q, T* grad_k,
                          PairwiseSizes sizes, void* stream) {
  const char* problem = nullptr;
  if (plan.grad_q_partial > 0) {
    problem = launch_sum(q_partial, grad_q, plan.landmark_parts, sizes.slices * sizes.rows * sizes.channels, stream);
  }
  if (problem == nullptr && plan.grad_k_partial > 0) {
    problem = launch_sum(k_partial, grad_k, plan.row_blocks, sizes.slices * sizes.landmarks * sizes.channels, stream);
  }
  return problem;
}

// ---- pairwise_matmul ----

template <int Kind, int RowsPerThread, int ColumnsPerThread, int Splits, int Warps, int ValueQuads, typename T>
const char* launch_matmul_of(const MatmulArguments<T>& a, void* stream) {
  using Memory = MatmulMemory<T, RowsPerThread, ColumnsPerThread, Splits, Warps, ValueQuads>;
  const int64_t value_tiles = a.sizes.values == 0 ? 1 : tiles_of(a.sizes.values, Memory::kValues);
  return launch(pairwise_matmul<Kind, RowsPerThread, ColumnsPerThread, Splits, Warps, ValueQuads, T>,
                a.sizes.slices * tiles_of(a.sizes.rows, Memory::kRows) * value_tiles, Warps * kWarp, sizeof(Memory),
                stream, a);
}

template <int Kind, typename T>
const char* launch_matmul(const MatmulArguments<T>& a, void* stream) {
  if constexpr (Instantiations<T>::kSeveral) {
    // One chunk of landmarks leaves nothing to share out among warps.
    if (a.sizes.landmarks > 0 && a.sizes.landmarks <= 52) {
      return a.sizes.values <= 32 ? launch_matmul_of<Kind, 4, 13, 1, 2, 2>(a, stream)
                                  : launch_matmul_of<Kind, 4, 13, 1, 2, 4>(a, stream);
    }
    // Few rows, as for the product with the transposed kernel: more blocks of fewer rows.
    if (a.sizes.rows <= kFewTokens) {
      return a.sizes.values <= 32 ? launch_matmul_of<Kind, 2, 4, 4, 4, 2>(a, stream)
                                  : launch_matmul_of<Kind, 2, 4, 4, 4, 4>(a, stream);
    }
    // Chunks of 112 divide 28^2 and 56^2 tokens; a pair in them costs 12/13 of one in chunks of 64.
    if (12 * padded(a.sizes.landmarks, 112) <= 13 * padded(a.sizes.landmarks, 64)) {
      return a.sizes.values <= 32 ? launch_matmul_of<Kind, 4, 7, 4, 4, 2>(a, stream)
                                  : launch_matmul_of<Kind, 4, 7, 4, 4, 4>(a, stream);
    }
    return a.sizes.values <= 32 ? launch_matmul_of<Kind, 4, 4, 4, 4, 2>(a, stream)
                                : launch_matmul_of<Kind, 4, 4, 4, 4, 4>(a, stream);
  } else {
    return launch_matmul_of<Kind, 2, 4, 4, 4, 2>(a, stream);
  }
}

// ---- what the torch side calls ----

template <typename T>
const char* forward(PairwiseKind kind, const T* q, const T* k, T* out, PairwiseSizes sizes, double scale, int device,
                    void* stream) {
  OnDevice guard(device);
  if (guard.problem() != nullptr) return guard.problem();
  return launch_kernel<T>(kind, q, k, nullptr, out, sizes, 0, sizes.landmarks, scale, stream);
}

bool any_pair(PairwiseSizes sizes) { return sizes.slices > 0 && sizes.rows > 0 && sizes.landmarks > 0; }

template <typename T>
int64_t backward_workspace(PairwiseSizes sizes) {
  if (!any_pair(sizes)) return 0;
  const BackwardPlan plan = plan_backward<T>(sizes, sizes.landmarks);
  return plan.grad_q_partial + plan.grad_k_partial;
}

template <typename T>
const char* zero(T* out, int64_t size, void* stream) {
  return launch_sum<T>(nullptr, out, 0, size, stream);
}

template <typename T>
const char* backward(PairwiseKind kind, const T* grad, const T* kernel, const T* q, const T* k, T* grad_q, T* grad_k,
                     T* workspace, PairwiseSizes sizes, double scale, int device, void* stream) {
  OnDevice guard(device);
  if (guard.problem() != nullptr) return guard.problem();
  if (!any_pair(sizes)) {
    const char* problem = zero(grad_q, sizes.slices * sizes.rows * sizes.channels, stream);
    return problem != nullptr ? problem : zero(grad_k, sizes.slices * sizes.landmarks * sizes.channels, stream);
  }
  const BackwardPlan plan = plan_backward<T>(sizes, sizes.landmarks);
  T* q_target = plan.grad_q_partial > 0 ? workspace : grad_q;
  T* k_target = plan.grad_k_partial > 0 ? workspace + plan.grad_q_partial : grad_k;
  const char* problem = launch_gradients(kind, plan, grad, kernel, q, k, q_target, k_target, sizes, 0, sizes.landmarks,
                                         scale, stream);
  return problem != nullptr ? problem : sum_gradients(plan, q_target, k_target, grad_q, grad_k, sizes, stream);
}

template <typename T>
const char* matmul_forward(PairwiseKind kind, const T* q, const T* k, const T* v, T* out, T* origin, T* total,
                           PairwiseSizes sizes, double scale, bool normalize, int device, void* stream) {
  OnDevice guard(device);
  if (guard.problem() != nullptr) return guard.problem();
  const MatmulArguments<T> a = {q, k, v, out, origin, total, sizes, static_cast<T>(scale * kLog2E), normalize};
  return kind == kLaplacian ? launch_matmul<kLaplacian>(a, stream) : launch_matmul<kGaussian>(a, stream);
}

// The gradient of a product goes through weights in memory, a group of landmarks at a time.
template <typename T>
struct MatmulBackwardPlan {
  int64_t group;
  BackwardPlan gradients;
  int64_t weights;         // numbers of each of kernel and grad v^T - delta
  int64_t grad_v_partial;  // numbers

  explicit MatmulBackwardPlan(PairwiseSizes sizes) {
    group = sizes.rows <= kFewTokens ? sizes.landmarks : fewer(sizes.landmarks, kLandmarkGroup);
    gradients = plan_backward<T>(sizes, group);
    weights = sizes.slices * sizes.rows * group;
    grad_v_partial =
        gradients.row_blocks > 1 ? gradients.row_blocks * sizes.slices * sizes.landmarks * sizes.values : 0;
  }
};

template <typename T>
int64_t matmul_backward_workspace(PairwiseSizes sizes) {
  if (!any_pair(sizes)) return 0;
  const MatmulBackwardPlan<T> plan(sizes);
  return plan.gradients.grad_q_partial + plan.gradients.grad_k_partial + plan.grad_v_partial + 2 * plan.weights;
}

template <typename T>
const char* matmul_backward(PairwiseKind kind, const T* grad, const T* q, const T* k, const T* v, const T* origin,
                            const T* delta, T* grad_q, T* grad_k, T* grad_v, T* workspace, PairwiseSizes sizes,
                            double scale, int device, void* stream) {
  OnDevice guard(device);
  if (guard.problem() != nullptr) return guard.problem();
  const int64_t v_size = sizes.slices * sizes.landmarks * sizes.values;
  const char* problem = nullptr;
  if (!any_pair(sizes)) {
    problem = zero(grad_q, sizes.slices * sizes.rows * sizes.channels, stream);
    if (problem == nullptr) problem = zero(grad_k, sizes.slices * sizes.landmarks * sizes.channels, stream);
    return problem != nullptr ? problem : zero(grad_v, v_size, stream);
  }
  const MatmulBackwardPlan<T> plan(sizes);
  T* kernel = workspace;
  T* grad_exponent = kernel + plan.weights;
  T* partial = grad_exponent + plan.weights;
  T* q_target = plan.gradients.grad_q_partial > 0 ? partial : grad_q;
  partial += plan.gradients.grad_q_partial;
  T* k_target = plan.gradients.grad_k_partial > 0 ? partial : grad_k;
  partial += plan.gradients.grad_k_partial;
  T* v_target = plan.grad_v_partial > 0 ? partial : grad_v;

  for (int64_t first = 0; first < sizes.landmarks && problem == nullptr; first += plan.group) {
    const int64_t landmarks = fewer(plan.group, sizes.landmarks - first);
    problem = launch_kernel(kind, q, k, origin, kernel, sizes, first, landmarks, scale, stream);
    if (problem == nullptr) {  // grad v^T - delta
      const TileArguments<T> product =
          dense_tiles(grad, v, delta, grad_exponent, sizes, first, landmarks, sizes.values);
      problem = launch_tile<kProduct>(product, sizes.slices, stream);
    }
    if (problem == nullptr) {
      problem = launch_gradients(kind, plan.gradients, grad_exponent, kernel, q, k, q_target, k_target, sizes, first,
                                 landmarks, scale, stream);
    }

    TileArguments<T> across = {};  // kernel^T grad, over the blocks of rows
    across.x = kernel;
    across.y = grad;
    across.out = v_target + first * sizes.values;
    across.rows = landmarks;
    across.columns = sizes.values;
    across.channels = sizes.rows;
    across.x_slice = sizes.rows * landmarks;
    across.x_width = landmarks;
    across.y_slice = sizes.rows * sizes.values;
    across.y_width = sizes.values;
    across.out_slice = sizes.landmarks * sizes.values;
    across.transposed = true;
    across.parts = plan.gradients.row_blocks;
    across.part_channels = plan.gradients.rows_a_block;
    across.out_part = v_size;
    if (problem == nullptr) problem = launch_tile<kProduct>(across, sizes.slices, stream);
  }
  if (problem == nullptr && plan.grad_v_partial > 0) {
    problem = launch_sum(v_target, grad_v, plan.gradients.row_blocks, v_size, stream);
  }
  return problem != nullptr ? problem
                            : sum_gradients(plan.gradients, q_target, k_target, grad_q, grad_k, sizes, stream);
}

}  // namespace
}  // namespace attngeo

using attngeo::PairwiseKind;
using attngeo::PairwiseSizes;

extern "C" {

#define ATTNGEO_PAIRWISE_LAUNCHERS(T, suffix)                                                                         \
  const char* attngeo_pairwise_forward_##suffix(PairwiseKind kind, const T* q, const T* k, T* out,                    \
                                                PairwiseSizes sizes, double scale, int device, void* stream) {        \
    return attngeo::forward(kind, q, k, out, sizes, scale, device, stream);                                           \
  }                                                                                                                   \
  int64_t attngeo_pairwise_backward_workspace_##suffix(PairwiseKind, PairwiseSizes sizes) {                           \
    return attngeo::backward_workspace<T>(sizes);                                                                     \
  }                                                                                                                   \
  const char* attngeo_pairwise_backward_##suffix(PairwiseKind kind, const T* grad, const T* kernel, const T* q,       \
                                                 const T* k, T* grad_q, T* grad_k, T* workspace, PairwiseSizes sizes, \
                                                 double scale, int device, void* stream) {                            \
    return attngeo::backward(kind, grad, kernel, q, k, grad_q, grad_k, workspace, sizes, scale, device, stream);      \
  }                                                                                                                   \
  const char* attngeo_pairwise_matmul_forward_##suffix(PairwiseKind kind, const T* q, const T* k, const T* v, T* out, \
                                                       T* origin, T* total, PairwiseSizes sizes, double scale,        \
                                                       bool normalize, int device, void* stream) {                    \
    return attngeo::matmul_forward(kind, q, k, v, out, origin, total, sizes, scale, normalize, device, stream);       \
  }                                                                                                                   \
  int64_t attngeo_pairwise_matmul_backward_workspace_##suffix(PairwiseKind, PairwiseSizes sizes) {                    \
    return attngeo::matmul_backward_workspace<T>(sizes);                                                              \
  }                                                                                                                   \
  const char* attngeo_pairwise_matmul_backward_##suffix(                                                              \
      PairwiseKind kind, const T* grad, const T* q, const T* k, const T* v, const T* origin, const T* delta,          \
      T* grad_q, T* grad_k, T* grad_v, T* workspace, PairwiseSizes sizes, double scale, int device, void* stream) {   \
    return attngeo::matmul_backward(kind, grad, q, k, v, origin, delta, grad_q, grad_k, grad_v, workspace, sizes,     \
                                    scale, device, stream);                                                           \
  }

ATTNGEO_PAIRWISE_LAUNCHERS(float, f32)
ATTNGEO_PAIRWISE_LAUNCHERS(double, f64)
#undef ATTNGEO_PAIRWISE_LAUNCHERS
}
