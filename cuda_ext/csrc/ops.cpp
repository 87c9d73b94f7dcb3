// The registered operators attngeo::laplacian_kernel and attngeo::laplacian_kernel_backward, on torch's stable ABI.
// Shape propagation, autograd, autocast and vmap are registered in attngeo_ext/__init__.py.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <tuple>
#include <vector>

#include "cpu/laplacian_kernel.h"
#ifdef ATTNGEO_WITH_CUDA
#include <dlfcn.h>

#include "cuda/laplacian_kernel.h"
#endif

namespace {

using attngeo::kRowsPerChunk;
using attngeo::LaplacianKernels;
using attngeo::LaplacianVariant;
using attngeo::SliceShape;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct Sizes {
  int64_t slices = 1;
  int64_t rows;
  SliceShape shape;
};

Sizes check(const Tensor& q, const Tensor& k, double lambda) {
  const int64_t axes = q.dim();
  STD_TORCH_CHECK(axes >= 2 && k.dim() == axes, "laplacian_kernel: q and k must have the same number of axes, 2 or more");
  STD_TORCH_CHECK(q.size(axes - 1) == k.size(axes - 1), "laplacian_kernel: q and k differ in their channels");
  STD_TORCH_CHECK(q.scalar_type() == k.scalar_type(), "laplacian_kernel: q and k differ in type");
  STD_TORCH_CHECK(q.get_device_index() == k.get_device_index() && q.is_cuda() == k.is_cuda(),
                  "laplacian_kernel: q and k are on different devices");
  STD_TORCH_CHECK(q.scalar_type() == ScalarType::Float || q.scalar_type() == ScalarType::Double,
                  "laplacian_kernel: only float32 and float64");
  STD_TORCH_CHECK(lambda > 0, "laplacian_kernel: lambda must be positive");
  Sizes sizes;
  for (int64_t axis = 0; axis < axes - 2; ++axis) {
    STD_TORCH_CHECK(q.size(axis) == k.size(axis), "laplacian_kernel: q and k differ in a leading axis");
    sizes.slices *= q.size(axis);
  }
  sizes.rows = q.size(axes - 2);
  sizes.shape = {k.size(axes - 2), q.size(axes - 1)};
  return sizes;
}

void check_gradient(const Tensor& grad, const Tensor& kernel, const Tensor& q, const Sizes& sizes) {
  const int64_t numel = sizes.slices * sizes.rows * sizes.shape.landmarks;
  STD_TORCH_CHECK(grad.numel() == numel && kernel.numel() == numel,
                  "laplacian_kernel_backward: the gradient and the kernel must have the kernel's shape");
  STD_TORCH_CHECK(grad.scalar_type() == q.scalar_type() && kernel.scalar_type() == q.scalar_type(),
                  "laplacian_kernel_backward: all tensors must have one type");
}

Tensor empty_kernel(const Tensor& q, const Sizes& sizes) {
  std::vector<int64_t> shape(q.sizes().begin(), q.sizes().end());
  shape.back() = sizes.shape.landmarks;
  return torch::stable::new_empty(q, shape);
}

Tensor empty_with_shape_of(const Tensor& like) {
  return torch::stable::new_empty(like, std::vector<int64_t>(like.sizes().begin(), like.sizes().end()));
}

// The variants that this processor runs, the fastest last.
const std::vector<const LaplacianVariant*>& usable_variants() {
  static const std::vector<const LaplacianVariant*> usable = [] {
    std::vector<const LaplacianVariant*> found = {&attngeo::laplacian_portable};
#ifdef ATTNGEO_X86_VARIANTS
    const bool fma = __builtin_cpu_supports("fma");
    if (fma && __builtin_cpu_supports("avx2")) found.push_back(&attngeo::laplacian_avx2);
    if (fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
      found.push_back(&attngeo::laplacian_avx512);
    }
#endif
    return found;
  }();
  return usable;
}

std::atomic<const LaplacianVariant*> forced_variant{nullptr};

const LaplacianVariant& variant() {
  const LaplacianVariant* forced = forced_variant.load();
  return forced != nullptr ? *forced : *usable_variants().back();
}

template <typename T>
const LaplacianKernels<T>& kernels();
template <>
const LaplacianKernels<float>& kernels<float>() {
  return variant().f32;
}
template <>
const LaplacianKernels<double>& kernels<double>() {
  return variant().f64;
}

// Tasks that one thread should have at least, so that small problems are not cut up; it does not change any result.
int64_t grain(int64_t operations_per_task) {
  constexpr int64_t worth_a_thread = 1 << 17;
  return operations_per_task >= worth_a_thread ? 1 : worth_a_thread / (operations_per_task + 1) + 1;
}

// k in the layout of the forward or backward kernel, every slice `size` elements.
template <typename T>
Tensor pack(const Tensor& k, const Sizes& sizes, int64_t size, void (*pack_slice)(const T*, T*, SliceShape)) {
  const int64_t slice = sizes.shape.landmarks * sizes.shape.channels;
  Tensor packed = torch::stable::new_empty(k, {sizes.slices * size});
  const T* from = k.const_data_ptr<T>();
  T* to = packed.mutable_data_ptr<T>();
  torch::stable::parallel_for(0, sizes.slices, grain(slice), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) pack_slice(from + i * slice, to + i * size, sizes.shape);
  });
  return packed;
}

template <typename T>
void forward_cpu(const Tensor& q, const Tensor& k, Tensor& out, const Sizes& sizes, double lambda) {
  constexpr int64_t rows_per_task = 64;
  const auto& implementation = kernels<T>();
  const auto [landmarks, channels] = sizes.shape;
  const int64_t packed_size = implementation.forward_packed_size(sizes.shape);
  const Tensor packed = pack<T>(k, sizes, packed_size, implementation.pack_forward);
  const T* q_data = q.const_data_ptr<T>();
  const T* packed_data = packed.const_data_ptr<T>();
  T* out_data = out.mutable_data_ptr<T>();
  const int64_t blocks = (sizes.rows + rows_per_task - 1) / rows_per_task;
  const int64_t work = rows_per_task * landmarks * (channels + 1);
  torch::stable::parallel_for(0, sizes.slices * blocks, grain(work), [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t slice = task / blocks;
      const int64_t first = task % blocks * rows_per_task;
      const int64_t rows = std::min(rows_per_task, sizes.rows - first);
      const int64_t row = slice * sizes.rows + first;
      implementation.forward(q_data + row * channels, packed_data + slice * packed_size, out_data + row * landmarks,
                             rows, sizes.shape, lambda);
    }
  });
}

template <typename T>
void backward_cpu(const Tensor& grad, const Tensor& kernel, const Tensor& q, const Tensor& k, Tensor& grad_q,
                  Tensor& grad_k, const Sizes& sizes, double lambda) {
  const auto& implementation = kernels<T>();
  const auto [landmarks, channels] = sizes.shape;
  const int64_t stride = implementation.padded_channels(channels);
  const int64_t share = landmarks * stride;
  const int64_t chunks = (sizes.rows + kRowsPerChunk - 1) / kRowsPerChunk;
  const Tensor packed = pack<T>(k, sizes, share, implementation.pack_backward);
  Tensor shares = torch::stable::new_empty(k, {sizes.slices * chunks * share});
  const T *grad_data = grad.const_data_ptr<T>(), *kernel_data = kernel.const_data_ptr<T>();
  const T *q_data = q.const_data_ptr<T>(), *packed_data = packed.const_data_ptr<T>();
  T *grad_q_data = grad_q.mutable_data_ptr<T>(), *grad_k_data = grad_k.mutable_data_ptr<T>();
  T* shares_data = shares.mutable_data_ptr<T>();
  const int64_t work = kRowsPerChunk * landmarks * (2 * channels + 1);
  torch::stable::parallel_for(0, sizes.slices * chunks, grain(work), [&](int64_t begin, int64_t end) {
    const std::unique_ptr<T[]> scratch(new T[implementation.backward_scratch_size(sizes.shape)]);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t slice = task / chunks;
      const int64_t first = task % chunks * kRowsPerChunk;
      const int64_t rows = std::min(kRowsPerChunk, sizes.rows - first);
      const int64_t row = slice * sizes.rows + first;
      implementation.backward(grad_data + row * landmarks, kernel_data + row * landmarks, q_data + row * channels,
                              packed_data + slice * share, grad_q_data + row * channels, shares_data + task * share,
                              scratch.get(), rows, sizes.shape, lambda);
    }
  });
  torch::stable::parallel_for(0, sizes.slices * landmarks, grain(chunks * channels), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slice = token / landmarks;
      T* to = grad_k_data + token * channels;
      std::fill(to, to + channels, T(0));
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const T* from = shares_data + (slice * chunks + chunk) * share + token % landmarks * stride;
        for (int64_t channel = 0; channel < channels; ++channel) to[channel] += from[channel];
      }
    }
  });
}

Tensor laplacian_kernel_cpu(const Tensor& q_any, const Tensor& k_any, double lambda) {
  const Sizes sizes = check(q_any, k_any, lambda);
  const Tensor q = torch::stable::contiguous(q_any), k = torch::stable::contiguous(k_any);
  Tensor out = empty_kernel(q, sizes);
  if (q.scalar_type() == ScalarType::Float) {
    forward_cpu<float>(q, k, out, sizes, lambda);
  } else {
    forward_cpu<double>(q, k, out, sizes, lambda);
  }
  return out;
}

std::tuple<Tensor, Tensor> laplacian_kernel_backward_cpu(const Tensor& grad_any, const Tensor& q_any,
                                                         const Tensor& k_any, const Tensor& kernel_any,
                                                         double lambda) {
  const Sizes sizes = check(q_any, k_any, lambda);
  check_gradient(grad_any, kernel_any, q_any, sizes);
  const Tensor q = torch::stable::contiguous(q_any), k = torch::stable::contiguous(k_any);
  const Tensor grad = torch::stable::contiguous(grad_any), kernel = torch::stable::contiguous(kernel_any);
  Tensor grad_q = empty_with_shape_of(q), grad_k = empty_with_shape_of(k);
  if (q.scalar_type() == ScalarType::Float) {
    backward_cpu<float>(grad, kernel, q, k, grad_q, grad_k, sizes, lambda);
  } else {
    backward_cpu<double>(grad, kernel, q, k, grad_q, grad_k, sizes, lambda);
  }
  return {grad_q, grad_k};
}

#ifdef ATTNGEO_WITH_CUDA

// torch's stream getter, looked up in the running program: linking it would tie this library to a CUDA build of torch.
// torch loads its CUDA library outside the global scope, so that it has to be asked for by name.
void* current_stream(int32_t device) {
  using Getter = int32_t (*)(int32_t, void**);
  static const Getter getter = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library == nullptr ? nullptr
                              : reinterpret_cast<Getter>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  STD_TORCH_CHECK(getter != nullptr, "this torch has no CUDA streams");
  void* stream = nullptr;
  STD_TORCH_CHECK(getter(device, &stream) == 0, "torch gave no CUDA stream for device ", device);
  return stream;
}

void check_launch(const char* problem) {
  STD_TORCH_CHECK(problem == nullptr, "laplacian_kernel on CUDA: ", problem);
}

Tensor laplacian_kernel_cuda(const Tensor& q_any, const Tensor& k_any, double lambda) {
  const Sizes sizes = check(q_any, k_any, lambda);
  const int32_t device = q_any.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Tensor q = torch::stable::contiguous(q_any), k = torch::stable::contiguous(k_any);
  Tensor out = empty_kernel(q, sizes);
  const auto [landmarks, channels] = sizes.shape;
  void* stream = current_stream(device);
  if (q.scalar_type() == ScalarType::Float) {
    check_launch(attngeo_laplacian_forward_f32(q.const_data_ptr<float>(), k.const_data_ptr<float>(),
                                               out.mutable_data_ptr<float>(), sizes.slices, sizes.rows, landmarks,
                                               channels, lambda, device, stream));
  } else {
    check_launch(attngeo_laplacian_forward_f64(q.const_data_ptr<double>(), k.const_data_ptr<double>(),
                                               out.mutable_data_ptr<double>(), sizes.slices, sizes.rows, landmarks,
                                               channels, lambda, device, stream));
  }
  return out;
}

std::tuple<Tensor, Tensor> laplacian_kernel_backward_cuda(const Tensor& grad_any, const Tensor& q_any,
                                                          const Tensor& k_any, const Tensor& kernel_any,
                                                          double lambda) {
  const Sizes sizes = check(q_any, k_any, lambda);
  check_gradient(grad_any, kernel_any, q_any, sizes);
  const int32_t device = q_any.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Tensor q = torch::stable::contiguous(q_any), k = torch::stable::contiguous(k_any);
  const Tensor grad = torch::stable::contiguous(grad_any), kernel = torch::stable::contiguous(kernel_any);
  Tensor grad_q = empty_with_shape_of(q), grad_k = empty_with_shape_of(k);
  const auto [landmarks, channels] = sizes.shape;
  void* stream = current_stream(device);
  if (q.scalar_type() == ScalarType::Float) {
    check_launch(attngeo_laplacian_backward_f32(
        grad.const_data_ptr<float>(), kernel.const_data_ptr<float>(), q.const_data_ptr<float>(),
        k.const_data_ptr<float>(), grad_q.mutable_data_ptr<float>(), grad_k.mutable_data_ptr<float>(), sizes.slices,
        sizes.rows, landmarks, channels, lambda, device, stream));
  } else {
    check_launch(attngeo_laplacian_backward_f64(
        grad.const_data_ptr<double>(), kernel.const_data_ptr<double>(), q.const_data_ptr<double>(),
        k.const_data_ptr<double>(), grad_q.mutable_data_ptr<double>(), grad_k.mutable_data_ptr<double>(), sizes.slices,
        sizes.rows, landmarks, channels, lambda, device, stream));
  }
  return {grad_q, grad_k};
}

#endif

}  // namespace

STABLE_TORCH_LIBRARY(attngeo, m) {
  m.def("laplacian_kernel(Tensor q, Tensor k, float lambda_) -> Tensor");
  m.def("laplacian_kernel_backward(Tensor grad, Tensor q, Tensor k, Tensor kernel, float lambda_) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(attngeo, CPU, m) {
  m.impl("laplacian_kernel", TORCH_BOX(&laplacian_kernel_cpu));
  m.impl("laplacian_kernel_backward", TORCH_BOX(&laplacian_kernel_backward_cpu));
}

#ifdef ATTNGEO_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(attngeo, CUDA, m) {
  m.impl("laplacian_kernel", TORCH_BOX(&laplacian_kernel_cuda));
  m.impl("laplacian_kernel_backward", TORCH_BOX(&laplacian_kernel_backward_cuda));
}
#endif

// Called from Python through ctypes, so that building needs no Python headers and one binary serves every version.
extern "C" {

__attribute__((visibility("default"))) const char* attngeo_cpu_variant() { return variant().name; }

// Use the named variant from now on, the fastest for an empty name; false if this processor cannot run it.
__attribute__((visibility("default"))) bool attngeo_use_cpu_variant(const char* name) {
  if (*name == '\0') {
    forced_variant = nullptr;
    return true;
  }
  for (const LaplacianVariant* usable : usable_variants()) {
    if (std::strcmp(usable->name, name) == 0) {
      forced_variant = usable;
      return true;
    }
  }
  return false;
}

// nullptr if the kernels can run on this CUDA device.
__attribute__((visibility("default"))) const char* attngeo_cuda_problem([[maybe_unused]] int device) {
#ifdef ATTNGEO_WITH_CUDA
  return attngeo_laplacian_device_problem(device);
#else
  return "the extension was built without CUDA";
#endif
}
}
