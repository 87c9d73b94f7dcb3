// Laplacian kernel on the CPU: forward and both gradients. Compiled once per instruction set with ATTNGEO_VARIANT set
// to the variant's name; everything but the table at the end has internal linkage, so that no code made for a wide
// instruction set can replace code that an older processor runs.
#include "laplacian_kernel.h"

#include <cstdint>
#include <cstring>

namespace attngeo {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kAccumulators = 24;  // of 32 registers
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
constexpr int kAccumulators = 12;  // of 16 registers
#else
constexpr int kVectorBytes = 16;
constexpr int kAccumulators = 12;
#endif

// Vectors of landmarks that one pass of the forward kernel covers.
constexpr int kGroup = 4;
// Rows and vectors of channels that one pass of the backward kernel keeps in registers.
constexpr int kBackwardRows = 4;
constexpr int kBackwardVectors = kVectorBytes == 64 ? 2 : 1;

template <typename T>
struct Lanes;

template <>
struct Lanes<float> {
  typedef float Vector __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Bits __attribute__((vector_size(kVectorBytes)));
  typedef float Unaligned __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
  static constexpr int32_t kSignBit = INT32_MIN;
  static constexpr int32_t kOneBits = 0x3f800000;
  // Constants of exp: 1.5 * 2^23 rounds to an integer when added, the bias and place of the exponent, and a bound
  // below which exp is 0 in this type.
  static constexpr float kRound = 12582912.0f;
  static constexpr int kBias = 127, kMantissaBits = 23, kTerms = 8;
  static constexpr float kLowest = -110.0f;
  static constexpr float kLn2High = 0.693145751953125f, kLn2Low = 1.42860682030941723212e-6f;
};

template <>
struct Lanes<double> {
  typedef double Vector __attribute__((vector_size(kVectorBytes)));
  typedef int64_t Bits __attribute__((vector_size(kVectorBytes)));
  typedef double Unaligned __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
  static constexpr int64_t kSignBit = INT64_MIN;
  static constexpr int64_t kOneBits = 0x3ff0000000000000;
  static constexpr double kRound = 6755399441055744.0;
  static constexpr int kBias = 1023, kMantissaBits = 52, kTerms = 14;
  static constexpr double kLowest = -760.0;
  static constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;
};

template <typename T>
constexpr int kWidth = kVectorBytes / int(sizeof(T));

template <typename T>
inline typename Lanes<T>::Vector load(const T* from) {
  return *reinterpret_cast<const typename Lanes<T>::Unaligned*>(from);
}

template <typename T>
inline void store(T* to, typename Lanes<T>::Vector value) {
  *reinterpret_cast<typename Lanes<T>::Unaligned*>(to) = value;
}

template <typename T>
inline typename Lanes<T>::Vector absolute(typename Lanes<T>::Vector x) {
  using L = Lanes<T>;
  return (typename L::Vector)((typename L::Bits)x & ~L::kSignBit);
}

// sign(x) with sign(0) = 0; NaN gives +-1, which meets a weight that is NaN already.
template <typename T>
inline typename Lanes<T>::Vector sign(typename Lanes<T>::Vector x) {
  using L = Lanes<T>;
  const auto signed_one = ((typename L::Bits)x & L::kSignBit) | L::kOneBits;
  return (typename L::Vector)((x != T(0)) & signed_one);
}

// exp(x) for x <= 0 to about one unit in the last place, with gradual underflow; NaN stays NaN.
// x = n ln 2 + r with |r| <= ln(2)/2, Taylor's sum for exp(r), and 2^n in two factors, as 2^n alone may underflow.
template <typename T>
inline typename Lanes<T>::Vector exponential(typename Lanes<T>::Vector x) {
  using L = Lanes<T>;
  using Vector = typename L::Vector;
  using Bits = typename L::Bits;
  const Vector bounded = x < L::kLowest ? Vector{} + L::kLowest : x;
  const Vector shifted = bounded * T(1.44269504088896340736) + L::kRound;
  const Vector n = shifted - L::kRound;
  const Vector r = (bounded - n * L::kLn2High) - n * L::kLn2Low;
  constexpr T inverse_factorial[14] = {T(1),           T(1),           T(1) / 2,         T(1) / 6,       T(1) / 24,
                                       T(1) / 120,     T(1) / 720,     T(1) / 5040,      T(1) / 40320,   T(1) / 362880,
                                       T(1) / 3628800, T(1) / 39916800, T(1) / 479001600, T(1) / 6227020800};
  Vector sum = Vector{} + inverse_factorial[L::kTerms - 1];
#pragma GCC unroll 16
  for (int term = L::kTerms - 2; term >= 0; --term) sum = sum * r + inverse_factorial[term];
  const Bits exponent = (Bits)shifted - (Bits)(Vector{} + L::kRound);
  const Bits half = exponent >> 1;
  const Vector first = (Vector)((half + L::kBias) << L::kMantissaBits);
  const Vector second = (Vector)((exponent - half + L::kBias) << L::kMantissaBits);
  return sum * first * second;
}

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

template <typename T>
int64_t padded_channels(int64_t channels) {
  return round_up(channels, kWidth<T>);
}

template <typename T>
int64_t forward_packed_size(SliceShape shape) {
  return round_up(shape.landmarks, kWidth<T>) * shape.channels;
}

// Landmarks in lanes: groups of up to kGroup vectors, in each group the channels one after another.
template <typename T>
void pack_forward(const T* k, T* packed, SliceShape shape) {
  const int64_t padded = round_up(shape.landmarks, kWidth<T>);
  for (int64_t first = 0; first < padded; first += kGroup * kWidth<T>) {
    const int64_t width = padded - first < kGroup * kWidth<T> ? padded - first : kGroup * kWidth<T>;
    for (int64_t lane = 0; lane < width; ++lane) {
      const bool exists = first + lane < shape.landmarks;
      for (int64_t channel = 0; channel < shape.channels; ++channel) {
        packed[channel * width + lane] = exists ? k[(first + lane) * shape.channels + channel] : T(0);
      }
    }
    packed += width * shape.channels;
  }
}

// Channels in lanes, padded with zeros to whole vectors.
template <typename T>
void pack_backward(const T* k, T* packed, SliceShape shape) {
  const int64_t padded = padded_channels<T>(shape.channels);
  for (int64_t landmark = 0; landmark < shape.landmarks; ++landmark) {
    std::memcpy(packed, k, shape.channels * sizeof(T));
    std::memset(packed + shape.channels, 0, (padded - shape.channels) * sizeof(T));
    packed += padded;
    k += shape.channels;
  }
}

// Rows of q x Vectors of landmarks, all distances in registers. A pair's sum runs over the channels in order whatever
// the tile, so that a token's result does not depend on its neighbours.
template <typename T, int Rows, int Vectors>
inline void forward_tile(const T* q, const T* packed, T* out, int64_t landmarks, int64_t out_stride, int64_t channels,
                         T scale) {
  using Vector = typename Lanes<T>::Vector;
  Vector distance[Rows][Vectors] = {};
  for (int64_t channel = 0; channel < channels; ++channel) {
    Vector k[Vectors];
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) k[j] = load(packed + (channel * Vectors + j) * kWidth<T>);
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
      const Vector value = Vector{} + q[i * channels + channel];
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) distance[i][j] += absolute<T>(value - k[j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) {
      const Vector value = exponential<T>(distance[i][j] * scale);
      T* to = out + i * out_stride + j * kWidth<T>;
      const int64_t left = landmarks - j * kWidth<T>;
      if (left >= kWidth<T>) {
        store(to, value);
      } else {
        T lanes[kWidth<T>];
        store(lanes, value);
        for (int64_t lane = 0; lane < left; ++lane) to[lane] = lanes[lane];
      }
    }
  }
}

template <typename T, int Vectors>
void forward_group(const T* q, const T* packed, T* out, int64_t rows, int64_t landmarks, SliceShape shape, T scale) {
  constexpr int kFit = kAccumulators / Vectors;
  constexpr int kRows = kFit < 8 ? kFit : 8;  // more rows than 8 run out of address registers
  int64_t row = 0;
  for (; row + kRows <= rows; row += kRows) {
    forward_tile<T, kRows, Vectors>(q + row * shape.channels, packed, out + row * shape.landmarks, landmarks,
                                    shape.landmarks, shape.channels, scale);
  }
  for (; row < rows; ++row) {
    forward_tile<T, 1, Vectors>(q + row * shape.channels, packed, out + row * shape.landmarks, landmarks,
                                shape.landmarks, shape.channels, scale);
  }
}

template <typename T>
void forward(const T* q, const T* packed, T* out, int64_t rows, SliceShape shape, double lambda) {
  const T scale = T(-1.0 / lambda);
  for (int64_t first = 0; first < shape.landmarks; first += kGroup * kWidth<T>) {
    const int64_t landmarks = shape.landmarks - first;
    const int64_t vectors = (landmarks + kWidth<T> - 1) / kWidth<T>;
    if (vectors >= 4) {
      forward_group<T, 4>(q, packed, out + first, rows, landmarks, shape, scale);
    } else if (vectors == 3) {
      forward_group<T, 3>(q, packed, out + first, rows, landmarks, shape, scale);
    } else if (vectors == 2) {
      forward_group<T, 2>(q, packed, out + first, rows, landmarks, shape, scale);
    } else {
      forward_group<T, 1>(q, packed, out + first, rows, landmarks, shape, scale);
    }
    packed += kGroup * kWidth<T> * shape.channels;
  }
}

template <typename T>
int64_t backward_scratch_size(SliceShape shape) {
  return kBackwardRows * (shape.landmarks + 2 * padded_channels<T>(shape.channels));
}

// kBackwardRows rows x Vectors of channels: the rows and their gradients stay in registers while the landmarks and
// their gradients stream by; one sign serves both gradients.
template <typename T, int Vectors>
inline void backward_tile(const T* weights, const T* q, const T* packed, T* grad_q, T* grad_k, int64_t landmarks,
                          int64_t stride) {
  using Vector = typename Lanes<T>::Vector;
  Vector row[kBackwardRows][Vectors], sum[kBackwardRows][Vectors] = {};
#pragma GCC unroll 4
  for (int i = 0; i < kBackwardRows; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < Vectors; ++j) row[i][j] = load(q + i * stride + j * kWidth<T>);
  }
  for (int64_t m = 0; m < landmarks; ++m) {
#pragma GCC unroll 2
    for (int j = 0; j < Vectors; ++j) {
      const Vector k = load(packed + m * stride + j * kWidth<T>);
      Vector grad = load(grad_k + m * stride + j * kWidth<T>);
#pragma GCC unroll 4
      for (int i = 0; i < kBackwardRows; ++i) {
        const Vector term = sign<T>(row[i][j] - k) * weights[m * kBackwardRows + i];
        sum[i][j] += term;
        grad -= term;
      }
      store(grad_k + m * stride + j * kWidth<T>, grad);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kBackwardRows; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < Vectors; ++j) store(grad_q + i * stride + j * kWidth<T>, sum[i][j]);
  }
}

template <typename T>
void backward(const T* grad, const T* kernel, const T* q, const T* packed, T* grad_q, T* grad_k_share, T* scratch,
              int64_t rows, SliceShape shape, double lambda) {
  const int64_t stride = padded_channels<T>(shape.channels);
  const T scale = T(-1.0 / lambda);
  T* weights = scratch;
  T* q_tile = weights + kBackwardRows * shape.landmarks;
  T* grad_tile = q_tile + kBackwardRows * stride;
  std::memset(grad_k_share, 0, shape.landmarks * stride * sizeof(T));
  std::memset(q_tile, 0, kBackwardRows * stride * sizeof(T));
  for (int64_t first = 0; first < rows; first += kBackwardRows) {
    const int64_t here = rows - first < kBackwardRows ? rows - first : kBackwardRows;
    // Rows past the end keep weight 0 and so add nothing.
    if (here < kBackwardRows) std::memset(weights, 0, kBackwardRows * shape.landmarks * sizeof(T));
    for (int64_t i = 0; i < here; ++i) {
      const int64_t offset = (first + i) * shape.landmarks;
      for (int64_t m = 0; m < shape.landmarks; ++m) {
        weights[m * kBackwardRows + i] = grad[offset + m] * kernel[offset + m] * scale;
      }
      std::memcpy(q_tile + i * stride, q + (first + i) * shape.channels, shape.channels * sizeof(T));
    }
    int64_t channel = 0;
    for (; channel + kBackwardVectors * kWidth<T> <= stride; channel += kBackwardVectors * kWidth<T>) {
      backward_tile<T, kBackwardVectors>(weights, q_tile + channel, packed + channel, grad_tile + channel,
                                         grad_k_share + channel, shape.landmarks, stride);
    }
    for (; channel < stride; channel += kWidth<T>) {
      backward_tile<T, 1>(weights, q_tile + channel, packed + channel, grad_tile + channel, grad_k_share + channel,
                          shape.landmarks, stride);
    }
    for (int64_t i = 0; i < here; ++i) {
      std::memcpy(grad_q + (first + i) * shape.channels, grad_tile + i * stride, shape.channels * sizeof(T));
    }
  }
}

template <typename T>
constexpr LaplacianKernels<T> kernels() {
  return {forward_packed_size<T>,   padded_channels<T>, pack_forward<T>, pack_backward<T>, forward<T>,
          backward_scratch_size<T>, backward<T>};
}

}  // namespace

#define ATTNGEO_JOIN(a, b) a##b
#define ATTNGEO_TABLE(variant) ATTNGEO_JOIN(laplacian_, variant)
#define ATTNGEO_QUOTE(text) #text
#define ATTNGEO_NAME(variant) ATTNGEO_QUOTE(variant)

const LaplacianVariant ATTNGEO_TABLE(ATTNGEO_VARIANT) = {ATTNGEO_NAME(ATTNGEO_VARIANT), kernels<float>(),
                                                         kernels<double>()};

}  // namespace attngeo
