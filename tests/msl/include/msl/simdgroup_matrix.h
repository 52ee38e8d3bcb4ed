// simdgroup_matrix<T, 8, 8>: 64 elements spread over the 32 lanes of a simdgroup, two neighbours of a row in each.
//
// Which lane holds which pair is Apple's layout as MLX's kernels rely on it; kernels that go through load, store and
// multiply only do not depend on it. Products are summed in float and rounded once to the type of the result.
#pragma once
#include "simd.h"

namespace metal {

template <class T, int Cols = 8, int Rows = 8>
struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8 && Floating<T>, "simdgroup matrices are 8x8 of float, half or bfloat");
  vec<T, 2> elements;

  simdgroup_matrix() = default;
  vec<T, 2>& thread_elements() { return elements; }
  const vec<T, 2>& thread_elements() const { return elements; }

  struct Place {
    uint row, column;
  };
  static Place place(uint lane) {
    return {(lane >> 2 & 4) | (lane >> 1 & 3), (lane >> 1 & 4) | (lane << 1 & 2)};
  }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;

template <class T, int Cols, int Rows>
MSL_INLINE simdgroup_matrix<T, Cols, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Cols, Rows> m;
  m.elements = vec<T, 2>(value);
  return m;
}

}  // namespace metal

namespace msl {

inline void need_whole_simdgroup(uint32_t active, const char* what, const Where& where) {
  if (active != 0xffffffffu) msl_fail("%s at line %u needs 32 active lanes, has 0x%08x", what, where.line(), active);
}
inline void meet_whole_simdgroup(const char* what, const Where& where) {
  need_whole_simdgroup(exchange(0, nullptr, what, where).active, what, where);
}

// What a lane brings to a product: its pairs of both factors and of what is added. It takes its pair of the result.
template <class D, class A, class B, class C>
struct MatrixProduct {
  metal::vec<A, 2> a;
  metal::vec<B, 2> b;
  metal::vec<C, 2> c;

  // Once for the simdgroup, whose lanes are all active: callers see to that.
  static void combine(uint32_t, unsigned char* slots) {
    float left[8][8], right[8][8];
    for (uint lane = 0; lane < simd_width; lane++) {
      const auto at = metal::simdgroup_matrix<float>::place(lane);
      const auto brought = load_slot<MatrixProduct>(slots, lane);
      for (uint j = 0; j < 2; j++) {
        left[at.row][at.column + j] = float(brought.a.s[j]);
        right[at.row][at.column + j] = float(brought.b.s[j]);
      }
    }
    for (uint lane = 0; lane < simd_width; lane++) {
      const auto at = metal::simdgroup_matrix<float>::place(lane);
      const auto brought = load_slot<MatrixProduct>(slots, lane);
      metal::vec<D, 2> result;
      for (uint j = 0; j < 2; j++) {
        float sum = float(brought.c.s[j]);
        for (uint k = 0; k < 8; k++) sum += left[at.row][k] * right[k][at.column + j];
        result.s[j] = D(sum);
      }
      store_slot(slots, lane, result);
    }
  }
};

}  // namespace msl

namespace metal {

template <class D, class A, class B, class C>
MSL_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D>& d, const simdgroup_matrix<A>& a,
                                              const simdgroup_matrix<B>& b, const simdgroup_matrix<C>& c,
                                              msl::Where where = msl::Where::current()) {
  using Product = msl::MatrixProduct<D, A, B, C>;
  const Product brought{a.elements, b.elements, c.elements};
  const msl::Exchange all = msl::exchange(brought, &Product::combine, "simdgroup_multiply_accumulate", where);
  msl::need_whole_simdgroup(all.active, "simdgroup_multiply_accumulate", where);
  d.elements = msl::load_slot<vec<D, 2>>(all.slots, msl_thread->lane);
}
// A lane's pair is one access.
template <class T>
MSL_INLINE void simdgroup_load(simdgroup_matrix<T>& m, const T* source, ulong elements_per_row = 8,
                               msl::Where where = msl::Where::current()) {
  msl::meet_whole_simdgroup("simdgroup_load", where);
  const auto at = m.place(msl_thread->lane);
  msl_copy(&m.elements, source + at.row * elements_per_row + at.column, sizeof m.elements, alignof(T));
}
template <class T>
MSL_INLINE void simdgroup_store(const simdgroup_matrix<T>& m, T* target, ulong elements_per_row = 8,
                                msl::Where where = msl::Where::current()) {
  msl::meet_whole_simdgroup("simdgroup_store", where);
  const auto at = m.place(msl_thread->lane);
  msl_copy(target + at.row * elements_per_row + at.column, &m.elements, sizeof m.elements, alignof(T));
}

}  // namespace metal
