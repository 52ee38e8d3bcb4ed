/* The two matrix products of a chunk, on panels of query rows: the register-blocked inner loop of both.
 *
 * The rows of a panel lie in the lanes of up to CHUNK_NV vectors: Q^T, scores and result are all [.., lanes]. So both
 * products have the same shape, "for each k: outer product of a column of A and a row of B", where B is a panel, and A
 * is K or V. Neither of these is ever transposed, and softmax works lane by lane, without a horizontal step.
 * The blocking is that of GotoBLAS and BLIS (Goto and van de Geijn 2008; Van Zee and van de Geijn 2015): the panel of B
 * stays in L1, A streams from L2, the product in registers: CHUNK_MR * CHUNK_NV sums, a row of B, a broadcast of A.
 *
 * Every lane is a chain of FMAs in the order of k, whatever the number of vectors in a panel.
 */

#if defined(KV_SIMD_AVX512) || defined(KV_SIMD_NEON) /* 32 vector registers */
#define CHUNK_MR 8
#else
#define CHUNK_MR 4
#endif
#define CHUNK_NV 3 /* 8 x 3 sums, 4 x 3 in 16 registers: enough to hide the latency of FMA, few enough not to spill */
#define CHUNK_LANES (CHUNK_NV * VL)

/* sums[r][v] = sum over k < n of a[r * row_stride + k * k_stride] * b[k][v]; all of it unrolled: nv is a constant. */
KV_INLINE void outer_products(vf sums[CHUNK_MR][CHUNK_NV], const float *a, int64_t row_stride, int64_t k_stride,
                              const float *b, int64_t n, const int nv) {
KV_UNROLL
    for (int r = 0; r < CHUNK_MR; r++)
KV_UNROLL
        for (int v = 0; v < nv; v++) sums[r][v] = v_set(0);
    for (int64_t k = 0; k < n; k++, a += k_stride, b += nv * VL) {
        vf row[CHUNK_NV];
KV_UNROLL
        for (int v = 0; v < nv; v++) row[v] = v_load(b + v * VL);
KV_UNROLL
        for (int r = 0; r < CHUNK_MR; r++) {
            const vf x = a[r * row_stride] - (vf){0}; /* a bare broadcast: x - 0 is x, while 0 + x is not for -0 */
KV_UNROLL
            for (int v = 0; v < nv; v++) sums[r][v] = v_fma(x, row[v], sums[r][v]);
        }
    }
}

/* scores[c] = K[c] . Q for `n` keys (a multiple of CHUNK_MR), and top[v] = their maximum. */
KV_INLINE void scores_nv(const float *keys, int64_t dim, const float *q, int64_t n, float *scores, float *top,
                         const int nv) {
    vf most[CHUNK_NV];
    for (int v = 0; v < nv; v++) most[v] = v_set(-INFINITY);
    for (int64_t c = 0; c < n; c += CHUNK_MR) {
        vf sums[CHUNK_MR][CHUNK_NV];
        outer_products(sums, keys + c * dim, dim, 1, q, dim, nv);
KV_UNROLL
        for (int r = 0; r < CHUNK_MR; r++)
KV_UNROLL
            for (int v = 0; v < nv; v++) {
                v_store(scores + ((c + r) * nv + v) * VL, sums[r][v]);
                most[v] = v_max(most[v], sums[r][v]);
            }
    }
    for (int v = 0; v < nv; v++) v_store(top + v * VL, most[v]);
}

/* out[d] = out[d] * decay + sum over c of V[c][d] * weights[c]. `values` is [dim / CHUNK_MR][tile][CHUNK_MR]. The sum
 * of a tile begins at 0: so the error grows with the number of tiles plus the length of one, not with the context. */
KV_INLINE void values_nv(const float *values, int64_t tile, int64_t dim, const float *weights, int64_t n,
                         const float *decay, float *out, const int nv) {
    for (int64_t d = 0; d < dim; d += CHUNK_MR, values += tile * CHUNK_MR) {
        vf sums[CHUNK_MR][CHUNK_NV];
        outer_products(sums, values, 1, CHUNK_MR, weights, n, nv);
KV_UNROLL
        for (int r = 0; r < CHUNK_MR; r++)
KV_UNROLL
            for (int v = 0; v < nv; v++) {
                float *o = out + ((d + r) * nv + v) * VL;
                v_store(o, v_fma(v_load(o), v_load(decay + v * VL), sums[r][v]));
            }
    }
}

static KV_APART void scores_panel(const float *keys, int64_t dim, const float *q, int64_t n, float *scores,
                                     float *top, int nv) {
    if (nv == 3)
        scores_nv(keys, dim, q, n, scores, top, 3);
    else if (nv == 2)
        scores_nv(keys, dim, q, n, scores, top, 2);
    else
        scores_nv(keys, dim, q, n, scores, top, 1);
}

static KV_APART void values_panel(const float *values, int64_t tile, int64_t dim, const float *weights, int64_t n,
                                     const float *decay, float *out, int nv) {
    if (nv == 3)
        values_nv(values, tile, dim, weights, n, decay, out, 3);
    else if (nv == 2)
        values_nv(values, tile, dim, weights, n, decay, out, 2);
    else
        values_nv(values, tile, dim, weights, n, decay, out, 1);
}
