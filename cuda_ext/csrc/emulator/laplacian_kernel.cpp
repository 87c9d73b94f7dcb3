// The CUDA bodies of the Laplacian kernel behind plain C functions that run them on the host.
#include "host_cuda.h"

#include "../cuda/laplacian_kernel.cuh"

namespace {

using attngeo::kThreads;
using attngeo::tiles_of;

template <typename T>
void forward(const T* q, const T* k, T* out, int64_t slices, int64_t rows, int64_t landmarks, int64_t channels,
             double lambda) {
  emulator::launch(unsigned(slices * tiles_of(rows) * tiles_of(landmarks)), kThreads, [=] {
    attngeo::laplacian_forward<T>(q, k, out, rows, landmarks, channels, T(-1.0 / lambda));
  });
}

template <typename T>
void backward(const T* grad, const T* kernel, const T* q, const T* k, T* grad_q, T* grad_k, int64_t slices,
              int64_t rows, int64_t landmarks, int64_t channels, double lambda) {
  const T scale = T(-1.0 / lambda);
  emulator::launch(unsigned(slices * tiles_of(rows) * tiles_of(channels)), kThreads, [=] {
    attngeo::laplacian_backward<T, false>(grad, kernel, q, k, grad_q, rows, landmarks, channels, scale);
  });
  emulator::launch(unsigned(slices * tiles_of(landmarks) * tiles_of(channels)), kThreads, [=] {
    attngeo::laplacian_backward<T, true>(grad, kernel, k, q, grad_k, landmarks, rows, channels, scale);
  });
}

}  // namespace

extern "C" {

void forward_f32(const float* q, const float* k, float* out, int64_t slices, int64_t rows, int64_t landmarks,
                 int64_t channels, double lambda) {
  forward(q, k, out, slices, rows, landmarks, channels, lambda);
}

void forward_f64(const double* q, const double* k, double* out, int64_t slices, int64_t rows, int64_t landmarks,
                 int64_t channels, double lambda) {
  forward(q, k, out, slices, rows, landmarks, channels, lambda);
}

void backward_f32(const float* grad, const float* kernel, const float* q, const float* k, float* grad_q, float* grad_k,
                  int64_t slices, int64_t rows, int64_t landmarks, int64_t channels, double lambda) {
  backward(grad, kernel, q, k, grad_q, grad_k, slices, rows, landmarks, channels, lambda);
}

void backward_f64(const double* grad, const double* kernel, const double* q, const double* k, double* grad_q,
                  double* grad_k, int64_t slices, int64_t rows, int64_t landmarks, int64_t channels, double lambda) {
  backward(grad, kernel, q, k, grad_q, grad_k, slices, rows, landmarks, channels, lambda);
}
}
