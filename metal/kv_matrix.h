// Planes as fragments of 8x8 matrices. Behind kv_layout.h.
//
// A lane has two neighbours of a row of a fragment: those of its `Place`, as Apple's GPUs spread them, or NVIDIA's. It
// reads a chunk of four elements of a row of the plane at once, which gives two fragments their pairs. So column j of
// fragment f of unit u is element 4 * chunk_of(u, j) + 2 * f + j % 2. Products over all elements are the same in every
// order, and a lane's results are chunks of four again.
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

// `UNITS` units of 16 elements of a tile's rows, from chunk `first` of the plane on. A lane has a chunk of each unit of
// four rows, those of tokens 8 i + its `Place`'s row; what is outside the plane is 0.
template <typename T, int DIM, int UNITS, int BITS, int SIZE>
struct Columns;

template <typename T, int DIM, int UNITS, int SIZE>
struct Columns<T, DIM, UNITS, 0, SIZE> {
  Chunk<T> chunk[4][UNITS];

  // The chunk of unit u that lanes of this column have, counted from `first`.
  static METAL_FUNC int chunk_of(int u, int column) {
    return 4 * u + column / 2;
  }

  METAL_FUNC void load(int i, Plane<T> plane, int64_t block, int64_t slot, int first, int column, bool exists) {
    const device Chunk<T>* chunks = reinterpret_cast<const device Chunk<T>*>(plane.pool + plane.head.row(block, slot));
    KV_UNROLL
    for (int u = 0; u < UNITS; u++) {
      const int c = first + chunk_of(u, column);
      chunk[i][u] = Chunk<T>(T(0));
      if (exists && c < chunks_per_row<DIM>()) {
        chunk[i][u] = chunks[c];
      }
    }
  }

  // Only packed planes have factors: a lane reads those of one token, and gets those of others from their lanes.
  METAL_FUNC void load_factors(Plane<T>, int64_t, int64_t, int, bool) {}

  METAL_FUNC int factors(int) const {
    return 0;
  }

  METAL_FUNC Chunk<T> elements(int i, int u, int) const {
    return chunk[i][u];
  }
};

// Reads a tile of 32 tokens.
template <int BLOCK_SIZE, typename C, typename P>
METAL_FUNC void load_columns(thread C& columns, P plane, Tile tile, Place place, int first, int lane) {
  KV_UNROLL
  for (int i = 0; i < 4; i++) {
    const int t = 8 * i + place.row;
    const int64_t block = metal::simd_shuffle(tile.block_of_lane, ushort(t));
    columns.load(i, plane, block, (tile.begin + t) % BLOCK_SIZE, first, place.column, tile.has(t));
  }
  columns.load_factors(plane, tile.block_of_lane, (tile.begin + lane) % BLOCK_SIZE, first, tile.has(lane));
}

// The products of a simdgroup's elements of 32 tokens with those of all queries: `WIDTH` floats of each query's row.
template <int TILES, int UNITS, int WIDTH, bool WIDEN, typename C, typename Q>
METAL_FUNC void multiply(thread C& keys, thread metal::simdgroup_matrix<Q, 8, 8> (&query)[TILES][UNITS][2],
                         threadgroup float* products, Place place) {
  KV_UNROLL
  for (int i = 0; i < 4; i++) {
    const auto factors = keys.factors(8 * i + place.row);
    metal::simdgroup_float8x8 scores[TILES];  // transposed
    KV_UNROLL
    for (int m = 0; m < TILES; m++) {
      scores[m] = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    KV_UNROLL
    for (int u = 0; u < UNITS; u++) {
      const auto elements = keys.elements(i, u, factors);
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
