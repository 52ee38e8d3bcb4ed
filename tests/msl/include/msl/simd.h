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

// Reduce over groups of `Group` lanes (32, or 4 for quads): halves are added pairwise, so the order is fixed.
template <class T, class Op, uint32_t Group>
void reduce(uint32_t active, unsigned char* slots) {
  for (uint32_t base = 0; base < simd_width; base += Group) {
    T values[Group];
    uint32_t n = 0;
    for (uint32_t i = base; i < base + Group; i++)
      if (active >> i & 1) values[n++] = load_slot<T>(slots, i);
    if (n == 0) continue;
    for (; n > 1; n = (n + 1) / 2)
      for (uint32_t i = 0; i < n / 2; i++) values[i] = T(Op::apply(values[i], values[i + (n + 1) / 2]));
    for (uint32_t i = base; i < base + Group; i++) store_slot(slots, i, values[0]);
  }
}

template <class T, class Op, bool Inclusive>
void scan(uint32_t active, unsigned char* slots) {
  T sum = T(Op::identity);
  for (uint32_t i = 0; i < simd_width; i++) {
    if (!(active >> i & 1)) continue;
    const T next = T(Op::apply(sum, load_slot<T>(slots, i)));
    store_slot(slots, i, Inclusive ? next : sum);
    sum = next;
  }
}

struct Sum {
  static constexpr int identity = 0;
  template <class T>
  static T apply(T a, T b) { return T(a + b); }
};
struct Product {
  static constexpr int identity = 1;
  template <class T>
  static T apply(T a, T b) { return T(a * b); }
};
struct Max {
  template <class T>
  static T apply(T a, T b) { return metal::max(a, b); }
};
struct Min {
  template <class T>
  static T apply(T a, T b) { return metal::min(a, b); }
};
struct And {
  template <class T>
  static T apply(T a, T b) { return T(a & b); }
};
struct Or {
  template <class T>
  static T apply(T a, T b) { return T(a | b); }
};
struct Xor {
  template <class T>
  static T apply(T a, T b) { return T(a ^ b); }
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

// The value of lane `source`, or `other` where `inside` is false.
template <class T>
T shuffled_or(T value, uint32_t source, bool inside, T other, const char* what, const Where& where) {
  const T moved = shuffled(value, inside ? source : msl_thread->lane, what, where);
  return inside ? moved : other;
}

}  // namespace msl

namespace metal {

#define MSL_REDUCTION(name, Op)                                                                                     \
  template <class T>                                                                                                \
  MSL_INLINE T simd_##name(T value, msl::Where where = msl::Where::current()) {                                     \
    return msl::combined<T>(value, &msl::reduce<T, msl::Op, 32>, "simd_" #name, where);                             \
  }                                                                                                                 \
  template <class T>                                                                                                \
  MSL_INLINE T quad_##name(T value, msl::Where where = msl::Where::current()) {                                     \
    return msl::combined<T>(value, &msl::reduce<T, msl::Op, 4>, "quad_" #name, where);                              \
  }
MSL_REDUCTION(sum, Sum)
MSL_REDUCTION(product, Product)
MSL_REDUCTION(max, Max)
MSL_REDUCTION(min, Min)
MSL_REDUCTION(and, And)
MSL_REDUCTION(or, Or)
MSL_REDUCTION(xor, Xor)
#undef MSL_REDUCTION

#define MSL_SCAN(name, Op, Inclusive)                                                                               \
  template <class T>                                                                                                \
  MSL_INLINE T name(T value, msl::Where where = msl::Where::current()) {                                            \
    return msl::combined<T>(value, &msl::scan<T, msl::Op, Inclusive>, #name, where);                                \
  }
MSL_SCAN(simd_prefix_inclusive_sum, Sum, true)
MSL_SCAN(simd_prefix_exclusive_sum, Sum, false)
MSL_SCAN(simd_prefix_inclusive_product, Product, true)
MSL_SCAN(simd_prefix_exclusive_product, Product, false)
#undef MSL_SCAN

// simd_shuffle and its relatives; `lane` is the caller's. Up and down do not wrap: a lane without a source keeps its
// own value.
#define MSL_SHUFFLE(name, argument, source)                                                                         \
  template <class T>                                                                                                \
  MSL_INLINE T name(T value, ushort argument, msl::Where where = msl::Where::current()) {                           \
    [[maybe_unused]] const uint lane = msl_thread->lane;                                                            \
    return msl::shuffled<T>(value, source, #name, where);                                                           \
  }
MSL_SHUFFLE(simd_shuffle, source_lane, source_lane)
MSL_SHUFFLE(simd_broadcast, source_lane, source_lane)
MSL_SHUFFLE(simd_shuffle_xor, mask, lane ^ mask)
MSL_SHUFFLE(simd_shuffle_up, delta, lane < delta ? lane : lane - delta)
MSL_SHUFFLE(simd_shuffle_down, delta, lane + delta > 31 ? lane : lane + delta)
MSL_SHUFFLE(simd_shuffle_rotate_up, delta, (lane - delta) & 31)
MSL_SHUFFLE(simd_shuffle_rotate_down, delta, (lane + delta) & 31)
MSL_SHUFFLE(quad_shuffle, source_lane, (lane & ~3u) | source_lane)
MSL_SHUFFLE(quad_broadcast, source_lane, (lane & ~3u) | source_lane)
MSL_SHUFFLE(quad_shuffle_xor, mask, lane ^ mask)
MSL_SHUFFLE(quad_shuffle_up, delta, (lane & 3) < delta ? lane : lane - delta)
MSL_SHUFFLE(quad_shuffle_down, delta, (lane & 3) + delta > 3 ? lane : lane + delta)
#undef MSL_SHUFFLE

// Lanes that would read past an end of their group of `modulo` lanes get the filling data of the group's other end.
template <class T>
MSL_INLINE T simd_shuffle_and_fill_up(T value, T filling, ushort delta, ushort modulo = 32,
                                      msl::Where where = msl::Where::current()) {
  const uint lane = msl_thread->lane, in_group = lane & (modulo - 1u), group = lane & ~(modulo - 1u);
  const uint source = group | ((in_group - delta) & (modulo - 1u));
  const T moved = msl::shuffled<T>(value, source, "simd_shuffle_and_fill_up", where);
  const T filled = msl::shuffled<T>(filling, source, "simd_shuffle_and_fill_up (filling)", where);
  return in_group < delta ? filled : moved;
}
template <class T>
MSL_INLINE T simd_shuffle_and_fill_down(T value, T filling, ushort delta, ushort modulo = 32,
                                        msl::Where where = msl::Where::current()) {
  const uint lane = msl_thread->lane, in_group = lane & (modulo - 1u), group = lane & ~(modulo - 1u);
  const uint source = group | ((in_group + delta) & (modulo - 1u));
  const T moved = msl::shuffled<T>(value, source, "simd_shuffle_and_fill_down", where);
  const T filled = msl::shuffled<T>(filling, source, "simd_shuffle_and_fill_down (filling)", where);
  return in_group + delta >= modulo ? filled : moved;
}

template <class T>
MSL_INLINE T simd_broadcast_first(T value, msl::Where where = msl::Where::current()) {
  const msl::Exchange all = msl::exchange(value, nullptr, "simd_broadcast_first", where);
  return msl::load_slot<T>(all.slots, uint32_t(std::countr_zero(all.active)));
}
MSL_INLINE bool simd_is_first(msl::Where where = msl::Where::current()) {
  const msl::Exchange all = msl::exchange(0, nullptr, "simd_is_first", where);
  return uint32_t(std::countr_zero(all.active)) == msl_thread->lane;
}

struct simd_vote {
  typedef uint64_t vote_t;
  vote_t votes = 0, active = 0;
  simd_vote() = default;
  explicit constexpr simd_vote(vote_t v) : votes(v), active(0xffffffffu) {}
  constexpr simd_vote(vote_t v, vote_t of) : votes(v), active(of) {}
  constexpr explicit operator vote_t() const { return votes; }
  constexpr bool all() const { return votes == active; }
  constexpr bool any() const { return votes != 0; }
};
MSL_INLINE simd_vote simd_ballot(bool value, msl::Where where = msl::Where::current()) {
  const uint mine = uint(value) << msl_thread->lane;
  const msl::Exchange all = msl::exchange(mine, &msl::reduce<uint, msl::Or, 32>, "simd_ballot", where);
  return simd_vote(msl::load_slot<uint>(all.slots, msl_thread->lane), all.active);
}
MSL_INLINE simd_vote simd_active_threads_mask(msl::Where where = msl::Where::current()) {
  const msl::Exchange all = msl::exchange(0, nullptr, "simd_active_threads_mask", where);
  return simd_vote(all.active, all.active);
}
MSL_INLINE bool simd_any(bool value, msl::Where where = msl::Where::current()) {
  return msl::combined<uint>(value, &msl::reduce<uint, msl::Or, 32>, "simd_any", where);
}
MSL_INLINE bool simd_all(bool value, msl::Where where = msl::Where::current()) {
  return msl::combined<uint>(value, &msl::reduce<uint, msl::And, 32>, "simd_all", where);
}

}  // namespace metal
