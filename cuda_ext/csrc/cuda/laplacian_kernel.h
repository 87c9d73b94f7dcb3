// Plain C between the torch-free CUDA file and ops.cpp. Every function returns nullptr or the text of a CUDA error.
#pragma once
#include <cstdint>

extern "C" {
const char* attngeo_laplacian_forward_f32(const float* q, const float* k, float* out, int64_t slices, int64_t rows,
                                          int64_t landmarks, int64_t channels, double lambda, int device, void* stream);
const char* attngeo_laplacian_forward_f64(const double* q, const double* k, double* out, int64_t slices, int64_t rows,
                                          int64_t landmarks, int64_t channels, double lambda, int device, void* stream);
const char* attngeo_laplacian_backward_f32(const float* grad, const float* kernel, const float* q, const float* k,
                                           float* grad_q, float* grad_k, int64_t slices, int64_t rows,
                                           int64_t landmarks, int64_t channels, double lambda, int device,
                                           void* stream);
const char* attngeo_laplacian_backward_f64(const double* grad, const double* kernel, const double* q, const double* k,
                                           double* grad_q, double* grad_k, int64_t slices, int64_t rows,
                                           int64_t landmarks, int64_t channels, double lambda, int device,
                                           void* stream);
// Whether this binary has code for the device.
const char* attngeo_laplacian_device_problem(int device);
}
