/* Conversion between float32, float16 and bfloat16, and from them to float8: a template, see isa_body.h. */

/* Asks for elements that will be read soon: tokens usually lie one behind the other, but a core's own prefetcher stops
 * at the end of each page, and arithmetic takes as long as memory here only while it need not wait. An address behind
 * the last token costs nothing. */
KV_INLINE void fetch_ahead(const char *elements, int64_t nbytes) {
    enum { AHEAD = 2048 };
    for (int64_t byte = 0; byte < nbytes; byte += 64)
        __builtin_prefetch((const void *)((uintptr_t)elements + AHEAD + (uintptr_t)byte), 0, 3);
}

/* `to` and `from` are constants in every call, so each pair has a loop of its own. */
KV_COPIES void convert_run(char *dst, kv_dtype to, const char *src, kv_dtype from, int64_t stride, int64_t n) {
    const int64_t to_size = kv_itemsize(to), step = stride * kv_itemsize(from);
    int64_t i = 0;
    if (stride == 1)
        for (; i + VL <= n; i += VL) {
            if (i * step % 64 == 0) fetch_ahead(src + i * step, 64);
            v_store_strided_as(to, dst + i * to_size, 1, VL, v_load_as(from, src + i * step));
        }
    for (; i < n; i += VL) {
        const int64_t rest = n - i < VL ? n - i : VL;
        v_store_strided_as(to, dst + i * to_size, 1, rest, v_load_strided_as(from, src + i * step, stride, rest));
    }
}

/* Bits that stay as they are: a NaN keeps its payload. */
static void gather_elements(char *dst, const char *src, int64_t size, int64_t stride, int64_t n) {
    if (size == 4)
        for (int64_t i = 0; i < n; i++) memcpy(dst + 4 * i, src + 4 * i * stride, 4);
    else
        for (int64_t i = 0; i < n; i++) memcpy(dst + 2 * i, src + 2 * i * stride, 2);
}

static void convert(char *dst, kv_dtype to, const char *src, kv_dtype from, int64_t stride, int64_t n) {
    if (to == from && stride == 1) memcpy(dst, src, (size_t)(n * kv_itemsize(to)));
    else if (to == from) gather_elements(dst, src, kv_itemsize(to), stride, n);
#define CONVERT(TO, FROM) \
    else if (to == KV_##TO && from == KV_##FROM) convert_run(dst, KV_##TO, src, KV_##FROM, stride, n);
    CONVERT(F32, F16) CONVERT(F32, BF16)
    CONVERT(F16, F32) CONVERT(F16, BF16)
    CONVERT(BF16, F32) CONVERT(BF16, F16)
    CONVERT(F8, F32) CONVERT(F8, F16) CONVERT(F8, BF16)
#undef CONVERT
}
