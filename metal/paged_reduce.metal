// Brings the parts of `paged_attention` together, in order.
//
// Thread (c, h, t) makes elements 4 c .. 4 c + 3 of query head h of token t.
//
// Template   Q, VALUE_DIM, GROUP, HEADS, QUERIES, SINKS   as in paged_attention
// Inputs     partials          its output, float [N, X, ROWS, VALUE_DIM + 4]
//            parts             int32 [T, 3]: row of the token inside its items, first item, number of items
//            sinks             float [Hq]
// Output     out               Q [T, Hq, VALUE_DIM]

constexpr int CHUNKS = VALUE_DIM / 4;
constexpr int ROWS = HEADS * QUERIES;
constexpr int HEAD_GROUPS = (GROUP + HEADS - 1) / HEADS;

const int c = thread_position_in_grid.x;
const int head = thread_position_in_grid.y;
const int token = thread_position_in_grid.z;
const int num_groups = threads_per_grid.y / GROUP * HEAD_GROUPS;
const int group = head / GROUP * HEAD_GROUPS + head % GROUP / HEADS;
const int row = parts[3 * token] * HEADS + head % GROUP % HEADS;
const int64_t first_item = parts[3 * token + 1];
const int num_items = parts[3 * token + 2];

const device float4* partial =
    reinterpret_cast<const device float4*>(partials) + ((first_item * num_groups + group) * ROWS + row) * (CHUNKS + 1);
const int64_t stride = int64_t(num_groups) * ROWS * (CHUNKS + 1);

float top = -INFINITY;
for (int i = 0; i < num_items; i++) {
  top = max(top, partial[i * stride + CHUNKS][0]);
}
float total = 0.0f;
float4 all = float4(0.0f);
for (int i = 0; i < num_items; i++) {
  const float4 end = partial[i * stride + CHUNKS];
  const float w = kv::weight(end[0], top);
  total += w * end[1];
  all += w * partial[i * stride + c];
}
const float sink = SINKS ? sinks[head] * kv::LOG2E : -INFINITY;
reinterpret_cast<device kv::Chunk<Q>*>(out)[(int64_t(token) * threads_per_grid.y + head) * CHUNKS + c] =
    kv::Chunk<Q>(kv::finish(all, top, total, sink));
