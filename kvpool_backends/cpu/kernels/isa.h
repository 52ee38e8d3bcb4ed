/* An instruction set: one table of functions, made by one isa_NAME.c from the same templates. */
#ifndef KV_ISA_H
#define KV_ISA_H

#include "kvcpu.h"

struct kv_isa {
    const char *name;
    int (*is_supported)(void);

    /* Decode and short windows of queries (decode.h). A part is tokens [begin, end) of the context of `row`. Its result
     * goes to `partial` (partial_floats of them), or, when that is NULL, finished to `call->out`. */
    int64_t (*decode_scratch_floats)(const kv_attention *call, int64_t num_queries);
    int64_t (*partial_floats)(const kv_attention *call, int64_t num_queries);
    void (*decode_part)(const kv_attention *call, int64_t row, int64_t begin, int64_t end, float *scratch,
                        float *partial);
    /* Combines partials, which lie one after the other, in order, and writes the row's part of `call->out`. */
    void (*decode_merge)(const kv_attention *call, int64_t row, const float *partials, int64_t num_partials,
                         float *scratch);

    /* Scores of the newest query of rows that go by chunk_tile (scores.h): parts as above, with partials of
     * score_floats, which score_merge combines where the kind is KV_MASS. Then for all rows mass_part: what
     * `call->scores.lanes` holds of tokens [begin, end) becomes `call->scores.out`. */
    int64_t (*score_floats)(const kv_attention *call);
    void (*score_part)(const kv_attention *call, int64_t row, int64_t begin, int64_t end, float *scratch,
                       float *partial);
    void (*score_merge)(const kv_attention *call, int64_t row, const float *partials, int64_t num_partials,
                        float *scratch);
    void (*mass_part)(const kv_attention *call, int64_t row, int64_t begin, int64_t end);

    /* Tiles of queries of long chunks (chunk.h). A tile is queries [first_query, first_query + num_queries) of `row`
     * for all query heads of `kv_head`; first_query is a multiple of chunk_queries, num_queries at most that. */
    int64_t (*chunk_queries)(const kv_attention *call);
    int64_t (*chunk_scratch_floats)(const kv_attention *call);
    void (*chunk_tile)(const kv_attention *call, int64_t row, int64_t kv_head, int64_t first_query, int64_t num_queries,
                       float *scratch);

    /* n elements, rounded to nearest even, to dst without gaps (move.h). */
    void (*convert)(char *dst, kv_dtype to, const char *src, kv_dtype from, int64_t src_stride_elements, int64_t n);

    float (*read_sum)(const char *bytes, int64_t nbytes); /* read_sum.h */
};

#endif
