// Contexts of one plane as `[B, Hk, C, DIM]`, the order that MLX's attention takes without another copy.
//
// Thread (c, i, h) copies elements 4 c .. 4 c + 3 of token i % C of row i / C of the batch and KV head h. Positions
// past the end of a row are 0.
//
// Template   T, DIM, BLOCK_SIZE
// Inputs     pool              base array
//            layout            int64 [4]: offset, block, slot and head stride
//            tables            int32 [B, W]
//            seq_lens          int32 [B]
// Output     out               T [B, Hk, C, DIM]

constexpr int CHUNKS = DIM / 4;
const int c = thread_position_in_grid.x;
const int context = threads_per_grid.y / seq_lens_shape[0];
const int batch_row = thread_position_in_grid.y / context;
const int token = thread_position_in_grid.y % context;
const int head = thread_position_in_grid.z;

kv::Chunk<T> chunk = kv::Chunk<T>(T(0));
if (token < seq_lens[batch_row]) {
  const int64_t block = tables[batch_row * tables_strides[0] + token / BLOCK_SIZE];
  const int64_t row = kv::head_of(layout, head).row(block, token % BLOCK_SIZE);
  chunk = reinterpret_cast<const device kv::Chunk<T>*>(pool + row)[c];
}
const int64_t row = (int64_t(batch_row) * threads_per_grid.z + head) * context + token;
reinterpret_cast<device kv::Chunk<T>*>(out)[row * CHUNKS + c] = chunk;
