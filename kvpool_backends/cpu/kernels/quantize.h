/* Floats to quantized numbers and back, for one token and head: a template, see isa_body.h.
 *
 * As mx.quantize does it, bit for bit (docs/quantized.md). What MLX divides by the scale is multiplied with 1 / scale
 * here; where a product comes so close to a tie that the two could round differently, the group is done again with
 * divisions.
 */
enum { MOST_GROUP = 128 };

/* A group as it is quantized. */
typedef struct {
    float numbers[MOST_GROUP]; /* in the dtype of the layer, as floats */
    vf below, most, bad;       /* lane by lane: minus the least, the largest; bad is 0 where all are finite */
} group_of_floats;

KV_INLINE vf v_round_to(kv_dtype dtype, vf x) {
    if (dtype == KV_F16) return v_from_f16(v_to_f16(x));
    return dtype == KV_BF16 ? v_from_bf16(v_to_bf16(x)) : x;
}

KV_INLINE void load_group_as(group_of_floats *group, kv_dtype dtype, kv_dtype from, const char *src, int64_t stride,
                             int64_t n) {
    const int64_t step = stride * kv_itemsize(from);
    group->below = group->most = v_set(-INFINITY);
    group->bad = v_set(0);
    for (int64_t i = 0; i < n; i += VL) {
        vf x = stride == 1 ? v_load_as(from, src + i * step) : v_load_strided_as(from, src + i * step, stride, VL);
        if (dtype != from) x = v_round_to(dtype, x);
        group->below = v_max(-x, group->below);
        group->most = v_max(x, group->most);
        group->bad = v_fma(x, v_set(0), group->bad);
        v_store(group->numbers + i, x);
    }
}

static void load_group(group_of_floats *group, kv_dtype dtype, kv_dtype from, const char *src, int64_t stride,
                       int64_t n) {
    if (dtype == from || dtype == KV_F32) { /* nothing is rounded */
        if (from == KV_F32) load_group_as(group, KV_F32, KV_F32, src, stride, n);
        else if (from == KV_F16) load_group_as(group, KV_F32, KV_F16, src, stride, n);
        else load_group_as(group, KV_F32, KV_BF16, src, stride, n);
    } else if (dtype == KV_F16) {
        if (from == KV_F32) load_group_as(group, KV_F16, KV_F32, src, stride, n);
        else load_group_as(group, KV_F16, KV_BF16, src, stride, n);
    } else {
        if (from == KV_F32) load_group_as(group, KV_BF16, KV_F32, src, stride, n);
        else load_group_as(group, KV_BF16, KV_F16, src, stride, n);
    }
}

/* n numbers as they are packed. Returns how far from a whole number the farthest of them was, at most 0.5: above
 * SAFE, `exact` may have another result. */
#define SAFE 0.4999f

KV_INLINE float pack_group(int bits, int exact, char *words, const float *x, float scale, float bias, int64_t n) {
    const float magic = 0x1.8p23f; /* adding it leaves the nearest integer, ties to even, in the lowest bits */
    const float most = bits == 8 ? 255 : 15;
    const vf inverse = v_set(1 / scale);
    vf farthest = v_set(0);
    for (int64_t i = 0; i < n; i += 2 * VL) {
        vi whole[2];
        KV_UNROLL
        for (int j = 0; j < 2; j++) {
            vf y = v_load(x + i + j * VL) - bias;
            y = exact ? y / scale : y * inverse;
            y = -v_max(-v_max(y, v_set(0)), v_set(-most));
            const vf shifted = y + magic;
            const vf off = y - (shifted - magic);
            if (!exact) farthest = v_max(v_max(off, -off), farthest);
            whole[j] = (vi)shifted & (bits == 8 ? 255 : 15);
        }
        v_store_packed(bits, words + i * bits / 8, whole[0], whole[1]);
    }
    return exact ? 0 : v_largest(farthest);
}

KV_INLINE void quantize_as(int bits, const kv_packed *to, const char *src, kv_dtype from, int64_t stride, int64_t n) {
    const int64_t size = to->group_size, float_size = kv_itemsize(to->dtype);
    for (int64_t g = 0; g < n / size; g++) {
        char *words = to->words + g * size * bits / 8;
        group_of_floats group;
        load_group(&group, to->dtype, from, src + g * size * stride * kv_itemsize(from), stride, size);
        const float low = -v_largest(group.below), high = v_largest(group.most), bad = v_sum(group.bad);
        const int is_below = fabsf(low) > fabsf(high);
        const float edge = is_below ? low : high, least = 1e-7f, step = (high - low) / (bits == 8 ? 255.0f : 15.0f);
        float scale = step > least ? step : least, bias = 0;
        if (!is_below) scale = -scale;
        const float whole = rintf(edge / scale);
        if (whole != 0) {
            scale = edge / whole;
            bias = edge;
        }
        if (bad != 0) { /* inf * 0 and NaN * 0 are NaN */
            scale = bias = NAN;
            memset(words, 0, (size_t)(size * bits / 8));
        } else if (fabsf(scale) > 1e30f || pack_group(bits, 0, words, group.numbers, scale, bias, size) > SAFE)
            pack_group(bits, 1, words, group.numbers, scale, bias, size);
        v_store_strided_as(to->dtype, to->scales + g * float_size, 1, 1, v_set(scale));
        v_store_strided_as(to->dtype, to->biases + g * float_size, 1, 1, v_set(bias));
    }
}

static void quantize(const kv_packed *to, const char *src, kv_dtype from, int64_t stride, int64_t n) {
    if (to->bits == 8) quantize_as(8, to, src, from, stride, n);
    else quantize_as(4, to, src, from, stride, n);
}
