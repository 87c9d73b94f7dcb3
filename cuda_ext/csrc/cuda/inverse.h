// Launchers of the batched inverses of P = W + eps I, W [matrices, size, size]. Every function returns nullptr or the
// text of an error. `workspace` is memory of the device with as many numbers as the function of that name says; it may
// be nullptr where that is 0.
#pragma once
#include <cstdint>

namespace attngeo {

enum NewtonSchulzStart : int { kPaperStart = 0, kIdentityStart = 1 };

}  // namespace attngeo

extern "C" {

#define ATTNGEO_INVERSE_LAUNCHERS(T, suffix)                                                                          \
  /* X <- X (2I - P X) `iterations` times, from 1.8 P^T / (||P||_1 ||P||_inf) or I / ||P||_inf (0 for a zero norm);    \
     residual [matrices] = ||I - P X||_F, infinity where it is not a number */                                        \
  int64_t attngeo_newton_schulz_workspace_##suffix(int64_t matrices, int64_t size);                                   \
  const char* attngeo_newton_schulz_##suffix(const T* W, T* inverse, T* residual, T* workspace, int64_t matrices,     \
                                             int64_t size, int64_t iterations, double eps,                            \
                                             attngeo::NewtonSchulzStart, int device, void* stream);                   \
  /* inverse of a symmetric positive definite P without pivoting; failed_pivot [matrices] is 0, or 1 + the first      \
     pivot that is not positive (the inverse then holds zeros) */                                                     \
  int64_t attngeo_spd_inverse_workspace_##suffix(int64_t matrices, int64_t size);                                     \
  const char* attngeo_spd_inverse_##suffix(const T* W, T* inverse, int32_t* failed_pivot, T* workspace,               \
                                           int64_t matrices, int64_t size, double eps, int device, void* stream);

ATTNGEO_INVERSE_LAUNCHERS(float, f32)
ATTNGEO_INVERSE_LAUNCHERS(double, f64)
#undef ATTNGEO_INVERSE_LAUNCHERS
}
