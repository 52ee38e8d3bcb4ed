/* From scores to weights, lane by lane: what changes a score, what hides it, and the online softmax. Included by chunk.h.
 */
#ifndef KV_CHUNK_SOFTMAX_H
#define KV_CHUNK_SOFTMAX_H

static int chunk_is_plain(const kv_attention *call) { return call->soft_cap == 0 && !call->slopes && !call->mask; }

/* Entries of the mask for keys [begin, begin + CHUNK_MR) of the context, as [CHUNK_MR][lanes]. Keys past the context are
 * hidden anyway, and not read: the mask may end there. */
static void chunk_load_mask(const chunk_item *item, const chunk_panel *panel, int64_t begin, float *block) {
    const kv_attention *call = item->call;
    const int64_t lanes = panel->nv * KV_W, left = item->num_keys - begin, n = left < CHUNK_MR ? left : CHUNK_MR;
    memset(block, 0, sizeof(float) * CHUNK_MR * lanes);
    for (int64_t i = 0; i < panel->num_rows; i++) {
        const int64_t r = panel->first_row + i, head = item->kv_head * item->group + r % item->group;
        const float *entries = call->mask + (item->first_token + r / item->group) * call->mask_token_stride + head * call->mask_head_stride;
        for (int64_t c = 0; c < n; c++) block[c * lanes + i] = entries[begin + c];
    }
}

/* Soft cap, ALiBi and mask on the scores of keys [begin, end) of a tile, and -inf on what a row does not see, whatever was
 * there: a key that is hidden may be NaN. `tops` becomes the maximum of what is left. */
static KV_NOINLINE void chunk_adjust(const chunk_item *item, const chunk_panel *panel, int64_t tile, int64_t begin, int64_t end,
                                  int64_t window, float *tops) {
    const kv_attention *call = item->call;
    const int nv = panel->nv;
    const vf hidden = v_set1(-INFINITY), cap = v_set1(call->soft_cap), per_cap = v_set1(1 / call->soft_cap);
    const vf at = v_set1((float)(item->first_position - tile)); /* rounded only where no row's sight begins or ends */
    const vf oldest = v_set1((float)(item->first_position - window - tile));
    float mask[CHUNK_MR * CHUNK_LANES];
    vf most[CHUNK_NV];
    for (int v = 0; v < nv; v++) most[v] = hidden;
    float *s = item->scores;
    for (int64_t c = begin; c < end; c++) {
        if (call->mask && (c - begin) % CHUNK_MR == 0) chunk_load_mask(item, panel, tile + c, mask);
        for (int v = 0; v < nv; v++, s += KV_W) {
            const int64_t lane = panel->first_row + v * KV_W;
            const vf key = v_set1((float)c), query = v_load(item->query + lane);
            const vf behind = v_sub(key, v_add(query, at)); /* c - p */
            vf x = v_load(s);
            if (call->soft_cap != 0) x = v_mul(cap, v_tanh(v_mul(x, per_cap)));
            if (call->slopes) x = v_fma(v_load(item->slope + lane), behind, x);
            vm seen = vm_and(v_le(behind, v_zero()), v_lt(v_add(query, oldest), key));
            if (call->mask) {
                const vf entry = v_load(mask + ((c - begin) % CHUNK_MR * nv + v) * KV_W);
                x = v_add(x, entry);
                seen = vm_and(seen, v_lt(hidden, entry));
            }
            x = v_select(seen, x, hidden);
            most[v] = v_max(most[v], x);
            v_store(s, x);
        }
    }
    for (int v = 0; v < nv; v++) v_store(tops + v * KV_W, most[v]);
}

/* scores -> exp(score - maximum), in place, where the maximum is that of all keys so far; `decay` is what becomes of
 * everything before. The maximum is kept times log2(e), rounded: any common offset will do, and this one makes the
 * exponent of every weight a single FMA. */
static KV_NOINLINE void chunk_weights(const chunk_item *item, const chunk_panel *panel, int64_t n, const float *tops, float *decay) {
    const int nv = panel->nv;
    const vf log2e = v_set1(CHUNK_LOG2E), lowest = v_set1(-INFINITY);
    float *sum = item->sum + panel->first_row, *top = item->top + panel->first_row;
    for (int v = 0; v < nv; v++) {
        const vf before = v_load(top + v * KV_W), most = v_max(before, v_mul(v_load(tops + v * KV_W), log2e));
        const vf offset = v_select(v_lt(lowest, most), most, v_zero()); /* nothing seen yet: -inf - -inf is NaN */
        const vf minus = v_neg(offset), old = v_exp2(v_sub(before, offset));
        float *s = item->scores + v * KV_W;
        vf a = v_zero(), b = v_zero();
        for (int64_t c = 0; c < n; c += 2, s += 2 * nv * KV_W) {
            const vf x = v_exp2(v_fma(v_load(s), log2e, minus)), y = v_exp2(v_fma(v_load(s + nv * KV_W), log2e, minus));
            v_store(s, x);
            v_store(s + nv * KV_W, y);
            a = v_add(a, x);
            b = v_add(b, y);
        }
        v_store(top + v * KV_W, most);
        v_store(sum + v * KV_W, v_fma(v_load(sum + v * KV_W), old, v_add(a, b)));
        v_store(decay + v * KV_W, old);
    }
}

/* The product of a tile whose values are not all finite: a weight of 0 takes nothing. */
static KV_NOINLINE void chunk_values_carefully(const chunk_item *item, int64_t begin, int64_t end, const float *decay, float *out, int nv) {
    for (int64_t d = 0; d < item->v_rows; d++) {
        const float *values = item->values + d / CHUNK_MR * CHUNK_MR * CHUNK_KEYS + d % CHUNK_MR;
        for (int v = 0; v < nv; v++) {
            float *o = out + (d * nv + v) * KV_W;
            vf sum = v_zero();
            for (int64_t c = begin; c < end; c++) {
                const vf weight = v_load(item->scores + ((c - begin) * nv + v) * KV_W);
                sum = v_select(v_lt(v_zero(), weight), v_fma(v_set1(values[c * CHUNK_MR]), weight, sum), sum);
            }
            v_store(o, v_fma(v_load(o), v_load(decay + v * KV_W), sum));
        }
    }
}

#endif
