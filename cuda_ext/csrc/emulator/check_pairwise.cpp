// The launchers of csrc/cuda/pairwise_kernel.h against their definitions, on the emulator. See check.h.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>

#include "../cuda/pairwise_kernel.h"
#include "check.h"

namespace attngeo::emulator {
void set_order(uint64_t seed);
void set_shared_memory_limit(int64_t bytes);
void run_last_blocks_only(int64_t count);
}  // namespace attngeo::emulator

namespace {

using namespace attngeo;
using namespace attngeo::check;

#define OVERLOADS(T, suffix)                                                                                          \
  const char* forward(PairwiseKind kind, const T* q, const T* k, T* out, PairwiseSizes sizes, double scale) {         \
    return attngeo_pairwise_forward_##suffix(kind, q, k, out, sizes, scale, 0, nullptr);                              \
  }                                                                                                                   \
  int64_t backward_workspace(PairwiseKind kind, PairwiseSizes sizes, T) {                                             \
    return attngeo_pairwise_backward_workspace_##suffix(kind, sizes);                                                 \
  }                                                                                                                   \
  const char* backward(PairwiseKind kind, const T* grad, const T* kernel, const T* q, const T* k, T* grad_q,          \
                       T* grad_k, T* workspace, PairwiseSizes sizes, double scale) {                                  \
    return attngeo_pairwise_backward_##suffix(kind, grad, kernel, q, k, grad_q, grad_k, workspace, sizes, scale, 0,   \
                                              nullptr);                                                               \
  }                                                                                                                   \
  const char* matmul_forward(PairwiseKind kind, const T* q, const T* k, const T* v, T* out, T* origin,                \
                             T* total, PairwiseSizes sizes, double scale, bool normalize) {                           \
    return attngeo_pairwise_matmul_forward_##suffix(kind, q, k, v, out, origin, total, sizes, scale, normalize, 0,    \
                                                    nullptr);                                                         \
  }                                                                                                                   \
  int64_t matmul_backward_workspace(PairwiseKind kind, PairwiseSizes sizes, T) {                                      \
    return attngeo_pairwise_matmul_backward_workspace_##suffix(kind, sizes);                                          \
  }                                                                                                                   \
  const char* matmul_backward(PairwiseKind kind, const T* grad, const T* q, const T* k, const T* v, const T* origin,  \
                              const T* delta, T* grad_q, T* grad_k, T* grad_v, T* workspace, PairwiseSizes sizes,     \
                              double scale) {                                                                         \
    return attngeo_pairwise_matmul_backward_##suffix(kind, grad, q, k, v, origin, delta, grad_q, grad_k, grad_v,      \
                                                     workspace, sizes, scale, 0, nullptr);                            \
  }
OVERLOADS(float, f32)
OVERLOADS(double, f64)
#undef OVERLOADS

constexpr PairwiseKind kKinds[] = {kLaplacian, kGaussian};
constexpr const char* kKindNames[] = {"laplacian", "gaussian"};

// What the inputs are like. Ordinary ones lie on a grid, so that single channels tie, and share whole rows.
enum Inputs { kOrdinary, kFar, kOffset, kEqual, kNanQuery, kNanLandmark, kNanValue };
constexpr const char* kInputNames[] = {"ordinary", "far", "offset", "equal", "nan-query", "nan-landmark", "nan-value"};

// Roundings beside those of the distance's sum: the difference, the square, scale and its product, the change of base,
// the subtraction of an origin.
constexpr int kExponentRoundings = 12;
// Roundings of a kernel value beside those of its exponent: exp within 2 units of the last place, product, quotient.
constexpr int kValueRoundings = 8;

template <typename T>
struct Problem {
  PairwiseKind kind;
  PairwiseSizes sizes;
  double scale;
  std::vector<T> q, k, v;
  std::vector<Wide> exponent;  // scale * distance

  Problem(PairwiseKind kind_, PairwiseSizes sizes_, Inputs inputs, uint64_t seed)
      : kind(kind_), sizes(sizes_), scale(kind_ == kLaplacian ? -0.25 : -0.5) {
    Random random(seed);
    const int64_t channels = std::max<int64_t>(sizes.channels, 1);
    // Exponents near -2, or such that the whole row underflows.
    Wide spread = kind == kLaplacian ? 8.0L / channels : std::sqrt(2.0L / channels);
    if (inputs == kFar) spread *= kind == kLaplacian ? (sizeof(T) == 4 ? 80 : 800) : (sizeof(T) == 4 ? 9 : 28);
    const bool ties = inputs == kOrdinary || inputs == kFar;
    const T offset = inputs == kOffset ? T(1e4) : T(0);
    auto draw = [&](int64_t count) {
      std::vector<T> values(size_t(count), T(0.3));
      if (inputs == kEqual) return values;
      for (T& value : values) {
        const double bell = random.bell();
        value = T(offset + spread * (ties ? std::round(bell * 16) / 16 : bell));
      }
      return values;
    };
    q = draw(sizes.slices * sizes.rows * sizes.channels);
    k = draw(sizes.slices * sizes.landmarks * sizes.channels);
    v.resize(size_t(sizes.slices * sizes.landmarks * sizes.values));
    for (T& value : v) value = T(random.bell());
    const int64_t shared = std::min(q.size() * size_t(sizes.slices != 0), k.size());
    if (ties && shared >= sizes.channels) std::copy(q.begin(), q.begin() + sizes.channels, k.begin());
    const T nan = std::numeric_limits<T>::quiet_NaN();
    if (inputs == kNanQuery && !q.empty()) q[q.size() / 2] = nan;
    if (inputs == kNanLandmark && !k.empty()) k[k.size() / 2] = nan;
    if (inputs == kNanValue && !v.empty()) v[v.size() / 2] = nan;
    find_exponents();
  }

  void find_exponents() {
    exponent.clear();
    for (int64_t s = 0; s < sizes.slices; ++s) {
      for (int64_t n = 0; n < sizes.rows; ++n) {
        for (int64_t m = 0; m < sizes.landmarks; ++m) {
          Wide distance = 0;
          for (int64_t c = 0; c < sizes.channels; ++c) {
            const Wide d = difference(s, n, m, c);
            distance += kind == kLaplacian ? std::fabs(d) : d * d;
          }
          exponent.push_back(Wide(scale) * distance);
        }
      }
    }
  }

  Wide difference(int64_t s, int64_t n, int64_t m, int64_t c) const {
    return Wide(q[size_t((s * sizes.rows + n) * sizes.channels + c)]) -
           Wide(k[size_t((s * sizes.landmarks + m) * sizes.channels + c)]);
  }
  size_t pair(int64_t s, int64_t n, int64_t m) const { return size_t((s * sizes.rows + n) * sizes.landmarks + m); }

  // Largest relative change of exp(exponent), as an exponent, that roundings can make.
  Wide wobble(size_t at) const {
    return (std::fabs(exponent[at]) * (sizes.channels + kExponentRoundings) + kValueRoundings) * kRoundoff<T>;
  }
};

// The first `channels` numbers of a gradient: d distance / d q, to be multiplied by scale and the exponent's gradient.
template <typename T>
Wide slope(const Problem<T>& problem, int64_t s, int64_t n, int64_t m, int64_t c) {
  const Wide d = problem.difference(s, n, m, c);
  if (problem.kind == kGaussian) return 2 * d;
  return d != d ? d : Wide((d > 0) - (d < 0));
}

struct Expected {
  std::vector<Wide> value, bound;
  explicit Expected(int64_t count) : value(size_t(count), 0), bound(size_t(count), 0) {}
  void add(size_t at, Wide term, Wide error) {
    value[at] += term;
    bound[at] += error;
  }
};

// Gradients of q and k for the gradient `weight` (known within `error`) of the exponents.
template <typename T>
void token_gradients(const Problem<T>& problem, const std::vector<Wide>& weight, const std::vector<Wide>& error,
                     Expected& grad_q, Expected& grad_k) {
  const PairwiseSizes& sizes = problem.sizes;
  // Beside the order of the sum: scale, its products, the doubling, the difference, the product with it. A sum with
  // signs may be found as twice the sum over one sign less the sum of all: its roundings then are those of three sums
  // of all weights, ties included.
  constexpr int roundings = 8;
  const bool signs = problem.kind == kLaplacian;
  for (int64_t s = 0; s < sizes.slices; ++s) {
    for (int64_t n = 0; n < sizes.rows; ++n) {
      for (int64_t m = 0; m < sizes.landmarks; ++m) {
        const size_t at = problem.pair(s, n, m);
        const Wide w = problem.scale * weight[at], wrong = std::fabs(Wide(problem.scale)) * error[at];
        for (int64_t c = 0; c < sizes.channels; ++c) {
          const Wide by = slope(problem, s, n, m, c), size = std::fabs(by);
          const Wide rounded = std::fabs(w) * (signs ? 3 : size) * kRoundoff<T>;
          const Wide q_error = wrong * size + rounded * (sizes.landmarks + roundings);
          const Wide k_error = wrong * size + rounded * (sizes.rows + roundings);
          // Products below the smallest normal number may become 0.
          const Wide tiny = kTiny<T> * (1 + size);
          grad_q.add(size_t((s * sizes.rows + n) * sizes.channels + c), w * by, q_error + tiny);
          grad_k.add(size_t((s * sizes.landmarks + m) * sizes.channels + c), -w * by, k_error + tiny);
        }
      }
    }
  }
}

template <typename T>
std::vector<T> random_numbers(int64_t count, uint64_t seed) {
  Random random(seed);
  std::vector<T> values(static_cast<size_t>(count));
  for (T& value : values) value = T(random.bell());
  return values;
}

// Run in every order, shifted in odd ones; returns the outputs of the first, the same bits in all.
template <typename T>
using Outputs = std::vector<std::vector<T>>;
template <typename T>
Outputs<T> in_every_order(const Options& options, const std::function<Outputs<T>(bool shifted)>& run) {
  Outputs<T> first;
  for (size_t i = 0; i < options.orders.size(); ++i) {
    emulator::set_order(options.orders[i]);
    Outputs<T> outputs = run(options.orders[i] % 2 == 1);
    if (i == 0) {
      first = std::move(outputs);
      continue;
    }
    for (size_t output = 0; output < outputs.size(); ++output) {
      const std::string name = "output " + std::to_string(output);
      same_bits(name.c_str(), first[output], outputs[output], "in another order or alignment");
    }
  }
  return first;
}

template <typename T>
Outputs<T> run_forward(const Problem<T>& problem, bool shifted) {
  const PairwiseSizes& sizes = problem.sizes;
  Array<T> q(problem.q, shifted), k(problem.k, shifted), out(sizes.slices * sizes.rows * sizes.landmarks, shifted);
  const char* error = forward(problem.kind, q.data(), k.data(), out.data(), sizes, problem.scale);
  if (error != nullptr) fail("%s", error);
  out.check_guards("out");
  q.check_unchanged("q", problem.q);
  k.check_unchanged("k", problem.k);
  return {out.values()};
}

template <typename T>
Outputs<T> run_backward(const Problem<T>& problem, const std::vector<T>& grad_in, const std::vector<T>& kernel_in,
                        bool shifted) {
  const PairwiseSizes& sizes = problem.sizes;
  Array<T> q(problem.q, shifted), k(problem.k, shifted), grad(grad_in, shifted), kernel(kernel_in, shifted);
  Array<T> grad_q(int64_t(problem.q.size()), shifted), grad_k(int64_t(problem.k.size()), shifted);
  Array<T> workspace(backward_workspace(problem.kind, sizes, T()), false);
  const char* error = backward(problem.kind, grad.data(), kernel.data(), q.data(), k.data(), grad_q.data(),
                               grad_k.data(), workspace.data_or_null(), sizes, problem.scale);
  if (error != nullptr) fail("%s", error);
  grad_q.check_guards("grad_q");
  grad_k.check_guards("grad_k");
  workspace.check_guards("workspace");
  q.check_unchanged("q", problem.q);
  k.check_unchanged("k", problem.k);
  grad.check_unchanged("grad", grad_in);
  kernel.check_unchanged("kernel", kernel_in);
  return {grad_q.values(), grad_k.values()};
}

template <typename T>
Outputs<T> run_matmul_forward(const Problem<T>& problem, bool normalize, bool shifted) {
  const PairwiseSizes& sizes = problem.sizes;
  Array<T> q(problem.q, shifted), k(problem.k, shifted), v(problem.v, shifted);
  const int64_t rows = sizes.slices * sizes.rows;
  Array<T> out(rows * sizes.values, shifted), origin(rows, shifted), total(rows, shifted);
  const char* error = matmul_forward(problem.kind, q.data(), k.data(), v.data(), out.data(), origin.data(),
                                     total.data(), sizes, problem.scale, normalize);
  if (error != nullptr) fail("%s", error);
  out.check_guards("out");
  origin.check_guards("origin");
  total.check_guards("total");
  q.check_unchanged("q", problem.q);
  k.check_unchanged("k", problem.k);
  v.check_unchanged("v", problem.v);
  return {out.values(), origin.values(), total.values()};
}

template <typename T>
Outputs<T> run_matmul_backward(const Problem<T>& problem, const std::vector<T>& grad_in,
                               const std::vector<T>& origin_in, const std::vector<T>& delta_in, bool shifted) {
  const PairwiseSizes& sizes = problem.sizes;
  Array<T> q(problem.q, shifted), k(problem.k, shifted), v(problem.v, shifted);
  Array<T> grad(grad_in, shifted), origin(origin_in, shifted), delta(delta_in, shifted);
  Array<T> grad_q(int64_t(problem.q.size()), shifted), grad_k(int64_t(problem.k.size()), shifted);
  Array<T> grad_v(int64_t(problem.v.size()), shifted);
  Array<T> workspace(matmul_backward_workspace(problem.kind, sizes, T()), false);
  const char* error = matmul_backward(problem.kind, grad.data(), q.data(), k.data(), v.data(), origin.data(),
                                      delta.data(), grad_q.data(), grad_k.data(), grad_v.data(),
                                      workspace.data_or_null(), sizes, problem.scale);
  if (error != nullptr) fail("%s", error);
  grad_q.check_guards("grad_q");
  grad_k.check_guards("grad_k");
  grad_v.check_guards("grad_v");
  workspace.check_guards("workspace");
  q.check_unchanged("q", problem.q);
  k.check_unchanged("k", problem.k);
  v.check_unchanged("v", problem.v);
  grad.check_unchanged("grad", grad_in);
  origin.check_unchanged("origin", origin_in);
  delta.check_unchanged("delta", delta_in);
  return {grad_q.values(), grad_k.values(), grad_v.values()};
}

// ---- references

template <typename T>
Expected expected_kernel(const Problem<T>& problem) {
  Expected kernel(int64_t(problem.exponent.size()));
  for (size_t i = 0; i < problem.exponent.size(); ++i) {
    const Wide value = std::exp(problem.exponent[i]);
    kernel.add(i, value, value * std::expm1(problem.wobble(i)) + kTiny<T>);
  }
  return kernel;
}

template <typename T>
void check_backward_values(const Problem<T>& problem, const std::vector<T>& grad, const std::vector<T>& kernel,
                           const Outputs<T>& found) {
  std::vector<Wide> weight(grad.size()), error(grad.size());
  for (size_t i = 0; i < grad.size(); ++i) {
    weight[i] = Wide(grad[i]) * kernel[i];
    error[i] = kTiny<T>;
  }
  Expected grad_q(int64_t(problem.q.size())), grad_k(int64_t(problem.k.size()));
  token_gradients(problem, weight, error, grad_q, grad_k);
  compare("grad_q", found[0], grad_q.value, grad_q.bound);
  compare("grad_k", found[1], grad_k.value, grad_k.bound);
}

template <typename T>
void check_matmul_forward_values(const Problem<T>& problem, bool normalize, const Outputs<T>& found) {
  const PairwiseSizes& sizes = problem.sizes;
  const int64_t rows = sizes.slices * sizes.rows;
  Expected out(rows * sizes.values), origin(rows), total(rows);
  for (int64_t s = 0; s < sizes.slices; ++s) {
    for (int64_t n = 0; n < sizes.rows; ++n) {
      const size_t row = size_t(s * sizes.rows + n);
      Wide log_sum = 0, log_error = 0, nearest = 0, nearest_error = 0, sum = 1, sum_error = 0;
      if (normalize) {
        Wide largest = -std::numeric_limits<Wide>::infinity(), up = 0, down = 0;
        sum = 0;
        for (int64_t m = 0; m < sizes.landmarks; ++m) {
          const Wide exponent = problem.exponent[problem.pair(s, n, m)];
          largest = exponent != exponent || exponent > largest ? exponent : largest;
          if (largest != largest) break;
        }
        for (int64_t m = 0; m < sizes.landmarks; ++m) {
          const size_t at = problem.pair(s, n, m);
          const Wide term = std::exp(problem.exponent[at] - largest);
          sum += term;
          up += term * std::exp(problem.wobble(at));
          down += term * std::exp(-problem.wobble(at));
        }
        // Of the landmarks that are numbers; those that are not show in the sum.
        nearest = std::numeric_limits<Wide>::infinity();
        for (int64_t m = 0; m < sizes.landmarks; ++m) {
          nearest = std::fmin(nearest, problem.exponent[problem.pair(s, n, m)] / problem.scale);
        }
        if (sizes.landmarks > 0) {
          log_sum = largest + std::log(sum);
          // Sums that are rescaled at every new nearest one: three roundings a landmark at most.
          log_error = std::max(std::log(up / sum), std::log(sum / down)) +
                      (4 * sizes.landmarks + kValueRoundings) * kRoundoff<T>;
          const Wide wobble =
              std::fabs(problem.scale * nearest) * (sizes.channels + kExponentRoundings) * kRoundoff<T>;
          nearest_error = std::isinf(nearest) ? 0 : wobble / std::fabs(Wide(problem.scale));
          // All exponents are relative to the nearest one, whose own error is common to them.
          sum_error = sum * std::expm1(log_error + wobble);
        }
      }
      // Where no landmark is a number the origin is infinite or NaN.
      if (sum != sum && std::isinf(nearest)) nearest = found[1][row] == nearest ? nearest : sum;
      origin.add(row, nearest, nearest_error);
      total.add(row, sum, sum_error);
      for (int64_t m = 0; m < sizes.landmarks; ++m) {
        const size_t at = problem.pair(s, n, m);
        const Wide share = std::exp(problem.exponent[at] - log_sum);
        const Wide wobble = problem.wobble(at) + log_error + (sizes.landmarks + 4) * kRoundoff<T>;
        for (int64_t j = 0; j < sizes.values; ++j) {
          const Wide value = problem.v[size_t((s * sizes.landmarks + m) * sizes.values + j)];
          out.add(row * size_t(sizes.values) + size_t(j), share * value,
                  (share * std::expm1(wobble) + kTiny<T>)*std::fabs(value) + kTiny<T>);
        }
      }
    }
  }
  compare("out", found[0], out.value, out.bound);
  compare("origin", found[1], origin.value, origin.bound);
  compare("total", found[2], total.value, total.bound);
}

template <typename T>
void check_matmul_backward_values(const Problem<T>& problem, const std::vector<T>& grad,
                                  const std::vector<T>& origin, const std::vector<T>& delta, const Outputs<T>& found) {
  const PairwiseSizes& sizes = problem.sizes;
  Expected grad_q(int64_t(problem.q.size())), grad_k(int64_t(problem.k.size())), grad_v(int64_t(problem.v.size()));
  std::vector<Wide> weight(problem.exponent.size()), error(problem.exponent.size());
  for (int64_t s = 0; s < sizes.slices; ++s) {
    for (int64_t n = 0; n < sizes.rows; ++n) {
      const size_t row = size_t(s * sizes.rows + n);
      for (int64_t m = 0; m < sizes.landmarks; ++m) {
        const size_t at = problem.pair(s, n, m);
        const Wide share = std::exp(problem.exponent[at] - problem.scale * Wide(origin[row]));
        const Wide wrong = share * std::expm1(problem.wobble(at)) + kTiny<T>;
        Wide product = 0, size = 0;
        for (int64_t j = 0; j < sizes.values; ++j) {
          const Wide value = problem.v[size_t((s * sizes.landmarks + m) * sizes.values + j)];
          const Wide by = grad[row * size_t(sizes.values) + size_t(j)];
          product += by * value;
          size += std::fabs(by * value);
          grad_v.add(size_t((s * sizes.landmarks + m) * sizes.values + j), share * by,
                     std::fabs(by) * (wrong + (share + wrong) * (sizes.rows + 4) * kRoundoff<T>) + kTiny<T>);
        }
        const Wide inner = product - delta[row];
        const Wide inner_error = (sizes.values + 4) * kRoundoff<T> * (size + std::fabs(Wide(delta[row])));
        weight[at] = share * inner;
        error[at] = wrong * std::fabs(inner) + (share + wrong) * (inner_error + 2 * kRoundoff<T> * std::fabs(inner)) +
                    kTiny<T>;
      }
    }
  }
  token_gradients(problem, weight, error, grad_q, grad_k);
  compare("grad_q", found[0], grad_q.value, grad_q.bound);
  compare("grad_k", found[1], grad_k.value, grad_k.bound);
  compare("grad_v", found[2], grad_v.value, grad_v.bound);
}

// The origin that belongs to the problem, rounded.
template <typename T>
std::vector<T> origin_of(const Problem<T>& problem, bool normalize) {
  const PairwiseSizes& sizes = problem.sizes;
  std::vector<T> origin(size_t(sizes.slices * sizes.rows), T(0));
  for (size_t row = 0; normalize && row < origin.size(); ++row) {
    const Wide* exponent = problem.exponent.data() + row * size_t(sizes.landmarks);
    Wide largest = -std::numeric_limits<Wide>::infinity();
    for (int64_t m = 0; m < sizes.landmarks; ++m) largest = std::max(largest, exponent[m]);
    origin[row] = T(largest / problem.scale);
  }
  return origin;
}

// ---- cases

template <typename T>
std::vector<T> kernel_of(const Problem<T>& problem) {
  std::vector<T> kernel(problem.exponent.size());
  for (size_t i = 0; i < kernel.size(); ++i) kernel[i] = T(std::exp(problem.exponent[i]));
  return kernel;
}

template <typename T>
bool announce(const Options& options, const char* op, PairwiseKind kind, PairwiseSizes sizes, Inputs inputs,
              const char* more = "") {
  return begin(options, "%s %s %s %s slices %lld rows %lld landmarks %lld channels %lld values %lld%s", op,
               kKindNames[kind], kTypeName<T>, kInputNames[inputs], static_cast<long long>(sizes.slices),
               static_cast<long long>(sizes.rows), static_cast<long long>(sizes.landmarks),
               static_cast<long long>(sizes.channels), static_cast<long long>(sizes.values), more);
}

template <typename T>
void check_all(const Options& options, PairwiseKind kind, PairwiseSizes sizes, Inputs inputs) {
  const Problem<T> problem(kind, sizes, inputs, uint64_t(7 + inputs));
  const int64_t pairs = int64_t(problem.exponent.size());
  if (inputs != kNanValue) {
    if (announce<T>(options, "forward", kind, sizes, inputs)) {
      const auto found = in_every_order<T>(options, [&](bool shifted) { return run_forward(problem, shifted); });
      const Expected expected = expected_kernel(problem);
      compare("out", found[0], expected.value, expected.bound);
    }
    if (announce<T>(options, "backward", kind, sizes, inputs)) {
      const std::vector<T> grad = random_numbers<T>(pairs, 3), kernel = kernel_of(problem);
      const auto found =
          in_every_order<T>(options, [&](bool shifted) { return run_backward(problem, grad, kernel, shifted); });
      check_backward_values(problem, grad, kernel, found);
    }
  }
  for (const bool normalize : {false, true}) {
    const char* more = normalize ? " normalized" : "";
    if (announce<T>(options, "matmul-forward", kind, sizes, inputs, more)) {
      const auto found = in_every_order<T>(
          options, [&](bool shifted) { return run_matmul_forward(problem, normalize, shifted); });
      check_matmul_forward_values(problem, normalize, found);
    }
    if (announce<T>(options, "matmul-backward", kind, sizes, inputs, more)) {
      const std::vector<T> grad = random_numbers<T>(sizes.slices * sizes.rows * sizes.values, 4);
      const std::vector<T> origin = origin_of(problem, normalize);
      std::vector<T> delta(origin.size(), T(0));
      if (normalize) delta = random_numbers<T>(int64_t(origin.size()), 5);
      const auto found = in_every_order<T>(
          options, [&](bool shifted) { return run_matmul_backward(problem, grad, origin, delta, shifted); });
      check_matmul_backward_values(problem, grad, origin, delta, found);
    }
  }
}

template <typename T>
std::vector<T> slice_of(const std::vector<T>& all, int64_t slice, int64_t slices) {
  const size_t size = all.size() / size_t(slices);
  return std::vector<T>(all.begin() + int64_t(size) * slice, all.begin() + int64_t(size) * (slice + 1));
}

// A slice's results have the same bits alone as in a batch.
template <typename T>
void check_batch(const Options& options, PairwiseKind kind, PairwiseSizes sizes) {
  if (!announce<T>(options, "batch", kind, sizes, kOrdinary)) return;
  const Problem<T> all(kind, sizes, kOrdinary, 11);
  emulator::set_order(options.orders[0]);
  const std::vector<T> kernel = kernel_of(all), origin = origin_of(all, true);
  const std::vector<T> kernel_grad = random_numbers<T>(int64_t(kernel.size()), 3);
  const std::vector<T> grad = random_numbers<T>(sizes.slices * sizes.rows * sizes.values, 4);
  const std::vector<T> delta = random_numbers<T>(int64_t(origin.size()), 5);
  const Outputs<T> batch[] = {run_forward(all, false), run_backward(all, kernel_grad, kernel, false),
                              run_matmul_forward(all, true, false),
                              run_matmul_backward(all, grad, origin, delta, false)};
  for (int64_t s = 0; s < sizes.slices; ++s) {
    const auto own = [&](const std::vector<T>& values) { return slice_of(values, s, sizes.slices); };
    Problem<T> one = all;
    one.sizes.slices = 1;
    one.q = own(all.q);
    one.k = own(all.k);
    one.v = own(all.v);
    const Outputs<T> alone[] = {run_forward(one, false), run_backward(one, own(kernel_grad), own(kernel), false),
                                run_matmul_forward(one, true, false),
                                run_matmul_backward(one, own(grad), own(origin), own(delta), false)};
    constexpr const char* names[] = {"forward", "backward", "matmul-forward", "matmul-backward"};
    for (int op = 0; op < 4; ++op) {
      for (size_t i = 0; i < alone[op].size(); ++i) same_bits(names[op], alone[op][i], own(batch[op][i]), "in a batch");
    }
  }
}

// Differences as small as the smallest normal number count in full; their gradient is the weight, not a part of it.
template <typename T>
void check_small_differences(const Options& options) {
  const PairwiseSizes sizes{1, 3, 1, 4, 1};
  if (!announce<T>(options, "small-differences", kLaplacian, sizes, kOrdinary)) return;
  emulator::set_order(options.orders[0]);
  Problem<T> problem(kLaplacian, sizes, kOrdinary, 1);
  const T tiny = std::numeric_limits<T>::min();
  std::fill(problem.q.begin(), problem.q.end(), T(0));
  std::fill(problem.k.begin(), problem.k.end(), T(0));
  for (int i = 0; i < 4; ++i) problem.q[size_t(i)] = i % 2 == 0 ? tiny : -tiny;
  problem.q[4] = tiny * 4;
  problem.find_exponents();
  const std::vector<T> grad(3, T(1)), kernel(3, T(1)), origin(3, T(0)), delta(3, T(0));
  problem.v = {T(1)};
  check_backward_values(problem, grad, kernel, run_backward(problem, grad, kernel, false));
  check_matmul_backward_values(problem, grad, origin, delta, run_matmul_backward(problem, grad, origin, delta, false));
}

// Where a tie is, the gradient is 0 in every bit but the sign, whatever else the sum holds.
template <typename T>
void check_ties(const Options& options, PairwiseKind kind, PairwiseSizes sizes) {
  if (!announce<T>(options, "ties", kind, sizes, kEqual)) return;
  emulator::set_order(options.orders[0]);
  const Problem<T> problem(kind, sizes, kEqual, 1);
  const std::vector<T> weights = random_numbers<T>(int64_t(problem.exponent.size()), 3);
  const std::vector<T> grad = random_numbers<T>(sizes.slices * sizes.rows * sizes.values, 4);
  const std::vector<T> zeros(size_t(sizes.slices * sizes.rows), T(0));
  Outputs<T> gradients = run_backward(problem, weights, kernel_of(problem), false);
  const Outputs<T> fused = run_matmul_backward(problem, grad, zeros, zeros, false);
  gradients.insert(gradients.end(), fused.begin(), fused.begin() + 2);
  for (const auto& gradient : gradients) {
    if (std::any_of(gradient.begin(), gradient.end(), [](T x) { return x != T(0); })) fail("a tie has a gradient");
  }
  const Outputs<T> kernel = run_forward(problem, false);
  if (std::any_of(kernel[0].begin(), kernel[0].end(), [](T x) { return x != T(1); })) fail("a tie's kernel is not 1");
}

// Rows so far from every landmark that the sum of a row is lost beside its distance: equal landmarks share the weight,
// and the nearest one of two has it all, in both directions.
template <typename T>
void check_far(const Options& options, PairwiseKind kind, PairwiseSizes sizes, T distance) {
  char more[64];
  std::snprintf(more, sizeof more, " at %.3g", double(distance));
  if (!announce<T>(options, "far-sums", kind, sizes, kEqual, more)) return;
  emulator::set_order(options.orders[0]);
  Problem<T> problem(kind, sizes, kEqual, 1);
  for (size_t i = 0; i < problem.q.size(); ++i) {
    problem.q[i] = i / size_t(sizes.channels) % 2 == 0 ? distance : -distance;
  }
  std::fill(problem.k.begin(), problem.k.end(), T(0));
  problem.find_exponents();
  const int64_t rows = sizes.slices * sizes.rows;
  const Outputs<T> forward = run_matmul_forward(problem, true, false);
  std::vector<T> grad(size_t(rows * sizes.values));
  for (size_t i = 0; i < grad.size(); ++i) grad[i] = T(1) / forward[2][i / size_t(sizes.values)];
  const std::vector<T> delta(size_t(rows), T(0));
  const Outputs<T> backward = run_matmul_backward(problem, grad, forward[1], delta, false);
  for (const T total : forward[2]) {
    if (total != T(sizes.landmarks)) fail("a sum is %g", double(total));
  }
  const Wide expected = Wide(sizes.rows) / Wide(sizes.landmarks);
  const std::vector<Wide> value(backward[2].size(), expected);
  compare("grad_v", backward[2], value,
          std::vector<Wide>(value.size(), expected * (sizes.rows + 4) * kRoundoff<T>));
}

// A distance that is infinite has the kernel value 0.
template <typename T>
void check_infinite(const Options& options, PairwiseKind kind) {
  const PairwiseSizes sizes{1, 5, 3, 7, 0};
  if (!announce<T>(options, "infinite", kind, sizes, kOrdinary)) return;
  emulator::set_order(options.orders[0]);
  Problem<T> problem(kind, sizes, kOrdinary, 1);
  problem.q[10] = std::numeric_limits<T>::infinity();
  problem.find_exponents();
  const Expected expected = expected_kernel(problem);
  std::vector<Wide> bound = expected.bound;
  for (Wide& b : bound) b = b != b ? kTiny<T> : b;
  compare("out", run_forward(problem, false)[0], expected.value, bound);
}

// With less shared memory than a plan would like the launchers fall back and stay right.
template <typename T>
void check_shared_limits(const Options& options, PairwiseKind kind, PairwiseSizes sizes) {
  // Compute capabilities 7.5, 8.6 to 12, 8.0; 9.0 has the most.
  for (const int64_t kilobytes : {64, 99, 163}) {
    emulator::set_shared_memory_limit(kilobytes * 1024);
    Options once = options;
    once.orders.resize(1);
    check_all<T>(once, kind, sizes, kOrdinary);
  }
  emulator::set_shared_memory_limit(227 * 1024);
}

// Arrays of more than 2^31 numbers: only the last slice holds anything but zeros, and only the last blocks run.
template <typename T>
class Huge {
 public:
  Huge(int64_t slices, int64_t slice_size) : slice_size_(slice_size), bytes_(size_t(slices * slice_size) * sizeof(T)) {
    data_ = static_cast<T*>(bytes_ == 0 ? nullptr : reserve(bytes_));
    last_ = data_ == nullptr ? nullptr : data_ + (slices - 1) * slice_size;
  }
  Huge(int64_t slices, const std::vector<T>& last) : Huge(slices, int64_t(last.size())) {
    if (last_ != nullptr) std::copy(last.begin(), last.end(), last_);
  }
  ~Huge() {
    if (data_ != nullptr) release(data_, bytes_);
  }
  Huge(const Huge&) = delete;
  Huge& operator=(const Huge&) = delete;
  bool missing() const { return data_ == nullptr && bytes_ != 0; }
  T* data() { return data_; }
  std::vector<T> last() const { return std::vector<T>(last_, last_ + slice_size_); }

 private:
  int64_t slice_size_;
  size_t bytes_;
  T* data_ = nullptr;
  T* last_ = nullptr;
};

template <typename T>
void check_large(const Options& options, PairwiseKind kind, PairwiseSizes sizes) {
  if (!announce<T>(options, "large", kind, sizes, kOrdinary)) return;
  emulator::set_order(options.orders[0]);
  emulator::run_last_blocks_only(40);
  PairwiseSizes one = sizes;
  one.slices = 1;
  const Problem<T> problem(kind, one, kOrdinary, 17);
  const int64_t slices = sizes.slices;
  Huge<T> q(slices, problem.q), k(slices, problem.k), v(slices, problem.v);
  bool missing = q.missing() || k.missing() || v.missing();
  {
    Huge<T> out(slices, sizes.rows * sizes.landmarks);
    missing = missing || out.missing();
    const char* error = missing ? nullptr : forward(kind, q.data(), k.data(), out.data(), sizes, problem.scale);
    if (error != nullptr) fail("forward: %s", error);
    const Expected expected = expected_kernel(problem);
    if (!missing) compare("out", out.last(), expected.value, expected.bound);
  }
  Huge<T> grad_q(slices, sizes.rows * sizes.channels), grad_k(slices, sizes.landmarks * sizes.channels);
  missing = missing || grad_q.missing() || grad_k.missing();
  {
    const std::vector<T> last_kernel = kernel_of(problem), last = random_numbers<T>(int64_t(last_kernel.size()), 3);
    Huge<T> grad(slices, last), kernel(slices, last_kernel);
    Huge<T> workspace(1, backward_workspace(kind, sizes, T()));
    missing = missing || grad.missing() || kernel.missing() || workspace.missing();
    const char* error = missing ? nullptr
                                : backward(kind, grad.data(), kernel.data(), q.data(), k.data(), grad_q.data(),
                                           grad_k.data(), workspace.data(), sizes, problem.scale);
    if (error != nullptr) fail("backward: %s", error);
    if (!missing) check_backward_values(problem, last, last_kernel, {grad_q.last(), grad_k.last()});
  }
  {
    Huge<T> out(slices, sizes.rows * sizes.values), origin(slices, sizes.rows), total(slices, sizes.rows);
    missing = missing || out.missing() || origin.missing() || total.missing();
    const char* error = missing ? nullptr
                                : matmul_forward(kind, q.data(), k.data(), v.data(), out.data(), origin.data(),
                                                 total.data(), sizes, problem.scale, true);
    if (error != nullptr) fail("matmul_forward: %s", error);
    if (!missing) check_matmul_forward_values(problem, true, {out.last(), origin.last(), total.last()});
  }
  {
    const std::vector<T> last_origin = origin_of(problem, true), last_delta = random_numbers<T>(sizes.rows, 5);
    const std::vector<T> last_grad = random_numbers<T>(sizes.rows * sizes.values, 4);
    Huge<T> origin(slices, last_origin), delta(slices, last_delta), grad(slices, last_grad);
    Huge<T> grad_v(slices, sizes.landmarks * sizes.values);
    Huge<T> workspace(1, matmul_backward_workspace(kind, sizes, T()));
    missing = missing || origin.missing() || delta.missing() || grad.missing();
    missing = missing || grad_v.missing() || workspace.missing();
    const char* error = missing ? nullptr
                                : matmul_backward(kind, grad.data(), q.data(), k.data(), v.data(), origin.data(),
                                                  delta.data(), grad_q.data(), grad_k.data(), grad_v.data(),
                                                  workspace.data(), sizes, problem.scale);
    if (error != nullptr) fail("matmul_backward: %s", error);
    if (!missing) {
      check_matmul_backward_values(problem, last_grad, last_origin, last_delta,
                                   {grad_q.last(), grad_k.last(), grad_v.last()});
    }
  }
  if (missing) lack("address space");
  emulator::run_last_blocks_only(0);
}

template <typename T>
void check_type(const Options& options) {
  // Slices, rows, landmarks, channels, values: one, empty on every side, tiles that are partial on every side, more
  // than one tile, landmarks on both sides of 64 and in several chunks of 64 and of 112, the widths that have kernels
  // of their own and their neighbours.
  const std::vector<PairwiseSizes> few = {
      {1, 1, 1, 1, 1}, {2, 67, 5, 33, 3}, {1, 70, 130, 3, 33}, {1, 66, 197, 6, 2}, {1, 13, 49, 64, 32},
  };
  const std::vector<PairwiseSizes> all = {
      {0, 3, 4, 5, 2},     {2, 0, 5, 3, 2},   {2, 5, 0, 3, 2},    {3, 3, 4, 0, 5},    {2, 3, 4, 5, 0},
      {1, 17, 131, 7, 33}, {2, 13, 49, 65, 8}, {1, 64, 64, 16, 64}, {1, 130, 65, 1, 1}, {1, 33, 129, 64, 31},
      {1, 257, 50, 32, 32}, {1, 300, 1, 17, 8}, {1, 1, 200, 64, 65}, {1, 19, 23, 257, 70}, {1, 127, 63, 40, 16},
      {1, 1025, 7, 5, 3},
  };
  for (const PairwiseKind kind : kKinds) {
    for (const PairwiseSizes& sizes : few) check_all<T>(options, kind, sizes, kOrdinary);
    for (const Inputs inputs : {kFar, kOffset, kNanQuery, kNanLandmark, kNanValue}) {
      check_all<T>(options, kind, {2, 35, 9, 5, 3}, inputs);
    }
    check_ties<T>(options, kind, {1, 37, 6, 33, 3});
    check_infinite<T>(options, kind);
    for (const double distance : {1e5, 1e7, 1e8, 1e10}) {
      // One stage of channels and several, one chunk of landmarks and several, few rows and many.
      check_far<T>(options, kind, {1, 1, 64, 1, 1}, T(distance));
      check_far<T>(options, kind, {2, 3, 49, 37, 3}, T(distance));
      check_far<T>(options, kind, {1, 66, 197, 6, 2}, T(distance));
    }
    check_batch<T>(options, kind, {3, 40, 9, 5, 3});
    if (!options.full) continue;
    for (const PairwiseSizes& sizes : all) check_all<T>(options, kind, sizes, kOrdinary);
    for (const Inputs inputs : {kFar, kOffset}) check_all<T>(options, kind, {1, 67, 70, 64, 33}, inputs);
    check_batch<T>(options, kind, {2, 131, 66, 64, 32});
    check_shared_limits<T>(options, kind, {1, 70, 67, 64, 64});
    check_shared_limits<T>(options, kind, {1, 7, 70, 257, 65});
  }
  check_small_differences<T>(options);
}

}  // namespace

int main(int count, char** arguments) {
  const Options options = read_options(count, arguments);
  if (options.large) {
    // q and k, then K, then K with few channels of more than 2^31 numbers.
    for (const PairwiseKind kind : kKinds) {
      check_large<float>(options, kind, {(1 << 24) + 1, 3, 2, 64, 2});
      check_large<float>(options, kind, {(1 << 20) + 1, 65, 33, 1, 65});
    }
    check_large<double>(options, kLaplacian, {(1 << 24) + 1, 3, 2, 64, 2});
  } else {
    check_type<float>(options);
    check_type<double>(options);
  }
  return finish();
}
