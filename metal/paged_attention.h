// What lets paged_attention.metal be one text for dense and packed planes, with exported scores and without. Behind
// kv_layout.h, and kv_packed.h where planes are packed.
#ifndef PAGED_ATTENTION_H
#define PAGED_ATTENTION_H

// Names of inputs and outputs that only some kernels have. Where a kernel has one, its parameter hides the name here;
// where it has not, the type `Absent` chooses the function that does without.
enum Absent { k_scales, k_biases, v_scales, v_biases, observed, columns, exported };

namespace kv {

// One head of a plane that has no scales and biases; kv_packed.h has the other one.
template <typename T, typename Layout>
METAL_FUNC Plane<T> plane_of(const device T* pool, Absent, Absent, Layout layout, int64_t head) {
  return Plane<T>{pool, head_of(layout, head)};
}

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
