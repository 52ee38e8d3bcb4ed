/* Bytes in and out of blocks: writes, copies, gathers, zeros, export and import, in every layout. */
#include <string.h>

#include "isa.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "exported blocks are little-endian, and so is every machine that these kernels know"
#endif

/* What one thread should have to do at least: less is not worth waking another one. */
enum { ITEM_NBYTES = 64 * 1024 };

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static char *token_at(const kv_plane *plane, int64_t block, int64_t offset, int64_t itemsize) {
    return plane->base + (block * plane->block_stride + offset * plane->slot_stride) * itemsize;
}

/* -------- boxes of bytes -------- */

typedef struct { int64_t count, dst, src; } axis; /* repetitions, and the bytes from one to the next */

/* An axis whose steps are whole runs on both sides only makes the runs longer. */
static int64_t merge(axis *along, int64_t run) {
    if (along->count > 1 && (along->dst != run || along->src != run)) return run;
    run *= along->count;
    along->count = 1;
    return run;
}

static void copy_box(char *dst, const char *src, axis tokens, axis heads, axis elements, int64_t itemsize) {
    int64_t run = merge(&elements, itemsize);
    if (elements.count == 1) {
        run = merge(&heads, run);
        run = merge(&tokens, run);
        run = merge(&heads, run); /* head-major: the tokens of a head are one run, perhaps the heads then too */
    }
    for (int64_t t = 0; t < tokens.count; t++)
        for (int64_t h = 0; h < heads.count; h++) {
            char *to = dst + t * tokens.dst + h * heads.dst;
            const char *from = src + t * tokens.src + h * heads.src;
            for (int64_t e = 0; e < elements.count; e++)
                memcpy(to + e * elements.dst, from + e * elements.src, (size_t)run);
        }
}

static void zero_box(char *dst, axis tokens, axis heads, int64_t run) {
    run = merge(&heads, run);
    run = merge(&tokens, run);
    run = merge(&heads, run);
    for (int64_t t = 0; t < tokens.count; t++)
        for (int64_t h = 0; h < heads.count; h++) memset(dst + t * tokens.dst + h * heads.dst, 0, (size_t)run);
}

/* A stored plane: keys or values, their words, scales or biases. All in bytes. */
typedef struct {
    char *base;
    int64_t block, slot, head, run; /* steps, and what a token has of a head */
} piece;

enum { MOST_PIECES = 6 };

static int plane_pieces(const kv_layer *layer, const kv_plane *plane, piece *out) {
    const int64_t size = kv_itemsize(kv_stored(layer, plane)), dim = plane->dim;
    const int64_t run = plane->bits == 0 ? dim * size : dim * plane->bits / 8;
    out[0] = (piece){plane->base, plane->block_stride * size, plane->slot_stride * size, plane->head_stride * size,
                     run};
    if (plane->bits == 0) return 1;
    for (int i = 0; i < 2; i++) {
        const kv_part *part = i ? &plane->biases : &plane->scales;
        const int64_t step = kv_itemsize(layer->dtype);
        out[1 + i] = (piece){part->base, part->block_stride * step, part->slot_stride * step, part->head_stride * step,
                             kv_groups(plane) * step};
    }
    return 3;
}

/* In the order of an export. */
static int layer_pieces(const kv_layer *layer, piece *out) {
    const int count = plane_pieces(layer, &layer->k, out);
    return count + plane_pieces(layer, &layer->v, out + count);
}

/* -------- sweeps: some blocks, all layers and planes -------- */

typedef struct sweep sweep;
struct sweep {
    void (*visit)(const sweep *job, const kv_layer *layer, int index, int64_t row);
    const kv_layer *layers;
    const int64_t *rows; /* of block ids, or of (src, dst, num_tokens) */
    kv_task task;
    char *data;          /* what is exported or imported */
    int64_t num_rows, num_pieces; /* num_pieces: of a layer */
    int64_t at[MOST_PIECES];      /* where a piece begins in what a row of `data` has of a layer */
    int64_t layer_nbytes, row_nbytes; /* of a row of `data` */
    int64_t num_visits, visits_per_item;
};

/* Visits go row by row within a piece: the memory of one plane lies together. */
static void sweep_item(void *context, int64_t item, int thread) {
    const sweep *job = context;
    (void)thread;
    const int64_t end = smaller(job->num_visits, (item + 1) * job->visits_per_item);
    for (int64_t i = item * job->visits_per_item; i < end; i++) {
        const int64_t plane = i / job->num_rows;
        job->visit(job, job->layers + plane / job->num_pieces, (int)(plane % job->num_pieces), i % job->num_rows);
    }
}

static void run_sweep(sweep job, int64_t num_layers, int num_threads) {
    const kv_layer *layer = job.layers;
    piece pieces[MOST_PIECES];
    if (job.num_rows == 0) return;
    job.num_pieces = layer_pieces(layer, pieces);
    for (int i = 0; i < job.num_pieces; i++) {
        job.at[i] = job.layer_nbytes;
        job.layer_nbytes += layer->block_size * layer->num_kv_heads * pieces[i].run;
    }
    job.row_nbytes = num_layers * job.layer_nbytes;
    job.num_visits = job.num_rows * num_layers * job.num_pieces;
    job.visits_per_item = larger(1, ITEM_NBYTES / larger(1, job.layer_nbytes / job.num_pieces));
    kv_parallel(sweep_item, &job, (job.num_visits + job.visits_per_item - 1) / job.visits_per_item, num_threads, NULL);
}

static axis bytes_of(const piece *p) { return (axis){p->run, 1, 1}; }

static void copy_visit(const sweep *job, const kv_layer *layer, int index, int64_t row) {
    const int64_t *copy = job->rows + 3 * row;
    piece pieces[MOST_PIECES], *p = &pieces[index];
    layer_pieces(layer, pieces);
    const axis tokens = {copy[2], p->slot, p->slot}, heads = {layer->num_kv_heads, p->head, p->head};
    copy_box(p->base + copy[1] * p->block, p->base + copy[0] * p->block, tokens, heads, bytes_of(p), 1);
}

static void zero_visit(const sweep *job, const kv_layer *layer, int index, int64_t row) {
    piece pieces[MOST_PIECES], *p = &pieces[index];
    layer_pieces(layer, pieces);
    const axis tokens = {layer->block_size, p->slot, p->slot}, heads = {layer->num_kv_heads, p->head, p->head};
    zero_box(p->base + job->rows[row] * p->block, tokens, heads, p->run);
}

/* To or from where a row of `data` has this piece of this layer. */
static void data_visit(const sweep *job, const kv_layer *layer, int index, int64_t row) {
    piece pieces[MOST_PIECES], *p = &pieces[index];
    layer_pieces(layer, pieces);
    char *data = job->data + row * job->row_nbytes + (layer - job->layers) * job->layer_nbytes + job->at[index];
    char *block = p->base + job->rows[row] * p->block;
    const int64_t token = layer->num_kv_heads * p->run; /* bytes of one in `data` */
    axis tokens = {layer->block_size, p->slot, token}, heads = {layer->num_kv_heads, p->head, p->run};
    if (job->task == KV_IMPORT) {
        copy_box(block, data, tokens, heads, bytes_of(p), 1);
        return;
    }
    tokens = (axis){tokens.count, token, p->slot};
    heads = (axis){heads.count, p->run, p->head};
    copy_box(data, block, tokens, heads, bytes_of(p), 1);
}

void kv_copy_blocks(const kv_layer *layers, int64_t num_layers, const int64_t *copies, int64_t num_copies,
                    int num_threads) {
    const sweep job = {.visit = copy_visit, .layers = layers, .rows = copies, .num_rows = num_copies};
    run_sweep(job, num_layers, num_threads);
}

void kv_blocks(kv_task task, const kv_layer *layers, int64_t num_layers, const int64_t *blocks, int64_t num_blocks,
               char *data, int num_threads) {
    const sweep job = {.visit = task == KV_ZERO ? zero_visit : data_visit, .task = task, .layers = layers,
                       .rows = blocks, .num_rows = num_blocks, .data = data};
    run_sweep(job, num_layers, num_threads);
}

/* -------- tokens that stay -------- */

typedef struct {
    const kv_layer *layers;
    const int64_t *blocks, *keep;
    int64_t num_kept;
} staying;

/* One head of one layer. What moves, moves to the front: nothing is overwritten before it has moved. */
static void compact_item(void *context, int64_t item, int thread) {
    const staying *job = context;
    const int64_t heads = job->layers->num_kv_heads, block_size = job->layers->block_size, head = item % heads;
    const int64_t *keep = job->keep + item * job->num_kept;
    piece pieces[MOST_PIECES];
    const int count = layer_pieces(job->layers + item / heads, pieces);
    (void)thread;
    for (int i = 0; i < count; i++) {
        const piece *p = &pieces[i];
        for (int64_t j = 0; j < job->num_kept; j++) {
            const int64_t to = job->blocks[j / block_size], from = job->blocks[keep[j] / block_size];
            if (keep[j] == j) continue;
            memcpy(p->base + to * p->block + j % block_size * p->slot + head * p->head,
                   p->base + from * p->block + keep[j] % block_size * p->slot + head * p->head, (size_t)p->run);
        }
    }
}

void kv_compact(const kv_layer *layers, int64_t num_layers, const int64_t *blocks, const int64_t *keep,
                int64_t num_kept, int num_threads) {
    staying job = {layers, blocks, keep, num_kept};
    kv_parallel(compact_item, &job, num_layers * layers->num_kv_heads, num_threads, NULL);
}

/* -------- tokens of one layer -------- */

typedef struct {
    const kv_isa *isa;
    const kv_layer *layer;
    const kv_tokens *planes[2];
    const int64_t *slots;  /* of tokens that are written */
    const int64_t *blocks; /* that are gathered */
    int64_t num_tokens, tokens_per_item;
} move;

static void write_token(const move *job, const kv_plane *plane, const kv_tokens *tokens, int64_t token, int64_t slot) {
    const int64_t size = kv_itemsize(job->layer->dtype), from_size = kv_itemsize(tokens->dtype);
    const int64_t block = slot / job->layer->block_size, offset = slot % job->layer->block_size;
    const char *src = tokens->base + token * tokens->token_stride * from_size;
    int64_t heads = job->layer->num_kv_heads, dim = plane->dim;
    char *dst = token_at(plane, block, offset, size);
    if (plane->head_stride == dim && tokens->dim_stride == 1 && tokens->head_stride == dim) {
        dim *= heads; /* one run on both sides */
        heads = 1;
    }
    for (int64_t h = 0; h < heads; h++)
        job->isa->convert(dst + h * plane->head_stride * size, job->layer->dtype,
                          src + h * tokens->head_stride * from_size, tokens->dtype, tokens->dim_stride, dim);
}

/* Tokens [begin, end): some at a time, because a batch of groups may be of several. */
static void quantize_tokens(const move *job, const kv_plane *plane, const kv_tokens *tokens, int64_t begin,
                            int64_t end) {
    enum { AT_ONCE = 16 };
    const kv_layer *layer = job->layer;
    const int64_t size = kv_itemsize(layer->dtype);
    kv_packed_heads to[AT_ONCE];
    int64_t count = 0;
    for (int64_t token = begin; token < end; token++) {
        const int64_t slot = job->slots[token];
        if (slot >= 0)
            to[count++] = (kv_packed_heads){
                .src = tokens->base + token * tokens->token_stride * kv_itemsize(tokens->dtype),
                .first = packed_at(layer, plane, slot / layer->block_size, slot % layer->block_size, 0),
                .heads = layer->num_kv_heads, .words_step = plane->head_stride * 4,
                .scales_step = plane->scales.head_stride * size, .biases_step = plane->biases.head_stride * size,
            };
        if (count == AT_ONCE || (count > 0 && token + 1 == end)) {
            job->isa->quantize(to, count, tokens->dtype, tokens->head_stride, tokens->dim_stride, plane->dim);
            count = 0;
        }
    }
}

static void write_item(void *context, int64_t item, int thread) {
    const move *job = context;
    const int64_t begin = item * job->tokens_per_item, end = smaller(job->num_tokens, begin + job->tokens_per_item);
    (void)thread;
    for (int p = 0; p < 2; p++) {
        const kv_plane *plane = p ? &job->layer->v : &job->layer->k;
        if (plane->bits != 0) quantize_tokens(job, plane, job->planes[p], begin, end);
        else
            for (int64_t token = begin; token < end; token++)
                if (job->slots[token] >= 0) write_token(job, plane, job->planes[p], token, job->slots[token]);
    }
}

/* Tokens of one block, as floats. */
static void gather_quantized(const move *job, const kv_plane *plane, const kv_tokens *out, int64_t token,
                             int64_t count) {
    const int64_t size = kv_itemsize(out->dtype);
    for (int64_t i = 0; i < count; i++)
        for (int64_t h = 0; h < job->layer->num_kv_heads; h++) {
            const kv_packed from = packed_at(job->layer, plane, job->blocks[token / job->layer->block_size], i, h);
            char *to = out->base + ((token + i) * out->token_stride + h * out->head_stride) * size;
            job->isa->dequantize(&from, to, out->dtype, out->dim_stride, plane->dim);
        }
}

static void gather_item(void *context, int64_t item, int thread) {
    const move *job = context;
    const kv_layer *layer = job->layer;
    const int64_t size = kv_itemsize(layer->dtype), end = smaller(job->num_tokens, (item + 1) * job->tokens_per_item);
    (void)thread;
    for (int64_t token = item * job->tokens_per_item; token < end; token += layer->block_size)
        for (int p = 0; p < 2; p++) {
            const kv_plane *plane = p ? &layer->v : &layer->k;
            const kv_tokens *out = job->planes[p];
            const int64_t count = smaller(layer->block_size, end - token);
            if (plane->bits != 0 || layer->dtype == KV_F8) {
                gather_quantized(job, plane, out, token, count);
                continue;
            }
            const axis tokens = {count, out->token_stride * size, plane->slot_stride * size};
            const axis heads = {layer->num_kv_heads, out->head_stride * size, plane->head_stride * size};
            const axis elements = {plane->dim, out->dim_stride * size, size};
            const char *block = token_at(plane, job->blocks[token / layer->block_size], 0, size);
            copy_box(out->base + token * out->token_stride * size, block, tokens, heads, elements, size);
        }
}

static void run_move(move *job, kv_work work, int64_t granule, int num_threads) {
    const kv_layer *layer = job->layer;
    const int64_t token_nbytes = layer->num_kv_heads * (layer->k.dim + layer->v.dim) * kv_itemsize(layer->dtype);
    const int64_t granules = larger(1, ITEM_NBYTES / larger(1, granule * token_nbytes));
    job->tokens_per_item = granules * granule;
    kv_parallel(work, job, (job->num_tokens + job->tokens_per_item - 1) / job->tokens_per_item, num_threads, NULL);
}

void kv_write(const kv_isa *isa, const kv_layer *layer, const kv_tokens *k, const kv_tokens *v, const int64_t *slots,
              int64_t num_tokens, int num_threads) {
    move job = {.isa = isa, .layer = layer, .planes = {k, v}, .slots = slots, .num_tokens = num_tokens};
    run_move(&job, write_item, 1, num_threads);
}

void kv_gather(const kv_isa *isa, const kv_layer *layer, const int64_t *blocks, int64_t num_tokens, const kv_tokens *k,
               const kv_tokens *v, int num_threads) {
    move job = {.isa = isa, .layer = layer, .planes = {k, v}, .blocks = blocks, .num_tokens = num_tokens};
    run_move(&job, gather_item, layer->block_size, num_threads);
}
