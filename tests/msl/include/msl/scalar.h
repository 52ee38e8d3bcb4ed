// Scalar types: half and bfloat with a rounding to nearest even after every operation, and numeric_limits.
#pragma once
#include <sys/types.h>

#include <bit>
#include <cfloat>
#include <climits>
#include <cmath>
#include <limits>
#include <tuple>

#include "runtime.h"

// The C library declares ::abs(int): with `using namespace metal` the name would be ambiguous.
#define abs msl_abs

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;

// bfloat converts to float by itself and from float only when asked to, as in Metal.
struct bfloat {
  uint16_t bits;

  bfloat() = default;
  constexpr explicit bfloat(float value) : bits(rounded(value)) {}
  constexpr explicit bfloat(half value) : bits(rounded(float(value))) {}
  template <class T>
    requires std::is_arithmetic_v<T>
  constexpr explicit bfloat(T value) : bits(rounded(float(value))) {}
  constexpr operator float() const { return std::bit_cast<float>(uint32_t(bits) << 16); }

  static constexpr bfloat from_bits(uint16_t bits) {
    bfloat value{};
    value.bits = bits;
    return value;
  }

 private:
  static constexpr uint16_t rounded(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t(u >> 16 | 0x40);  // NaN stays NaN, quiet
    return uint16_t((u + 0x7fffu + (u >> 16 & 1)) >> 16);
  }
};
static_assert(sizeof(half) == 2 && sizeof(bfloat) == 2);

#define MSL_BFLOAT_OPERATOR(op)                                                                                     \
  constexpr bfloat operator op(bfloat a, bfloat b) { return bfloat(float(a) op float(b)); }                         \
  template <class T>                                                                                                \
    requires std::is_integral_v<T>                                                                                  \
  constexpr bfloat operator op(bfloat a, T b) { return a op bfloat(b); }                                            \
  template <class T>                                                                                                \
    requires std::is_integral_v<T>                                                                                  \
  constexpr bfloat operator op(T a, bfloat b) { return bfloat(a) op b; }                                            \
  template <class T>                                                                                                \
  constexpr bfloat& operator op##=(bfloat& a, T b) { return a = bfloat(a op b); }
MSL_BFLOAT_OPERATOR(+)
MSL_BFLOAT_OPERATOR(-)
MSL_BFLOAT_OPERATOR(*)
MSL_BFLOAT_OPERATOR(/)
#undef MSL_BFLOAT_OPERATOR
constexpr bfloat operator-(bfloat a) { return bfloat::from_bits(a.bits ^ 0x8000); }

#pragma GCC diagnostic push
#ifdef __clang__
#pragma GCC diagnostic ignored "-Wuser-defined-literals"
#else
#pragma GCC diagnostic ignored "-Wliteral-suffix"
#endif
constexpr half operator"" h(long double value) { return half(value); }
constexpr half operator"" h(unsigned long long value) { return half(value); }
constexpr bfloat operator"" bf(long double value) { return bfloat(float(value)); }
#pragma GCC diagnostic pop

namespace metal {

template <class T>
concept Scalar = std::is_arithmetic_v<T> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>;
template <class T>
concept Floating = std::is_same_v<T, float> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>;

template <class T>
struct numeric_limits : std::numeric_limits<T> {};

// Limits of a 16-bit floating-point type, given by their bits.
template <class T, int Digits, int MinExponent, int MaxExponent, uint16_t Min, uint16_t Max, uint16_t Epsilon,
          uint16_t DenormMin, uint16_t Infinity, uint16_t NaN>
struct Limits16 {
  static constexpr bool is_specialized = true, is_signed = true, is_integer = false, is_exact = false;
  static constexpr bool has_infinity = true, has_quiet_NaN = true;
  static constexpr int radix = 2, digits = Digits, min_exponent = MinExponent, max_exponent = MaxExponent;
  static constexpr T min() { return std::bit_cast<T>(Min); }
  static constexpr T max() { return std::bit_cast<T>(Max); }
  static constexpr T lowest() { return std::bit_cast<T>(uint16_t(Max | 0x8000)); }
  static constexpr T epsilon() { return std::bit_cast<T>(Epsilon); }
  static constexpr T denorm_min() { return std::bit_cast<T>(DenormMin); }
  static constexpr T infinity() { return std::bit_cast<T>(Infinity); }
  static constexpr T quiet_NaN() { return std::bit_cast<T>(NaN); }
};
template <>
struct numeric_limits<half>
    : Limits16<half, 11, -13, 16, 0x0400, 0x7bff, 0x1400, 0x0001, 0x7c00, 0x7e00> {};
template <>
struct numeric_limits<bfloat>
    : Limits16<bfloat, 8, -125, 128, 0x0080, 0x7f7f, 0x3c00, 0x0001, 0x7f80, 0x7fc0> {};

using std::add_const_t, std::bool_constant, std::conditional, std::conditional_t, std::decay_t, std::enable_if;
using std::enable_if_t, std::false_type, std::integral_constant, std::is_const_v, std::is_convertible_v;
using std::is_floating_point, std::is_integral, std::is_integral_v, std::is_pointer_v, std::is_same, std::is_same_v;
using std::is_signed, std::is_signed_v, std::is_unsigned, std::is_unsigned_v, std::make_signed_t;
using std::make_unsigned_t, std::remove_const_t, std::remove_cv_t, std::remove_pointer_t, std::remove_reference_t;
using std::true_type, std::void_t;
template <class T>
constexpr bool is_floating_point_v = Floating<T>;
template <class T>
constexpr bool is_arithmetic_v = Scalar<T>;
template <class T>
using type_identity_t = std::type_identity_t<T>;

}  // namespace metal

#undef INFINITY
#undef NAN
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT FLT_MAX
#define HALF_MAX 6.5504e4h
#define HALF_MIN 6.103515625e-5h
#define HALF_EPSILON 0x1p-10h
#define M_E_F 2.71828182845904523536028747135266250f
#define M_LOG2E_F 1.44269504088896340735992468100189214f
#define M_LOG10E_F 0.434294481903251827651128918916605082f
#define M_LN2_F 0.693147180559945309417232121458176568f
#define M_LN10_F 2.30258509299404568401799145468436421f
#define M_PI_F 3.14159265358979323846264338327950288f
#define M_PI_2_F 1.57079632679489661923132169163975144f
#define M_1_PI_F 0.318309886183790671537767526745028724f
#define M_SQRT2_F 1.41421356237309504880168872420969808f
#define M_SQRT1_2_F 0.707106781186547524400844362104849039f
