// What the CPU and the CUDA code of the pairwise kernels K[s,n,m] = exp(scale * distance(q[s,n], k[s,m])) agree on.
// Arrays are dense and row-major: q [slices, rows, channels], k [slices, landmarks, channels], v [slices, landmarks,
// values], K [slices, rows, landmarks].
#pragma once
#include <cstdint>

namespace attngeo {

enum PairwiseKind : int {
  kLaplacian = 0,  // distance = sum_c |q_c - k_c|, scale = -1 / lambda
  kGaussian = 1,   // distance = sum_c (q_c - k_c)^2, scale = -1 / 2
};

struct PairwiseSizes {
  int64_t slices, rows, landmarks, channels;
  int64_t values;  // columns of v; 0 where there is none
};

}  // namespace attngeo
