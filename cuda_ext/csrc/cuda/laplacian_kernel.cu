// Launchers of the Laplacian kernels. No torch header: it would cost minutes of compilation.
#include "laplacian_kernel.cuh"

#include <cuda_runtime.h>

#include "laplacian_kernel.h"

namespace {

using attngeo::kThreads;
using attngeo::tiles_of;

constexpr int64_t kMostBlocks = 2147483647;

// This file has its own CUDA runtime (linked statically), whose current device must follow the tensors'.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    error_ = cudaGetDevice(&previous_);
    if (error_ == cudaSuccess && previous_ != device) {
      error_ = cudaSetDevice(device);
      changed_ = error_ == cudaSuccess;
    }
  }
  ~OnDevice() {
    if (changed_) cudaSetDevice(previous_);
  }
  cudaError_t error() const { return error_; }

 private:
  int previous_ = 0;
  bool changed_ = false;
  cudaError_t error_;
};

const char* describe(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

template <typename T>
const char* forward(const T* q, const T* k, T* out, int64_t slices, int64_t rows, int64_t landmarks, int64_t channels,
                    double lambda, int device, void* stream) {
  const int64_t blocks = slices * tiles_of(rows) * tiles_of(landmarks);
  if (blocks == 0) return nullptr;
  if (blocks > kMostBlocks) return "too many tiles for one launch: split the batch";
  OnDevice guard(device);
  if (guard.error() != cudaSuccess) return describe(guard.error());
  attngeo::laplacian_forward<T><<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      q, k, out, rows, landmarks, channels, static_cast<T>(-1.0 / lambda));
  return describe(cudaGetLastError());
}

template <typename T, bool Across>
cudaError_t backward_side(const T* grad, const T* kernel, const T* x, const T* y, T* grad_x, int64_t slices,
                          int64_t x_count, int64_t y_count, int64_t channels, double lambda, cudaStream_t stream) {
  const int64_t blocks = slices * tiles_of(x_count) * tiles_of(channels);
  if (blocks == 0) return cudaSuccess;
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  attngeo::laplacian_backward<T, Across><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      grad, kernel, x, y, grad_x, x_count, y_count, channels, static_cast<T>(-1.0 / lambda));
  return cudaGetLastError();
}

template <typename T>
const char* backward(const T* grad, const T* kernel, const T* q, const T* k, T* grad_q, T* grad_k, int64_t slices,
                     int64_t rows, int64_t landmarks, int64_t channels, double lambda, int device, void* stream) {
  OnDevice guard(device);
  if (guard.error() != cudaSuccess) return describe(guard.error());
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  cudaError_t error = backward_side<T, false>(grad, kernel, q, k, grad_q, slices, rows, landmarks, channels, lambda,
                                              cuda_stream);
  if (error == cudaSuccess) {
    error = backward_side<T, true>(grad, kernel, k, q, grad_k, slices, landmarks, rows, channels, lambda, cuda_stream);
  }
  return describe(error);
}

}  // namespace

extern "C" {

const char* attngeo_laplacian_forward_f32(const float* q, const float* k, float* out, int64_t slices, int64_t rows,
                                          int64_t landmarks, int64_t channels, double lambda, int device,
                                          void* stream) {
  return forward(q, k, out, slices, rows, landmarks, channels, lambda, device, stream);
}

const char* attngeo_laplacian_forward_f64(const double* q, const double* k, double* out, int64_t slices, int64_t rows,
                                          int64_t landmarks, int64_t channels, double lambda, int device,
                                          void* stream) {
  return forward(q, k, out, slices, rows, landmarks, channels, lambda, device, stream);
}

const char* attngeo_laplacian_backward_f32(const float* grad, const float* kernel, const float* q, const float* k,
                                           float* grad_q, float* grad_k, int64_t slices, int64_t rows,
                                           int64_t landmarks, int64_t channels, double lambda, int device,
                                           void* stream) {
  return backward(grad, kernel, q, k, grad_q, grad_k, slices, rows, landmarks, channels, lambda, device, stream);
}

const char* attngeo_laplacian_backward_f64(const double* grad, const double* kernel, const double* q, const double* k,
                                           double* grad_q, double* grad_k, int64_t slices, int64_t rows,
                                           int64_t landmarks, int64_t channels, double lambda, int device,
                                           void* stream) {
  return backward(grad, kernel, q, k, grad_q, grad_k, slices, rows, landmarks, channels, lambda, device, stream);
}

const char* attngeo_laplacian_device_problem(int device) {
  OnDevice guard(device);
  if (guard.error() != cudaSuccess) return describe(guard.error());
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, attngeo::laplacian_forward<float>);
  cudaGetLastError();  // a failed query must not surface in a later call
  return describe(error);
}

}  // extern "C"
