// Whether this binary has code that a device can run.
#include "device.h"

#include "launch.cuh"

namespace {

__global__ void probe() {}

}  // namespace

extern "C" const char* attngeo_device_problem(int device) {
  attngeo::OnDevice guard(device);
  if (guard.problem() != nullptr) return guard.problem();
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, probe);
  cudaGetLastError();  // a failed query must not surface in a later call
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
