/* Between memory and the panels of a chunk: queries in, K and V of a tile in, results out. Included by chunk.h. */
#ifndef KV_CHUNK_PACK_H
#define KV_CHUNK_PACK_H

/* Queries of a panel as [D][lanes], times `scale`; the running state of its rows at "nothing seen". */
static void chunk_load_queries(const chunk_item *item, const chunk_panel *panel) {
    const kv_attention *call = item->call;
    const int64_t lanes = panel->nv * KV_W, first = panel->first_row, dim = item->dim;
    float *q = item->q + first * dim, *out = item->out + first * item->v_rows;
    for (int64_t i = 0; i < lanes; i++) {
        const int64_t query = (first + i) / item->group, head = item->kv_head * item->group + (first + i) % item->group;
        item->top[first + i] = -INFINITY;
        item->sum[first + i] = 0;
        item->query[first + i] = (float)query;
        item->slope[first + i] = i < panel->num_rows && call->slopes ? call->slopes[head] : 0;
        if (i < panel->num_rows) {
            kv_load_token(&call->q, item->first_token + query, head, dim, item->line);
            for (int64_t d = 0; d < dim; d++) q[d * lanes + i] = item->line[d] * call->scale;
        } else {
            for (int64_t d = 0; d < dim; d++) q[d * lanes + i] = 0;
        }
    }
    memset(out, 0, sizeof(float) * lanes * item->v_rows);
}

/* Keys and values [begin, end) of the context, as far as they are in this tile; zeros elsewhere. */
static void chunk_load_keys(chunk_item *item, int64_t tile, int64_t begin, int64_t end) {
    const kv_layer *layer = item->call->layer;
    const int64_t dim = item->dim, v_dim = item->v_dim, v_rows = item->v_rows;
    const int64_t first = begin > tile ? begin - tile : 0, limit = end - tile < CHUNK_KEYS ? end - tile : CHUNK_KEYS;
    vf bad = v_zero();
    for (int64_t d = v_dim; d < v_rows + KV_W; d++) item->line[d] = 0;
    memset(item->keys, 0, sizeof(float) * first * dim);
    memset(item->keys + limit * dim, 0, sizeof(float) * (CHUNK_KEYS - limit) * dim);
    for (int64_t c = 0; c < CHUNK_KEYS; c++) {
        if (c >= first && c < limit) {
            const int64_t block = item->table[(tile + c) / layer->block_size], slot = (tile + c) % layer->block_size;
            const int64_t k_at = block * layer->k.block_stride + slot * layer->k.slot_stride + item->kv_head * layer->k.head_stride;
            const int64_t v_at = block * layer->v.block_stride + slot * layer->v.slot_stride + item->kv_head * layer->v.head_stride;
            kv_to_f32(layer->k.base + k_at * kv_itemsize(layer->dtype), layer->dtype, dim, item->keys + c * dim);
            kv_to_f32(layer->v.base + v_at * kv_itemsize(layer->dtype), layer->dtype, v_dim, item->line);
            for (int64_t d = 0; d < v_rows; d += KV_W) bad = v_fma(v_load(item->line + d), v_zero(), bad);
        } else {
            memset(item->line, 0, sizeof(float) * v_dim);
        }
        for (int64_t d = 0; d < v_rows; d += CHUNK_MR)
            memcpy(item->values + d * CHUNK_KEYS + c * CHUNK_MR, item->line + d, sizeof(float) * CHUNK_MR);
    }
    item->values_finite = v_sum(bad) == 0; /* inf * 0 and NaN * 0 are NaN */
}

/* out / (sum + sink) of a panel's rows. */
static void chunk_store_results(const chunk_item *item, const chunk_panel *panel) {
    const kv_attention *call = item->call;
    const int64_t lanes = panel->nv * KV_W, first = panel->first_row;
    const float *out = item->out + first * item->v_rows;
    for (int64_t i = 0; i < panel->num_rows; i++) {
        const int64_t query = (first + i) / item->group, head = item->kv_head * item->group + (first + i) % item->group;
        float top = item->top[first + i], sum = item->sum[first + i], factor = 1;
        if (call->sinks) {
            const float sink = call->sinks[head] * CHUNK_LOG2E, most = sink > top ? sink : top;
            factor = exp2f(top - most);
            sum = sum * factor + exp2f(sink - most);
        }
        factor = sum == 0 ? 0 : factor / sum;
        for (int64_t d = 0; d < item->v_dim; d++) item->line[d] = out[d * lanes + i] * factor;
        kv_store_token(&call->out, item->first_token + query, head, item->v_dim, item->line);
    }
}

#endif
