/* An instruction set: one table of functions, made by one isa_NAME.c from the same templates. */
#ifndef KV_ISA_H
#define KV_ISA_H

#include "kvcpu.h"

/* Where the quantized numbers of one token and head are. */
typedef struct {
    char *words, *scales, *biases;
    kv_dtype dtype; /* of scales and biases */
    int64_t bits, group_size; /* 0 bits: floats of `dtype`, only `words` is used */
} kv_packed;

/* Of all heads of one token: those of the first, the bytes from one to the next, and the floats to be stored. */
typedef struct {
    const char *src;
    kv_packed first;
    int64_t heads, words_step, scales_step, biases_step;
} kv_packed_heads;

/* Where the numbers of a token of a plane are. */
static inline kv_packed packed_at(const kv_layer *layer, const kv_plane *plane, int64_t block, int64_t slot,
                                  int64_t head) {
    const kv_part *scales = &plane->scales, *biases = &plane->biases;
    const int64_t size = kv_itemsize(layer->dtype);
    return (kv_packed){
        .words = plane->base
            + (block * plane->block_stride + slot * plane->slot_stride + head * plane->head_stride)
                * kv_itemsize(kv_stored(layer, plane)),
        .scales = scales->base
            + (block * scales->block_stride + slot * scales->slot_stride + head * scales->head_stride) * size,
        .biases = biases->base
            + (block * biases->block_stride + slot * biases->slot_stride + head * biases->head_stride) * size,
        .dtype = layer->dtype, .bits = plane->bits, .group_size = plane->group_size,
    };
}

struct kv_isa {
    const char *name;
    int (*is_supported)(void);
    kv_tiling tiling;

    /* Decode and short windows of queries (decode.h). A part is tokens [begin, end) of the context of `row`. Its result
     * goes to `partial` (partial_floats of them), or, when that is NULL, finished to `call->out`. With `scores_alone`
     * it is the scores of the newest query, for rows that go by chunk_tile: `partial` is not NULL, and is combined
     * where the kind is KV_MASS. */
    int64_t (*decode_scratch_floats)(const kv_attention *call, int64_t num_queries);
    int64_t (*partial_floats)(const kv_attention *call, int64_t num_queries, int scores_alone);
    void (*decode_part)(const kv_attention *call, int64_t row, int scores_alone, int64_t begin, int64_t end,
                        float *scratch, float *partial);
    /* Combines partials, which lie one after the other, in order, and writes the row's part of `call->out`. */
    void (*decode_merge)(const kv_attention *call, int64_t row, int scores_alone, const float *partials,
                         int64_t num_partials, float *scratch);
    /* What `call->scores.lanes` holds of tokens [begin, end) becomes `call->scores.out` (scores.h). */
    void (*mass_part)(const kv_attention *call, int64_t row, int64_t begin, int64_t end);

    /* Tiles of queries of long chunks (chunk.h). A tile is queries [first_query, first_query + num_queries) of `row`
     * for all query heads of `kv_head`; first_query is a multiple of chunk_queries, num_queries at most that. */
    int64_t (*chunk_queries)(const kv_attention *call);
    int64_t (*chunk_scratch_floats)(const kv_attention *call);
    void (*chunk_tile)(const kv_attention *call, int64_t row, int64_t kv_head, int64_t first_query, int64_t num_queries,
                       float *scratch);

    /* n elements, rounded to nearest even, to dst without gaps (move.h). */
    void (*convert)(char *dst, kv_dtype to, const char *src, kv_dtype from, int64_t src_stride_elements, int64_t n);

    /* n numbers of each head of some tokens to packed words (quantize.h), and those of one head back to floats. */
    void (*quantize)(const kv_packed_heads *to, int64_t num_tokens, kv_dtype from, int64_t src_head_stride,
                     int64_t src_stride, int64_t n);
    void (*dequantize)(const kv_packed *from, char *dst, kv_dtype to, int64_t dst_stride, int64_t n);

    float (*read_sum)(const char *bytes, int64_t nbytes); /* read_sum.h */
};

#endif
