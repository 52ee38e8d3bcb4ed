/* Between memory and the panels of a chunk: queries in, K and V of a tile in, results out. Included by chunk.h. */

#define CHUNK_AHEAD 16 /* keys */

/* `n` elements, `stride` elements apart, as floats, to `line`; its last vector is filled up with zeros. */
KV_COPIES void chunk_load_as(kv_dtype dtype, const char *p, int64_t stride, int64_t n, float *line) {
    const int64_t step = stride * kv_itemsize(dtype), whole = n / VL * VL;
    for (int64_t d = 0; d < whole; d += VL) v_store(line + d, v_load_strided_as(dtype, p + d * step, stride, VL));
    if (whole < n) v_store(line + whole, v_load_strided_as(dtype, p + whole * step, stride, n - whole));
}

static void chunk_load_line(kv_dtype dtype, const char *p, int64_t stride, int64_t n, float *line) {
    if (dtype == KV_F32)
        chunk_load_as(KV_F32, p, stride, n, line);
    else if (dtype == KV_F16)
        chunk_load_as(KV_F16, p, stride, n, line);
    else if (dtype == KV_F8)
        chunk_load_as(KV_F8, p, stride, n, line);
    else
        chunk_load_as(KV_BF16, p, stride, n, line);
}

static char *chunk_token(const kv_tokens *tokens, int64_t token, int64_t head) {
    return tokens->base + (token * tokens->token_stride + head * tokens->head_stride) * kv_itemsize(tokens->dtype);
}

/* Element 0 of this slot of a plane. */
static const char *chunk_slot(const chunk_item *item, const kv_plane *plane, int64_t position) {
    const kv_layer *layer = item->call->layer;
    const int64_t block = item->table[position / layer->block_size], slot = position % layer->block_size;
    const int64_t at = block * plane->block_stride + slot * plane->slot_stride + item->kv_head * plane->head_stride;
    return plane->base + at * kv_itemsize(kv_stored(layer, plane));
}

/* The key or value of a position as floats. */
static void chunk_load_token(const chunk_item *item, const kv_plane *plane, int64_t position, float *line) {
    const kv_layer *layer = item->call->layer;
    if (plane->bits == 0) {
        chunk_load_line(layer->dtype, chunk_slot(item, plane, position), 1, plane->dim, line);
        return;
    }
    const int64_t block = item->table[position / layer->block_size], slot = position % layer->block_size;
    const kv_packed from = packed_at(layer, plane, block, slot, item->kv_head);
    dequantize_line(&from, plane->dim, line);
}

/* Asks for key and value of a position: blocks lie anywhere, so the hardware cannot foresee them. Into L2, because rows
 * that are a power of two apart would push each other out of L1. Inline, because GCC 12 takes a function that does
 * nothing but prefetch for one without effects, and drops the call. */
KV_INLINE void chunk_prefetch(const chunk_item *item, int64_t position) {
    const kv_layer *layer = item->call->layer;
    const int64_t k_bits = kv_bits(kv_stored(layer, &layer->k)), v_bits = kv_bits(kv_stored(layer, &layer->v));
    const char *k = chunk_slot(item, &layer->k, position), *v = chunk_slot(item, &layer->v, position);
    for (int64_t at = 0; at < item->dim * k_bits / 8; at += 64) __builtin_prefetch(k + at, 0, 2);
    for (int64_t at = 0; at < item->v_dim * v_bits / 8; at += 64) __builtin_prefetch(v + at, 0, 2);
}

/* Queries of a panel as [D][lanes], times `scale`; the running state of its rows at "nothing seen". */
static void chunk_load_queries(const chunk_item *item, const chunk_panel *panel) {
    const kv_attention *call = item->call;
    const int64_t lanes = panel->nv * VL, first = panel->first_row, dim = item->dim;
    float *q = item->q + first * dim;
    for (int64_t i = 0; i < lanes; i++) {
        const int64_t query = (first + i) / item->group, head = chunk_head(item, first + i);
        const int is_row = i < panel->num_rows;
        item->top[first + i] = -INFINITY;
        item->sum[first + i] = 0;
        item->query[first + i] = (float)query;
        item->slope[first + i] = is_row && call->slopes ? call->slopes[head] : 0;
        if (is_row)
            chunk_load_line(call->q.dtype, chunk_token(&call->q, item->first_token + query, head), call->q.dim_stride,
                            dim, item->line);
        else
            memset(item->line, 0, sizeof(float) * dim);
        for (int64_t d = 0; d < dim; d++) q[d * lanes + i] = item->line[d] * call->scale;
    }
    memset(item->out + first * item->v_rows, 0, sizeof(float) * lanes * item->v_rows);
}

/* Keys and values [begin, end) of the context, as far as they are in this tile; zeros elsewhere. */
static void chunk_load_keys(chunk_item *item, int64_t tile, int64_t begin, int64_t end) {
    const kv_layer *layer = item->call->layer;
    const int64_t dim = item->dim, v_dim = item->v_dim, v_rows = item->v_rows;
    vf bad = v_set(0);
    for (int64_t d = v_dim / VL * VL; d < v_rows; d += VL) v_store(item->line + d, v_set(0));
    for (int64_t c = 0; c < CHUNK_KEYS; c++) {
        float *key = item->keys + c * dim;
        if (tile + c >= begin && tile + c < end) {
            if (tile + c + CHUNK_AHEAD < end) chunk_prefetch(item, tile + c + CHUNK_AHEAD);
            chunk_load_token(item, &layer->k, tile + c, key);
            chunk_load_token(item, &layer->v, tile + c, item->line);
            for (int64_t d = 0; d < v_rows; d += VL) bad = v_fma(v_load(item->line + d), v_set(0), bad);
        } else {
            memset(key, 0, sizeof(float) * dim);
            memset(item->line, 0, sizeof(float) * v_dim);
        }
        for (int64_t d = 0; d < v_rows; d += CHUNK_MR)
            memcpy(item->values + d * CHUNK_KEYS + c * CHUNK_MR, item->line + d, sizeof(float) * CHUNK_MR);
    }
    item->values_finite = v_sum(bad) == 0; /* inf * 0 and NaN * 0 are NaN */
}

/* What the sums of a panel's rows are to be multiplied with: 1 / (sum of weights + sink), 0 where nothing was seen. */
static void chunk_factors(const chunk_item *item, const chunk_panel *panel, float *factors) {
    const float *all = item->call->sinks;
    float sinks[CHUNK_LANES];
    for (int64_t i = 0; i < panel->nv * VL; i++)
        sinks[i] = all && i < panel->num_rows ? all[chunk_head(item, panel->first_row + i)] : -INFINITY;
    for (int v = 0; v < panel->nv; v++) {
        const vf top = v_load(item->top + panel->first_row + v * VL), sink = v_load(sinks + v * VL);
        const vf offset = chunk_offset(v_max(top, sink)), factor = chunk_exp2((top - offset) * CHUNK_LOG2E);
        const vf share = chunk_exp2((sink - offset) * CHUNK_LOG2E);
        const vf sum = v_fma(v_load(item->sum + panel->first_row + v * VL), factor, share);
        v_store(factors + v * VL, v_select(sum == 0, v_set(0), factor / sum));
    }
}

static void chunk_store_line(kv_dtype dtype, char *p, int64_t stride, int64_t n, const float *line) {
    const int64_t step = stride * kv_itemsize(dtype);
    for (int64_t d = 0; d < n; d += VL)
        v_store_strided_as(dtype, p + d * step, stride, n - d < VL ? n - d : VL, v_load(line + d));
}

static void chunk_store_results(const chunk_item *item, const chunk_panel *panel) {
    const kv_tokens *to = &item->call->out;
    const int64_t lanes = panel->nv * VL, first = panel->first_row;
    const float *out = item->out + first * item->v_rows;
    float factors[CHUNK_LANES];
    chunk_factors(item, panel, factors);
    for (int64_t i = 0; i < panel->num_rows; i++) {
        for (int64_t d = 0; d < item->v_dim; d++) item->line[d] = out[d * lanes + i] * factors[i];
        const int64_t token = item->first_token + (first + i) / item->group;
        chunk_store_line(to->dtype, chunk_token(to, token, chunk_head(item, first + i)), to->dim_stride, item->v_dim,
                         item->line);
    }
}
