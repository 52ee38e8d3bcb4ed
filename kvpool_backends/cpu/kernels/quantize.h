/* Floats to quantized numbers, for all heads of a token: a template, see isa_body.h.
 *
 * As mx.quantize does it, bit for bit (docs/quantized.md). VL groups go together: their ranges are found one after the
 * other, their scales and biases lane by lane, then they are packed. What MLX divides by the scale is divided here too,
 * by way of 1 / scale, which is found once per group.
 */
enum { MOST_GROUP = 128 };

typedef struct {
    float numbers[VL][MOST_GROUP]; /* in the dtype of the layer, as floats */
    vf below[VL], most[VL];        /* of each group, lane by lane: minus the least, the largest */
    vf bad;                        /* 0 where all are finite */
} kv_batch;

KV_INLINE vf v_round_to(kv_dtype dtype, vf x) {
    if (dtype == KV_F16) return v_from_f16(v_to_f16(x));
    return dtype == KV_BF16 ? v_from_bf16(v_to_bf16(x)) : x;
}

KV_INLINE void load_group_as(kv_batch *batch, int64_t index, kv_dtype dtype, kv_dtype from, const char *src,
                             int64_t stride, int64_t n) {
    const int64_t step = stride * kv_itemsize(from);
    vf below = v_set(-INFINITY), most = below, bad = batch->bad;
    for (int64_t i = 0; i < n; i += VL) {
        vf x = stride == 1 ? v_load_as(from, src + i * step) : v_load_strided_as(from, src + i * step, stride, VL);
        if (dtype != from) x = v_round_to(dtype, x);
        below = v_max(-x, below);
        most = v_max(x, most);
        bad = v_fma(x, v_set(0), bad); /* inf * 0 and NaN * 0 are NaN */
        v_store(batch->numbers[index] + i, x);
    }
    batch->below[index] = below;
    batch->most[index] = most;
    batch->bad = bad;
}

static void load_group(kv_batch *batch, int64_t index, kv_dtype dtype, kv_dtype from, const char *src, int64_t stride,
                       int64_t n) {
    if (dtype == from || dtype == KV_F32) { /* nothing is rounded */
        if (from == KV_F32) load_group_as(batch, index, KV_F32, KV_F32, src, stride, n);
        else if (from == KV_F16) load_group_as(batch, index, KV_F32, KV_F16, src, stride, n);
        else load_group_as(batch, index, KV_F32, KV_BF16, src, stride, n);
    } else if (dtype == KV_F16) {
        if (from == KV_F32) load_group_as(batch, index, KV_F16, KV_F32, src, stride, n);
        else load_group_as(batch, index, KV_F16, KV_BF16, src, stride, n);
    } else {
        if (from == KV_F32) load_group_as(batch, index, KV_BF16, KV_F32, src, stride, n);
        else load_group_as(batch, index, KV_BF16, KV_F16, src, stride, n);
    }
}

/* a / b as a division rounds it, with inverse = 1 / b so rounded: two steps of Newton's, of which the second one is
 * exact (P. Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990). */
KV_INLINE vf v_quotient(vf a, vf b, vf inverse) {
#if defined(KV_SIMD_AVX512) || defined(KV_SIMD_AVX2) || defined(KV_SIMD_NEON)
    vf q = a * inverse;
    q = v_fma(v_fma(-q, b, a), inverse, q);
    return v_fma(v_fma(-q, b, a), inverse, q);
#else /* without fused multiplications the remainders would be rounded */
    (void)inverse;
    return a / b;
#endif
}

/* Packs n numbers; `wide` where the scale is so large that its inverse loses digits. */
KV_INLINE void pack_group(int bits, int wide, char *words, const float *x, float scale, float bias, float inverse,
                          int64_t n) {
    const float magic = 0x1.8p23f; /* adding it leaves the nearest integer, ties to even, in the lowest bits */
    const vf most = v_set(bits == 8 ? 255 : 15), by = v_set(scale), times = v_set(inverse);
    for (int64_t i = 0; i < n; i += 2 * VL) {
        vi whole[2];
        KV_UNROLL
        for (int j = 0; j < 2; j++) {
            const vf distance = v_load(x + i + j * VL) - bias;
            vf y = v_quotient(distance, by, times);
            if (wide) y = distance / by;
            whole[j] = (vi)(v_min(v_max(y, v_set(0)), most) + magic) & (bits == 8 ? 255 : 15);
        }
        v_store_packed(bits, words + i * bits / 8, whole[0], whole[1]);
    }
}

/* Scale and bias of each group of a batch, lane by lane. */
KV_INLINE void find_scales(int bits, const kv_batch *batch, vf *scale_out, vf *bias_out) {
    const vf low = -v_largest_of_each(batch->below), high = v_largest_of_each(batch->most);
    const vi is_below = v_abs(low) > v_abs(high);
    const vf edge = v_select(is_below, low, high);
    vf scale = v_max((high - low) / (bits == 8 ? 255.0f : 15.0f), v_set(1e-7f));
    scale = v_select(is_below, scale, -scale);
    const vf whole = v_rint(edge / scale);
    const vi is_zero = whole == 0;
    *scale_out = v_select(is_zero, scale, edge / whole);
    *bias_out = v_select(is_zero, v_set(0), edge);
}

KV_INLINE int is_finite(const float *x, int64_t n) {
    vf bad = v_set(0);
    for (int64_t i = 0; i < n; i += VL) bad = v_fma(v_load(x + i), v_set(0), bad);
    return !v_any(bad != 0);
}

KV_INLINE void quantize_as(int bits, const kv_packed_heads *to, const char *src, kv_dtype from, int64_t head_stride,
                           int64_t stride, int64_t n) {
    const kv_dtype dtype = to->first.dtype;
    const int64_t size = to->first.group_size, per_head = n / size, count = to->heads * per_head;
    const int64_t from_size = kv_itemsize(from), float_size = kv_itemsize(dtype);
    kv_batch batch;
    int64_t head = 0, group = 0;
    for (int64_t first = 0; first < count; first += VL) {
        const int64_t here = count - first < VL ? count - first : VL;
        int64_t heads[VL], groups[VL];
        batch.bad = v_set(0);
        for (int64_t i = 0; i < here; i++) {
            heads[i] = head;
            groups[i] = group;
            load_group(&batch, i, dtype, from, src + (head * head_stride + group * size * stride) * from_size, stride,
                       size);
            if (++group == per_head) {
                group = 0;
                head++;
            }
        }
        for (int64_t i = here; i < VL; i++) batch.below[i] = batch.most[i] = v_set(0);
        vf scale, bias;
        find_scales(bits, &batch, &scale, &bias);
        float scale_of[VL], bias_of[VL], inverse_of[VL];
        v_store(scale_of, scale);
        v_store(bias_of, bias);
        v_store(inverse_of, v_set(1) / scale);
        const int all_finite = !v_any(batch.bad != 0);
        for (int64_t i = 0; i < here; i++) {
            char *words = to->first.words + heads[i] * to->words_step + groups[i] * size * bits / 8;
            if (!all_finite && !is_finite(batch.numbers[i], size)) {
                scale_of[i] = bias_of[i] = NAN;
                memset(words, 0, (size_t)(size * bits / 8));
            } else if (fabsf(scale_of[i]) > 1e30f)
                pack_group(bits, 1, words, batch.numbers[i], scale_of[i], bias_of[i], inverse_of[i], size);
            else pack_group(bits, 0, words, batch.numbers[i], scale_of[i], bias_of[i], inverse_of[i], size);
        }
        char scales[4 * VL], biases[4 * VL];
        v_store_strided_as(dtype, scales, 1, VL, v_load(scale_of));
        v_store_strided_as(dtype, biases, 1, VL, v_load(bias_of));
        for (int64_t i = 0; i < here; i++) {
            char *s = to->first.scales + heads[i] * to->scales_step + groups[i] * float_size;
            char *b = to->first.biases + heads[i] * to->biases_step + groups[i] * float_size;
            if (float_size == 4) {
                memcpy(s, scales + 4 * i, 4);
                memcpy(b, biases + 4 * i, 4);
            } else {
                memcpy(s, scales + 2 * i, 2);
                memcpy(b, biases + 2 * i, 2);
            }
        }
    }
}

static void quantize(const kv_packed_heads *to, const char *src, kv_dtype from, int64_t head_stride, int64_t stride,
                     int64_t n) {
    if (to->first.bits == 8) quantize_as(8, to, src, from, head_stride, stride, n);
    else quantize_as(4, to, src, from, head_stride, stride, n);
}
