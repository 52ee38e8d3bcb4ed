/* From scores to weights, lane by lane: what changes a score, what hides it, the online softmax. Part of chunk.h. */

static int chunk_is_plain(const kv_attention *call) { return call->soft_cap == 0 && !call->slopes && !call->mask; }

/* Entries of the mask for keys [begin, begin + CHUNK_MR) of the context, as [CHUNK_MR][lanes]. Those of keys past the
 * context are not read: the mask may end there, and the keys are hidden anyway. */
static void chunk_load_mask(const chunk_item *item, const chunk_panel *panel, int64_t begin, float *block) {
    const kv_attention *call = item->call;
    const int64_t lanes = panel->nv * VL, left = item->num_keys - begin, n = left < CHUNK_MR ? left : CHUNK_MR;
    memset(block, 0, sizeof(float) * CHUNK_MR * lanes);
    for (int64_t i = 0; i < panel->num_rows; i++) {
        const int64_t r = panel->first_row + i, head = chunk_head(item, r);
        const int64_t token = item->first_token + r / item->group;
        const float *entries = call->mask + token * call->mask_token_stride + head * call->mask_head_stride;
        for (int64_t c = 0; c < n; c++) block[c * lanes + i] = entries[begin + c];
    }
}

/* Soft cap, ALiBi and mask on the scores of keys [begin, end) of a tile, and -inf on what a row does not see, whatever
 * was there: a key that is hidden may be NaN. `tops` becomes the maximum of what is left. */
static KV_APART void chunk_adjust(const chunk_item *item, const chunk_panel *panel, int64_t tile, int64_t begin,
                                     int64_t end, int64_t window, float *tops) {
    const kv_attention *call = item->call;
    const int nv = panel->nv;
    const vf hidden = v_set(-INFINITY), cap = v_set(call->soft_cap);
    const vf at = v_set((float)(item->first_position - tile)); /* rounded only where no row's sight begins or ends */
    const vf oldest = v_set((float)(item->first_position - window - tile));
    float mask[CHUNK_MR * CHUNK_LANES];
    vf most[CHUNK_NV];
    for (int v = 0; v < nv; v++) most[v] = hidden;
    float *s = item->scores;
    for (int64_t c = begin; c < end; c++) {
        if (call->mask && (c - begin) % CHUNK_MR == 0) chunk_load_mask(item, panel, tile + c, mask);
        for (int v = 0; v < nv; v++, s += VL) {
            const int64_t lane = panel->first_row + v * VL;
            const vf key = v_set((float)c), query = v_load(item->query + lane);
            const vf behind = key - (query + at); /* c - p */
            vf x = v_load(s);
            if (call->soft_cap != 0) x = cap * v_tanh(x / cap);
            if (call->slopes) x = v_fma(v_load(item->slope + lane), behind, x);
            vi seen = (behind <= 0) & (query + oldest < key);
            if (call->mask) {
                const vf entry = v_load(mask + ((c - begin) % CHUNK_MR * nv + v) * VL);
                x += entry;
                seen &= entry != hidden;
            }
            x = v_select(seen, x, hidden);
            most[v] = v_max(most[v], x);
            v_store(s, x);
        }
    }
    for (int v = 0; v < nv; v++) v_store(tops + v * VL, most[v]);
}

/* 2^x for x <= 0 (and a little above), within 1 ulp; 0 from -127 down, so for -inf; NaN stays. The polynomial is the
 * minimax one of 2^f on [-1/2, 1/2]. Cheaper than v_exp: no range reduction by ln 2, no upper limit. */
KV_INLINE vf chunk_exp2(vf x) {
    const float magic = 0x1.8p23f + 127; /* leaves the rounded x, plus the bias of exponents, in the lowest bits */
    x = v_max(v_set(-127), x);
    const vf shifted = x + magic, f = x - (shifted - magic);
    static const float c[] = {1.535336188319500e-4f, 1.339887440266574e-3f, 9.618437357674640e-3f,
                              5.550332471162809e-2f, 2.402264791363012e-1f, 6.931472028550421e-1f, 1};
    return v_polynomial(c, 7, f) * (vf)((vi)shifted << 23);
}

/* What to subtract from scores whose maximum is `top`: 0 while nothing is seen, because -inf - -inf is NaN. */
KV_INLINE vf chunk_offset(vf top) { return v_select(top == -INFINITY, v_set(0), top); }

/* Scores relative to their maximum, of rows whose maximum is at an end of the float range: a mask has put it there.
 * What is not equal to such a number is so far from it that the difference may be rounded or infinite. */
static KV_APART void chunk_come_near(float *scores, int64_t n, int64_t step, vi which, vf offset) {
    for (int64_t c = 0; c < n; c++, scores += step) {
        const vf s = v_load(scores);
        v_store(scores, v_select(which, s - offset, s));
    }
}

/* scores -> exp(score - maximum), in place, where the maximum is that of all keys so far; `decay` is what becomes of
 * everything before. The maximum is taken times log2(e), rounded: any common offset will do, and this one makes the
 * exponent of every weight a single FMA. In `before * log2e + minus` the product must be rounded as it was for the
 * weights so far, or a maximum that stays does not leave them as they are: hence -ffp-contract=off in setup.py. */
static KV_APART void chunk_weights(const chunk_item *item, const chunk_panel *panel, int64_t n, const float *tops,
                                      float *decay) {
    const int nv = panel->nv;
    const vf log2e = v_set(CHUNK_LOG2E);
    float *sum = item->sum + panel->first_row, *top = item->top + panel->first_row;
    for (int v = 0; v < nv; v++) {
        const vf before = v_load(top + v * VL), most = v_max(before, v_load(tops + v * VL));
        const vf offset = chunk_offset(most);
        const vi far = v_abs(offset) > CHUNK_FAR;
        vf minus = -(offset * log2e), old = chunk_exp2(before * log2e + minus);
        if (v_largest(v_select(far, v_set(1), v_set(0))) > 0) {
            chunk_come_near(item->scores + v * VL, n, nv * VL, far, offset);
            minus = v_select(far, v_set(0), minus);
            old = v_select(far, chunk_exp2((before - offset) * log2e), old);
        }
        float *s = item->scores + v * VL;
        vf a = v_set(0), b = v_set(0);
        for (int64_t c = 0; c < n; c += 2, s += 2 * nv * VL) {
            const vf x = chunk_exp2(v_fma(v_load(s), log2e, minus));
            const vf y = chunk_exp2(v_fma(v_load(s + nv * VL), log2e, minus)); /* two chains of sums */
            v_store(s, x);
            v_store(s + nv * VL, y);
            a += x;
            b += y;
        }
        v_store(top + v * VL, most);
        v_store(sum + v * VL, v_fma(v_load(sum + v * VL), old, a + b));
        v_store(decay + v * VL, old);
    }
}

/* The product of a tile whose values are not all finite: a weight of 0 takes nothing. */
static KV_APART void chunk_values_carefully(const chunk_item *item, int64_t begin, int64_t end, const float *decay,
                                               float *out, int nv) {
    for (int64_t d = 0; d < item->v_rows; d++) {
        const float *values = item->values + d / CHUNK_MR * CHUNK_MR * CHUNK_KEYS + d % CHUNK_MR;
        for (int v = 0; v < nv; v++) {
            float *o = out + (d * nv + v) * VL;
            vf sum = v_set(0);
            for (int64_t c = begin; c < end; c++) {
                const vf weight = v_load(item->scores + ((c - begin) * nv + v) * VL);
                sum = v_select(weight > 0, v_fma(v_set(values[c * CHUNK_MR]), weight, sum), sum);
            }
            v_store(o, v_fma(v_load(o), v_load(decay + v * VL), sum));
        }
    }
}
