// Which instruction set runs. Every file of this folder is compiled once per variant with ATTNGEO_VARIANT set to its
// name and exports one table of functions, <file>_<variant>; nothing else of it has external linkage, so that no code
// made for a wide instruction set can replace code that an older processor runs.
#pragma once

#define ATTNGEO_JOIN_(a, b) a##_##b
#define ATTNGEO_JOIN(a, b) ATTNGEO_JOIN_(a, b)

namespace attngeo {

enum class Variant : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

// The forced variant, or the fastest that this processor runs.
Variant cpu_variant();

}  // namespace attngeo

// Declares the tables `name_portable`, `name_avx2`, `name_avx512` of a type, and `const Type& name()` that picks one.
#ifdef ATTNGEO_X86_VARIANTS
#define ATTNGEO_DECLARE_VARIANTS(Type, name)                \
  extern const Type name##_portable;                        \
  extern const Type name##_avx2;                            \
  extern const Type name##_avx512;                          \
  inline const Type& name() {                               \
    switch (cpu_variant()) {                                \
      case Variant::kAvx512: return name##_avx512;          \
      case Variant::kAvx2: return name##_avx2;              \
      default: return name##_portable;                      \
    }                                                       \
  }
#else
#define ATTNGEO_DECLARE_VARIANTS(Type, name) \
  extern const Type name##_portable;         \
  inline const Type& name() { return name##_portable; }
#endif
