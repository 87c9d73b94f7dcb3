// Bodies of the Laplacian kernels. Slices are (batch, head) pairs; all offsets are 64-bit, and blocks are numbered in
// one dimension, since the other two stop at 65,535.
#pragma once
#include <cstdint>

namespace attngeo {

constexpr int kThreads = 256;
constexpr int kSide = 16;               // threads along each side of a tile
constexpr int kPerThread = 4;           // results along each side for one thread
constexpr int kTile = kSide * kPerThread;
constexpr int kDepth = 16;              // channels (forward) or summands (backward) in shared memory at a time
constexpr int kPadding = 4;             // keeps the transposed stores off one bank

template <typename T>
struct Tiles {
  T left[kDepth][kTile + kPadding];
  T right[kDepth][kTile + kPadding];
};

inline __host__ __device__ int64_t tiles_of(int64_t size) { return (size + kTile - 1) / kTile; }

// out[s, n, m] = exp(scale * sum_c |q[s, n, c] - k[s, m, c]|), one kTile x kTile tile of out per block.
template <typename T>
__global__ void __launch_bounds__(kThreads)
laplacian_forward(const T* __restrict__ q, const T* __restrict__ k, T* __restrict__ out, int64_t rows,
                  int64_t landmarks, int64_t channels, T scale) {
  __shared__ Tiles<T> shared;
  const int64_t column_tiles = tiles_of(landmarks);
  const int64_t row_tiles = tiles_of(rows);
  const int64_t first_landmark = (blockIdx.x % column_tiles) * kTile;
  const int64_t first_row = (blockIdx.x / column_tiles % row_tiles) * kTile;
  const int64_t slice = blockIdx.x / column_tiles / row_tiles;
  q += slice * rows * channels;
  k += slice * landmarks * channels;
  out += slice * rows * landmarks;
  const int x = threadIdx.x % kSide, y = threadIdx.x / kSide;
  T distance[kPerThread][kPerThread] = {};
  for (int64_t first_channel = 0; first_channel < channels; first_channel += kDepth) {
    for (int i = threadIdx.x; i < kTile * kDepth; i += kThreads) {
      const int token = i / kDepth, depth = i % kDepth;
      const int64_t channel = first_channel + depth;
      const bool inside = channel < channels;
      shared.left[depth][token] =
          inside && first_row + token < rows ? q[(first_row + token) * channels + channel] : T(0);
      shared.right[depth][token] =
          inside && first_landmark + token < landmarks ? k[(first_landmark + token) * channels + channel] : T(0);
    }
    __syncthreads();
#pragma unroll 8
    for (int depth = 0; depth < kDepth; ++depth) {
      T a[kPerThread], b[kPerThread];
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) a[i] = shared.left[depth][y * kPerThread + i];
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) b[j] = shared.right[depth][x * kPerThread + j];
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < kPerThread; ++j) distance[i][j] += fabs(a[i] - b[j]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int64_t row = first_row + y * kPerThread + i;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int64_t landmark = first_landmark + x * kPerThread + j;
      if (row < rows && landmark < landmarks) out[row * landmarks + landmark] = exp(distance[i][j] * scale);
    }
  }
}

// grad_x[s, n, c] = sum_m w(n, m) sign(x[s, n, c] - y[s, m, c]), w = scale * grad * kernel: the gradient of q with
// x = q, y = k, and that of k with x = k, y = q and the weights read across (`Across`). One block owns its tile of
// grad_x and sums in order, so that runs repeat bit by bit.
template <typename T, bool Across>
__global__ void __launch_bounds__(kThreads)
laplacian_backward(const T* __restrict__ grad, const T* __restrict__ kernel, const T* __restrict__ x_tokens,
                   const T* __restrict__ y_tokens, T* __restrict__ grad_x, int64_t x_count, int64_t y_count,
                   int64_t channels, T scale) {
  __shared__ Tiles<T> shared;
  const int64_t channel_tiles = tiles_of(channels);
  const int64_t token_tiles = tiles_of(x_count);
  const int64_t first_channel = (blockIdx.x % channel_tiles) * kTile;
  const int64_t first_token = (blockIdx.x / channel_tiles % token_tiles) * kTile;
  const int64_t slice = blockIdx.x / channel_tiles / token_tiles;
  grad += slice * x_count * y_count;
  kernel += slice * x_count * y_count;
  x_tokens += slice * x_count * channels;
  y_tokens += slice * y_count * channels;
  grad_x += slice * x_count * channels;
  const int x = threadIdx.x % kSide, y = threadIdx.x / kSide;
  T own[kPerThread][kPerThread], sum[kPerThread][kPerThread] = {};
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int64_t token = first_token + y * kPerThread + i;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int64_t channel = first_channel + x * kPerThread + j;
      own[i][j] = token < x_count && channel < channels ? x_tokens[token * channels + channel] : T(0);
    }
  }
  for (int64_t first_other = 0; first_other < y_count; first_other += kDepth) {
    for (int i = threadIdx.x; i < kTile * kDepth; i += kThreads) {
      // Neighbouring threads read neighbouring numbers: along y where the weights are stored that way, else along x.
      const int depth = Across ? i / kTile : i % kDepth;
      const int token = Across ? i % kTile : i / kDepth;
      const int64_t own_token = first_token + token, other = first_other + depth;
      const int64_t weight = Across ? other * x_count + own_token : own_token * y_count + other;
      shared.left[depth][token] =
          own_token < x_count && other < y_count ? grad[weight] * kernel[weight] * scale : T(0);
    }
    for (int i = threadIdx.x; i < kTile * kDepth; i += kThreads) {
      const int depth = i / kTile, offset = i % kTile;
      const int64_t other = first_other + depth, channel = first_channel + offset;
      shared.right[depth][offset] = other < y_count && channel < channels ? y_tokens[other * channels + channel] : T(0);
    }
    __syncthreads();
    // Unrolling this loop makes the compiler spill registers on every architecture.
#pragma unroll 1
    for (int depth = 0; depth < kDepth; ++depth) {
      T weight[kPerThread], other[kPerThread];
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) weight[i] = shared.left[depth][y * kPerThread + i];
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) other[j] = shared.right[depth][x * kPerThread + j];
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < kPerThread; ++j) {
          const T difference = own[i][j] - other[j];
          // sign(0) = 0; a NaN difference keeps the weight, which is NaN too.
          sum[i][j] += difference == T(0) ? T(0) : difference < T(0) ? -weight[i] : weight[i];
        }
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int64_t token = first_token + y * kPerThread + i;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int64_t channel = first_channel + x * kPerThread + j;
      if (token < x_count && channel < channels) grad_x[token * channels + channel] = sum[i][j];
    }
  }
}

}  // namespace attngeo
