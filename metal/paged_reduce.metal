// Brings the parts of `paged_attention` or `paged_matrix` together. Threadgroup (x, h, t): query head h of token t.
//
// Simdgroup s takes parts s, s + SIMDGROUPS, ..., lane i elements 4 i .. 4 i + 3 of them, and so on from 4 (i + 32).
//
// Template   Q, VALUE_DIM, GROUP, HEADS, QUERIES, SINKS   as in paged_attention
//            SIMDGROUPS        of this threadgroup
// Inputs     partials          its output, float [N, X, ROWS, VALUE_DIM + 4]
//            parts             int32 [T, 3]: row of the token inside its items, first item, number of items
//            sinks             float [Hq]
// Output     out               Q [T, Hq, VALUE_DIM]

constexpr int CHUNKS = VALUE_DIM / 4;
constexpr int PER_LANE = (CHUNKS + 31) / 32;
constexpr int ROWS = HEADS * QUERIES;
constexpr int HEAD_GROUPS = (GROUP + HEADS - 1) / HEADS;

const int lane = thread_index_in_simdgroup;
const int simd = simdgroup_index_in_threadgroup;
const int head = threadgroup_position_in_grid.y;
const int token = threadgroup_position_in_grid.z;
const int num_q_heads = threadgroups_per_grid.y;
const int num_groups = num_q_heads / GROUP * HEAD_GROUPS;
const int group = head / GROUP * HEAD_GROUPS + head % GROUP / HEADS;
const int row = parts[3 * token] * HEADS + head % GROUP % HEADS;
const int64_t first_item = parts[3 * token + 1];
const int num_items = parts[3 * token + 2];

const device float4* partial =
    reinterpret_cast<const device float4*>(partials) + ((first_item * num_groups + group) * ROWS + row) * (CHUNKS + 1);
const int64_t stride = int64_t(num_groups) * ROWS * (CHUNKS + 1);

float top = -INFINITY;
for (int i = lane; i < num_items; i += 32) {
  top = max(top, partial[i * stride + CHUNKS][0]);
}
top = simd_max(top);

float total = 0.0f;
float4 all[PER_LANE];
KV_UNROLL
for (int j = 0; j < PER_LANE; j++) {
  all[j] = float4(0.0f);
}
for (int i = simd; i < num_items; i += SIMDGROUPS) {
  const float4 end = partial[i * stride + CHUNKS];
  const float w = kv::weight(end[0], top);
  total += w * end[1];
  KV_UNROLL
  for (int j = 0; j < PER_LANE; j++) {
    if (lane + 32 * j < CHUNKS) {
      all[j] += w * partial[i * stride + lane + 32 * j];
    }
  }
}

threadgroup float4 shared_values[SIMDGROUPS * CHUNKS];
threadgroup float shared_sum[SIMDGROUPS];
KV_UNROLL
for (int j = 0; j < PER_LANE; j++) {
  if (lane + 32 * j < CHUNKS) {
    shared_values[simd * CHUNKS + lane + 32 * j] = all[j];
  }
}
if (lane == 0) {
  shared_sum[simd] = total;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const float sink = SINKS ? sinks[head] : -INFINITY;
for (int c = simd * 32 + lane; c < CHUNKS; c += 32 * SIMDGROUPS) {
  float4 values = float4(0.0f);
  float sum = 0.0f;
  for (int s = 0; s < SIMDGROUPS; s++) {
    values += shared_values[s * CHUNKS + c];
    sum += shared_sum[s];
  }
  reinterpret_cast<device kv::Chunk<Q>*>(out)[(int64_t(token) * num_q_heads + head) * CHUNKS + c] =
      kv::Chunk<Q>(kv::finish(values, top, sum, sink));
}
