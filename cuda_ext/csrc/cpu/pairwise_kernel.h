// CPU code of the pairwise kernels. Every function works on one slice and is called from several threads at once; its
// `scratch`, one for every thread, holds scratch_size (matmul_backward: matmul_backward_scratch_size) numbers on a
// 64-byte boundary.
#pragma once
#include "../pairwise.h"
#include "variant.h"

namespace attngeo {

// Rows are worked on in blocks of this many, so tasks should be multiples of it.
constexpr int64_t kBlockRows = 48;

template <typename T>
struct PairwiseFunctions {
  int64_t (*scratch_size)(PairwiseSizes);
  int64_t (*matmul_backward_scratch_size)(PairwiseSizes);
  // Channels or values rounded up to whole vectors: the width of what the gradients' functions share.
  int64_t (*padded)(int64_t width);

  // out [rows, landmarks] = K
  void (*forward)(const T* q, const T* k, T* out, T* scratch, int64_t rows, PairwiseSizes, double scale);

  // out [rows, values] = P v, P = exp(scale * (distance - origin)) / total; origin and total [rows] are 0 and 1, or
  // with `normalize` the smallest distance and the row's sum relative to it: two numbers, as one rounded logarithm of
  // both would lose the sum beside a large distance.
  void (*matmul_forward)(const T* q, const T* k, const T* v, T* out, T* origin, T* total, T* scratch, int64_t rows,
                         PairwiseSizes, double scale, bool normalize);

  // k as the two functions of gradients want it, [landmarks, padded(channels)]; returns a factor that the copy carries.
  T (*prepare)(const T* k, T* prepared, PairwiseSizes);

  // Gradients for the gradient `grad` of K: of q for these rows, and these rows' share [landmarks, padded(channels)] of
  // that of k.
  void (*backward)(const T* grad, const T* kernel, const T* q, const T* prepared, T factor, T* grad_q, T* share_k,
                   T* scratch, int64_t rows, PairwiseSizes, double scale);

  // The same for the gradient `grad` [rows, values] of E v with E = exp(scale * (distance - origin)), where the
  // exponent's gradient is E * (grad v^T - delta), and the share [landmarks, padded(values)] of the gradient of v.
  void (*matmul_backward)(const T* grad, const T* q, const T* k, const T* v, const T* prepared, T factor,
                          const T* origin, const T* delta, T* grad_q, T* share_k, T* share_v, T* scratch, int64_t rows,
                          PairwiseSizes, double scale);

  // out [landmarks, width] = the sum of `count` shares [all_landmarks, padded(width)], each from the given landmark on.
  void (*sum_shares)(const T* shares, int64_t count, int64_t all_landmarks, T* out, int64_t landmarks, int64_t width);
};

// By PairwiseKind.
struct PairwiseKernels {
  PairwiseFunctions<float> f32[2];
  PairwiseFunctions<double> f64[2];
};

ATTNGEO_DECLARE_VARIANTS(PairwiseKernels, pairwise_kernel)

}  // namespace attngeo
