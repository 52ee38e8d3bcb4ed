// Copies the first positions of blocks inside one plane, in place: copy-on-write. See kv_write for why it is a whole
// kernel.
//
// Thread (c, i, n) copies elements 4 c .. 4 c + 3 of head i % Hk at position i / Hk of copy n, for Hk * BLOCK_SIZE
// values of i; with WIDTH 1 element c, for scales and biases of packed planes, of which a row need not have four. No
// block is both read and written.

// layout: offset, block, slot and head stride. copies: [K, 3], rows of source, destination, number of positions.
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
