// What the checks of the launchers share: arrays with guards, random numbers, comparison with bounds, reports.
//
// References are computed in long double from the numbers that the launcher was given. Bounds follow from the roundings
// that any order of the operations can make; u is the unit roundoff of the tested type. A sum of n terms in any order
// is within n u of the sum of the terms' sizes; a constant beside n counts the roundings within a term. Results below
// the smallest normal number may become 0.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace attngeo::check {

using Wide = long double;

template <typename T>
constexpr Wide kRoundoff = Wide(std::numeric_limits<T>::epsilon()) / 2;
template <typename T>
constexpr Wide kTiny = std::numeric_limits<T>::min();
template <typename T>
constexpr const char* kTypeName = sizeof(T) == 4 ? "float32" : "float64";

// Command line: [--full] [--orders 0,1,2] [--only PART] [--large].
struct Options {
  bool full = false;   // every shape, else a few
  bool large = false;  // only the arrays of more than 2^31 numbers
  std::vector<uint64_t> orders = {0, 1, 2, 3};
  std::string only;  // run the cases whose name holds this
};
Options read_options(int count, char** arguments);

// Announce a case; false if the options leave it out. Everything that fails is reported under its name.
bool begin(const Options& options, const char* format, ...) __attribute__((format(printf, 2, 3)));
void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
// What the machine lacks for a case, which then is no failure.
void lack(const char* what);
// Number of cases and failures to standard output; the exit status, 77 if nothing failed but something lacked.
int finish();

// Whether the address sanitizer watches the ends of what malloc gives.
bool address_sanitizer();

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  double uniform() {  // [0, 1)
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return double(state_ >> 11) * 0x1p-53;
  }
  double bell() {  // near normal, within 6 of 0
    double sum = -6.0;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
  }

 private:
  uint64_t state_;
};

// Numbers between guards that are NaN, so that reading outside spoils results and writing outside is seen. A shifted
// array starts where only its type's alignment holds, as a view of a tensor may.
template <typename T>
class Array {
 public:
  Array(int64_t count, bool shifted) : count_(count), head_(kGuard + (shifted ? sizeof(T) : 0)) {
    tail_ = address_sanitizer() ? 0 : kGuard;
    raw_ = static_cast<char*>(std::malloc(head_ + bytes() + tail_));
    std::memset(raw_, 0xff, head_ + bytes() + tail_);
  }
  Array(const std::vector<T>& values, bool shifted) : Array(int64_t(values.size()), shifted) {
    if (count_ != 0) std::memcpy(data(), values.data(), bytes());
  }
  ~Array() { std::free(raw_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  T* data() { return reinterpret_cast<T*>(raw_ + head_); }
  // As a launcher takes a workspace that it asked for.
  T* data_or_null() { return count_ == 0 ? nullptr : data(); }
  std::vector<T> values() { return std::vector<T>(data(), data() + count_); }
  size_t bytes() const { return size_t(count_) * sizeof(T); }
  void check_guards(const char* name) {
    for (size_t i = 0; i < head_; ++i) {
      if (raw_[i] != char(0xff)) return fail("wrote before the start of %s", name);
    }
    for (size_t i = 0; i < tail_; ++i) {
      if (raw_[head_ + bytes() + i] != char(0xff)) return fail("wrote past the end of %s, byte %zu", name, i);
    }
  }
  void check_unchanged(const char* name, const std::vector<T>& values) {
    check_guards(name);
    if (count_ != 0 && std::memcmp(data(), values.data(), bytes()) != 0) fail("changed its input %s", name);
  }

 private:
  static constexpr size_t kGuard = 128;
  int64_t count_;
  size_t head_, tail_;
  char* raw_;
};

// Every number within its bound of the reference; NaN exactly where the reference is NaN.
template <typename T>
void compare(const char* name, const T* values, const std::vector<Wide>& expected, const std::vector<Wide>& bound) {
  int64_t wrong = 0, first = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const Wide value = values[i];
    const Wide error = value > expected[i] ? value - expected[i] : expected[i] - value;
    const bool right = expected[i] != expected[i] ? value != value : value == expected[i] || error <= bound[i];
    if (!right && wrong++ == 0) first = int64_t(i);
  }
  if (wrong != 0) {
    fail("%s: %lld of %zu wrong, first number %lld: %.9Lg, expected %.9Lg within %.3Lg", name,
         static_cast<long long>(wrong), expected.size(), static_cast<long long>(first), Wide(values[first]),
         expected[size_t(first)], bound[size_t(first)]);
  }
}

template <typename T>
void compare(const char* name, const std::vector<T>& values, const std::vector<Wide>& expected,
             const std::vector<Wide>& bound) {
  compare(name, values.data(), expected, bound);
}

template <typename T>
void same_bits(const char* name, const std::vector<T>& one, const std::vector<T>& other, const char* when) {
  const size_t bytes = one.size() * sizeof(T);
  if (one.size() != other.size() || (bytes != 0 && std::memcmp(one.data(), other.data(), bytes) != 0)) {
    fail("%s has other bits %s", name, when);
  }
}

// Address space without memory behind it until it is touched; nullptr if there is none.
void* reserve(size_t bytes);
void release(void* address, size_t bytes);

}  // namespace attngeo::check
