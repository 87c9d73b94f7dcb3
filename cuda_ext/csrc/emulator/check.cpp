#include "check.h"

#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>

extern "C" __attribute__((weak)) void __asan_poison_memory_region(const volatile void*, size_t);

namespace attngeo::check {
namespace {

char current[256];
int cases = 0, failures = 0;
bool lacking = false;

}  // namespace

Options read_options(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string word = arguments[i];
    const bool more = i + 1 < count;
    if (word == "--full") {
      options.full = true;
    } else if (word == "--large") {
      options.large = true;
    } else if (word == "--only" && more) {
      options.only = arguments[++i];
    } else if (word == "--orders" && more) {
      options.orders.clear();
      for (char* rest = arguments[++i]; *rest != '\0'; rest += *rest == ',' ? 1 : 0) {
        options.orders.push_back(std::strtoull(rest, &rest, 10));
      }
    } else {
      std::fprintf(stderr, "unknown argument %s\n", word.c_str());
      std::exit(2);
    }
  }
  return options;
}

bool begin(const Options& options, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(current, sizeof(current), format, arguments);
  va_end(arguments);
  if (std::strstr(current, options.only.c_str()) == nullptr) return false;
  ++cases;
  // A sanitizer ends the process at once: the last line then says where.
  std::printf("%s\n", current);
  std::fflush(stdout);
  return true;
}

void fail(const char* format, ...) {
  ++failures;
  std::printf("FAIL %s: ", current);
  va_list arguments;
  va_start(arguments, format);
  std::vprintf(format, arguments);
  va_end(arguments);
  std::printf("\n");
}

void lack(const char* what) {
  lacking = true;
  std::printf("LACK %s: %s\n", current, what);
}

int finish() {
  std::printf("%d cases, %d failures\n", cases, failures);
  return failures != 0 || cases == 0 ? 1 : lacking ? 77 : 0;
}

bool address_sanitizer() { return __asan_poison_memory_region != nullptr; }

void* reserve(size_t bytes) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return address == MAP_FAILED ? nullptr : address;
}

void release(void* address, size_t bytes) { munmap(address, bytes); }

}  // namespace attngeo::check
