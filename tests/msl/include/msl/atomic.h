// Atomic objects. Threads of a launch take turns on one CPU thread, so plain accesses are atomic already; the checks
// are told that they are meant to be.
#pragma once
#include "scalar.h"

namespace metal {

enum memory_order { memory_order_relaxed, memory_order_acquire, memory_order_release, memory_order_acq_rel,
                    memory_order_seq_cst };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };

template <class T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<ulong> atomic_ulong;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;

template <class T>
__attribute__((no_sanitize("thread"), noinline)) T atomic_read(const volatile atomic<T>* object) {
  return const_cast<const atomic<T>*>(object)->value;
}
template <class T>
__attribute__((no_sanitize("thread"), noinline)) void atomic_write(volatile atomic<T>* object, T value) {
  const_cast<atomic<T>*>(object)->value = value;
}

template <class T>
MSL_INLINE T atomic_load_explicit(const volatile atomic<T>* object, memory_order) {
  msl_note_atomic(const_cast<const atomic<T>*>(object), sizeof(T), false);
  return atomic_read(object);
}
template <class T>
MSL_INLINE void atomic_store_explicit(volatile atomic<T>* object, std::type_identity_t<T> value, memory_order) {
  msl_note_atomic(const_cast<atomic<T>*>(object), sizeof(T), true);
  atomic_write(object, value);
}
template <class T>
MSL_INLINE bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* object, T* expected,
                                                      std::type_identity_t<T> desired, memory_order, memory_order) {
  msl_note_atomic(const_cast<atomic<T>*>(object), sizeof(T), true);
  const T old = atomic_read(object);
  if (__builtin_memcmp(&old, expected, sizeof(T)) != 0) {
    *expected = old;
    return false;
  }
  atomic_write(object, desired);
  return true;
}

#define MSL_FETCH(name, updated)                                                                                    \
  template <class T>                                                                                                \
  MSL_INLINE T name(volatile atomic<T>* object, std::type_identity_t<T> operand, memory_order) {                    \
    msl_note_atomic(const_cast<atomic<T>*>(object), sizeof(T), true);                                               \
    const T old = atomic_read(object);                                                                              \
    atomic_write(object, T(updated));                                                                               \
    return old;                                                                                                     \
  }
MSL_FETCH(atomic_exchange_explicit, operand)
MSL_FETCH(atomic_fetch_add_explicit, old + operand)
MSL_FETCH(atomic_fetch_sub_explicit, old - operand)
MSL_FETCH(atomic_fetch_max_explicit, old < operand ? operand : old)
MSL_FETCH(atomic_fetch_min_explicit, operand < old ? operand : old)
MSL_FETCH(atomic_fetch_and_explicit, old & operand)
MSL_FETCH(atomic_fetch_or_explicit, old | operand)
MSL_FETCH(atomic_fetch_xor_explicit, old ^ operand)
#undef MSL_FETCH

}  // namespace metal
