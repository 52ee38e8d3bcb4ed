// What CUDA has in its language and Metal has not, on this CPU: for texts behind metal/cuda.h. Threads of a block meet
// as those of a threadgroup do.
#pragma once
#include "msl/all.h"

typedef half __half, float16_t;
typedef bfloat __nv_bfloat16, bfloat16_t;

#define __device__
#define __forceinline__ inline
#define threadIdx (msl_thread->position_in_threadgroup)
#define blockIdx (msl_thread->threadgroup_position)
#define blockDim (msl_thread->threads_per_threadgroup)

inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline void __syncthreads() { metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup); }
inline bool __all_sync(uint, bool x) { return metal::simd_all(x); }
template <class T>
T __shfl_sync(uint, T x, int lane) { return metal::simd_shuffle(x, ushort(lane)); }
template <class T>
T __shfl_xor_sync(uint, T x, int mask) { return metal::simd_shuffle_xor(x, ushort(mask)); }

inline uint16_t half_of(uint pair, int i) { return uint16_t(pair >> 16 * i); }

// movmatrix.m8n8.trans: lane i has elements 2 * (i % 4) and the next one of row i / 4.
inline uint transposed(uint pair) {
  const int lane = msl_thread->lane, row = lane / 4;
  uint made = 0;
  for (int i = 0; i < 2; i++) {
    const uint other = __shfl_sync(0, pair, (lane % 4 * 2 + i) * 4 + row / 2);
    made |= uint(half_of(other, row % 2)) << 16 * i;
  }
  return made;
}

// mma.m16n8k8.row.col: rows 0 to 7 and 8 to 15 of the left matrix as above, columns of the right one as its rows.
template <class E>
void multiply_pairs(float (&sums)[4], uint upper, uint lower, uint right, E) {
  const int lane = msl_thread->lane;
  for (int k = 0; k < 8; k++) {
    const uint rows[2] = {__shfl_sync(0, upper, lane / 4 * 4 + k / 2), __shfl_sync(0, lower, lane / 4 * 4 + k / 2)};
    for (int i = 0; i < 2; i++) {
      const uint column = __shfl_sync(0, right, (lane % 4 * 2 + i) * 4 + k / 2);
      const float factor = float(std::bit_cast<E>(half_of(column, k % 2)));
      for (int j = 0; j < 2; j++) sums[2 * j + i] += float(std::bit_cast<E>(half_of(rows[j], k % 2))) * factor;
    }
  }
}

#undef METAL_FUNC
#define metal metal_in_cuda  // what the text has of these names is its own
#define as_type as_type_in_cuda
