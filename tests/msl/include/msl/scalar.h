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

namespace metal {

template <class T>
concept Scalar = std::is_arithmetic_v<T> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>;
template <class T>
concept Floating = std::is_same_v<T, float> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>;

template <class T>
struct numeric_limits : std::numeric_limits<T> {};

}  // namespace metal

#undef INFINITY
#define INFINITY __builtin_inff()
