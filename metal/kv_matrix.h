// Planes as fragments of 8x8 matrices. Behind kv_layout.h.
//
// A lane has two neighbours of a row of a fragment: those of its `Place`, as Apple's GPUs spread them. It reads a chunk
// of four elements of a row of the plane at once, which gives two fragments their pairs. So column j of fragment f of a
// unit of 16 elements is element 4 * (j / 2) + 2 * f + j % 2. Products over all elements are the same in every order,
// and a lane's results are chunks of four again.
#ifndef KV_MATRIX_H
#define KV_MATRIX_H

#include <metal_simdgroup_matrix>

namespace kv {

struct Place {
  int row, column;
};

METAL_FUNC Place place_of(int lane) {
  return Place{(lane >> 2 & 4) | (lane >> 1 & 3), (lane >> 1 & 4) | (lane << 1 & 2)};
}

// The lane that has this row of a fragment where `lane` has another.
METAL_FUNC ushort lane_of_row(int row, int lane) {
  return ushort((lane & 9) | (row & 4) << 2 | (row & 3) << 1);
}

template <typename E>
METAL_FUNC metal::simdgroup_matrix<E, 8, 8> fragment(Chunk<E> chunk, int f) {
  metal::simdgroup_matrix<E, 8, 8> made;
  made.thread_elements()[0] = chunk[2 * f];
  made.thread_elements()[1] = chunk[2 * f + 1];
  return made;
}

// `UNITS` units of 16 elements of 8 rows. A lane has a chunk of each unit, of one row, which begins with chunk `first`;
// what is outside the plane is 0.
template <typename T, int DIM, int UNITS, int BITS, int SIZE>
struct Columns;

template <typename T, int DIM, int UNITS, int SIZE>
struct Columns<T, DIM, UNITS, 0, SIZE> {
  Chunk<T> chunk[UNITS];

  METAL_FUNC void load(Plane<T> plane, int64_t block, int64_t slot, int first, bool exists) {
    const device Chunk<T>* chunks = reinterpret_cast<const device Chunk<T>*>(plane.pool + plane.head.row(block, slot));
    load_units<DIM>(chunk, chunks, first, exists);
  }

  METAL_FUNC Chunk<T> elements(int u) const {
    return chunk[u];
  }
};

// Reads the row of token t of a tile, which is another one for each row of a fragment.
template <int BLOCK_SIZE, typename C, typename P>
METAL_FUNC void load_columns(thread C& columns, P plane, Tile tile, int t, int first) {
  const int64_t block = metal::simd_shuffle(tile.block_of_lane, ushort(t));
  columns.load(plane, block, (tile.begin + t) % BLOCK_SIZE, first, t >= tile.skipped && t < tile.num_tokens);
}

}  // namespace kv

#endif
