// New tokens as words, scales and biases, side by side: what `kv_write_packed` stores, for who brings it into the pool
// by other means.
//
// Thread (c, h, t) has elements 4 c .. 4 c + 3 of KV head h of token t; a threadgroup is DIM / 4 wide.
//
// Template   T                 type of scales and biases, to which elements are rounded first
//            DIM, BITS, SIZE   head dimension, bits of an element, elements of a group
// Inputs     x                 [T, Hk, DIM] in any type and with any strides
// Output     words             uint [T, Hk, DIM * BITS / 32]
//            scales, biases    T [T, Hk, DIM / SIZE]

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
