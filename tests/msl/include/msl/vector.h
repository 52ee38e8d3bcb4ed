// vec<T, N> with swizzles, packed vectors, and their operators.
//
// A whole vector moves in one access, as on a GPU. An instrumented build sends such copies through msl_copy(): the
// compiler would split them into their elements, and the checks and counters would see four accesses for one.
#pragma once
#include "scalar.h"

namespace metal {

template <class T, int N>
struct vec;
template <class T, int N>
struct packed_vec;

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

// Some elements of a vector under a name of their own, as `v.zx`; shares a union with the vector's elements.
template <class T, int Stored, int... I>
struct Swizzle {
  T s[Stored];
  static constexpr int size = sizeof...(I);
  static constexpr int index[] = {I...};
  constexpr operator vec<T, size>() const { return vec<T, size>(s[I]...); }
  constexpr T operator[](int i) const { return s[index[i]]; }
  constexpr Swizzle& operator=(const vec<T, size>& v) {
    for (int i = 0; i < size; i++) s[index[i]] = v.s[i];
    return *this;
  }
  constexpr Swizzle& operator=(const Swizzle& other) { return *this = vec<T, size>(other); }
};

template <class V>
struct VectorTraits {
  static constexpr int size = 0;
};
template <class T, int N>
struct VectorTraits<vec<T, N>> {
  using Element = T;
  static constexpr int size = N;
};
template <class T, int N>
struct VectorTraits<packed_vec<T, N>> : VectorTraits<vec<T, N>> {};
template <class T, int Stored, int... I>
struct VectorTraits<Swizzle<T, Stored, I...>> : VectorTraits<vec<T, int(sizeof...(I))>> {};
template <class V>
concept VectorLike = VectorTraits<V>::size > 0;
template <class V>
using Element = typename VectorTraits<V>::Element;
template <class V>
using VecOf = vec<Element<V>, VectorTraits<V>::size>;
template <class A, class B>
concept SameShape = VectorLike<A> && VectorLike<B> && std::is_same_v<VecOf<A>, VecOf<B>>;

#define MSL_PAIRS_OF(N, A, a)                                                                                       \
  Swizzle<T, N, a, 0> A##x;                                                                                         \
  Swizzle<T, N, a, 1> A##y;
#define MSL_PAIRS_OF_3(N, A, a) MSL_PAIRS_OF(N, A, a) Swizzle<T, N, a, 2> A##z;
#define MSL_PAIRS_OF_4(N, A, a) MSL_PAIRS_OF_3(N, A, a) Swizzle<T, N, a, 3> A##w;

// What every size shares: from one scalar (each element), from a vector of another type (explicit), by index.
#define MSL_VEC_COMMON(N)                                                                                           \
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
    struct { T r, g; };
    MSL_PAIRS_OF(2, x, 0) MSL_PAIRS_OF(2, y, 1)
    Swizzle<T, 2, 0, 0, 0, 0> xxxx;
    Swizzle<T, 2, 0, 1, 0, 1> xyxy;
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
    struct { T r, g, b; };
    MSL_PAIRS_OF_3(3, x, 0) MSL_PAIRS_OF_3(3, y, 1) MSL_PAIRS_OF_3(3, z, 2)
    Swizzle<T, 3, 0, 1, 2> xyz;
    Swizzle<T, 3, 2, 1, 0> zyx;
  };
  MSL_VEC_COMMON(3)
  template <Scalar A, Scalar B, Scalar C>
  MSL_INLINE constexpr vec(A a, B b, C c) : s{T(a), T(b), T(c)} {}
  MSL_INLINE constexpr vec(vec<T, 2> a, T b) : s{a.s[0], a.s[1], b} {}
  MSL_INLINE constexpr vec(T a, vec<T, 2> b) : s{a, b.s[0], b.s[1]} {}
};

template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  union {
    T s[4];
    struct { T x, y, z, w; };
    struct { T r, g, b, a; };
    MSL_PAIRS_OF_4(4, x, 0) MSL_PAIRS_OF_4(4, y, 1) MSL_PAIRS_OF_4(4, z, 2) MSL_PAIRS_OF_4(4, w, 3)
    Swizzle<T, 4, 0, 1> lo;
    Swizzle<T, 4, 2, 3> hi;
    Swizzle<T, 4, 0, 2> even;
    Swizzle<T, 4, 1, 3> odd;
    Swizzle<T, 4, 0, 1, 2> xyz;
    Swizzle<T, 4, 1, 2, 3> yzw;
    Swizzle<T, 4, 0, 1, 2> rgb;
    Swizzle<T, 4, 0, 1, 2, 3> xyzw;
    Swizzle<T, 4, 3, 2, 1, 0> wzyx;
    Swizzle<T, 4, 1, 2, 3, 0> yzwx;
  };
  MSL_VEC_COMMON(4)
  template <Scalar A, Scalar B, Scalar C, Scalar D>
  MSL_INLINE constexpr vec(A a, B b, C c, D d) : s{T(a), T(b), T(c), T(d)} {}
  MSL_INLINE constexpr vec(vec<T, 2> a, vec<T, 2> b) : s{a.s[0], a.s[1], b.s[0], b.s[1]} {}
  MSL_INLINE constexpr vec(vec<T, 2> a, T b, T c) : s{a.s[0], a.s[1], b, c} {}
  MSL_INLINE constexpr vec(T a, T b, vec<T, 2> c) : s{a, b, c.s[0], c.s[1]} {}
  MSL_INLINE constexpr vec(T a, vec<T, 2> b, T c) : s{a, b.s[0], b.s[1], c} {}
  MSL_INLINE constexpr vec(vec<T, 3> a, T b) : s{a.s[0], a.s[1], a.s[2], b} {}
  MSL_INLINE constexpr vec(T a, vec<T, 3> b) : s{a, b.s[0], b.s[1], b.s[2]} {}
};

// A vector without padding, aligned as its elements are: packed_float3 takes 12 bytes.
template <class T, int N>
struct packed_vec {
  static constexpr int size = N;
  T s[N];
  packed_vec() = default;
  MSL_COPIES(packed_vec)
  template <Scalar... U>
    requires(sizeof...(U) == N)
  constexpr packed_vec(U... values) : s{T(values)...} {}
  constexpr packed_vec(vec<T, N> v) : s{} {
    for (int i = 0; i < N; i++) s[i] = v.s[i];
  }
  constexpr operator vec<T, N>() const {
    const packed_vec whole(*this);
    vec<T, N> v{};
    for (int i = 0; i < N; i++) v.s[i] = whole.s[i];
    return v;
  }
  constexpr T& operator[](size_t i) { return s[i]; }
  constexpr const T& operator[](size_t i) const { return s[i]; }
};

// Operators take vectors by value: an operand in device memory is then read once, whole.
#define MSL_VECTOR_OPERATOR(op)                                                                                     \
  template <class A, class B>                                                                                       \
    requires SameShape<A, B>                                                                                        \
  MSL_INLINE constexpr VecOf<A> operator op(A a, B b) {                                                             \
    VecOf<A> result{};                                                                                              \
    for (int i = 0; i < VecOf<A>::size; i++) result.s[i] = Element<A>(a[i] op b[i]);                                \
    return result;                                                                                                  \
  }                                                                                                                 \
  template <VectorLike A, Scalar B>                                                                                 \
  MSL_INLINE constexpr VecOf<A> operator op(A a, B b) { return a op VecOf<A>(Element<A>(b)); }                      \
  template <Scalar A, VectorLike B>                                                                                 \
  MSL_INLINE constexpr VecOf<B> operator op(A a, B b) { return VecOf<B>(Element<B>(a)) op b; }                      \
  template <VectorLike A, class B>                                                                                  \
    requires(SameShape<A, B> || Scalar<B>)                                                                          \
  MSL_INLINE constexpr A& operator op##=(A& a, B b) { return a = VecOf<A>(a op b); }
MSL_VECTOR_OPERATOR(+)
MSL_VECTOR_OPERATOR(-)
MSL_VECTOR_OPERATOR(*)
MSL_VECTOR_OPERATOR(/)
MSL_VECTOR_OPERATOR(%)
MSL_VECTOR_OPERATOR(&)
MSL_VECTOR_OPERATOR(|)
MSL_VECTOR_OPERATOR(^)
MSL_VECTOR_OPERATOR(<<)
MSL_VECTOR_OPERATOR(>>)
#undef MSL_VECTOR_OPERATOR

#define MSL_VECTOR_COMPARISON(op)                                                                                   \
  template <class A, class B>                                                                                       \
    requires SameShape<A, B>                                                                                        \
  MSL_INLINE constexpr vec<bool, VecOf<A>::size> operator op(A a, B b) {                                            \
    vec<bool, VecOf<A>::size> result{};                                                                             \
    for (int i = 0; i < VecOf<A>::size; i++) result.s[i] = a[i] op b[i];                                            \
    return result;                                                                                                  \
  }                                                                                                                 \
  template <VectorLike A, Scalar B>                                                                                 \
  MSL_INLINE constexpr auto operator op(A a, B b) { return a op VecOf<A>(Element<A>(b)); }                          \
  template <Scalar A, VectorLike B>                                                                                 \
  MSL_INLINE constexpr auto operator op(A a, B b) { return VecOf<B>(Element<B>(a)) op b; }
MSL_VECTOR_COMPARISON(<)
MSL_VECTOR_COMPARISON(>)
MSL_VECTOR_COMPARISON(<=)
MSL_VECTOR_COMPARISON(>=)
MSL_VECTOR_COMPARISON(==)
MSL_VECTOR_COMPARISON(!=)
MSL_VECTOR_COMPARISON(&&)
MSL_VECTOR_COMPARISON(||)
#undef MSL_VECTOR_COMPARISON

#define MSL_VECTOR_UNARY(op, Result)                                                                                \
  template <VectorLike A>                                                                                           \
  MSL_INLINE constexpr vec<Result, VecOf<A>::size> operator op(A a) {                                               \
    vec<Result, VecOf<A>::size> result{};                                                                           \
    for (int i = 0; i < VecOf<A>::size; i++) result.s[i] = Result(op a[i]);                                         \
    return result;                                                                                                  \
  }
MSL_VECTOR_UNARY(-, Element<A>)
MSL_VECTOR_UNARY(~, Element<A>)
MSL_VECTOR_UNARY(!, bool)
#undef MSL_VECTOR_UNARY

template <int N>
constexpr bool any(vec<bool, N> v) {
  for (int i = 0; i < N; i++)
    if (v.s[i]) return true;
  return false;
}
template <int N>
constexpr bool all(vec<bool, N> v) {
  for (int i = 0; i < N; i++)
    if (!v.s[i]) return false;
  return true;
}
constexpr bool any(bool v) { return v; }
constexpr bool all(bool v) { return v; }

}  // namespace metal

#define MSL_VECTOR_NAMES(T, name)                                                                                   \
  typedef metal::vec<T, 2> name##2;                                                                                 \
  typedef metal::vec<T, 3> name##3;                                                                                 \
  typedef metal::vec<T, 4> name##4;                                                                                 \
  typedef metal::packed_vec<T, 2> packed_##name##2;                                                                 \
  typedef metal::packed_vec<T, 3> packed_##name##3;                                                                 \
  typedef metal::packed_vec<T, 4> packed_##name##4;                                                                 \
  namespace metal {                                                                                                 \
  using ::name##2, ::name##3, ::name##4, ::packed_##name##2, ::packed_##name##3, ::packed_##name##4;                \
  }
MSL_VECTOR_NAMES(bool, bool)
MSL_VECTOR_NAMES(char, char)
MSL_VECTOR_NAMES(uchar, uchar)
MSL_VECTOR_NAMES(short, short)
MSL_VECTOR_NAMES(ushort, ushort)
MSL_VECTOR_NAMES(int, int)
MSL_VECTOR_NAMES(uint, uint)
MSL_VECTOR_NAMES(long, long)
MSL_VECTOR_NAMES(ulong, ulong)
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
template <class To, class T, int Stored, int... I>
MSL_INLINE To as_type(metal::Swizzle<T, Stored, I...> from) {
  return as_type<To>(metal::vec<T, int(sizeof...(I))>(from));
}
namespace metal {
using ::as_type;
}
