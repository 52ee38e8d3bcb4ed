// Metal's language in CUDA, as far as the kernels here use it: with this in front, one text is the body of a kernel of
// both. See kvpool_backends/mlx/cuda.py, which writes the rest.
//
// A warp has 32 lanes, as a simdgroup has, and a block of threads is a threadgroup.
#ifndef KV_CUDA_H
#define KV_CUDA_H

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define METAL_FUNC __device__ __forceinline__
#undef INFINITY
#define INFINITY __int_as_float(0x7f800000)

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;

namespace metal {

template <typename T, int N>
struct alignas(N * sizeof(T)) vec {
  T s[N];

  vec() = default;
  template <typename U>
  METAL_FUNC explicit vec(U x) {
    for (int i = 0; i < N; i++) s[i] = T(x);
  }
  template <typename U>
  METAL_FUNC explicit vec(vec<U, N> x) {
    for (int i = 0; i < N; i++) s[i] = T(float(x.s[i]));
  }
  template <typename A, typename B>
  METAL_FUNC vec(A a, B b) : s{T(a), T(b)} {}
  template <typename A, typename B, typename C, typename D>
  METAL_FUNC vec(A a, B b, C c, D d) : s{T(a), T(b), T(c), T(d)} {}

  METAL_FUNC T& operator[](int i) { return s[i]; }
  METAL_FUNC const T& operator[](int i) const { return s[i]; }
};

typedef vec<float, 2> float2_;
typedef vec<float, 4> float4_;

METAL_FUNC float4_ operator+(float4_ a, float4_ b) {
  return float4_(a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]);
}
METAL_FUNC float4_ operator+(float4_ a, float b) { return float4_(a[0] + b, a[1] + b, a[2] + b, a[3] + b); }
METAL_FUNC float4_ operator*(float4_ a, float4_ b) {
  return float4_(a[0] * b[0], a[1] * b[1], a[2] * b[2], a[3] * b[3]);
}
METAL_FUNC float4_ operator*(float4_ a, float b) { return float4_(a[0] * b, a[1] * b, a[2] * b, a[3] * b); }
METAL_FUNC float4_ operator*(float a, float4_ b) { return b * a; }
METAL_FUNC float4_& operator+=(float4_& a, float4_ b) { return a = a + b; }
METAL_FUNC float4_& operator*=(float4_& a, float b) { return a = a * b; }
METAL_FUNC float dot(float4_ a, float4_ b) { return a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3]; }

METAL_FUNC int max(int a, int b) { return a > b ? a : b; }
METAL_FUNC int min(int a, int b) { return a < b ? a : b; }
METAL_FUNC float max(float a, float b) { return fmaxf(a, b); }
METAL_FUNC float min(float a, float b) { return fminf(a, b); }
METAL_FUNC float abs(float x) { return fabsf(x); }
METAL_FUNC float rint(float x) { return rintf(x); }
namespace fast {
METAL_FUNC float exp2(float x) { return exp2f(x); }
}  // namespace fast
namespace precise {
METAL_FUNC float tanh(float x) { return tanhf(x); }
}  // namespace precise

template <typename To, typename From>
METAL_FUNC To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type between types of different sizes");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

template <typename T>
METAL_FUNC T simd_shuffle(T x, ushort lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}
template <typename T, int N>
METAL_FUNC vec<T, N> simd_shuffle(vec<T, N> x, ushort lane) {
  for (int i = 0; i < N; i++) x[i] = simd_shuffle(x[i], lane);
  return x;
}
template <typename T>
METAL_FUNC T simd_shuffle_xor(T x, ushort mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}
template <int N>
METAL_FUNC vec<float, N> simd_shuffle_xor(vec<float, N> x, ushort mask) {
  for (int i = 0; i < N; i++) x[i] = simd_shuffle_xor(x[i], mask);
  return x;
}
METAL_FUNC float simd_max(float x) {
  for (int distance = 1; distance < 32; distance *= 2) x = max(x, simd_shuffle_xor(x, ushort(distance)));
  return x;
}
METAL_FUNC float simd_sum(float x) {
  for (int distance = 1; distance < 32; distance *= 2) x += simd_shuffle_xor(x, ushort(distance));
  return x;
}
METAL_FUNC bool simd_all(bool x) { return __all_sync(0xffffffffu, x); }

enum class mem_flags { mem_threadgroup };
METAL_FUNC void threadgroup_barrier(mem_flags) { __syncthreads(); }

// 8x8 elements. Lane i has elements 2 * (i % 4) and the next one of row i / 4.
template <typename T, int Columns = 8, int Rows = 8>
struct simdgroup_matrix {
  vec<T, 2> elements;
  METAL_FUNC vec<T, 2>& thread_elements() { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;

template <typename T, int Columns, int Rows>
METAL_FUNC simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T x) {
  return simdgroup_matrix<T, Columns, Rows>{vec<T, 2>(x)};
}

template <typename T>
METAL_FUNC void simdgroup_load(simdgroup_matrix<T>& m, const T* from, int stride) {
  const int lane = threadIdx.x % 32;
  from += lane / 4 * stride + 2 * (lane % 4);
  m.elements = vec<T, 2>(from[0], from[1]);
}

#ifdef __CUDACC__
// The transposed matrix of 8x8 elements of 16 bits.
METAL_FUNC uint transposed(uint pair) {
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(pair) : "r"(pair));
  return pair;
}

// Adds the products of two matrices with a third one, which is given transposed: those of `upper` to the first two
// sums, those of `lower` to the others.
METAL_FUNC void multiply_pairs(float (&sums)[4], uint upper, uint lower, uint right, __half) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(upper), "r"(lower), "r"(right));
}
METAL_FUNC void multiply_pairs(float (&sums)[4], uint upper, uint lower, uint right, __nv_bfloat16) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(upper), "r"(lower), "r"(right));
}
#endif

template <typename E>
METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_float8x8& d, simdgroup_matrix<E>& a, simdgroup_matrix<E>& b,
                                              simdgroup_float8x8& c) {
  float sums[4] = {c.elements[0], c.elements[1], 0.0f, 0.0f};
  multiply_pairs(sums, as_type<uint>(a.elements), 0, transposed(as_type<uint>(b.elements)), E());
  d.elements = float2_(sums[0], sums[1]);
}

// A float is the sum of numbers of 16 bits: of two of half, of three of bfloat.
METAL_FUNC constexpr int pairs_of_parts(__half) { return 1; }
METAL_FUNC constexpr int pairs_of_parts(__nv_bfloat16) { return 2; }

template <typename E>
METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_float8x8& d, simdgroup_float8x8& a, simdgroup_matrix<E>& b,
                                              simdgroup_float8x8& c) {
  float sums[4] = {c.elements[0], c.elements[1], 0.0f, 0.0f};
  const uint right = transposed(as_type<uint>(b.elements));
  float2_ rest = a.elements;
  for (int i = 0; i < pairs_of_parts(E()); i++) {
    uint parts[2];
    for (int j = 0; j < 2; j++) {
      const vec<E, 2> part(rest);
      parts[j] = as_type<uint>(part);
      rest = float2_(rest[0] - float(part[0]), rest[1] - float(part[1]));
    }
    multiply_pairs(sums, parts[0], parts[1], right, E());
  }
  d.elements = float2_(sums[0] + sums[2], sums[1] + sums[3]);
}

// There are no such instructions for floats.
template <typename A, typename B>
METAL_FUNC void multiply_by_shuffles(simdgroup_float8x8& d, simdgroup_matrix<A>& a, simdgroup_matrix<B>& b,
                                     simdgroup_float8x8& c) {
  const int lane = threadIdx.x % 32;
  float2_ sums = c.elements;
  const float2_ left(a.elements), right(b.elements);
  for (int k = 0; k < 8; k++) {
    const float x = simd_shuffle(left, ushort(lane / 4 * 4 + k / 2))[k % 2];
    const float2_ y = simd_shuffle(right, ushort(4 * k + lane % 4));
    sums = float2_(sums[0] + x * y[0], sums[1] + x * y[1]);
  }
  d.elements = sums;
}
METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_float8x8& d, simdgroup_float8x8& a, simdgroup_float8x8& b,
                                              simdgroup_float8x8& c) {
  multiply_by_shuffles(d, a, b, c);
}
template <typename A>
METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_float8x8& d, simdgroup_matrix<A>& a, simdgroup_float8x8& b,
                                              simdgroup_float8x8& c) {
  multiply_by_shuffles(d, a, b, c);
}

}  // namespace metal

// CUDA has vectors of this name, without operators.
#define float4 metal::float4_
using metal::as_type;
using metal::make_filled_simdgroup_matrix;
using metal::mem_flags;
using metal::simd_all;
using metal::simd_max;
using metal::simd_shuffle;
using metal::simd_shuffle_xor;
using metal::simd_sum;
using metal::simdgroup_float8x8;
using metal::simdgroup_load;
using metal::simdgroup_matrix;
using metal::simdgroup_multiply_accumulate;
using metal::threadgroup_barrier;

#endif
