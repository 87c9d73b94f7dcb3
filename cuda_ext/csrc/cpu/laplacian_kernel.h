// The CPU kernels, compiled once per instruction set from one source; ops.cpp picks a variant when the program runs.
#pragma once
#include <cstdint>

namespace attngeo {

// Sizes of one (batch, head) slice: N rows of q, M landmarks of k, D channels.
struct SliceShape {
  int64_t landmarks;
  int64_t channels;
};

// Gradients of k are first summed over chunks of this many rows, then over the chunks, in an order that depends on
// neither the number of threads nor the batch.
constexpr int64_t kRowsPerChunk = 256;

template <typename T>
struct LaplacianKernels {
  // Elements of one slice of k as `pack_forward` and `pack_backward` lay it out.
  int64_t (*forward_packed_size)(SliceShape);
  int64_t (*padded_channels)(int64_t channels);
  void (*pack_forward)(const T* k, T* packed, SliceShape);
  void (*pack_backward)(const T* k, T* packed, SliceShape);
  // out[n, m] = exp(-|q_n - k_m|_1 / lambda)
  void (*forward)(const T* q, const T* packed, T* out, int64_t rows, SliceShape, double lambda);
  // One chunk: grad_q of its rows, and its share [M, padded D] of grad_k. `scratch` holds backward_scratch_size.
  int64_t (*backward_scratch_size)(SliceShape);
  void (*backward)(const T* grad, const T* kernel, const T* q, const T* packed, T* grad_q, T* grad_k_share, T* scratch,
                   int64_t rows, SliceShape, double lambda);
};

struct LaplacianVariant {
  const char* name;
  LaplacianKernels<float> f32;
  LaplacianKernels<double> f64;
};

extern const LaplacianVariant laplacian_portable;
#ifdef ATTNGEO_X86_VARIANTS
extern const LaplacianVariant laplacian_avx2;
extern const LaplacianVariant laplacian_avx512;
#endif

}  // namespace attngeo
