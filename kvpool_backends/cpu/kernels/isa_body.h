/* The templates, compiled for the instruction set that the including isa_NAME.c has set, and their table. */
#include "isa.h"

#include "simd.h"

#include "read_sum.h"

#if __has_include("decode.h")
#include "decode.h"
#endif
#if __has_include("chunk.h")
#include "chunk.h"
#endif
#if __has_include("move.h")
#include "move.h"
#endif

const kv_isa KV_NAME(kv_isa) = {
    .name = KV_ISA_NAME,
    .is_supported = KV_NAME(is_supported),
#if __has_include("decode.h")
    .decode_scratch_floats = decode_scratch_floats,
    .partial_floats = partial_floats,
    .decode_part = decode_part,
    .decode_merge = decode_merge,
#endif
#if __has_include("chunk.h")
    .chunk_queries = chunk_queries,
    .chunk_scratch_floats = chunk_scratch_floats,
    .chunk_tile = chunk_tile,
#endif
#if __has_include("move.h")
    .convert = convert,
#endif
    .read_sum = read_sum,
};
