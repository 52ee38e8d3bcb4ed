/* The templates, compiled for the instruction set that the including isa_NAME.c has set, and their table. */
#include "isa.h"

#include "simd.h"

#if defined(KV_ONE_COPY)
#pragma GCC optimize("Os")
#endif

#include "read_sum.h"

#include "dequantize.h"

#include "decode.h"

#include "scores.h"

#include "chunk.h"

#include "move.h"

#include "quantize.h"

const kv_isa KV_NAME(kv_isa) = {
    .name = KV_ISA_NAME,
    .is_supported = KV_NAME(is_supported),
    .tiling = {TILE, TOKENS, LANES, ARE_REGISTERS_MANY ? 4 : 2, LAYOUT},
    .decode_scratch_floats = decode_scratch_floats,
    .partial_floats = partial_floats,
    .decode_part = decode_part,
    .decode_merge = decode_merge,
    .mass_part = mass_part,
    .chunk_queries = chunk_queries,
    .chunk_scratch_floats = chunk_scratch_floats,
    .chunk_tile = chunk_tile,
    .convert = convert,
    .quantize = quantize,
    .dequantize = dequantize,
    .read_sum = read_sum,
};
