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
  /* out [slices, rows, values] = P v with P[n,m] = exp(scale * distance - shift[n]); shift [slices, rows] is 0, or   \
     with `normalize` the logarithm of the row's sum, found without forming a quotient of sums that underflow */      \
  const char* attngeo_pairwise_matmul_forward_##suffix(attngeo::PairwiseKind, const T* q, const T* k, const T* v,     \
                                                       T* out, T* shift, attngeo::PairwiseSizes, double scale,        \
                                                       bool normalize, int device, void* stream);                     \
  /* gradients for the gradient `grad` of out: with dS = P * (grad v^T - delta[n]), grad_q and grad_k are those of a  \
     kernel whose exponent scale * distance has gradient dS, and grad_v = P^T grad */                                 \
  int64_t attngeo_pairwise_matmul_backward_workspace_##suffix(attngeo::PairwiseKind, attngeo::PairwiseSizes);         \
  const char* attngeo_pairwise_matmul_backward_##suffix(                                                              \
      attngeo::PairwiseKind, const T* grad, const T* q, const T* k, const T* v, const T* shift, const T* delta,       \
      T* grad_q, T* grad_k, T* grad_v, T* workspace, attngeo::PairwiseSizes, double scale, int device, void* stream);

ATTNGEO_PAIRWISE_LAUNCHERS(float, f32)
ATTNGEO_PAIRWISE_LAUNCHERS(double, f64)
#undef ATTNGEO_PAIRWISE_LAUNCHERS
}
