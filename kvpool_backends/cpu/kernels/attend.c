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
    kv_attention call;      /* with the scratch of its scores */
    int64_t *first_item;   /* [num_rows + 1] */
    int64_t *first_score_item; /* the same of the passes over scores */
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

/* The first token that a query at `position` sees. */
static int64_t seen_from(const kv_attention *call, int64_t position) {
    return call->window > position ? 0 : position - call->window + 1;
}

/* The first token that any query of the row sees. */
static int64_t row_begin(const kv_attention *call, int64_t row) {
    return seen_from(call, call->seq_lens[row] - row_queries(call, row));
}

/* Of the context from `begin` on. */
static int64_t row_parts(const kv_attention *call, int64_t row, int64_t begin) {
    return (call->seq_lens[row] + PART - 1) / PART - begin / PART;
}

/* The first token whose scores are computed: of a chunk only the newest query has any. */
static int64_t scores_begin(const kv_attention *call, int64_t row) {
    return row_queries(call, row) <= DECODE_QUERIES ? row_begin(call, row) : seen_from(call, call->seq_lens[row] - 1);
}

static int64_t score_items(const kv_attention *call, int64_t row) {
    return row_queries(call, row) == 0 ? 0 : row_parts(call, row, scores_begin(call, row));
}

static int64_t row_items(const kv_isa *isa, const kv_attention *call, int64_t row) {
    const int64_t queries = row_queries(call, row);
    if (queries <= 0) return 0;
    if (queries <= DECODE_QUERIES) return row_parts(call, row, row_begin(call, row));
    const int64_t tile = isa->chunk_queries(call);
    return (queries + tile - 1) / tile * call->layer->num_kv_heads;
}

/* A piece of the scratch, which begins at base (NULL while only its size is asked for). */
static void *take(char *base, int64_t *used, int64_t nbytes) {
    char *piece = base == NULL ? NULL : base + *used;
    *used += (nbytes + 63) / 64 * 64;
    return piece;
}

/* Of all query heads of a row while its scores are laid aside. */
static int64_t lane_floats(const kv_attention *call, int64_t row) {
    return row_queries(call, row) == 0 ? 0 : call->num_q_heads * kv_score_stride(call->seq_lens[row]);
}

static void plan_scores(kv_plan_of_work *plan, char *scratch) {
    kv_attention *call = &plan->call;
    const int64_t num_rows = call->num_rows, floats = num_rows * call->num_q_heads * (int64_t)sizeof(float);
    int64_t num_items = 0, num_lanes = 0, *first_lane;
    if (call->scores.kind == KV_NO_SCORES) return;
    plan->first_score_item = take(scratch, &plan->nbytes, (num_rows + 1) * (int64_t)sizeof *first_lane);
    first_lane = take(scratch, &plan->nbytes, num_rows * (int64_t)sizeof *first_lane);
    for (int64_t row = 0; row < num_rows; row++) {
        if (scratch != NULL) {
            plan->first_score_item[row] = num_items;
            first_lane[row] = num_lanes;
        }
        num_items += score_items(call, row);
        num_lanes += lane_floats(call, row);
    }
    if (scratch != NULL) plan->first_score_item[num_rows] = num_items;
    call->scores.first_lane = first_lane;
    if (call->scores.kind != KV_MASS) return;
    call->scores.largest = take(scratch, &plan->nbytes, floats);
    call->scores.share = take(scratch, &plan->nbytes, floats);
    call->scores.lanes = take(scratch, &plan->nbytes, num_lanes * (int64_t)sizeof(float));
}

static kv_plan_of_work plan_work(const kv_isa *isa, const kv_attention *call, void *scratch, int num_threads) {
    kv_plan_of_work plan = {.isa = isa, .call = *call};
    int64_t partial_floats = 0, num_items = 0, most_queries = 0;
    int has_chunks = 0;
    plan.first_item = take(scratch, &plan.nbytes, (call->num_rows + 1) * (int64_t)sizeof *plan.first_item);
    plan.first_partial = take(scratch, &plan.nbytes, call->num_rows * (int64_t)sizeof *plan.first_partial);
    plan.unfinished = take(scratch, &plan.nbytes, call->num_rows * (int64_t)sizeof *plan.unfinished);
    for (int64_t row = 0; row < call->num_rows; row++) {
        const int64_t queries = row_queries(call, row), items = row_items(isa, call, row);
        const int is_chunk = queries > DECODE_QUERIES, scores_apart = is_chunk && call->scores.kind != KV_NO_SCORES;
        if (scratch != NULL) {
            plan.first_item[row] = num_items;
            plan.first_partial[row] = partial_floats;
            atomic_init(&plan.unfinished[row], scores_apart ? score_items(call, row) : items);
        }
        num_items += items;
        if (is_chunk) has_chunks = 1;
        else if (queries > most_queries) most_queries = queries;
        if (!is_chunk && items > 1) partial_floats += items * isa->partial_floats(call, queries, 0);
        if (scores_apart) {
            partial_floats += score_items(call, row) * isa->partial_floats(call, 1, 1);
            if (most_queries == 0) most_queries = 1;
        }
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
    plan_scores(&plan, scratch);
    return plan;
}

int64_t kv_attend_scratch_nbytes(const kv_isa *isa, const kv_attention *call, int num_threads) {
    return plan_work(isa, call, NULL, num_threads).nbytes;
}

/* The row of an item, where row i has items first[i] .. first[i + 1] - 1. */
static int64_t row_of_item(const int64_t *first, int64_t num_rows, int64_t item) {
    int64_t low = 0, high = num_rows; /* first[low] <= item < first[high] */
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (first[middle] <= item) low = middle;
        else high = middle;
    }
    return low;
}

typedef struct { int64_t begin, end; } kv_range;

/* Part `index` of a row's context from `first` on: they are cut at multiples of PART. */
static kv_range part_range(const kv_attention *call, int64_t row, int64_t first, int64_t index) {
    const int64_t last = call->seq_lens[row], cut = (first / PART + index) * PART, next_cut = cut + PART;
    return (kv_range){cut < first ? first : cut, next_cut < last ? next_cut : last};
}

static void do_part(kv_plan_of_work *plan, int64_t row, int64_t index, float *scratch) {
    const kv_attention *call = &plan->call;
    const int64_t parts = plan->first_item[row + 1] - plan->first_item[row];
    const kv_range part = part_range(call, row, row_begin(call, row), index);
    if (parts == 1) {
        plan->isa->decode_part(call, row, 0, part.begin, part.end, scratch, NULL);
        return;
    }
    const int64_t step = plan->isa->partial_floats(call, row_queries(call, row), 0);
    float *partials = plan->partials + plan->first_partial[row];
    plan->isa->decode_part(call, row, 0, part.begin, part.end, scratch, partials + index * step);
    if (atomic_fetch_sub(&plan->unfinished[row], 1) == 1)
        plan->isa->decode_merge(call, row, 0, partials, parts, scratch);
}

static void do_chunk_tile(kv_plan_of_work *plan, int64_t row, int64_t index, float *scratch) {
    const kv_attention *call = &plan->call;
    const int64_t queries = row_queries(call, row), tile = plan->isa->chunk_queries(call);
    /* the longest first */
    const int64_t tiles = (queries + tile - 1) / tile, first = (tiles - 1 - index % tiles) * tile;
    const int64_t count = queries - first < tile ? queries - first : tile;
    plan->isa->chunk_tile(call, row, index / tiles, first, count, scratch);
}

static void do_item(void *context, int64_t item, int thread) {
    kv_plan_of_work *plan = context;
    const int64_t row = row_of_item(plan->first_item, plan->call.num_rows, item), index = item - plan->first_item[row];
    float *scratch = plan->thread_scratch + thread * plan->thread_floats;
    if (row_queries(&plan->call, row) <= DECODE_QUERIES) do_part(plan, row, index, scratch);
    else do_chunk_tile(plan, row, index, scratch);
}

/* -------- scores: of chunks, then the second pass -------- */

static void do_score_part(void *context, int64_t item, int thread) {
    kv_plan_of_work *plan = context;
    const kv_attention *call = &plan->call;
    const int64_t row = row_of_item(plan->first_score_item, call->num_rows, item);
    const int64_t parts = score_items(call, row), index = item - plan->first_score_item[row];
    const kv_range part = part_range(call, row, scores_begin(call, row), index);
    float *scratch = plan->thread_scratch + thread * plan->thread_floats;
    float *partials = plan->partials + plan->first_partial[row];
    if (row_queries(call, row) <= DECODE_QUERIES) return;
    const int64_t step = plan->isa->partial_floats(call, 1, 1);
    plan->isa->decode_part(call, row, 1, part.begin, part.end, scratch, partials + index * step);
    if (call->scores.kind == KV_MASS && atomic_fetch_sub(&plan->unfinished[row], 1) == 1)
        plan->isa->decode_merge(call, row, 1, partials, parts, scratch);
}

static void do_mass_part(void *context, int64_t item, int thread) {
    kv_plan_of_work *plan = context;
    const int64_t row = row_of_item(plan->first_score_item, plan->call.num_rows, item);
    const kv_range part = part_range(&plan->call, row, scores_begin(&plan->call, row),
                                     item - plan->first_score_item[row]);
    (void)thread;
    plan->isa->mass_part(&plan->call, row, part.begin, part.end);
}

/* Zeros where no pass writes: before a window, behind a row's context. */
static void do_unseen(void *context, int64_t row, int thread) {
    const kv_attention *call = &((kv_plan_of_work *)context)->call;
    const kv_scores *scores = &call->scores;
    const int is_idle = row_queries(call, row) == 0;
    const int64_t begin = is_idle ? 0 : scores_begin(call, row), end = is_idle ? 0 : call->seq_lens[row];
    (void)thread;
    for (int64_t head = 0; head < call->layer->num_kv_heads; head++) {
        float *out = scores->out + row * scores->row_stride + head * scores->head_stride;
        memset(out, 0, (size_t)begin * sizeof(float));
        memset(out + end, 0, (size_t)(scores->columns - end) * sizeof(float));
    }
}

static int finish_scores(kv_plan_of_work *plan, int num_threads) {
    const kv_attention *call = &plan->call;
    const int64_t num_items = plan->first_score_item[call->num_rows];
    int has_chunks = 0;
    for (int64_t row = 0; row < call->num_rows; row++) has_chunks |= row_queries(call, row) > DECODE_QUERIES;
    if (has_chunks && kv_parallel(do_score_part, plan, num_items, num_threads, call->ask)) return 1;
    if (call->scores.kind == KV_MASS && kv_parallel(do_mass_part, plan, num_items, num_threads, call->ask)) return 1;
    return kv_parallel(do_unseen, plan, call->num_rows, num_threads, call->ask);
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

int kv_attend(const kv_isa *isa, const kv_attention *call, void *scratch, int num_threads) {
    kv_plan_of_work plan = plan_work(isa, call, scratch, num_threads);
    zero_padding(call);
    if (kv_parallel(do_item, &plan, plan.first_item[call->num_rows], num_threads, call->ask)) return 1;
    return call->scores.kind == KV_NO_SCORES ? 0 : finish_scores(&plan, num_threads);
}
