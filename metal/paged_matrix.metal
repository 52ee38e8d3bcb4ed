// Attention by matrix units over a paged context: chunks of a prefill, and decode of large groups of query heads.
// Inputs, outputs and the work list are those of paged_attention.metal; the length of an item's run is not used.
//
// Threadgroup (x, y) takes `HEADS` query heads of one KV head and item y of the work list. Its `ROWS` = QUERIES * HEADS
// rows are `TILES` times 8 rows of matrices. The elements of a head are split over the simdgroups, `UNITS` times 16 for
// each, so that K and V are read once for all rows and go from the pool into registers.
//
// The threadgroup goes through its part of the context in tiles of 32 tokens. Each simdgroup adds up its elements'
// share of the products of the tokens with all rows, and leaves it in threadgroup memory. Then the rows are shared out:
// lane i has token i of a row, brings the shares together, and makes scores and weights of them. At last each simdgroup
// adds the weighted values of its elements, which it keeps in registers to the end.
//
// Latent attention: a key is the latent, which is the `DIM` elements of the first plane, and then the `ROTARY` elements
// of the other plane. The latent is the value too, and stays in registers. The last simdgroups have the rotary parts.
//
// Template   UNITS             see above
//            WIDEN             multiply floats alone, for compilers without products of mixed types
//            ROTARY            see above; 0 where the planes are keys and values. Both planes have the same bits
//            others            as in paged_attention.metal
// Inputs     q                 [T, Hq, DIM + ROTARY]
// Output     exported          RAW: float [B, Hq, C]; else as in paged_attention.metal

constexpr int ROWS = HEADS * QUERIES;
constexpr int TILES = (ROWS + 7) / 8;
constexpr int HEAD_GROUPS = (GROUP + HEADS - 1) / HEADS;
constexpr int OWN_ROWS = (8 * TILES + SIMDGROUPS - 1) / SIMDGROUPS;  // of a simdgroup, for softmax
constexpr int WIDTH = 36;  // of 32 scores in threadgroup memory: the lanes of a fragment use each bank once
constexpr bool ALL_SEE_THE_SAME = QUERIES == 1 && !MASK;
constexpr int OWNERS = (DIM + 16 * UNITS - 1) / (16 * UNITS);  // simdgroups that have elements of `DIM`
using Keys = kv::Columns<T, DIM, UNITS, K_BITS, SIZE>;
using Values = kv::Columns<T, VALUE_DIM, UNITS, V_BITS, SIZE>;
using Rotary = kv::Columns<T, ROTARY ? ROTARY : 4, UNITS, V_BITS, SIZE>;

const int lane = thread_index_in_simdgroup;
const int simd = simdgroup_index_in_threadgroup;
const kv::Place place = kv::place_of(lane);
const bool is_rotary = ROTARY && simd >= OWNERS;
const int first_chunk = 4 * UNITS * simd;
const int rotary_chunk = first_chunk - 4 * UNITS * OWNERS;
const int end = is_rotary ? DIM + ROTARY : DIM;  // of the elements of a query that are this simdgroup's
const int kv_head = threadgroup_position_in_grid.x / HEAD_GROUPS;
const int first_head = threadgroup_position_in_grid.x % HEAD_GROUPS * HEADS;  // of the group
const int num_q_heads = threads_per_grid.x / (32 * SIMDGROUPS * HEAD_GROUPS) * GROUP;
const kv::Item item = kv::item_of(work, threadgroup_position_in_grid.y);
const int observed_query = kv::observed_query(observed, threadgroup_position_in_grid.y);

const auto k_plane = kv::plane_of(k_pool, k_scales, k_biases, layout, kv_head);
const auto v_plane = kv::plane_of(v_pool, v_scales, v_biases, layout + 4, kv_head);
const auto latents = kv::latents_of(k_plane, v_plane);
const float scale = numbers[0], soft_cap = numbers[1];
const int window_tokens = window;

using QueryElement = typename kv::Fragment<Q, WIDEN>::Element;
simdgroup_matrix<QueryElement, 8, 8> query[TILES][UNITS][2];  // transposed
simdgroup_float8x8 values[TILES][UNITS][2];
float largest = -INFINITY, sum = 0.0f;  // lane i: of row simd + SIMDGROUPS * i
KV_UNROLL
for (int m = 0; m < TILES; m++) {
  KV_UNROLL
  for (int u = 0; u < UNITS; u++) {
    KV_UNROLL
    for (int f = 0; f < 2; f++) {
      const int own = 4 * (first_chunk + Keys::chunk_of(u, place.row)) + 2 * f + place.row % 2;
      const int d = own + (is_rotary ? DIM - 16 * UNITS * OWNERS : 0);
      values[m][u][f] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      KV_UNROLL
      for (int e = 0; e < 2; e++) {
        const int r = 8 * m + place.column + e;
        const int token = r / HEADS, head = first_head + r % HEADS;
        const bool exists = token < item.num_queries && head < GROUP && r < ROWS && d < end;
        const int64_t row = int64_t(item.first_query + token) * q_strides[0] +
                            int64_t(kv_head * GROUP + head) * q_strides[1];
        query[m][u][f].thread_elements()[e] = QueryElement(exists ? q[row + d] : Q(0));
      }
    }
  }
}

threadgroup float shared_scores[SIMDGROUPS * 8 * TILES * WIDTH];
threadgroup float shared_weights[8 * TILES * WIDTH];
threadgroup float shared_corrections[8 * TILES];
threadgroup float shared_largest[8 * TILES];
threadgroup float shared_sum[8 * TILES];

const auto table = tables + item.row * tables_strides[0];
for (int begin = item.seen_begin / 32 * 32; begin < item.seen_end; begin += 32) {
  const kv::Tile tile = kv::tile_at<BLOCK_SIZE>(table, begin, item.seen_begin, item.seen_end, lane);
  threadgroup float* own_scores = shared_scores + simd * 8 * TILES * WIDTH;
  Values rows;
  if (is_rotary) {
    Rotary keys;
    kv::load_columns<BLOCK_SIZE>(keys, v_plane, tile, place, rotary_chunk, lane);
    kv::multiply<TILES, UNITS, WIDTH, WIDEN>(keys, query, own_scores, place);
  } else if (!ROTARY) {
    {
      Keys keys;
      kv::load_columns<BLOCK_SIZE>(keys, k_plane, tile, place, first_chunk, lane);
      kv::multiply<TILES, UNITS, WIDTH, WIDEN>(keys, query, own_scores, place);
    }
    // Values are on their way while the simdgroups meet and make weights.
    kv::load_columns<BLOCK_SIZE>(rows, v_plane, tile, place, first_chunk, lane);
  } else {
    kv::load_columns<BLOCK_SIZE>(rows, latents, tile, place, first_chunk, lane);
    kv::multiply<TILES, UNITS, WIDTH, WIDEN>(rows, query, own_scores, place);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const int my_token = tile.begin + lane;
  const bool seen = tile.has(lane);
  KV_UNROLL
  for (int i = 0; i < OWN_ROWS; i++) {
    const int r = simd + SIMDGROUPS * i;
    if (r < 8 * TILES) {
      const int token = item.first_query + r / HEADS, position = item.first_position + r / HEADS;
      const int head = kv_head * GROUP + first_head + r % HEADS;
      const bool exists = r < ROWS && r / HEADS < item.num_queries && first_head + r % HEADS < GROUP;
      float product = 0.0f;
      KV_UNROLL
      for (int s = 0; s < SIMDGROUPS; s++) {
        product += shared_scores[(s * 8 * TILES + r) * WIDTH + lane];
      }
      float score = product * scale;
      bool is_visible = exists && seen && my_token <= position && my_token > position - window_tokens;
      const int64_t masked = MASK ? token * mask_strides[0] + (mask_shape[1] == 1 ? 0 : head * mask_strides[1]) +
                                        my_token * mask_strides[2]
                                  : 0;
      is_visible = kv::see<SOFT_CAP, ALIBI, MASK>(score, is_visible, soft_cap, slopes + head,
                                                        my_token - position, mask + masked);
      if ((RAW || MASS) && r / HEADS == observed_query && exists && seen) {
        const int64_t row = int64_t(item.row) * num_q_heads + head;
        kv::store(exported, row * columns + my_token, is_visible ? score : RAW ? 0.0f : -INFINITY);
      }
      score = is_visible ? score : -INFINITY;
      const float before = simd_shuffle(largest, ushort(i));
      const float top = max(before, simd_max(score));
      const float correction = kv::weight(before, top);
      const float w = kv::weight(score, top);
      const float total = simd_sum(w);
      shared_weights[r * WIDTH + lane] = w;
      if (lane == 0) {
        shared_corrections[r] = correction;
      }
      if (lane == i) {
        largest = top;
        sum = sum * correction + total;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  if (!is_rotary) {
    KV_UNROLL
    for (int m = 0; m < TILES; m++) {
      const float correction = shared_corrections[8 * m + place.row];
      KV_UNROLL
      for (int u = 0; u < UNITS; u++) {
        KV_UNROLL
        for (int f = 0; f < 2; f++) {
          values[m][u][f].thread_elements()[0] *= correction;
          values[m][u][f].thread_elements()[1] *= correction;
        }
      }
    }
    KV_UNROLL
    for (int i = 0; i < 4; i++) {
      const auto factors = rows.factors(8 * i + place.row);
      bool finite = true;
      KV_UNROLL
      for (int u = 0; u < UNITS && !ALL_SEE_THE_SAME; u++) {
        finite = finite && !kv::any_not_finite(float4(rows.elements(i, u, factors)));
      }
      if (ALL_SEE_THE_SAME || simd_all(finite)) {
        simdgroup_float8x8 weights[TILES];
        KV_UNROLL
        for (int m = 0; m < TILES; m++) {
          simdgroup_load(weights[m], shared_weights + 8 * m * WIDTH + 8 * i, WIDTH);
        }
        KV_UNROLL
        for (int u = 0; u < UNITS; u++) {
          const auto elements = rows.elements(i, u, factors);
          KV_UNROLL
          for (int f = 0; f < 2; f++) {
            auto value = kv::fragment_of<WIDEN>(elements, f);
            KV_UNROLL
            for (int m = 0; m < TILES; m++) {
              simdgroup_multiply_accumulate(values[m][u][f], weights[m], value, values[m][u][f]);
            }
          }
        }
      } else {
        // 0 times infinity must not come in where a row does not see a token: token by token, and only what is seen.
        for (int t = 0; t < 8; t++) {
          KV_UNROLL
          for (int u = 0; u < UNITS; u++) {
            const float4 elements = simd_shuffle(float4(rows.elements(i, u, factors)), kv::lane_of_row(t, lane));
            KV_UNROLL
            for (int m = 0; m < TILES; m++) {
              const float w = shared_weights[(8 * m + place.row) * WIDTH + 8 * i + t];
              KV_UNROLL
              for (int e = 0; e < 4; e++) {
                if (w != 0.0f) {
                  values[m][u][e / 2].thread_elements()[e % 2] += w * elements[e];
                }
              }
            }
          }
        }
      }
    }
  }
}

const int mine = simd + SIMDGROUPS * lane;
if (mine < 8 * TILES) {
  shared_largest[mine] = largest;
  shared_sum[mine] = sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
KV_UNROLL
for (int m = 0; m < TILES; m++) {
  const int r = 8 * m + place.row;
  const int head = kv_head * GROUP + first_head + r % HEADS;
  const bool exists = r / HEADS < item.num_queries && first_head + r % HEADS < GROUP;
  const int64_t row = DIRECT ? int64_t(item.first_query + r / HEADS) * num_q_heads + head
                             : (int64_t(threadgroup_position_in_grid.y) * threadgroups_per_grid.x +
                                threadgroup_position_in_grid.x) * ROWS + r;
  const float sink = SINKS && exists ? sinks[head] : -INFINITY;
  KV_UNROLL
  for (int u = 0; u < UNITS; u++) {
    const int c = first_chunk + Values::chunk_of(u, place.column);
    const auto left = values[m][u][0].thread_elements(), right = values[m][u][1].thread_elements();
    if (r < ROWS && c < kv::chunks_per_row<VALUE_DIM>() && (exists || !DIRECT)) {
      kv::store_chunk<Q, DIRECT, kv::chunks_per_row<VALUE_DIM>()>(
          out, row, c, float4(left[0], left[1], right[0], right[1]), shared_largest[r], shared_sum[r], sink);
    }
  }
}
