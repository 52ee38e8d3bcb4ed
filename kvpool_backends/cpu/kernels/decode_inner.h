/* The two inner loops of decode, on registers: scores of a few tokens against a few queries, and weighted sums of V.
 *
 * Elements go in pairs of vectors: for bfloat16 and numbers of 4 bits the even and the odd ones of 2 * VL (a shift, a
 * mask: no shuffle), else the first and the second VL. Queries are stored in that order, results come out in it; a dot
 * product does not mind.
 */
enum { PAIR = 2 * VL, LANES = 4 }; /* queries at once */
/* What suits the machine. FETCHES_EVENLY: lines are prefetched one by one, at an even pace and row by row, because
 * Zen 3 drops prefetches that come faster than its memory answers. VALUES: tokens of a turn of the loop over values.
 * LAYOUT: of a pool for which nobody has chosen one. */
#if defined(KV_SIMD_AVX512) || defined(KV_SIMD_NEON)
/* keys at once: of 32 registers 16 are sums, 8 a pair of each key */
enum { TOKENS = 4, ARE_REGISTERS_MANY = 1, FETCHES_EVENLY = 0, VALUES = 1 };
#define LAYOUT "NHD"
#else
/* of 16, 12 are sums, 3 half a pair of each key, 1 of a query */
enum { TOKENS = 3, ARE_REGISTERS_MANY = 0, FETCHES_EVENLY = 1, VALUES = 2 };
#define LAYOUT "HND"
#endif

typedef struct { vf a, b; } vpair;

static int64_t padded(int64_t dim) { return (dim + PAIR - 1) / PAIR * PAIR; }

/* Of bfloat16: halves of lanes as they lie in memory. */
KV_INLINE vpair pair_from_halves(vu bits) { return (vpair){(vf)(bits << 16), (vf)(bits & 0xffff0000u)}; }

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
    return pair_from_halves(bits);
}

/* One vector of a pair. */
KV_INLINE vf half_load(kv_dtype dtype, const char *p, const int half) {
#if defined(KV_SIMD_AVX2)
    if (dtype == KV_BF16 && half) { /* neither the mask nor the pair keeps a register */
        static const vu upper = {~0xffffu, ~0xffffu, ~0xffffu, ~0xffffu, ~0xffffu, ~0xffffu, ~0xffffu, ~0xffffu};
        vf x;
        __asm__("vmovups %1, %0\n\tvandps %2, %0, %0"
                : "=x"(x) : "m"(upper), "m"(*(const __m256i_u *)(const void *)p));
        return x;
    }
#endif
    const vpair pair = pair_load(dtype, p);
    return half ? pair.b : pair.a;
}

/* The first n < PAIR elements, then zeros. */
KV_INLINE vpair pair_load_n(kv_dtype dtype, const char *p, int64_t n) {
    if (dtype != KV_BF16) {
        const int64_t first = n < VL ? n : VL;
        return (vpair){v_load_n_as(dtype, p, first), v_load_n_as(dtype, p + first * kv_itemsize(dtype), n - first)};
    }
#if defined(KV_SIMD_AVX512)
    return pair_from_halves((vu)_mm512_maskz_loadu_epi16((__mmask32)((1u << n) - 1), p));
#else
    vu bits = {0};
    memcpy(&bits, p, 2 * (size_t)n);
    return pair_from_halves(bits);
#endif
}

/* A pair as it is stored, from its elements in order, or back to them. */
KV_INLINE void pair_shuffle(kv_dtype dtype, const float *in, float *out, const int is_back) {
    const int in_turns = dtype == KV_BF16 || dtype == KV_U4;
    for (int i = 0; i < PAIR; i++) {
        const int place = in_turns ? i / 2 + i % 2 * VL : i;
        out[is_back ? i : place] = in[is_back ? place : i];
    }
}

/* The sums across lanes of TOKENS vectors, then anything. */
KV_INLINE four sums_of_tokens(const vf *sum) { return v_sum4(sum[0], sum[1], sum[2], sum[TOKENS - 1]); }

/* Rows that are fetched for the next phase: the `nbytes` from `offset` on of each, `step` of them with each pair of
 * elements of a token that is worked on (0: no more). Then where an even pace has got to, and the bytes due. */
typedef struct {
    const char *const *rows, *const *last;
    int64_t offset, nbytes, step;
    const char *at, *end;
    int64_t due;
} fetching;

/* Of `count` rows, one for each token that is worked on in `pairs` pairs of elements. */
KV_INLINE fetching fetching_of(const char *const *rows, int64_t count, int64_t offset, int64_t nbytes, int64_t pairs) {
    const char *at = rows[0] + offset;
    return (fetching){.rows = rows, .last = rows + count - 1, .offset = offset, .nbytes = nbytes,
                      .step = (nbytes + pairs - 1) / pairs, .at = at, .end = at + nbytes};
}

/* `nbytes` more are due. */
KV_INLINE void fetch_evenly(fetching *ahead, int64_t nbytes) {
    for (ahead->due += nbytes; ahead->due > 0; ahead->due -= LINE) {
        __asm__("" : "+r"(ahead->due)); /* a compiler that sees through it counts the lines first: that is slower */
        __builtin_prefetch(ahead->at, 0, 2);
        if ((ahead->at += LINE) < ahead->end) continue;
        if (ahead->rows < ahead->last) ahead->rows++;
        ahead->at = *ahead->rows + ahead->offset;
        ahead->end = ahead->at + ahead->nbytes;
    }
}

/* Fetches the `nbytes` from `at` on into L2: L1 has what is worked on to hold. */
KV_INLINE void fetch(const char *at, int64_t nbytes) {
    for (int64_t byte = 0; byte < nbytes; byte += LINE) __builtin_prefetch(at + byte, 0, 2);
}

/* sum[r][t] += q[r] . k[t] over the pair of elements at q and `at` bytes into k, times scales[t] if these are given:
 * where registers are many. */
KV_INLINE void add_products(kv_dtype dtype, const int rows, const char *const *k, int64_t at, const float *scales,
                            const float *q, int64_t stride, vf sum[LANES][TOKENS]) {
    if (ARE_REGISTERS_MANY) {
        vpair key[TOKENS];
        KV_UNROLL
        for (int t = 0; t < TOKENS; t++) {
            key[t] = pair_load(dtype, k[t] + at);
            if (scales != NULL) key[t] = (vpair){key[t].a * scales[t], key[t].b * scales[t]};
        }
        KV_UNROLL
        for (int r = 0; r < rows; r++) {
            const vf a = v_load(q + r * stride), b = v_load(q + r * stride + VL);
            KV_UNROLL
            for (int t = 0; t < TOKENS; t++) sum[r][t] = v_fma(b, key[t].b, v_fma(a, key[t].a, sum[r][t]));
        }
        return;
    }
    KV_UNROLL
    for (int half = 0; half < 2; half++) {
        vf key[TOKENS];
        KV_UNROLL
        for (int t = 0; t < TOKENS; t++) key[t] = half_load(dtype, k[t] + at, half);
        KV_UNROLL
        for (int r = 0; r < rows; r++) {
            const vf x = v_load(q + r * stride + half * VL);
            KV_UNROLL
            for (int t = 0; t < TOKENS; t++) v_add_product(&sum[r][t], x, key[t]);
        }
    }
}

/* scores[r * ROOM + t] = q[r] . k[t] for TOKENS tokens t and `rows` <= LANES queries r; `offset` is the head's. Up to
 * t = 3 anything may be written behind. Meanwhile as many rows are fetched: without an even pace, those from `first`
 * on. */
KV_INLINE void scores_of_some(kv_dtype dtype, const int rows, const char *const *tokens, int64_t offset, int64_t dim,
                              const float *q, float *scores, fetching *ahead, int64_t first) {
    const int64_t size = kv_itemsize(dtype), stride = padded(dim), whole = dim / PAIR * PAIR;
    const char *k[TOKENS], *next[TOKENS];
    vf sum[LANES][TOKENS] = {{{0}}};
    KV_UNROLL
    for (int t = 0; t < TOKENS; t++) {
        k[t] = tokens[t] + offset;
        if (!FETCHES_EVENLY) next[t] = ahead->rows[first + t] + ahead->offset;
    }
    for (int64_t d = 0, line = 0, end = ahead->step; d < whole; d += PAIR, end += ahead->step) {
        if (FETCHES_EVENLY) fetch_evenly(ahead, TOKENS * ahead->step);
        for (; !FETCHES_EVENLY && line < end; line += LINE)
            KV_UNROLL
            for (int t = 0; t < TOKENS; t++) __builtin_prefetch(next[t] + line, 0, 2);
        add_products(dtype, rows, k, d * size, NULL, q + d, stride, sum);
    }
    if (whole < dim)
        KV_UNROLL
        for (int t = 0; t < TOKENS; t++) {
            const vpair key = pair_load_n(dtype, k[t] + whole * size, dim - whole);
            KV_UNROLL
            for (int r = 0; r < rows; r++) {
                const vf a = v_load(q + r * stride + whole), b = v_load(q + r * stride + whole + VL);
                sum[r][t] = v_fma(b, key.b, v_fma(a, key.a, sum[r][t]));
            }
        }
    KV_UNROLL
    for (int r = 0; r < rows; r++) {
        const four sums = sums_of_tokens(sum[r]);
        memcpy(scores + r * ROOM, sums.lane, sizeof sums);
    }
}

/* sum[r] += weights[r * ROOM] * v for `pairs` pairs of elements, the last one of `tail` elements if that is
 * not 0. */
KV_INLINE void add_values(kv_dtype dtype, const int rows, const int pairs, int64_t tail, const char *v,
                          const float *weights, vpair sum[4][2]) {
    vpair value[2];
    KV_UNROLL
    for (int i = 0; i < pairs; i++) value[i] = tail == 0 ? pair_load(dtype, v + i * PAIR * kv_bits(dtype) / 8)
        : pair_load_n(dtype, v, tail);
    KV_UNROLL
    for (int r = 0; r < rows; r++) {
        const vf weight = v_set(weights[r * ROOM]);
        KV_UNROLL
        for (int i = 0; i < pairs; i++) {
            sum[r][i].a = v_fma(weight, value[i].a, sum[r][i].a);
            sum[r][i].b = v_fma(weight, value[i].b, sum[r][i].b);
        }
    }
}

/* For `rows` <= 4 queries: acc[r] = decay[r] * acc[r] + sum over the tile's tokens of weights[r * ROOM + t] * v[t], for
 * the `pairs` (1 or 2) pairs of elements from d on; the last one has `tail` elements if that is not 0. The sum
 * begins at 0, or at starts[r * starts_stride]: so the error grows with the number of tiles plus the length of one.
 * Meanwhile as many rows are fetched. */
KV_INLINE void weigh(kv_dtype dtype, const int rows, const int pairs, int64_t tail, const char *const *tokens,
                     int64_t count, int64_t offset, int64_t d, int64_t stride, const float *weights, const float *decay,
                     float *acc, const float *starts, int64_t starts_stride, fetching *ahead) {
    const int64_t bits = kv_bits(dtype);
    vpair sum[4][2] = {{{{0}, {0}}}};
    if (starts != NULL)
        KV_UNROLL
        for (int r = 0; r < rows; r++)
            KV_UNROLL
            for (int i = 0; i < pairs; i++) sum[r][i].a = sum[r][i].b = v_set(starts[r * starts_stride]);
    offset += d * bits / 8;
    const int64_t step = ahead->step;
    const int64_t end = (d / PAIR + pairs) * step, line = (d / PAIR * step + LINE - 1) / LINE * LINE;
    const int pace = dtype == KV_F32 ? 1 : VALUES; /* tokens for about a line */
    int64_t t = 0;
    for (; t + VALUES <= count; t += VALUES) {
        if (!FETCHES_EVENLY) fetch(ahead->rows[t] + ahead->offset + line, end - line);
        KV_UNROLL
        for (int i = 0; i < VALUES; i++) {
            if (FETCHES_EVENLY && i % pace == 0) fetch_evenly(ahead, pace * pairs * step);
            add_values(dtype, rows, pairs, tail, tokens[t + i] + offset, weights + t + i, sum);
        }
    }
    for (; VALUES > 1 && t < count; t++)
        add_values(dtype, rows, pairs, tail, tokens[t] + offset, weights + t, sum);
    KV_UNROLL
    for (int r = 0; r < rows; r++)
        KV_UNROLL
        for (int i = 0; i < pairs; i++) {
            float *at = acc + r * stride + d + i * PAIR;
            v_store(at, v_fma(v_load(at), v_set(decay[r]), sum[r][i].a));
            v_store(at + VL, v_fma(v_load(at + VL), v_set(decay[r]), sum[r][i].b));
        }
}
