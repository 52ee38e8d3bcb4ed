/* Floats to quantized numbers, for all heads of a token: a template, see isa_body.h.
 *
 * As mx.quantize does it, bit for bit (docs/backends.md). Some groups go together: their ranges are found one after
 * the other, their scales and biases lane by lane, then each group is read once more and packed. What MLX divides by
 * the scale is divided here too, by way of 1 / scale, which is found once per group.
 */
enum { MOST_GROUP = 128, BATCH = 4 * VL /* groups; a few vectors of scales, whose divisions overlap */ };

/* Groups that go together, and what is found out about them. */
typedef struct {
    char *words[BATCH], *scales[BATCH], *biases[BATCH];
    const char *numbers[BATCH]; /* in the dtype of the layer, without gaps */
    int64_t count;
    float scale[BATCH], bias[BATCH], inverse[BATCH];
    int32_t is_flat[BATCH]; /* whose words are 0: not all are finite, or the scale is beyond all of them */
    char stored_scales[4 * BATCH], stored_biases[4 * BATCH]; /* in the dtype of the layer */
} kv_batch;

/* -------- ranges -------- */

/* Bits of floats as integers of the same order: NaN is beyond both infinities. Its own inverse. */
KV_INLINE vi v_ordered(vi bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

/* The largest element, and the largest complement, of a group of floats of `size` bytes, in the order of v_ordered,
 * lane by lane. */
KV_INLINE void find_range(int64_t size, const char *src, int64_t n, vi *most_out, vi *below_out) {
    const int64_t count = n * size / (int64_t)sizeof(vi);
    vi most = {0}, least = {0};
    for (int64_t i = 0; i < count; i++) {
        vi x;
        memcpy(&x, src + i * (int64_t)sizeof x, sizeof x);
        x = size == 4 ? v_ordered(x) : (vi)((vs)x ^ (((vs)x >> 15) & 0x7fff));
        most = i == 0 ? x : v_most(size, most, x);
        least = i == 0 ? x : v_least(size, least, x);
    }
    *most_out = most;
    *below_out = ~least;
}

/* What v_most_of_each finds, as floats. */
KV_INLINE vf v_from_ordered(kv_dtype dtype, vi x) {
    const vi bits = v_ordered(x); /* below the upper half anything is upside down now: it is cut off */
    if (dtype == KV_F32) return (vf)bits;
    if (dtype == KV_BF16) return (vf)(bits & (int32_t)0xffff0000);
    return v_from_f16(__builtin_convertvector((vu)bits >> 16, vh));
}

/* -------- scales -------- */

/* Scales, biases and 1 / scale of VL groups from `i` on, lane by lane. */
KV_INLINE void find_factors(kv_dtype dtype, float steps, const vi *most, const vi *below, kv_batch *out, int64_t i) {
    const int64_t size = kv_itemsize(dtype);
    const vf low = v_from_ordered(dtype, ~v_most_of_each(size, below));
    const vf high = v_from_ordered(dtype, v_most_of_each(size, most));
    const vi is_below = v_abs(low) > v_abs(high), is_bad = ~((v_abs(low) < INFINITY) & (v_abs(high) < INFINITY));
    const vf edge = v_select(is_below, low, high);
    vf scale = v_max((high - low) / steps, v_set(1e-7f));
    scale = v_select(is_below, scale, -scale);
    const vf whole = v_rint(edge / scale);
    const vi is_zero = whole == 0;
    scale = v_select(is_bad, v_set(NAN), v_select(is_zero, scale, edge / whole));
    const vf bias = v_select(is_bad, v_set(NAN), v_select(is_zero, v_set(0), edge));
    const vi is_flat = ~(v_abs(scale) < INFINITY);
    v_store(out->scale + i, scale);
    v_store(out->bias + i, bias);
    v_store(out->inverse + i, v_set(1) / scale);
    memcpy(out->is_flat + i, &is_flat, sizeof is_flat);
    v_store_strided_as(dtype, out->stored_scales + i * size, 1, VL, scale);
    v_store_strided_as(dtype, out->stored_biases + i * size, 1, VL, bias);
}

KV_COPIES void measure_batch(kv_dtype dtype, float steps, kv_batch *batch, int64_t n) {
    const int64_t count = batch->count, whole = (count + VL - 1) / VL * VL;
    vi most[BATCH], below[BATCH];
    for (int64_t i = 0; i < count; i++) find_range(kv_itemsize(dtype), batch->numbers[i], n, &most[i], &below[i]);
    for (int64_t i = count; i < whole; i++) most[i] = below[i] = (vi){0};
    for (int64_t i = 0; i < count; i += VL) find_factors(dtype, steps, most + i, below + i, batch, i);
}

/* -------- numbers -------- */

/* a / b, with inverse = 1 / b: rounded as a division is, or so near that its nearest integer is the same. A step of
 * Newton's leaves q * 2^-46 (P. Markstein, "Computation of elementary functions on the IBM RISC System/6000
 * processor", 1990). Two floats' quotient, of which the rounded one is n + 1/2 or next to it (n < 256), is nearer than
 * that to a point where rounding changes only if the lower half of b's significand is nearly 0: these cases have been
 * tried, all of them. */
KV_INLINE vf v_quotient(vf a, vf b, vf inverse) {
#if defined(KV_SIMD_AVX512) || defined(KV_SIMD_AVX2) || defined(KV_SIMD_NEON)
    const vf q = a * inverse;
    return v_fma(v_fma(-q, b, a), inverse, q);
#else /* without fused multiplications the remainder would be rounded */
    (void)inverse;
    return a / b;
#endif
}

/* No quotient is below -1/2: what lies there is the bias, or rounds to 0. */
KV_COPIES void pack_group(int bits, kv_dtype dtype, char *words, const char *src, float scale, float bias,
                          float inverse, int64_t n) {
    const float magic = 0x1.8p23f; /* adding it leaves the nearest integer, ties to even, in the lowest bits */
    const vf most = v_set(bits == 8 ? 255 : 15), by = v_set(scale), times = v_set(inverse);
    const int64_t size = kv_itemsize(dtype);
    for (int64_t i = 0; i < n; i += 2 * VL) {
        const char *at = src + i * size;
        if (dtype == KV_BF16) { /* the even ones and the odd ones */
            vu pairs;
            memcpy(&pairs, at, sizeof pairs);
            const vf even = (vf)(pairs << 16) - bias, odd = (vf)(pairs & 0xffff0000u) - bias;
            v_store_packed_in_turns(bits, words + i * bits / 8, (vi)(v_quotient(even, by, times) + magic),
                                    (vi)(v_quotient(odd, by, times) + magic));
            continue;
        }
        vi whole[2];
        KV_UNROLL
        for (int j = 0; j < 2; j++) {
            const vf y = v_quotient(v_load_as(dtype, at + j * VL * size) - bias, by, times);
            whole[j] = (vi)(v_min(y, most) + magic) & (bits == 8 ? 255 : 15);
        }
        v_store_packed(bits, words + i * bits / 8, whole[0], whole[1]);
    }
}

KV_INLINE void pack_batch(int bits, kv_dtype dtype, const kv_batch *batch, int64_t n) {
    for (int64_t i = 0; i < batch->count; i++)
        if (batch->is_flat[i]) memset(batch->words[i], 0, (size_t)(n * bits / 8));
        else
            pack_group(bits, dtype, batch->words[i], batch->numbers[i], batch->scale[i], batch->bias[i],
                       batch->inverse[i], n);
}

/* -------- tokens -------- */

/* The usual size of groups is a constant: its loops have no branches. */
KV_COPIES void quantize_batch_of(kv_dtype dtype, int64_t bits, kv_batch *batch, int64_t n) {
    const float steps = bits == 8 ? 255 : 15;
    if (n == 64) measure_batch(dtype, steps, batch, 64);
    else measure_batch(dtype, steps, batch, n);
    if (bits == 8 && n == 64) pack_batch(8, dtype, batch, 64);
    else if (bits == 8) pack_batch(8, dtype, batch, n);
    else if (n == 64) pack_batch(4, dtype, batch, 64);
    else pack_batch(4, dtype, batch, n);
    const int64_t size = kv_itemsize(dtype);
    for (int64_t i = 0; i < batch->count; i++) {
        memcpy(batch->scales[i], batch->stored_scales + size * i, (size_t)size);
        memcpy(batch->biases[i], batch->stored_biases + size * i, (size_t)size);
    }
}

static void quantize_batch(kv_dtype dtype, int64_t bits, kv_batch *batch, int64_t n) {
    if (dtype == KV_F32) quantize_batch_of(KV_F32, bits, batch, n);
    else if (dtype == KV_F16) quantize_batch_of(KV_F16, bits, batch, n);
    else quantize_batch_of(KV_BF16, bits, batch, n);
}

static void quantize(const kv_packed_heads *to, int64_t num_tokens, kv_dtype from, int64_t head_stride, int64_t stride,
                     int64_t n) {
    const kv_dtype dtype = to->first.dtype;
    const int64_t bits = to->first.bits, size = to->first.group_size, groups = n / size;
    const int64_t from_size = kv_itemsize(from), float_size = kv_itemsize(dtype);
    const int is_direct = dtype == from && stride == 1;
    char line[BATCH][4 * MOST_GROUP];
    kv_batch batch;
    int64_t count = 0;
    for (int64_t token = 0; token < num_tokens; token++, to++)
        for (int64_t head = 0; head < to->heads; head++) {
            const char *numbers = to->src + head * head_stride * from_size;
            char *words = to->first.words + head * to->words_step;
            char *scales = to->first.scales + head * to->scales_step;
            char *biases = to->first.biases + head * to->biases_step;
            for (int64_t group = 0; group < groups; group++) {
                if (!is_direct) convert(line[count], dtype, numbers, from, stride, size);
                batch.numbers[count] = is_direct ? numbers : line[count];
                batch.words[count] = words;
                batch.scales[count] = scales;
                batch.biases[count] = biases;
                if (stride == 1) fetch_ahead(numbers, size * from_size);
                numbers += size * stride * from_size;
                words += size * bits / 8;
                scales += float_size;
                biases += float_size;
                if (++count < BATCH) continue;
                batch.count = count;
                quantize_batch(dtype, bits, &batch, size);
                count = 0;
            }
        }
    batch.count = count;
    if (count > 0) quantize_batch(dtype, bits, &batch, size);
}
