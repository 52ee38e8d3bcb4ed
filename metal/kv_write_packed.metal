// Quantizes new tokens and stores them in place: one plane of 8 or 4 bits, see kv_write for why it is a whole kernel.
//
// Thread (c, h, t) has elements 4 c .. 4 c + 3 of KV head h of token t. The grid is DIM / 4 wide, and so is a
// threadgroup: the lanes of a group of elements are neighbours in one simdgroup.

// x: [T, Hk, DIM] in any type and with any strides (token, head, element). layout: offset, block, slot and head stride
// of the words, then of scales and biases alike. VECTORS, slots: as in kv_write.
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
