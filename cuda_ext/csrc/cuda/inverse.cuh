// Bodies of the batched inverses of P = W + eps I. Every sum has a fixed order that depends on the size alone, so that
// a matrix gives the same bits in any batch.
#pragma once
#include <cstdint>

#include "launch.cuh"

namespace attngeo::inverses {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

template <typename T>
constexpr int kVector = 16 / int(sizeof(T));  // numbers in the widest access to memory

template <typename T>
struct alignas(16) Vector {
  T lane[kVector<T>];
};

template <typename T>
__device__ inline Vector<T> load(const T* from) {
  return *reinterpret_cast<const Vector<T>*>(from);
}

template <typename T>
__device__ inline void store(T* to, const Vector<T>& vector) {
  *reinterpret_cast<Vector<T>*>(to) = vector;
}

// The larger number, or NaN if there is one: fmax would hide it.
template <typename T>
__device__ inline T larger(T a, T b) {
  return a > b || a != a ? a : b;
}

// Call body(row, column) for every entry of a square matrix, a warp a row.
template <typename Size, typename Body>
__device__ inline void for_each_entry(Size size, int threads, Body body) {
  for (Size row = threadIdx.x / kWarp; row < size; row += threads / kWarp) {
    for (Size column = threadIdx.x % kWarp; column < size; column += kWarp) body(row, column);
  }
}

// The sum over the block, the same bits in every thread. `scratch` has a number for each warp.
template <typename T>
__device__ inline T sum_of_block(T value, T* scratch, int threads) {
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
  T sum = T(0);
  for (int warp = 0; warp < threads / kWarp; ++warp) sum += scratch[warp];
  return sum;
}

// The factor of the first X from P(row, column): 1.8 / (||P||_1 ||P||_inf) or 1 / ||P||_inf, where a zero norm gives 0
// and NaN stays NaN. `scratch` has two numbers for each warp.
template <typename T, typename Size, typename Entry>
__device__ inline T start_factor(Entry entry, Size size, bool identity, T* scratch, int threads) {
  T row_norm = T(0), column_norm = T(0);
  for (Size line = threadIdx.x; line < size; line += threads) {
    T row = T(0), column = T(0);
#pragma unroll 4
    for (Size other = 0; other < size; ++other) {
      row += fabs(entry(line, other));
      column += fabs(entry(other, line));
    }
    row_norm = larger(row_norm, row);
    column_norm = larger(column_norm, column);
  }
  for (int step = kWarp / 2; step > 0; step /= 2) {
    row_norm = larger(row_norm, __shfl_xor_sync(kAllLanes, row_norm, step));
    column_norm = larger(column_norm, __shfl_xor_sync(kAllLanes, column_norm, step));
  }
  const int warps = threads / kWarp;
  if (threadIdx.x % kWarp == 0) {
    scratch[threadIdx.x / kWarp] = row_norm;
    scratch[warps + threadIdx.x / kWarp] = column_norm;
  }
  __syncthreads();
  for (int warp = 0; warp < warps; ++warp) {
    row_norm = larger(row_norm, scratch[warp]);
    column_norm = larger(column_norm, scratch[warps + warp]);
  }
  const T row_reciprocal = row_norm == T(0) ? T(0) : T(1) / row_norm;
  const T column_reciprocal = column_norm == T(0) ? T(0) : T(1) / column_norm;
  return identity ? row_reciprocal : T(1.8) * column_reciprocal * row_reciprocal;
}

// Which part of a matrix product a thread computes: kRows rows and kChunks vectors of columns. Four neighbouring
// threads cover a square of such parts: lanes that differ in bit 0 read the same columns of the right factor, lanes
// that differ in bit 1 the same rows of the left one. Shared memory serves a warp's 16-byte reads of that pattern in
// two passes, and in four otherwise. Rows of two neighbours alternate, so that they lie in different banks where a row
// is an odd number of vectors long.
template <typename T, int kRows, int kChunks>
struct Part {
  static constexpr int kColumns = kChunks * kVector<T>;
  int first_row, first_column, chunk_stride;

  __device__ explicit Part(int threads_across) {
    const int quad = threadIdx.x / 4, quads_across = threads_across / 2;
    first_row = quad / quads_across * (2 * kRows) + threadIdx.x % 2;
    first_column = (quad % quads_across * 2 + threadIdx.x / 2 % 2) * kVector<T>;
    chunk_stride = threads_across * kVector<T>;
  }
  __device__ int row(int i) const { return first_row + 2 * i; }
  __device__ int column(int j) const { return first_column + j / kVector<T> * chunk_stride + j % kVector<T>; }
};

// sum += left right over `depth` columns of left; both start at this thread's part.
template <typename T, int kRows, int kChunks>
__device__ inline void add_product(T (&sum)[kRows][kChunks * kVector<T>], const T* left, int left_leading,
                                   const T* right, int right_leading, int chunk_stride, int depth) {
  constexpr int kLanes = kVector<T>;
  int k = 0;
#pragma unroll 2
  for (; k + kLanes <= depth; k += kLanes) {
    Vector<T> a[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) a[i] = load(left + 2 * i * left_leading + k);
#pragma unroll
    for (int step = 0; step < kLanes; ++step, right += right_leading) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const Vector<T> b = load(right + chunk * chunk_stride);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
          for (int lane = 0; lane < kLanes; ++lane) sum[i][chunk * kLanes + lane] += a[i].lane[step] * b.lane[lane];
        }
      }
    }
  }
#pragma unroll 1
  for (; k < depth; ++k, right += right_leading) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const Vector<T> b = load(right + chunk * chunk_stride);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const T a = left[2 * i * left_leading + k];
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) sum[i][chunk * kLanes + lane] += a * b.lane[lane];
      }
    }
  }
}

struct SharedLayout {
  int size;
  int rows, leading;  // of P, X and Y; rows and columns beyond size are read and have no effect
  int threads, threads_across;
};

// Newton-Schulz with P, X and Y = P X in shared memory. One block a matrix.
// kLeading is layout.leading, where it is known to the compiler, or 0.
template <typename T, int kRows, int kChunks, int kLeading, int kMostThreads>
__global__ void __launch_bounds__(kMostThreads)
newton_schulz_in_shared_memory(const T* __restrict__ W, T* __restrict__ inverse, T* __restrict__ residual,
                               SharedLayout layout, int64_t iterations, T eps, bool identity_start) {
  using Own = Part<T, kRows, kChunks>;
  ATTNGEO_SHARED(T, numbers);
  const int size = layout.size, leading = kLeading != 0 ? kLeading : layout.leading, threads = layout.threads;
  T* const P = &numbers;
  T* const X = P + layout.rows * leading;
  T* const Y = X + layout.rows * leading;
  const int64_t entries = int64_t(size) * size;
  W += blockIdx.x * entries;
  inverse += blockIdx.x * entries;

  for_each_entry(size, threads, [=](int row, int column) {
    P[row * leading + column] = W[row * size + column] + (row == column ? eps : T(0));
  });
  __syncthreads();
  const auto entry_of_P = [=](int row, int column) { return P[row * leading + column]; };
  const T factor = start_factor(entry_of_P, size, identity_start, Y, threads);
  for_each_entry(size, threads, [=](int row, int column) {
    X[row * leading + column] = factor * (identity_start ? T(row == column) : entry_of_P(column, row));
  });
  __syncthreads();

  const Own own(layout.threads_across);
  const bool working = own.first_row < size && own.first_column < size;
  const int first_entry = own.first_row * leading + own.first_column;
  // One loop for both products of an iteration and for the residual's keeps the code small.
  for (int64_t product = 0; product <= 2 * iterations; ++product) {
    const bool with_P = product % 2 == 0;
    T sum[kRows][Own::kColumns] = {};
    if (working) {
      add_product<T, kRows, kChunks>(sum, (with_P ? P : X) + own.first_row * leading, leading,
                                     (with_P ? X : Y) + own.first_column, leading, own.chunk_stride, size);
    }
    if (product == 2 * iterations) {
      T squares = T(0);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < Own::kColumns; ++j) {
          const T error = T(own.row(i) == own.column(j)) - sum[i][j];
          if (working && own.row(i) < size && own.column(j) < size) squares += error * error;
        }
      }
      squares = sum_of_block(squares, Y, threads);
      if (threadIdx.x == 0) residual[blockIdx.x] = isfinite(squares) ? sqrt(squares) : T(INFINITY);
      break;
    }
    if (!with_P) __syncthreads();  // X is read until here
    if (working) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          T* const to = (with_P ? Y : X) + first_entry + 2 * i * leading + chunk * own.chunk_stride;
          Vector<T> result;
          if (!with_P) result = load(to);
#pragma unroll
          for (int lane = 0; lane < kVector<T>; ++lane) {
            const T entry = sum[i][chunk * kVector<T> + lane];
            result.lane[lane] = with_P ? entry : T(2) * result.lane[lane] - entry;
          }
          store(to, result);
        }
      }
    }
    __syncthreads();
  }
  for_each_entry(size, threads, [=](int row, int column) { inverse[row * size + column] = X[row * leading + column]; });
}

// kInverse: symmetric Gauss-Jordan elimination ("sweeps"), after which the matrix is -P^-1. kCholesky: the inverse of
// the Cholesky factor, by the same steps on the rows below the pivot alone.
enum class Elimination { kInverse, kCholesky };

struct SpdLayout {
  int size;
  int64_t W_stride, W_leading, out_stride, out_leading;
  int first_pivot;  // the index, in a larger matrix, of this one's first pivot
};

// Elimination with the matrix in the registers of one block, a square of kSide x kSide numbers of the lower triangle a
// thread. A step with pivot d and its column c is A += t c^T with t = -c / d, once the pivot's row and column in A are
// 0 and its own entry in c is -1 (kInverse), or the column below it is 0, that entry 1, and t = 0 down to it
// (kCholesky). Columns pass through shared memory, where two take turns: one barrier a step. One block a matrix.
template <typename T, int kSide, int kMostThreads, Elimination kKind>
__global__ void __launch_bounds__(kMostThreads)
eliminate_in_registers(const T* __restrict__ W, T* __restrict__ out, int32_t* __restrict__ failed_pivot,
                         SpdLayout layout, T eps) {
  constexpr bool kBothSides = kKind == Elimination::kInverse;
  ATTNGEO_SHARED(T, numbers);
  const int size = layout.size;
  const int tiles = (size + kSide - 1) / kSide;
  T* const pivot_reciprocals = &numbers + 2 * tiles * kSide;
  const T* const W_of_block = W + blockIdx.x * layout.W_stride;
  if (layout.first_pivot > 0 && failed_pivot[blockIdx.x] != 0) return;

  int tile_row = 0, tile_column = threadIdx.x;
  while (tile_column > tile_row) {
    ++tile_row;
    tile_column -= tile_row;
  }
  const bool working = tile_row < tiles;
  // Threads without a tile compute what nobody reads, on the first one's numbers.
  const int first_row = working ? tile_row * kSide : 0, first_column = working ? tile_column * kSide : 0;
  const int rows_here = working ? size - first_row : 0;
  const bool on_diagonal = tile_row == tile_column;
  T a[kSide][kSide];
  const T* from = W_of_block + first_row * layout.W_leading + first_column;
#pragma unroll
  for (int i = 0; i < kSide; ++i, from += layout.W_leading) {
#pragma unroll
    for (int j = 0; j < kSide; ++j) a[i][j] = i < rows_here && (j <= i || !on_diagonal) ? from[j] : T(0);
  }
  if (kBothSides) {
    // The lower triangle is what counts, but what is not finite above it must not go unseen.
    const T* above = W_of_block + first_column * layout.W_leading + first_row;
#pragma unroll
    for (int j = 0; j < kSide; ++j, above += layout.W_leading) {
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
        if (i < rows_here && (j < i || !on_diagonal)) a[i][j] += T(0) * above[i];
      }
    }
  }
  if (on_diagonal) {
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      a[i][i] += eps;
#pragma unroll
      for (int j = i + 1; j < kSide; ++j) a[i][j] = a[j][i];
    }
  }

  int failed = 0;
  for (int pivot_tile = 0; pivot_tile < tiles; ++pivot_tile) {
    const bool in_rows = working && tile_row == pivot_tile, in_columns = working && tile_column == pivot_tile;
#pragma unroll
    for (int offset = 0; offset < kSide; ++offset) {
      const int pivot = pivot_tile * kSide + offset;
      if (pivot >= size) break;
      T* const pivot_column = &numbers + offset % 2 * tiles * kSide;
      T* const reciprocal = pivot_reciprocals + offset % 2;
      if (in_rows) {
#pragma unroll
        for (int j = 0; j < kSide; ++j) pivot_column[first_column + j] = a[offset][j];
        if (in_columns) {
          // Not a number is no positive pivot either.
          const T value = a[offset][offset];
          *reciprocal = value > T(0) ? T(1) / value : T(-1);
          pivot_column[pivot] = kBothSides ? T(-1) : T(1);
        }
        if (kBothSides) {
#pragma unroll
          for (int j = 0; j < kSide; ++j) a[offset][j] = T(0);
        }
      } else if (in_columns) {
#pragma unroll
        for (int i = 0; i < kSide; ++i) pivot_column[first_row + i] = a[i][offset];
      }
      if (in_columns) {
#pragma unroll
        for (int i = 0; i < kSide; ++i) {
          if (kBothSides || i != offset || !in_rows) a[i][offset] = T(0);
        }
      }
      __syncthreads();
      const T factor = -*reciprocal;
      // What follows a failure is computed in vain.
      if (factor > T(0) && failed == 0) failed = pivot + 1;
      T t[kSide];
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
        t[i] = kBothSides || first_row + i > pivot ? factor * pivot_column[first_row + i] : T(0);
      }
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        const T c = pivot_column[first_column + j];
#pragma unroll
        for (int i = 0; i < kSide; ++i) a[i][j] += t[i] * c;
      }
    }
  }
  if (threadIdx.x == 0) failed_pivot[blockIdx.x] = failed == 0 ? 0 : layout.first_pivot + failed;

  if (!kBothSides) {
    T* const row_factors = &numbers;
    __syncthreads();
    if (working && on_diagonal) {
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
        row_factors[first_row + i] = T(1) / sqrt(a[i][i]);
        a[i][i] = T(1);
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      const T factor = row_factors[first_row + i];
#pragma unroll
      for (int j = 0; j < kSide; ++j) a[i][j] *= -factor;
    }
  }
  if (!working) return;
  out += blockIdx.x * layout.out_stride;
  T* to = out + first_row * layout.out_leading + first_column;
  T* mirror = out + first_column * layout.out_leading + first_row;
#pragma unroll
  for (int i = 0; i < kSide; ++i, to += layout.out_leading) {
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      if (i < rows_here && (j <= i || !on_diagonal)) to[j] = failed == 0 ? -a[i][j] : T(0);
    }
  }
#pragma unroll
  for (int j = 0; j < kSide; ++j, mirror += layout.out_leading) {
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      if (i < rows_here && (j < i || !on_diagonal)) mirror[i] = failed == 0 && kBothSides ? -a[i][j] : T(0);
    }
  }
}

constexpr int kTile = 64;
constexpr int kTileRows = 8;
constexpr int kTileThreads = 128;
template <typename T>
constexpr int kTileChunks = int(sizeof(T)) / 4;
template <typename T>
constexpr int kDepth = 128 / int(sizeof(T));

inline __host__ __device__ int64_t tiles_of(int64_t size) { return (size + kTile - 1) / kTile; }

template <typename T>
struct Panels {
  static constexpr int kLeftLeading = kDepth<T> + kVector<T>;
  static constexpr int kRightLeading = kTile + kVector<T>;
  alignas(16) T left[kTile * kLeftLeading];
  alignas(16) T right[kDepth<T> * kRightLeading];
  T scratch[kTileThreads / kWarp];
};

template <typename T>
struct Factor {
  const T* first;
  int64_t stride, leading;  // from one matrix to the next, from one row to the next
};

// Copy kRows x kColumns numbers to shared memory, with zeros beyond `rows` and `columns`. A thread stays in its column.
template <typename T, int kRows, int kColumns>
__device__ inline void load_panel(const T* from, int64_t leading, int rows, int columns, T* to, int to_row,
                                  int to_column) {
  constexpr int kStep = kTileThreads / kColumns;
  const int first_row = threadIdx.x / kColumns, column = threadIdx.x % kColumns;
  if (column >= columns) rows = 0;
  from += first_row * leading + column;
  to += first_row * to_row + column * to_column;
#pragma unroll
  for (int row = 0; row < kRows; row += kStep, from += kStep * leading) {
    to[row * to_row] = first_row + row < rows ? *from : T(0);
  }
}

enum class Use : int {
  kProduct,       // out = left right
  kNewtonStep,    // out = 2 old - left right
  kResidual,      // out [matrices, tiles] = sum of squares of I - left right over a tile
  kPivotColumns,  // out = left right, but in the pivots' rows -right
  kSweep,         // out = old - left right, but in the pivots' rows and columns their new values; symmetric
};

template <typename T>
struct ProductTask {
  Factor<T> left, right;
  bool right_transposed;
  int64_t rows, columns, depth;  // left is rows x depth, right is depth x columns
  T left_diagonal;               // added to the diagonal of left
  Use use;
  const T* old;
  T* out;
  int64_t out_stride, out_leading;  // of old too
  // For sweeps:
  const T* new_columns;  // of the pivots, kTile numbers a row
  const int32_t* failed_pivot;
  int64_t first_pivot, pivots;
  bool last_sweep;
};

// One block a tile of kTile x kTile results.
template <typename T>
__global__ void __launch_bounds__(kTileThreads) product_tile(ProductTask<T> task) {
  using Own = Part<T, kTileRows, kTileChunks<T>>;
  using Shared = Panels<T>;
  ATTNGEO_SHARED(Shared, panels);
  const unsigned row_tiles = tiles_of(task.rows), column_tiles = tiles_of(task.columns);
  const int64_t first_column = blockIdx.x % column_tiles * kTile;
  const int64_t first_row = blockIdx.x / column_tiles % row_tiles * kTile;
  const int64_t matrix = blockIdx.x / column_tiles / row_tiles;
  const bool sweep = task.use == Use::kSweep;
  if (sweep && first_column > first_row) return;
  const bool failed = task.failed_pivot != nullptr && task.failed_pivot[matrix] != 0;
  if (failed && !task.last_sweep) return;
  const T* const left = task.left.first + matrix * task.left.stride;
  const T* const right = task.right.first + matrix * task.right.stride;

  const Own own(kTile / Own::kColumns);
  const bool working = first_row + own.first_row < task.rows && first_column + own.first_column < task.columns;
  T sum[kTileRows][Own::kColumns] = {};
  const int rows_here = int(min(int64_t(kTile), task.rows - first_row));
  const int columns_here = int(min(int64_t(kTile), task.columns - first_column));
  for (int64_t first = 0; first < task.depth; first += kDepth<T>) {
    const int depth = int(min(int64_t(kDepth<T>), task.depth - first));
    load_panel<T, kTile, kDepth<T>>(left + first_row * task.left.leading + first, task.left.leading, rows_here, depth,
                                    panels.left, Shared::kLeftLeading, 1);
    const int64_t diagonal = first - first_row + threadIdx.x % kDepth<T>;  // the row where this thread's column has it
    if (diagonal >= 0 && diagonal < kTile && diagonal % (kTileThreads / kDepth<T>) == threadIdx.x / kDepth<T>) {
      panels.left[diagonal * Shared::kLeftLeading + threadIdx.x % kDepth<T>] += task.left_diagonal;
    }
    if (task.right_transposed) {
      load_panel<T, kTile, kDepth<T>>(right + first_column * task.right.leading + first, task.right.leading,
                                      columns_here, depth, panels.right, 1, Shared::kRightLeading);
    } else {
      load_panel<T, kDepth<T>, kTile>(right + first * task.right.leading + first_column, task.right.leading, depth,
                                      columns_here, panels.right, Shared::kRightLeading, 1);
    }
    __syncthreads();
    if (working) {
      add_product<T, kTileRows, kTileChunks<T>>(sum, panels.left + own.first_row * Shared::kLeftLeading,
                                                Shared::kLeftLeading, panels.right + own.first_column,
                                                Shared::kRightLeading, own.chunk_stride, depth);
    }
    __syncthreads();
  }

  T squares = T(0);
  const int64_t offset = matrix * task.out_stride;
#pragma unroll
  for (int i = 0; i < kTileRows; ++i) {
    const int64_t row = first_row + own.row(i);
#pragma unroll
    for (int j = 0; j < Own::kColumns; ++j) {
      const int64_t column = first_column + own.column(j);
      if (row >= task.rows || column >= task.columns || (sweep && column > row)) continue;
      const int64_t index = offset + row * task.out_leading + column;
      const T product = sum[i][j];
      if (task.use == Use::kProduct) {
        task.out[index] = product;
      } else if (task.use == Use::kNewtonStep) {
        task.out[index] = T(2) * task.old[index] - product;
      } else if (task.use == Use::kResidual) {
        const T error = T(row == column) - product;
        squares += error * error;
      } else {
        const int64_t pivot_row = row - task.first_pivot, pivot_column = column - task.first_pivot;
        const bool in_rows = pivot_row >= 0 && pivot_row < task.pivots;
        const bool in_columns = pivot_column >= 0 && pivot_column < task.pivots;
        if (task.use == Use::kPivotColumns) {
          task.out[index] = in_rows ? -right[column * task.right.leading + pivot_row] : product;
          continue;
        }
        const T* const new_columns = task.new_columns + matrix * task.rows * kTile;
        T entry = in_columns ? new_columns[row * kTile + pivot_column]
                  : in_rows  ? new_columns[column * kTile + pivot_row]
                             : task.old[index] - product;
        if (task.last_sweep) entry = failed ? T(0) : -entry;
        task.out[index] = entry;
        task.out[offset + column * task.out_leading + row] = entry;
      }
    }
  }
  if (task.use == Use::kResidual) {
    squares = sum_of_block(squares, panels.scratch, kTileThreads);
    if (threadIdx.x == 0) task.out[blockIdx.x] = squares;
  }
}

constexpr int kStartThreads = 256;

template <typename T>
struct StartScratch {
  T numbers[2 * kStartThreads / kWarp];
};

// The first X of Newton-Schulz. One block a matrix.
template <typename T>
__global__ void __launch_bounds__(kStartThreads)
newton_schulz_start(const T* __restrict__ W, T* __restrict__ X, int64_t size, T eps, bool identity_start) {
  ATTNGEO_SHARED(StartScratch<T>, scratch);
  W += blockIdx.x * size * size;
  X += blockIdx.x * size * size;
  const auto P = [=](int64_t row, int64_t column) {
    return W[row * size + column] + (row == column ? eps : T(0));
  };
  const T factor = start_factor(P, size, identity_start, scratch.numbers, kStartThreads);
  for_each_entry(size, kStartThreads, [=](int64_t row, int64_t column) {
    X[row * size + column] = factor * (identity_start ? T(row == column) : P(column, row));
  });
}

// residual[matrix] from the sums of squares of its tiles. One thread a matrix.
template <typename T>
__global__ void __launch_bounds__(kStartThreads)
newton_schulz_residual(const T* __restrict__ squares, T* __restrict__ residual, int64_t matrices, int64_t tiles) {
  const int64_t matrix = int64_t(blockIdx.x) * kStartThreads + threadIdx.x;
  if (matrix >= matrices) return;
  T sum = T(0);
  for (int64_t tile = 0; tile < tiles; ++tile) sum += squares[matrix * tiles + tile];
  residual[matrix] = isfinite(sum) ? sqrt(sum) : T(INFINITY);
}

// A = the lower triangle of W + eps I and its mirror image, not a number where the upper one is not finite. One block a
// matrix.
template <typename T>
__global__ void __launch_bounds__(kStartThreads)
spd_inverse_start(const T* __restrict__ W, T* __restrict__ A, int64_t size, T eps) {
  W += blockIdx.x * size * size;
  A += blockIdx.x * size * size;
  for_each_entry(size, kStartThreads, [=](int64_t row, int64_t column) {
    const int64_t larger = max(row, column), smaller = min(row, column);
    const T entry = W[larger * size + smaller];
    A[row * size + column] = row == column ? entry + eps : entry + T(0) * W[smaller * size + larger];
  });
}

}  // namespace attngeo::inverses
