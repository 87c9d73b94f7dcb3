// Batched inverses of P = W + eps I on the CPU, one matrix a call; compiled once per instruction set.
#pragma once
#include <cstdint>

#include "variant.h"

namespace attngeo {

// `W` and `inverse` are [size, size], packed by rows. `workspace` starts at a multiple of kWorkspaceAlignment bytes and
// holds as many numbers as the function of that name says.
template <typename T>
struct InverseFunctions {
  int64_t (*newton_schulz_workspace)(int64_t size);
  // X <- 2X - X (P X), `iterations` times, from 1.8 P^T / (||P||_1 ||P||_inf) or, with `identity_start`,
  // I / ||P||_inf; the reciprocal of a norm of 0 counts as 0. Returns ||I - P X||_F, infinity where it is not finite.
  T (*newton_schulz)(const T* W, T* inverse, T* workspace, int64_t size, int64_t iterations, T eps,
                     bool identity_start);
  int64_t (*spd_workspace)(int64_t size);
  // Cholesky's inverse, exactly symmetric, from the upper triangle of W. Returns 0, or 1 + the index of the first pivot
  // that is not positive; the inverse then holds zeros. A value below the diagonal that is not finite fails its row.
  int32_t (*spd)(const T* W, T* inverse, T* workspace, int64_t size, T eps);
};

constexpr int kWorkspaceAlignment = 64;

struct Inverse {
  InverseFunctions<float> f32;
  InverseFunctions<double> f64;
};

ATTNGEO_DECLARE_VARIANTS(Inverse, inverse)

}  // namespace attngeo
