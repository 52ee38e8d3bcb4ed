/* Attention of a chunk: many queries of one row over its paged context (prefill, speculative windows).
 *
 * One item is (row, KV head, tile of queries); its rows are the queries of all heads of the group, query by query. The
 * context goes by in tiles of CHUNK_KEYS keys at fixed positions: K and V of a tile are gathered and converted once,
 * then every panel of rows does S = K Q^T, online softmax, O = V^T P^T on it (FlashAttention's recurrence, Dao et al.
 * 2022; Milakov and Gimelshein 2018). What a query gets depends on the positions of the tiles of keys alone: a lane
 * does the same operations in the same order whatever panel, tile of queries or thread it is in, and keys that are
 * skipped would have added 0.
 *
 * Keys outside of the tile's reach are zeros in the packed tiles, so slots past the context cannot matter. A value that
 * is not finite (a slot that only the mask hides may hold one) takes the careful product: 0 * NaN is not 0.
 */

#include <math.h>

#include "gemm.h"

#define CHUNK_KEYS 128 /* a multiple of CHUNK_MR; the scores of a panel are to stay in L1 */
#define CHUNK_ROWS 512 /* about; enough rows to pay for packing K and V, few enough to give every core an item */
#define CHUNK_LOG2E 1.44269504088896340736f
#define CHUNK_FAR 0x1p127f /* times log2(e) it is a float still, the largest floats are not */

/* An item while it is worked on. Scores and `top` are natural logarithms. */
typedef struct {
    const kv_attention *call;
    const int32_t *table;
    int64_t kv_head, group;
    int64_t num_keys;       /* context length of the row */
    int64_t first_position; /* of the first query of the tile */
    int64_t num_queries, num_rows;
    int64_t first_token;    /* of the first query, in q and out */
    int64_t dim, v_dim, v_rows; /* D, Dv, Dv rounded up to CHUNK_MR */
    float *q, *out;         /* panel after panel: [D][lanes], [v_rows][lanes] */
    float *top, *sum;       /* per row: running maximum, running sum */
    float *query, *slope;   /* per row: index of its query in the tile, ALiBi slope */
    float *keys, *values;   /* packed tile: [CHUNK_KEYS][D], [v_rows / MR][CHUNK_KEYS][MR] */
    float *scores;          /* [CHUNK_KEYS][lanes] */
    float *line;            /* one row of q, V or out in float32 */
    int values_finite;      /* in this tile */
} chunk_item;

typedef struct {
    int64_t first_row, num_rows; /* rows past num_rows are padding: zeros in, ignored out */
    int nv;
} chunk_panel;

static inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

/* Queries of a tile: a function of the heads alone. */
static int64_t chunk_queries(const kv_attention *call) {
    const int64_t group = call->num_q_heads / call->layer->num_kv_heads;
    return group < CHUNK_ROWS ? CHUNK_ROWS / group : 1;
}

static int64_t chunk_max_rows(const kv_attention *call) {
    const int64_t tile = chunk_queries(call);
    const int64_t queries = tile < call->num_tokens ? tile : call->num_tokens;
    return round_up(queries * (call->num_q_heads / call->layer->num_kv_heads), VL);
}

/* Cuts the scratch of one thread into the item's arrays; see `carve`. */
static int64_t chunk_carve(chunk_item *item, const kv_attention *call, float *scratch) {
    const int64_t rows = chunk_max_rows(call), dim = call->layer->k.dim, v_dim = call->layer->v.dim;
    const int64_t v_rows = round_up(v_dim, CHUNK_MR);
    const kv_need needs[] = {
        {&item->q, rows * dim},         {&item->out, rows * v_rows},
        {&item->top, rows},             {&item->sum, rows},
        {&item->query, rows},           {&item->slope, rows},
        {&item->keys, CHUNK_KEYS * dim + VL}, {&item->values, CHUNK_KEYS * v_rows},
        {&item->scores, CHUNK_KEYS * CHUNK_LANES}, {&item->line, (dim > v_rows ? dim : v_rows) + VL},
    };
    return carve(needs, sizeof needs / sizeof *needs, scratch);
}

static int64_t chunk_scratch_floats(const kv_attention *call) {
    chunk_item item;
    return chunk_carve(&item, call, NULL);
}

/* Panels have CHUNK_NV vectors, the last ones fewer when that is more even: 4 vectors are 2 + 2, not 3 + 1. */
static chunk_panel chunk_panel_at(const chunk_item *item, int64_t index, int64_t num_panels) {
    const int64_t vectors = (item->num_rows + VL - 1) / VL;
    const int64_t begin = index * vectors / num_panels, end = (index + 1) * vectors / num_panels;
    const int64_t left = item->num_rows - begin * VL, lanes = (end - begin) * VL;
    return (chunk_panel){begin * VL, left < lanes ? left : lanes, (int)(end - begin)};
}

static int64_t chunk_num_panels(const chunk_item *item) { return (item->num_rows + CHUNK_LANES - 1) / CHUNK_LANES; }

/* Query head of a row. */
static int64_t chunk_head(const chunk_item *item, int64_t row) {
    return item->kv_head * item->group + row % item->group;
}

#include "chunk_softmax.h"
#include "chunk_pack.h"

/* One tile of keys for one panel: keys [begin, end) of the tile are all that any of its rows sees. */
static void chunk_panel_step(const chunk_item *item, const chunk_panel *panel, int64_t tile) {
    const int64_t first = item->first_position + panel->first_row / item->group;
    const int64_t last = item->first_position + (panel->first_row + panel->num_rows - 1) / item->group;
    const int64_t window = item->call->window < item->num_keys ? item->call->window : item->num_keys;
    int64_t begin = first - window + 1 - tile, end = last + 1 - tile;
    begin = begin < 0 ? 0 : begin / CHUNK_MR * CHUNK_MR;
    end = end > CHUNK_KEYS ? CHUNK_KEYS : round_up(end, CHUNK_MR);
    if (begin >= end) return;

    const int nv = panel->nv;
    float tops[CHUNK_LANES], decay[CHUNK_LANES];
    float *out = item->out + panel->first_row * item->v_rows;
    scores_panel(item->keys + begin * item->dim, item->dim, item->q + panel->first_row * item->dim, end - begin,
                 item->scores, tops, nv);
    if (!chunk_is_plain(item->call) || tile + end > first + 1 || tile + begin <= last - window)
        chunk_adjust(item, panel, tile, begin, end, window, tops);
    chunk_weights(item, panel, end - begin, tops, decay);
    if (item->values_finite)
        values_panel(item->values + begin * CHUNK_MR, CHUNK_KEYS, item->v_rows, item->scores, end - begin, decay, out,
                     nv);
    else
        chunk_values_carefully(item, begin, end, decay, out, nv);
}

/* Queries [first_query, first_query + num_queries) of a row, for all query heads of `kv_head`. */
static void chunk_tile(const kv_attention *call, int64_t row, int64_t kv_head, int64_t first_query, int64_t num_queries,
                       float *scratch) {
    const int64_t group = call->num_q_heads / call->layer->num_kv_heads;
    const int64_t num_keys = call->seq_lens[row], q_len = call->cu_q_lens[row + 1] - call->cu_q_lens[row];
    chunk_item item = {
        .call = call,
        .table = call->tables + row * call->table_stride,
        .kv_head = kv_head,
        .group = group,
        .num_keys = num_keys,
        .first_position = num_keys - q_len + first_query,
        .num_queries = num_queries,
        .num_rows = num_queries * group,
        .first_token = call->cu_q_lens[row] + first_query,
        .dim = call->layer->k.dim,
        .v_dim = call->layer->v.dim,
        .v_rows = round_up(call->layer->v.dim, CHUNK_MR),
    };
    chunk_carve(&item, call, scratch);
    const int64_t num_panels = chunk_num_panels(&item);
    for (int64_t i = 0; i < num_panels; i++) {
        const chunk_panel panel = chunk_panel_at(&item, i, num_panels);
        chunk_load_queries(&item, &panel);
    }
    /* keys that any query of the tile sees */
    const int64_t window = call->window < num_keys ? call->window : num_keys;
    const int64_t oldest = item.first_position - window + 1 > 0 ? item.first_position - window + 1 : 0;
    const int64_t end = item.first_position + num_queries;
    for (int64_t tile = oldest / CHUNK_KEYS * CHUNK_KEYS; tile < end; tile += CHUNK_KEYS) {
        chunk_load_keys(&item, tile, oldest, end);
        for (int64_t i = 0; i < num_panels; i++) {
            const chunk_panel panel = chunk_panel_at(&item, i, num_panels);
            chunk_panel_step(&item, &panel, tile);
        }
    }
    for (int64_t i = 0; i < num_panels; i++) {
        const chunk_panel panel = chunk_panel_at(&item, i, num_panels);
        chunk_store_results(&item, &panel);
    }
}
