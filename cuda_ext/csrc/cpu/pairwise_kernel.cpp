// Pairwise kernels on the CPU. Rows are worked on in blocks of kBlockRows with the rows in the lanes of vectors: a
// block of q is transposed once, the landmarks are broadcast from where they lie, and nothing is wasted on a number of
// landmarks that is no multiple of a vector. Only the gradients of q and k have channels in the lanes, as one
// difference serves both. Every sum runs in one order whatever the tile, so that a token's result depends neither on
// its neighbours nor on threads.
#include "pairwise_kernel.h"

#include <algorithm>

#include "lanes.h"

namespace attngeo {
namespace {

// Landmarks of one block: its distances to a block of rows stay in the first-level cache.
constexpr int64_t kBlockLandmarks = 64;
// Vectors of lanes and broadcast numbers of one register tile.
constexpr int kTileVectors = 3;
constexpr int kTileRows = kVectorBytes == 64 ? 8 : 4;
constexpr int kSmallTileRows = 2;
// Rows and vectors of channels of one register tile of the gradients.
constexpr int kGradientRows = kVectorBytes == 64 ? 6 : 4;
constexpr int kGradientVectors = kVectorBytes == 64 ? 2 : 1;
static_assert(kBlockRows % (kTileVectors * kWidth<float>) == 0 && kBlockRows % kGradientRows == 0);

// What a pair of numbers adds to the sum over the depth.
enum class Term { kAbsoluteDifference, kSquaredDifference, kProduct };

template <PairwiseKind kind>
constexpr Term kDistance = kind == kLaplacian ? Term::kAbsoluteDifference : Term::kSquaredDifference;

template <typename T, Term term>
inline Vector<T> add_term(Vector<T> sum, Vector<T> a, Vector<T> b) {
  if constexpr (term == Term::kAbsoluteDifference) {
    return accumulate<T>(sum, absolute<T>(a - b));
  } else if constexpr (term == Term::kSquaredDifference) {
    const Vector<T> difference = a - b;
    return multiply_add<T>(difference, difference, sum);
  } else {
    return multiply_add<T>(a, b, sum);
  }
}

// Memory that the next block will read or write, fetched line by line from inside the tiles of this one: the rows of a
// block lie far apart or end too soon for the processor's own prefetching, and a burst of misses would stop its units.
class Ahead {
 public:
  Ahead() = default;

  // `rows` rows of `width` numbers, `stride` apart.
  template <typename T>
  Ahead(const T* from, int64_t stride, int64_t width, int64_t rows)
      : row_(reinterpret_cast<uintptr_t>(from)), stride_(stride * int64_t{sizeof(T)}),
        width_(width * int64_t{sizeof(T)}), rows_(rows) {
    if (width == stride) {
      width_ *= rows;
      rows_ = 1;
    }
    if (rows > 0) end_ = (line_ = row_) + width_;
  }

  // The next line, or the step to the next row.
  void step() {
    if (line_ < end_) {
      __builtin_prefetch(reinterpret_cast<const void*>(line_));
      line_ += 64;
    } else if (rows_ > 1) {
      --rows_;
      row_ += stride_;
      line_ = row_;
      end_ = row_ + width_;
    }
  }

  bool done() const { return line_ >= end_ && rows_ <= 1; }

  // Lines left, at most.
  int64_t lines() const { return rows_ * (width_ / 64 + 1); }

 private:
  uintptr_t row_ = 0, line_ = 0, end_ = 0;
  int64_t stride_ = 0, width_ = 0, rows_ = 0;
};

// Two such parts of memory, fetched together or one after the other.
struct Route {
  Ahead first, second;

  Ahead& next() { return first.done() ? second : first; }
  int64_t lines() const { return first.lines() + second.lines(); }
};

// A matrix whose elements are broadcast: element (i, depth) at data[i * row + depth * column].
template <typename T>
struct Broadcast {
  const T* data;
  int64_t row, column;
};

template <typename T, Term term, int Rows, int Vectors>
inline void tile(Broadcast<T> a, const T* b, int64_t b_stride, T* out, int64_t out_stride, int64_t depth, bool add,
                 Route& route) {
  Vector<T> sum[Rows][Vectors];
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) sum[i][j] = add ? load(out + i * out_stride + j * kWidth<T>) : Vector<T>{};
  }
  for (int64_t d = 0; d < depth; ++d) {
    route.first.step();
    route.second.step();
    Vector<T> lanes[Vectors];
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) lanes[j] = load(b + d * b_stride + j * kWidth<T>);
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
      const Vector<T> number = broadcast(a.data[i * a.row + d * a.column]);
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) sum[i][j] = add_term<T, term>(sum[i][j], number, lanes[j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) store(out + i * out_stride + j * kWidth<T>, sum[i][j]);
  }
}

template <typename T, Term term, int Vectors>
void tile_column(Broadcast<T> a, const T* b, int64_t b_stride, T* out, int64_t out_stride, int64_t rows, int64_t depth,
                 bool add, Route& route) {
  int64_t i = 0;
  for (; i + kTileRows <= rows; i += kTileRows) {
    tile<T, term, kTileRows, Vectors>({a.data + i * a.row, a.row, a.column}, b, b_stride, out + i * out_stride,
                                      out_stride, depth, add, route);
  }
  for (; i < rows; i += kSmallTileRows) {
    // A last row alone is done twice, in the same place.
    const bool both = i + 1 < rows;
    tile<T, term, kSmallTileRows, Vectors>({a.data + i * a.row, both ? a.row : 0, a.column}, b, b_stride,
                                           out + i * out_stride, both ? out_stride : 0, depth, add, route);
  }
}

// out [rows, lanes] = (out if add, else 0) + sum over depth of the terms of a [rows, depth] and b [depth, lanes]; lanes
// is a multiple of kWidth.
template <typename T, Term term>
void panel(Broadcast<T> a, const T* b, int64_t b_stride, T* out, int64_t out_stride, int64_t rows, int64_t lanes,
           int64_t depth, bool add, Route& route) {
  for (int64_t first = 0; first < lanes;) {
    const int64_t vectors = (lanes - first) / kWidth<T>;
    if (vectors == 3 || vectors >= 5) {
      tile_column<T, term, 3>(a, b + first, b_stride, out + first, out_stride, rows, depth, add, route);
      first += 3 * kWidth<T>;
    } else if (vectors >= 2) {
      tile_column<T, term, 2>(a, b + first, b_stride, out + first, out_stride, rows, depth, add, route);
      first += 2 * kWidth<T>;
    } else {
      tile_column<T, term, 1>(a, b + first, b_stride, out + first, out_stride, rows, depth, add, route);
      first += kWidth<T>;
    }
  }
}

// to [columns, lanes] = the transpose of from [rows, columns], the lanes past `rows` 0.
template <typename T>
void transpose_in(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t rows, int64_t columns,
                  int64_t lanes) {
  constexpr int kW = kWidth<T>;
  for (int64_t first = 0; first < lanes; first += kW) {
    for (int64_t column = 0; column < columns; column += kW) {
      const int64_t here = std::min<int64_t>(kW, columns - column);
      Vector<T> square[kW];
      if (here == kW && first + kW <= rows) {
#pragma GCC unroll 16
        for (int i = 0; i < kW; ++i) square[i] = load(from + (first + i) * from_stride + column);
      } else {
#pragma GCC unroll 16
        for (int i = 0; i < kW; ++i) {
          const T* row = from + (first + i) * from_stride + column;
          square[i] = first + i >= rows ? Vector<T>{} : here == kW ? load(row) : load_partial(row, here);
        }
      }
      transpose<T>(square);
      T* to_column = to + column * to_stride + first;
#pragma GCC unroll 16
      for (int i = 0; i < kW; ++i) {
        if (i < here) store(to_column + i * to_stride, square[i]);
      }
    }
  }
}

// to [rows, columns] = the transpose of from [columns, lanes].
template <typename T>
void transpose_out(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t rows, int64_t columns) {
  constexpr int kW = kWidth<T>;
  for (int64_t first = 0; first < rows; first += kW) {
    const int64_t rows_here = std::min<int64_t>(kW, rows - first);
    for (int64_t column = 0; column < columns; column += kW) {
      const int64_t here = std::min<int64_t>(kW, columns - column);
      const T* from_column = from + column * from_stride + first;
      T* to_row = to + first * to_stride + column;
      if (here <= kW / 4) {
        for (int64_t i = 0; i < rows_here; ++i) {
          for (int64_t j = 0; j < here; ++j) to_row[i * to_stride + j] = from_column[j * from_stride + i];
        }
        continue;
      }
      Vector<T> square[kW];
#pragma GCC unroll 16
      for (int i = 0; i < kW; ++i) square[i] = i < here ? load(from_column + i * from_stride) : Vector<T>{};
      transpose<T>(square);
#pragma GCC unroll 16
      for (int i = 0; i < kW; ++i) {
        if (i < rows_here) {
          if (here == kW) {
            store(to_row + i * to_stride, square[i]);
          } else {
            store_partial(to_row + i * to_stride, square[i], here);
          }
        }
      }
    }
  }
}

// to [rows, padded columns] = factor * from [rows, columns], the columns past the end 0.
template <typename T>
void copy_padded(const T* from, T* to, int64_t rows, int64_t columns, T factor) {
  constexpr int kW = kWidth<T>;
  const int64_t stride = round_up(columns, kW);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; column += kW) {
      const T* here = from + row * columns + column;
      const Vector<T> x = column + kW <= columns ? load(here) : load_partial(here, columns - column);
      store(to + row * stride + column, x * factor);
    }
  }
}

// Numbers times kFactor that are 0 or of a size in [kSmallest, kLargest) differ by 0 or by at least 1, and their
// differences are finite.
template <typename T>
struct Scaling;

template <>
struct Scaling<float> {
  static constexpr float kFactor = 0x1p90f, kSmallest = 0x1p-67f, kLargest = 0x1p36f;
};

template <>
struct Scaling<double> {
  static constexpr double kFactor = 0x1p600, kSmallest = 0x1p-548, kLargest = 0x1p422;
};

// Whether every number is 0 or of a size in [kSmallest, kLargest) of the type. The bits of sizes order as the sizes do,
// NaN above infinity, and the sign bits of their differences say which is out of bounds.
template <typename T>
bool can_be_scaled(const T* numbers, int64_t count) {
  using Unsigned = typename Lanes<T>::UnsignedBits;
  constexpr int kW = kWidth<T>;
  const Unsigned largest = (Unsigned)broadcast(Scaling<T>::kLargest) - 1;
  const Unsigned smallest = (Unsigned)broadcast(Scaling<T>::kSmallest);
  Unsigned outside = {};
  const auto look = [&](Vector<T> x) {
    const Unsigned size = (Unsigned)absolute<T>(x);
    outside |= (largest - size) | ((size - smallest) & (0 - size));
  };
  int64_t i = 0;
  for (; i + kW <= count; i += kW) look(load(numbers + i));
  if (i < count) look(load_partial(numbers + i, count - i));
  return none<T>((typename Lanes<T>::Bits)outside & Lanes<T>::kSignBit);
}

// How the difference of a row and a landmark becomes the factor of a weight.
enum class Slope { kSign, kSignOfLarge, kDifference };

template <typename T, Slope slope>
inline Vector<T> slope_of(Vector<T> difference) {
  if constexpr (slope == Slope::kSign) {
    return sign<T>(difference);
  } else if constexpr (slope == Slope::kSignOfLarge) {
    return sign_of_large<T>(difference);
  } else {
    return difference;
  }
}

// Weights of a block: element (row, landmark) at data[row * row_stride + landmark * landmark_stride].
template <typename T>
struct Weights {
  const T* data;
  int64_t row_stride, landmark_stride;
};

// kGradientRows rows of q, to be multiplied by `factor`, and their gradients, to be set or added to; lines are fetched
// for one landmark in `between` + 1, a power of two.
template <typename T>
struct GradientRows {
  const T* q;
  T* grad;
  T factor;
  bool add;
  int64_t between;

  GradientRows from(int64_t channel) const { return {q + channel, grad + channel, factor, add, between}; }
};

// kGradientRows rows and Vectors of channels: the rows and their gradients stay in registers while the landmarks and
// theirs stream by.
template <typename T, Slope slope, int Vectors>
inline void gradient_tile(Weights<T> weights, GradientRows<T> rows, const T* k, T* grad_k, int64_t landmarks,
                          int64_t stride, Route& route, Route& later) {
  Vector<T> row[kGradientRows][Vectors], sum[kGradientRows][Vectors];
#pragma GCC unroll 8
  for (int i = 0; i < kGradientRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) {
      const int64_t at = i * stride + j * kWidth<T>;
      row[i][j] = load(rows.q + at) * rows.factor;
      sum[i][j] = rows.add ? load(rows.grad + at) : Vector<T>{};
    }
  }
  Ahead &one = route.next(), &other = later.next();
  for (int64_t m = 0; m < landmarks; ++m) {
    if ((m & rows.between) == 0) {
      one.step();
      other.step();
    }
    Vector<T> landmark[Vectors], grad[Vectors];
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) {
      landmark[j] = load(k + m * stride + j * kWidth<T>);
      grad[j] = load(grad_k + m * stride + j * kWidth<T>);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kGradientRows; ++i) {
      const Vector<T> weight = broadcast(weights.data[i * weights.row_stride + m * weights.landmark_stride]);
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) {
        const Vector<T> factor = slope_of<T, slope>(row[i][j] - landmark[j]);
        sum[i][j] = multiply_add<T>(factor, weight, sum[i][j]);
        grad[j] = multiply_add<T>(-factor, weight, grad[j]);
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) store(grad_k + m * stride + j * kWidth<T>, grad[j]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kGradientRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) store(rows.grad + i * stride + j * kWidth<T>, sum[i][j]);
  }
}

// All channels of kGradientRows rows.
template <typename T, Slope slope>
void gradient_rows(Weights<T> weights, GradientRows<T> rows, const T* k, T* grad_k, int64_t landmarks, int64_t stride,
                   Route& route, Route& later) {
  constexpr int kWhole = kGradientVectors;
  int64_t c = 0;
  for (; c + kWhole * kWidth<T> <= stride; c += kWhole * kWidth<T>) {
    gradient_tile<T, slope, kWhole>(weights, rows.from(c), k + c, grad_k + c, landmarks, stride, route, later);
  }
  if constexpr (kWhole > 1) {
    for (; c < stride; c += kWidth<T>) {
      gradient_tile<T, slope, 1>(weights, rows.from(c), k + c, grad_k + c, landmarks, stride, route, later);
    }
  }
}

// The rows of q of one block and their gradients: where they are, or in copies with whole tiles and vectors.
template <typename T, PairwiseKind kind>
class GradientBlock {
 public:
  static int64_t scratch_size(int64_t channels) { return 2 * kBlockRows * round_up(channels, kWidth<T>); }

  GradientBlock() = default;

  GradientBlock(const T* q, T* grad_q, int64_t rows, int64_t channels, T factor, T* scratch)
      : q_(q), grad_(grad_q), to_(grad_q), rows_(rows), channels_(channels), stride_(round_up(channels, kWidth<T>)),
        factor_(factor), large_(factor != T(1) && can_be_scaled(q, rows * channels)) {
    if (stride_ == channels && rows % kGradientRows == 0) return;
    copy_padded(q, scratch, rows, channels, T(1));
    std::fill(scratch + rows * stride_, scratch + round_up(rows, kGradientRows) * stride_, T(0));
    q_ = scratch;
    grad_ = scratch + kBlockRows * stride_;
  }

  // Adds what kGradientRows rows from `first` on give for some landmarks, the first ones of all or not; rows past the
  // end have weight 0.
  void add(int64_t first, Weights<T> weights, const T* prepared, T* share, int64_t landmarks, bool first_landmarks,
           Route& route, Route& later, int64_t between = 0) {
    const GradientRows<T> rows{q_ + first * stride_, grad_ + first * stride_, factor_, !first_landmarks, between};
    if constexpr (kind == kGaussian) {
      gradient_rows<T, Slope::kDifference>(weights, rows, prepared, share, landmarks, stride_, route, later);
    } else if (large_) {
      gradient_rows<T, Slope::kSignOfLarge>(weights, rows, prepared, share, landmarks, stride_, route, later);
    } else {
      gradient_rows<T, Slope::kSign>(weights, rows, prepared, share, landmarks, stride_, route, later);
    }
  }

  // How many landmarks may pass between two fetches so that the lines of all rows with these landmarks are fetched: a
  // burst of fetches would wait for memory, where an even flow does not.
  int64_t between(int64_t landmarks, int64_t lines) const {
    const int64_t tiles = stride_ / kWidth<T> / kGradientVectors, steps = rows_ / kGradientRows * tiles * landmarks;
    return steps >= 2 * lines ? 1 : 0;
  }

  // After `landmarks` of them in all.
  void finish(int64_t landmarks) const {
    if (landmarks == 0) {
      std::fill(to_, to_ + rows_ * channels_, T(0));
      return;
    }
    if (grad_ == to_) return;
    for (int64_t row = 0; row < rows_; ++row) {
      std::memcpy(to_ + row * channels_, grad_ + row * stride_, channels_ * sizeof(T));
    }
  }

 private:
  const T* q_ = nullptr;
  T *grad_ = nullptr, *to_ = nullptr;
  int64_t rows_ = 0, channels_ = 0, stride_ = 0;
  T factor_ = 1;
  bool large_ = false;
};

// d distance / d q = sign(q - k) or 2 (q - k).
template <PairwiseKind kind>
constexpr double kSlopeFactor = kind == kLaplacian ? 1.0 : 2.0;

template <typename T>
int64_t padded(int64_t width) {
  return round_up(width, kWidth<T>);
}

// Parts of one thread's scratch, each on a 64-byte boundary.
template <typename T>
struct Scratch {
  T* next;

  T* take(int64_t count) {
    T* const start = next;
    next += round_up(count, 64 / int64_t{sizeof(T)});
    return start;
  }
};

template <typename T>
int64_t scratch_size(PairwiseSizes sizes) {
  const int64_t channels = padded<T>(sizes.channels), values = padded<T>(sizes.values);
  // Transposed q, or q and its gradient in copies; output and v in copies; distances or weights; lines of rows.
  return kBlockRows * (2 * channels + values) + kBlockLandmarks * values + kBlockRows * kBlockLandmarks +
         3 * kBlockRows;
}

// Of matmul_backward: blocks of rows that each block of landmarks meets before the next one, so that many landmarks are
// not read from memory and their gradients not updated there for every block of rows.
constexpr int64_t kBlocksAtOnce = 4;

template <typename T>
int64_t matmul_backward_scratch_size(PairwiseSizes sizes) {
  const int64_t channels = padded<T>(sizes.channels), values = padded<T>(sizes.values);
  // q transposed and in a copy with its gradient; grad transposed and in a copy; lines; kernel and weights.
  return kBlocksAtOnce * kBlockRows * (3 * channels + 2 * values + 2) + 2 * kBlockRows * kBlockLandmarks;
}

// Distances of a block of rows (transposed) to a block of landmarks: [landmarks, kBlockRows].
template <typename T, PairwiseKind kind>
void distances(const T* q_columns, const T* k, T* out, int64_t lanes, int64_t landmarks, int64_t channels,
               Route& route) {
  for (int64_t first = 0; first < landmarks; first += kTileRows) {
    panel<T, kDistance<kind>>({k + first * channels, channels, 1}, q_columns, kBlockRows, out + first * kBlockRows,
                              kBlockRows, std::min<int64_t>(kTileRows, landmarks - first), lanes, channels, false,
                              route);
  }
}

// The block of rows after the one that ends before `next`; past the last row of a task, those of the next task.
template <typename T>
Ahead next_rows(const T* next, int64_t width) {
  return {next, width, width, kBlockRows};
}

template <typename T, PairwiseKind kind>
void forward(const T* q, const T* k, T* out, T* scratch, int64_t rows, PairwiseSizes sizes, double scale) {
  const int64_t channels = sizes.channels;
  const Exponential<T> exponential(scale);
  Scratch<T> parts{scratch};
  T* q_columns = parts.take(kBlockRows * channels);
  T* block = parts.take(kBlockRows * kBlockLandmarks);
  for (int64_t row = 0; row < rows; row += kBlockRows) {
    const int64_t rows_here = std::min(kBlockRows, rows - row);
    const int64_t lanes = padded<T>(rows_here);
    transpose_in(q + row * channels, channels, q_columns, kBlockRows, rows_here, channels, lanes);
    for (int64_t landmark = 0; landmark < sizes.landmarks; landmark += kBlockLandmarks) {
      const int64_t landmarks = std::min(kBlockLandmarks, sizes.landmarks - landmark);
      Route route{{out + row * sizes.landmarks + landmark, sizes.landmarks, landmarks, rows_here}, {}};
      if (landmark + landmarks == sizes.landmarks) route.second = next_rows(q + (row + rows_here) * channels, channels);
      distances<T, kind>(q_columns, k + landmark * channels, block, lanes, landmarks, channels, route);
      for (int64_t m = 0; m < landmarks; ++m) {
        T* line = block + m * kBlockRows;
        for (int64_t lane = 0; lane < lanes; lane += kWidth<T>) store(line + lane, exponential(load(line + lane)));
      }
      transpose_out(block, kBlockRows, out + row * sizes.landmarks + landmark, sizes.landmarks, rows_here, landmarks);
    }
  }
}

// The rows of a matrix with whole vectors: where they are, or copied and filled up with zeros.
template <typename T>
const T* whole_vectors(const T* from, T* copy, int64_t rows, int64_t width) {
  if (width % kWidth<T> == 0) return from;
  copy_padded(from, copy, rows, width, T(1));
  return copy;
}

template <typename T, PairwiseKind kind>
void matmul_forward(const T* q, const T* k, const T* v, T* out, T* origin_out, T* total_out, T* scratch, int64_t rows,
                    PairwiseSizes sizes, double scale, bool normalize) {
  constexpr int kW = kWidth<T>;
  const int64_t channels = sizes.channels, values = sizes.values, stride = padded<T>(values);
  const Vector<T> infinity = broadcast(std::numeric_limits<T>::infinity());
  const Exponential<T> exponential(scale);
  Scratch<T> parts{scratch};
  T* q_columns = parts.take(kBlockRows * channels);
  T* block = parts.take(kBlockRows * kBlockLandmarks);
  T* v_copy = parts.take(kBlockLandmarks * stride);
  T* out_copy = parts.take(kBlockRows * stride);
  T* nearest = parts.take(kBlockRows);
  T* total = parts.take(kBlockRows);
  T* fading = parts.take(kBlockRows);
  for (int64_t row = 0; row < rows; row += kBlockRows) {
    const int64_t rows_here = std::min(kBlockRows, rows - row);
    const int64_t lanes = padded<T>(rows_here);
    T* out_here = out + row * values;
    T* sums = stride == values ? out_here : out_copy;
    transpose_in(q + row * channels, channels, q_columns, kBlockRows, rows_here, channels, lanes);
    if (sizes.landmarks == 0) std::fill(sums, sums + rows_here * stride, T(0));
    std::fill(nearest, nearest + lanes, std::numeric_limits<T>::infinity());
    std::fill(total, total + lanes, T(0));
    for (int64_t landmark = 0; landmark < sizes.landmarks; landmark += kBlockLandmarks) {
      const int64_t landmarks = std::min(kBlockLandmarks, sizes.landmarks - landmark);
      Route route;
      if (landmark + landmarks == sizes.landmarks) {
        route = {{out_here, values, values, rows_here}, next_rows(q + (row + rows_here) * channels, channels)};
      }
      distances<T, kind>(q_columns, k + landmark * channels, block, lanes, landmarks, channels, route);
      for (int64_t lane = 0; lane < lanes; lane += kW) {
        T* column = block + lane;
        if (!normalize) {
          for (int64_t m = 0; m < landmarks; ++m) {
            store(column + m * kBlockRows, exponential(load(column + m * kBlockRows)));
          }
          continue;
        }
        // Exponents relative to the nearest landmark so far, so that a row whose kernel underflows is exact as well.
        const Vector<T> before = load(nearest + lane);
        Vector<T> now = before;
        for (int64_t m = 0; m < landmarks; ++m) now = minimum<T>(load(column + m * kBlockRows), now);
        const Vector<T> origin = now < infinity ? now : Vector<T>{};
        const Vector<T> fade = exponential(before - origin);
        Vector<T> sum = load(total + lane) * fade;
        for (int64_t m = 0; m < landmarks; ++m) {
          const Vector<T> weight = exponential(load(column + m * kBlockRows) - origin);
          store(column + m * kBlockRows, weight);
          sum += weight;
        }
        store(nearest + lane, now);
        store(fading + lane, fade);
        store(total + lane, sum);
      }
      if (normalize && landmark > 0) {
        for (int64_t i = 0; i < rows_here; ++i) {
          if (fading[i] == T(1)) continue;
          for (int64_t value = 0; value < stride; value += kW) {
            store(sums + i * stride + value, load(sums + i * stride + value) * fading[i]);
          }
        }
      }
      const T* v_block = whole_vectors(v + landmark * values, v_copy, landmarks, values);
      panel<T, Term::kProduct>({block, 1, kBlockRows}, v_block, stride, sums, stride, rows_here, stride, landmarks,
                               landmark > 0, route);
    }
    for (int64_t i = 0; i < rows_here; ++i) {
      T* from = sums + i * stride;
      if (normalize && sizes.landmarks > 0) {
        for (int64_t value = 0; value < stride; value += kW) store(from + value, load(from + value) / total[i]);
      }
      if (sums != out_here) std::memcpy(out_here + i * values, from, values * sizeof(T));
      origin_out[row + i] = normalize ? nearest[i] : T(0);
      total_out[row + i] = normalize ? total[i] : T(1);
    }
  }
}

template <typename T, PairwiseKind kind>
T prepare(const T* k, T* prepared, PairwiseSizes sizes) {
  const int64_t landmarks = sizes.landmarks, channels = sizes.channels;
  T factor = 1;
  if constexpr (kind == kLaplacian) {
    if (can_be_scaled(k, landmarks * channels)) factor = Scaling<T>::kFactor;
  }
  copy_padded(k, prepared, landmarks, channels, factor);
  return factor;
}

// to = grad * kernel * scale
template <typename T>
inline void kernel_weights(const T* grad, const T* kernel, T* to, int64_t count, T scale) {
  int64_t i = 0;
  for (; i + kWidth<T> <= count; i += kWidth<T>) store(to + i, load(grad + i) * load(kernel + i) * scale);
  if (i < count) store(to + i, load_partial(grad + i, count - i) * load_partial(kernel + i, count - i) * scale);
}

template <typename T, PairwiseKind kind>
void backward(const T* grad, const T* kernel, const T* q, const T* prepared, T factor, T* grad_q, T* share_k,
              T* scratch, int64_t rows, PairwiseSizes sizes, double scale) {
  const int64_t channels = sizes.channels, stride = padded<T>(channels), all = sizes.landmarks;
  const T weight_scale = T(kSlopeFactor<kind> * scale);
  Scratch<T> parts{scratch};
  T* copies = parts.take(GradientBlock<T, kind>::scratch_size(channels));
  T* weights = parts.take(kBlockRows * kBlockLandmarks);
  std::fill(share_k, share_k + all * stride, T(0));
  for (int64_t row = 0; row < rows; row += kBlockRows) {
    const int64_t rows_here = std::min(kBlockRows, rows - row);
    GradientBlock<T, kind> block(q + row * channels, grad_q + row * channels, rows_here, channels, factor, copies);
    for (int64_t landmark = 0; landmark < all; landmark += kBlockLandmarks) {
      const int64_t landmarks = std::min(kBlockLandmarks, all - landmark), after = landmark + kBlockLandmarks;
      Route inputs, rest;
      if (after < all) {
        const int64_t next = row * all + after, width = std::min(kBlockLandmarks, all - after);
        inputs = {{grad + next, all, width, rows_here}, {kernel + next, all, width, rows_here}};
      } else {
        const int64_t next = (row + rows_here) * all, width = std::min(kBlockLandmarks, all);
        inputs = {{grad + next, all, width, kBlockRows}, {kernel + next, all, width, kBlockRows}};
        rest = {{grad_q + row * channels, channels, channels, rows_here},
                next_rows(q + (row + rows_here) * channels, channels)};
      }
      const int64_t between = block.between(landmarks, std::max(inputs.lines(), rest.lines()));
      // Rows of one block of all landmarks follow each other, and so do their weights.
      const bool dense = landmarks == all;
      const int64_t row_stride = dense ? all : kBlockLandmarks;
      for (int64_t first = 0; first < rows_here; first += kGradientRows) {
        const int64_t count = std::min<int64_t>(kGradientRows, rows_here - first);
        const int64_t from = (row + first) * all + landmark;
        if (dense) {
          kernel_weights(grad + from, kernel + from, weights, count * all, weight_scale);
        } else {
          for (int64_t i = 0; i < count; ++i) {
            kernel_weights(grad + from + i * all, kernel + from + i * all, weights + i * row_stride, landmarks,
                           weight_scale);
          }
        }
        std::fill(weights + count * row_stride, weights + kGradientRows * row_stride, T(0));
        block.add(first, {weights, row_stride, 1}, prepared + landmark * stride, share_k + landmark * stride,
                  landmarks, landmark == 0, inputs, rest, between);
      }
    }
    block.finish(all);
  }
}

// A block of rows in matmul_backward.
template <typename T, PairwiseKind kind>
struct MatmulRows {
  GradientBlock<T, kind> gradient;
  const T* grad;  // [rows, padded(values)]
  // Transposed, and a number for every row: what to subtract from its distances and from its grad v^T.
  T *q_columns, *grad_columns, *origin, *offset;
  int64_t rows, lanes;
};

template <typename T, PairwiseKind kind>
void matmul_backward(const T* grad, const T* q, const T* k, const T* v, const T* prepared, T factor, const T* origin,
                     const T* delta, T* grad_q, T* share_k, T* share_v, T* scratch, int64_t rows, PairwiseSizes sizes,
                     double scale) {
  constexpr int kW = kWidth<T>;
  const int64_t channels = sizes.channels, stride = padded<T>(channels), all = sizes.landmarks;
  const int64_t values = sizes.values, values_stride = padded<T>(values);
  const int64_t at_once = all <= kBlockLandmarks ? 1 : kBlocksAtOnce;
  const T weight_scale = T(kSlopeFactor<kind> * scale);
  const Exponential<T> exponential(scale);
  std::fill(share_k, share_k + all * stride, T(0));
  std::fill(share_v, share_v + all * values_stride, T(0));
  for (int64_t start = 0; start < rows; start += at_once * kBlockRows) {
    Scratch<T> parts{scratch};
    T* kernel = parts.take(kBlockRows * kBlockLandmarks);
    T* weights = parts.take(kBlockRows * kBlockLandmarks);
    MatmulRows<T, kind> blocks[kBlocksAtOnce];
    int64_t count = 0;
    for (int64_t row = start; row < rows && count < at_once; row += kBlockRows) {
      MatmulRows<T, kind>& block = blocks[count++];
      block.rows = std::min(kBlockRows, rows - row);
      block.lanes = padded<T>(block.rows);
      block.q_columns = parts.take(kBlockRows * channels);
      block.grad_columns = parts.take(kBlockRows * values);
      block.origin = parts.take(kBlockRows);
      block.offset = parts.take(kBlockRows);
      transpose_in(q + row * channels, channels, block.q_columns, kBlockRows, block.rows, channels, block.lanes);
      transpose_in(grad + row * values, values, block.grad_columns, kBlockRows, block.rows, values, block.lanes);
      block.grad = whole_vectors(grad + row * values, parts.take(kBlockRows * values_stride), block.rows, values);
      block.gradient = {q + row * channels, grad_q + row * channels, block.rows, channels, factor,
                        parts.take(GradientBlock<T, kind>::scratch_size(channels))};
      for (int64_t i = 0; i < kBlockRows; ++i) {
        block.origin[i] = i < block.rows ? origin[row + i] : T(0);
        block.offset[i] = i < block.rows ? delta[row + i] : T(0);
      }
    }
    for (int64_t landmark = 0; landmark < all; landmark += kBlockLandmarks) {
      const int64_t landmarks = std::min(kBlockLandmarks, all - landmark);
      for (int64_t index = 0; index < count; ++index) {
        MatmulRows<T, kind>& block = blocks[index];
        Route inputs, output;
        if (landmark + landmarks == all) {
          const int64_t row = start + index * kBlockRows, next = row + (count - 1) * kBlockRows + block.rows;
          inputs = {next_rows(q + next * channels, channels), next_rows(grad + next * values, values)};
          output.first = {grad_q + row * channels, channels, channels, block.rows};
        }
        distances<T, kind>(block.q_columns, k + landmark * channels, kernel, block.lanes, landmarks, channels, inputs);
        panel<T, Term::kProduct>({v + landmark * values, values, 1}, block.grad_columns, kBlockRows, weights,
                                 kBlockRows, landmarks, block.lanes, values, false, inputs);
        for (int64_t m = 0; m < landmarks; ++m) {
          T *distance = kernel + m * kBlockRows, *weight = weights + m * kBlockRows;
          for (int64_t lane = 0; lane < block.lanes; lane += kW) {
            // The distances have the bits of the forward pass, so that the nearest gives exactly 0. Those of another
            // instruction set differ in the last ones; no weight is above 1 whatever they say.
            const Vector<T> above = maximum<T>(Vector<T>{}, load(distance + lane) - load(block.origin + lane));
            const Vector<T> value = exponential(above);
            store(distance + lane, value);
            store(weight + lane, value * (load(weight + lane) - load(block.offset + lane)) * weight_scale);
          }
          // Whole tiles of rows are worked on.
          std::fill(weight + block.lanes, weight + std::max(block.lanes, round_up(block.rows, kGradientRows)), T(0));
        }
        panel<T, Term::kProduct>({kernel, kBlockRows, 1}, block.grad, values_stride,
                                 share_v + landmark * values_stride, values_stride, landmarks, values_stride,
                                 block.rows, true, output);
        for (int64_t first = 0; first < block.rows; first += kGradientRows) {
          block.gradient.add(first, {weights + first, 1, kBlockRows}, prepared + landmark * stride,
                             share_k + landmark * stride, landmarks, landmark == 0, output, output);
        }
      }
    }
    for (int64_t index = 0; index < count; ++index) blocks[index].gradient.finish(all);
  }
}

template <typename T>
void sum_shares(const T* shares, int64_t count, int64_t all_landmarks, T* out, int64_t landmarks, int64_t width) {
  constexpr int kW = kWidth<T>;
  const int64_t stride = padded<T>(width);
  for (int64_t landmark = 0; landmark < landmarks; ++landmark) {
    for (int64_t column = 0; column < width; column += kW) {
      Vector<T> sum = {};
      for (int64_t share = 0; share < count; ++share) {
        sum += load(shares + (share * all_landmarks + landmark) * stride + column);
      }
      T* to = out + landmark * width + column;
      if (column + kW <= width) {
        store(to, sum);
      } else {
        store_partial(to, sum, width - column);
      }
    }
  }
}

template <typename T, PairwiseKind kind>
constexpr PairwiseFunctions<T> functions() {
  return {scratch_size<T>,         matmul_backward_scratch_size<T>, padded<T>,         forward<T, kind>,
          matmul_forward<T, kind>, prepare<T, kind>,                backward<T, kind>, matmul_backward<T, kind>,
          sum_shares<T>};
}

}  // namespace

const PairwiseKernels ATTNGEO_JOIN(pairwise_kernel, ATTNGEO_VARIANT) = {
    {functions<float, kLaplacian>(), functions<float, kGaussian>()},
    {functions<double, kLaplacian>(), functions<double, kGaussian>()},
};

}  // namespace attngeo
