// Enough of CUDA to run the shipped kernels and launchers on the host: csrc/cuda/launch.cuh includes this file when
// ATTNGEO_EMULATOR is defined. Each CUDA thread is a fiber of one host thread (scheduler.cpp); fibers change places at
// barriers and warp operations only, in an order drawn from a seed, and blocks run one after another, in such an order.
//
// Stricter than the hardware on purpose: a barrier or warp operation must be reached at one place in the source by all
// the threads that it concerns, none of which may have returned; shared memory starts as NaN in every block; a shuffle
// orders no memory. Left out on purpose: whatever has no exact meaning (__expf and its kind), static __shared__
// variables, .y and .z, the legacy warp operations without a mask.
#pragma once
#include <math.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

#define ATTNGEO_SHARED(Type, name) Type& name = *reinterpret_cast<Type*>(attngeo::emulator::shared_memory())

namespace attngeo::emulator {

struct Index {
  unsigned x;
};

// Where in the source a thread waits.
struct Site {
  const char* what;
  const char* file;
  int line;
};

// Order of threads and blocks: 0 ascending, 1 descending, else blocks at random; odd seeds let some threads run far
// ahead of others, even ones choose anew at every step.
void set_order(uint64_t seed);

// What shared_memory_limit() says and launch() enforces.
void set_shared_memory_limit(int64_t bytes);
int64_t shared_memory_limit();

// Of every launch run the last `count` blocks only, so that huge arrays can be tried; 0 for all.
void run_last_blocks_only(int64_t count);

// Run the body as a grid; nullptr, or the text of an error of the launch. A fault of the body ends the process.
const char* run(void (*body)(const void*), const void* context, int64_t blocks, int threads, int64_t shared_bytes);

void* shared_memory();
void barrier(Site site);
void warp_barrier(unsigned mask, Site site);
int barrier_count(bool predicate, Site site);
// The value that `source` brings; a source of -1 is the lane itself.
uint64_t shuffle(unsigned mask, uint64_t value, int source, Site site);
// One bit for each lane of the mask.
unsigned ballot(unsigned mask, bool predicate, Site site);
unsigned lane();

// The lane that `wanted` stands for among groups of `width` lanes, -1 beyond the group.
inline int lane_in_group(int wanted, int width) {
  const int first = int(lane()) & ~(width - 1);
  return wanted < first || wanted >= first + width ? -1 : wanted;
}

template <typename To, typename From>
To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit casts keep the size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename T>
T shuffled(unsigned mask, T value, int source, Site site) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle moves 4 or 8 bytes");
  uint64_t raw = 0;
  std::memcpy(&raw, &value, sizeof(value));
  raw = shuffle(mask, raw, source, site);
  std::memcpy(&value, &raw, sizeof(value));
  return value;
}

}  // namespace attngeo::emulator

// The scheduler sets these before it resumes a thread.
extern attngeo::emulator::Index threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

#define ATTNGEO_SITE_PARAMETERS const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define ATTNGEO_SITE(what) \
  { what, file, line }

inline void __syncthreads(ATTNGEO_SITE_PARAMETERS) { attngeo::emulator::barrier(ATTNGEO_SITE("__syncthreads")); }

inline int __syncthreads_count(int predicate, ATTNGEO_SITE_PARAMETERS) {
  return attngeo::emulator::barrier_count(predicate != 0, ATTNGEO_SITE("__syncthreads_count"));
}

inline int __syncthreads_or(int predicate, ATTNGEO_SITE_PARAMETERS) {
  return attngeo::emulator::barrier_count(predicate != 0, ATTNGEO_SITE("__syncthreads_or")) != 0;
}

inline int __syncthreads_and(int predicate, ATTNGEO_SITE_PARAMETERS) {
  return attngeo::emulator::barrier_count(predicate == 0, ATTNGEO_SITE("__syncthreads_and")) == 0;
}

inline void __syncwarp(unsigned mask = 0xffffffffu, ATTNGEO_SITE_PARAMETERS) {
  attngeo::emulator::warp_barrier(mask, ATTNGEO_SITE("__syncwarp"));
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, ATTNGEO_SITE_PARAMETERS) {
  const int first = int(attngeo::emulator::lane()) & ~(width - 1);
  return attngeo::emulator::shuffled(mask, value, first | (source & (width - 1)), ATTNGEO_SITE("__shfl_sync"));
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32, ATTNGEO_SITE_PARAMETERS) {
  using namespace attngeo::emulator;
  return shuffled(mask, value, lane_in_group(int(lane()) - int(distance), width), ATTNGEO_SITE("__shfl_up_sync"));
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32, ATTNGEO_SITE_PARAMETERS) {
  using namespace attngeo::emulator;
  return shuffled(mask, value, lane_in_group(int(lane()) + int(distance), width), ATTNGEO_SITE("__shfl_down_sync"));
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, ATTNGEO_SITE_PARAMETERS) {
  using namespace attngeo::emulator;
  return shuffled(mask, value, lane_in_group(int(lane()) ^ lane_mask, width), ATTNGEO_SITE("__shfl_xor_sync"));
}

inline unsigned __ballot_sync(unsigned mask, int predicate, ATTNGEO_SITE_PARAMETERS) {
  return attngeo::emulator::ballot(mask, predicate != 0, ATTNGEO_SITE("__ballot_sync"));
}

inline int __any_sync(unsigned mask, int predicate, ATTNGEO_SITE_PARAMETERS) {
  return attngeo::emulator::ballot(mask, predicate != 0, ATTNGEO_SITE("__any_sync")) != 0;
}

inline int __all_sync(unsigned mask, int predicate, ATTNGEO_SITE_PARAMETERS) {
  return attngeo::emulator::ballot(mask, predicate == 0, ATTNGEO_SITE("__all_sync")) == 0;
}

inline unsigned __float_as_uint(float x) { return attngeo::emulator::bits<unsigned>(x); }
inline int __float_as_int(float x) { return attngeo::emulator::bits<int>(x); }
inline float __uint_as_float(unsigned x) { return attngeo::emulator::bits<float>(x); }
inline float __int_as_float(int x) { return attngeo::emulator::bits<float>(x); }
inline long long __double_as_longlong(double x) { return attngeo::emulator::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return attngeo::emulator::bits<double>(x); }

// As on the device, NaN becomes 0.
inline float __saturatef(float x) { return x >= 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float rsqrt(float x) { return rsqrtf(x); }

// CUDA's own min and max: no conversion between the types, NaN loses.
#define ATTNGEO_MIN_MAX(T)                         \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return a < b ? b : a; }
ATTNGEO_MIN_MAX(int)
ATTNGEO_MIN_MAX(unsigned)
ATTNGEO_MIN_MAX(long)
ATTNGEO_MIN_MAX(unsigned long)
ATTNGEO_MIN_MAX(long long)
ATTNGEO_MIN_MAX(unsigned long long)
#undef ATTNGEO_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

// Vector types with the device's alignment, which -fsanitize=alignment checks at every access.
struct __align__(8) float2 {
  float x, y;
};
struct __align__(16) float4 {
  float x, y, z, w;
};
struct __align__(16) double2 {
  double x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }

template <typename T>
T __ldg(const T* address) {
  return *address;
}

// Compare and swap on the bits: atomic, and no more ordered than on the device.
template <typename T>
T atomicAdd(T* address, T value) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  Bits* cell = reinterpret_cast<Bits*>(address);
  Bits old = __atomic_load_n(cell, __ATOMIC_RELAXED);
  Bits sum;
  do {
    sum = attngeo::emulator::bits<Bits>(T(attngeo::emulator::bits<T>(old) + value));
  } while (!__atomic_compare_exchange_n(cell, &old, sum, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return attngeo::emulator::bits<T>(old);
}

namespace attngeo {

class OnDevice {
 public:
  explicit OnDevice(int) {}
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  const char* problem() const { return nullptr; }
};

inline int64_t shared_memory_limit() { return emulator::shared_memory_limit(); }

template <typename... Parameters, typename... Arguments>
const char* launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int64_t shared_bytes, void*,
                   Arguments... arguments) {
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> arguments;
  };
  const Call call{kernel, std::tuple<Parameters...>(static_cast<Parameters>(arguments)...)};
  const auto body = [](const void* context) {
    const Call& of = *static_cast<const Call*>(context);
    std::apply(of.kernel, of.arguments);
  };
  return emulator::run(body, &call, blocks, threads, shared_bytes);
}

}  // namespace attngeo
