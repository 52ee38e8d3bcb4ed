/* Quantized numbers to floats, one token and head at a time: for gathers and chunks; a template, see isa_body.h. */

/* One scale or bias. */
KV_INLINE float load_float(kv_dtype dtype, const char *p) { return v_load_n_as(dtype, p, 1)[0]; }

/* The numbers of a head as floats, without gaps, its groups one after the other. */
KV_INLINE void dequantize_as(int bits, const kv_packed *from, int64_t n, float *to) {
    const int64_t size = from->group_size, float_size = kv_itemsize(from->dtype);
    for (int64_t g = 0; g < n / size; g++) {
        const float scale = load_float(from->dtype, from->scales + g * float_size);
        const float bias = load_float(from->dtype, from->biases + g * float_size);
        const char *words = from->words + g * size * bits / 8;
        for (int64_t i = 0; i < size; i += VL) {
            char bytes[VL];
            if (bits == 4)
                for (int j = 0; j < VL; j++) {
                    const unsigned char both = (unsigned char)words[(i + j) / 2];
                    bytes[j] = (char)(j % 2 ? both >> 4 : both & 15);
                }
            else memcpy(bytes, words + i, VL);
            const vf numbers = __builtin_convertvector(v_load_bytes(bytes), vf);
            v_store(to + g * size + i, numbers * scale + bias);
        }
    }
}

static void dequantize_line(const kv_packed *from, int64_t n, float *to) {
    if (from->bits == 8) dequantize_as(8, from, n, to);
    else dequantize_as(4, from, n, to);
}

static void dequantize(const kv_packed *from, char *dst, kv_dtype to, int64_t stride, int64_t n) {
    const int64_t size = from->group_size, step = stride * kv_itemsize(to);
    if (from->bits == 0) { /* KV_F8 */
        for (int64_t i = 0; i < n; i += VL) {
            const int64_t count = n - i < VL ? n - i : VL;
            v_store_strided_as(to, dst + i * step, stride, count, v_load_n_as(KV_F8, from->words + i, count));
        }
        return;
    }
    float line[128]; /* a group at a time */
    for (int64_t g = 0; g < n / size; g++) {
        kv_packed group = *from;
        group.words += g * size * from->bits / 8;
        group.scales += g * kv_itemsize(from->dtype);
        group.biases += g * kv_itemsize(from->dtype);
        dequantize_line(&group, size, line);
        for (int64_t i = 0; i < size; i += VL)
            v_store_strided_as(to, dst + (g * size + i) * step, stride, VL, v_load(line + i));
    }
}
