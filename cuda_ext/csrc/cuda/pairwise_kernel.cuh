// Bodies of the pairwise kernels; README.md beside this file explains the forms and counts their instructions. Numbers
// of blocks fit 32 bits, offsets into arrays take 64. Sums run in an order that the sizes alone decide, and no two
// threads add to one number, so that runs repeat bit by bit, whatever the batch.
#pragma once
#include <math.h>

#include <type_traits>

#include "launch.cuh"
#include "pairwise_kernel.h"

namespace attngeo {

constexpr int kProduct = 2;  // beside PairwiseKind: the plain product x y^T
constexpr double kLog2E = 1.4426950408889634;

constexpr int kWarp = 32;
constexpr int kLanes = 4;                       // neighbouring threads share a row and take every fourth column
constexpr int kLaneRows = kWarp / kLanes;       // rows that a warp holds at once
constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kStage = 32;                      // channels in shared memory at a time
constexpr int kStageStride = kStage + 4;        // eight rows start on eight different groups of four banks

__device__ inline float absolute(float x) { return fabsf(x); }
__device__ inline double absolute(double x) { return fabs(x); }
// 2^x takes four instructions in float32 where e^x takes eight, so that exponents are to base 2 in here.
__device__ inline float exponential(float x) { return exp2f(x); }
__device__ inline double exponential(double x) { return exp2(x); }
__device__ inline float least(float x, float y) { return fminf(x, y); }
__device__ inline double least(double x, double y) { return fmin(x, y); }
__device__ inline float multiply_add(float x, float y, float sum) { return fmaf(x, y, sum); }
__device__ inline double multiply_add(double x, double y, double sum) { return fma(x, y, sum); }

// (1 + sign(x)) / 2: one instruction on the GPU where comparing takes three. Exact but for 0 < |x| < 1.7e-39, where it
// lies in between, and NaN, which gives 0: a token that is not a number shows in the weights.
__device__ inline float above(float x) { return __saturatef(fmaf(x, 3e38f, 0.5f)); }
__device__ inline double above(double x) { return fmin(fmax(fma(x, 1e308, 0.5), 0.0), 1.0); }

// The same number, of which the compiler knows nothing: what it would compute from it early and keep in registers
// throughout a loop is computed where it is used. An empty instruction, for any processor.
__device__ inline int not_hoisted(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

template <int Op, typename T>
__device__ inline T add_term(T sum, T x, T y) {
  if constexpr (Op == kProduct) return multiply_add(x, y, sum);
  const T difference = x - y;
  if constexpr (Op == kLaplacian) return sum + absolute(difference);
  return multiply_add(difference, difference, sum);
}

// Four and two numbers that move in one instruction.
template <typename T>
struct alignas(16) Quad {
  T x, y, z, w;
};
template <typename T>
struct alignas(2 * sizeof(T)) Pair {
  T x, y;
};

template <typename T>
__device__ inline Quad<T> load_quad(const T* from) {
  return *reinterpret_cast<const Quad<T>*>(from);
}
template <typename T>
__device__ inline Pair<T> load_pair(const T* from) {
  return *reinterpret_cast<const Pair<T>*>(from);
}
template <typename T>
__device__ inline void store_quad(T* to, Quad<T> value) {
  *reinterpret_cast<Quad<T>*>(to) = value;
}
template <typename T>
__device__ inline void store_pair(T* to, Pair<T> value) {
  *reinterpret_cast<Pair<T>*>(to) = value;
}
template <typename T>
__device__ inline bool rows_are_quads(const T* matrix, int64_t width) {
  return width % 4 == 0 && reinterpret_cast<uintptr_t>(matrix) % 16 == 0;
}
template <typename T>
__device__ inline bool rows_are_pairs(const T* matrix, int64_t width) {
  return width % 2 == 0 && reinterpret_cast<uintptr_t>(matrix) % sizeof(Pair<T>) == 0;
}

inline __host__ __device__ int64_t tiles_of(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }
inline __host__ __device__ int at_most(int64_t size, int limit) { return size < limit ? int(size) : limit; }
inline __host__ __device__ int smaller(int x, int y) { return x < y ? x : y; }

// Offset of a row in an array of slices; tokens, weights and results of the largest batches pass 2^31 numbers.
inline __host__ __device__ int64_t row_offset(int64_t slice, int64_t slice_stride, int64_t row, int64_t width) {
  return slice * slice_stride + row * width;
}
// Start of a row of a tile: its address in one instruction, since the row is small and not negative, and the bytes of
// a row fit 32 bits.
template <typename T>
inline __host__ __device__ T* row_of(T* matrix, int row, int64_t width) {
  const uint64_t bytes = static_cast<uint64_t>(static_cast<uint32_t>(row)) * static_cast<uint32_t>(width * sizeof(T));
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(matrix) + bytes);
}

// What a block works on, when blocks number [slice][part][row tile][column tile] with the last one fastest.
struct Place {
  int64_t slice, part, first_row, first_column;
};
inline __host__ __device__ Place place_of_block(unsigned block, unsigned parts, unsigned row_tiles,
                                                unsigned column_tiles, int64_t rows_a_tile, int64_t columns_a_tile) {
  const unsigned row_block = block / column_tiles, part_block = row_block / row_tiles;
  return {int64_t(part_block / parts), int64_t(part_block % parts), int64_t(row_block % row_tiles) * rows_a_tile,
          int64_t(block % column_tiles) * columns_a_tile};
}

// tile[i][c] = source[i, c] for i < rows, c < columns. Channels beyond `columns` are zero up to a multiple of four;
// other numbers of the Count x Width tile are not to be used: rows beyond `rows` are copies of the last one.
template <int Count, int Width, int Stride, int Threads, typename T>
__device__ inline void stage(int thread, T* tile, const T* source, int rows, int columns, int64_t width) {
  constexpr int kQuads = Width / 4, kStep = Threads / kQuads, kSteps = (Count + kStep - 1) / kStep;
  static_assert(Threads % kQuads == 0, "a thread keeps to its columns");
  const int first = thread / kQuads, column = thread % kQuads * 4;
  if (column >= columns) return;
  source += column;
  tile += first * Stride + column;
  if (rows_are_quads(source, width)) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int row = first + step * kStep;
      const Quad<T> value = load_quad(row_of(source, smaller(row, rows - 1), width));
      if ((step + 1) * kStep <= Count || row < Count) store_quad(tile + step * kStep * Stride, value);
    }
  } else {
#pragma unroll 1
    for (int row = first; row < Count; row += kStep) {
      const T* from = row_of(source, smaller(row, rows - 1), width);
      Quad<T> value = {};
      value.x = from[0];
      if (column + 1 < columns) value.y = from[1];
      if (column + 2 < columns) value.z = from[2];
      if (column + 3 < columns) value.w = from[3];
      store_quad(tile, value);
      tile += kStep * Stride;
    }
  }
}

// The same for a matrix whose columns lie together: tile[i][c] = source[c, i].
template <int Count, int Width, int Stride, int Threads, typename T>
__device__ inline void stage_transposed(T* tile, const T* source, int rows, int columns, int64_t width) {
  // A warp takes 8 rows x 4 columns: whole sectors of memory, and 32 different banks.
  constexpr int kColumnGroups = Width / 4, kRowGroups = (Count + 7) / 8;
  const int row_in_group = threadIdx.x % 8, column_in_group = threadIdx.x / 8 % 4;
  for (int group = threadIdx.x / kWarp; group < kRowGroups * kColumnGroups; group += Threads / kWarp) {
    const int row = group / kColumnGroups * 8 + row_in_group, column = group % kColumnGroups * 4 + column_in_group;
    if (row >= Count) continue;
    tile[row * Stride + column] = row < rows && column < columns ? row_of(source, column, width)[row] : T(0);
  }
}

// sums[i][j] += the terms of row i and column j over `quads` groups of four channels in shared memory. `rows` and
// `columns` point to the thread's first ones; the next ones follow after `RowStep` and `ColumnStep` staged rows.
template <int Op, int RowStep, int ColumnStep, int Rows, int Columns, typename T>
__device__ inline void accumulate(T (&sums)[Rows][Columns], const T* rows, const T* columns, int quads) {
#pragma unroll 1
  for (; quads > 0; --quads) {
    Quad<T> x[Rows];
#pragma unroll
    for (int i = 0; i < Rows; ++i) x[i] = load_quad(rows + i * RowStep * kStageStride);
    rows += 4;
#pragma unroll
    for (int j = 0; j < Columns; ++j) {
      const Quad<T> y = load_quad(columns + j * ColumnStep * kStageStride);
#pragma unroll
      for (int i = 0; i < Rows; ++i) {
        sums[i][j] = add_term<Op>(sums[i][j], x[i].x, y.x);
        sums[i][j] = add_term<Op>(sums[i][j], x[i].y, y.y);
        sums[i][j] = add_term<Op>(sums[i][j], x[i].z, y.z);
        sums[i][j] = add_term<Op>(sums[i][j], x[i].w, y.w);
      }
    }
    columns += 4;
  }
}

// ---- out[s, n, m] from x [rows, channels] and y [columns, channels] of each slice ----

template <typename T>
struct TileArguments {
  const T* x;
  const T* y;
  const T* offset;  // [slices, rows], or nullptr for zeros
  T* out;           // [rows, columns] of each slice and part
  int64_t rows, columns, channels;
  int64_t x_slice, x_width, y_slice, y_width, out_slice;
  T scale;                // to base 2
  bool transposed;        // of products only: channels lie `width` apart in x and y
  int64_t parts;          // channels are cut into parts, each of which writes an `out` of its own
  int64_t part_channels;  // a part's share of them
  int64_t out_part;
};

constexpr int kTileThreads = 64;
constexpr int kTileRowsPerThread = 4;
constexpr int kTileRows = kTileThreads / kLanes * kTileRowsPerThread;

template <typename T, int ColumnsPerThread>
struct TileMemory {
  static constexpr int kColumns = kLanes * ColumnsPerThread;
  static constexpr int kOutStride = kLanes * (ColumnsPerThread | 1);  // rows of a warp start four banks apart
  union {
    struct {
      T x[kTileRows * kStageStride];
      T y[kColumns * kStageStride];
    };
    T out[kTileRows * kOutStride];
  };
};

// 2^(scale * (distance - offset[n])), or the product minus offset[n]. A thread has 4 rows and every fourth column.
template <int Op, int ColumnsPerThread, typename T>
__global__ void __launch_bounds__(kTileThreads, 4) pairwise_tile(TileArguments<T> a) {
  using Memory = TileMemory<T, ColumnsPerThread>;
  constexpr int kRowsPerWarp = kLaneRows * kTileRowsPerThread;
  ATTNGEO_SHARED(Memory, shared);
  const Place place = place_of_block(blockIdx.x, unsigned(a.parts), unsigned(tiles_of(a.rows, kTileRows)),
                                     unsigned(tiles_of(a.columns, Memory::kColumns)), kTileRows, Memory::kColumns);
  const int rows = at_most(a.rows - place.first_row, kTileRows);
  const int columns = at_most(a.columns - place.first_column, Memory::kColumns);
  const int64_t first_channel = place.part * a.part_channels;
  int64_t channels = a.channels - first_channel;
  if (channels > a.part_channels) channels = a.part_channels;
  const int lane = threadIdx.x % kWarp;
  const int first_row = threadIdx.x / kWarp * kRowsPerWarp, row = first_row + lane / kLanes, column = lane % kLanes;
  const bool transposed = Op == kProduct && a.transposed;
  const T* x = a.x + (transposed ? row_offset(place.slice, a.x_slice, first_channel, a.x_width) + place.first_row
                                 : row_offset(place.slice, a.x_slice, place.first_row, a.x_width) + first_channel);
  const T* y = a.y + (transposed ? row_offset(place.slice, a.y_slice, first_channel, a.y_width) + place.first_column
                                 : row_offset(place.slice, a.y_slice, place.first_column, a.y_width) + first_channel);

  T sums[kTileRowsPerThread][ColumnsPerThread] = {};
#pragma unroll 1
  for (int64_t left = channels; left > 0; left -= kStage) {
    const int width = at_most(left, kStage);
    __syncthreads();
    if (transposed) {
      stage_transposed<kTileRows, kStage, kStageStride, kTileThreads>(shared.x, x, rows, width, a.x_width);
      stage_transposed<Memory::kColumns, kStage, kStageStride, kTileThreads>(shared.y, y, columns, width, a.y_width);
      x += kStage * a.x_width;
      y += kStage * a.y_width;
    } else {
      stage<kTileRows, kStage, kStageStride, kTileThreads>(threadIdx.x, shared.x, x, rows, width, a.x_width);
      stage<Memory::kColumns, kStage, kStageStride, kTileThreads>(threadIdx.x, shared.y, y, columns, width, a.y_width);
      x += kStage;
      y += kStage;
    }
    __syncthreads();
    if (first_row < rows) {
      accumulate<Op, kLaneRows, kLanes>(sums, shared.x + row * kStageStride, shared.y + column * kStageStride,
                                        (width + 3) / 4);
    }
  }

  T offset[kTileRowsPerThread];
#pragma unroll
  for (int i = 0; i < kTileRowsPerThread; ++i) {
    const int own_row = row + i * kLaneRows;
    offset[i] = 0;
    if (a.offset != nullptr && own_row < rows) offset[i] = a.offset[place.slice * a.rows + place.first_row + own_row];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTileRowsPerThread; ++i) {
#pragma unroll
    for (int j = 0; j < ColumnsPerThread; ++j) {
      T value = sums[i][j] - offset[i];
      if constexpr (Op != kProduct) value = exponential(value * a.scale);
      shared.out[(row + i * kLaneRows) * Memory::kOutStride + j * kLanes + column] = value;
    }
  }
  __syncwarp();  // a warp writes its own rows, a row at a time
  T* out = a.out + place.part * a.out_part +
           row_offset(place.slice, a.out_slice, place.first_row + first_row, a.columns) + place.first_column + lane;
  const int own_rows = smaller(rows - first_row, kRowsPerWarp);
  const T* from = shared.out + first_row * Memory::kOutStride + lane;
#pragma unroll 8
  for (int i = 0; i < own_rows; ++i) {
#pragma unroll
    for (int j = 0; j < Memory::kColumns; j += kWarp) {
      if (j + lane < columns) out[j] = from[j];
    }
    out += a.columns;
    from += Memory::kOutStride;
  }
}

// ---- out = P v, the kernel never leaving the chip ----

template <typename T>
struct MatmulArguments {
  const T* q;
  const T* k;
  const T* v;
  T* out;
  T* origin;  // [slices, rows], as `total`
  T* total;
  PairwiseSizes sizes;
  T scale;  // to base 2, negative
  bool normalize;
};

// A block's warps share its rows (Splits == Warps) or have their own (Splits == 1).
template <typename T, int RowsPerThread, int ColumnsPerThread, int Splits, int Warps, int ValueQuads>
struct MatmulMemory {
  static constexpr int kRowsPerWarp = kLaneRows * RowsPerThread;
  static constexpr int kRows = kRowsPerWarp * Warps / Splits;
  static constexpr int kLandmarks = kLanes * ColumnsPerThread * Splits;
  static constexpr int kValues = kLanes * 4 * ValueQuads;
  union {
    struct {
      T q[kRows * kStageStride];
      T k[kLandmarks * kStageStride];
      T v[kLandmarks * kValues];
    };
    struct {
      T out[Splits][kRows][kValues];
      T nearest[Splits][kRows];
      T total[Splits][kRows];
    } split;
  };
};

// What distances are taken relative to: a row whose distances are all infinite would give infinity - infinity.
template <typename T>
__device__ inline T origin_of(T nearest) {
  return nearest == T(INFINITY) ? T(0) : nearest;
}

// Landmarks stream by in chunks (there is one, and no fewer, where warps have rows of their own). Normalised rows keep
// the smallest distance so far (`nearest`) and sums relative to it, so that rows whose kernel values all underflow are
// still exact. Distances are subtracted before they are scaled: the rounding of a product would become an exponent.
template <int Kind, int RowsPerThread, int ColumnsPerThread, int Splits, int Warps, int ValueQuads, typename T>
__global__ void __launch_bounds__(Warps* kWarp, 8 / Warps)
pairwise_matmul(MatmulArguments<T> a) {
  using Memory = MatmulMemory<T, RowsPerThread, ColumnsPerThread, Splits, Warps, ValueQuads>;
  constexpr int kThreads = Warps * kWarp;
  constexpr bool kOneChunk = Splits == 1;
  ATTNGEO_SHARED(Memory, shared);
  const int64_t value_tiles = a.sizes.values == 0 ? 1 : tiles_of(a.sizes.values, Memory::kValues);
  const Place place = place_of_block(blockIdx.x, 1, unsigned(tiles_of(a.sizes.rows, Memory::kRows)),
                                     unsigned(value_tiles), Memory::kRows, Memory::kValues);
  const int rows = at_most(a.sizes.rows - place.first_row, Memory::kRows);
  const int values = at_most(a.sizes.values - place.first_column, Memory::kValues);
  const int64_t landmarks = a.sizes.landmarks;
  // The bytes of a row fit 32 bits, of which the compiler makes use when it does not see where the numbers come from.
  const int channels = not_hoisted(int(a.sizes.channels)), value_width = not_hoisted(int(a.sizes.values));
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, split = warp % Splits;
  const int first_row = warp / Splits * Memory::kRowsPerWarp, row = first_row + lane / kLanes, column = lane % kLanes;
  const T* q = a.q + row_offset(place.slice, a.sizes.rows * channels, place.first_row, channels);
  const T* k = a.k + row_offset(place.slice, landmarks * channels, 0, channels);
  const T* v = a.v + row_offset(place.slice, landmarks * a.sizes.values, 0, a.sizes.values) + place.first_column;

  Quad<T> out[RowsPerThread][ValueQuads] = {};
  T nearest[RowsPerThread], total[RowsPerThread] = {};
#pragma unroll
  for (int i = 0; i < RowsPerThread; ++i) nearest[i] = a.normalize ? T(INFINITY) : T(0);
#pragma unroll 1
  for (int64_t first = 0; kOneChunk ? first == 0 : first < landmarks; first += Memory::kLandmarks) {
    const int chunk = at_most(landmarks - first, Memory::kLandmarks);
    T sums[RowsPerThread][ColumnsPerThread] = {};
    int left = channels;
#pragma unroll 1
    do {
      const int width = smaller(left, kStage);
      __syncthreads();
      if (first == 0 || channels > kStage) {
        stage<Memory::kRows, kStage, kStageStride, kThreads>(threadIdx.x, shared.q, q + (channels - left), rows, width,
                                                             channels);
      }
      stage<Memory::kLandmarks, kStage, kStageStride, kThreads>(threadIdx.x, shared.k, k + (channels - left), chunk,
                                                               width, channels);
      if (left == channels) {
        stage<Memory::kLandmarks, Memory::kValues, Memory::kValues, kThreads>(not_hoisted(threadIdx.x), shared.v, v,
                                                                             chunk, values, value_width);
      }
      __syncthreads();
      if (first_row < rows) {
        accumulate<Kind, kLaneRows, kLanes * Splits>(sums, shared.q + row * kStageStride,
                                                     shared.k + (split * kLanes + column) * kStageStride,
                                                     (width + 3) / 4);
      }
      left -= kStage;
    } while (left > 0);
    k += Memory::kLandmarks * a.sizes.channels;
    v += Memory::kLandmarks * a.sizes.values;
    if (first_row >= rows) continue;

    const int own_landmarks = chunk - split * kLanes - column;
    // Landmarks beyond the last one are copies of it: none nearer, but weights to be zeroed.
    T blank[ColumnsPerThread];
#pragma unroll
    for (int j = 0; j < ColumnsPerThread; ++j) blank[j] = j * Splits * kLanes < own_landmarks ? T(0) : -T(INFINITY);
    if (a.normalize) {
#pragma unroll
      for (int i = 0; i < RowsPerThread; ++i) {
        T now = sums[i][0];
#pragma unroll
        for (int j = 1; j < ColumnsPerThread; ++j) now = least(now, sums[i][j]);
#pragma unroll
        for (int other = 1; other < kLanes; other *= 2) now = least(now, __shfl_xor_sync(kFullWarp, now, other));
        if constexpr (!kOneChunk) now = least(now, nearest[i]);
        const T origin = origin_of(now);
        if constexpr (!kOneChunk) {
          const T rescale = exponential((nearest[i] - origin) * a.scale);
          total[i] *= rescale;
#pragma unroll
          for (int g = 0; g < ValueQuads; ++g) {
            out[i][g].x *= rescale;
            out[i][g].y *= rescale;
            out[i][g].z *= rescale;
            out[i][g].w *= rescale;
          }
        }
        nearest[i] = now;
#pragma unroll
        for (int j = 0; j < ColumnsPerThread; ++j) {
          sums[i][j] = exponential(multiply_add(sums[i][j] - origin, a.scale, blank[j]));
          total[i] += sums[i][j];
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < RowsPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < ColumnsPerThread; ++j) {
          sums[i][j] = exponential(multiply_add(sums[i][j], a.scale, blank[j]));
        }
      }
    }

    const T* chunk_values = shared.v + split * kLanes * Memory::kValues + column * 4;
#pragma unroll 1
    for (int owner = 0; owner < kLanes; ++owner) {
#pragma unroll
      for (int j = 0; j < ColumnsPerThread; ++j) {
        T weight[RowsPerThread];
#pragma unroll
        for (int i = 0; i < RowsPerThread; ++i) {
          weight[i] = __shfl_sync(kFullWarp, sums[i][j], lane - column + owner);
        }
#pragma unroll
        for (int g = 0; g < ValueQuads; ++g) {
          const Quad<T> value = load_quad(chunk_values + j * Splits * kLanes * Memory::kValues + g * kLanes * 4);
#pragma unroll
          for (int i = 0; i < RowsPerThread; ++i) {
            out[i][g].x = multiply_add(weight[i], value.x, out[i][g].x);
            out[i][g].y = multiply_add(weight[i], value.y, out[i][g].y);
            out[i][g].z = multiply_add(weight[i], value.z, out[i][g].z);
            out[i][g].w = multiply_add(weight[i], value.w, out[i][g].w);
          }
        }
      }
      chunk_values += Memory::kValues;
    }
  }

#pragma unroll
  for (int i = 0; i < RowsPerThread; ++i) {
#pragma unroll
    for (int other = 1; other < kLanes; other *= 2) total[i] += __shfl_xor_sync(kFullWarp, total[i], other);
  }
  if constexpr (Splits > 1) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < RowsPerThread; ++i) {
      const int own_row = row + i * kLaneRows;
      if (column == 0) {
        shared.split.nearest[split][own_row] = nearest[i];
        shared.split.total[split][own_row] = total[i];
      }
#pragma unroll
      for (int g = 0; g < ValueQuads; ++g) {
        store_quad(&shared.split.out[split][own_row][(g * kLanes + column) * 4], out[i][g]);
      }
    }
    __syncthreads();
  }
  const int64_t slice_row = place.slice * a.sizes.rows + place.first_row + row;
  T* target = a.out + slice_row * a.sizes.values + place.first_column + column * 4;
  const bool quads = rows_are_quads(target, a.sizes.values);
  const int own_values = values - column * 4;
#pragma unroll
  for (int i = 0; i < RowsPerThread; ++i) {
    // With several splits each warp finishes a share of the rows.
    const int own_row = row + i * kLaneRows;
    if (i % Splits != split || own_row >= rows) continue;
    if constexpr (Splits > 1) {
      nearest[i] = shared.split.nearest[0][own_row];
      for (int part = 1; part < Splits; ++part) nearest[i] = least(nearest[i], shared.split.nearest[part][own_row]);
      const T origin = origin_of(nearest[i]);
      total[i] = 0;
      for (int g = 0; g < ValueQuads; ++g) out[i][g] = {};
      for (int part = 0; part < Splits; ++part) {
        const T rescale = exponential((shared.split.nearest[part][own_row] - origin) * a.scale);
        total[i] = multiply_add(shared.split.total[part][own_row], rescale, total[i]);
#pragma unroll
        for (int g = 0; g < ValueQuads; ++g) {
          const Quad<T> value = load_quad(&shared.split.out[part][own_row][(g * kLanes + column) * 4]);
          out[i][g].x = multiply_add(value.x, rescale, out[i][g].x);
          out[i][g].y = multiply_add(value.y, rescale, out[i][g].y);
          out[i][g].z = multiply_add(value.z, rescale, out[i][g].z);
          out[i][g].w = multiply_add(value.w, rescale, out[i][g].w);
        }
      }
    }
    T factor = 1;
    if (a.normalize && landmarks > 0) factor = T(1) / total[i];
    if (column == 0 && place.first_column == 0) {
      a.origin[slice_row + i * kLaneRows] = nearest[i];
      a.total[slice_row + i * kLaneRows] = a.normalize ? total[i] : T(1);
    }
    T* to = row_of(target, i * kLaneRows, a.sizes.values);
#pragma unroll
    for (int g = 0; g < ValueQuads; ++g) {
      constexpr int kStep = kLanes * 4;
      const Quad<T> value = {out[i][g].x * factor, out[i][g].y * factor, out[i][g].z * factor, out[i][g].w * factor};
      if (quads) {
        if (g * kStep < own_values) store_quad(to + g * kStep, value);
      } else {
        if (g * kStep < own_values) to[g * kStep] = value.x;
        if (g * kStep + 1 < own_values) to[g * kStep + 1] = value.y;
        if (g * kStep + 2 < own_values) to[g * kStep + 2] = value.z;
        if (g * kStep + 3 < own_values) to[g * kStep + 3] = value.w;
      }
    }
  }
}

// ---- both gradients of a kernel from weights = grad * kernel ----

template <typename T>
struct BackwardArguments {
  const T* grad;
  const T* kernel;
  const T* q;
  const T* k;
  T* grad_q;  // [slices, rows, channels] for each landmark part
  T* grad_k;  // of each slice and row block
  int64_t rows, landmarks, channels;
  int64_t k_slice;  // of k and grad_k, which may have more landmarks
  int64_t row_blocks, rows_a_block, grad_k_part;
  int64_t landmark_parts, grad_q_part;
  T scale;
  bool accumulate;  // grad_q holds sums of other landmarks already
};

constexpr int kBackwardThreads = 128;
constexpr int kBackwardWarps = kBackwardThreads / kWarp;
constexpr int kBackwardRows = 32;       // in shared memory at a time
constexpr int kBackwardChannels = 128;  // of a block
constexpr int kMostStreams = 8;

// A staged row: for each half its weights and, four numbers after them, the sum of the whole row's; then q.
template <typename T, int Half>
struct BackwardMemory {
  static constexpr int kLandmarks = 2 * Half;
  static constexpr int kRowSum = (Half + 3) / 4 * 4;
  static constexpr int kHalfStride = (kRowSum + 4) % 32 == 0 ? kRowSum + 8 : kRowSum + 4;  // the halves' banks differ
  static constexpr int kQ = 2 * kHalfStride;
  // Rows start eight banks apart, so that a quarter of a warp may read from four rows and both halves at once.
  static constexpr int kRowStride = (kQ + kBackwardChannels + 23) / 32 * 32 + 8;
  static constexpr int kPassedStride = kBackwardChannels / 2;
  T column_sums[kMostStreams * kQ];
  union {
    T rows[kBackwardRows * kRowStride];
    T passed[kLandmarks * kPassedStride];  // sums of grad_k, from stream to stream
  };

  static constexpr __host__ __device__ int place(int landmark) {
    return landmark / Half * kHalfStride + landmark % Half;
  }
};

// A thread has two channels of one half of up to 2 * Half landmarks, both the numbers and their gradients in
// registers, while rows stream by. A warp is 32 channels of one stream of rows, or 16 of two where there are no more.
// The sums are of t = (1 + sign) / 2, one t for both gradients: sum of w sign = 2 * sum of w t - sum of w, where the
// last is summed in the same order, so that ties cancel exactly.
template <int Kind, int Half, typename T>
__global__ void __launch_bounds__(kBackwardThreads, Half > 25 || sizeof(T) > 4 ? 2 : 3)
pairwise_backward(BackwardArguments<T> a) {
  using Memory = BackwardMemory<T, Half>;
  constexpr int kLandmarks = Memory::kLandmarks;
  ATTNGEO_SHARED(Memory, shared);
  const Place place = place_of_block(blockIdx.x, unsigned(a.row_blocks), unsigned(a.landmark_parts),
                                     unsigned(tiles_of(a.channels, kBackwardChannels)), 1, kBackwardChannels);
  const int64_t row_block = place.part, landmark_part = place.first_row;
  const int channels = at_most(a.channels - place.first_column, kBackwardChannels);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, half = lane % 2;
  // Logarithms of the numbers of warps that one row takes, and of the rows that one warp takes.
  const int row_warps = channels <= kWarp ? 0 : channels <= 2 * kWarp ? 1 : 2;
  const int warp_rows = channels <= kWarp / 2 ? 1 : 0;
  const int row_bits = 2 - row_warps + warp_rows, streams = 1 << row_bits;
  const int stream = (warp >> row_warps << warp_rows) + (lane >> (5 - warp_rows));
  const int slab = (warp & ((1 << row_warps) - 1)) * kWarp, channel = slab + (lane & ((kWarp >> warp_rows) - 2));
  const bool idle = slab >= channels;

  const int64_t first_row = row_block * a.rows_a_block;
  const int own_rows = int(a.rows - first_row < a.rows_a_block ? a.rows - first_row : a.rows_a_block);
  const int64_t own_q = row_offset(place.slice, a.rows * a.channels, first_row, a.channels) + place.first_column;
  const T q_factor = Kind == kLaplacian ? a.scale : 2 * a.scale;
  bool accumulate = a.accumulate;

#pragma unroll 1
  for (int chunk = int(place.first_row); chunk < tiles_of(a.landmarks, kLandmarks); chunk += int(a.landmark_parts)) {
    const int64_t first = int64_t(chunk) * kLandmarks;
    const int landmarks = at_most(a.landmarks - first, kLandmarks);
    const int64_t own_channel = row_offset(place.slice, a.k_slice, first, a.channels) + place.first_column + channel;
    // Landmarks that there are not have weights of zero.
    Pair<T> k[Half] = {}, sums[Half] = {};
    const int first_count = channel < channels ? landmarks - half * Half : 0;
    const int second_count = channel + 1 < channels ? landmarks - half * Half : 0;
    const T* own_k = a.k + own_channel + half * Half * a.channels;
    if (rows_are_pairs(own_k, a.channels)) {
#pragma unroll
      for (int j = 0; j < Half; ++j) {
        if (j < first_count) k[j] = load_pair(own_k);
        own_k += a.channels;
      }
    } else {
#pragma unroll
      for (int j = 0; j < Half; ++j) {
        if (j < first_count) k[j].x = own_k[0];
        if (j < second_count) k[j].y = own_k[1];
        own_k += a.channels;
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < streams * Memory::kQ; i += kBackwardThreads) shared.column_sums[i] = 0;
#pragma unroll 1
    for (int i = landmarks + warp; i < kLandmarks; i += kBackwardWarps) {
      shared.rows[lane * Memory::kRowStride + Memory::place(i)] = 0;
    }

    int64_t weights = row_offset(place.slice, a.rows * a.landmarks, first_row, a.landmarks) + first + lane;
    const T* q_tile = a.q + own_q;
    T* target = a.grad_q + landmark_part * a.grad_q_part + own_q + stream * a.channels + channel + half;
#pragma unroll 1
    for (int rows = own_rows; rows > 0; rows -= kBackwardRows) {
      const int thread = not_hoisted(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
      __syncthreads();
      T* staged_q = shared.rows + Memory::kQ;
      if (channels <= 64) {
        stage<kBackwardRows, 64, Memory::kRowStride, kBackwardThreads>(thread, staged_q, q_tile, rows, channels,
                                                                       a.channels);
      } else {
        stage<kBackwardRows, 128, Memory::kRowStride, kBackwardThreads>(thread, staged_q, q_tile, rows, channels,
                                                                        a.channels);
      }
#pragma unroll 4
      for (int row = 0; row < kBackwardRows; row += kBackwardWarps) {
        const int from = smaller(row + warp, rows - 1);
        const T* own_grad = row_of(a.grad + weights, from, a.landmarks);
        const T* own_kernel = row_of(a.kernel + weights, from, a.landmarks);
#pragma unroll
        for (int i = 0; i < kLandmarks; i += kWarp) {
          if (i + lane >= landmarks) continue;
          shared.rows[(row + warp) * Memory::kRowStride + Memory::place(i + lane)] = own_grad[i] * own_kernel[i];
        }
      }
      weights += kBackwardRows * a.landmarks;
      q_tile += kBackwardRows * a.channels;
      // Copies of the last row have no weight.
#pragma unroll 1
      for (int row = kBackwardRows - kBackwardWarps + warp; row >= rows; row -= kBackwardWarps) {
#pragma unroll
        for (int i = 0; i < kLandmarks; i += kWarp) {
          if (i + lane < landmarks) shared.rows[row * Memory::kRowStride + Memory::place(i + lane)] = 0;
        }
      }
      __syncthreads();
      if constexpr (Kind == kLaplacian) {
        if (thread < 2 * kBackwardRows) {
          T* own = shared.rows + thread / 2 * Memory::kRowStride + thread % 2 * Memory::kHalfStride;
          T sum = 0;
#pragma unroll
          for (int j = 0; j < Half / 4 * 4; j += 4) {
            const Quad<T> four = load_quad(own + j);
            sum = sum + four.x + four.y + four.z + four.w;
          }
#pragma unroll
          for (int j = Half / 4 * 4; j < Half; ++j) sum += own[j];
          own[Memory::kRowSum] = sum + __shfl_xor_sync(kFullWarp, sum, 1);
        } else {
          constexpr int kQuads = Memory::kRowSum / 4;
          for (int i = thread - 2 * kBackwardRows; i < streams * 2 * kQuads; i += 2 * kBackwardRows) {
            const int own_stream = i / (2 * kQuads), quad = i % (2 * kQuads);
            const int column = quad / kQuads * Memory::kHalfStride + quad % kQuads * 4;
            const T* from = shared.rows + own_stream * Memory::kRowStride + column;
            Quad<T> sum = load_quad(shared.column_sums + own_stream * Memory::kQ + column);
#pragma unroll 1
            for (int left = kBackwardRows >> row_bits; left > 0; left -= 4) {  // a stream's rows, at least four
#pragma unroll
              for (int row = 0; row < 4; ++row) {
                const Quad<T> weight = load_quad(from);
                sum = {sum.x + weight.x, sum.y + weight.y, sum.z + weight.z, sum.w + weight.w};
                from += streams * Memory::kRowStride;
              }
            }
            store_quad(shared.column_sums + own_stream * Memory::kQ + column, sum);
          }
        }
        __syncthreads();
      }
      if (idle) continue;

      const T* own = shared.rows + stream * Memory::kRowStride + half * Memory::kHalfStride;
      const T* own_x = shared.rows + stream * Memory::kRowStride + Memory::kQ + channel;
#pragma unroll 1
      for (int left = smaller(rows, kBackwardRows) - stream; left > -stream; left -= streams) {
        const bool writes = left > 0 && channel + half < channels;
        T before = 0;
        if (accumulate && writes) before = *target;
        const Pair<T> x = load_pair(own_x);
        Pair<T> row_sum = {};
#pragma unroll
        for (int first_of_four = 0; first_of_four < Half; first_of_four += 4) {
          Quad<T> four = {};
          if (first_of_four + 4 <= Half) {
            four = load_quad(own + first_of_four);
          } else {
            four.x = own[first_of_four];
          }
          const T w[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (int j = first_of_four; j < first_of_four + 4 && j < Half; ++j) {
            Pair<T> t = {x.x - k[j].x, x.y - k[j].y};
            if constexpr (Kind == kLaplacian) t = {above(t.x), above(t.y)};
            row_sum.x = multiply_add(w[j % 4], t.x, row_sum.x);
            row_sum.y = multiply_add(w[j % 4], t.y, row_sum.y);
            sums[j].x = multiply_add(w[j % 4], t.x, sums[j].x);
            sums[j].y = multiply_add(w[j % 4], t.y, sums[j].y);
          }
        }
        // Each of the two threads of a channel pair completes one channel.
        const T other = __shfl_xor_sync(kFullWarp, half == 0 ? row_sum.y : row_sum.x, 1);
        T sum = (half == 0 ? row_sum.x : row_sum.y) + other;
        if constexpr (Kind == kLaplacian) sum = multiply_add(T(2), sum, -own[Memory::kRowSum]);
        if (writes) *target = multiply_add(q_factor, sum, before);
        target = row_of(target, streams, a.channels);
        own += streams * Memory::kRowStride;
        own_x += streams * Memory::kRowStride;
      }
    }
    accumulate = true;

    if constexpr (Kind == kLaplacian) {
#pragma unroll
      for (int j = 0; j < Half; ++j) {
        const T weights = shared.column_sums[stream * Memory::kQ + half * Memory::kHalfStride + j];
        sums[j] = {multiply_add(T(2), sums[j].x, -weights), multiply_add(T(2), sums[j].y, -weights)};
      }
    }
    // From the last stream to the first, each adds its own sums to those of the streams behind it.
    T* passed = shared.passed + half * Half * Memory::kPassedStride + channel;
#pragma unroll 1
    for (int turn = streams - 1; turn >= 0; --turn) {
      __syncthreads();
      if (idle || stream != turn) continue;
      if (turn < streams - 1) {
#pragma unroll
        for (int j = 0; j < Half; ++j) {
          const Pair<T> behind = load_pair(passed + j * Memory::kPassedStride);
          sums[j] = {sums[j].x + behind.x, sums[j].y + behind.y};
        }
      }
      if (turn > 0) {
#pragma unroll
        for (int j = 0; j < Half; ++j) store_pair(passed + j * Memory::kPassedStride, sums[j]);
      }
    }
    if (stream == 0 && channel < channels) {
      const int first_stored = not_hoisted(first_count), second_stored = not_hoisted(second_count);
      T* grad_k = a.grad_k + row_block * a.grad_k_part + own_channel + half * Half * a.channels;
      if (rows_are_pairs(grad_k, a.channels)) {
#pragma unroll
        for (int j = 0; j < Half; ++j) {
          if (j < first_stored) store_pair(grad_k, {-q_factor * sums[j].x, -q_factor * sums[j].y});
          grad_k += a.channels;
        }
      } else {
#pragma unroll
        for (int j = 0; j < Half; ++j) {
          if (j < first_stored) grad_k[0] = -q_factor * sums[j].x;
          if (j < second_stored) grad_k[1] = -q_factor * sums[j].y;
          grad_k += a.channels;
        }
      }
    }
  }
}

// ---- out[i] = parts[0][i] + parts[1][i] + ..., zero for no parts ----

constexpr int kSumThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kSumThreads)
sum_of_parts(const T* __restrict__ parts, T* __restrict__ out, int64_t part_count, int64_t size) {
  const int64_t i = int64_t(blockIdx.x) * kSumThreads + threadIdx.x;
  if (i >= size) return;
  T sum = 0;
  for (int64_t part = 0; part < part_count; ++part) sum += parts[part * size + i];
  out[i] = sum;
}

}  // namespace attngeo
