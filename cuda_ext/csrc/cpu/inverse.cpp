// Newton-Schulz iteration and Cholesky's inverse of one matrix, everything of it in the first two caches.
//
// A matrix lies in rows of `stride` numbers, padded with zeros to whole vectors. Products keep a tile of the result in
// registers over their whole depth, so that a number of the result is one sum in the order of the depth, whatever the
// tile.
#include "inverse.h"

#include "lanes.h"

namespace attngeo {
namespace {

#if defined(__AVX512F__)
constexpr int kTileVectors = 4;
#else
constexpr int kTileVectors = 2;
#endif
// With kTileVectors vectors a row this leaves registers for one row of the right factor, of 32 and of 16.
constexpr int kTileRows = 6;

template <typename T>
using Bits = typename Lanes<T>::Bits;

template <typename T>
inline Vector<T> broadcast_lane(Vector<T> x, int lane) {
  return __builtin_shuffle(x, Bits<T>{} + lane);
}

template <typename T>
inline Bits<T> lane_numbers() {
  Bits<T> numbers = {};
#pragma GCC unroll 16
  for (int lane = 0; lane < kWidth<T>; ++lane) numbers[lane] = lane;
  return numbers;
}

// The lane of the vector at (row, column) that lies on the diagonal.
template <typename T>
inline Bits<T> is_diagonal(int64_t row, int64_t column) {
  return lane_numbers<T>() == int(row - column);
}

// In pairs, so that the sum does not wait for one lane after the other.
template <typename T>
inline T sum_of_lanes(Vector<T> x) {
  alignas(kVectorBytes) T lanes[kWidth<T>];
  store(lanes, x);
#pragma GCC unroll 4
  for (int half = kWidth<T> / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

// Not from <cmath>, whose overloads have external linkage.
inline float square_root(float x) { return __builtin_sqrtf(x); }
inline double square_root(double x) { return __builtin_sqrt(x); }

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Rows and columns that a padded matrix has at least, and the rows of a block of the Cholesky factor.
template <typename T>
constexpr int kBlock = kWidth<T> > 8 ? kWidth<T> : 8;

// Numbers from a row to the next: whole cache lines, and an odd number of them in larger matrices, since a power of two
// would map a column to a few sets of the cache.
template <typename T>
int64_t stride_of(int64_t size) {
  constexpr int64_t line = 64 / sizeof(T);
  const int64_t lines = (round_up(size, kBlock<T>) + line - 1) / line;
  return (lines > 4 ? lines | 1 : lines) * line;
}

template <typename T>
int64_t padded_numbers(int64_t size) {
  return round_up(size, kBlock<T>) * stride_of<T>(size);
}

// P = W + eps I, padded with the rows and columns of `padding` times the identity. False if any number is not finite.
template <typename T>
bool load_padded(const T* W, T* P, int64_t size, int64_t stride, T eps, T padding) {
  const int64_t padded = round_up(size, kBlock<T>);
  Bits<T> not_finite = {};
  for (int64_t row = 0; row < size; ++row) {
    const T* from = W + row * size;
    T* to = P + row * stride;
    int64_t column = 0;
    for (; column + kWidth<T> <= size; column += kWidth<T>) {
      const Vector<T> value = load(from + column);
      not_finite |= (Bits<T>)(value * T(0));
      store(to + column, value);
    }
    for (; column < padded; column += kWidth<T>) {
      Vector<T> value = {};
      // Into the next row where there is one: numbers one after the other would make the next load of them wait.
      if (row * size + column + kWidth<T> <= size * size) {
        value = load(from + column);
      } else if (column < size) {
        value = load_partial(from + column, size - column);
      }
      value = (Vector<T>)((Bits<T>)value & (lane_numbers<T>() < int(size - column)));
      not_finite |= (Bits<T>)(value * T(0));
      store(to + column, value);
    }
    to[row] += eps;
  }
  for (int64_t row = size; row < padded; ++row) {
    for (int64_t column = 0; column < padded; ++column) P[row * stride + column] = T(0);
    P[row * stride + row] = padding;
  }
  // A number times 0 has no bits but its sign, NaN has.
  return sum_of_lanes<T>((Vector<T>)(not_finite & ~Lanes<T>::kSignBit)) == T(0);
}

template <typename T>
void store_packed(const T* padded, T* to, int64_t size, int64_t stride) {
  for (int64_t row = 0; row < size; ++row) {
    const T* from = padded + row * stride;
    const int64_t writable = size * size - row * size;
    int64_t column = 0;
    // What runs past the end of a row is overwritten by the next row.
    for (; column < size && column + kWidth<T> <= writable; column += kWidth<T>) {
      store(to + row * size + column, load(from + column));
    }
    for (; column < size; ++column) to[row * size + column] = from[column];
  }
}

// Rows x Vectors of A B, or of 2 base - A B where there is a base.
template <typename T, int Rows, int Vectors>
void product_tile(const T* a, const T* b, const T* base, T* out, int64_t depth, int64_t stride) {
  Vector<T> sum[Rows][Vectors] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Vector<T> right[Vectors];
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) right[j] = load(b + k * stride + j * kWidth<T>);
#pragma GCC unroll 6
    for (int i = 0; i < Rows; ++i) {
      const T left = a[i * stride + k];
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) sum[i][j] += right[j] * left;
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) {
      const int64_t at = i * stride + j * kWidth<T>;
      store(out + at, base == nullptr ? sum[i][j] : load(base + at) * T(2) - sum[i][j]);
    }
  }
}

template <typename T>
using ProductTile = void (*)(const T*, const T*, const T*, T*, int64_t, int64_t);

template <typename T, int Rows>
ProductTile<T> product_tile_of_width(int64_t vectors) {
#if defined(__AVX512F__)
  if (vectors == 4) return product_tile<T, Rows, 4>;
  if (vectors == 3) return product_tile<T, Rows, 3>;
#endif
  return vectors == 2 ? product_tile<T, Rows, 2> : product_tile<T, Rows, 1>;
}

template <typename T>
ProductTile<T> product_tile_of(int64_t rows, int64_t vectors) {
  switch (rows) {
    case 1: return product_tile_of_width<T, 1>(vectors);
    case 2: return product_tile_of_width<T, 2>(vectors);
    case 3: return product_tile_of_width<T, 3>(vectors);
    case 4: return product_tile_of_width<T, 4>(vectors);
    case 5: return product_tile_of_width<T, 5>(vectors);
    default: return product_tile_of_width<T, 6>(vectors);
  }
}

// A B, or 2 base - A B where there is a base.
template <typename T>
void product(const T* a, const T* b, const T* base, T* out, int64_t size, int64_t stride) {
  const int64_t vectors = (size + kWidth<T> - 1) / kWidth<T>;
  // Shares that differ by one at most: a full group of columns beside a narrow one would waste the narrow one's time.
  const int64_t groups = (vectors + kTileVectors - 1) / kTileVectors;
  const int64_t blocks = (size + kTileRows - 1) / kTileRows;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t vector = group * vectors / groups, width = (group + 1) * vectors / groups - vector;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t row = block * size / blocks, rows = (block + 1) * size / blocks - row;
      const int64_t at = row * stride + vector * kWidth<T>;
      product_tile_of<T>(rows, width)(a + row * stride, b + vector * kWidth<T>, base == nullptr ? nullptr : base + at,
                                      out + at, size, stride);
    }
  }
}

template <typename T>
void transpose_all(const T* from, T* to, int64_t size, int64_t stride) {
  for (int64_t row = 0; row < size; row += kWidth<T>) {
    for (int64_t column = 0; column < size; column += kWidth<T>) {
      Vector<T> rows[kWidth<T>];
#pragma GCC unroll 16
      for (int i = 0; i < kWidth<T>; ++i) rows[i] = load(from + (row + i) * stride + column);
      transpose<T>(rows);
#pragma GCC unroll 16
      for (int i = 0; i < kWidth<T>; ++i) store(to + (column + i) * stride + row, rows[i]);
    }
  }
}

// Largest sum of absolute values of a row; NaN if any number is NaN.
template <typename T>
T largest_row_sum(const T* matrix, int64_t size, int64_t stride) {
  T largest = 0;
  for (int64_t row = 0; row < size; ++row) {
    Vector<T> sums = {};
    for (int64_t column = 0; column < size; column += kWidth<T>) {
      sums += absolute<T>(load(matrix + row * stride + column));
    }
    const T sum = sum_of_lanes<T>(sums);
    if (largest == largest && !(sum <= largest)) largest = sum;
  }
  return largest;
}

template <typename T>
inline T reciprocal(T norm) {
  return norm > 0 ? 1 / norm : T(0);
}

// ||I - Y||_F, infinity where it is not finite.
template <typename T>
T distance_from_identity(const T* Y, int64_t size, int64_t stride) {
  T total = 0;
  for (int64_t row = 0; row < size; ++row) {
    Vector<T> sums = {};
    for (int64_t column = 0; column < size; column += kWidth<T>) {
      const Vector<T> value = load(Y + row * stride + column);
      const Vector<T> difference = is_diagonal<T>(row, column) ? value - T(1) : value;
      sums += difference * difference;
    }
    total += sum_of_lanes<T>(sums);
  }
  const T distance = square_root(total);
  return distance - distance == 0 ? distance : T(__builtin_inf());
}

template <typename T>
int64_t newton_schulz_workspace(int64_t size) {
  return 4 * padded_numbers<T>(size);
}

template <typename T>
T newton_schulz(const T* W, T* inverse, T* workspace, int64_t size, int64_t iterations, T eps, bool identity_start) {
  if (size == 0) return T(0);
  const int64_t stride = stride_of<T>(size), numbers = padded_numbers<T>(size);
  T *P = workspace, *X = P + numbers, *Y = X + numbers, *next = Y + numbers;
  load_padded(W, P, size, stride, eps, T(0));
  transpose_all(P, X, size, stride);
  const T from_rows = reciprocal(largest_row_sum(P, size, stride));
  const T from_columns = reciprocal(largest_row_sum(X, size, stride));
  for (int64_t row = 0; row < size; ++row) {
    for (int64_t column = 0; column < size; ++column) {
      T& x = X[row * stride + column];
      // Two factors, as their product may overflow where X does not.
      x = identity_start ? (row == column ? from_rows : T(0)) : x * (T(1.8) * from_columns) * from_rows;
    }
  }
  // Half of a symmetric X, mirrored, would save a quarter of the work and lose the accuracy: what is small is I - P X,
  // not I - X P, so that mirroring leaves a residual of rounding * condition^2 and diverges from a condition of 1e5 on.
  for (int64_t iteration = 0; iteration < iterations; ++iteration) {
    product<T>(P, X, nullptr, Y, size, stride);
    product<T>(X, Y, X, next, size, stride);
    T* const old = X;
    X = next;
    next = old;
  }
  product<T>(P, X, nullptr, Y, size, stride);
  store_packed(X, inverse, size, stride);
  return distance_from_identity(Y, size, stride);
}

// Cholesky: P = U^T U by blocks of rows, L^-1 = U^-T beside it, P^-1 = (L^-1)^T L^-1. In every product the left factor
// is read along its rows, so that nothing needs transposing but the mirrored half of the result.

// What takes a block of rows of P - (sum over earlier blocks) to rows of U: the elimination in the block, with
// multiplier [pivot, row], then the scale of every row.
template <typename T, int Rows>
struct BlockFactor {
  static constexpr int kVectors = (Rows + kWidth<T> - 1) / kWidth<T>;
  alignas(kVectorBytes) T multiplier[Rows][kVectors * kWidth<T>];
  T scale[Rows];
};

// Terms that are summed by themselves before they join the rest: one long sum is two to three times less accurate.
constexpr int64_t kChunk = 16;

// rows -= A^T B for one vector of columns of B.
template <typename T, int Rows>
inline void subtract_product(Vector<T> (&rows)[Rows], const T* a, const T* b, int64_t depth, int64_t stride) {
  for (int64_t begin = 0; begin < depth; begin += kChunk) {
    const int64_t end = smaller(begin + kChunk, depth);
    Vector<T> sum[Rows] = {};
    for (int64_t k = begin; k < end; ++k) {
      const Vector<T> right = load(b);
#pragma GCC unroll 16
      for (int i = 0; i < Rows; ++i) sum[i] += right * a[i];
      a += stride;
      b += stride;
    }
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) rows[i] -= sum[i];
  }
}

// Factors the diagonal block at `first`; returns 0 or 1 + the first row of the block whose pivot is not positive.
template <typename T, int Rows>
int factor_block(const T* U, BlockFactor<T, Rows>& factor, int64_t first, int64_t stride) {
  constexpr int kVectors = BlockFactor<T, Rows>::kVectors;
  Vector<T> rows[kVectors][Rows];
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) {
    const int64_t column = first + j * kWidth<T>;
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) rows[j][i] = load(U + (first + i) * stride + column);
    subtract_product<T, Rows>(rows[j], U + first, U + column, first, stride);
  }
#pragma GCC unroll 16
  for (int pivot = 0; pivot < Rows; ++pivot) {
    const Vector<T> divisor = broadcast_lane<T>(rows[pivot / kWidth<T>][pivot], pivot % kWidth<T>);
    factor.scale[pivot] = divisor[0];
    Vector<T> multiplier[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      multiplier[j] = rows[j][pivot] / divisor;
      store(factor.multiplier[pivot] + j * kWidth<T>, multiplier[j]);
    }
#pragma GCC unroll 16
    for (int i = pivot + 1; i < Rows; ++i) {
      const Vector<T> value = broadcast_lane<T>(rows[i / kWidth<T>][pivot], i % kWidth<T>);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) rows[j][i] -= multiplier[j] * value;
    }
  }
  for (int i = 0; i < Rows; ++i) {
    const T pivot = factor.scale[i];
    if (!(pivot > 0)) return i + 1;
    factor.scale[i] = 1 / square_root(pivot);
  }
  return 0;
}

// One vector of columns of a block of rows, from `base` (zeros for nullptr) to U or L^-1. Not inlined, as the compiler
// would keep every multiplier as a whole vector in memory for the next columns.
template <typename T, int Rows>
__attribute__((noinline)) void finish_column(const T* base, const T* a, const T* b, T* to, int64_t depth,
                                             int64_t stride, const BlockFactor<T, Rows>& factor) {
  Vector<T> rows[Rows] = {};
  if (base != nullptr) {
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) rows[i] = load(base + i * stride);
  }
  subtract_product<T, Rows>(rows, a, b, depth, stride);
#pragma GCC unroll 16
  for (int pivot = 0; pivot < Rows; ++pivot) {
#pragma GCC unroll 16
    for (int i = pivot + 1; i < Rows; ++i) rows[i] -= rows[pivot] * factor.multiplier[pivot][i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i) store(to + i * stride, rows[i] * factor.scale[i]);
}

// Rows first .. first + Rows of U right of the diagonal block, and of L^-1 up to the diagonal.
template <typename T, int Rows>
int factor_rows(T* U, T* L_inverse, int64_t first, int64_t size, int64_t stride) {
  BlockFactor<T, Rows> factor;
  const int failed = factor_block<T, Rows>(U, factor, first, stride);
  if (failed != 0) return failed;
  T *const U_rows = U + first * stride, *const L_rows = L_inverse + first * stride;
  for (int64_t column = first + kBlock<T>; column < size; column += kWidth<T>) {
    finish_column<T, Rows>(U_rows + column, U + first, U + column, U_rows + column, first, stride, factor);
  }
  for (int64_t column = 0; column < first; column += kWidth<T>) {
    const int64_t begin = column / kBlock<T> * kBlock<T>;  // L^-1 is 0 above its diagonal
    finish_column<T, Rows>(nullptr, U + begin * stride + first, L_inverse + begin * stride + column, L_rows + column,
                            first - begin, stride, factor);
  }
  for (int64_t column = first; column < first + Rows; column += kWidth<T>) {
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
      store(L_rows + i * stride + column, is_diagonal<T>(first + i, column) ? Vector<T>{} + T(1) : Vector<T>{});
    }
    finish_column<T, Rows>(L_rows + column, U, U, L_rows + column, 0, stride, factor);
  }
  return 0;
}

// The inverse from L^-1: blocks on and above the diagonal, each with its mirror image.
template <typename T>
void multiply_inverse_factors(const T* L_inverse, T* inverse, int64_t size, int64_t stride) {
  for (int64_t column = 0; column < size; column += kWidth<T>) {
    const int64_t begin = column / kBlock<T> * kBlock<T>;
    for (int64_t row = 0; row <= begin; row += kBlock<T>) {
      Vector<T> rows[kBlock<T>] = {};
      subtract_product<T, kBlock<T>>(rows, L_inverse + begin * stride + row, L_inverse + begin * stride + column,
                                     size - begin, stride);
#pragma GCC unroll 16
      for (int i = 0; i < kBlock<T>; ++i) {
        rows[i] = -rows[i];
        store(inverse + (row + i) * stride + column, rows[i]);
      }
      if (row == begin) continue;
#pragma GCC unroll 4
      for (int part = 0; part < kBlock<T>; part += kWidth<T>) {
        Vector<T> square[kWidth<T>];
#pragma GCC unroll 16
        for (int i = 0; i < kWidth<T>; ++i) square[i] = rows[part + i];
        transpose<T>(square);
#pragma GCC unroll 16
        for (int i = 0; i < kWidth<T>; ++i) store(inverse + (column + i) * stride + row + part, square[i]);
      }
    }
  }
}

template <typename T>
int64_t spd_workspace(int64_t size) {
  return 2 * padded_numbers<T>(size);
}

template <typename T>
int32_t spd(const T* W, T* inverse, T* workspace, int64_t size, T eps) {
  const int64_t stride = stride_of<T>(size);
  T *U = workspace, *L_inverse = U + padded_numbers<T>(size);
  if (!load_padded(W, U, size, stride, eps, T(1))) {
    // The factorisation reads the upper triangle only; what is wrong below it must not go unseen.
    for (int64_t row = 0; row < size; ++row) {
      for (int64_t column = 0; column < row; ++column) U[row * stride + row] += U[row * stride + column] * T(0);
    }
  }
  for (int64_t first = 0; first < size; first += kBlock<T>) {
    const int64_t left = size - first;
    int failed;
    // A last block of few rows is not padded to a whole one: 49 = 3 * 16 + 1 is the usual number of landmarks.
    if (left <= 4) {
      failed = factor_rows<T, 4>(U, L_inverse, first, size, stride);
    } else if (left <= 8) {
      failed = factor_rows<T, 8>(U, L_inverse, first, size, stride);
    } else {
      failed = factor_rows<T, kBlock<T>>(U, L_inverse, first, size, stride);
    }
    if (failed != 0) {
      for (int64_t i = 0; i < size * size; ++i) inverse[i] = T(0);
      return int32_t(first + failed);
    }
  }
  multiply_inverse_factors(L_inverse, U, size, stride);
  store_packed(U, inverse, size, stride);
  return 0;
}

template <typename T>
constexpr InverseFunctions<T> functions() {
  return {newton_schulz_workspace<T>, newton_schulz<T>, spd_workspace<T>, spd<T>};
}

}  // namespace

const Inverse ATTNGEO_JOIN(inverse, ATTNGEO_VARIANT) = {functions<float>(), functions<double>()};

}  // namespace attngeo
