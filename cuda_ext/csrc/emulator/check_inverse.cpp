// The launchers of csrc/cuda/inverse.h against their definitions, on the emulator. See check.h.
#include <algorithm>
#include <cmath>

#include "../cuda/inverse.h"
#include "check.h"

namespace attngeo::emulator {
void set_order(uint64_t seed);
void set_shared_memory_limit(int64_t bytes);
void run_last_blocks_only(int64_t count);
}  // namespace attngeo::emulator

namespace {

using namespace attngeo;
using namespace attngeo::check;

#define OVERLOADS(T, suffix)                                                                                         \
  int64_t newton_schulz_workspace(int64_t matrices, int64_t size, T) {                                               \
    return attngeo_newton_schulz_workspace_##suffix(matrices, size);                                                 \
  }                                                                                                                  \
  const char* newton_schulz(const T* W, T* inverse, T* residual, T* workspace, int64_t matrices, int64_t size,       \
                            int64_t iterations, double eps, NewtonSchulzStart start) {                               \
    return attngeo_newton_schulz_##suffix(W, inverse, residual, workspace, matrices, size, iterations, eps, start,   \
                                          0, nullptr);                                                               \
  }                                                                                                                  \
  int64_t spd_workspace(int64_t matrices, int64_t size, T) {                                                         \
    return attngeo_spd_inverse_workspace_##suffix(matrices, size);                                                   \
  }                                                                                                                  \
  const char* spd_inverse(const T* W, T* inverse, int32_t* failed_pivot, T* workspace, int64_t matrices,             \
                          int64_t size, double eps) {                                                                \
    return attngeo_spd_inverse_##suffix(W, inverse, failed_pivot, workspace, matrices, size, eps, 0, nullptr);       \
  }
OVERLOADS(float, f32)
OVERLOADS(double, f64)
#undef OVERLOADS

// A square matrix with an upper bound of each entry's error.
struct Matrix {
  int64_t size;
  std::vector<Wide> value, error;
  explicit Matrix(int64_t size_) : size(size_), value(size_t(size * size), 0), error(size_t(size * size), 0) {}
  size_t at(int64_t row, int64_t column) const { return size_t(row * size + column); }
};

// Sum of `weights` times `numbers` over the middle index, both as plain products of magnitudes or of values.
std::vector<Wide> product(const std::vector<Wide>& a, const std::vector<Wide>& b, int64_t size, bool magnitudes) {
  std::vector<Wide> result(size_t(size * size), 0);
  for (int64_t i = 0; i < size; ++i) {
    for (int64_t k = 0; k < size; ++k) {
      const Wide left = magnitudes ? std::fabs(a[size_t(i * size + k)]) : a[size_t(i * size + k)];
      const Wide* const right = b.data() + k * size;
      Wide* const out = result.data() + i * size;
      for (int64_t j = 0; j < size; ++j) out[j] += left * (magnitudes ? std::fabs(right[j]) : right[j]);
    }
  }
  return result;
}

Wide largest_row_sum(const std::vector<Wide>& values, int64_t size, bool of_columns) {
  Wide largest = 0;
  for (int64_t i = 0; i < size; ++i) {
    Wide sum = 0;
    for (int64_t j = 0; j < size; ++j) sum += std::fabs(values[size_t(of_columns ? j * size + i : i * size + j)]);
    if (!(sum <= largest)) largest = sum;
  }
  return largest;
}

// What a matrix is like. Kernel matrices are symmetric positive definite: exp(-|x - y|_1) of random points.
enum Kind { kKernel, kZero, kSingular, kAsymmetric, kIndefinite, kNan, kIllConditioned };
constexpr const char* kKindNames[] = {"kernel",     "zero", "singular",       "asymmetric",
                                      "indefinite", "nan",  "ill-conditioned"};

template <typename T>
std::vector<T> matrix_of(Kind kind, int64_t size, uint64_t seed) {
  Random random(seed);
  std::vector<T> W(size_t(size * size), T(0));
  std::vector<double> points(static_cast<size_t>(4 * size));
  for (double& x : points) x = random.bell() * (kind == kIllConditioned ? 1e-3 : 1.0);
  if (kind == kSingular && size > 1) std::copy(points.begin(), points.begin() + 4, points.end() - 4);
  for (int64_t i = 0; i < size; ++i) {
    for (int64_t j = 0; j < size; ++j) {
      double distance = 0;
      for (int64_t c = 0; c < 4; ++c) distance += std::fabs(points[size_t(4 * i + c)] - points[size_t(4 * j + c)]);
      T& entry = W[size_t(i * size + j)];
      entry = kind == kZero ? T(0) : T(std::exp(-distance));
      if (kind == kAsymmetric) entry += T(random.bell() * 0.3 / double(size));
    }
  }
  if (kind == kIndefinite && size > 0) W.back() = T(-1);
  if (kind == kNan && size > 0) W[size_t(size / 2 * size + size / 2)] = std::numeric_limits<T>::quiet_NaN();
  return W;
}

// P = W + eps I as the launcher may form it.
template <typename T>
Matrix shifted(const T* W, int64_t size, double eps) {
  Matrix P(size);
  for (int64_t i = 0; i < size * size; ++i) P.value[size_t(i)] = W[i];
  for (int64_t i = 0; i < size; ++i) {
    const size_t at = P.at(i, i);
    P.value[at] += Wide(eps);
    P.error[at] = kRoundoff<T> * (2 * Wide(eps) + std::fabs(Wide(W[i * size + i])));
  }
  return P;
}

// The iteration with a bound of what rounding can do to each entry: at most a factor of about 4 an iteration.
template <typename T>
Matrix newton_schulz_reference(const Matrix& P, int64_t iterations, NewtonSchulzStart start) {
  const int64_t size = P.size;
  const Wide rows = largest_row_sum(P.value, size, false), columns = largest_row_sum(P.value, size, true);
  const bool identity = start == kIdentityStart;
  const Wide norm = identity ? rows : rows * columns;
  const Wide factor = norm == 0 ? 0 : (identity ? 1.0L : 1.8L) / norm;
  Matrix X(size);
  for (int64_t i = 0; i < size; ++i) {
    for (int64_t j = 0; j < size; ++j) {
      const size_t at = X.at(i, j);
      X.value[at] = factor * (identity ? Wide(i == j) : P.value[P.at(j, i)]);
      // Two norms of `size` terms each, their entries' errors, and six roundings of the factor and the product.
      X.error[at] = (2 * size + 6) * kRoundoff<T> * std::fabs(X.value[at]) +
                    (identity ? 0 : std::fabs(factor) * P.error[P.at(j, i)]) +
                    2 * std::fabs(X.value[at]) * (norm == 0 ? 0 : kRoundoff<T>);
    }
  }
  for (int64_t iteration = 0; iteration < iterations; ++iteration) {
    const std::vector<Wide> Y = product(P.value, X.value, size, false);
    std::vector<Wide> bulk(X.value.size());
    for (size_t i = 0; i < bulk.size(); ++i) bulk[i] = std::fabs(X.value[i]) + X.error[i];
    std::vector<Wide> Y_error = product(P.value, X.error, size, true);
    const std::vector<Wide> from_P = product(P.error, bulk, size, true), sizes = product(P.value, bulk, size, true);
    std::vector<Wide> Y_bulk(Y.size());
    for (size_t i = 0; i < Y.size(); ++i) {
      Y_error[i] += from_P[i] + (size + 2) * kRoundoff<T> * sizes[i];
      Y_bulk[i] = std::fabs(Y[i]) + Y_error[i];
    }
    const std::vector<Wide> XY = product(X.value, Y, size, false);
    const std::vector<Wide> left = product(bulk, Y_error, size, true), right = product(X.error, Y, size, true);
    const std::vector<Wide> rounded = product(bulk, Y_bulk, size, true);
    for (size_t i = 0; i < Y.size(); ++i) {
      // Both 2 X - X (P X) and X (2 I - P X): the difference is rounded, in the second form entry by entry.
      X.error[i] = 2 * X.error[i] + left[i] + right[i] + (size + 4) * kRoundoff<T> * (rounded[i] + 2 * bulk[i]);
      X.value[i] = 2 * X.value[i] - XY[i];
    }
  }
  return X;
}

// ||I - P X||_F of the X that was returned, and what rounding can do to it.
template <typename T>
void residual_reference(const Matrix& P, const std::vector<Wide>& X, Wide& residual, Wide& bound) {
  const std::vector<Wide> Y = product(P.value, X, P.size, false), sizes = product(P.value, X, P.size, true);
  const std::vector<Wide> from_P = product(P.error, X, P.size, true);
  Wide squares = 0, error_squares = 0;
  for (int64_t i = 0; i < P.size; ++i) {
    for (int64_t j = 0; j < P.size; ++j) {
      const size_t at = P.at(i, j);
      const Wide defect = Wide(i == j) - Y[at];
      const Wide error = from_P[at] + (P.size + 2) * kRoundoff<T> * (sizes[at] + Wide(i == j));
      squares += defect * defect;
      error_squares += error * error;
    }
  }
  residual = std::sqrt(squares);
  // The root of a sum of size^2 terms in any order.
  bound = std::sqrt(error_squares) + residual * (P.size * P.size + 4) * kRoundoff<T> + kTiny<T>;
}

// Inverse of a positive definite matrix by elimination with pivots; empty if it is singular.
std::vector<Wide> inverse_of(const Matrix& P) {
  const int64_t size = P.size;
  std::vector<Wide> a = P.value, inverse(a.size(), 0);
  for (int64_t i = 0; i < size; ++i) inverse[P.at(i, i)] = 1;
  for (int64_t c = 0; c < size; ++c) {
    int64_t pivot = c;
    for (int64_t i = c + 1; i < size; ++i) {
      if (std::fabs(a[P.at(i, c)]) > std::fabs(a[P.at(pivot, c)])) pivot = i;
    }
    if (!(std::fabs(a[P.at(pivot, c)]) > 0)) return {};
    for (int64_t j = 0; j < size; ++j) {
      std::swap(a[P.at(pivot, j)], a[P.at(c, j)]);
      std::swap(inverse[P.at(pivot, j)], inverse[P.at(c, j)]);
    }
    const Wide by = 1 / a[P.at(c, c)];
    for (int64_t j = 0; j < size; ++j) {
      a[P.at(c, j)] *= by;
      inverse[P.at(c, j)] *= by;
    }
    for (int64_t i = 0; i < size; ++i) {
      const Wide factor = a[P.at(i, c)];
      if (i == c || factor == 0) continue;
      for (int64_t j = 0; j < size; ++j) {
        a[P.at(i, j)] -= factor * a[P.at(c, j)];
        inverse[P.at(i, j)] -= factor * inverse[P.at(c, j)];
      }
    }
  }
  return inverse;
}

template <typename T>
struct NewtonResult {
  std::vector<T> inverse, residual;
};

template <typename T>
NewtonResult<T> run_newton(const std::vector<T>& W_in, int64_t matrices, int64_t size, int64_t iterations, double eps,
                           NewtonSchulzStart start, bool shifted) {
  Array<T> W(W_in, shifted), inverse(int64_t(W_in.size()), shifted), residual(matrices, shifted);
  Array<T> workspace(newton_schulz_workspace(matrices, size, T()), false);
  const char* error = newton_schulz(W.data(), inverse.data(), residual.data(), workspace.data_or_null(), matrices,
                                    size, iterations, eps, start);
  if (error != nullptr) fail("%s", error);
  W.check_unchanged("W", W_in);
  inverse.check_guards("inverse");
  residual.check_guards("residual");
  workspace.check_guards("workspace");
  return {inverse.values(), residual.values()};
}

template <typename T>
void check_newton(const Options& options, const std::vector<Kind>& kinds, int64_t size, int64_t iterations, double eps,
                  NewtonSchulzStart start) {
  const int64_t matrices = int64_t(kinds.size());
  if (!begin(options, "newton-schulz %s %s start, %s first of %lld, size %lld, %lld iterations, eps %g", kTypeName<T>,
             start == kIdentityStart ? "identity" : "paper", kinds.empty() ? "none" : kKindNames[kinds[0]],
             static_cast<long long>(matrices), static_cast<long long>(size), static_cast<long long>(iterations),
             eps)) {
    return;
  }
  std::vector<T> W;
  for (int64_t i = 0; i < matrices; ++i) {
    const std::vector<T> one = matrix_of<T>(kinds[size_t(i)], size, uint64_t(31 + i));
    W.insert(W.end(), one.begin(), one.end());
  }
  NewtonResult<T> found;
  for (size_t i = 0; i < options.orders.size(); ++i) {
    emulator::set_order(options.orders[i]);
    NewtonResult<T> result = run_newton(W, matrices, size, iterations, eps, start, options.orders[i] % 2 == 1);
    if (i == 0) {
      found = std::move(result);
      continue;
    }
    same_bits("inverse", found.inverse, result.inverse, "in another order or alignment");
    same_bits("residual", found.residual, result.residual, "in another order or alignment");
  }
  for (int64_t i = 0; i < matrices; ++i) {
    const T* const X = found.inverse.data() + i * size * size;
    const Matrix P = shifted(W.data() + i * size * size, size, eps);
    const std::vector<Wide> wide(X, X + size * size);
    if (kinds[size_t(i)] == kNan && size > 0) {
      if (!std::all_of(wide.begin(), wide.end(), [](Wide x) { return x != x; })) fail("NaN is hidden");
      if (!(found.residual[size_t(i)] == std::numeric_limits<T>::infinity())) fail("a NaN residual is not infinite");
      continue;
    }
    // The bound grows with every iteration; beyond a few the residual says whether X is the inverse.
    if (iterations <= (sizeof(T) == 4 ? 4 : 12)) {
      const Matrix reference = newton_schulz_reference<T>(P, iterations, start);
      const bool fits = std::all_of(reference.value.begin(), reference.value.end(), [](Wide x) {
        return std::fabs(x) < Wide(std::numeric_limits<T>::max()) / 4;
      });
      if (fits) compare("inverse", X, reference.value, reference.error);
    }
    Wide residual = 0, bound = 0;
    residual_reference<T>(P, wide, residual, bound);
    // The sum of squares may exceed the type's range.
    const Wide largest = std::sqrt(Wide(std::numeric_limits<T>::max()));
    if (!(residual < largest / 2)) {
      if (!(Wide(found.residual[size_t(i)]) >= largest / 4)) fail("matrix %d: a huge residual is not reported", int(i));
    } else {
      compare("residual", found.residual.data() + i, {residual}, {bound});
    }
    const bool converges = kinds[size_t(i)] == kKernel || kinds[size_t(i)] == kAsymmetric;
    if (iterations >= 30 && converges) {
      // What is left after convergence are the roundings of one iteration, from both products.
      const std::vector<Wide> sizes = product(P.value, wide, size, true);
      Wide squares = 0;
      for (const Wide x : sizes) squares += x * x;
      if (!(residual <= 8 * size * kRoundoff<T> * (std::sqrt(squares) + 1))) {
        fail("matrix %d has not converged: residual %.3Lg", int(i), residual);
      }
    }
  }
  // Alone as in the batch.
  emulator::set_order(options.orders[0]);
  for (int64_t i = 0; i < matrices && matrices > 1; ++i) {
    const std::vector<T> one(W.begin() + i * size * size, W.begin() + (i + 1) * size * size);
    const NewtonResult<T> alone = run_newton(one, 1, size, iterations, eps, start, false);
    const T* const X = found.inverse.data() + i * size * size;
    same_bits("inverse", alone.inverse, std::vector<T>(X, X + size * size), "in a batch");
    same_bits("residual", alone.residual, {found.residual[size_t(i)]}, "in a batch");
  }
}

template <typename T>
struct SpdResult {
  std::vector<T> inverse;
  std::vector<int32_t> failed_pivot;
};

template <typename T>
SpdResult<T> run_spd(const std::vector<T>& W_in, int64_t matrices, int64_t size, double eps, bool shifted) {
  Array<T> W(W_in, shifted), inverse(int64_t(W_in.size()), shifted);
  Array<int32_t> failed_pivot(matrices, shifted);
  Array<T> workspace(spd_workspace(matrices, size, T()), false);
  const char* error = spd_inverse(W.data(), inverse.data(), failed_pivot.data(), workspace.data_or_null(), matrices,
                                  size, eps);
  if (error != nullptr) fail("%s", error);
  W.check_unchanged("W", W_in);
  inverse.check_guards("inverse");
  failed_pivot.check_guards("failed_pivot");
  workspace.check_guards("workspace");
  return {inverse.values(), failed_pivot.values()};
}

template <typename T>
void check_spd(const Options& options, const std::vector<std::vector<T>>& all, const std::vector<int32_t>& failures,
               const char* what, int64_t size, double eps) {
  const int64_t matrices = int64_t(all.size());
  if (!begin(options, "spd-inverse %s %s, %lld of size %lld, eps %g", kTypeName<T>, what,
             static_cast<long long>(matrices), static_cast<long long>(size), eps)) {
    return;
  }
  std::vector<T> W;
  for (const std::vector<T>& one : all) W.insert(W.end(), one.begin(), one.end());
  SpdResult<T> found;
  for (size_t i = 0; i < options.orders.size(); ++i) {
    emulator::set_order(options.orders[i]);
    SpdResult<T> result = run_spd(W, matrices, size, eps, options.orders[i] % 2 == 1);
    if (i == 0) {
      found = std::move(result);
      continue;
    }
    same_bits("inverse", found.inverse, result.inverse, "in another order or alignment");
    same_bits("failed_pivot", found.failed_pivot, result.failed_pivot, "in another order");
  }
  for (int64_t i = 0; i < matrices; ++i) {
    const T* const X = found.inverse.data() + i * size * size;
    if (found.failed_pivot[size_t(i)] != failures[size_t(i)]) {
      fail("matrix %d: failed_pivot %d, expected %d", int(i), found.failed_pivot[size_t(i)], failures[size_t(i)]);
      continue;
    }
    if (failures[size_t(i)] != 0) {
      if (std::any_of(X, X + size * size, [](T x) { return x != T(0); })) fail("matrix %d failed and is not 0", int(i));
      continue;
    }
    const Matrix P = shifted(W.data() + i * size * size, size, eps);
    const std::vector<Wide> expected = inverse_of(P);
    Wide largest = 0;
    for (const Wide x : expected) largest = std::max(largest, std::fabs(x));
    const Wide condition = largest_row_sum(P.value, size, false) * largest_row_sum(expected, size, false);
    // Elimination of a positive definite matrix without pivots is stable: a residual of some roundings a pivot.
    const Wide bound = 8 * size * kRoundoff<T> * condition * largest;
    if (condition * size * kRoundoff<T> < 0.1L) {
      compare("inverse", X, expected, std::vector<Wide>(expected.size(), bound));
    }
    for (int64_t row = 0; row < size; ++row) {
      for (int64_t column = 0; column < row; ++column) {
        if (X[row * size + column] != X[column * size + row]) {
          fail("matrix %d is not symmetric at %d, %d", int(i), int(row), int(column));
          row = column = size;
        }
      }
    }
  }
  emulator::set_order(options.orders[0]);
  for (int64_t i = 0; i < matrices && matrices > 1; ++i) {
    const SpdResult<T> alone = run_spd(all[size_t(i)], 1, size, eps, false);
    const T* const X = found.inverse.data() + i * size * size;
    same_bits("inverse", alone.inverse, std::vector<T>(X, X + size * size), "in a batch");
  }
}

template <typename T>
void check_spd_kinds(const Options& options, int64_t size) {
  const auto kernel = matrix_of<T>(kKernel, size, 5), other = matrix_of<T>(kKernel, size, 6);
  check_spd<T>(options, {kernel, matrix_of<T>(kZero, size, 1), other}, {0, 0, 0}, "kernel", size, 0.01);
  if (size == 0) return;
  // A NaN or a negative number on the diagonal is met exactly when its pivot comes; ones have no second pivot.
  const auto zero = matrix_of<T>(kZero, size, 1), nan = matrix_of<T>(kNan, size, 5);
  const std::vector<T> ones(size_t(size * size), T(1));
  auto negative = matrix_of<T>(kZero, size, 1);
  for (int64_t i = 0; i < size; ++i) negative[size_t(i * size + i)] = i == size - 1 ? T(-1) : T(2);
  check_spd<T>(options, {kernel, zero, nan, ones, negative, other},
               {0, 1, int32_t(1 + size / 2), size > 1 ? 2 : 0, int32_t(size), 0}, "failures", size, 0.0);
}

// More than 2^31 numbers in a batch: all but the last matrix are zeros, and only the last blocks run.
template <typename T>
void check_large(const Options& options, int64_t matrices, int64_t size) {
  if (!begin(options, "large %s, %lld of size %lld", kTypeName<T>, static_cast<long long>(matrices),
             static_cast<long long>(size))) {
    return;
  }
  emulator::set_order(options.orders[0]);
  emulator::run_last_blocks_only(30);
  const size_t bytes = size_t(matrices * size * size) * sizeof(T);
  const int64_t words = std::max(newton_schulz_workspace(matrices, size, T()), spd_workspace(matrices, size, T()));
  T* const W = static_cast<T*>(reserve(bytes));
  T* const inverse = static_cast<T*>(reserve(bytes));
  T* const residual = static_cast<T*>(reserve(size_t(matrices) * sizeof(T)));
  int32_t* const failed_pivot = static_cast<int32_t*>(reserve(size_t(matrices) * sizeof(int32_t)));
  T* const workspace = words == 0 ? nullptr : static_cast<T*>(reserve(size_t(words) * sizeof(T)));
  if (W == nullptr || inverse == nullptr || residual == nullptr || failed_pivot == nullptr ||
      (words != 0 && workspace == nullptr)) {
    return lack("address space");
  }
  const std::vector<T> last = matrix_of<T>(kKernel, size, 5);
  const int64_t offset = (matrices - 1) * size * size;
  std::copy(last.begin(), last.end(), W + offset);
  const char* error = newton_schulz(W, inverse, residual, workspace, matrices, size, 3, 0.01, kPaperStart);
  if (error != nullptr) fail("newton-schulz: %s", error);
  const NewtonResult<T> alone = run_newton(last, 1, size, 3, 0.01, kPaperStart, false);
  same_bits("inverse", alone.inverse, std::vector<T>(inverse + offset, inverse + offset + size * size), "far out");
  same_bits("residual", alone.residual, {residual[matrices - 1]}, "far out");
  error = spd_inverse(W, inverse, failed_pivot, workspace, matrices, size, 0.01);
  if (error != nullptr) fail("spd-inverse: %s", error);
  const SpdResult<T> spd = run_spd(last, 1, size, 0.01, false);
  same_bits("spd inverse", spd.inverse, std::vector<T>(inverse + offset, inverse + offset + size * size), "far out");
  release(W, bytes);
  release(inverse, bytes);
  release(residual, size_t(matrices) * sizeof(T));
  release(failed_pivot, size_t(matrices) * sizeof(int32_t));
  if (words != 0) release(workspace, size_t(words) * sizeof(T));
  emulator::run_last_blocks_only(0);
}

template <typename T>
void check_type(const Options& options) {
  std::vector<int64_t> sizes = {1, 2, 5, 17, 33, 49};
  if (options.full) sizes.insert(sizes.end(), {0, 3, 56, 57, 64, 65, 100, 128, 129, 150});
  for (const int64_t size : sizes) {
    const std::vector<Kind> kinds = {kKernel, kAsymmetric, kSingular, kNan, kZero};
    check_newton<T>(options, kinds, size, 3, 0.01, kPaperStart);
    if (size <= 5 || options.full) {
      check_newton<T>(options, {kKernel, kZero}, size, 0, 0.0, kPaperStart);
      check_newton<T>(options, {kZero, kKernel, kIndefinite}, size, size > 60 ? 3 : 10, 0.0, kIdentityStart);
    }
    if (size <= 64) check_newton<T>(options, {kKernel, kAsymmetric}, size, 30, 0.01, kPaperStart);
    check_spd_kinds<T>(options, size);
  }
  check_newton<T>(options, {}, 5, 3, 0.01, kPaperStart);
  check_spd<T>(options, {}, {}, "none", 5, 0.01);
  check_newton<T>(options, {kIndefinite, kKernel}, 17, 60, 0.0, kIdentityStart);
  check_newton<T>(options, {kIllConditioned, kKernel}, 33, 40, 1e-6, kPaperStart);
  check_spd<T>(options, {matrix_of<T>(kIllConditioned, 33, 9)}, {0}, "ill-conditioned", 33, 1e-3);
  if (!options.full) return;
  // Beyond what any kernel holds on the chip.
  Options once = options;
  once.orders.resize(1);
  check_spd_kinds<T>(once, 261);
  check_newton<T>(once, {kKernel, kAsymmetric}, 261, 1, 0.01, kPaperStart);
  for (const int64_t kilobytes : {64, 99, 163}) {  // compute capabilities 7.5, 8.6 to 12, 8.0
    emulator::set_shared_memory_limit(kilobytes * 1024);
    for (const int64_t size : {49, 65, 100, 128}) {
      check_newton<T>(options, {kKernel, kAsymmetric}, size, 3, 0.01, kPaperStart);
      check_spd_kinds<T>(options, size);
    }
  }
  emulator::set_shared_memory_limit(227 * 1024);
}

}  // namespace

int main(int count, char** arguments) {
  const Options options = read_options(count, arguments);
  if (options.large) {
    check_large<float>(options, (1 << 20) + 1, 49);
    check_large<float>(options, (1 << 16) + 1, 260);
    check_large<double>(options, (1 << 20) + 1, 49);
  } else {
    check_type<float>(options);
    check_type<double>(options);
  }
  return finish();
}
