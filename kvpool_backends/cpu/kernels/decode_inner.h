/* The two inner loops of decode, on registers: scores of a few tokens against a few queries, and weighted sums of V.
 *
 * Elements go in pairs of vectors: for bfloat16 and numbers of 4 bits the even and the odd ones of 2 * VL (a shift, a
 * mask: no shuffle), else the first and the second VL. Queries are stored in that order, results come out in it; a dot
 * product does not mind.
 */
#if defined(KV_SIMD_AVX512) || defined(KV_SIMD_NEON)
enum { PAIR = 2 * VL, LANES = 4 }; /* queries at once: 4 * LANES sums must stay in registers, and here are 32 */
#else
enum { PAIR = 2 * VL, LANES = 2 };
#endif

typedef struct { vf a, b; } vpair;

static int64_t padded(int64_t dim) { return (dim + PAIR - 1) / PAIR * PAIR; }

KV_INLINE vpair pair_from_bf16(vu bits) {
    return (vpair){(vf)(bits << 16), (vf)(bits & 0xffff0000u)};
}

KV_INLINE vpair pair_load(kv_dtype dtype, const char *p) {
    if (dtype == KV_U8)
        return (vpair){__builtin_convertvector(v_load_bytes(p), vf), __builtin_convertvector(v_load_bytes(p + VL), vf)};
    if (dtype == KV_U4) {
        const vi both = v_load_bytes(p);
        return (vpair){__builtin_convertvector(both & 15, vf), __builtin_convertvector(both >> 4, vf)};
    }
    if (dtype != KV_BF16) return (vpair){v_load_as(dtype, p), v_load_as(dtype, p + VL * kv_itemsize(dtype))};
    vu bits;
    memcpy(&bits, p, sizeof bits);
    return pair_from_bf16(bits);
}

/* The first n < PAIR elements, then zeros. */
KV_INLINE vpair pair_load_n(kv_dtype dtype, const char *p, int64_t n) {
    if (dtype != KV_BF16) {
        const int64_t first = n < VL ? n : VL;
        return (vpair){v_load_n_as(dtype, p, first), v_load_n_as(dtype, p + first * kv_itemsize(dtype), n - first)};
    }
#if defined(KV_SIMD_AVX512)
    return pair_from_bf16((vu)_mm512_maskz_loadu_epi16((__mmask32)((1u << n) - 1), p));
#else
    vu bits = {0};
    memcpy(&bits, p, 2 * (size_t)n);
    return pair_from_bf16(bits);
#endif
}

/* Element i (0 <= i < padded dim) of a vector stands at this place of its stored form. */
KV_INLINE int64_t pair_place(kv_dtype dtype, int64_t i) {
    const int64_t in_pair = i % PAIR;
    return dtype == KV_BF16 || dtype == KV_U4 ? i - in_pair + in_pair / 2 + in_pair % 2 * VL : i;
}

/* Fetches what lies as far in another vector as elements d .. d + count - 1 lie in this one, into L2: L1 has what is
 * worked on to hold. As an address, because the other vector may be shorter. */
KV_INLINE void fetch(const char *vector, int64_t d, int count, int64_t bits) {
    const int64_t first = d * bits / 8, nbytes = count * bits / 8;
    KV_UNROLL
    for (int64_t at = 0; at < nbytes; at += LINE)
        if (first % LINE == 0 || nbytes >= LINE)
            __builtin_prefetch((const void *)((uintptr_t)vector + (uintptr_t)(first + at)), 0, 2);
}

/* scores[r * TILE + t] = q[r] . k[t] for 4 tokens t and `rows` <= 4 queries r; `offset` is the head's. */
KV_INLINE void scores_of_4(kv_dtype dtype, const int rows, const char *const *tokens, int64_t offset, int64_t dim,
                           const float *q,
                           float *scores, const char *const *ahead, int64_t ahead_offset, int64_t ahead_bits) {
    const char *const k[4] = {tokens[0] + offset, tokens[1] + offset, tokens[2] + offset, tokens[3] + offset};
    const int64_t size = kv_itemsize(dtype), stride = padded(dim), whole = dim / PAIR * PAIR;
    vf sum[4][4] = {{{0}}};
    for (int64_t d = 0; d < whole; d += PAIR) {
        vpair key[4];
        KV_UNROLL
        for (int t = 0; t < 4; t++) {
            if (ahead != NULL) fetch(ahead[t] + ahead_offset, d, PAIR, ahead_bits);
            key[t] = pair_load(dtype, k[t] + d * size);
        }
        KV_UNROLL
        for (int r = 0; r < rows; r++) {
            const vf a = v_load(q + r * stride + d), b = v_load(q + r * stride + d + VL);
            KV_UNROLL
            for (int t = 0; t < 4; t++) sum[r][t] = v_fma(b, key[t].b, v_fma(a, key[t].a, sum[r][t]));
        }
    }
    if (whole < dim)
        KV_UNROLL
        for (int t = 0; t < 4; t++) {
            const vpair key = pair_load_n(dtype, k[t] + whole * size, dim - whole);
            KV_UNROLL
            for (int r = 0; r < rows; r++) {
                const vf a = v_load(q + r * stride + whole), b = v_load(q + r * stride + whole + VL);
                sum[r][t] = v_fma(b, key.b, v_fma(a, key.a, sum[r][t]));
            }
        }
    KV_UNROLL
    for (int r = 0; r < rows; r++) {
        const four sums = v_sum4(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
        memcpy(scores + r * TILE, sums.lane, sizeof sums);
    }
}

/* For `rows` <= 4 queries: acc[r] = decay[r] * acc[r] + sum over the tile's tokens of weights[r * TILE + t] * v[t], for
 * the `pairs` (1 or 2) pairs of elements from d on; the last one has `tail` elements if that is not 0. The sum
 * begins at 0, or at starts[r * starts_stride]: so the error grows with the number of tiles plus the length of one. */
KV_COPIES void weigh(kv_dtype dtype, const int rows, const int pairs, int64_t tail, const char *const *tokens,
                     int64_t count,
                     int64_t offset, int64_t d, int64_t stride, const float *weights, const float *decay, float *acc,
                     const float *starts, int64_t starts_stride, const char *const *ahead, int64_t ahead_offset,
                     int64_t ahead_bits) {
    const int64_t bits = kv_bits(dtype);
    vpair sum[4][2] = {{{{0}, {0}}}};
    if (starts != NULL)
        KV_UNROLL
        for (int r = 0; r < rows; r++)
            KV_UNROLL
            for (int i = 0; i < pairs; i++) sum[r][i].a = sum[r][i].b = v_set(starts[r * starts_stride]);
    for (int64_t t = 0; t < count; t++) {
        const char *v = tokens[t] + offset + d * bits / 8;
        if (ahead != NULL) fetch(ahead[t] + ahead_offset, d, pairs * PAIR, ahead_bits);
        vpair value[2];
        KV_UNROLL
        for (int i = 0; i < pairs; i++) value[i] = tail == 0 ? pair_load(dtype, v + i * PAIR * bits / 8)
            : pair_load_n(dtype, v, tail);
        KV_UNROLL
        for (int r = 0; r < rows; r++) {
            const vf weight = v_set(weights[r * TILE + t]);
            KV_UNROLL
            for (int i = 0; i < pairs; i++) {
                sum[r][i].a = v_fma(weight, value[i].a, sum[r][i].a);
                sum[r][i].b = v_fma(weight, value[i].b, sum[r][i].b);
            }
        }
    }
    KV_UNROLL
    for (int r = 0; r < rows; r++)
        KV_UNROLL
        for (int i = 0; i < pairs; i++) {
            float *at = acc + r * stride + d + i * PAIR;
            v_store(at, v_fma(v_load(at), v_set(decay[r]), sum[r][i].a));
            v_store(at + VL, v_fma(v_load(at + VL), v_set(decay[r]), sum[r][i].b));
        }
}
