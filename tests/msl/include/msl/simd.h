// Barriers, and functions in which the lanes of a simdgroup exchange values.
//
// Every call is a rendezvous: a lane brings its value, waits for all lanes of its simdgroup that have not returned, and
// leaves with its own result. Lanes that have returned, and those past the end of a partial simdgroup, are inactive.
#pragma once
#include "math.h"

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }

MSL_INLINE void threadgroup_barrier(mem_flags flags, msl::Where where = msl::Where::current()) {
  const msl::Site site = msl::site("threadgroup_barrier", where);
  msl_barrier(msl::barrier_threadgroup, int(flags), &site);
}
MSL_INLINE void simdgroup_barrier(mem_flags flags, msl::Where where = msl::Where::current()) {
  const msl::Site site = msl::site("simdgroup_barrier", where);
  msl_barrier(msl::barrier_simdgroup, int(flags), &site);
}

}  // namespace metal

namespace msl {

template <class T>
T load_slot(const unsigned char* slots, uint32_t lane) {
  T value;
  std::memcpy(static_cast<void*>(&value), slots + slot_bytes * lane, sizeof(T));
  return value;
}
template <class T>
void store_slot(unsigned char* slots, uint32_t lane, const T& value) {
  std::memcpy(slots + slot_bytes * lane, static_cast<const void*>(&value), sizeof(T));
}

template <class T>
Exchange exchange(const T& value, Combine combine, const char* what, const Where& where) {
  static_assert(sizeof(T) <= slot_bytes, "a value that lanes exchange has at most 32 bytes");
  const Site called = site(what, where);
  return msl_exchange(&value, sizeof(T), combine, &called);
}

// Reduce over the active lanes: halves are added pairwise, so the order is fixed.
template <class T, class Op>
void reduce(uint32_t active, unsigned char* slots) {
  T values[simd_width];
  uint32_t n = 0;
  for (uint32_t i = 0; i < simd_width; i++)
    if (active >> i & 1) values[n++] = load_slot<T>(slots, i);
  for (; n > 1; n = (n + 1) / 2)
    for (uint32_t i = 0; i < n / 2; i++) values[i] = T(Op::apply(values[i], values[i + (n + 1) / 2]));
  for (uint32_t i = 0; i < simd_width; i++) store_slot(slots, i, values[0]);
}

struct Sum {
  template <class T>
  static T apply(T a, T b) { return T(a + b); }
};
struct Max {
  template <class T>
  static T apply(T a, T b) { return metal::max(a, b); }
};
struct And {
  template <class T>
  static T apply(T a, T b) { return T(a & b); }
};

template <class T>
T combined(T value, Combine combine, const char* what, const Where& where) {
  return load_slot<T>(exchange(value, combine, what, where).slots, msl_thread->lane);
}

// The value of lane `source`. A lane that does not take part has none.
template <class T>
T shuffled(T value, uint32_t source, const char* what, const Where& where) {
  const Exchange all = exchange(value, nullptr, what, where);
  if (source >= simd_width) msl_fail("%s at line %u reads lane %u of 32", what, where.line(), source);
  if (!(all.active >> source & 1)) msl_fail("%s at line %u reads inactive lane %u", what, where.line(), source);
  return load_slot<T>(all.slots, source);
}

}  // namespace msl

namespace metal {

#define MSL_REDUCTION(name, Op)                                                                                     \
  template <class T>                                                                                                \
  MSL_INLINE T name(T value, msl::Where where = msl::Where::current()) {                                            \
    return msl::combined<T>(value, &msl::reduce<T, msl::Op>, #name, where);                                         \
  }
MSL_REDUCTION(simd_sum, Sum)
MSL_REDUCTION(simd_max, Max)
#undef MSL_REDUCTION
MSL_INLINE bool simd_all(bool value, msl::Where where = msl::Where::current()) {
  return msl::combined<uint>(value, &msl::reduce<uint, msl::And>, "simd_all", where);
}

template <class T>
MSL_INLINE T simd_shuffle(T value, ushort source_lane, msl::Where where = msl::Where::current()) {
  return msl::shuffled<T>(value, source_lane, "simd_shuffle", where);
}
template <class T>
MSL_INLINE T simd_shuffle_xor(T value, ushort mask, msl::Where where = msl::Where::current()) {
  return msl::shuffled<T>(value, msl_thread->lane ^ mask, "simd_shuffle_xor", where);
}

}  // namespace metal
