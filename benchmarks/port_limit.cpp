// How many pairs (one channel of one query against one landmark) this processor can work off when the data never leave
// its registers: the limit of the inner loops of the pairwise kernels. Prints one JSON object. Compile it with the
// flags of the instruction set in question; `benchmarks/operators.py` does.
#include <algorithm>
#include <cstdio>
#include <ctime>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#else
#error "port limits are written for x86-64"
#endif

namespace {

#if defined(__AVX512F__) && defined(__AVX512DQ__)
constexpr const char* kInstructionSet = "avx512";
constexpr int kLanes = 16, kAccumulators = 16;
using Vector = __m512;
#define KEEP(vector) asm volatile("" : "+v"(vector))
Vector set(float x) { return _mm512_set1_ps(x); }
Vector larger(Vector a, Vector b) { return _mm512_maskz_max_ps(0xffff, a, b); }  // gcc 12 warns of the plain one
Vector absolute(Vector a) { return _mm512_abs_ps(a); }
Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
// The sign of a difference that was scaled up until its magnitude is above 1 or exactly 0: min(|a|, 1) with a's sign.
Vector sign(Vector a, Vector one) { return _mm512_range_ps(a, one, 0b0010); }
#elif defined(__AVX2__) && defined(__FMA__)
constexpr const char* kInstructionSet = "avx2";
constexpr int kLanes = 8, kAccumulators = 8;
using Vector = __m256;
#define KEEP(vector) asm volatile("" : "+x"(vector))
Vector set(float x) { return _mm256_set1_ps(x); }
Vector larger(Vector a, Vector b) { return _mm256_max_ps(a, b); }
Vector absolute(Vector a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
Vector sign(Vector a, Vector one) {
  return _mm256_max_ps(_mm256_min_ps(a, one), _mm256_xor_ps(one, _mm256_set1_ps(-0.0f)));
}
#else
constexpr const char* kInstructionSet = "portable";
constexpr int kLanes = 4, kAccumulators = 8;
using Vector = __m128;
#define KEEP(vector) asm volatile("" : "+x"(vector))
Vector set(float x) { return _mm_set1_ps(x); }
Vector larger(Vector a, Vector b) { return _mm_max_ps(a, b); }
Vector absolute(Vector a) { return _mm_andnot_ps(_mm_set1_ps(-0.0f), a); }
Vector multiply_add(Vector a, Vector b, Vector c) { return _mm_add_ps(_mm_mul_ps(a, b), c); }
Vector sign(Vector a, Vector one) { return _mm_max_ps(_mm_min_ps(a, one), _mm_xor_ps(one, _mm_set1_ps(-0.0f))); }
#endif

Vector add(Vector a, Vector b) { return a + b; }
Vector subtract(Vector a, Vector b) { return a - b; }

double processor_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// The best rate, in 10^9 pairs a second, of `step(accumulator of the query, of the landmark, query)`, called on as many
// independent accumulators as hide the latency. KEEP makes the compiler believe that the query changed, so that it can
// take no instruction out of the loop.
template <class Step>
double best_rate(Step step) {
  constexpr long kRounds = 1000000;
  constexpr int kRepeats = 25, kPairs = kAccumulators / 2;
  double best = 0;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    Vector of_query[kPairs], of_landmark[kPairs], query = set(1.0f);
    for (int i = 0; i < kPairs; ++i) of_query[i] = of_landmark[i] = set(1e-3f * static_cast<float>(i));
    const double start = processor_seconds();
    for (long round = 0; round < kRounds; ++round) {
#pragma GCC unroll 16
      for (int i = 0; i < kPairs; ++i) {
        KEEP(query);
        step(of_query[i], of_landmark[i], query);
      }
    }
    const double seconds = processor_seconds() - start;
    for (int i = 0; i < kPairs; ++i) {
      KEEP(of_query[i]);
      KEEP(of_landmark[i]);
    }
    best = std::max(best, static_cast<double>(kRounds) * kPairs * kLanes / seconds / 1e9);
  }
  return best;
}

void print(const char* name, double rate, const char* end) { std::printf("  \"%s\": %.3f%s\n", name, rate, end); }

}  // namespace

int main() {
  Vector landmark = set(0.75f), weight = set(1e-3f), one = set(1.0f);
  KEEP(landmark);
  KEEP(weight);
  KEEP(one);
  std::printf("{\"instruction_set\": \"%s\", \"gpair_per_s\": {\n", kInstructionSet);
  // The forward patterns take two pairs a step, one for each accumulator.
  print("laplacian forward: subtract, absolute, add", 2 * best_rate([&](Vector& a, Vector& b, Vector& query) {
          a = add(a, absolute(subtract(query, landmark)));
          KEEP(query);
          b = add(b, absolute(subtract(query, landmark)));
        }), ",");
  print("laplacian forward: maximum, add", 2 * best_rate([&](Vector& a, Vector& b, Vector& query) {
          a = add(a, larger(query, landmark));
          KEEP(query);
          b = add(b, larger(query, landmark));
        }), ",");
  print("laplacian backward: subtract, sign, 2 multiply-adds", best_rate([&](Vector& a, Vector& b, Vector& query) {
          const Vector direction = sign(subtract(query, landmark), one);
          a = multiply_add(weight, direction, a);
          b = multiply_add(weight, direction, b);
        }), ",");
  print("gaussian forward: subtract, multiply-add", 2 * best_rate([&](Vector& a, Vector& b, Vector& query) {
          Vector difference = subtract(query, landmark);
          a = multiply_add(difference, difference, a);
          KEEP(query);
          difference = subtract(query, landmark);
          b = multiply_add(difference, difference, b);
        }), ",");
  print("gaussian backward: subtract, 2 multiply-adds", best_rate([&](Vector& a, Vector& b, Vector& query) {
          const Vector difference = subtract(query, landmark);
          a = multiply_add(weight, difference, a);
          b = multiply_add(weight, difference, b);
        }), "");
  std::printf("}}\n");
  return 0;
}
