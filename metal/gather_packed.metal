// Contexts of one packed plane as floats `[B, Hk, C, DIM]`: `gather_blocks`, dequantized on the way.
//
// Template   T, DIM, BLOCK_SIZE, BITS, SIZE   SIZE elements have a scale and a bias
// Inputs     words, scales, biases   base arrays
//            layout            int64 [8]: offset, block, slot and head stride of the words, then of the others
//            tables, seq_lens  as in gather_blocks
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
  const int64_t factor = kv::head_of(layout + 4, head).row(block, token % BLOCK_SIZE) + 4 * c / SIZE;
  const float4 numbers = kv::numbers(reinterpret_cast<const device kv::PackedChunk<BITS>*>(words + row)[c]);
  chunk = kv::Chunk<T>(float(scales[factor]) * numbers + float(biases[factor]));
}
const int64_t row = (int64_t(batch_row) * threads_per_grid.z + head) * context + token;
reinterpret_cast<device kv::Chunk<T>*>(out)[row * CHUNKS + c] = chunk;
