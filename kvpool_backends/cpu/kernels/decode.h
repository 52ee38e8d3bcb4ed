/* Attention of a few queries over a long context, part by part (FlashDecoding: Dao et al. 2023).
 *
 * A part goes tile by tile, a tile KV head by KV head: its K meets all queries of the head, their weights are made
 * (online softmax: Milakov & Gimelshein 2018), its V is summed up. K and V come from memory once. What holds a
 * decode up is the memory's latency, and the hardware's own prefetchers lose track at every block. So each of these
 * phases fetches what the next one reads, row for row at the pace of its own reading: K's the V of the same tokens,
 * V's the K of the next head or tile. Row for row, because a burst would fill the buffers that loads wait
 * for; of quantized rows, which are short, some at once.
 *
 * The queries of a KV head, those of its group of heads for each token of the window, are called its lanes:
 * lane = token * group + head in group. All arrays below go by KV head, then lane.
 */
#include <math.h>

#include "tile.h"

#include "decode_inner.h"

#include "decode_quantized.h"

typedef struct {
    const kv_attention *call;
    int64_t row, first_query, num_queries, group, lanes, num_lanes; /* lanes of a KV head, lanes of all */
    int64_t k_padded, v_padded, floats; /* floats: of the scratch */
    float *largest, *sum, *acc;      /* the state: [num_lanes], [num_lanes], [num_lanes, v_padded] */
    float *q;                        /* [num_lanes, k_padded] scaled */
    float *scores, *decay;           /* of one KV head: [lanes, ROOM], [lanes] */
    float *zeros;                    /* a value vector */
    factors k, v;                    /* of the tile, where quantized, and the next two */
    float *q_sums;                   /* [num_lanes, groups] */
    float *scaled, *shifts;          /* of one KV head: [groups, lanes, ROOM], [lanes, groups] */
} decoding;

static int64_t partial_floats(const kv_attention *call, int64_t num_queries, int scores_alone) {
    const int64_t num_lanes = num_queries * call->num_q_heads;
    return 2 * whole_lines(num_lanes) + (scores_alone ? 0 : num_lanes * padded(call->layer->v.dim));
}

static void decoding_set_state(decoding *run, float *state) {
    run->largest = state;
    run->sum = run->largest + whole_lines(run->num_lanes);
    run->acc = run->sum + whole_lines(run->num_lanes);
}

/* Of a row's newest queries. The state comes last in the scratch; NULL: only the size of that is asked for. */
static decoding decoding_of(const kv_attention *call, int64_t row, int64_t num_queries, float *scratch) {
    const kv_layer *layer = call->layer;
    const int64_t heads = layer->num_kv_heads, k_groups = kv_groups(&layer->k), v_groups = kv_groups(&layer->v);
    decoding run = {
        .call = call, .row = row, .num_queries = num_queries, .group = call->num_q_heads / heads,
        .lanes = num_queries * call->num_q_heads / heads, .num_lanes = num_queries * call->num_q_heads,
        .k_padded = padded(layer->k.dim), .v_padded = padded(layer->v.dim),
    };
    const kv_need needs[] = {
        {&run.q, run.num_lanes * run.k_padded}, {&run.scores, run.lanes * ROOM}, {&run.decay, run.lanes},
        {&run.zeros, run.v_padded},
        {&run.k.scales, heads * k_groups * TILE + 4}, {&run.k.biases, heads * k_groups * TILE + 4},
        {&run.v.scales, heads * v_groups * TILE}, {&run.v.biases, heads * v_groups * TILE},
        {&run.q_sums, run.num_lanes * k_groups}, {&run.scaled, v_groups * run.lanes * ROOM},
        {&run.shifts, v_groups * run.lanes},
    };
    const int64_t used = carve(needs, sizeof needs / sizeof *needs, scratch);
    run.floats = used + partial_floats(call, num_queries, 0);
    if (scratch == NULL) return run;
    run.first_query = call->cu_q_lens[row + 1] - num_queries;
    decoding_set_state(&run, scratch + used);
    return run;
}

static int64_t decode_scratch_floats(const kv_attention *call, int64_t num_queries) {
    return decoding_of(call, 0, num_queries, NULL).floats;
}

/* The token (counted in call->q) and the query head of a lane. */
static int64_t lane_token(const decoding *run, int64_t lane) {
    return run->first_query + lane % run->lanes / run->group;
}
static int64_t lane_head(const decoding *run, int64_t lane) {
    return lane / run->lanes * run->group + lane % run->group;
}

static void decoding_load_queries(decoding *run) {
    const kv_attention *call = run->call;
    const kv_tokens *q = &call->q;
    const kv_dtype stored = kv_stored(call->layer, &call->layer->k);
    const int64_t dim = call->layer->k.dim, size = kv_itemsize(q->dtype);
    const int64_t groups = kv_groups(&call->layer->k), group_size = call->layer->k.group_size;
    for (int64_t lane = 0; lane < run->num_lanes; lane++) {
        const char *from = q->base
            + (lane_token(run, lane) * q->token_stride + lane_head(run, lane) * q->head_stride) * size;
        float *to = run->q + lane * run->k_padded;
        for (int64_t d = 0; d < dim; d += PAIR) {
            float some[PAIR] = {0};
            for (int64_t i = d; i < dim && i < d + PAIR; i += VL) {
                const int64_t n = dim - i < VL ? dim - i : VL;
                const char *at = from + i * q->dim_stride * size;
                v_store(some + i - d, v_load_strided_as(q->dtype, at, q->dim_stride, n) * call->scale);
            }
            pair_shuffle(stored, some, to + d, 0);
        }
        for (int64_t g = 0; g < groups; g++) {
            vf sum = v_set(0);
            for (int64_t d = 0; d < group_size; d += VL) sum += v_load(to + g * group_size + d);
            run->q_sums[lane * groups + g] = v_sum(sum);
        }
    }
}

/* -------- scores -------- */

/* Of a tile's rows of `plane`, while those of `meanwhile` are worked on. */
KV_INLINE fetching plane_fetching(const kv_layer *layer, const kv_plane *plane, const kv_plane *meanwhile,
                                  const char *const *rows, int64_t count, int64_t offset) {
    const int64_t nbytes = plane->dim * kv_bits(kv_stored(layer, plane)) / 8;
    return fetching_of(rows, count, offset, nbytes, padded(meanwhile->dim) / PAIR);
}

/* `rows` lanes of a head from the i-th on against the tile. */
KV_INLINE void lanes_scores(kv_dtype dtype, const int rows, const decoding *run, const kv_tile *tile, int64_t head,
                            int64_t i, fetching *ahead) {
    const kv_plane *k = &run->call->layer->k;
    const int64_t offset = head * k->head_stride * kv_itemsize(dtype), dim = k->dim, count = tile->count;
    const float *q = run->q + (head * run->lanes + i) * run->k_padded;
    const float *scales = run->k.scales + head * kv_groups(k) * TILE;
    float *scores = run->scores + i * ROOM;
    for (int64_t t = 0; t < count; t += TOKENS)
        if (dtype == KV_U8 || dtype == KV_U4)
            numbers_of_some(dtype, rows, tile->k + t, offset, k, q, scales + t, scores + t, ahead, t);
        else scores_of_some(dtype, rows, tile->k + t, offset, dim, q, scores + t, ahead, t);
}

/* All of a head's lanes against the tile; meanwhile the same head's values are fetched, if `fetches`. */
KV_INLINE void head_scores_as(kv_dtype dtype, const decoding *run, const kv_tile *tile, int64_t head, int fetches) {
    const kv_layer *layer = run->call->layer;
    const int64_t v_offset = head * layer->v.head_stride * kv_itemsize(kv_stored(layer, &layer->v));
    fetching ahead = plane_fetching(layer, &layer->v, &layer->k, tile->v, tile->count, v_offset);
    int64_t i = 0;
    if (!fetches) ahead.step = 0;
    for (; i + LANES <= run->lanes; i += LANES, ahead.step = 0) lanes_scores(dtype, LANES, run, tile, head, i, &ahead);
    if (run->lanes - i == 3) lanes_scores(dtype, 3, run, tile, head, i, &ahead);
    if (run->lanes - i == 2) lanes_scores(dtype, 2, run, tile, head, i, &ahead);
    if (run->lanes - i == 1) lanes_scores(dtype, 1, run, tile, head, i, &ahead);
    if (dtype != KV_U8 && dtype != KV_U4) return;
    const int64_t groups = kv_groups(&layer->k);
    add_biases(run->scores, run->lanes, groups, run->k.biases + head * groups * TILE,
               run->q_sums + head * run->lanes * groups);
}

/* A function of its own for each type: in one of all types the compiler finds no registers for any. */
#define FOR_EACH_STORED(DO) DO(F32) DO(F16) DO(BF16) DO(F8) DO(U8) DO(U4)

#define HEAD_SCORES(TYPE) \
    static KV_APART void head_scores_##TYPE(const decoding *run, const kv_tile *tile, int64_t head, int fetches) { \
        head_scores_as(KV_##TYPE, run, tile, head, fetches); \
    }
FOR_EACH_STORED(HEAD_SCORES)

static void head_scores(const decoding *run, const kv_tile *tile, int64_t head, int fetches) {
#define CASE(TYPE) case KV_##TYPE: head_scores_##TYPE(run, tile, head, fetches); break;
    switch (kv_stored(run->call->layer, &run->call->layer->k)) { FOR_EACH_STORED(CASE) }
#undef CASE
}

/* -------- weights -------- */

/* Cap, bias, mask; -inf for what the lane does not see and beyond the tile's tokens. */
static void lane_features(const decoding *run, const kv_tile *tile, int64_t lane, float *scores) {
    const kv_attention *call = run->call;
    const int64_t token = lane_token(run, lane), head = lane_head(run, lane);
    const int64_t position = call->seq_lens[run->row] - call->cu_q_lens[run->row + 1] + token;
    const int64_t begin = call->window > position ? 0 : position - call->window + 1;
    const float *mask = call->mask == NULL ? NULL : call->mask + token * call->mask_token_stride
        + head * call->mask_head_stride;
    /* In the tile's own numbers, which fit 32 bits. */
    const int32_t from = begin > tile->first ? (int32_t)(begin - tile->first < TILE ? begin - tile->first : TILE) : 0;
    const int32_t to = position - tile->first < tile->count ? (int32_t)(position - tile->first + 1)
        : (int32_t)tile->count;
    const float distance = (float)(tile->first - position);
    for (int32_t t = 0; t < TILE; t += VL) {
        const vi at = v_lanes() + t;
        vi seen = (at >= from) & (at < to);
        vf s = v_load(scores + t);
        if (call->soft_cap != 0) s = v_tanh(s / call->soft_cap) * call->soft_cap;
        if (call->slopes != NULL) s = v_fma(v_set(call->slopes[head]), __builtin_convertvector(at, vf) + distance, s);
        if (mask != NULL && t < tile->count) {
            const int64_t n = tile->count - t < VL ? tile->count - t : VL;
            const vf bias = v_load_n(mask + tile->first + t, n);
            seen &= bias != -INFINITY; /* a NaN that is masked away stays away */
            s += bias;
        }
        v_store(scores + t, v_select(seen, s, v_set(-INFINITY)));
    }
}

/* Scores become weights, exp(score - largest); the state is told how much its old largest is worth now. */
static void lane_softmax(decoding *run, int64_t lane, float *scores, float *decay_out) {
    vf best = v_load(scores);
    for (int t = VL; t < TILE; t += VL) best = v_max(best, v_load(scores + t));
    const float before = run->largest[lane], found = v_largest(best), largest = found > before ? found : before;
    const float offset = largest == -INFINITY ? 0 : largest; /* nothing seen yet: all weights are 0 */
    vf total = {0};
    for (int t = 0; t < TILE; t += VL) {
        const vf weight = v_exp(v_load(scores + t) - offset);
        total += weight;
        v_store(scores + t, weight);
    }
    const float decay = found > before ? v_exp(v_set(before - offset))[0] : 1;
    *decay_out = decay;
    run->sum[lane] = run->sum[lane] * decay + v_sum(total);
    run->largest[lane] = largest;
}

/* Lays what goes into exp for the newest query aside, for the second pass of KV_MASS. */
static void head_lay_aside(const decoding *run, const kv_tile *tile, int64_t head, const float *scores) {
    const kv_scores *to = &run->call->scores;
    const int64_t stride = kv_score_stride(run->call->seq_lens[run->row]);
    float *lanes = to->lanes + to->first_lane[run->row] + head * run->group * stride + tile->first;
    for (int64_t i = 0; i < run->group; i++)
        memcpy(lanes + i * stride, scores + i * ROOM, (size_t)tile->count * sizeof(float));
}

/* The mean over the group of what goes into exp for the newest query, to its place; what is hidden (-inf) counts as 0.
 * `all_seen` is a constant where speed matters. */
KV_INLINE void head_export(const decoding *run, const kv_tile *tile, int64_t head, const float *scores,
                           const int all_seen) {
    const kv_scores *to = &run->call->scores;
    float *out = to->out + run->row * to->row_stride + head * to->head_stride + tile->first;
    const float part = 1 / (float)run->group;
    vf sum[TILE / VL] = {{0}};
    for (int64_t i = 0; i < run->group; i++)
        KV_UNROLL
        for (int t = 0; t < TILE / VL; t++) {
            const vf s = v_load(scores + i * ROOM + t * VL);
            sum[t] = v_fma(all_seen ? s : v_select(s == -INFINITY, (vf){0}, s), v_set(part), sum[t]);
        }
    if (all_seen) memcpy(out, sum, sizeof sum);
    else memcpy(out, sum, (size_t)tile->count * sizeof(float));
}

/* Whether every query sees every token of the tile, but for a mask. */
static int is_all_seen(const decoding *run, const kv_tile *tile) {
    const kv_attention *call = run->call;
    const int64_t first_position = call->seq_lens[run->row] - run->num_queries;
    const int64_t last_position = call->seq_lens[run->row] - 1;
    return tile->count == TILE && tile->first + TILE - 1 <= first_position &&
           (call->window > last_position || tile->first > last_position - call->window);
}

static void head_weights(decoding *run, const kv_tile *tile, int64_t head) {
    const kv_attention *call = run->call;
    const int plain = is_all_seen(run, tile) && call->soft_cap == 0 && call->slopes == NULL && call->mask == NULL;
    if (!plain)
        for (int64_t i = 0; i < run->lanes; i++)
            lane_features(run, tile, head * run->lanes + i, run->scores + i * ROOM);
    if (call->scores.kind != KV_NO_SCORES) {
        const float *newest = run->scores + (run->lanes - run->group) * ROOM;
        if (call->scores.kind == KV_MASS) head_lay_aside(run, tile, head, newest);
        else if (plain) head_export(run, tile, head, newest, 1);
        else head_export(run, tile, head, newest, 0);
    }
    for (int64_t i = 0; i < run->lanes; i++)
        lane_softmax(run, head * run->lanes + i, run->scores + i * ROOM, run->decay + i);
}

/* -------- values -------- */

/* How many of a head's lanes, one after the other, see the same tokens of the tile. */
static int64_t lanes_alike(const decoding *run, const kv_tile *tile) {
    const kv_attention *call = run->call;
    if (call->mask != NULL && call->mask_head_stride != 0) return 1;
    return call->mask == NULL && (run->num_queries == 1 || is_all_seen(run, tile)) ? run->lanes : run->group;
}

/* The tile's values, `offset` included; zeros in place of those that lanes [i, end) give no weight: what a query does
 * not see may hold anything. */
static void used_values(const decoding *run, const kv_tile *tile, int64_t offset, int64_t i, int64_t end,
                        const char **values) {
    for (int64_t t = 0; t < tile->count; t++) {
        int is_used = 0;
        for (int64_t lane = i; lane < end; lane++) is_used |= run->scores[lane * ROOM + t] != 0;
        values[t] = is_used ? tile->v[t] + offset : (const char *)run->zeros;
    }
}

/* `rows` lanes of a head from the i-th on. */
KV_INLINE void lanes_values(kv_dtype dtype, const int rows, const decoding *run, const char *const *tokens,
                            int64_t count, int64_t offset, int64_t head, int64_t i, fetching *ahead) {
    const kv_plane *plane = &run->call->layer->v;
    const int is_quantized = dtype == KV_U8 || dtype == KV_U4;
    const int64_t dim = plane->dim, stride = run->v_padded, groups = is_quantized ? kv_groups(plane) : 1;
    const float *decay = run->decay + i, *starts = NULL;
    float *acc = run->acc + (head * run->lanes + i) * stride;
    for (int64_t g = 0, d = 0; g < groups; g++) {
        const float *weights = (is_quantized ? run->scaled + g * run->lanes * ROOM : run->scores) + i * ROOM;
        const int64_t end = is_quantized ? (g + 1) * plane->group_size : dim;
        if (is_quantized) starts = run->shifts + i * groups + g;
        for (; ARE_REGISTERS_MANY && d + 2 * PAIR <= end; d += 2 * PAIR)
            weigh(dtype, rows, 2, 0, tokens, count, offset, d, stride, weights, decay, acc, starts, groups, ahead);
        for (; d + PAIR <= end; d += PAIR)
            weigh(dtype, rows, 1, 0, tokens, count, offset, d, stride, weights, decay, acc, starts, groups, ahead);
        if (!is_quantized && d < end)
            weigh(dtype, rows, 1, dim - d, tokens, count, offset, d, stride, weights, decay, acc, starts, groups,
                  ahead);
    }
}

/* Lanes [i, end) of a head. */
KV_INLINE void some_values(kv_dtype dtype, const decoding *run, const char *const *tokens, int64_t count,
                           int64_t offset, int64_t head, int64_t i, int64_t end, fetching *ahead) {
    for (; i + 4 <= end; i += 4, ahead->step = 0)
        lanes_values(dtype, 4, run, tokens, count, offset, head, i, ahead);
    switch (end - i) {
    case 3: lanes_values(dtype, 3, run, tokens, count, offset, head, i, ahead); break;
    case 2: lanes_values(dtype, 2, run, tokens, count, offset, head, i, ahead); break;
    case 1: lanes_values(dtype, 1, run, tokens, count, offset, head, i, ahead); break;
    }
}

/* Sums up the tile's values of a head; meanwhile the keys at `next` are fetched, those that are used next. */
KV_INLINE void head_values_as(kv_dtype dtype, const decoding *run, const kv_tile *tile, int64_t head,
                              const char *const *next, int64_t next_offset) {
    const kv_layer *layer = run->call->layer;
    const int is_quantized = dtype == KV_U8 || dtype == KV_U4;
    const char *used[TILE], *const *tokens = tile->v;
    const int64_t count = tile->count, alike = is_quantized ? run->lanes : lanes_alike(run, tile);
    const int64_t offset = head * layer->v.head_stride * kv_itemsize(dtype);
    fetching ahead = plane_fetching(layer, &layer->k, &layer->v, next, count, next_offset);
    if (is_quantized) {
        const int64_t groups = kv_groups(&layer->v), at = head * groups * TILE;
        scale_weights(run->scores, run->lanes, groups, count, run->v.scales + at, run->v.biases + at, run->scaled,
                      run->shifts);
    }
    for (int64_t i = 0; i < run->lanes; i += alike, ahead.step = 0) {
        if (!is_quantized && (alike < run->lanes || run->call->mask != NULL)) {
            used_values(run, tile, offset, i, i + alike, used);
            tokens = used;
        }
        some_values(dtype, run, tokens, count, tokens == used ? 0 : offset, head, i, i + alike, &ahead);
    }
}

#define HEAD_VALUES(TYPE) \
    static KV_APART void head_values_##TYPE(const decoding *run, const kv_tile *tile, int64_t head, \
                                            const char *const *next, int64_t next_offset) { \
        head_values_as(KV_##TYPE, run, tile, head, next, next_offset); \
    }
FOR_EACH_STORED(HEAD_VALUES)

static void head_values(const decoding *run, const kv_tile *tile, int64_t head, const char *const *next,
                        int64_t next_offset) {
#define CASE(TYPE) case KV_##TYPE: head_values_##TYPE(run, tile, head, next, next_offset); break;
    switch (kv_stored(run->call->layer, &run->call->layer->v)) { FOR_EACH_STORED(CASE) }
#undef CASE
}

/* -------- a part, the end -------- */

/* What a lane's acc has to be multiplied with: one over the sum, the sink included. Kept for KV_MASS. */
static float lane_factor(const decoding *run, int64_t lane, float largest, float sum) {
    const kv_attention *call = run->call;
    const int64_t head = lane_head(run, lane);
    float factor = 1, offset = largest;
    if (call->sinks != NULL && call->sinks[head] > -INFINITY) {
        const float sink = call->sinks[head];
        offset = sink > largest ? sink : largest;
        factor = expf(largest - offset);
        sum = sum * factor + expf(sink - offset);
    }
    if (call->scores.kind == KV_MASS && lane % run->lanes >= run->lanes - run->group) {
        const int64_t at = run->row * call->num_q_heads + head;
        call->scores.largest[at] = sum == 0 ? 0 : offset;
        call->scores.share[at] = sum == 0 ? 0 : 1 / sum / (float)run->group;
    }
    return sum == 0 ? 0 : factor / sum;
}

/* Divides by the sum and writes one lane's row of `out`. */
static void lane_finish(const decoding *run, int64_t lane, float largest, float sum, const float *acc) {
    const kv_attention *call = run->call;
    const kv_tokens *out = &call->out;
    const kv_dtype stored = kv_stored(call->layer, &call->layer->v);
    const int64_t dim = call->layer->v.dim, size = kv_itemsize(out->dtype), head = lane_head(run, lane);
    const float factor = lane_factor(run, lane, largest, sum);
    char *to = out->base + (lane_token(run, lane) * out->token_stride + head * out->head_stride) * size;
    for (int64_t d = 0; d < dim; d += PAIR) {
        float some[PAIR];
        pair_shuffle(stored, acc + d, some, 1);
        for (int64_t i = d; i < dim && i < d + PAIR; i += VL) {
            char *at = to + i * out->dim_stride * size;
            const int64_t n = dim - i < VL ? dim - i : VL;
            v_store_strided_as(out->dtype, at, out->dim_stride, n, v_load(some + i - d) * factor);
        }
    }
}

/* Scales and biases of the tile, where there are any. */
static void decoding_find_factors(const decoding *run, const kv_tile *tile) {
    const kv_layer *layer = run->call->layer;
    if (layer->k.bits != 0) tile_factors(run->call, run->row, tile, &layer->k, run->k);
    if (layer->v.bits != 0) tile_factors(run->call, run->row, tile, &layer->v, run->v);
}

KV_INLINE void decoding_fetch_factors(const decoding *run, const kv_tile *tile) {
    for (int i = 0; i < 2; i++) {
        const kv_plane *plane = i ? &run->call->layer->v : &run->call->layer->k;
        if (plane->bits == 0) continue;
        fetch_factors(run->call, run->row, tile, &plane->scales, kv_groups(plane));
        fetch_factors(run->call, run->row, tile, &plane->biases, kv_groups(plane));
    }
}

static int64_t decode_queries(const kv_attention *call, int64_t row, int scores_alone) {
    return scores_alone ? 1 : call->cu_q_lens[row + 1] - call->cu_q_lens[row];
}

static void decode_part(const kv_attention *call, int64_t row, int scores_alone, int64_t begin, int64_t end,
                        float *scratch, float *partial) {
    decoding run = decoding_of(call, row, decode_queries(call, row, scores_alone), scratch);
    const kv_layer *layer = call->layer;
    const int64_t k_head_step = layer->k.head_stride * kv_itemsize(kv_stored(layer, &layer->k));
    kv_tile tiles[2];
    if (partial != NULL) decoding_set_state(&run, partial);
    decoding_load_queries(&run);
    memset(run.zeros, 0, (size_t)run.v_padded * sizeof(float));
    memset(run.sum, 0, (size_t)run.num_lanes * sizeof(float));
    if (!scores_alone) memset(run.acc, 0, (size_t)(run.num_lanes * run.v_padded) * sizeof(float));
    for (int64_t lane = 0; lane < run.num_lanes; lane++) run.largest[lane] = -INFINITY;

    tile_find(&tiles[0], call, row, begin, end);
    for (int64_t now = 0; begin < end; now = 1 - now) {
        const kv_tile *tile = &tiles[now], *next = tile;
        begin += tile->count;
        if (begin < end) {
            tile_find(&tiles[1 - now], call, row, begin, end);
            next = &tiles[1 - now];
            decoding_fetch_factors(&run, &tiles[1 - now]);
        }
        decoding_find_factors(&run, tile);
        for (int64_t head = 0; head < layer->num_kv_heads; head++) {
            const int is_last = head + 1 == layer->num_kv_heads;
            head_scores(&run, tile, head, !scores_alone);
            head_weights(&run, tile, head);
            if (scores_alone) continue;
            head_values(&run, tile, head, is_last ? next->k : tile->k, is_last ? 0 : (head + 1) * k_head_step);
        }
    }
    if (partial == NULL)
        for (int64_t lane = 0; lane < run.num_lanes; lane++)
            lane_finish(&run, lane, run.largest[lane], run.sum[lane], run.acc + lane * run.v_padded);
}

static void decode_merge(const kv_attention *call, int64_t row, int scores_alone, const float *partials,
                         int64_t num_partials, float *scratch) {
    decoding run = decoding_of(call, row, decode_queries(call, row, scores_alone), scratch);
    const int64_t step = partial_floats(call, run.num_queries, scores_alone);
    for (int64_t lane = 0; lane < run.num_lanes; lane++) {
        float largest = -INFINITY, sum = 0;
        memset(run.acc, 0, (size_t)run.v_padded * sizeof(float));
        for (int64_t i = 0; i < num_partials; i++) {
            const float found = partials[i * step + lane];
            if (found > largest) largest = found;
        }
        for (int64_t i = 0; i < num_partials; i++) {
            const float *part = partials + i * step;
            const float *more = part + 2 * whole_lines(run.num_lanes) + lane * run.v_padded;
            const float part_sum = part[whole_lines(run.num_lanes) + lane];
            if (part_sum == 0) continue; /* nothing of it is seen */
            const float factor = expf(part[lane] - largest);
            sum += part_sum * factor;
            for (int64_t d = 0; !scores_alone && d < run.v_padded; d += VL)
                v_store(run.acc + d, v_fma(v_load(more + d), v_set(factor), v_load(run.acc + d)));
        }
        if (scores_alone) lane_factor(&run, lane, largest, sum);
        else lane_finish(&run, lane, largest, sum, run.acc);
    }
}
