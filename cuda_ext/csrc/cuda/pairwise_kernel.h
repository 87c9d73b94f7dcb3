// Launchers of the pairwise kernels. Every function returns nullptr or the text of an error. `workspace` is memory of
// the device with as many numbers as the function of that name says; it may be nullptr where that is 0.
#pragma once
#include "../pairwise.h"

extern "C" {

#define ATTNGEO_PAIRWISE_LAUNCHERS(T, suffix)                                                                         \
  /* out [slices, rows, landmarks] = K */                                                                             \
  const char* attngeo_pairwise_forward_##suffix(attngeo::PairwiseKind, const T* q, const T* k, T* out,                \
                                                attngeo::PairwiseSizes, double scale, int device, void* stream);      \
  /* gradients of q and k for the gradient `grad` of K, K given */                                                    \
  int64_t attngeo_pairwise_backward_workspace_##suffix(attngeo::PairwiseKind, attngeo::PairwiseSizes);                \
  const char* attngeo_pairwise_backward_##suffix(attngeo::PairwiseKind, const T* grad, const T* kernel, const T* q,   \
                                                 const T* k, T* grad_q, T* grad_k, T* workspace,                      \
                                                 attngeo::PairwiseSizes, double scale, int device, void* stream);     \
  /* out [slices, rows, values] = P v with P[n,m] = exp(scale * (distance - origin[n])) / total[n]; origin and total  \
     [slices, rows] are 0 and 1, or with `normalize` the smallest distance and the row's sum relative to it */        \
  const char* attngeo_pairwise_matmul_forward_##suffix(attngeo::PairwiseKind, const T* q, const T* k, const T* v,     \
                                                       T* out, T* origin, T* total, attngeo::PairwiseSizes,           \
                                                       double scale, bool normalize, int device, void* stream);       \
  /* gradients for the gradient `grad` of E v with E[n,m] = exp(scale * (distance - origin[n])): with dS =            \
     E * (grad v^T - delta[n]), grad_q and grad_k are those of a kernel whose exponent scale * distance has gradient  \
     dS, and grad_v = E^T grad */                                                                                     \
  int64_t attngeo_pairwise_matmul_backward_workspace_##suffix(attngeo::PairwiseKind, attngeo::PairwiseSizes);         \
  const char* attngeo_pairwise_matmul_backward_##suffix(                                                              \
      attngeo::PairwiseKind, const T* grad, const T* q, const T* k, const T* v, const T* origin, const T* delta,      \
      T* grad_q, T* grad_k, T* grad_v, T* workspace, attngeo::PairwiseSizes, double scale, int device, void* stream);

ATTNGEO_PAIRWISE_LAUNCHERS(float, f32)
ATTNGEO_PAIRWISE_LAUNCHERS(double, f64)
#undef ATTNGEO_PAIRWISE_LAUNCHERS
}
