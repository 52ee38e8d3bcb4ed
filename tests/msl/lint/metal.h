// Metal as far as clang's front end can check it: address spaces are clang's own or OpenCL's, vectors are its extended
// vectors, and the library is declarations only. Nothing of this is ever compiled to code. See lint.py.
#pragma once

typedef unsigned char uchar, uint8_t;
typedef signed char int8_t;
typedef short int16_t;
typedef unsigned short ushort, uint16_t;
typedef int int32_t;
typedef unsigned int uint, uint32_t;
typedef long int64_t, ptrdiff_t;
typedef unsigned long ulong, uint64_t, size_t;
typedef __bf16 bfloat;

#ifdef __OPENCL_CPP_VERSION__
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
#else
typedef _Float16 half;
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#endif
#define INFINITY __builtin_inff()
#define METAL_FUNC inline

// Clang has no functional notation for vectors of several values: lint.py writes `lint_vector<V>(...)` for `V(...)`.
template <class V, class... A>
V lint_vector(A...);

namespace metal {

template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

#define LINT_1(name)                                                                                                \
  template <class T>                                                                                                \
  T name(T);
#define LINT_2(name)                                                                                                \
  template <class T>                                                                                                \
  T name(T, T);
#define LINT_MATH LINT_1(exp) LINT_1(exp2) LINT_1(rint) LINT_1(tanh)
LINT_MATH
namespace fast {
LINT_MATH
}
namespace precise {
LINT_MATH
}
LINT_1(abs) LINT_2(max) LINT_2(min)
template <class T, int N>
T dot(vec<T, N>, vec<T, N>);

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

template <class T>
T simd_shuffle(T, ushort);
template <class T>
T simd_shuffle_xor(T, ushort);
LINT_1(simd_sum) LINT_1(simd_max)
bool simd_all(bool);

template <class T, int Cols = 8, int Rows = 8>
struct simdgroup_matrix {
  simdgroup_matrix();
  thread vec<T, 2>& thread_elements() thread;
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
template <class T, int Cols, int Rows>
simdgroup_matrix<T, Cols, Rows> make_filled_simdgroup_matrix(T);
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D>&, const simdgroup_matrix<A>&, const simdgroup_matrix<B>&,
                                   const simdgroup_matrix<C>&);
#define LINT_MATRIX(Space)                                                                                          \
  template <class T>                                                                                                \
  void simdgroup_load(simdgroup_matrix<T>&, const Space T*, ulong = 8);                                             \
  template <class T>                                                                                                \
  void simdgroup_store(const simdgroup_matrix<T>&, Space T*, ulong = 8);
LINT_MATRIX(device)
LINT_MATRIX(threadgroup)

}  // namespace metal

#define LINT_VECTOR_NAMES(T)                                                                                        \
  typedef metal::vec<T, 2> T##2;                                                                                    \
  typedef metal::vec<T, 3> T##3;                                                                                    \
  typedef metal::vec<T, 4> T##4;
LINT_VECTOR_NAMES(uchar)
LINT_VECTOR_NAMES(int)
LINT_VECTOR_NAMES(uint)
LINT_VECTOR_NAMES(long)
LINT_VECTOR_NAMES(half)
LINT_VECTOR_NAMES(bfloat)
LINT_VECTOR_NAMES(float)

template <class To, class From>
To as_type(From);
namespace metal {
using ::as_type;
}
