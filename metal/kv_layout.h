// How K and V lie in a pool, and how a simdgroup reads them. Shared by all kernels.
//
// Element (block, slot, head, d) of a plane is element offset + block * block_stride + slot * slot_stride +
// head * head_stride + d of its array, all of it 64-bit. A row is the `dim` elements of one (slot, head).
//
// Rows are read in chunks of four elements. The 32 lanes of a simdgroup take 32 neighbouring chunks in one access: a
// whole row, or two rows of up to 16 chunks. Where rows touch each other but do not end at a cache line, several rows
// are read as one run of memory and handed out by shuffles, so that no line is asked for twice.
#ifndef KV_LAYOUT_H
#define KV_LAYOUT_H

// Arrays that loops index must stay in registers, so those loops are unrolled whatever their size.
#define KV_UNROLL _Pragma("clang loop unroll(full)")
#define KV_CONST static constant constexpr const

namespace kv {

KV_CONST float LOG2E = 1.44269504088896340736f;

template <typename T>
using Chunk = metal::vec<T, 4>;

// The rows of one head in a plane.
struct Head {
  int64_t first, block_stride, slot_stride;

  // Elements from the beginning of the array to a row.
  METAL_FUNC int64_t row(int64_t block, int64_t slot) const {
    return first + block * block_stride + slot * slot_stride;
  }
};

// layout: offset, block, slot and head stride of a plane. Small arrays lie in another address space than large ones,
// so the type of a pointer to one is a template argument.
template <typename Layout>
METAL_FUNC Head head_of(Layout layout, int64_t head) {
  return Head{layout[0] + head * layout[3], layout[1], layout[2]};
}

template <int DIM>
METAL_FUNC constexpr int chunks_per_row() {
  return DIM / 4;
}

template <int DIM>
METAL_FUNC constexpr int lanes_per_row() {
  return chunks_per_row<DIM>() <= 16 ? 16 : 32;
}

// Rows that one access of a simdgroup covers.
template <int DIM>
METAL_FUNC constexpr int rows_per_access() {
  return 32 / lanes_per_row<DIM>();
}

// Chunks of one row that a lane holds.
template <int DIM>
METAL_FUNC constexpr int chunks_per_lane() {
  return (chunks_per_row<DIM>() + 31) / 32;
}

// Rows that a lane holds chunks of at a time: as many as 8 registers hold.
template <typename T, int DIM>
METAL_FUNC constexpr int rows_per_lane() {
  return 8 / int(chunks_per_lane<DIM>() * sizeof(T));
}

// Whether rows are read as one run of memory: those that touch and end inside a cache line. So many as a lane holds at
// a time end at a line.
template <typename T, int DIM, bool TOUCHING>
METAL_FUNC constexpr bool in_runs() {
  return TOUCHING && DIM * sizeof(T) % 128 != 0 && chunks_per_row<DIM>() > 16 && chunks_per_row<DIM>() <= 32 &&
         chunks_per_row<DIM>() % 4 == 0;
}

// One head of a plane: its array, and where its rows lie in there.
template <typename T>
struct Plane {
  const device T* pool;
  Head head;
};

// Rows of a plane as a simdgroup reads them. Lane i holds PER_LANE chunks of each row a * ROWS + i / LANES: those that
// chunk_of(i, j) names. Chunks outside the row and rows that were not asked for are 0. BITS is 0 for elements of type
// T; kv_packed.h has the rows of 8 and 4 bits, which have the same members.
template <typename T, int DIM, bool TOUCHING, int BITS, int SIZE>
struct Rows;

template <typename T, int DIM, bool TOUCHING, int SIZE>
struct Rows<T, DIM, TOUCHING, 0, SIZE> {
  KV_CONST int CHUNKS = chunks_per_row<DIM>();
  KV_CONST int LANES = lanes_per_row<DIM>();
  KV_CONST int ROWS = rows_per_access<DIM>();
  KV_CONST int PER_LANE = chunks_per_lane<DIM>();
  KV_CONST int ACCESSES = rows_per_lane<T, DIM>();
  KV_CONST int STEP = ACCESSES * ROWS;  // rows in all

  Chunk<T> chunk[ACCESSES][PER_LANE];

  static METAL_FUNC int chunk_of(int lane, int j) {
    return lane % LANES + 32 * j;
  }

  // Reads rows begin <= row < end, counted from a slot of a block.
  METAL_FUNC void load(Plane<T> plane, int64_t block, int64_t slot, int begin, int end, int lane) {
    const device T* first = plane.pool + plane.head.row(block, slot);
    if (in_runs<T, DIM, TOUCHING>()) {
      load_run(first, begin, end, lane);
    } else if (begin <= 0 && end >= STEP) {
      load_rows<true>(first, plane.head.slot_stride, begin, end, lane);
    } else {
      load_rows<false>(first, plane.head.slot_stride, begin, end, lane);
    }
  }

  template <bool ALL>
  METAL_FUNC void load_rows(const device T* first, int64_t stride, int begin, int end, int lane) {
    KV_UNROLL
    for (int a = 0; a < ACCESSES; a++) {
      const int row = a * ROWS + lane / LANES;
      const device Chunk<T>* chunks = reinterpret_cast<const device Chunk<T>*>(first + row * stride);
      KV_UNROLL
      for (int j = 0; j < PER_LANE; j++) {
        const int c = chunk_of(lane, j);
        chunk[a][j] = Chunk<T>(T(0));
        if (c < CHUNKS && (ALL || (row >= begin && row < end))) {
          chunk[a][j] = chunks[c];
        }
      }
    }
  }

  METAL_FUNC void load_run(const device T* first, int begin, int end, int lane) {
    constexpr int READS = (ACCESSES * CHUNKS + 31) / 32;
    using Words = metal::vec<uint, sizeof(Chunk<T>) / 4>;  // what every simdgroup function takes
    const device Chunk<T>* chunks = reinterpret_cast<const device Chunk<T>*>(first);
    Words read[READS];
    KV_UNROLL
    for (int i = 0; i < READS; i++) {
      const int row = (32 * i + lane) / CHUNKS;
      read[i] = Words(0);
      if (row >= begin && row < end && row < ACCESSES) {
        read[i] = as_type<Words>(chunks[32 * i + lane]);
      }
    }
    KV_UNROLL
    for (int a = 0; a < ACCESSES; a++) {
      // The row begins in lane `cut` of one read and goes on in the next one.
      const int at = a * CHUNKS / 32, cut = a * CHUNKS % 32;
      const Words begin_of_row = read[at], end_of_row = read[at + 1 < READS ? at + 1 : at];
      const Words mine = lane >= cut ? begin_of_row : end_of_row;
      const Words words = metal::simd_shuffle(mine, ushort((cut + lane) % 32));
      chunk[a][0] = lane < CHUNKS ? as_type<Chunk<T>>(words) : Chunk<T>(T(0));
    }
  }

  // Only packed rows have factors, which lanes share, and need the sum of a query's elements.
  METAL_FUNC int factors(int, int) const {
    return 0;
  }

  // The product of a lane's elements of a row with those of a query.
  template <typename Q>
  METAL_FUNC float product(int a, thread Chunk<Q> (&query)[PER_LANE], float, int) const {
    float sum = 0.0f;
    KV_UNROLL
    for (int j = 0; j < PER_LANE; j++) {
      sum += metal::dot(float4(query[j]), float4(chunk[a][j]));
    }
    return sum;
  }

  METAL_FUNC float4 floats(int a, int j, int) const {
    return float4(chunk[a][j]);
  }
};

// 32 tokens of a context, of which a simdgroup reads those from `skipped` to `num_tokens`. Lane i holds the block of
// token i: an entry of the table is read once, and none that belongs to no token.
struct Tile {
  int begin, skipped, num_tokens, block_of_lane;

  METAL_FUNC bool has(int token) const {
    return token >= skipped && token < num_tokens;
  }
};

// table: of the row of the batch. Nothing is read of a tile behind `seen_end`.
template <int BLOCK_SIZE, typename Table>
METAL_FUNC Tile tile_at(Table table, int begin, int seen_begin, int seen_end, int lane) {
  const int skipped = metal::max(0, seen_begin - begin), num_tokens = metal::min(32, seen_end - begin);
  const bool owned = lane >= skipped / BLOCK_SIZE * BLOCK_SIZE && lane < num_tokens;
  return Tile{begin, skipped, num_tokens, owned ? table[(begin + lane) / BLOCK_SIZE] : 0};
}

// Reads rows of a tile from token t on.
template <int BLOCK_SIZE, typename R, typename P>
METAL_FUNC void load(thread R& rows, P plane, Tile tile, int t, int lane) {
  const int64_t block = metal::simd_shuffle(tile.block_of_lane, ushort(t % 32));
  rows.load(plane, block, (tile.begin + t) % BLOCK_SIZE, tile.skipped - t, tile.num_tokens - t, lane);
}

// One step of sums over lanes: lanes whose `bit` is clear get those of `x`, the others those of `y`.
METAL_FUNC float transpose(float x, float y, int bit, int lane) {
  const bool odd = (lane & bit) != 0;
  return (odd ? y : x) + metal::simd_shuffle_xor(odd ? x : y, ushort(bit));
}

// Weights of a softmax: the largest score may be -INFINITY, where nothing has been seen. Only the difference is taken
// to base 2: a score may be the largest float, and times log2(e) it would be infinite.
METAL_FUNC float weight(float score, float largest) {
  return largest == -INFINITY ? 0.0f : metal::fast::exp2((score - largest) * LOG2E);
}

// Whether one of four floats is NaN or infinite; of their bits, because compilers may take floats for finite.
METAL_FUNC bool any_not_finite(float4 x) {
  bool found = false;
  KV_UNROLL
  for (int e = 0; e < 4; e++) {
    found = found || (as_type<uint>(x[e]) & 0x7f800000u) == 0x7f800000u;
  }
  return found;
}

// A finished row: the attention sink joins as one more score of value 0. `values` and `sum` are relative to
// `largest`.
METAL_FUNC float4 finish(float4 values, float largest, float sum, float sink) {
  const float top = metal::max(largest, sink);
  const float denominator = sum * weight(largest, top) + weight(sink, top);
  return denominator == 0.0f ? float4(0.0f) : values * (weight(largest, top) / denominator);
}

}  // namespace kv

#endif
