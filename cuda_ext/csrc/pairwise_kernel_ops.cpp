// The pairwise kernels on torch's stable ABI: checks, allocation, the split into tasks on the CPU, launches on CUDA.
#include "torch_side.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cmath>
#include <memory>
#include <new>
#include <string>
#include <tuple>

#include "cpu/pairwise_kernel.h"
#ifdef ATTNGEO_WITH_CUDA
#include "cuda/pairwise_kernel.h"
#endif

namespace attngeo {
namespace {

using torch::stable::contiguous;
using torch::stable::new_empty;

// One call: which kernel, its scale, the name for messages.
struct Call {
  const char* op;
  PairwiseKind kind;
  double scale;
};

constexpr double kGaussianScale = -0.5;

Call laplacian(const char* op, double lambda) {
  STD_TORCH_CHECK(lambda > 0 && std::isfinite(lambda), op, ": lambda_ must be positive and finite, got ", lambda);
  return {op, kLaplacian, -1.0 / lambda};
}

Call gaussian(const char* op) { return {op, kGaussian, kGaussianScale}; }

std::string text_of(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t axis = 0; axis < shape.size(); ++axis) text += (axis ? ", " : "") + std::to_string(shape[axis]);
  return text + "]";
}

void check_like(const Call& call, const char* name, const Tensor& tensor, const std::vector<int64_t>& shape,
                const Tensor& q) {
  STD_TORCH_CHECK(shape_of(tensor) == shape, call.op, ": ", name, " has shape ", text_of(shape_of(tensor)),
                  ", expected ", text_of(shape));
  STD_TORCH_CHECK(tensor.scalar_type() == q.scalar_type(), call.op, ": ", name, " and q differ in type");
  STD_TORCH_CHECK(tensor.is_cuda() == q.is_cuda() && tensor.get_device_index() == q.get_device_index(), call.op, ": ",
                  name, " and q are on different devices");
}

// Shape of q with another last axis.
std::vector<int64_t> with_last(const Tensor& q, int64_t last) {
  std::vector<int64_t> shape = shape_of(q);
  shape.back() = last;
  return shape;
}

PairwiseSizes check(const Call& call, const Tensor& q, const Tensor& k) {
  const int64_t axes = q.dim();
  STD_TORCH_CHECK(axes >= 2, call.op, ": q has shape ", text_of(shape_of(q)),
                  ", expected [..., rows, channels]");
  STD_TORCH_CHECK(q.scalar_type() == ScalarType::Float || q.scalar_type() == ScalarType::Double, call.op,
                  ": q is neither float32 nor float64");
  PairwiseSizes sizes{1, q.size(axes - 2), k.dim() == axes ? k.size(axes - 2) : 0, q.size(axes - 1), 0};
  std::vector<int64_t> k_shape = shape_of(q);
  k_shape[axes - 2] = sizes.landmarks;
  STD_TORCH_CHECK(shape_of(k) == k_shape, call.op, ": q has shape ", text_of(shape_of(q)), " and k ",
                  text_of(shape_of(k)), ", which may differ in the axis before the last only");
  check_like(call, "k", k, k_shape, q);
  for (int64_t axis = 0; axis < axes - 2; ++axis) sizes.slices *= q.size(axis);
  return sizes;
}

PairwiseSizes check_with_values(const Call& call, const Tensor& q, const Tensor& k, const Tensor& v) {
  PairwiseSizes sizes = check(call, q, k);
  STD_TORCH_CHECK(v.dim() == k.dim(), call.op, ": v has shape ", text_of(shape_of(v)), " and k ",
                  text_of(shape_of(k)), ", which may differ in the last axis only");
  sizes.values = v.size(v.dim() - 1);
  check_like(call, "v", v, with_last(k, sizes.values), q);
  return sizes;
}

// Rows that one thread takes at once where only the rows' own results are made.
int64_t rows_per_task(const PairwiseSizes& sizes) {
  // Few landmarks: several blocks, so that a task is worth its start.
  return sizes.landmarks >= 256 ? kBlockRows : 2 * kBlockRows;
}

// Rows of one share of the landmarks' gradients. At most 8 shares a slice bound the memory; it depends on the number of
// rows alone, so that neither the batch nor the number of threads changes the order of a sum.
int64_t rows_per_share(int64_t rows) {
  constexpr int64_t most_shares = 8, fewest_rows = 2 * kBlockRows;
  const int64_t wanted = std::max(fewest_rows, (rows + most_shares - 1) / most_shares);
  return (wanted + kBlockRows - 1) / kBlockRows * kBlockRows;
}

struct AlignedDelete {
  void operator()(void* memory) const { ::operator delete(memory, std::align_val_t{64}); }
};

template <typename T>
std::unique_ptr<T[], AlignedDelete> aligned(int64_t count) {
  return std::unique_ptr<T[], AlignedDelete>(
      static_cast<T*>(::operator new(std::max<int64_t>(count, 1) * sizeof(T), std::align_val_t{64})));
}

// Calls task(slice, first row, rows, index of the part in the slice, scratch) for every part of every slice.
template <typename T, typename Task>
void for_rows(const PairwiseSizes& sizes, int64_t rows_at_once, int64_t scratch_size, int64_t work, const Task& task) {
  const int64_t parts = (sizes.rows + rows_at_once - 1) / rows_at_once;
  torch::stable::parallel_for(0, sizes.slices * parts, grain(work), [&](int64_t begin, int64_t end) {
    const auto scratch = aligned<T>(scratch_size);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % parts * rows_at_once;
      task(i / parts, first, std::min(rows_at_once, sizes.rows - first), i % parts, scratch.get());
    }
  });
}

#ifdef ATTNGEO_WITH_CUDA
#define ATTNGEO_CUDA_LAUNCHERS(suffix)                                                                   \
  static constexpr auto forward = attngeo_pairwise_forward_##suffix;                                     \
  static constexpr auto backward_workspace = attngeo_pairwise_backward_workspace_##suffix;               \
  static constexpr auto backward = attngeo_pairwise_backward_##suffix;                                   \
  static constexpr auto matmul_forward = attngeo_pairwise_matmul_forward_##suffix;                       \
  static constexpr auto matmul_backward_workspace = attngeo_pairwise_matmul_backward_workspace_##suffix; \
  static constexpr auto matmul_backward = attngeo_pairwise_matmul_backward_##suffix;
#else
#define ATTNGEO_CUDA_LAUNCHERS(suffix)
#endif

template <typename T>
struct Pairwise;

template <>
struct Pairwise<float> {
  static const PairwiseFunctions<float>& cpu(PairwiseKind kind) { return pairwise_kernel().f32[kind]; }
  ATTNGEO_CUDA_LAUNCHERS(f32)
};

template <>
struct Pairwise<double> {
  static const PairwiseFunctions<double>& cpu(PairwiseKind kind) { return pairwise_kernel().f64[kind]; }
  ATTNGEO_CUDA_LAUNCHERS(f64)
};
#undef ATTNGEO_CUDA_LAUNCHERS

// Memory for a kernel. The C library maps blocks above 32 MiB anew for each allocation; without huge pages the page
// faults then take longer than the kernel itself.
Tensor new_kernel(const Tensor& q, const std::vector<int64_t>& shape) {
  Tensor out = new_empty(q, shape);
#ifdef MADV_HUGEPAGE
  constexpr uint64_t page = 4096, always_mapped = uint64_t{32} << 20;
  const uint64_t bytes = uint64_t(out.numel()) * (q.scalar_type() == ScalarType::Float ? 4 : 8);
  if (bytes >= always_mapped && !q.is_cuda()) {
    const uint64_t first = (reinterpret_cast<uint64_t>(out.data_ptr()) + page - 1) / page * page;
    // Only advice: where it is refused, nothing is lost.
    (void)madvise(reinterpret_cast<void*>(first), (bytes - page) / page * page, MADV_HUGEPAGE);
  }
#endif
  return out;
}

// One type and device: each struct below has the same four functions on dense tensors whose sizes were checked.
template <typename T>
struct OnCpu {
  const Call& call;
  const PairwiseSizes& sizes;
  const PairwiseFunctions<T>& functions = Pairwise<T>::cpu(call.kind);

  OnCpu(const Call& call_, const PairwiseSizes& sizes_, const Tensor&) : call(call_), sizes(sizes_) {}

  // k as the gradients need it, and the factor of every slice's copy.
  struct Prepared {
    Tensor k;
    const T* data;
    int64_t size;
    std::vector<T> factor;
  };

  Prepared prepare(const Tensor& k) const {
    const int64_t slice = sizes.landmarks * sizes.channels;
    const int64_t size = sizes.landmarks * functions.padded(sizes.channels);
    Tensor copy = new_empty(k, {sizes.slices * size});
    Prepared prepared{copy, copy.const_data_ptr<T>(), size, std::vector<T>(sizes.slices)};
    const T* from = k.const_data_ptr<T>();
    T* to = copy.mutable_data_ptr<T>();
    torch::stable::parallel_for(0, sizes.slices, grain(slice), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        prepared.factor[i] = functions.prepare(from + i * slice, to + i * size, sizes);
      }
    });
    return prepared;
  }

  // Adds up the shares [slices, shares, landmarks, padded(width)] into to [slices, landmarks, width].
  void sum_shares(const Tensor& shares, int64_t count, Tensor& to, int64_t width) const {
    constexpr int64_t at_once = 16;
    const int64_t size = sizes.landmarks * functions.padded(width);
    const int64_t parts = (sizes.landmarks + at_once - 1) / at_once;
    const T* from = shares.const_data_ptr<T>();
    T* out = to.mutable_data_ptr<T>();
    const auto sum = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t slice = i / parts, first = i % parts * at_once;
        functions.sum_shares(from + slice * count * size + first * functions.padded(width), count, sizes.landmarks,
                             out + (slice * sizes.landmarks + first) * width,
                             std::min(at_once, sizes.landmarks - first), width);
      }
    };
    torch::stable::parallel_for(0, sizes.slices * parts, grain(count * at_once * width), sum);
  }

  void forward(const Tensor& q, const Tensor& k, Tensor& out) const {
    const int64_t rows = sizes.rows, landmarks = sizes.landmarks, channels = sizes.channels;
    const T *q_data = q.const_data_ptr<T>(), *k_data = k.const_data_ptr<T>();
    T* out_data = out.mutable_data_ptr<T>();
    const int64_t at_once = rows_per_task(sizes);
    const auto task = [&](int64_t slice, int64_t first, int64_t count, int64_t, T* scratch) {
      const int64_t row = slice * rows + first;
      functions.forward(q_data + row * channels, k_data + slice * landmarks * channels, out_data + row * landmarks,
                        scratch, count, sizes, call.scale);
    };
    for_rows<T>(sizes, at_once, functions.scratch_size(sizes), at_once * landmarks * (channels + 1), task);
  }

  void backward(const Tensor& grad, const Tensor& kernel, const Tensor& q, const Tensor& k, Tensor& grad_q,
                Tensor& grad_k) const {
    const int64_t rows = sizes.rows, landmarks = sizes.landmarks, channels = sizes.channels;
    const int64_t at_once = rows_per_share(rows), shares = (rows + at_once - 1) / at_once;
    const Prepared prepared = prepare(k);
    Tensor share = new_empty(k, {sizes.slices * shares * prepared.size});
    const T *grad_data = grad.const_data_ptr<T>(), *kernel_data = kernel.const_data_ptr<T>();
    const T* q_data = q.const_data_ptr<T>();
    T *grad_q_data = grad_q.mutable_data_ptr<T>(), *share_data = share.mutable_data_ptr<T>();
    const auto task = [&](int64_t slice, int64_t first, int64_t count, int64_t part, T* scratch) {
      const int64_t row = slice * rows + first;
      functions.backward(grad_data + row * landmarks, kernel_data + row * landmarks, q_data + row * channels,
                         prepared.data + slice * prepared.size, prepared.factor[slice], grad_q_data + row * channels,
                         share_data + (slice * shares + part) * prepared.size, scratch, count, sizes, call.scale);
    };
    for_rows<T>(sizes, at_once, functions.scratch_size(sizes), at_once * landmarks * (2 * channels + 1), task);
    sum_shares(share, shares, grad_k, channels);
  }

  void matmul(const Tensor& q, const Tensor& k, const Tensor& v, Tensor& out, Tensor& origin, Tensor& total,
              bool normalize) const {
    const int64_t rows = sizes.rows, landmarks = sizes.landmarks, channels = sizes.channels;
    const int64_t values = sizes.values;
    const T *q_data = q.const_data_ptr<T>(), *k_data = k.const_data_ptr<T>(), *v_data = v.const_data_ptr<T>();
    T *out_data = out.mutable_data_ptr<T>(), *origin_data = origin.mutable_data_ptr<T>();
    T* total_data = total.mutable_data_ptr<T>();
    const int64_t at_once = rows_per_task(sizes);
    const auto task = [&](int64_t slice, int64_t first, int64_t count, int64_t, T* scratch) {
      const int64_t row = slice * rows + first;
      functions.matmul_forward(q_data + row * channels, k_data + slice * landmarks * channels,
                               v_data + slice * landmarks * values, out_data + row * values, origin_data + row,
                               total_data + row, scratch, count, sizes, call.scale, normalize);
    };
    for_rows<T>(sizes, at_once, functions.scratch_size(sizes), at_once * landmarks * (channels + values + 1), task);
  }

  void matmul_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& origin,
                       const Tensor& delta, Tensor& grad_q, Tensor& grad_k, Tensor& grad_v) const {
    const int64_t rows = sizes.rows, landmarks = sizes.landmarks, channels = sizes.channels;
    const int64_t values = sizes.values;
    const int64_t at_once = rows_per_share(rows), shares = (rows + at_once - 1) / at_once;
    const int64_t share_v_size = landmarks * functions.padded(values);
    const Prepared prepared = prepare(k);
    Tensor share_k = new_empty(k, {sizes.slices * shares * prepared.size});
    Tensor share_v = new_empty(v, {sizes.slices * shares * share_v_size});
    const T *grad_data = grad.const_data_ptr<T>(), *q_data = q.const_data_ptr<T>(), *k_data = k.const_data_ptr<T>();
    const T *v_data = v.const_data_ptr<T>(), *origin_data = origin.const_data_ptr<T>();
    const T* delta_data = delta.const_data_ptr<T>();
    T *grad_q_data = grad_q.mutable_data_ptr<T>(), *share_k_data = share_k.mutable_data_ptr<T>();
    T* share_v_data = share_v.mutable_data_ptr<T>();
    const auto task = [&](int64_t slice, int64_t first, int64_t count, int64_t part, T* scratch) {
      const int64_t row = slice * rows + first, share = slice * shares + part;
      functions.matmul_backward(grad_data + row * values, q_data + row * channels,
                                k_data + slice * landmarks * channels, v_data + slice * landmarks * values,
                                prepared.data + slice * prepared.size, prepared.factor[slice], origin_data + row,
                                delta_data + row, grad_q_data + row * channels, share_k_data + share * prepared.size,
                                share_v_data + share * share_v_size, scratch, count, sizes, call.scale);
    };
    const int64_t scratch_size = functions.matmul_backward_scratch_size(sizes);
    for_rows<T>(sizes, at_once, scratch_size, at_once * landmarks * 3 * (channels + values + 1), task);
    sum_shares(share_k, shares, grad_k, channels);
    sum_shares(share_v, shares, grad_v, values);
  }
};

#ifdef ATTNGEO_WITH_CUDA

template <typename T>
struct OnCuda {
  const Call& call;
  const PairwiseSizes& sizes;
  const int32_t device;
  const torch::stable::accelerator::DeviceGuard guard;
  void* const stream;

  OnCuda(const Call& call_, const PairwiseSizes& sizes_, const Tensor& q)
      : call(call_), sizes(sizes_), device(q.get_device_index()), guard(device), stream(current_stream(device)) {}

  void forward(const Tensor& q, const Tensor& k, Tensor& out) const {
    check_launch(call.op, Pairwise<T>::forward(call.kind, q.const_data_ptr<T>(), k.const_data_ptr<T>(),
                                               out.mutable_data_ptr<T>(), sizes, call.scale, device, stream));
  }

  void backward(const Tensor& grad, const Tensor& kernel, const Tensor& q, const Tensor& k, Tensor& grad_q,
                Tensor& grad_k) const {
    Tensor workspace = new_empty(q, {Pairwise<T>::backward_workspace(call.kind, sizes)});
    check_launch(call.op, Pairwise<T>::backward(call.kind, grad.const_data_ptr<T>(), kernel.const_data_ptr<T>(),
                                                q.const_data_ptr<T>(), k.const_data_ptr<T>(),
                                                grad_q.mutable_data_ptr<T>(), grad_k.mutable_data_ptr<T>(),
                                                workspace.mutable_data_ptr<T>(), sizes, call.scale, device, stream));
  }

  void matmul(const Tensor& q, const Tensor& k, const Tensor& v, Tensor& out, Tensor& origin, Tensor& total,
              bool normalize) const {
    check_launch(call.op, Pairwise<T>::matmul_forward(
                              call.kind, q.const_data_ptr<T>(), k.const_data_ptr<T>(), v.const_data_ptr<T>(),
                              out.mutable_data_ptr<T>(), origin.mutable_data_ptr<T>(), total.mutable_data_ptr<T>(),
                              sizes, call.scale, normalize, device, stream));
  }

  void matmul_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& origin,
                       const Tensor& delta, Tensor& grad_q, Tensor& grad_k, Tensor& grad_v) const {
    Tensor workspace = new_empty(q, {Pairwise<T>::matmul_backward_workspace(call.kind, sizes)});
    check_launch(call.op, Pairwise<T>::matmul_backward(
                              call.kind, grad.const_data_ptr<T>(), q.const_data_ptr<T>(), k.const_data_ptr<T>(),
                              v.const_data_ptr<T>(), origin.const_data_ptr<T>(), delta.const_data_ptr<T>(),
                              grad_q.mutable_data_ptr<T>(), grad_k.mutable_data_ptr<T>(),
                              grad_v.mutable_data_ptr<T>(), workspace.mutable_data_ptr<T>(), sizes, call.scale,
                              device, stream));
  }
};

#endif

// Runs body(implementation) with the device's functions for q's type.
template <template <typename> class Device, typename Body>
void with_type_of(const Tensor& q, const Call& call, const PairwiseSizes& sizes, const Body& body) {
  if (q.scalar_type() == ScalarType::Float) {
    body(Device<float>(call, sizes, q));
  } else {
    body(Device<double>(call, sizes, q));
  }
}

template <template <typename> class Device>
Tensor kernel_of(const Call& call, const Tensor& q_any, const Tensor& k_any) {
  const PairwiseSizes sizes = check(call, q_any, k_any);
  const Tensor q = contiguous(q_any), k = contiguous(k_any);
  Tensor out = new_kernel(q, with_last(q, sizes.landmarks));
  with_type_of<Device>(q, call, sizes, [&](const auto& on) { on.forward(q, k, out); });
  return out;
}

template <template <typename> class Device>
std::tuple<Tensor, Tensor> kernel_backward_of(const Call& call, const Tensor& grad_any, const Tensor& q_any,
                                              const Tensor& k_any, const Tensor& kernel_any) {
  const PairwiseSizes sizes = check(call, q_any, k_any);
  check_like(call, "grad", grad_any, with_last(q_any, sizes.landmarks), q_any);
  check_like(call, "kernel", kernel_any, with_last(q_any, sizes.landmarks), q_any);
  const Tensor grad = contiguous(grad_any), kernel = contiguous(kernel_any);
  const Tensor q = contiguous(q_any), k = contiguous(k_any);
  Tensor grad_q = empty_with_shape_of(q), grad_k = empty_with_shape_of(k);
  with_type_of<Device>(q, call, sizes, [&](const auto& on) { on.backward(grad, kernel, q, k, grad_q, grad_k); });
  return {grad_q, grad_k};
}

// Shape of a number for every row of q.
std::vector<int64_t> of_rows(const Tensor& q) {
  std::vector<int64_t> shape = shape_of(q);
  shape.pop_back();
  return shape;
}

template <template <typename> class Device>
std::tuple<Tensor, Tensor, Tensor> matmul_of(const Call& call, const Tensor& q_any, const Tensor& k_any,
                                             const Tensor& v_any, bool normalize) {
  const PairwiseSizes sizes = check_with_values(call, q_any, k_any, v_any);
  const Tensor q = contiguous(q_any), k = contiguous(k_any), v = contiguous(v_any);
  Tensor out = new_empty(q, with_last(q, sizes.values));
  Tensor origin = new_empty(q, of_rows(q)), total = new_empty(q, of_rows(q));
  with_type_of<Device>(q, call, sizes, [&](const auto& on) { on.matmul(q, k, v, out, origin, total, normalize); });
  return {out, origin, total};
}

template <template <typename> class Device>
std::tuple<Tensor, Tensor, Tensor> matmul_backward_of(const Call& call, const Tensor& grad_any, const Tensor& q_any,
                                                      const Tensor& k_any, const Tensor& v_any,
                                                      const Tensor& origin_any, const Tensor& delta_any) {
  const PairwiseSizes sizes = check_with_values(call, q_any, k_any, v_any);
  check_like(call, "grad", grad_any, with_last(q_any, sizes.values), q_any);
  check_like(call, "origin", origin_any, of_rows(q_any), q_any);
  check_like(call, "delta", delta_any, of_rows(q_any), q_any);
  const Tensor grad = contiguous(grad_any), q = contiguous(q_any), k = contiguous(k_any), v = contiguous(v_any);
  const Tensor origin = contiguous(origin_any), delta = contiguous(delta_any);
  Tensor grad_q = empty_with_shape_of(q), grad_k = empty_with_shape_of(k), grad_v = empty_with_shape_of(v);
  with_type_of<Device>(q, call, sizes, [&](const auto& on) {
    on.matmul_backward(grad, q, k, v, origin, delta, grad_q, grad_k, grad_v);
  });
  return {grad_q, grad_k, grad_v};
}

// The registered functions of one device.
template <template <typename> class Device>
struct Operators {
  static Tensor laplacian_kernel(const Tensor& q, const Tensor& k, double lambda) {
    return kernel_of<Device>(laplacian("laplacian_kernel", lambda), q, k);
  }

  static std::tuple<Tensor, Tensor> laplacian_kernel_backward(const Tensor& grad, const Tensor& q, const Tensor& k,
                                                              const Tensor& kernel, double lambda) {
    return kernel_backward_of<Device>(laplacian("laplacian_kernel_backward", lambda), grad, q, k, kernel);
  }

  static std::tuple<Tensor, Tensor, Tensor> laplacian_kernel_matmul(const Tensor& q, const Tensor& k, const Tensor& v,
                                                                    double lambda, bool normalize) {
    return matmul_of<Device>(laplacian("laplacian_kernel_matmul", lambda), q, k, v, normalize);
  }

  static std::tuple<Tensor, Tensor, Tensor> laplacian_kernel_matmul_backward(const Tensor& grad, const Tensor& q,
                                                                             const Tensor& k, const Tensor& v,
                                                                             const Tensor& origin, const Tensor& delta,
                                                                             double lambda) {
    return matmul_backward_of<Device>(laplacian("laplacian_kernel_relative_matmul_backward", lambda), grad, q, k, v,
                                      origin, delta);
  }

  static Tensor gaussian_kernel(const Tensor& q, const Tensor& k) {
    return kernel_of<Device>(gaussian("gaussian_kernel"), q, k);
  }

  static std::tuple<Tensor, Tensor> gaussian_kernel_backward(const Tensor& grad, const Tensor& q, const Tensor& k,
                                                             const Tensor& kernel) {
    return kernel_backward_of<Device>(gaussian("gaussian_kernel_backward"), grad, q, k, kernel);
  }

  static std::tuple<Tensor, Tensor, Tensor> gaussian_kernel_matmul(const Tensor& q, const Tensor& k, const Tensor& v,
                                                                   bool normalize) {
    return matmul_of<Device>(gaussian("gaussian_kernel_matmul"), q, k, v, normalize);
  }

  static std::tuple<Tensor, Tensor, Tensor> gaussian_kernel_matmul_backward(const Tensor& grad, const Tensor& q,
                                                                            const Tensor& k, const Tensor& v,
                                                                            const Tensor& origin,
                                                                            const Tensor& delta) {
    return matmul_backward_of<Device>(gaussian("gaussian_kernel_relative_matmul_backward"), grad, q, k, v, origin,
                                      delta);
  }

  template <typename Library>
  static void register_in(Library& m) {
    m.impl("laplacian_kernel", TORCH_BOX(&laplacian_kernel));
    m.impl("laplacian_kernel_backward", TORCH_BOX(&laplacian_kernel_backward));
    m.impl("laplacian_kernel_matmul", TORCH_BOX(&laplacian_kernel_matmul));
    m.impl("laplacian_kernel_relative_matmul_backward", TORCH_BOX(&laplacian_kernel_matmul_backward));
    m.impl("gaussian_kernel", TORCH_BOX(&gaussian_kernel));
    m.impl("gaussian_kernel_backward", TORCH_BOX(&gaussian_kernel_backward));
    m.impl("gaussian_kernel_matmul", TORCH_BOX(&gaussian_kernel_matmul));
    m.impl("gaussian_kernel_relative_matmul_backward", TORCH_BOX(&gaussian_kernel_matmul_backward));
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attngeo, CPU, m) { Operators<OnCpu>::register_in(m); }

#ifdef ATTNGEO_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(attngeo, CUDA, m) { Operators<OnCuda>::register_in(m); }
#endif

}  // namespace attngeo
