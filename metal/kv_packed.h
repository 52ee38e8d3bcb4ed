// Planes of 8 or 4 bits: how groups of elements become numbers, scale and bias, and how a simdgroup reads them. Behind
// kv_layout.h, behind kv_matrix.h where a kernel has that, in front of the kernels that need it.
//
// A plane is three: words of 32 bits, of which the first element has the lowest bits, scales and biases. Chunk c of a
// row, its elements 4 c .. 4 c + 3, is BITS / 2 bytes; `SIZE` elements, SIZE / 4 chunks, have a scale and a bias.
#ifndef KV_PACKED_H
#define KV_PACKED_H

namespace kv {

// Four numbers as they are stored.
template <int BITS>
using PackedChunk = metal::vec<uchar, BITS / 2>;

METAL_FUNC float4 numbers(metal::vec<uchar, 4> bytes) {
  return float4(bytes);
}

METAL_FUNC float4 numbers(metal::vec<uchar, 2> bytes) {
  return float4(bytes[0] & 15, bytes[0] >> 4, bytes[1] & 15, bytes[1] >> 4);
}

METAL_FUNC void pack(float4 x, thread metal::vec<uchar, 4>& bytes) {
  bytes = metal::vec<uchar, 4>(uchar(x[0]), uchar(x[1]), uchar(x[2]), uchar(x[3]));
}

METAL_FUNC void pack(float4 x, thread metal::vec<uchar, 2>& bytes) {
  bytes = metal::vec<uchar, 2>(uchar(int(x[0]) | int(x[1]) << 4), uchar(int(x[2]) | int(x[3]) << 4));
}

// What a lane has of a group: four numbers, and the group's scale and bias.
template <int BITS>
struct Quantized {
  PackedChunk<BITS> chunk;
  float scale, bias;
};

// Quantizes groups of `SIZE` elements, four in a lane, as mx.quantize does it. Neighbouring lanes hold a group, and the
// first of them is a multiple of SIZE / 4. All lanes of the simdgroup that have not returned come here.
template <int BITS, int SIZE>
METAL_FUNC Quantized<BITS> quantize(float4 x) {
  constexpr float MOST = BITS == 8 ? 255.0f : 15.0f;
  float low = metal::min(metal::min(x[0], x[1]), metal::min(x[2], x[3]));
  float high = metal::max(metal::max(x[0], x[1]), metal::max(x[2], x[3]));
  uint bad = any_not_finite(x) ? 1u : 0u;
  KV_UNROLL
  for (int distance = SIZE / 8; distance > 0; distance /= 2) {
    low = metal::min(low, metal::simd_shuffle_xor(low, ushort(distance)));
    high = metal::max(high, metal::simd_shuffle_xor(high, ushort(distance)));
    bad |= metal::simd_shuffle_xor(bad, ushort(distance));
  }
  Quantized<BITS> result;
  if (bad != 0) {
    result.chunk = PackedChunk<BITS>(uchar(0));
    result.scale = result.bias = as_type<float>(0x7fc00000u);
    return result;
  }
  const bool below = metal::abs(low) > metal::abs(high);
  const float edge = below ? low : high;
  const float step = metal::max((high - low) / MOST, 1e-7f);
  const float signed_step = below ? step : -step;
  const float whole = metal::rint(edge / signed_step);
  result.scale = whole == 0.0f ? signed_step : edge / whole;
  result.bias = whole == 0.0f ? 0.0f : edge;
  float4 steps;
  KV_UNROLL
  for (int e = 0; e < 4; e++) {
    steps[e] = metal::min(metal::max(metal::rint((x[e] - result.bias) / result.scale), 0.0f), MOST);
  }
  pack(steps, result.chunk);
  return result;
}

// Scale and bias of a group.
template <typename T>
using Factors = metal::vec<T, 2>;

// One head of a packed plane: its arrays, where its words lie in the first, its scales and biases in the others.
template <typename T>
struct PackedPlane {
  const device uint* words;
  const device T* scales;
  const device T* biases;
  Head head, factors;

  METAL_FUNC Factors<T> factors_at(int64_t block, int64_t slot, int group) const {
    const int64_t at = factors.row(block, slot) + group;
    return metal::vec<T, 2>(scales[at], biases[at]);
  }
};

// layout: that of the words; scales and biases have theirs 8 numbers behind it, behind the words of K and V.
template <typename T, typename Layout>
METAL_FUNC PackedPlane<T> plane_of(const device uint* words, const device T* scales, const device T* biases,
                                   Layout layout, int64_t head) {
  return PackedPlane<T>{words, scales, biases, head_of(layout, head), head_of(layout + 8, head)};
}

// Eight numbers as they are stored, and four of them. Those of 4 bits are not shifted, but divided.
template <int BITS>
struct Eight {
  using Words = metal::vec<uint, 2>;
};

template <>
struct Eight<4> {
  using Words = metal::vec<ushort, 2>;
};

METAL_FUNC float4 numbers(metal::vec<uint, 2> words, int j) {
  return float4(as_type<metal::vec<uchar, 4>>(words[j]));
}

METAL_FUNC float4 numbers(metal::vec<ushort, 2> words, int j) {
  const ushort x = words[j];
  return float4(x & 0x000f, x & 0x00f0, x & 0x0f00, x & 0xf000) * float4(1.0f, 1.0f / 16, 1.0f / 256, 1.0f / 4096);
}

// Scale and bias as what every simdgroup function takes.
template <int SIZE>
struct Bits {
  using Type = uint;
};

template <>
struct Bits<8> {
  using Type = metal::vec<uint, 2>;
};

// Those that another lane has read: each lane reads some, because all together cost one access as well.
template <typename T>
METAL_FUNC Factors<T> factors_of(Factors<T> read, int lane) {
  using Shuffled = typename Bits<sizeof(Factors<T>)>::Type;
  return as_type<Factors<T>>(metal::simd_shuffle(as_type<Shuffled>(read), ushort(lane)));
}

template <typename T>
METAL_FUNC float4 floats_of(Factors<T> factors, float4 numbers) {
  return float(factors[0]) * numbers + float(factors[1]);
}

// Rows of 8 or 4 bits. A lane has eight neighbouring elements of a row, which share a scale and a bias. They are never
// made a plane of floats. Of two neighbours, which have the same group, each reads the factors of one row.
template <typename T, int DIM, bool TOUCHING, int BITS, int SIZE>
struct Rows {
  KV_CONST int CHUNKS = chunks_per_row<DIM>();
  KV_CONST int LANES = CHUNKS <= 16 ? 8 : CHUNKS <= 32 ? 16 : 32;
  KV_CONST int ROWS = 32 / LANES;
  KV_CONST int PER_LANE = 2;
  KV_CONST int ACCESSES = 2;
  KV_CONST int STEP = ACCESSES * ROWS;
  using Words = typename Eight<BITS>::Words;

  Words words[ACCESSES];
  Factors<T> read;

  static METAL_FUNC int chunk_of(int lane, int j) {
    return 2 * (lane % LANES) + j;
  }

  // Reads rows begin <= row < end, counted from a slot of a block.
  METAL_FUNC void load(PackedPlane<T> plane, int64_t block, int64_t slot, int begin, int end, int lane) {
    if (begin <= 0 && end >= STEP) {
      load_rows<true>(plane, block, slot, begin, end, lane);
    } else {
      load_rows<false>(plane, block, slot, begin, end, lane);
    }
  }

  template <bool ALL>
  METAL_FUNC void load_rows(PackedPlane<T> plane, int64_t block, int64_t slot, int begin, int end, int lane) {
    const device uint* first = plane.words + plane.head.row(block, slot);
    const int c = chunk_of(lane, 0);
    KV_UNROLL
    for (int a = 0; a < ACCESSES; a++) {
      const int row = a * ROWS + lane / LANES;
      words[a] = Words(0);
      if (c < CHUNKS && (ALL || (row >= begin && row < end))) {
        words[a] = reinterpret_cast<const device Words*>(first + row * plane.head.slot_stride)[c / 2];
      }
    }
    const int row = lane % ACCESSES * ROWS + lane / LANES;
    read = Factors<T>(T(0));
    if (c < CHUNKS && (ALL || (row >= begin && row < end))) {
      read = plane.factors_at(block, slot + row, 4 * c / SIZE);
    }
  }

  METAL_FUNC Factors<T> factors(int a, int lane) const {
    return factors_of(read, lane / ACCESSES * ACCESSES + a);
  }

  // See kv_layout.h: numbers are multiplied, scale and bias come in once.
  template <typename Q>
  METAL_FUNC float product(int a, thread Chunk<Q> (&query)[PER_LANE], float sum_of_query, Factors<T> factors) const {
    float sum = 0.0f;
    KV_UNROLL
    for (int j = 0; j < PER_LANE; j++) {
      sum += metal::dot(float4(query[j]), numbers(words[a], j));
    }
    return float(factors[0]) * sum + float(factors[1]) * sum_of_query;
  }

  METAL_FUNC float4 floats(int a, int j, Factors<T> factors) const {
    return floats_of(factors, numbers(words[a], j));
  }
};

// What kv_matrix.h has of a plane, of packed rows: floats, made where they are used. A lane has eight neighbouring
// elements of each pair of units, and has read the factors of one token of the tile.
template <typename T, int DIM, int UNITS, int BITS, int SIZE>
struct Columns {
  KV_CONST int GROUPS = 16 * UNITS <= SIZE ? 1 : 16 * UNITS / SIZE;
  static_assert(UNITS % 2 == 0, "packed elements are read in pairs of units");

  typename Eight<BITS>::Words words[4][UNITS / 2];
  Factors<T> read[GROUPS];

  struct Shared {
    Factors<T> of[GROUPS];
  };

  static METAL_FUNC int chunk_of(int u, int column) {
    return u / 2 * 8 + column / 2 * 2 + u % 2;
  }

  METAL_FUNC void load(int i, PackedPlane<T> plane, int64_t block, int64_t slot, int first, int column, bool exists) {
    const device uint* row = plane.words + plane.head.row(block, slot);
    KV_UNROLL
    for (int u = 0; u < UNITS; u += 2) {
      const int c = first + chunk_of(u, column);
      words[i][u / 2] = typename Eight<BITS>::Words(0);
      if (exists && c < chunks_per_row<DIM>()) {
        words[i][u / 2] = reinterpret_cast<const device typename Eight<BITS>::Words*>(row)[c / 2];
      }
    }
  }

  METAL_FUNC void load_factors(PackedPlane<T> plane, int64_t block, int64_t slot, int first, bool exists) {
    KV_UNROLL
    for (int g = 0; g < GROUPS; g++) {
      const int c = first + g * SIZE / 4;
      read[g] = Factors<T>(T(0));
      if (exists && c < chunks_per_row<DIM>()) {
        read[g] = plane.factors_at(block, slot, 4 * c / SIZE);
      }
    }
  }

  METAL_FUNC Shared factors(int token) const {
    Shared shared;
    KV_UNROLL
    for (int g = 0; g < GROUPS; g++) {
      shared.of[g] = factors_of(read[g], token);
    }
    return shared;
  }

  METAL_FUNC float4 elements(int i, int u, Shared factors) const {
    return floats_of(factors.of[16 * u / SIZE % GROUPS], numbers(words[i][u / 2], u % 2));
  }
};

}  // namespace kv

#endif
