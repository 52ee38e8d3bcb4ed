// Planes as fragments of 8x8 matrices. Behind kv_layout.h.
//
// A lane has two neighbours of a row of a fragment: those of its `Place`, as Apple's GPUs spread them, or NVIDIA's. It
// reads a chunk of four elements of a row of the plane at once, which gives two fragments their pairs. So column j of
// fragment f of a unit of 16 elements is element 4 * (j / 2) + 2 * f + j % 2. Products over all elements are the same
// in every order, and a lane's results are chunks of four again.
#ifndef KV_MATRIX_H
#define KV_MATRIX_H

#include <metal_simdgroup_matrix>

namespace kv {

struct Place {
  int row, column;
};

#ifdef KV_CUDA_H
METAL_FUNC Place place_of(int lane) {
  return Place{lane / 4, lane % 4 * 2};
}

METAL_FUNC ushort lane_of_row(int row, int lane) {
  return ushort(4 * row + lane % 4);
}
#else
METAL_FUNC Place place_of(int lane) {
  return Place{(lane >> 2 & 4) | (lane >> 1 & 3), (lane >> 1 & 4) | (lane << 1 & 2)};
}

// The lane that has this row of a fragment where `lane` has another.
METAL_FUNC ushort lane_of_row(int row, int lane) {
  return ushort((lane & 9) | (row & 4) << 2 | (row & 3) << 1);
}
#endif

// Elements of fragments: floats where a compiler multiplies none of 16 bits with these.
template <typename E, bool WIDEN>
struct Fragment {
  using Element = E;
};

template <typename E>
struct Fragment<E, true> {
  using Element = float;
};

template <bool WIDEN, typename E>
METAL_FUNC metal::simdgroup_matrix<typename Fragment<E, WIDEN>::Element, 8, 8> fragment_of(Chunk<E> chunk, int f) {
  using Element = typename Fragment<E, WIDEN>::Element;
  metal::simdgroup_matrix<Element, 8, 8> made;
  made.thread_elements()[0] = Element(chunk[2 * f]);
  made.thread_elements()[1] = Element(chunk[2 * f + 1]);
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

// Reads a tile of 32 tokens. A lane has the row of token 8 i + `row` in columns[i].
template <int BLOCK_SIZE, typename C, typename P>
METAL_FUNC void load_columns(thread C (&columns)[4], P plane, Tile tile, int row, int first) {
  KV_UNROLL
  for (int i = 0; i < 4; i++) {
    const int t = 8 * i + row;
    const int64_t block = metal::simd_shuffle(tile.block_of_lane, ushort(t));
    columns[i].load(plane, block, (tile.begin + t) % BLOCK_SIZE, first, t >= tile.skipped && t < tile.num_tokens);
  }
}

// The products of a simdgroup's elements of 32 tokens with those of all queries: `WIDTH` floats of each query's row.
template <int TILES, int UNITS, int WIDTH, bool WIDEN, typename C, typename Q>
METAL_FUNC void multiply(thread C (&keys)[4], thread metal::simdgroup_matrix<Q, 8, 8> (&query)[TILES][UNITS][2],
                         threadgroup float* products, Place place) {
  KV_UNROLL
  for (int i = 0; i < 4; i++) {
    metal::simdgroup_float8x8 scores[TILES];  // transposed
    KV_UNROLL
    for (int m = 0; m < TILES; m++) {
      scores[m] = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    KV_UNROLL
    for (int u = 0; u < UNITS; u++) {
      const auto elements = keys[i].elements(u);
      KV_UNROLL
      for (int f = 0; f < 2; f++) {
        auto key = fragment_of<WIDEN>(elements, f);
        KV_UNROLL
        for (int m = 0; m < TILES; m++) {
          metal::simdgroup_multiply_accumulate(scores[m], key, query[m][u][f], scores[m]);
        }
      }
    }
    KV_UNROLL
    for (int m = 0; m < TILES; m++) {
      KV_UNROLL
      for (int e = 0; e < 2; e++) {
        products[(8 * m + place.column + e) * WIDTH + 8 * i + place.row] = scores[m].thread_elements()[e];
      }
    }
  }
}

// Returns the plane whose rows are both keys and values. That is the first one if both have one type. Without latents
// no code uses the result.
template <typename P>
METAL_FUNC P latents_of(P latents, P) {
  return latents;
}

template <typename K, typename V>
METAL_FUNC V latents_of(K, V values) {
  return values;
}

}  // namespace kv

#endif
