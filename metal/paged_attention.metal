// Attention of a few queries of one sequence over its paged context: decode, speculative windows. Where a KV head has
// more rows than registers hold, paged_matrix.metal takes them.
//
// Threadgroup (x, y) takes KV head x and item y of the work list: up to `QUERIES` neighbouring queries of a row of the
// batch and a part of that row's context. K and V are read once for all `ROWS` = QUERIES * GROUP of them, a query with
// a head each. Each simdgroup has a run of tokens to itself and meets the others after its last token.
// Parts and runs begin where the row's length alone puts them, so that the other rows of a batch change no bit of a
// result.
//
// A simdgroup goes through its run in tiles of 32 tokens. First it reads K, all lanes on the same row; of the scores,
// lane i keeps those of one token, so that mask, softmax and whatever else concerns scores costs one operation for 32
// of them. Then it reads V, and the lane that has a token's weight hands it to the others.
//
// Template   T, Q              types of the pool, of queries and results
//            DIM, VALUE_DIM    head dimensions, multiples of 4
//            BLOCK_SIZE        8, 16, 32: a multiple of 8
//            GROUP             query heads per KV head
//            HEADS             of them in a threadgroup: here all
//            QUERIES           see above
//            SIMDGROUPS        of the threadgroup
//            TOUCHING          rows of neighbouring slots are neighbours in memory
//            SOFT_CAP, ALIBI, MASK, SINKS, DIRECT   bools
//            K_BITS, V_BITS    8 or 4 where keys, values are packed, else 0
//            SIZE              packed elements that have a scale and a bias
//            RAW, MASS         bools: which scores are exported, if any
// Inputs     q                 [T, Hq, DIM], last axis contiguous
//            k_pool, v_pool    base arrays, of what is packed the words
//            layout            int64 [8]: offset, block, slot and head stride of K, then of V; with packed planes
//                              [16]: then the same of scales and biases
//            tables            int32 [B, W]
//            work              int32 [N, 8]: row of the batch, first query token, number of queries, position of the
//                              first one; where the part begins, tokens of a run (8 n), first and last + 1 of
//                              the tokens that any of the queries sees here
//            numbers           float [2]: scale, soft cap
//            window            int32: tokens that a query sees
//            slopes, sinks     float [Hq]
//            mask              float [T, 1 or Hq, C]
// where packed                 k_scales, k_biases, v_scales, v_biases: base arrays of T
// where RAW or MASS
//            observed          int32 [N]: of an item's queries the newest of the row; negative: another item's
//            columns           int32: C
// Output     out               DIRECT: Q [T, Hq, VALUE_DIM], the result
//                              else float [N, X, ROWS, VALUE_DIM + 4] for X threadgroups of an item: the weighted sum
//                              of values, the largest score, the sum of weights, two zeros
//            exported          RAW: float [B, Hk, C], means over the heads of a group
//                              MASS: float [B, Hq, C], what goes into exp; -INFINITY where it is hidden
//
// An item that holds the newest query of its row says which one it is. Its threadgroups pass every token that the query
// sees in this part of the context, once, and so store its score once.

constexpr int ROWS = GROUP * QUERIES;
// Else a row may not see a token that another one sees, and 0 times infinity must not come in.
constexpr bool ALL_SEE_THE_SAME = QUERIES == 1 && !MASK;
using Keys = kv::Rows<T, DIM, TOUCHING, K_BITS, SIZE>;
using Values = kv::Rows<T, VALUE_DIM, TOUCHING, V_BITS, SIZE>;
// Two loads are on their way at a time. The products of each become one number of a lane.
constexpr int K_STEP = 2 * Keys::STEP, V_STEP = 2 * Values::STEP;

const int lane = thread_index_in_simdgroup;
const int simd = simdgroup_index_in_threadgroup;
const int kv_head = threadgroup_position_in_grid.x;
const int num_q_heads = threadgroups_per_grid.x * GROUP;
const kv::Item item = kv::item_of(work, threadgroup_position_in_grid.y);
const int run_begin = item.begin + simd * item.run;
const int seen_begin = max(run_begin, item.seen_begin);
const int seen_end = min(run_begin + item.run, item.seen_end);
const int observed_query = kv::observed_query(observed, threadgroup_position_in_grid.y);

const auto k_plane = kv::plane_of(k_pool, k_scales, k_biases, layout, kv_head);
const auto v_plane = kv::plane_of(v_pool, v_scales, v_biases, layout + 4, kv_head);
const float scale = numbers[0], soft_cap = numbers[1];
const int window_tokens = window;

kv::Chunk<Q> query[ROWS][Keys::PER_LANE];
float sum_of_query[ROWS];  // for packed keys; else nothing reads it
float4 values[ROWS][Values::PER_LANE];
float largest = -INFINITY, sum = 0.0f;  // lane i: score so far and sum of weights of row i
KV_UNROLL
for (int r = 0; r < ROWS; r++) {
  const int token = r / GROUP, head = kv_head * GROUP + r % GROUP;
  const bool exists = token < item.num_queries;
  const int64_t row = int64_t(item.first_query + token) * q_strides[0] + int64_t(head) * q_strides[1];
  sum_of_query[r] = 0.0f;
  KV_UNROLL
  for (int j = 0; j < Keys::PER_LANE; j++) {
    const int c = Keys::chunk_of(lane, j);
    query[r][j] = kv::Chunk<Q>(Q(0));
    if (exists && c < Keys::CHUNKS) {
      KV_UNROLL
      for (int e = 0; e < 4; e++) {
        query[r][j][e] = q[row + 4 * c + e];
      }
    }
    sum_of_query[r] += metal::dot(float4(query[r][j]), float4(1.0f));
  }
  KV_UNROLL
  for (int j = 0; j < Values::PER_LANE; j++) {
    values[r][j] = float4(0.0f);
  }
}

const auto table = tables + item.row * tables_strides[0];
kv::Tile tile =
    kv::tile_at<BLOCK_SIZE>(table, run_begin + (seen_begin - run_begin) / 32 * 32, seen_begin, seen_end, lane);
Keys keys[2];
KV_UNROLL
for (int h = 0; h < 2; h++) {
  kv::load<BLOCK_SIZE>(keys[h], k_plane, tile, tile.skipped / K_STEP * K_STEP + h * Keys::STEP, lane);
}
while (tile.begin < seen_end) {
  float scores[ROWS];
  KV_UNROLL
  for (int r = 0; r < ROWS; r++) {
    scores[r] = 0.0f;
  }
  for (int t = tile.skipped / K_STEP * K_STEP; t < tile.num_tokens; t += K_STEP) {
    float first_half[ROWS];
    KV_UNROLL
    for (int h = 0; h < 2; h++) {
      decltype(keys[h].factors(0, 0)) factors[Keys::ACCESSES];
      KV_UNROLL
      for (int i = 0; i < Keys::ACCESSES; i++) {
        factors[i] = keys[h].factors(i, lane);
      }
      KV_UNROLL
      for (int r = 0; r < ROWS; r++) {
        float products[Keys::ACCESSES];
        KV_UNROLL
        for (int i = 0; i < Keys::ACCESSES; i++) {
          products[i] = keys[h].product(i, query[r], sum_of_query[r], factors[i]);
        }
        KV_UNROLL
        for (int n = Keys::ACCESSES / 2; n > 0; n /= 2) {
          KV_UNROLL
          for (int i = 0; i < n; i++) {
            products[i] = kv::transpose(products[2 * i], products[2 * i + 1], Keys::ACCESSES / 2 / n, lane);
          }
        }
        if (h == 0) {
          first_half[r] = products[0];
          continue;
        }
        float score = kv::transpose(first_half[r], products[0], Keys::ACCESSES, lane);
        KV_UNROLL
        for (int distance = 2 * Keys::ACCESSES; distance < Keys::LANES; distance *= 2) {
          score += simd_shuffle_xor(score, ushort(distance));
        }
        scores[r] = lane % Keys::LANES / (2 * Keys::ACCESSES) == t / K_STEP ? score : scores[r];
      }
      // What is read next is on its way while the other half is multiplied.
      if (t + K_STEP < tile.num_tokens) {
        kv::load<BLOCK_SIZE>(keys[h], k_plane, tile, t + K_STEP + h * Keys::STEP, lane);
      }
    }
  }
  Values rows[2];
  KV_UNROLL
  for (int h = 0; h < 2; h++) {
    kv::load<BLOCK_SIZE>(rows[h], v_plane, tile, tile.skipped / V_STEP * V_STEP + h * Values::STEP, lane);
  }

  // The token whose scores this lane holds.
  const int my_token = tile.begin + lane % Keys::LANES * Keys::ROWS + lane / Keys::LANES;
  const bool seen = my_token >= seen_begin && my_token < seen_end;
  float sum_of_heads = 0.0f;
  KV_UNROLL
  for (int r = 0; r < ROWS; r++) {
    const int token = item.first_query + r / GROUP, position = item.first_position + r / GROUP;
    const int head = kv_head * GROUP + r % GROUP;
    const bool exists = r / GROUP < item.num_queries;
    bool is_visible = exists && seen && my_token <= position && my_token > position - window_tokens;
    float score = scores[r] * scale;
    const int64_t masked = MASK ? token * mask_strides[0] + (mask_shape[1] == 1 ? 0 : head * mask_strides[1]) +
                                      my_token * mask_strides[2]
                                : 0;
    is_visible = kv::see<SOFT_CAP, ALIBI, MASK>(score, is_visible, soft_cap, slopes + head,
                                                      my_token - position, mask + masked);
    const bool is_observed = r / GROUP == observed_query;
    if (RAW && is_observed && is_visible) {
      sum_of_heads += score / float(GROUP);
    }
    if (MASS && is_observed && exists && seen) {
      const int64_t row = int64_t(item.row) * num_q_heads + head;
      kv::store(exported, row * columns + my_token, is_visible ? score : -INFINITY);
    }
    score = is_visible ? score : -INFINITY;

    const float before = simd_shuffle(largest, ushort(r));
    const float top = max(before, simd_max(score));
    const float correction = kv::weight(before, top);
    scores[r] = kv::weight(score, top);  // from here on the weights
    const float total = simd_sum(scores[r]);
    if (lane == r) {
      largest = top;
      sum = sum * correction + total;
    }
    KV_UNROLL
    for (int j = 0; j < Values::PER_LANE; j++) {
      values[r][j] *= correction;
    }
  }
  if (RAW && observed_query >= 0 && seen) {
    const int64_t row = int64_t(item.row) * threadgroups_per_grid.x + kv_head;
    kv::store(exported, row * columns + my_token, sum_of_heads);
  }

  // The keys of the next tile are on their way while the values of this one are added.
  const kv::Tile next = kv::tile_at<BLOCK_SIZE>(table, tile.begin + 32, seen_begin, seen_end, lane);
  if (next.begin < seen_end) {
    KV_UNROLL
    for (int h = 0; h < 2; h++) {
      kv::load<BLOCK_SIZE>(keys[h], k_plane, next, h * Keys::STEP, lane);
    }
  }
  for (int t = tile.skipped / V_STEP * V_STEP; t < tile.num_tokens; t += V_STEP) {
    KV_UNROLL
    for (int h = 0; h < 2; h++) {
      KV_UNROLL
      for (int a = 0; a < Values::ACCESSES; a++) {
        const int token = t + h * Values::STEP + a * Values::ROWS + lane / Values::LANES;
        const ushort holder = token % Keys::ROWS * Keys::LANES + token / Keys::ROWS;
        const auto factors = rows[h].factors(a, lane);
        KV_UNROLL
        for (int r = 0; r < ROWS; r++) {
          const float w = simd_shuffle(scores[r], holder);
          if (ALL_SEE_THE_SAME || w != 0.0f) {
            KV_UNROLL
            for (int j = 0; j < Values::PER_LANE; j++) {
              values[r][j] += w * rows[h].floats(a, j, factors);
            }
          }
        }
      }
      if (t + V_STEP < tile.num_tokens) {
        kv::load<BLOCK_SIZE>(rows[h], v_plane, tile, t + V_STEP + h * Values::STEP, lane);
      }
    }
  }
  tile = next;
}

// The simdgroups' results become one.
threadgroup float shared_largest[SIMDGROUPS * ROWS];
threadgroup float shared_sum[SIMDGROUPS * ROWS];
threadgroup float4 shared_values[SIMDGROUPS * ROWS * Values::CHUNKS];

if (lane < ROWS) {
  shared_largest[lane * SIMDGROUPS + simd] = largest;
  shared_sum[lane * SIMDGROUPS + simd] = sum;
}
KV_UNROLL
for (int r = 0; r < ROWS; r++) {
  KV_UNROLL
  for (int j = 0; j < Values::PER_LANE; j++) {
    float4 mine = values[r][j];
    KV_UNROLL
    for (int distance = Values::LANES; distance < 32; distance *= 2) {
      mine += simd_shuffle_xor(mine, ushort(distance));
    }
    const int c = Values::chunk_of(lane, j);
    if (lane < Values::LANES && c < Values::CHUNKS) {
      shared_values[(r * SIMDGROUPS + simd) * Values::CHUNKS + c] = mine;
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int i = simd * 32 + lane; i < ROWS * Values::CHUNKS; i += 32 * SIMDGROUPS) {
  const int r = i / Values::CHUNKS, c = i % Values::CHUNKS;
  float top = -INFINITY;
  for (int s = 0; s < SIMDGROUPS; s++) {
    top = max(top, shared_largest[r * SIMDGROUPS + s]);
  }
  float total = 0.0f;
  float4 all = float4(0.0f);
  for (int s = 0; s < SIMDGROUPS; s++) {
    const float w = kv::weight(shared_largest[r * SIMDGROUPS + s], top);
    total += w * shared_sum[r * SIMDGROUPS + s];
    all += w * shared_values[(r * SIMDGROUPS + s) * Values::CHUNKS + c];
  }
  const int head = kv_head * GROUP + r % GROUP;
  const bool exists = r / GROUP < item.num_queries;
  const int64_t part = int64_t(threadgroup_position_in_grid.y) * threadgroups_per_grid.x + kv_head;
  const int64_t row = DIRECT ? int64_t(item.first_query + r / GROUP) * num_q_heads + head : part * ROWS + r;
  const float sink = SINKS && exists ? sinks[head] : -INFINITY;
  if (exists || !DIRECT) {
    kv::store_chunk<Q, DIRECT, Values::CHUNKS>(out, row, c, all, top, total, sink);
  }
}
