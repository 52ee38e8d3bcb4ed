// vec<T, N> and its operators. There are no swizzles and no packed vectors: no kernel here has any.
//
// A whole vector moves in one access, as on a GPU. An instrumented build sends such copies through msl_copy(): the
// compiler would split them into their elements, and the checks and counters would see four accesses for one.
#pragma once
#include "scalar.h"

namespace metal {

template <class T, int N>
struct vec;

template <class V>
MSL_INLINE constexpr void copy_whole(V& to, const V& from, size_t align) {
  if (std::is_constant_evaluated()) {
    for (int i = 0; i < V::size; i++) to.s[i] = from.s[i];
  } else {
#ifdef MSL_INSTRUMENTED
    msl_copy(&to, &from, sizeof(V), align);
#else
    (void)align;
    __builtin_memcpy(static_cast<void*>(&to), &from, sizeof(V));
#endif
  }
}
#define MSL_COPIES(V)                                                                                               \
  MSL_INLINE constexpr V(const V& other) : s{} { copy_whole(*this, other, alignof(V)); }                            \
  MSL_INLINE constexpr V& operator=(const V& other) {                                                               \
    copy_whole(*this, other, alignof(V));                                                                           \
    return *this;                                                                                                   \
  }

template <class V>
constexpr bool is_vector = false;
template <class T, int N>
constexpr bool is_vector<vec<T, N>> = true;
template <class V>
concept VectorLike = is_vector<V>;
template <class V>
using Element = typename V::Element;
template <class A, class B>
concept SameShape = VectorLike<A> && std::is_same_v<A, B>;

// What every size shares: from one scalar (each element), from a vector of another type (explicit), by index.
#define MSL_VEC_COMMON(N)                                                                                           \
  using Element = T;                                                                                                \
  static constexpr int size = N;                                                                                    \
  vec() = default;                                                                                                  \
  MSL_COPIES(vec)                                                                                                   \
  template <class U>                                                                                                \
    requires Scalar<U>                                                                                              \
  MSL_INLINE constexpr vec(U value) : s{} {                                                                         \
    for (int i = 0; i < N; i++) s[i] = T(value);                                                                    \
  }                                                                                                                 \
  template <class U>                                                                                                \
    requires(!std::is_same_v<T, U>)                                                                                 \
  MSL_INLINE constexpr explicit vec(vec<U, N> v) : s{} {                                                            \
    for (int i = 0; i < N; i++) s[i] = T(v.s[i]);                                                                   \
  }                                                                                                                 \
  MSL_INLINE constexpr T& operator[](size_t i) { return s[i]; }                                                     \
  MSL_INLINE constexpr const T& operator[](size_t i) const { return s[i]; }

template <class T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  union {
    T s[2];
    struct { T x, y; };
  };
  MSL_VEC_COMMON(2)
  template <Scalar A, Scalar B>
  MSL_INLINE constexpr vec(A a, B b) : s{T(a), T(b)} {}
};

template <class T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  union {
    T s[3];
    struct { T x, y, z; };
  };
  MSL_VEC_COMMON(3)
  template <Scalar A, Scalar B, Scalar C>
  MSL_INLINE constexpr vec(A a, B b, C c) : s{T(a), T(b), T(c)} {}
};

template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  union {
    T s[4];
    struct { T x, y, z, w; };
  };
  MSL_VEC_COMMON(4)
  template <Scalar A, Scalar B, Scalar C, Scalar D>
  MSL_INLINE constexpr vec(A a, B b, C c, D d) : s{T(a), T(b), T(c), T(d)} {}
};

// Operators take vectors by value: an operand in device memory is then read once, whole.
#define MSL_VECTOR_OPERATOR(op)                                                                                     \
  template <class A, class B>                                                                                       \
    requires SameShape<A, B>                                                                                        \
  MSL_INLINE constexpr A operator op(A a, B b) {                                                                    \
    A result{};                                                                                                     \
    for (int i = 0; i < A::size; i++) result.s[i] = Element<A>(a[i] op b[i]);                                       \
    return result;                                                                                                  \
  }                                                                                                                 \
  template <VectorLike A, Scalar B>                                                                                 \
  MSL_INLINE constexpr A operator op(A a, B b) { return a op A(Element<A>(b)); }                                    \
  template <Scalar A, VectorLike B>                                                                                 \
  MSL_INLINE constexpr B operator op(A a, B b) { return B(Element<B>(a)) op b; }                                    \
  template <VectorLike A, class B>                                                                                  \
    requires(SameShape<A, B> || Scalar<B>)                                                                          \
  MSL_INLINE constexpr A& operator op##=(A& a, B b) { return a = A(a op b); }
MSL_VECTOR_OPERATOR(+)
MSL_VECTOR_OPERATOR(-)
MSL_VECTOR_OPERATOR(*)
MSL_VECTOR_OPERATOR(/)
#undef MSL_VECTOR_OPERATOR

}  // namespace metal

#define MSL_VECTOR_NAMES(T, name)                                                                                   \
  typedef metal::vec<T, 2> name##2;                                                                                 \
  typedef metal::vec<T, 3> name##3;                                                                                 \
  typedef metal::vec<T, 4> name##4;                                                                                 \
  namespace metal {                                                                                                 \
  using ::name##2, ::name##3, ::name##4;                                                                            \
  }
MSL_VECTOR_NAMES(uchar, uchar)
MSL_VECTOR_NAMES(int, int)
MSL_VECTOR_NAMES(uint, uint)
MSL_VECTOR_NAMES(long, long)
MSL_VECTOR_NAMES(half, half)
MSL_VECTOR_NAMES(bfloat, bfloat)
MSL_VECTOR_NAMES(float, float)
#undef MSL_VECTOR_NAMES

// The same bits as another type of the same size.
template <class To, class From>
MSL_INLINE To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type between types of different sizes");
  To to;
  __builtin_memcpy(static_cast<void*>(&to), &from, sizeof(To));
  return to;
}
namespace metal {
using ::as_type;
}
