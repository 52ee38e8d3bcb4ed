// Metal as far as clang's front end can check it: address spaces are clang's own, vectors are its extended vectors, and
// the library is declarations only. Nothing of this is ever compiled to code. See lint.py.
#pragma once

typedef unsigned char uchar, uint8_t;
typedef signed char int8_t;
typedef short int16_t;
typedef unsigned short ushort, uint16_t;
typedef int int32_t;
typedef unsigned int uint, uint32_t;
typedef long int64_t, ptrdiff_t;
typedef unsigned long ulong, uint64_t, size_t;
typedef _Float16 half;
typedef __bf16 bfloat;
#pragma clang diagnostic ignored "-Wuser-defined-literals"
constexpr half operator"" h(long double value) { return half(value); }
constexpr half operator"" h(unsigned long long value) { return half(value); }

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define INT_MAX 2147483647
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#define M_PI_F 3.14159265358979323846f
#define METAL_FUNC inline

// Clang has no functional notation for vectors of several values: lint.py writes `lint_vector<V>(...)` for `V(...)`.
template <class V, class... A>
V lint_vector(A...);

namespace metal {

template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
template <class T, int N>
using packed_vec = vec<T, N>;

#define LINT_TRAIT(name, value)                                                                                     \
  template <class T>                                                                                                \
  constexpr bool name##_v = value;
template <class A, class B>
constexpr bool is_same_v = __is_same(A, B);
LINT_TRAIT(is_floating_point, __is_floating_point(T) || __is_same(T, half) || __is_same(T, bfloat))
LINT_TRAIT(is_integral, __is_integral(T))
LINT_TRAIT(is_signed, __is_signed(T))
#undef LINT_TRAIT
template <bool C, class A, class B>
struct conditional {
  typedef A type;
};
template <class A, class B>
struct conditional<false, A, B> {
  typedef B type;
};
template <bool C, class A, class B>
using conditional_t = typename conditional<C, A, B>::type;
template <bool C, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool C, class T = void>
using enable_if_t = typename enable_if<C, T>::type;

template <class T>
struct numeric_limits {
  static constexpr T max() { return T(1); }
  static constexpr T min() { return T(1); }
  static constexpr T lowest() { return T(1); }
  static constexpr T infinity() { return T(1); }
  static constexpr T epsilon() { return T(1); }
  static constexpr T quiet_NaN() { return T(1); }
};

template <class T>
struct type_identity {
  typedef T type;
};
template <class T>
using same = typename type_identity<T>::type;

#define LINT_1(name)                                                                                                \
  template <class T>                                                                                                \
  T name(T);
#define LINT_2(name)                                                                                                \
  template <class T>                                                                                                \
  T name(T, T);
#define LINT_3(name)                                                                                                \
  template <class T>                                                                                                \
  T name(T, T, T);
#define LINT_MATH                                                                                                   \
  LINT_1(acos) LINT_1(asin) LINT_1(atan) LINT_1(ceil) LINT_1(cos) LINT_1(cosh) LINT_1(exp) LINT_1(exp10)            \
  LINT_1(exp2) LINT_1(fabs) LINT_1(floor) LINT_1(fract) LINT_1(log) LINT_1(log10) LINT_1(log2) LINT_1(rint)         \
  LINT_1(round) LINT_1(rsqrt) LINT_1(saturate) LINT_1(sign) LINT_1(sin) LINT_1(sinh) LINT_1(sqrt) LINT_1(tan)       \
  LINT_1(tanh) LINT_1(trunc) LINT_2(atan2) LINT_2(copysign) LINT_2(fmax) LINT_2(fmin) LINT_2(fmod) LINT_2(pow)      \
  LINT_2(powr) LINT_2(step) LINT_2(fdim)
LINT_MATH
namespace fast {
LINT_MATH
}
namespace precise {
LINT_MATH
}
LINT_1(abs) LINT_1(clz) LINT_1(ctz) LINT_1(popcount) LINT_1(reverse_bits) LINT_1(normalize)
LINT_2(max) LINT_2(min) LINT_2(mulhi) LINT_2(absdiff) LINT_2(rotate)
LINT_3(clamp) LINT_3(fma) LINT_3(mix) LINT_3(max3) LINT_3(min3)
template <class T>
T ldexp(T, int);
template <class T, class C>
T select(T, T, C);
template <class T>
T extract_bits(T, uint, uint);
template <class T>
T insert_bits(T, T, uint, uint);
template <class V>
bool any(V);
template <class V>
bool all(V);
template <class T>
bool isnan(T);
template <class T>
bool isinf(T);
template <class T>
bool isfinite(T);
template <class T, int N>
T dot(vec<T, N>, vec<T, N>);
template <class T, int N>
T length(vec<T, N>);

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

#define LINT_SHUFFLE(name)                                                                                          \
  template <class T>                                                                                                \
  T name(T, ushort);
LINT_SHUFFLE(simd_shuffle) LINT_SHUFFLE(simd_broadcast) LINT_SHUFFLE(simd_shuffle_xor) LINT_SHUFFLE(simd_shuffle_up)
LINT_SHUFFLE(simd_shuffle_down) LINT_SHUFFLE(simd_shuffle_rotate_up) LINT_SHUFFLE(simd_shuffle_rotate_down)
LINT_SHUFFLE(quad_shuffle) LINT_SHUFFLE(quad_broadcast) LINT_SHUFFLE(quad_shuffle_xor) LINT_SHUFFLE(quad_shuffle_up)
LINT_SHUFFLE(quad_shuffle_down)
LINT_1(simd_sum) LINT_1(simd_product) LINT_1(simd_max) LINT_1(simd_min) LINT_1(simd_and) LINT_1(simd_or)
LINT_1(simd_xor)
LINT_1(quad_sum) LINT_1(quad_product) LINT_1(quad_max) LINT_1(quad_min) LINT_1(quad_and) LINT_1(quad_or)
LINT_1(simd_prefix_inclusive_sum) LINT_1(simd_prefix_exclusive_sum) LINT_1(simd_broadcast_first)
LINT_1(simd_prefix_inclusive_product) LINT_1(simd_prefix_exclusive_product)
template <class T>
T simd_shuffle_and_fill_up(T, T, ushort, ushort = 32);
template <class T>
T simd_shuffle_and_fill_down(T, T, ushort, ushort = 32);
bool simd_any(bool);
bool simd_all(bool);
bool simd_is_first();
struct simd_vote {
  explicit operator ulong() const;
  bool all() const;
  bool any() const;
};
simd_vote simd_ballot(bool);
simd_vote simd_active_threads_mask();

enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
#define LINT_ATOMIC(Space)                                                                                          \
  template <class T>                                                                                                \
  T atomic_load_explicit(const volatile Space atomic<T>*, memory_order);                                            \
  template <class T>                                                                                                \
  void atomic_store_explicit(volatile Space atomic<T>*, same<T>, memory_order);                                     \
  template <class T>                                                                                                \
  bool atomic_compare_exchange_weak_explicit(volatile Space atomic<T>*, T*, same<T>, memory_order, memory_order);   \
  LINT_FETCH(Space, atomic_exchange_explicit) LINT_FETCH(Space, atomic_fetch_add_explicit)                          \
  LINT_FETCH(Space, atomic_fetch_sub_explicit) LINT_FETCH(Space, atomic_fetch_max_explicit)                         \
  LINT_FETCH(Space, atomic_fetch_min_explicit) LINT_FETCH(Space, atomic_fetch_and_explicit)                         \
  LINT_FETCH(Space, atomic_fetch_or_explicit) LINT_FETCH(Space, atomic_fetch_xor_explicit)
#define LINT_FETCH(Space, name)                                                                                     \
  template <class T>                                                                                                \
  T name(volatile Space atomic<T>*, same<T>, memory_order);
LINT_ATOMIC(device)
LINT_ATOMIC(threadgroup)

template <class T, int Cols = 8, int Rows = 8>
struct simdgroup_matrix {
  simdgroup_matrix();
  explicit simdgroup_matrix(T);
  vec<T, 2>& thread_elements();
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int Cols, int Rows>
simdgroup_matrix<T, Cols, Rows> make_filled_simdgroup_matrix(T);
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D>&, const simdgroup_matrix<A>&, const simdgroup_matrix<B>&,
                                   const simdgroup_matrix<C>&);
template <class D, class A, class B>
void simdgroup_multiply(simdgroup_matrix<D>&, const simdgroup_matrix<A>&, const simdgroup_matrix<B>&);
#define LINT_MATRIX(Space)                                                                                          \
  template <class T>                                                                                                \
  void simdgroup_load(simdgroup_matrix<T>&, const Space T*, ulong = 8, vec<ulong, 2> = 0, bool = false);            \
  template <class T>                                                                                                \
  void simdgroup_store(const simdgroup_matrix<T>&, Space T*, ulong = 8, vec<ulong, 2> = 0, bool = false);
LINT_MATRIX(device)
LINT_MATRIX(threadgroup)

}  // namespace metal

#define LINT_VECTOR_NAMES(T)                                                                                        \
  typedef metal::vec<T, 2> T##2, packed_##T##2;                                                                     \
  typedef metal::vec<T, 3> T##3, packed_##T##3;                                                                     \
  typedef metal::vec<T, 4> T##4, packed_##T##4;
LINT_VECTOR_NAMES(bool)
LINT_VECTOR_NAMES(char)
LINT_VECTOR_NAMES(uchar)
LINT_VECTOR_NAMES(short)
LINT_VECTOR_NAMES(ushort)
LINT_VECTOR_NAMES(int)
LINT_VECTOR_NAMES(uint)
LINT_VECTOR_NAMES(long)
LINT_VECTOR_NAMES(ulong)
LINT_VECTOR_NAMES(half)
LINT_VECTOR_NAMES(bfloat)
LINT_VECTOR_NAMES(float)

template <class To, class From>
To as_type(From);
namespace metal {
using ::as_type;
}
