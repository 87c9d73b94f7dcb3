// Vectors of the widest kind that the instruction set has, the few operations that the kernels need on them, and their
// fused forms. A file that includes this is compiled once per variant, so everything here has internal linkage.
#pragma once
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

namespace attngeo {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <typename T>
constexpr int kWidth = kVectorBytes / int(sizeof(T));

template <typename T>
struct Lanes;

template <>
struct Lanes<float> {
  typedef float Vector __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Bits __attribute__((vector_size(kVectorBytes)));
  typedef uint32_t UnsignedBits __attribute__((vector_size(kVectorBytes)));
  typedef float Unaligned __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
  static constexpr int32_t kSignBit = INT32_MIN;
  static constexpr int32_t kOneBits = 0x3f800000;
  // Adding 1.5 * 2^23 rounds to an integer.
  static constexpr float kRound = 12582912.0f;
  static constexpr int kBias = 127, kMantissaBits = 23;
  static constexpr int kLift = 64;
  static constexpr int32_t kTopHalf = ~0xfff;
  static constexpr float kLower = 0x1p-64f;
  // 2^x is 0 below this.
  static constexpr float kLowestExponent = -151.0f;
  // 2^x = 1 + x * ... on |x| <= 1/2 to 2^-28 (minimax in the relative error, first coefficient 1).
  static constexpr int kTerms = 7;
  static constexpr float kPowerOfTwo[kTerms] = {1.0f,
                                                0.693147214968027899f,
                                                0.240226527828877374f,
                                                0.0555031055101379717f,
                                                0.00961769297299306232f,
                                                0.00134066439023517592f,
                                                0.000155946781613266193f};
};

template <>
struct Lanes<double> {
  typedef double Vector __attribute__((vector_size(kVectorBytes)));
  typedef int64_t Bits __attribute__((vector_size(kVectorBytes)));
  typedef uint64_t UnsignedBits __attribute__((vector_size(kVectorBytes)));
  typedef double Unaligned __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
  static constexpr int64_t kSignBit = INT64_MIN;
  static constexpr int64_t kOneBits = 0x3ff0000000000000;
  static constexpr double kRound = 6755399441055744.0;
  static constexpr int kBias = 1023, kMantissaBits = 52;
  static constexpr int kLift = 512;
  static constexpr int64_t kTopHalf = ~int64_t{0x7ffffff};
  static constexpr double kLower = 0x1p-512;
  static constexpr double kLowestExponent = -1076.0;
  // To 2^-55.
  static constexpr int kTerms = 12;
  static constexpr double kPowerOfTwo[kTerms] = {1.0,
                                                 0.693147180559945697,
                                                 0.24022650695910098,
                                                 0.0555041086647903946,
                                                 0.00961812910760700238,
                                                 0.00133335581534399647,
                                                 0.000154035304415721303,
                                                 0.0000152527273851938682,
                                                 1.32154426753298221e-6,
                                                 1.01806476592341389e-7,
                                                 7.07257041281442351e-9,
                                                 4.07807192958833667e-10};
};

#if defined(__AVX512F__)
// The forms of intrinsics with a mask: gcc 12 warns of its own header for those without.
constexpr uint32_t kAllLanes = 0xffff;
#endif

template <typename T>
using Vector = typename Lanes<T>::Vector;

template <typename T>
inline Vector<T> load(const T* from) {
  return *reinterpret_cast<const typename Lanes<T>::Unaligned*>(from);
}

template <typename T>
inline void store(T* to, Vector<T> value) {
  *reinterpret_cast<typename Lanes<T>::Unaligned*>(to) = value;
}

template <typename T>
inline Vector<T> broadcast(T value) {
  return value - Vector<T>{};  // x - 0 is x for every x, so nothing is computed
}

// The first `count` lanes, 0 < count < kWidth, the others 0; nothing past them is touched.
template <typename T>
inline Vector<T> load_partial(const T* from, int64_t count) {
#if defined(__AVX512F__)
  const uint32_t mask = (uint32_t{1} << count) - 1;
  if constexpr (sizeof(T) == 4) {
    return (Vector<T>)_mm512_maskz_loadu_ps(__mmask16(mask), from);
  } else {
    return (Vector<T>)_mm512_maskz_loadu_pd(__mmask8(mask), from);
  }
#else
  T lanes[kWidth<T>] = {};
  for (int64_t lane = 0; lane < count; ++lane) lanes[lane] = from[lane];
  return load(lanes);
#endif
}

template <typename T>
inline void store_partial(T* to, Vector<T> value, int64_t count) {
#if defined(__AVX512F__)
  const uint32_t mask = (uint32_t{1} << count) - 1;
  if constexpr (sizeof(T) == 4) {
    _mm512_mask_storeu_ps(to, __mmask16(mask), (__m512)value);
  } else {
    _mm512_mask_storeu_pd(to, __mmask8(mask), (__m512d)value);
  }
#else
  T lanes[kWidth<T>];
  store(lanes, value);
  for (int64_t lane = 0; lane < count; ++lane) to[lane] = lanes[lane];
#endif
}

// a * b + c, in one rounding where the instruction set has that. Written out, so that the compiler's choice of what to
// contract cannot make two tiles round differently.
template <typename T>
inline Vector<T> multiply_add(Vector<T> a, Vector<T> b, Vector<T> c) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    return (Vector<T>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
  } else {
    return (Vector<T>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
  }
#elif defined(__FMA__)
  if constexpr (sizeof(T) == 4) {
    return (Vector<T>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  } else {
    return (Vector<T>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
  }
#else
  return a * b + c;
#endif
}

// The smaller or larger, and b where either is NaN.
template <typename T>
inline Vector<T> minimum(Vector<T> a, Vector<T> b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    return (Vector<T>)_mm512_maskz_min_ps(kAllLanes, (__m512)a, (__m512)b);
  } else {
    return (Vector<T>)_mm512_maskz_min_pd(kAllLanes & 0xff, (__m512d)a, (__m512d)b);
  }
#elif defined(__AVX__)
  if constexpr (sizeof(T) == 4) {
    return (Vector<T>)_mm256_min_ps((__m256)a, (__m256)b);
  } else {
    return (Vector<T>)_mm256_min_pd((__m256d)a, (__m256d)b);
  }
#elif defined(__SSE2__)
  if constexpr (sizeof(T) == 4) {
    return (Vector<T>)_mm_min_ps((__m128)a, (__m128)b);
  } else {
    return (Vector<T>)_mm_min_pd((__m128d)a, (__m128d)b);
  }
#else
  return a < b ? a : b;
#endif
}

template <typename T>
inline Vector<T> maximum(Vector<T> a, Vector<T> b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    return (Vector<T>)_mm512_maskz_max_ps(kAllLanes, (__m512)a, (__m512)b);
  } else {
    return (Vector<T>)_mm512_maskz_max_pd(kAllLanes & 0xff, (__m512d)a, (__m512d)b);
  }
#elif defined(__AVX__)
  if constexpr (sizeof(T) == 4) {
    return (Vector<T>)_mm256_max_ps((__m256)a, (__m256)b);
  } else {
    return (Vector<T>)_mm256_max_pd((__m256d)a, (__m256d)b);
  }
#elif defined(__SSE2__)
  if constexpr (sizeof(T) == 4) {
    return (Vector<T>)_mm_max_ps((__m128)a, (__m128)b);
  } else {
    return (Vector<T>)_mm_max_pd((__m128d)a, (__m128d)b);
  }
#else
  return a > b ? a : b;
#endif
}

template <typename T>
inline Vector<T> absolute(Vector<T> x) {
  using L = Lanes<T>;
  return (Vector<T>)((typename L::Bits)x & ~L::kSignBit);
}

// x + y for y that came from `absolute`: a fused multiply-add by 1 rounds the same and leaves the adders to the
// differences where the processor has separate units (AMD); where it has not, it costs the same.
template <typename T>
inline Vector<T> accumulate(Vector<T> sum, Vector<T> x) {
#if defined(__FMA__)
  return multiply_add<T>(x, broadcast(T(1)), sum);
#else
  return sum + x;
#endif
}

// sign(x) with sign(0) = 0 and NaN for NaN.
template <typename T>
inline Vector<T> sign(Vector<T> x) {
#if defined(__AVX512F__)
  // What x becomes, four bits a class: NaNs themselves (1), 0 is +0 (8), 1 is 1 (10), -inf -1 (9), +inf 1, negative
  // numbers -1, positive ones 1.
  constexpr uint32_t kByClass = 0xa9a9a811;
  if constexpr (sizeof(T) == 4) {
    return (Vector<T>)_mm512_fixupimm_ps((__m512)x, (__m512)x, _mm512_set1_epi32(int32_t(kByClass)), 0);
  } else {
    return (Vector<T>)_mm512_fixupimm_pd((__m512d)x, (__m512d)x, _mm512_set1_epi64(int64_t{kByClass}), 0);
  }
#else
  using L = Lanes<T>;
  const auto signed_one = ((typename L::Bits)x & L::kSignBit) | L::kOneBits;
  const Vector<T> numbers = (Vector<T>)((x != T(0)) & signed_one);
  return x == x ? numbers : x;
#endif
}

// sign(x) for x that is 0 or at least 1 in size: cheaper.
template <typename T>
inline Vector<T> sign_of_large(Vector<T> x) {
#if defined(__AVX512DQ__)
  constexpr int kSmallerSize = 0x02;  // with the sign of the first
  if constexpr (sizeof(T) == 4) {
    return (Vector<T>)_mm512_maskz_range_ps(kAllLanes, (__m512)x, _mm512_set1_ps(1.0f), kSmallerSize);
  } else {
    return (Vector<T>)_mm512_maskz_range_pd(kAllLanes & 0xff, (__m512d)x, _mm512_set1_pd(1.0), kSmallerSize);
  }
#else
  return maximum<T>(minimum<T>(x, broadcast(T(1))), broadcast(T(-1)));
#endif
}

// exp(scale * x) for scale * x up to 40, to about one unit in the last place, with gradual underflow; NaN stays NaN.
// 2^(n + f) with scale / ln 2 * x = n + f, its product formed so that f is exact to rounding whatever n is.
template <typename T>
class Exponential {
  using L = Lanes<T>;

 public:
  explicit Exponential(double scale) {
    constexpr double kLargest = std::numeric_limits<T>::max();
    constexpr double kRate = 1.44269504088896340736, kRest = 2.0355273740931033e-17;  // 1 / ln 2
    const double rate = std::fmax(scale * kRate, -kLargest);
    const double rest = rate == scale * kRate ? std::fma(scale, kRate, -rate) + scale * kRest : 0.0;
    high_ = T(rate);
#if defined(__FMA__)
    low_ = T((rate - double(high_)) + rest);
#else
    top_ = top_half(broadcast(high_))[0];
    low_ = T((rate - double(top_)) + rest);
#endif
    limit_ = T(std::fmin(L::kLowestExponent / rate, kLargest));
  }

  Vector<T> operator()(Vector<T> x) const {
    const Vector<T> bounded = minimum<T>(broadcast(limit_), x), high = broadcast(high_);
#if defined(__AVX512F__)
    const Vector<T> n = nearest(bounded * high);
#else
    const Vector<T> shifted = multiply_add<T>(bounded, high, broadcast(L::kRound)), n = shifted - L::kRound;
#endif
#if defined(__FMA__)
    const Vector<T> f = multiply_add<T>(bounded, broadcast(low_), multiply_add<T>(bounded, high, -n));
#else
    const Vector<T> top = top_half(bounded);
    const Vector<T> f = (top * top_ - n) + (top * low_ + (bounded - top) * high);
#endif
    Vector<T> sum = broadcast(L::kPowerOfTwo[L::kTerms - 1]);
#pragma GCC unroll 16
    for (int i = L::kTerms - 2; i >= 0; --i) sum = multiply_add<T>(sum, f, broadcast(L::kPowerOfTwo[i]));
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) {
      return (Vector<T>)_mm512_maskz_scalef_ps(kAllLanes, (__m512)sum, (__m512)n);
    } else {
      return (Vector<T>)_mm512_maskz_scalef_pd(kAllLanes & 0xff, (__m512d)sum, (__m512d)n);
    }
#else
    // n is in the last bits of `shifted`. 2^n may be too small for a normal number, so that it takes two factors.
    using Unsigned = typename L::UnsignedBits;
    const Unsigned bits = ((Unsigned)shifted + (L::kBias + L::kLift)) << L::kMantissaBits;
    return sum * (Vector<T>)bits * L::kLower;
#endif
  }

 private:
#if defined(__AVX512F__)
  static Vector<T> nearest(Vector<T> x) {
    constexpr int kToNearest = 0x08;
    if constexpr (sizeof(T) == 4) {
      return (Vector<T>)_mm512_maskz_roundscale_ps(kAllLanes, (__m512)x, kToNearest);
    } else {
      return (Vector<T>)_mm512_maskz_roundscale_pd(kAllLanes & 0xff, (__m512d)x, kToNearest);
    }
  }
#endif

#if defined(__FMA__)
  T high_, low_, limit_;
#else
  // The leading half of the bits: products of two such numbers are exact.
  static Vector<T> top_half(Vector<T> x) { return (Vector<T>)((typename L::Bits)x & L::kTopHalf); }

  T high_, top_, low_, limit_;
#endif
};

// Whether no bit is set.
template <typename T>
inline bool none(typename Lanes<T>::Bits bits) {
  uint64_t words[kVectorBytes / 8], any = 0;
  std::memcpy(words, &bits, sizeof(words));
  for (uint64_t word : words) any |= word;
  return any == 0;
}

// Lanes of a and b by a function of the lane's number; numbers from kWidth on mean b.
template <typename T, typename Choose, int... lane>
inline Vector<T> choose(Vector<T> a, Vector<T> b, Choose, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(a, b, Choose::of(lane)...);
}

template <typename T, typename Choose>
inline Vector<T> choose(Vector<T> a, Vector<T> b) {
  return choose<T>(a, b, Choose{}, std::make_integer_sequence<int, kWidth<T>>{});
}

// Within every 128 bits: pieces of Size lanes of a and b in turn, from the low or the high half.
template <typename T, int Size, bool High>
struct Interleave {
  static constexpr int of(int lane) {
    constexpr int block = 16 / int(sizeof(T));
    const int inside = lane % block;
    return lane - inside + (High ? block / 2 : 0) + inside / (2 * Size) * Size + inside % Size +
           (inside / Size % 2 != 0 ? kWidth<T> : 0);
  }
};

// The even or the odd ones of the pieces of 128 bits of a and b.
template <typename T, bool Odd>
struct EveryOther {
  static constexpr int of(int lane) {
    constexpr int block = 16 / int(sizeof(T));
    return (lane / block * 2 + (Odd ? 1 : 0)) * block + lane % block;
  }
};

// Square of kWidth vectors: rows become columns.
template <typename T>
inline void transpose(Vector<T> (&rows)[kWidth<T>]) {
  constexpr int kBlock = 16 / int(sizeof(T));
  constexpr int kBlocks = kVectorBytes / 16;
  // Inside every 128 bits of kBlock rows.
#pragma GCC unroll 8
  for (int first = 0; first < kWidth<T>; first += kBlock) {
    Vector<T>* group = rows + first;
    if constexpr (kBlock == 4) {
      const Vector<T> a = choose<T, Interleave<T, 1, false>>(group[0], group[1]);
      const Vector<T> b = choose<T, Interleave<T, 1, true>>(group[0], group[1]);
      const Vector<T> c = choose<T, Interleave<T, 1, false>>(group[2], group[3]);
      const Vector<T> d = choose<T, Interleave<T, 1, true>>(group[2], group[3]);
      group[0] = choose<T, Interleave<T, 2, false>>(a, c);
      group[1] = choose<T, Interleave<T, 2, true>>(a, c);
      group[2] = choose<T, Interleave<T, 2, false>>(b, d);
      group[3] = choose<T, Interleave<T, 2, true>>(b, d);
    } else {
      const Vector<T> a = choose<T, Interleave<T, 1, false>>(group[0], group[1]);
      group[1] = choose<T, Interleave<T, 1, true>>(group[0], group[1]);
      group[0] = a;
    }
  }
  // The pieces of 128 bits among the groups.
  if constexpr (kBlocks > 1) {
#pragma GCC unroll 4
    for (int inside = 0; inside < kBlock; ++inside) {
      Vector<T> piece[kBlocks];
#pragma GCC unroll 4
      for (int i = 0; i < kBlocks; ++i) piece[i] = rows[i * kBlock + inside];
      if constexpr (kBlocks == 2) {
        rows[inside] = choose<T, EveryOther<T, false>>(piece[0], piece[1]);
        rows[kBlock + inside] = choose<T, EveryOther<T, true>>(piece[0], piece[1]);
      } else {
        const Vector<T> even_low = choose<T, EveryOther<T, false>>(piece[0], piece[1]);
        const Vector<T> odd_low = choose<T, EveryOther<T, true>>(piece[0], piece[1]);
        const Vector<T> even_high = choose<T, EveryOther<T, false>>(piece[2], piece[3]);
        const Vector<T> odd_high = choose<T, EveryOther<T, true>>(piece[2], piece[3]);
        rows[inside] = choose<T, EveryOther<T, false>>(even_low, even_high);
        rows[kBlock + inside] = choose<T, EveryOther<T, false>>(odd_low, odd_high);
        rows[2 * kBlock + inside] = choose<T, EveryOther<T, true>>(even_low, even_high);
        rows[3 * kBlock + inside] = choose<T, EveryOther<T, true>>(odd_low, odd_high);
      }
    }
  }
}

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace
}  // namespace attngeo
