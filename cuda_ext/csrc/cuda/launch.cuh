// How a kernel body meets the machine: nvcc and a GPU, or g++ and the emulator (csrc/emulator), which runs the same
// bodies and launchers on the host. Bodies use threadIdx.x, blockIdx.x, __syncthreads, __syncwarp, __shfl_*_sync and
// the functions below; their shared memory is one struct, asked for with ATTNGEO_SHARED and sized at the launch.
#pragma once
#include <cstdint>

#ifdef ATTNGEO_EMULATOR
#include "../emulator/host_cuda.h"
#else
#include <cuda_runtime.h>

#define ATTNGEO_SHARED(Type, name)                   \
  extern __shared__ __align__(16) char shared_raw[]; \
  Type& name = *reinterpret_cast<Type*>(shared_raw)

namespace attngeo {

// This library has its own CUDA runtime (linked statically), whose current device must follow the tensors'.
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
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  const char* problem() const { return error_ == cudaSuccess ? nullptr : cudaGetErrorString(error_); }

 private:
  int previous_ = 0;
  bool changed_ = false;
  cudaError_t error_;
};

// Bytes of shared memory that a block of the current device may ask for.
inline int64_t shared_memory_limit() {
  int device = 0, bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) {
    return 48 * 1024;
  }
  return bytes;
}

// Run `kernel` on the current device as `blocks` blocks of `threads` threads; no blocks is nothing to do. Returns
// nullptr or the text of the error.
template <typename... Parameters, typename... Arguments>
const char* launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int64_t shared_bytes, void* stream,
                   Arguments... arguments) {
  if (blocks == 0) return nullptr;
  if (blocks > 2147483647) return "too many blocks for one launch: split the batch";
  if (shared_bytes > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
    if (error != cudaSuccess) return cudaGetErrorString(error);
  }
  kernel<<<unsigned(blocks), threads, size_t(shared_bytes), static_cast<cudaStream_t>(stream)>>>(
      static_cast<Parameters>(arguments)...);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace attngeo
#endif
