/* The C side of the CPU kernels: what the Cython face hands over, and what an instruction set provides.
 *
 * Nothing here checks an argument: the face (`_kernels.pyx`) has done it. Offsets and sizes are int64_t, strides count
 * elements. docs/backends.md says what is computed.
 */
#ifndef KVCPU_H
#define KVCPU_H

#include <stddef.h>
#include <stdint.h>

/* KV_F8 (e4m3) is an element of a pool only. KV_U8 and KV_U4 are quantized elements in a plane, see kv_stored. */
typedef enum { KV_F32 = 0, KV_F16 = 1, KV_BF16 = 2, KV_U8 = 3, KV_U4 = 4, KV_F8 = 5 } kv_dtype;

static inline int64_t kv_bits(kv_dtype dtype) {
    return dtype == KV_F32 ? 32 : dtype == KV_U8 || dtype == KV_F8 ? 8 : dtype == KV_U4 ? 4 : 16;
}
/* Bytes that a stride counts: of a float, or of a word of quantized elements. */
static inline int64_t kv_itemsize(kv_dtype dtype) {
    return dtype == KV_F16 || dtype == KV_BF16 ? 2 : dtype == KV_F8 ? 1 : 4;
}

/* Scales or biases of a plane, in the dtype of the layer: those of (block, slot, head) begin at element
 * block * block_stride + slot * slot_stride + head * head_stride of `base`. */
typedef struct {
    char *base;
    int64_t block_stride, slot_stride, head_stride;
} kv_part;

/* One plane of one layer: element (block, slot, head, d) is element
 * block * block_stride + slot * slot_stride + head * head_stride + d of `base`. Where bits is not 0, words of uint32
 * are elements: a head has dim * bits / 32 of them, the first of its numbers in the lowest bits of the first one, and
 * for each group_size numbers a scale and a bias. All 0 for a plane of floats. */
typedef struct {
    char *base;
    int64_t block_stride, slot_stride, head_stride;
    int64_t dim;
    int64_t bits, group_size;
    kv_part scales, biases;
} kv_plane;

typedef struct {
    kv_plane k, v;
    kv_dtype dtype;
    int64_t num_blocks, block_size, num_kv_heads;
} kv_layer;

static inline kv_dtype kv_stored(const kv_layer *layer, const kv_plane *plane) {
    return plane->bits == 0 ? layer->dtype : plane->bits == 8 ? KV_U8 : KV_U4;
}
static inline int64_t kv_groups(const kv_plane *plane) { return plane->bits == 0 ? 0 : plane->dim / plane->group_size; }

/* Tokens outside the pool, [T, heads, dim]: k and v to be written, queries, results. Strides may be negative or 0. */
typedef struct {
    char *base;
    kv_dtype dtype;
    int64_t token_stride, head_stride, dim_stride;
} kv_tokens;

typedef enum { KV_NO_SCORES = 0, KV_RAW = 1, KV_MASS = 2 } kv_score_kind;

/* What the newest query of each row makes of every position. Entry (row, KV head, c) of `out` is element
 * row * row_stride + head * head_stride + c, c < columns. The rest is of KV_MASS and lies in kv_attend's scratch: */
typedef struct {
    kv_score_kind kind;
    float *out;
    int64_t row_stride, head_stride, columns;
    float *lanes;              /* per row [num_q_heads, kv_score_stride], from first_lane[row] on */
    const int64_t *first_lane; /* [num_rows] */
    float *largest, *share;    /* [num_rows, num_q_heads]: exp(s - largest) * share is a head's part of the mean */
} kv_scores;

/* Floats between the query heads of a row in `lanes`. */
static inline int64_t kv_score_stride(int64_t seq_len) { return (seq_len + 15) / 16 * 16; }

/* What a caller of a long call asks now and then, on its own thread: whether to end it. */
typedef int (*kv_ask)(void);

typedef struct {
    const kv_layer *layer;
    kv_tokens q, out;
    int64_t num_rows, num_tokens, num_q_heads;
    const int32_t *tables; /* [num_rows, ...], row i begins at tables + i * table_stride */
    int64_t table_stride;
    const int64_t *seq_lens; /* [num_rows] */
    const int64_t *cu_q_lens; /* [num_rows + 1] */
    float scale;
    float soft_cap;      /* 0: none */
    int64_t window;      /* INT64_MAX: none */
    const float *sinks;  /* [num_q_heads] or NULL */
    const float *slopes; /* [num_q_heads] or NULL */
    const float *mask;   /* NULL: none; entry (t, h, c) at t * mask_token_stride + h * mask_head_stride + c */
    int64_t mask_token_stride, mask_head_stride;
    kv_scores scores;
    kv_ask ask;          /* NULL: never */
} kv_attention;

/* Bytes that kv_attend wants as scratch for this call: at most proportional to the batch, never to the pool. */
typedef struct kv_isa kv_isa;
int64_t kv_attend_scratch_nbytes(const kv_isa *isa, const kv_attention *call, int num_threads);
/* scratch 64-byte aligned; returns 1 if `ask` ended it, and then some results are missing */
int kv_attend(const kv_isa *isa, const kv_attention *call, void *scratch, int num_threads);

/* slots[t] = block * block_size + offset, negative: skip. */
void kv_write(const kv_isa *isa, const kv_layer *layer, const kv_tokens *k, const kv_tokens *v, const int64_t *slots,
              int64_t num_tokens, int num_threads);
/* copies: [num_copies, 3] rows of (src, dst, num_tokens); no dst is a src. */
void kv_copy_blocks(const kv_layer *layers, int64_t num_layers, const int64_t *copies, int64_t num_copies,
                    int num_threads);
/* Position j of the sequence in `blocks` becomes its old position keep[(layer * num_kv_heads + head) * num_kept + j],
 * which ascends, in all stored planes. */
void kv_compact(const kv_layer *layers, int64_t num_layers, const int64_t *blocks, const int64_t *keep,
                int64_t num_kept, int num_threads);
/* k and v: in the dtype of the pool, or, of quantized planes and of KV_F8, any. */
void kv_gather(const kv_isa *isa, const kv_layer *layer, const int64_t *blocks, int64_t num_tokens, const kv_tokens *k,
               const kv_tokens *v, int num_threads);
/* What is done to whole blocks. data: [num_blocks, block_nbytes] in the portable order: layer, stored plane, position,
 * head, element. */
typedef enum { KV_ZERO, KV_EXPORT, KV_IMPORT } kv_task;
void kv_blocks(kv_task task, const kv_layer *layers, int64_t num_layers, const int64_t *blocks, int64_t num_blocks,
               char *data, int num_threads);

/* The yardstick: reads every byte once with the widest loads of the instruction set and adds them up as floats. */
float kv_read_sum(const kv_isa *isa, const char *bytes, int64_t nbytes, int num_threads);

/* -------- threads (threads.c): one set of workers per process -------- */

typedef void (*kv_work)(void *context, int64_t item, int thread);
/* Calls work(context, item, thread) once for each item 0 .. num_items - 1, in any order, on at most num_threads
 * threads, the caller among them (thread 0); returns 0 when all are done, or 1 when `ask` said so (NULL: nobody is
 * asked) and no item is being worked on any more. When another call has the workers, the caller works alone. */
int kv_parallel(kv_work work, void *context, int64_t num_items, int num_threads, kv_ask ask);

/* -------- instruction sets (dispatch.c) -------- */

int kv_isa_count(void);
const kv_isa *kv_isa_at(int index); /* those that this machine has, best last */
const char *kv_isa_name(const kv_isa *isa);
/* What suits a decode, whatever the type and the group of heads: tokens of a tile; of these the keys, and the queries,
 * that meet in registers; vectors of values of each query; the layout of a pool for which nobody has chosen one. */
typedef struct { int tokens, keys, queries, vectors; const char *layout; } kv_tiling;
kv_tiling kv_isa_tiling(const kv_isa *isa);

#endif
