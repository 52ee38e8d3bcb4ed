// The math functions that kernels here call, scalar and element by element, in metal::, fast:: and precise::.
//
// half and bfloat are computed in float and rounded once. fast:: is as exact as precise:: here: what Apple's fast
// functions lose is not modelled.
#pragma once
#include "vector.h"

namespace metal {

// name(x) for float, half, bfloat and their vectors; `expression` uses `x`, a float.
#define MSL_FLOAT_1(name, expression)                                                                               \
  MSL_INLINE float name(float x) { return expression; }                                                             \
  MSL_INLINE half name(half value) { return half(name(float(value))); }                                             \
  MSL_INLINE bfloat name(bfloat value) { return bfloat(name(float(value))); }                                       \
  template <VectorLike V>                                                                                           \
    requires Floating<Element<V>>                                                                                   \
  MSL_INLINE V name(V v) {                                                                                          \
    V result;                                                                                                       \
    for (int i = 0; i < V::size; i++) result.s[i] = name(v[i]);                                                     \
    return result;                                                                                                  \
  }
// name(a, b) of vectors, element by element.
#define MSL_VECTOR_2(name)                                                                                          \
  template <class A, class B>                                                                                       \
    requires SameShape<A, B>                                                                                        \
  MSL_INLINE A name(A a, B b) {                                                                                     \
    A result;                                                                                                       \
    for (int i = 0; i < A::size; i++) result.s[i] = name(a[i], b[i]);                                               \
    return result;                                                                                                  \
  }

#define MSL_MATH_FUNCTIONS                                                                                          \
  MSL_FLOAT_1(exp, std::exp(x))                                                                                     \
  MSL_FLOAT_1(exp2, std::exp2(x))                                                                                   \
  MSL_FLOAT_1(rint, std::nearbyint(x))                                                                              \
  MSL_FLOAT_1(tanh, std::tanh(x))

MSL_MATH_FUNCTIONS
namespace fast {
MSL_MATH_FUNCTIONS
}
namespace precise {
MSL_MATH_FUNCTIONS
}

// min, max, abs: one overload per scalar type. Mixed arguments are ambiguous, as in Metal.
#define MSL_ORDERED(T, maximum, minimum, magnitude)                                                                 \
  MSL_INLINE constexpr T max(T a, T b) { return maximum; }                                                          \
  MSL_INLINE constexpr T min(T a, T b) { return minimum; }                                                          \
  MSL_INLINE constexpr T abs(T a) { return magnitude; }
#define MSL_ORDERED_SIGNED(T) MSL_ORDERED(T, (a < b ? b : a), (b < a ? b : a), static_cast<T>(a < 0 ? -a : a))
#define MSL_ORDERED_UNSIGNED(T) MSL_ORDERED(T, (a < b ? b : a), (b < a ? b : a), a)
// Of a NaN and a number, max and min return the number.
#define MSL_ORDERED_FLOAT(T)                                                                                        \
  MSL_ORDERED(T, (a != a || a < b ? b : a), (a != a || b < a ? b : a), T(__builtin_fabsf(float(a))))
MSL_ORDERED_SIGNED(int)
MSL_ORDERED_SIGNED(long)
MSL_ORDERED_UNSIGNED(uint)
MSL_ORDERED_UNSIGNED(ulong)
MSL_ORDERED_FLOAT(float)
MSL_ORDERED_FLOAT(half)
MSL_ORDERED_FLOAT(bfloat)
MSL_VECTOR_2(max)
MSL_VECTOR_2(min)

template <class A, class B>
  requires SameShape<A, B>
MSL_INLINE Element<A> dot(A a, B b) {
  Element<A> sum = Element<A>(a[0] * b[0]);
  for (int i = 1; i < A::size; i++) sum = Element<A>(sum + a[i] * b[i]);
  return sum;
}

#undef MSL_FLOAT_1
#undef MSL_VECTOR_2
#undef MSL_MATH_FUNCTIONS
#undef MSL_ORDERED
#undef MSL_ORDERED_SIGNED
#undef MSL_ORDERED_UNSIGNED
#undef MSL_ORDERED_FLOAT

}  // namespace metal
