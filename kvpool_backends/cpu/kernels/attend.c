/* A call of attention as items of work for the threads.
 *
 * What is computed for a row, and in which order it is added up, follows from that row alone, never from the batch
 * or the threads: a row of few queries is cut into parts at multiples of PART tokens of its context, a longer one
 * into tiles of queries. Threads only choose who does an item, so results do not depend on them, bit for bit.
 */
#include "isa.h"

#include <stdatomic.h>
#include <string.h>

enum {
    /* tokens: enough to forget the start of a part over, few enough to share one sequence among cores */
    PART = 512,
    DECODE_QUERIES = 8, /* rows with more queries than this are chunks: there is reuse enough for a matrix product */
};

typedef struct {
    const kv_isa *isa;
    const kv_attention *call;
    int64_t *first_item;   /* [num_rows + 1] */
    int64_t *first_partial; /* [num_rows] in floats */
    atomic_llong *unfinished; /* [num_rows] parts */
    float *thread_scratch; /* [num_threads, thread_floats] */
    int64_t thread_floats;
    float *partials;
    int64_t nbytes;        /* of all of them */
} kv_plan_of_work;

static int64_t row_queries(const kv_attention *call, int64_t row) {
    return call->cu_q_lens[row + 1] - call->cu_q_lens[row];
}

/* The first token that any query of the row sees. */
static int64_t row_begin(const kv_attention *call, int64_t row) {
    const int64_t position = call->seq_lens[row] - row_queries(call, row);
    return call->window > position ? 0 : position - call->window + 1;
}

static int64_t row_parts(const kv_attention *call, int64_t row) {
    return (call->seq_lens[row] + PART - 1) / PART - row_begin(call, row) / PART;
}

static int64_t row_items(const kv_isa *isa, const kv_attention *call, int64_t row) {
    const int64_t queries = row_queries(call, row);
    if (queries <= 0) return 0;
    if (queries <= DECODE_QUERIES) return row_parts(call, row);
    const int64_t tile = isa->chunk_queries(call);
    return (queries + tile - 1) / tile * call->layer->num_kv_heads;
}

/* A piece of the scratch, which begins at base (NULL while only its size is asked for). */
static void *take(char *base, int64_t *used, int64_t nbytes) {
    char *piece = base == NULL ? NULL : base + *used;
    *used += (nbytes + 63) / 64 * 64;
    return piece;
}

static kv_plan_of_work plan_work(const kv_isa *isa, const kv_attention *call, void *scratch, int num_threads) {
    kv_plan_of_work plan = {.isa = isa, .call = call};
    int64_t partial_floats = 0, num_items = 0, most_queries = 0;
    int has_chunks = 0;
    plan.first_item = take(scratch, &plan.nbytes, (call->num_rows + 1) * (int64_t)sizeof *plan.first_item);
    plan.first_partial = take(scratch, &plan.nbytes, call->num_rows * (int64_t)sizeof *plan.first_partial);
    plan.unfinished = take(scratch, &plan.nbytes, call->num_rows * (int64_t)sizeof *plan.unfinished);
    for (int64_t row = 0; row < call->num_rows; row++) {
        const int64_t queries = row_queries(call, row), items = row_items(isa, call, row);
        if (scratch != NULL) {
            plan.first_item[row] = num_items;
            plan.first_partial[row] = partial_floats;
            atomic_init(&plan.unfinished[row], items);
        }
        num_items += items;
        if (queries > DECODE_QUERIES) has_chunks = 1;
        else if (queries > most_queries) most_queries = queries;
        if (queries <= DECODE_QUERIES && items > 1) partial_floats += items * isa->partial_floats(call, queries);
    }
    if (scratch != NULL) plan.first_item[call->num_rows] = num_items;
    if (most_queries > 0) plan.thread_floats = isa->decode_scratch_floats(call, most_queries);
    if (has_chunks) {
        const int64_t floats = isa->chunk_scratch_floats(call);
        if (floats > plan.thread_floats) plan.thread_floats = floats;
    }
    plan.thread_floats = (plan.thread_floats + 15) / 16 * 16;
    plan.thread_scratch = take(scratch, &plan.nbytes, num_threads * plan.thread_floats * (int64_t)sizeof(float));
    plan.partials = take(scratch, &plan.nbytes, partial_floats * (int64_t)sizeof(float));
    return plan;
}

int64_t kv_attend_scratch_nbytes(const kv_isa *isa, const kv_attention *call, int num_threads) {
    return plan_work(isa, call, NULL, num_threads).nbytes;
}

static int64_t row_of_item(const kv_plan_of_work *plan, int64_t item) {
    int64_t low = 0, high = plan->call->num_rows; /* first_item[low] <= item < first_item[high] */
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (plan->first_item[middle] <= item) low = middle;
        else high = middle;
    }
    return low;
}

static void do_part(kv_plan_of_work *plan, int64_t row, int64_t index, float *scratch) {
    const kv_attention *call = plan->call;
    const int64_t parts = plan->first_item[row + 1] - plan->first_item[row];
    const int64_t first = row_begin(call, row), last = call->seq_lens[row];
    const int64_t cut = (first / PART + index) * PART, next_cut = cut + PART;
    const int64_t begin = cut < first ? first : cut, end = next_cut < last ? next_cut : last;
    if (parts == 1) {
        plan->isa->decode_part(call, row, begin, end, scratch, NULL);
        return;
    }
    const int64_t step = plan->isa->partial_floats(call, row_queries(call, row));
    float *partials = plan->partials + plan->first_partial[row];
    plan->isa->decode_part(call, row, begin, end, scratch, partials + index * step);
    if (atomic_fetch_sub(&plan->unfinished[row], 1) == 1) plan->isa->decode_merge(call, row, partials, parts, scratch);
}

static void do_chunk_tile(kv_plan_of_work *plan, int64_t row, int64_t index, float *scratch) {
    const kv_attention *call = plan->call;
    const int64_t queries = row_queries(call, row), tile = plan->isa->chunk_queries(call);
    /* the longest first */
    const int64_t tiles = (queries + tile - 1) / tile, first = (tiles - 1 - index % tiles) * tile;
    const int64_t count = queries - first < tile ? queries - first : tile;
    plan->isa->chunk_tile(call, row, index / tiles, first, count, scratch);
}

static void do_item(void *context, int64_t item, int thread) {
    kv_plan_of_work *plan = context;
    const int64_t row = row_of_item(plan, item), index = item - plan->first_item[row];
    float *scratch = plan->thread_scratch + thread * plan->thread_floats;
    if (row_queries(plan->call, row) <= DECODE_QUERIES) do_part(plan, row, index, scratch);
    else do_chunk_tile(plan, row, index, scratch);
}

/* Tokens beyond the last row are padding: their results are 0. */
static void zero_padding(const kv_attention *call) {
    const kv_tokens *out = &call->out;
    const int64_t size = kv_itemsize(out->dtype);
    for (int64_t token = call->cu_q_lens[call->num_rows]; token < call->num_tokens; token++)
        for (int64_t head = 0; head < call->num_q_heads; head++) {
            char *to = out->base + (token * out->token_stride + head * out->head_stride) * size;
            for (int64_t d = 0; d < call->layer->v.dim; d++) memset(to + d * out->dim_stride * size, 0, (size_t)size);
        }
}

void kv_attend(const kv_isa *isa, const kv_attention *call, void *scratch, int num_threads) {
    kv_plan_of_work plan = plan_work(isa, call, scratch, num_threads);
    zero_padding(call);
    kv_parallel(do_item, &plan, plan.first_item[call->num_rows], num_threads);
}
