// Stores the K and V of new tokens in place: decode's append and the chunks of a prefill.
//
// MLX's own way to run a kernel gives it fresh outputs only, so this one is a whole kernel, for who dispatches it
// with the pool's buffers bound for writing. Thread (c, h, t) stores elements 4 c .. 4 c + 3 of KV head h of token t,
// in K and in V. The grid is as wide as the wider of the two.

// One plane: x [T, Hk, DIM] in any type and with any strides. VECTORS: rows of x are runs of elements and begin where
// a chunk may begin.
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

// layout: offset, block, slot and head stride of K, then of V. strides: token, head and element stride of k, then of
// v. A slot is block * BLOCK_SIZE + position; a negative one is skipped.
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
