// What the generated entry point of a kernel is made of: threadgroup variables and the binding of parameters.
#pragma once
#include "simd.h"

namespace msl {

// This kernel's threadgroup variables. Every one is listed when the shared object is loaded, executed or not: as on a
// GPU, where their sizes add up.
inline ThreadgroupVariable* threadgroup_variables = nullptr;

// Name is the type of a lambda, which makes every declaration a class of its own.
template <class Array, class Name>
struct ThreadgroupStorage {
  ThreadgroupVariable variable{Name{}(), sizeof(Array), alignof(Array) < 16 ? 16 : alignof(Array), 0, nullptr};
  ThreadgroupStorage() {
    variable.next = threadgroup_variables;
    threadgroup_variables = &variable;
  }
  static inline ThreadgroupStorage only;
};
// `threadgroup float a[64];` is compiled as `auto& a = threadgroup_variable<float[64]>([] { return "a"; });`
template <class Array, class Name>
MSL_INLINE Array& threadgroup_variable(Name) {
  return *reinterpret_cast<Array*>(msl_threadgroup_memory + ThreadgroupStorage<Array, Name>::only.variable.offset);
}

template <class F>
struct Parameters;
template <class... P>
struct Parameters<void (*)(P...)> {
  template <int I>
  using at = std::tuple_element_t<I, std::tuple<P...>>;
};

template <class P>
P bind_buffer(int index) {
  void* memory = msl_buffer(index);
  if constexpr (std::is_reference_v<P>) {
    return *static_cast<std::remove_reference_t<P>*>(memory);
  } else {
    return static_cast<P>(memory);
  }
}
template <class P>
P bind_builtin(const Size3& value) {
  return std::remove_cvref_t<P>(value.x, value.y, value.z);
}
template <class P>
P bind_builtin(uint32_t value) {
  return std::remove_cvref_t<P>(value);
}

}  // namespace msl
