// Launchers of the batched inverses: which kernel serves which size. No torch header: it would cost minutes of
// compilation.
#include "inverse.h"

#include <algorithm>

#include "inverse.cuh"

namespace {

using namespace attngeo::inverses;
using attngeo::launch;
using attngeo::NewtonSchulzStart;
using attngeo::OnDevice;

// Every GPU since 2018 lets a block have this much shared memory, so that no workspace is needed below it.
constexpr int64_t kSharedEverywhere = 64 * 1024;

int round_up(int64_t number, int multiple) { return int((number + multiple - 1) / multiple * multiple); }

// Sizes up to which a thread takes 4, 7 and 8 rows, so that few threads and registers stand idle at 49 and at 64.
constexpr int64_t kSmallest = 32, kMiddle = 56, kLarge = 64;
// Beyond, either the registers of a block or the shared memory of every GPU are too few.
template <typename T>
constexpr int64_t kLargestInShared = sizeof(T) == 4 ? 128 : 96;
constexpr int kSmallestThreads = 64, kMiddleThreads = 128, kLargeThreads = 128;
template <typename T>
constexpr int kLargestThreads = sizeof(T) == 4 ? 512 : 288;

// An odd number of vectors a row keeps neighbouring rows in different banks.
template <typename T>
constexpr int odd_leading(int64_t columns) {
  const int vectors = int((columns + kVector<T> - 1) / kVector<T>);
  return (vectors + 1 - vectors % 2) * kVector<T>;
}

template <typename T>
SharedLayout shared_layout(int64_t size) {
  const int rows_a_thread = size <= kSmallest ? 4 : size <= kMiddle ? 7 : 8;
  constexpr int kColumns = kTileChunks<T> * kVector<T>;
  SharedLayout layout;
  layout.size = int(size);
  layout.rows = round_up(size, 2 * rows_a_thread);
  layout.threads_across = std::max(2, round_up((size + kColumns - 1) / kColumns, 2));
  layout.leading = odd_leading<T>(size <= kSmallest ? kSmallest
                                  : size <= kMiddle ? kMiddle
                                  : size <= kLarge  ? kLarge
                                                    : layout.threads_across * kColumns);
  layout.threads = std::max(kWarp, round_up(int64_t(layout.rows) / rows_a_thread * layout.threads_across, kWarp));
  return layout;
}

template <typename T>
int64_t shared_bytes(const SharedLayout& layout) {
  const int64_t norms = 2 * layout.threads / kWarp;
  return std::max(int64_t(3) * layout.rows * layout.leading, norms) * int64_t(sizeof(T));
}

template <typename T>
int64_t newton_schulz_workspace(int64_t matrices, int64_t size) {
  if (size <= kLargestInShared<T> && shared_bytes<T>(shared_layout<T>(size)) <= kSharedEverywhere) return 0;
  return matrices * (2 * size * size + tiles_of(size) * tiles_of(size));
}

template <typename T>
const char* newton_schulz_large(const T* W, T* inverse, T* residual, T* workspace, int64_t matrices, int64_t size,
                                int64_t iterations, double eps, bool identity, void* stream) {
  const int64_t entries = size * size, tiles = tiles_of(size) * tiles_of(size);
  T* const product = workspace;
  T* const other = product + matrices * entries;
  T* const squares = other + matrices * entries;
  T* X = iterations % 2 == 0 ? inverse : other;
  T* next = iterations % 2 == 0 ? other : inverse;
  const char* problem = launch(newton_schulz_start<T>, matrices, kStartThreads, sizeof(StartScratch<T>), stream, W, X,
                               size, T(eps), identity);
  const auto multiply = [&](Use use, const T* left, double diagonal, const T* right, T* out) {
    ProductTask<T> task{};
    task.left = {left, entries, size};
    task.right = {right, entries, size};
    task.rows = task.columns = task.depth = size;
    task.left_diagonal = T(diagonal);
    task.use = use;
    task.old = left;
    task.out = out;
    task.out_stride = entries;
    task.out_leading = size;
    return launch(product_tile<T>, matrices * tiles, kTileThreads, sizeof(Panels<T>), stream, task);
  };
  for (int64_t iteration = 0; iteration < iterations && problem == nullptr; ++iteration) {
    problem = multiply(Use::kProduct, W, eps, X, product);
    if (problem == nullptr) problem = multiply(Use::kNewtonStep, X, 0.0, product, next);
    std::swap(X, next);
  }
  if (problem == nullptr) problem = multiply(Use::kResidual, W, eps, X, squares);
  if (problem != nullptr) return problem;
  const int64_t blocks = (matrices + kStartThreads - 1) / kStartThreads;
  return launch(newton_schulz_residual<T>, blocks, kStartThreads, 0, stream, squares, residual, matrices, tiles);
}

template <typename T>
const char* newton_schulz(const T* W, T* inverse, T* residual, T* workspace, int64_t matrices, int64_t size,
                          int64_t iterations, double eps, NewtonSchulzStart start, int device, void* stream) {
  const OnDevice on_device(device);
  if (on_device.problem() != nullptr) return on_device.problem();
  const bool identity = start == attngeo::kIdentityStart;
  if (size <= kLargestInShared<T>) {
    const SharedLayout layout = shared_layout<T>(size);
    const int64_t bytes = shared_bytes<T>(layout);
    if (bytes <= kSharedEverywhere || bytes <= attngeo::shared_memory_limit()) {
      constexpr int kChunks = kTileChunks<T>;
      const auto kernel =
          size <= kSmallest
              ? newton_schulz_in_shared_memory<T, 4, kChunks, odd_leading<T>(kSmallest), kSmallestThreads>
          : size <= kMiddle ? newton_schulz_in_shared_memory<T, 7, kChunks, odd_leading<T>(kMiddle), kMiddleThreads>
          : size <= kLarge  ? newton_schulz_in_shared_memory<T, 8, kChunks, odd_leading<T>(kLarge), kLargeThreads>
                            : newton_schulz_in_shared_memory<T, 8, kChunks, 0, kLargestThreads<T>>;
      return launch(kernel, matrices, layout.threads, bytes, stream, W, inverse, residual, layout, iterations, T(eps),
                    identity);
    }
  }
  return newton_schulz_large(W, inverse, residual, workspace, matrices, size, iterations, eps, identity, stream);
}

// Largest sizes for which a thread takes a square of 4, 8 or 12 numbers a side; the last one is the largest whose lower
// triangle fits in the registers of a block.
template <typename T>
constexpr int64_t kLargestWith4 = sizeof(T) == 4 ? 64 : 128;
constexpr int64_t kLargestWith8 = 128, kLargestWith12 = 256;
template <typename T>
constexpr int64_t kLargestInRegisters = sizeof(T) == 4 ? kLargestWith12 : kLargestWith4<T>;

constexpr int threads_for_triangle(int64_t size, int tile) {
  const int tiles = int((size + tile - 1) / tile);
  const int threads = (tiles * (tiles + 1) / 2 + kWarp - 1) / kWarp * kWarp;
  return threads == 0 ? kWarp : threads;
}

template <typename T, int kSide, int64_t kLargest, Elimination kKind>
const char* eliminate(const T* W, T* out, int32_t* failed_pivot, int64_t matrices, const SpdLayout& layout, double eps,
                      void* stream) {
  const int64_t bytes = int64_t(2 * round_up(layout.size, kSide) + 2) * int64_t(sizeof(T));
  return launch(eliminate_in_registers<T, kSide, threads_for_triangle(kLargest, kSide), kKind>, matrices,
                threads_for_triangle(layout.size, kSide), bytes, stream, W, out, failed_pivot, layout, T(eps));
}

template <typename T>
const char* spd_inverse_small(const T* W, T* inverse, int32_t* failed_pivot, int64_t matrices, int64_t size, double eps,
                              void* stream) {
  constexpr Elimination kKind = Elimination::kInverse;
  const SpdLayout layout{int(size), size * size, size, size * size, size, 0};
  if constexpr (kLargestInRegisters<T> > kLargestWith4<T>) {
    if (size > kLargestWith8) {
      return eliminate<T, 12, kLargestWith12, kKind>(W, inverse, failed_pivot, matrices, layout, eps, stream);
    }
    if (size > kLargestWith4<T>) {
      return eliminate<T, 8, kLargestWith8, kKind>(W, inverse, failed_pivot, matrices, layout, eps, stream);
    }
  }
  return eliminate<T, 4, kLargestWith4<T>, kKind>(W, inverse, failed_pivot, matrices, layout, eps, stream);
}

template <typename T>
int64_t spd_inverse_workspace(int64_t matrices, int64_t size) {
  return size <= kLargestInRegisters<T> ? 0 : matrices * (size * size + 2 * size * kTile + kTile * kTile);
}

// Sweeps of kTile pivots at once. With the square D = L L^T of the pivots, their columns C and G = L^-1, the new matrix
// is A - U U^T for U = C G^T, and U G in the pivots' columns, where U = -G^T in the pivots' own rows. (With D^-1 in
// place of its factor, rounding errors would grow with the condition number of D and not with its root.)
template <typename T>
const char* spd_inverse_large(const T* W, T* inverse, int32_t* failed_pivot, T* workspace, int64_t matrices,
                              int64_t size, double eps, void* stream) {
  const int64_t entries = size * size, sweeps = tiles_of(size);
  T* const other = workspace;
  T* const U = other + matrices * entries;
  T* const new_columns = U + matrices * size * kTile;
  T* const G = new_columns + matrices * size * kTile;
  T* A = sweeps % 2 == 0 ? inverse : other;
  T* next = sweeps % 2 == 0 ? other : inverse;
  const char* problem = launch(spd_inverse_start<T>, matrices, kStartThreads, 0, stream, W, A, size, T(eps));
  for (int64_t first = 0; first < size && problem == nullptr; first += kTile) {
    const int64_t pivots = std::min(int64_t(kTile), size - first);
    const SpdLayout layout{int(pivots), entries, size, kTile * kTile, kTile, int(first)};
    const T* const D = A + first * size + first;
    problem = eliminate<T, 4, kTile, Elimination::kCholesky>(D, G, failed_pivot, matrices, layout, 0.0, stream);
    ProductTask<T> task{};
    task.failed_pivot = failed_pivot;
    task.first_pivot = first;
    task.pivots = pivots;
    task.rows = size;
    task.depth = pivots;
    const auto multiply = [&](Use use, Factor<T> left, Factor<T> right, bool transposed, int64_t columns, T* out,
                              int64_t out_leading) {
      if (problem != nullptr) return;
      task.use = use;
      task.left = left;
      task.right = right;
      task.right_transposed = transposed;
      task.columns = columns;
      task.out = out;
      task.out_stride = size * out_leading;
      task.out_leading = out_leading;
      problem = launch(product_tile<T>, matrices * sweeps * tiles_of(columns), kTileThreads, sizeof(Panels<T>), stream,
                       task);
    };
    const Factor<T> factor_of_D{G, kTile * kTile, kTile}, factor_of_update{U, size * kTile, kTile};
    multiply(Use::kPivotColumns, {A + first, entries, size}, factor_of_D, true, pivots, U, kTile);
    multiply(Use::kProduct, factor_of_update, factor_of_D, false, pivots, new_columns, kTile);
    task.old = A;
    task.new_columns = new_columns;
    task.last_sweep = first + kTile >= size;
    multiply(Use::kSweep, factor_of_update, factor_of_update, true, size, next, size);
    std::swap(A, next);
  }
  return problem;
}

template <typename T>
const char* spd_inverse(const T* W, T* inverse, int32_t* failed_pivot, T* workspace, int64_t matrices, int64_t size,
                        double eps, int device, void* stream) {
  const OnDevice on_device(device);
  if (on_device.problem() != nullptr) return on_device.problem();
  if (size > kLargestInRegisters<T>) {
    return spd_inverse_large(W, inverse, failed_pivot, workspace, matrices, size, eps, stream);
  }
  return spd_inverse_small(W, inverse, failed_pivot, matrices, size, eps, stream);
}

}  // namespace

extern "C" {

#define ATTNGEO_INVERSE_LAUNCHERS(T, suffix)                                                                          \
  int64_t attngeo_newton_schulz_workspace_##suffix(int64_t matrices, int64_t size) {                                  \
    return newton_schulz_workspace<T>(matrices, size);                                                                \
  }                                                                                                                   \
  const char* attngeo_newton_schulz_##suffix(const T* W, T* inverse, T* residual, T* workspace, int64_t matrices,     \
                                             int64_t size, int64_t iterations, double eps, NewtonSchulzStart start,   \
                                             int device, void* stream) {                                              \
    return newton_schulz(W, inverse, residual, workspace, matrices, size, iterations, eps, start, device, stream);    \
  }                                                                                                                   \
  int64_t attngeo_spd_inverse_workspace_##suffix(int64_t matrices, int64_t size) {                                    \
    return spd_inverse_workspace<T>(matrices, size);                                                                  \
  }                                                                                                                   \
  const char* attngeo_spd_inverse_##suffix(const T* W, T* inverse, int32_t* failed_pivot, T* workspace,               \
                                           int64_t matrices, int64_t size, double eps, int device, void* stream) {    \
    return spd_inverse(W, inverse, failed_pivot, workspace, matrices, size, eps, device, stream);                     \
  }

ATTNGEO_INVERSE_LAUNCHERS(float, f32)
ATTNGEO_INVERSE_LAUNCHERS(double, f64)
#undef ATTNGEO_INVERSE_LAUNCHERS
}
