// newton_schulz_inverse and spd_inverse for torch: checks, allocation, threads, and the CUDA launchers.
#include <memory>
#include <new>
#include <string>
#include <tuple>

#include "cpu/inverse.h"
#include "torch_side.h"
#ifdef ATTNGEO_WITH_CUDA
#include "cuda/inverse.h"
#endif

namespace attngeo {
namespace {

struct Matrices {
  std::vector<int64_t> batch;  // the leading axes
  int64_t count = 1;
  int64_t size;
};

Matrices check(const char* op, const Tensor& W) {
  const int64_t axes = W.dim();
  STD_TORCH_CHECK(axes >= 2 && W.size(axes - 1) == W.size(axes - 2), op, ": expected square matrices");
  STD_TORCH_CHECK(W.scalar_type() == ScalarType::Float || W.scalar_type() == ScalarType::Double, op,
                  ": only float32 and float64");
  Matrices matrices;
  for (int64_t axis = 0; axis < axes - 2; ++axis) {
    matrices.batch.push_back(W.size(axis));
    matrices.count *= W.size(axis);
  }
  matrices.size = W.size(axes - 1);
  return matrices;
}

bool is_identity_start(int64_t iterations, const std::string& start) {
  STD_TORCH_CHECK(iterations >= 0, "newton_schulz_inverse: iterations must not be negative");
  STD_TORCH_CHECK(start == "paper" || start == "identity",
                  "newton_schulz_inverse: the compiled operator starts from 'paper' or 'identity', not '", start, "'");
  return start == "identity";
}

template <typename T>
const InverseFunctions<T>& functions();
template <>
const InverseFunctions<float>& functions<float>() {
  return inverse().f32;
}
template <>
const InverseFunctions<double>& functions<double>() {
  return inverse().f64;
}

constexpr std::align_val_t kAlignment{kWorkspaceAlignment};

struct FreeWorkspace {
  void operator()(void* memory) const { ::operator delete(memory, kAlignment); }
};

// Calls run(index of a matrix, workspace) for every matrix. A thread takes whole matrices, so that neither threads nor
// batch change a result.
template <typename T, typename Run>
void for_each_matrix(const Matrices& matrices, int64_t workspace_size, int64_t operations, const Run& run) {
  torch::stable::parallel_for(0, matrices.count, grain(operations), [&](int64_t begin, int64_t end) {
    const std::unique_ptr<void, FreeWorkspace> workspace(::operator new(workspace_size * sizeof(T), kAlignment));
    for (int64_t matrix = begin; matrix < end; ++matrix) run(matrix, static_cast<T*>(workspace.get()));
  });
}

template <typename T>
void newton_schulz_cpu(const Tensor& W, Tensor& inverse, Tensor& residual, const Matrices& matrices, int64_t iterations,
                       double eps, bool identity_start) {
  const InverseFunctions<T>& implementation = functions<T>();
  const int64_t size = matrices.size, numbers = size * size;
  const T* W_data = W.const_data_ptr<T>();
  T *inverse_data = inverse.mutable_data_ptr<T>(), *residual_data = residual.mutable_data_ptr<T>();
  const int64_t workspace_size = implementation.newton_schulz_workspace(size);
  for_each_matrix<T>(matrices, workspace_size, (2 * iterations + 1) * size * numbers, [&](int64_t i, T* workspace) {
    residual_data[i] = implementation.newton_schulz(W_data + i * numbers, inverse_data + i * numbers, workspace, size,
                                                    iterations, T(eps), identity_start);
  });
}

template <typename T>
void spd_cpu(const Tensor& W, Tensor& inverse, Tensor& failed_pivot, const Matrices& matrices, double eps) {
  const InverseFunctions<T>& implementation = functions<T>();
  const int64_t size = matrices.size, numbers = size * size;
  const T* W_data = W.const_data_ptr<T>();
  T* inverse_data = inverse.mutable_data_ptr<T>();
  int32_t* failed_data = failed_pivot.mutable_data_ptr<int32_t>();
  for_each_matrix<T>(matrices, implementation.spd_workspace(size), size * numbers, [&](int64_t i, T* workspace) {
    failed_data[i] = implementation.spd(W_data + i * numbers, inverse_data + i * numbers, workspace, size, T(eps));
  });
}

std::tuple<Tensor, Tensor> newton_schulz_inverse_cpu(const Tensor& W_any, int64_t iterations, double eps,
                                                     std::string start) {
  const Matrices matrices = check("newton_schulz_inverse", W_any);
  const bool identity_start = is_identity_start(iterations, start);
  const Tensor W = torch::stable::contiguous(W_any);
  Tensor inverse = empty_with_shape_of(W), residual = torch::stable::new_empty(W, matrices.batch);
  if (W.scalar_type() == ScalarType::Float) {
    newton_schulz_cpu<float>(W, inverse, residual, matrices, iterations, eps, identity_start);
  } else {
    newton_schulz_cpu<double>(W, inverse, residual, matrices, iterations, eps, identity_start);
  }
  return {inverse, residual};
}

std::tuple<Tensor, Tensor> spd_inverse_cpu(const Tensor& W_any, double eps) {
  const Matrices matrices = check("spd_inverse", W_any);
  const Tensor W = torch::stable::contiguous(W_any);
  Tensor inverse = empty_with_shape_of(W);
  Tensor failed_pivot = torch::stable::new_empty(W, matrices.batch, ScalarType::Int);
  if (W.scalar_type() == ScalarType::Float) {
    spd_cpu<float>(W, inverse, failed_pivot, matrices, eps);
  } else {
    spd_cpu<double>(W, inverse, failed_pivot, matrices, eps);
  }
  return {inverse, failed_pivot};
}

#ifdef ATTNGEO_WITH_CUDA

// Memory of the device for a launcher that asks for `numbers` numbers; the caching allocator frees it in stream order.
Tensor new_workspace(const Tensor& like, int64_t numbers) { return torch::stable::new_empty(like, {numbers}); }

template <typename T>
T* workspace_data(const Tensor& workspace) {
  return workspace.numel() == 0 ? nullptr : workspace.mutable_data_ptr<T>();
}

std::tuple<Tensor, Tensor> newton_schulz_inverse_cuda(const Tensor& W_any, int64_t iterations, double eps,
                                                      std::string start) {
  const Matrices matrices = check("newton_schulz_inverse", W_any);
  const NewtonSchulzStart kind = is_identity_start(iterations, start) ? kIdentityStart : kPaperStart;
  const int32_t device = W_any.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Tensor W = torch::stable::contiguous(W_any);
  Tensor inverse = empty_with_shape_of(W), residual = torch::stable::new_empty(W, matrices.batch);
  const auto [batch, count, size] = matrices;
  void* stream = current_stream(device);
  if (W.scalar_type() == ScalarType::Float) {
    const Tensor workspace = new_workspace(W, attngeo_newton_schulz_workspace_f32(count, size));
    check_launch("newton_schulz_inverse",
                 attngeo_newton_schulz_f32(W.const_data_ptr<float>(), inverse.mutable_data_ptr<float>(),
                                           residual.mutable_data_ptr<float>(), workspace_data<float>(workspace), count,
                                           size, iterations, eps, kind, device, stream));
  } else {
    const Tensor workspace = new_workspace(W, attngeo_newton_schulz_workspace_f64(count, size));
    check_launch("newton_schulz_inverse",
                 attngeo_newton_schulz_f64(W.const_data_ptr<double>(), inverse.mutable_data_ptr<double>(),
                                           residual.mutable_data_ptr<double>(), workspace_data<double>(workspace),
                                           count, size, iterations, eps, kind, device, stream));
  }
  return {inverse, residual};
}

std::tuple<Tensor, Tensor> spd_inverse_cuda(const Tensor& W_any, double eps) {
  const Matrices matrices = check("spd_inverse", W_any);
  const int32_t device = W_any.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Tensor W = torch::stable::contiguous(W_any);
  Tensor inverse = empty_with_shape_of(W);
  Tensor failed_pivot = torch::stable::new_empty(W, matrices.batch, ScalarType::Int);
  const auto [batch, count, size] = matrices;
  void* stream = current_stream(device);
  int32_t* failed_data = failed_pivot.mutable_data_ptr<int32_t>();
  if (W.scalar_type() == ScalarType::Float) {
    const Tensor workspace = new_workspace(W, attngeo_spd_inverse_workspace_f32(count, size));
    check_launch("spd_inverse", attngeo_spd_inverse_f32(W.const_data_ptr<float>(), inverse.mutable_data_ptr<float>(),
                                                        failed_data, workspace_data<float>(workspace), count, size, eps,
                                                        device, stream));
  } else {
    const Tensor workspace = new_workspace(W, attngeo_spd_inverse_workspace_f64(count, size));
    check_launch("spd_inverse", attngeo_spd_inverse_f64(W.const_data_ptr<double>(), inverse.mutable_data_ptr<double>(),
                                                        failed_data, workspace_data<double>(workspace), count, size,
                                                        eps, device, stream));
  }
  return {inverse, failed_pivot};
}

#endif

}  // namespace
}  // namespace attngeo

STABLE_TORCH_LIBRARY_IMPL(attngeo, CPU, m) {
  m.impl("newton_schulz_inverse", TORCH_BOX(&attngeo::newton_schulz_inverse_cpu));
  m.impl("spd_inverse", TORCH_BOX(&attngeo::spd_inverse_cpu));
}

#ifdef ATTNGEO_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(attngeo, CUDA, m) {
  m.impl("newton_schulz_inverse", TORCH_BOX(&attngeo::newton_schulz_inverse_cuda));
  m.impl("spd_inverse", TORCH_BOX(&attngeo::spd_inverse_cuda));
}
#endif
