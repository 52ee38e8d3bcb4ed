// The kernels that move tokens and blocks: into a pool, inside of it, and out of it. A line of four dashes begins each,
// `metal_kernels.source_text` takes one by its name.
//
// MLX's own way to run a kernel gives it fresh outputs only, so `kv_write`, `kv_write_packed` and `copy_blocks` are
// whole kernels, for who dispatches them with the pool's buffers bound for writing. The others are bodies.
//
// Thread (c, h, t) has elements 4 c .. 4 c + 3 of KV head h of token t, unless a kernel says otherwise.
//
// x                 [T, Hk, DIM] in any type and with any strides: token, head, element
// layout            offset, block, slot and head stride of a plane
// slots             block * BLOCK_SIZE + position; a negative one is skipped
// VECTORS           rows of x are runs of elements and begin where a chunk may begin
// T                 type of a plane, or of scales and biases of a packed one, to which elements are rounded first
// DIM, BITS, SIZE   head dimension, bits of an element, elements that have a scale and a bias

// ---- kv_write
// Stores the K and V of new tokens in place: decode's append and the chunks of a prefill. The grid is as wide as the
// wider of the two. layout and strides are those of K, then of V.
template <typename T, typename X, int DIM, bool VECTORS>
METAL_FUNC void kv_store(device T* pool, const device X* x, int64_t to, int64_t from, int64_t element_stride, int c) {
  if (c >= kv::chunks_per_row<DIM>()) {
    return;
  }
  kv::Chunk<X> chunk;
  if (VECTORS) {
    chunk = reinterpret_cast<const device kv::Chunk<X>*>(x + from)[c];
  } else {
    KV_UNROLL
    for (int e = 0; e < 4; e++) {
      chunk[e] = x[from + (4 * c + e) * element_stride];
    }
  }
  reinterpret_cast<device kv::Chunk<T>*>(pool + to)[c] = kv::Chunk<T>(float4(chunk));
}

template <typename T, typename X, int DIM, int VALUE_DIM, int BLOCK_SIZE, int VECTORS>
[[kernel]] void kv_write(device T* k_pool [[buffer(0)]],
                         device T* v_pool [[buffer(1)]],
                         const device X* k [[buffer(2)]],
                         const device X* v [[buffer(3)]],
                         const device int64_t* slots [[buffer(4)]],
                         const constant int64_t* layout [[buffer(5)]],
                         const constant int64_t* strides [[buffer(6)]],
                         uint3 thread_position [[thread_position_in_grid]]) {
  const int c = thread_position.x;
  const int64_t head = thread_position.y, token = thread_position.z;
  const int64_t slot = slots[token];
  if (slot < 0) {
    return;
  }
  const int64_t block = slot / BLOCK_SIZE, position = slot % BLOCK_SIZE;
  const int64_t to_k = kv::head_of(layout, head).row(block, position);
  const int64_t to_v = kv::head_of(layout + 4, head).row(block, position);
  kv_store<T, X, DIM, VECTORS>(k_pool, k, to_k, token * strides[0] + head * strides[1], strides[2], c);
  kv_store<T, X, VALUE_DIM, VECTORS>(v_pool, v, to_v, token * strides[3] + head * strides[4], strides[5], c);
}

// ---- kv_write_packed
// Quantizes new tokens and stores them in place: one plane of 8 or 4 bits. The grid is DIM / 4 wide, and so is a
// threadgroup: the lanes of a group of elements are neighbours in one simdgroup. layout is that of the words, then of
// scales and biases alike.
template <typename T, typename X, int DIM, int BLOCK_SIZE, int VECTORS, int BITS, int SIZE>
[[kernel]] void kv_write_packed(device uint* words [[buffer(0)]],
                                device T* scales [[buffer(1)]],
                                device T* biases [[buffer(2)]],
                                const device X* x [[buffer(3)]],
                                const device int64_t* slots [[buffer(4)]],
                                const constant int64_t* layout [[buffer(5)]],
                                const constant int64_t* strides [[buffer(6)]],
                                uint3 thread_position [[thread_position_in_grid]]) {
  const int c = thread_position.x;
  const int64_t head = thread_position.y, token = thread_position.z;
  const int64_t slot = slots[token];
  if (slot < 0) {
    return;
  }
  const int64_t from = token * strides[0] + head * strides[1];
  kv::Chunk<X> chunk;
  if (VECTORS) {
    chunk = reinterpret_cast<const device kv::Chunk<X>*>(x + from)[c];
  } else {
    KV_UNROLL
    for (int e = 0; e < 4; e++) {
      chunk[e] = x[from + (4 * c + e) * strides[2]];
    }
  }
  const kv::Quantized<BITS> made = kv::quantize<BITS, SIZE>(float4(kv::Chunk<T>(float4(chunk))));
  const int64_t block = slot / BLOCK_SIZE, position = slot % BLOCK_SIZE;
  const int64_t to = kv::head_of(layout, head).row(block, position);
  reinterpret_cast<device kv::PackedChunk<BITS>*>(words + to)[c] = made.chunk;
  if (4 * c % SIZE == 0) {
    const int64_t factor = kv::head_of(layout + 4, head).row(block, position) + 4 * c / SIZE;
    scales[factor] = T(made.scale);
    biases[factor] = T(made.bias);
  }
}

// ---- copy_blocks
// Copies the first positions of blocks inside one plane, in place: copy-on-write. No block is both read and written.
//
// Thread (c, i, n) copies elements 4 c .. 4 c + 3 of head i % Hk at position i / Hk of copy n, for Hk * BLOCK_SIZE
// values of i; with WIDTH 1 element c, for scales and biases of packed planes, of which a row need not have four.
// copies: [K, 3], rows of source, destination, number of positions.
template <typename T, int BLOCK_SIZE, int WIDTH = 4>
[[kernel]] void copy_blocks(device T* pool [[buffer(0)]],
                            const device int* copies [[buffer(1)]],
                            const constant int64_t* layout [[buffer(2)]],
                            uint3 thread_position [[thread_position_in_grid]],
                            uint3 grid [[threads_per_grid]]) {
  const int num_heads = grid.y / BLOCK_SIZE;
  const int64_t head = thread_position.y % num_heads, slot = thread_position.y / num_heads;
  const device int* copy = copies + 3 * int64_t(thread_position.z);
  if (slot >= copy[2]) {
    return;
  }
  const kv::Head rows = kv::head_of(layout, head);
  const int64_t from = rows.row(copy[0], slot), to = rows.row(copy[1], slot);
  if (WIDTH == 1) {
    pool[to + thread_position.x] = pool[from + thread_position.x];
    return;
  }
  reinterpret_cast<device kv::Chunk<T>*>(pool + to)[thread_position.x] =
      reinterpret_cast<const device kv::Chunk<T>*>(pool + from)[thread_position.x];
}

// ---- packed_tokens
// New tokens as words, scales and biases, side by side: what `kv_write_packed` stores, for who brings it into the pool
// by other means. A threadgroup is DIM / 4 wide. words: [T, Hk, DIM * BITS / 32]. scales, biases: [T, Hk, DIM / SIZE].
const int c = thread_position_in_grid.x;
const int64_t head = thread_position_in_grid.y, token = thread_position_in_grid.z;
const int64_t from = token * x_strides[0] + head * x_strides[1];
kv::Chunk<T> chunk;
KV_UNROLL
for (int e = 0; e < 4; e++) {
  chunk[e] = T(float(x[from + (4 * c + e) * x_strides[2]]));
}
const kv::Quantized<BITS> made = kv::quantize<BITS, SIZE>(float4(chunk));
const int64_t row = token * threads_per_grid.y + head;
reinterpret_cast<device kv::PackedChunk<BITS>*>(words)[row * (DIM / 4) + c] = made.chunk;
if (4 * c % SIZE == 0) {
  scales[row * (DIM / SIZE) + 4 * c / SIZE] = T(made.scale);
  biases[row * (DIM / SIZE) + 4 * c / SIZE] = T(made.bias);
}

// ---- gather_blocks
// Contexts of one plane as `[B, Hk, C, DIM]`, the order that MLX's attention takes without another copy.
//
// Thread (c, i, h) copies elements 4 c .. 4 c + 3 of token i % C of row i / C of the batch and KV head h. Positions
// past the end of a row are 0. tables: int32 [B, W]. seq_lens: int32 [B].
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

// ---- gather_packed
// The same of a packed plane, dequantized on the way. layout is that of the words, then of scales and biases alike.
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
