// What the kernels of attention share, and what lets one text be those of dense and packed planes, with exported scores
// and without. Behind kv_layout.h, and kv_packed.h where planes are packed.
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

// An item of the work list; see paged_attention.metal.
struct Item {
  int row, first_query, num_queries, first_position, begin, run, seen_begin, seen_end;
};

template <typename Work>
METAL_FUNC Item item_of(Work work, int item) {
  Work at = work + 8 * item;
  return Item{at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7]};
}

// Makes a scaled product a score. distance: tokens from the query, 0 or less. Returns whether the query sees the token,
// and reads no slope and no mask where `is_visible` is false.
template <bool SOFT_CAP, bool ALIBI, bool MASK, typename Slope, typename Mask>
METAL_FUNC bool see(thread float& score, bool is_visible, float soft_cap, Slope slope, int distance, Mask mask) {
  if (SOFT_CAP) {
    score = soft_cap * metal::precise::tanh(score / soft_cap);
  }
  if (ALIBI && is_visible) {
    score += *slope * float(distance);
  }
  if (MASK && is_visible) {
    const float added = *mask;
    score += added;
    return added != -INFINITY;
  }
  return is_visible;
}

// Stores chunk c of a row: of the result where the item is all of it, else of a part, with its largest score and sum.
template <typename Q, bool DIRECT, int CHUNKS, typename Out>
METAL_FUNC void store_chunk(Out out, int64_t row, int c, float4 values, float largest, float sum, float sink) {
  if (DIRECT) {
    reinterpret_cast<device Chunk<Q>*>(out)[row * CHUNKS + c] = Chunk<Q>(finish(values, largest, sum, sink));
    return;
  }
  device float4* partial = reinterpret_cast<device float4*>(out) + row * (CHUNKS + 1);
  partial[c] = values;
  if (c == 0) {
    partial[CHUNKS] = float4(largest, sum, 0.0f, 0.0f);
  }
}

}  // namespace kv

#endif
