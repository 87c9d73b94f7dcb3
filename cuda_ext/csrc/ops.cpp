// Schemas of the registered operators, the choice of the instruction set, and the functions that Python calls through
// ctypes. Implementations register themselves in the *_ops.cpp beside this file; shape propagation, autograd, autocast
// and vmap are registered in attngeo_ext.
#include "torch_side.h"

#include <atomic>
#include <cstring>

#include "cpu/variant.h"
#ifdef ATTNGEO_WITH_CUDA
#include <dlfcn.h>

#include "cuda/device.h"
#endif

namespace attngeo {
namespace {

constexpr const char* kVariantNames[] = {"portable", "avx2", "avx512"};

Variant fastest_variant() {
  static const Variant fastest = [] {
#ifdef ATTNGEO_X86_VARIANTS
    const bool avx2 = __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx2");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
      return Variant::kAvx512;
    }
    if (avx2) return Variant::kAvx2;
#endif
    return Variant::kPortable;
  }();
  return fastest;
}

constexpr int kNotForced = -1;
std::atomic<int> forced_variant{kNotForced};

}  // namespace

Variant cpu_variant() {
  const int forced = forced_variant.load(std::memory_order_relaxed);
  return forced == kNotForced ? fastest_variant() : static_cast<Variant>(forced);
}

#ifdef ATTNGEO_WITH_CUDA

// Linking torch's stream getter would tie this library to a CUDA build of torch. torch loads its CUDA library outside
// the global scope, so that it has to be asked for by name.
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

void check_launch(const char* op, const char* problem) {
  STD_TORCH_CHECK(problem == nullptr, op, " on CUDA: ", problem);
}

#endif

}  // namespace attngeo

STABLE_TORCH_LIBRARY(attngeo, m) {
  m.def("laplacian_kernel(Tensor q, Tensor k, float lambda_) -> Tensor");
  m.def("laplacian_kernel_backward(Tensor grad, Tensor q, Tensor k, Tensor kernel, float lambda_) -> (Tensor, Tensor)");
  m.def(
      "laplacian_kernel_matmul(Tensor q, Tensor k, Tensor v, float lambda_, bool normalize) -> (Tensor output, Tensor "
      "origin, Tensor total)");
  m.def(
      "laplacian_kernel_relative_matmul_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor origin, Tensor "
      "delta, float lambda_) -> (Tensor, Tensor, Tensor)");
  m.def("gaussian_kernel(Tensor q, Tensor k) -> Tensor");
  m.def("gaussian_kernel_backward(Tensor grad, Tensor q, Tensor k, Tensor kernel) -> (Tensor, Tensor)");
  m.def(
      "gaussian_kernel_matmul(Tensor q, Tensor k, Tensor v, bool normalize) -> (Tensor output, Tensor origin, Tensor "
      "total)");
  m.def(
      "gaussian_kernel_relative_matmul_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor origin, Tensor "
      "delta) -> (Tensor, Tensor, Tensor)");
  m.def(
      "newton_schulz_inverse(Tensor W, int iterations, float eps, str start) -> (Tensor inverse, Tensor residual)");
  m.def("spd_inverse(Tensor W, float eps) -> (Tensor inverse, Tensor failed_pivot)");
}

extern "C" {

__attribute__((visibility("default"))) const char* attngeo_cpu_variant() {
  return attngeo::kVariantNames[static_cast<int>(attngeo::cpu_variant())];
}

// Use the named variant from now on, the fastest for an empty name; false if this processor cannot run it.
__attribute__((visibility("default"))) bool attngeo_use_cpu_variant(const char* name) {
  if (*name == '\0') {
    attngeo::forced_variant = attngeo::kNotForced;
    return true;
  }
  for (int index = 0; index <= static_cast<int>(attngeo::fastest_variant()); ++index) {
    if (std::strcmp(attngeo::kVariantNames[index], name) == 0) {
      attngeo::forced_variant = index;
      return true;
    }
  }
  return false;
}

// Why the CUDA kernels cannot run on a device, nullptr if they can.
__attribute__((visibility("default"))) const char* attngeo_cuda_problem(int device) {
#ifdef ATTNGEO_WITH_CUDA
  return attngeo_device_problem(device);
#else
  (void)device;
  return "the extension was built without CUDA";
#endif
}
}
