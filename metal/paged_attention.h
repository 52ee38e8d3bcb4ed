// What lets paged_attention.metal be one text for dense and packed planes, with exported scores and without. Behind
// kv_layout.h and kv_packed.h.
#ifndef PAGED_ATTENTION_H
#define PAGED_ATTENTION_H

// Names of inputs and outputs that only some kernels have. Where a kernel has one, its parameter hides the name here;
// where it has not, the type `Absent` chooses the function that does without.
enum Absent { k_scales, k_biases, v_scales, v_biases, observed, columns, exported };

namespace kv {

// One head of a plane; its type follows from the arrays that the kernel has. layout: that of K, or 4 numbers behind it
// that of V; scales and biases have theirs 8 numbers behind.
template <typename T, typename Layout>
METAL_FUNC Plane<T> plane_of(const device T* pool, Absent, Absent, Layout layout, int64_t head) {
  return Plane<T>{pool, head_of(layout, head)};
}

#ifdef KV_PACKED_H
template <typename T, typename Layout>
METAL_FUNC PackedPlane<T> plane_of(const device uint* words, const device T* scales, const device T* biases,
                                   Layout layout, int64_t head) {
  return PackedPlane<T>{words, scales, biases, head_of(layout, head), head_of(layout + 8, head)};
}
#endif

// The query of an item whose scores are exported, none if negative.
template <typename Observed>
METAL_FUNC int observed_query(Observed observed, int item) {
  return observed[item];
}

METAL_FUNC int observed_query(Absent, int) {
  return -1;
}

METAL_FUNC void store(device float* to, int64_t at, float x) {
  to[at] = x;
}

METAL_FUNC void store(Absent, int64_t, float) {}

}  // namespace kv

#endif
