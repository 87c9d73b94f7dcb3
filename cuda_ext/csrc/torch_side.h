// What the files on torch's stable ABI share: types, allocation, threads, the CUDA stream.
#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

namespace attngeo {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::vector<int64_t> shape_of(const Tensor& tensor) {
  return std::vector<int64_t>(tensor.sizes().begin(), tensor.sizes().end());
}

inline Tensor empty_with_shape_of(const Tensor& like) { return torch::stable::new_empty(like, shape_of(like)); }

// Tasks that one thread should have at least, so that small problems are not cut up; it changes no result.
inline int64_t grain(int64_t operations_per_task) {
  constexpr int64_t worth_a_thread = 1 << 17;
  return operations_per_task >= worth_a_thread ? 1 : worth_a_thread / (operations_per_task + 1) + 1;
}

#ifdef ATTNGEO_WITH_CUDA
// torch's current stream of a device, looked up in the running program.
void* current_stream(int32_t device);

// Raises "<op> on CUDA: <problem>" unless problem is nullptr.
void check_launch(const char* op, const char* problem);
#endif

}  // namespace attngeo
