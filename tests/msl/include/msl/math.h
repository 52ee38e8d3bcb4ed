// Math, common, relational and integer functions, scalar and element by element, in metal::, fast:: and precise::.
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
  MSL_INLINE VecOf<V> name(V v) {                                                                                   \
    VecOf<V> result;                                                                                                \
    for (int i = 0; i < VecOf<V>::size; i++) result.s[i] = name(v[i]);                                              \
    return result;                                                                                                  \
  }
#define MSL_FLOAT_2(name, expression)                                                                               \
  MSL_INLINE float name(float x, float y) { return expression; }                                                    \
  MSL_INLINE half name(half x, half y) { return half(name(float(x), float(y))); }                                   \
  MSL_INLINE bfloat name(bfloat x, bfloat y) { return bfloat(name(float(x), float(y))); }                           \
  MSL_VECTOR_2(name)
// name(a, b) of vectors, element by element.
#define MSL_VECTOR_2(name)                                                                                          \
  template <class A, class B>                                                                                       \
    requires SameShape<A, B>                                                                                        \
  MSL_INLINE VecOf<A> name(A a, B b) {                                                                              \
    VecOf<A> result;                                                                                                \
    for (int i = 0; i < VecOf<A>::size; i++) result.s[i] = name(a[i], b[i]);                                        \
    return result;                                                                                                  \
  }
#define MSL_VECTOR_3(name)                                                                                          \
  template <class A, class B, class C>                                                                              \
    requires(SameShape<A, B> && SameShape<A, C>)                                                                    \
  MSL_INLINE VecOf<A> name(A a, B b, C c) {                                                                         \
    VecOf<A> result;                                                                                                \
    for (int i = 0; i < VecOf<A>::size; i++) result.s[i] = name(a[i], b[i], c[i]);                                  \
    return result;                                                                                                  \
  }

#define MSL_MATH_FUNCTIONS                                                                                          \
  MSL_FLOAT_1(acos, std::acos(x))                                                                                   \
  MSL_FLOAT_1(acosh, std::acosh(x))                                                                                 \
  MSL_FLOAT_1(asin, std::asin(x))                                                                                   \
  MSL_FLOAT_1(asinh, std::asinh(x))                                                                                 \
  MSL_FLOAT_1(atan, std::atan(x))                                                                                   \
  MSL_FLOAT_1(atanh, std::atanh(x))                                                                                 \
  MSL_FLOAT_1(ceil, std::ceil(x))                                                                                   \
  MSL_FLOAT_1(cos, std::cos(x))                                                                                     \
  MSL_FLOAT_1(cosh, std::cosh(x))                                                                                   \
  MSL_FLOAT_1(cospi, float(std::cos(3.14159265358979323846 * x)))                                                   \
  MSL_FLOAT_1(exp, std::exp(x))                                                                                     \
  MSL_FLOAT_1(exp10, float(std::pow(10.0, double(x))))                                                              \
  MSL_FLOAT_1(exp2, std::exp2(x))                                                                                   \
  MSL_FLOAT_1(fabs, std::fabs(x))                                                                                   \
  MSL_FLOAT_1(floor, std::floor(x))                                                                                 \
  MSL_FLOAT_1(fract, std::fmin(x - std::floor(x), 0x1.fffffep-1f))                                                  \
  MSL_FLOAT_1(log, std::log(x))                                                                                     \
  MSL_FLOAT_1(log10, std::log10(x))                                                                                 \
  MSL_FLOAT_1(log2, std::log2(x))                                                                                   \
  MSL_FLOAT_1(rint, std::nearbyint(x))                                                                              \
  MSL_FLOAT_1(round, std::round(x))                                                                                 \
  MSL_FLOAT_1(rsqrt, float(1.0 / std::sqrt(double(x))))                                                             \
  MSL_FLOAT_1(saturate, std::fmin(std::fmax(x, 0.0f), 1.0f))                                                        \
  MSL_FLOAT_1(sign, float(x > 0) - float(x < 0))                                                                    \
  MSL_FLOAT_1(sin, std::sin(x))                                                                                     \
  MSL_FLOAT_1(sinh, std::sinh(x))                                                                                   \
  MSL_FLOAT_1(sinpi, float(std::sin(3.14159265358979323846 * x)))                                                   \
  MSL_FLOAT_1(sqrt, std::sqrt(x))                                                                                   \
  MSL_FLOAT_1(tan, std::tan(x))                                                                                     \
  MSL_FLOAT_1(tanh, std::tanh(x))                                                                                   \
  MSL_FLOAT_1(trunc, std::trunc(x))                                                                                 \
  MSL_FLOAT_2(atan2, std::atan2(x, y))                                                                              \
  MSL_FLOAT_2(copysign, std::copysign(x, y))                                                                        \
  MSL_FLOAT_2(fdim, std::fdim(x, y))                                                                                \
  MSL_FLOAT_2(fmax, std::fmax(x, y))                                                                                \
  MSL_FLOAT_2(fmin, std::fmin(x, y))                                                                                \
  MSL_FLOAT_2(fmod, std::fmod(x, y))                                                                                \
  MSL_FLOAT_2(pow, std::pow(x, y))                                                                                  \
  MSL_FLOAT_2(powr, std::pow(x, y))                                                                                 \
  MSL_FLOAT_2(step, (y < x ? 0.0f : 1.0f))

MSL_MATH_FUNCTIONS
namespace fast {
MSL_MATH_FUNCTIONS
}
namespace precise {
MSL_MATH_FUNCTIONS
}

// min, max, clamp, abs, select: one overload per scalar type. Mixed arguments are ambiguous, as in Metal.
#define MSL_ORDERED(T, maximum, minimum, magnitude)                                                                 \
  MSL_INLINE constexpr T max(T a, T b) { return maximum; }                                                          \
  MSL_INLINE constexpr T min(T a, T b) { return minimum; }                                                          \
  MSL_INLINE constexpr T clamp(T x, T low, T high) { return min(max(x, low), high); }                               \
  MSL_INLINE constexpr T abs(T a) { return magnitude; }
#define MSL_ORDERED_SIGNED(T) MSL_ORDERED(T, (a < b ? b : a), (b < a ? b : a), static_cast<T>(a < 0 ? -a : a))
#define MSL_ORDERED_UNSIGNED(T) MSL_ORDERED(T, (a < b ? b : a), (b < a ? b : a), a)
// Of a NaN and a number, max and min return the number.
#define MSL_ORDERED_FLOAT(T)                                                                                        \
  MSL_ORDERED(T, (a != a || a < b ? b : a), (a != a || b < a ? b : a), T(__builtin_fabsf(float(a))))
MSL_ORDERED_SIGNED(char)
MSL_ORDERED_SIGNED(signed char)
MSL_ORDERED_SIGNED(short)
MSL_ORDERED_SIGNED(int)
MSL_ORDERED_SIGNED(long)
MSL_ORDERED_SIGNED(long long)
MSL_ORDERED_UNSIGNED(uchar)
MSL_ORDERED_UNSIGNED(ushort)
MSL_ORDERED_UNSIGNED(uint)
MSL_ORDERED_UNSIGNED(ulong)
MSL_ORDERED_UNSIGNED(unsigned long long)
MSL_ORDERED_FLOAT(float)
MSL_ORDERED_FLOAT(half)
MSL_ORDERED_FLOAT(bfloat)
MSL_VECTOR_2(max)
MSL_VECTOR_2(min)
MSL_VECTOR_3(clamp)
template <VectorLike V>
MSL_INLINE VecOf<V> abs(V v) {
  VecOf<V> result;
  for (int i = 0; i < VecOf<V>::size; i++) result.s[i] = abs(v[i]);
  return result;
}
template <VectorLike V>
MSL_INLINE VecOf<V> clamp(V v, Element<V> low, Element<V> high) {
  return clamp(VecOf<V>(v), VecOf<V>(low), VecOf<V>(high));
}
template <VectorLike V>
MSL_INLINE VecOf<V> max(V v, Element<V> b) { return max(VecOf<V>(v), VecOf<V>(b)); }
template <VectorLike V>
MSL_INLINE VecOf<V> min(V v, Element<V> b) { return min(VecOf<V>(v), VecOf<V>(b)); }
template <class T>
MSL_INLINE constexpr T max3(T a, T b, T c) { return max(a, max(b, c)); }
template <class T>
MSL_INLINE constexpr T min3(T a, T b, T c) { return min(a, min(b, c)); }

// select(a, b, c) is c ? b : a.
template <Scalar T>
MSL_INLINE constexpr T select(T a, std::type_identity_t<T> b, bool c) { return c ? b : a; }
template <class A, class B>
  requires SameShape<A, B>
MSL_INLINE VecOf<A> select(A a, B b, vec<bool, VecOf<A>::size> c) {
  VecOf<A> result;
  for (int i = 0; i < VecOf<A>::size; i++) result.s[i] = c.s[i] ? b[i] : a[i];
  return result;
}
template <class A, class B>
  requires SameShape<A, B>
MSL_INLINE VecOf<A> select(A a, B b, bool c) { return c ? VecOf<A>(b) : VecOf<A>(a); }

MSL_INLINE float fma(float a, float b, float c) { return std::fma(a, b, c); }
MSL_INLINE half fma(half a, half b, half c) { return half(std::fma(double(a), double(b), double(c))); }
MSL_INLINE bfloat fma(bfloat a, bfloat b, bfloat c) { return bfloat(std::fma(float(a), float(b), float(c))); }
MSL_VECTOR_3(fma)
MSL_INLINE float mix(float a, float b, float t) { return a + (b - a) * t; }
MSL_INLINE half mix(half a, half b, half t) { return half(mix(float(a), float(b), float(t))); }
MSL_INLINE bfloat mix(bfloat a, bfloat b, bfloat t) { return bfloat(mix(float(a), float(b), float(t))); }
MSL_VECTOR_3(mix)
template <VectorLike V>
MSL_INLINE VecOf<V> mix(V a, V b, Element<V> t) { return mix(VecOf<V>(a), VecOf<V>(b), VecOf<V>(t)); }
template <Floating T>
MSL_INLINE T ldexp(T x, int exponent) { return T(std::ldexp(float(x), exponent)); }
template <Floating T>
MSL_INLINE int ilogb(T x) { return std::ilogb(float(x)); }
template <Floating T>
MSL_INLINE T frexp(T x, int& exponent) { return T(std::frexp(float(x), &exponent)); }

#define MSL_CLASSIFY(name, expression)                                                                              \
  MSL_INLINE bool name(float x) { return expression; }                                                              \
  MSL_INLINE bool name(half x) { return name(float(x)); }                                                           \
  MSL_INLINE bool name(bfloat x) { return name(float(x)); }                                                         \
  template <VectorLike V>                                                                                           \
    requires Floating<Element<V>>                                                                                   \
  MSL_INLINE vec<bool, VecOf<V>::size> name(V v) {                                                                  \
    vec<bool, VecOf<V>::size> result;                                                                               \
    for (int i = 0; i < VecOf<V>::size; i++) result.s[i] = name(v[i]);                                              \
    return result;                                                                                                  \
  }
MSL_CLASSIFY(isnan, __builtin_isnan(x))
MSL_CLASSIFY(isinf, __builtin_isinf(x))
MSL_CLASSIFY(isfinite, __builtin_isfinite(x))
MSL_CLASSIFY(isnormal, __builtin_isnormal(x))
MSL_CLASSIFY(signbit, __builtin_signbit(x))

template <class A, class B>
  requires SameShape<A, B>
MSL_INLINE Element<A> dot(A a, B b) {
  Element<A> sum = Element<A>(a[0] * b[0]);
  for (int i = 1; i < VecOf<A>::size; i++) sum = Element<A>(sum + a[i] * b[i]);
  return sum;
}
template <VectorLike V>
MSL_INLINE Element<V> length_squared(V v) { return dot(v, v); }
template <VectorLike V>
MSL_INLINE Element<V> length(V v) { return sqrt(dot(v, v)); }
template <VectorLike V>
MSL_INLINE VecOf<V> normalize(V v) { return v * rsqrt(dot(v, v)); }

// Integer functions, for scalars of any width.
template <class T>
concept Integer = std::is_integral_v<T> && !std::is_same_v<T, bool>;
template <Integer T>
constexpr int bits_of = 8 * sizeof(T);
template <Integer T>
MSL_INLINE constexpr T popcount(T x) { return T(std::popcount(std::make_unsigned_t<T>(x))); }
template <Integer T>
MSL_INLINE constexpr T clz(T x) { return T(std::countl_zero(std::make_unsigned_t<T>(x))); }
template <Integer T>
MSL_INLINE constexpr T ctz(T x) { return T(std::countr_zero(std::make_unsigned_t<T>(x))); }
template <Integer T>
MSL_INLINE constexpr T mulhi(T a, T b) {
  using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  return T(Wide(a) * Wide(b) >> bits_of<T>);
}
template <Integer T>
MSL_INLINE constexpr T mad24(T a, T b, T c) { return a * b + c; }
template <Integer T>
MSL_INLINE constexpr T mul24(T a, T b) { return a * b; }
template <Integer T>
MSL_INLINE constexpr T absdiff(T a, T b) { return a < b ? T(b - a) : T(a - b); }
template <Integer T>
MSL_INLINE constexpr T rotate(T x, T n) {
  return T(std::rotl(std::make_unsigned_t<T>(x), int(n) & (bits_of<T> - 1)));
}
template <Integer T>
MSL_INLINE constexpr T reverse_bits(T x) {
  std::make_unsigned_t<T> result = 0;
  for (int i = 0; i < bits_of<T>; i++) result |= (std::make_unsigned_t<T>(x) >> i & 1) << (bits_of<T> - 1 - i);
  return T(result);
}
template <Integer T>
MSL_INLINE constexpr T extract_bits(T x, uint offset, uint count) {
  if (count == 0) return 0;
  return T(T(x << (bits_of<T> - offset - count)) >> (bits_of<T> - count));
}
template <Integer T>
MSL_INLINE constexpr T insert_bits(T base, T insert, uint offset, uint count) {
  const T mask = count == uint(bits_of<T>) ? T(-1) : T(((std::make_unsigned_t<T>(1) << count) - 1) << offset);
  return T((base & ~mask) | (T(insert << offset) & mask));
}

#undef MSL_FLOAT_1
#undef MSL_FLOAT_2
#undef MSL_VECTOR_2
#undef MSL_VECTOR_3
#undef MSL_MATH_FUNCTIONS
#undef MSL_ORDERED
#undef MSL_ORDERED_SIGNED
#undef MSL_ORDERED_UNSIGNED
#undef MSL_ORDERED_FLOAT
#undef MSL_CLASSIFY

}  // namespace metal
