/* One vector of floats, on which all kernels are written once.
 *
 * `vf` holds VL floats: 4 (portable, NEON), 8 (AVX2) or 16 (AVX-512). + - * / and comparisons are the compiler's own on
 * vectors (GCC, Clang); what it has no word for stands here. Nothing but `vf` reaches the kernels, so a further
 * instruction set is one more branch in this file.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kvcpu.h"

#if defined(__clang__)
#define KV_UNROLL _Pragma("unroll")
#define KV_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define KV_UNROLL _Pragma("GCC unroll 16")
#define KV_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif
#define KV_APART __attribute__((noinline)) /* inlined, its loops would lose registers to the caller */
#define KV_INLINE static inline __attribute__((always_inline, unused))
#if defined(KV_ONE_COPY) /* KV_COPIES: where speed counts, compiled once per type of numbers and count of lanes */
#define KV_COPIES static __attribute__((noinline))
#else
#define KV_COPIES KV_INLINE
#endif

#if defined(KV_SIMD_AVX512)
#define VL 16
typedef __m512 vf;
#elif defined(KV_SIMD_AVX2)
#define VL 8
typedef __m256 vf;
#elif defined(KV_SIMD_NEON)
#define VL 4
typedef float32x4_t vf;
#else
#define VL 4
typedef float vf __attribute__((vector_size(16)));
#endif

typedef int32_t vi __attribute__((vector_size(4 * VL)));  /* what a comparison gives: lanes of 0 or -1 */
typedef uint32_t vu __attribute__((vector_size(4 * VL)));
typedef int16_t vs __attribute__((vector_size(4 * VL)));  /* of these 2 * VL */
typedef uint16_t vh __attribute__((vector_size(2 * VL))); /* float16 or bfloat16 as bits */
typedef uint8_t vb __attribute__((vector_size(VL)));
typedef struct { float lane[4]; } four;

/* -------- float vectors -------- */

KV_INLINE vf v_set(float x) { return x - (vf){0}; } /* not +, for -0 */
KV_INLINE vf v_load(const float *p) { vf x; memcpy(&x, p, sizeof x); return x; }
KV_INLINE void v_store(float *p, vf x) { memcpy(p, &x, sizeof x); }
KV_INLINE vf v_select(vi which, vf yes, vf no) { return (vf)((which & (vi)yes) | (~which & (vi)no)); }

/* Lane numbers 0, 1, ... */
KV_INLINE vi v_lanes(void) {
    static const int32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vi x;
    memcpy(&x, numbers, sizeof x);
    return x;
}

/* The first n lanes (n <= VL) come from memory, the others are 0: no byte beyond is touched. */
KV_INLINE vf v_load_n(const float *p, int64_t n) {
#if defined(KV_SIMD_AVX512)
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#elif defined(KV_SIMD_AVX2)
    return _mm256_maskload_ps(p, (__m256i)(v_lanes() < (int32_t)n));
#else
    vf x = {0};
    memcpy(&x, p, 4 * (size_t)n);
    return x;
#endif
}

/* a * b + c, rounded once where the machine can. */
KV_INLINE vf v_fma(vf a, vf b, vf c) {
#if defined(KV_SIMD_AVX512)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(KV_SIMD_AVX2)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(KV_SIMD_NEON)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}

/* *sum += a * b, where sums and factors fill all of 16 registers: a compiler that is free to rename the sums, or to
 * read a factor from memory for each product, would run out of them. */
KV_INLINE void v_add_product(vf *sum, vf a, vf b) {
#if defined(KV_SIMD_AVX2)
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(*sum) : "x"(a), "x"(b));
#else
    *sum = v_fma(a, b, *sum);
#endif
}

/* The larger; b when one of the two is NaN (NEON: NaN). */
KV_INLINE vf v_max(vf a, vf b) {
#if defined(KV_SIMD_AVX512)
    return _mm512_max_ps(a, b);
#elif defined(KV_SIMD_AVX2)
    return _mm256_max_ps(a, b);
#elif defined(KV_SIMD_NEON)
    return vmaxq_f32(a, b);
#else
    return v_select(a > b, a, b);
#endif
}

KV_INLINE vf v_min(vf a, vf b) {
#if defined(KV_SIMD_AVX512)
    return _mm512_min_ps(a, b);
#elif defined(KV_SIMD_AVX2)
    return _mm256_min_ps(a, b);
#elif defined(KV_SIMD_NEON)
    return vminq_f32(a, b);
#else
    return v_select(a < b, a, b);
#endif
}

/* The larger of integers of `size` bytes, 4 or 2 */
KV_INLINE vi v_most(int64_t size, vi a, vi b) {
#if defined(KV_SIMD_AVX512)
    return (vi)(size == 4 ? _mm512_max_epi32((__m512i)a, (__m512i)b) : _mm512_max_epi16((__m512i)a, (__m512i)b));
#elif defined(KV_SIMD_AVX2)
    return (vi)(size == 4 ? _mm256_max_epi32((__m256i)a, (__m256i)b) : _mm256_max_epi16((__m256i)a, (__m256i)b));
#else
    const vi which = size == 4 ? a > b : (vi)((vs)a > (vs)b);
    return (which & a) | (~which & b);
#endif
}

KV_INLINE vi v_least(int64_t size, vi a, vi b) {
#if defined(KV_SIMD_AVX512)
    return (vi)(size == 4 ? _mm512_min_epi32((__m512i)a, (__m512i)b) : _mm512_min_epi16((__m512i)a, (__m512i)b));
#elif defined(KV_SIMD_AVX2)
    return (vi)(size == 4 ? _mm256_min_epi32((__m256i)a, (__m256i)b) : _mm256_min_epi16((__m256i)a, (__m256i)b));
#else
    return ~v_most(size, ~a, ~b);
#endif
}

KV_INLINE vf v_abs(vf x) { return (vf)((vi)x & 0x7fffffff); }

/* To the nearest integer, ties to even. */
KV_INLINE vf v_rint(vf x) {
#if defined(KV_SIMD_AVX512)
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(KV_SIMD_AVX2)
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(KV_SIMD_NEON)
    return vrndnq_f32(x);
#else
    for (int i = 0; i < VL; i++) x[i] = rintf(x[i]);
    return x;
#endif
}

/* -------- across lanes -------- */

KV_INLINE float v_sum(vf x) {
#if defined(KV_SIMD_AVX512)
    return _mm512_reduce_add_ps(x);
#elif defined(KV_SIMD_AVX2)
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
#else
    float lanes[VL];
    v_store(lanes, x);
    for (int step = VL / 2; step > 0; step /= 2)
        for (int i = 0; i < step; i++) lanes[i] += lanes[i + step];
    return lanes[0];
#endif
}

KV_INLINE float v_largest(vf x) {
#if defined(KV_SIMD_AVX512)
    return _mm512_reduce_max_ps(x);
#elif defined(KV_SIMD_AVX2)
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
#else
    float lanes[VL];
    v_store(lanes, x);
    for (int step = VL / 2; step > 0; step /= 2)
        for (int i = 0; i < step; i++) lanes[i] = lanes[i] > lanes[i + step] ? lanes[i] : lanes[i + step];
    return lanes[0];
#endif
}

/* Lane i: the largest integer of x[i], which are of `size` bytes, 4 or 2; those of 2 in the upper half, below which
 * there is anything. */
KV_INLINE vi v_most_of_each(int64_t size, const vi *x) {
    vi most;
#if defined(KV_SIMD_AVX512)
    vi four[4], two[2];
    for (int i = 0; i < 4; i++) {
        const __m512i *y = (const __m512i *)x + 4 * i;
        const __m512i ab =
            (__m512i)v_most(size, (vi)_mm512_unpacklo_epi32(y[0], y[1]), (vi)_mm512_unpackhi_epi32(y[0], y[1]));
        const __m512i cd =
            (__m512i)v_most(size, (vi)_mm512_unpacklo_epi32(y[2], y[3]), (vi)_mm512_unpackhi_epi32(y[2], y[3]));
        four[i] = v_most(size, (vi)_mm512_unpacklo_epi64(ab, cd), (vi)_mm512_unpackhi_epi64(ab, cd));
    }
    for (int i = 0; i < 2; i++) {
        const __m512i a = (__m512i)four[2 * i], b = (__m512i)four[2 * i + 1];
        two[i] = v_most(size, (vi)_mm512_shuffle_i32x4(a, b, 0x44), (vi)_mm512_shuffle_i32x4(a, b, 0xee));
    }
    const __m512i a = (__m512i)two[0], b = (__m512i)two[1];
    most = v_most(size, (vi)_mm512_shuffle_i32x4(a, b, 0x88), (vi)_mm512_shuffle_i32x4(a, b, 0xdd));
#elif defined(KV_SIMD_AVX2)
    __m256i four[2];
    for (int i = 0; i < 2; i++) {
        const __m256i *y = (const __m256i *)x + 4 * i;
        const __m256i ab =
            (__m256i)v_most(size, (vi)_mm256_unpacklo_epi32(y[0], y[1]), (vi)_mm256_unpackhi_epi32(y[0], y[1]));
        const __m256i cd =
            (__m256i)v_most(size, (vi)_mm256_unpacklo_epi32(y[2], y[3]), (vi)_mm256_unpackhi_epi32(y[2], y[3]));
        four[i] = (__m256i)v_most(size, (vi)_mm256_unpacklo_epi64(ab, cd), (vi)_mm256_unpackhi_epi64(ab, cd));
    }
    most = v_most(size, (vi)_mm256_permute2x128_si256(four[0], four[1], 0x20),
                  (vi)_mm256_permute2x128_si256(four[0], four[1], 0x31));
#else
    for (int i = 0; i < VL; i++) { /* VL is 4 */
        const vi two = v_most(size, x[i], (vi){x[i][2], x[i][3], x[i][0], x[i][1]});
        most[i] = v_most(size, two, (vi){two[1], two[0], two[3], two[2]})[0];
    }
#endif
    return size == 4 ? most : v_most(4, most, most << 16);
}

/* The sums of four vectors, at the price of about two. */
KV_INLINE four v_sum4(vf a, vf b, vf c, vf d) {
    four sums;
#if defined(KV_SIMD_AVX512) || defined(KV_SIMD_AVX2)
#if defined(KV_SIMD_AVX512)
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512 wide = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    __m256 abcd = _mm256_add_ps(_mm512_castps512_ps256(wide), _mm512_extractf32x8_ps(wide, 1));
#else
    __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    __m256 abcd = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
#endif
    _mm_storeu_ps(sums.lane, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
#elif defined(KV_SIMD_NEON)
    vst1q_f32(sums.lane, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
#else
    const vf ab = KV_SHUFFLE(a, b, 0, 4, 1, 5) + KV_SHUFFLE(a, b, 2, 6, 3, 7);
    const vf cd = KV_SHUFFLE(c, d, 0, 4, 1, 5) + KV_SHUFFLE(c, d, 2, 6, 3, 7);
    v_store(sums.lane, KV_SHUFFLE(ab, cd, 0, 1, 4, 5) + KV_SHUFFLE(ab, cd, 2, 3, 6, 7));
#endif
    return sums;
}

/* -------- functions -------- */

/* c[0] * x^(n - 1) + ... + c[n - 1]; n is a constant. */
KV_INLINE vf v_polynomial(const float *c, const int n, vf x) {
    vf p = v_set(c[0]);
    KV_UNROLL
    for (int i = 1; i < n; i++) p = v_fma(p, x, v_set(c[i]));
    return p;
}

/* exp within 2 ulp for x <= 88 (larger: exp(88)); 0 below -87.3, so exp(-inf) = 0; NaN stays.
 * Range reduction and polynomial of Cephes' expf (S. Moshier). */
KV_INLINE vf v_exp(vf x) {
    const float magic = 0x1.8p23f; /* adding it leaves the nearest integer in the lowest bits */
    vf y = v_max(v_set(-87.3f), x);
    y = -v_max(v_set(-88.0f), -y);
    vf shifted = v_fma(y, v_set(0x1.715476p0f), v_set(magic));
    vf n = shifted - magic;
    vf r = v_fma(n, v_set(-0.693359375f), y);
    r = v_fma(n, v_set(2.12194440e-4f), r);
    static const float c[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                              1.6666665459e-1f, 5.0000001201e-1f};
    const vf p = v_fma(v_polynomial(c, 6, r), r * r, r) + 1.0f;
    vf power = (vf)(((vi)shifted << 23) + (127 << 23)); /* the magic's own bits are shifted out */
    return (vf)((vi)(p * power) & ~(vi)(x < -87.3f));
}

/* tanh, 2 ulp or so: Cephes' odd polynomial near 0, 1 - 2 / (exp(2x) + 1) beyond. */
KV_INLINE vf v_tanh(vf x) {
    const vi sign_bit = (vi)v_set(-0.0f);
    vf size = (vf)((vi)x & ~sign_bit), z = x * x;
    static const float c[] = {-5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f,
                              -3.33332819422e-1f};
    vf near = v_fma(v_polynomial(c, 5, z) * z, x, x);
    vf far = 1.0f - 2.0f / (v_exp(size + size) + 1.0f);
    far = (vf)((vi)far | ((vi)x & sign_bit));
    return v_select(size < 0.625f, near, far);
}

/* -------- 16-bit floats -------- */

KV_INLINE vf v_from_bf16(vh bits) { return (vf)(__builtin_convertvector(bits, vu) << 16); }

/* Round to nearest even; NaN stays a NaN. */
KV_INLINE vh v_to_bf16(vf x) {
    const vu bits = (vu)x, is_nan = (vu)(x != x);
    const vu more = (0x7fff + ((bits >> 16) & 1)) & ~is_nan;
    return __builtin_convertvector((bits + more) >> 16 | (is_nan & 0x40), vh);
}

KV_INLINE vf v_from_f16(vh bits) {
#if defined(KV_SIMD_AVX512)
    return _mm512_cvtph_ps((__m256i)bits);
#elif defined(KV_SIMD_AVX2)
    return _mm256_cvtph_ps((__m128i)bits);
#elif defined(KV_SIMD_NEON)
    return vcvt_f32_f16((float16x4_t)bits);
#else
    /* Exponents differ by 112, which a multiplication repairs, subnormals included; infinity and NaN by hand. */
    const vi x = (vi)(__builtin_convertvector(bits, vu) << 16), moved = (x >> 3) & (int32_t)0x8fffe000;
    return (vf)((vi)((vf)moved * 0x1p112f) | (((moved & 0x0f800000) == 0x0f800000) & 0x7f800000));
#endif
}

/* Round to nearest even, overflow to infinity; NaN stays a NaN. */
KV_INLINE vh v_to_f16(vf x) {
#if defined(KV_SIMD_AVX512)
    return (vh)_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(KV_SIMD_AVX2)
    return (vh)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(KV_SIMD_NEON)
    return (vh)vcvt_f16_f32(x);
#else
    vu bits = (vu)x, sign = bits & 0x80000000u, size = bits ^ sign;
    /* Subnormal results: adding 0.5 leaves the rounded value in the lowest bits. (F. Giesen, float_to_half) */
    vu small = (vu)((vf)size + 0.5f) - 0x3f000000u;
    vu normal = (size - (112u << 23) + 0xfff + ((size >> 13) & 1)) >> 13;
    vu special = (vu)((vi)size > 0x7f800000) & 0x0200;
    vu is_small = (vu)((vi)size < (113 << 23)), is_special = (vu)((vi)size >= (143 << 23));
    vu half = (is_small & small) | (~is_small & normal);
    half = (is_special & (special | 0x7c00)) | (~is_special & half);
    return __builtin_convertvector(half | (sign >> 16), vh);
#endif
}

KV_INLINE vh v_load_half(const char *p) { vh x; memcpy(&x, p, sizeof x); return x; }

KV_INLINE vh v_load_half_n(const char *p, int64_t n) {
#if defined(KV_SIMD_AVX512)
    return (vh)_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p);
#else
    vh x = {0};
    memcpy(&x, p, 2 * (size_t)n);
    return x;
#endif
}

/* -------- float8: e4m3, without infinities -------- */

/* A float16 has the same digits and 8 more in the exponent. */
KV_COPIES vf v_from_f8(const char *p) {
#if defined(KV_SIMD_AVX512)
    vh bits = (vh)_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)p));
#elif defined(KV_SIMD_AVX2)
    vh bits = (vh)_mm_cvtepi8_epi16(_mm_loadl_epi64((const void *)p));
#else
    vh bits = {0};
    for (int i = 0; i < VL; i++) bits[i] = (uint16_t)(signed char)p[i];
#endif
    bits = (bits << 7) & 0xbf80;                          /* the sign was there twice */
    bits |= (vh)((bits & 0x3f80) == 0x3f80) & 0x7c00;     /* NaN */
    return v_from_f16(bits) * 256;
}

KV_INLINE vf v_from_f8_n(const char *p, int64_t n) {
    char some[VL] = {0};
    memcpy(some, p, (size_t)n);
    return v_from_f8(some);
}

/* Round to nearest even; beyond 448 it is 448, infinity too; NaN stays a NaN. In the lowest bits. */
KV_INLINE vu v_to_f8(vf x) {
    const vu sign = (vu)x & 0x80000000u;
    const vi is_nan = x != x;
    const vf size = v_min(v_abs(x), v_set(448));
    const vu bits = (vu)size;
    const vu small = (vu)(size + 0x1p14f) - 0x46800000u; /* below 2^-6 digits end at 2^-9, as those of this sum */
    const vu normal = (bits - (120u << 23) + 0x7ffff + ((bits >> 20) & 1)) >> 20;
    const vu is_small = (vu)(size < 0x1p-6f);
    const vu rounded = (is_small & small) | (~is_small & normal);
    return (((vu)is_nan & 0x7f) | (~(vu)is_nan & rounded)) | sign >> 24;
}

/* The first n <= VL to bytes. */
KV_INLINE void v_store_f8(char *p, int64_t n, vf x) {
    const vu bits = v_to_f8(x);
    char bytes[16];
#if defined(KV_SIMD_AVX512)
    _mm_storeu_si128((void *)bytes, _mm512_cvtepi32_epi8((__m512i)bits));
#elif defined(KV_SIMD_AVX2)
    const __m128i low = _mm256_castsi256_si128((__m256i)bits), high = _mm256_extracti128_si256((__m256i)bits, 1);
    const __m128i halves = _mm_packus_epi32(low, high);
    _mm_storeu_si128((void *)bytes, _mm_packus_epi16(halves, halves));
#else
    for (int i = 0; i < VL; i++) bytes[i] = (char)bits[i];
#endif
    if (n == VL) memcpy(p, bytes, VL);
    else memcpy(p, bytes, (size_t)n);
}

/* -------- bytes -------- */

/* VL unsigned bytes. */
KV_INLINE vi v_load_bytes(const char *p) {
#if defined(KV_SIMD_AVX512)
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p));
#elif defined(KV_SIMD_AVX2)
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p));
#else
    vb bytes;
    memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, vi);
#endif
}

/* The lowest `bits` (4 or 8) bits of a's lanes, then of b's, packed; all higher ones are 0. */
KV_INLINE void v_store_packed(int bits, char *p, vi a, vi b) {
#if defined(KV_SIMD_AVX512)
    const __m256i bytes = _mm256_set_m128i(_mm512_cvtepi32_epi8((__m512i)b), _mm512_cvtepi32_epi8((__m512i)a));
    if (bits == 8) _mm256_storeu_si256((void *)p, bytes);
    else
        _mm_storeu_si128((void *)p, _mm256_cvtepi16_epi8(_mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x1001))));
#elif defined(KV_SIMD_AVX2)
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)a, (__m256i)b), 0xd8);
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    if (bits == 8) _mm_storeu_si128((void *)p, bytes);
    else {
        const __m128i pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x1001));
        _mm_storel_epi64((void *)p, _mm_packus_epi16(pairs, pairs));
    }
#else
    int32_t numbers[2 * VL];
    memcpy(numbers, &a, sizeof a);
    memcpy(numbers + VL, &b, sizeof b);
    for (int i = 0; i < 2 * VL * bits / 8; i++)
        p[i] = (char)(bits == 8 ? numbers[i] : numbers[2 * i] | numbers[2 * i + 1] << 4);
#endif
}

/* The lowest 16 bits of a's lanes and b's in turns (a's first, b's first, a's second ...), packed to `bits`; those that
 * are too large become the largest that fits. */
KV_INLINE void v_store_packed_in_turns(int bits, char *p, vi a, vi b) {
    vi both = b << 16;
#if defined(KV_SIMD_AVX512)
    both = (vi)_mm512_ternarylogic_epi32(_mm512_set1_epi32(0xffff), (__m512i)a, (__m512i)both, 0xca);
    if (bits == 8) {
        _mm256_storeu_si256((void *)p, _mm512_cvtusepi16_epi8((__m512i)both));
        return;
    }
    both = (vi)_mm512_min_epu16((__m512i)both, _mm512_set1_epi16(15));
    _mm_storeu_si128((void *)p, _mm512_cvtepi32_epi8((__m512i)(both | (vi)((vu)both >> 12))));
#elif defined(KV_SIMD_AVX2)
    both = (vi)_mm256_blend_epi16((__m256i)a, (__m256i)both, 0xaa);
    if (bits == 4) {
        both = (vi)_mm256_min_epu16((__m256i)both, _mm256_set1_epi16(15));
        both = (both | (vi)((vu)both >> 12)) & 255;
    }
    const __m128i low = _mm256_castsi256_si128((__m256i)both), high = _mm256_extracti128_si256((__m256i)both, 1);
    if (bits == 8) _mm_storeu_si128((void *)p, _mm_packus_epi16(low, high));
    else {
        const __m128i halves = _mm_packus_epi32(low, high);
        _mm_storel_epi64((void *)p, _mm_packus_epi16(halves, halves));
    }
#else
    uint16_t numbers[2 * VL];
    both |= a & 0xffff;
    memcpy(numbers, &both, sizeof both);
    for (int i = 0; i < 2 * VL; i++)
        if (numbers[i] > (1 << bits) - 1) numbers[i] = (uint16_t)((1 << bits) - 1);
    for (int i = 0; i < 2 * VL * bits / 8; i++)
        p[i] = (char)(bits == 8 ? numbers[i] : numbers[2 * i] | numbers[2 * i + 1] << 4);
#endif
}

/* -------- any dtype: `dtype` should be a constant where speed matters -------- */

/* VL consecutive elements as floats. */
KV_INLINE vf v_load_as(kv_dtype dtype, const char *p) {
    if (dtype == KV_F32) return v_load((const float *)(const void *)p);
    if (dtype == KV_F8) return v_from_f8(p);
    return dtype == KV_F16 ? v_from_f16(v_load_half(p)) : v_from_bf16(v_load_half(p));
}

/* The first n <= VL of them, then zeros. */
KV_INLINE vf v_load_n_as(kv_dtype dtype, const char *p, int64_t n) {
    if (dtype == KV_F32) return v_load_n((const float *)(const void *)p, n);
    if (dtype == KV_F8) return v_from_f8_n(p, n);
    return dtype == KV_F16 ? v_from_f16(v_load_half_n(p, n)) : v_from_bf16(v_load_half_n(p, n));
}

/* The same from elements `stride` elements apart. */
KV_INLINE vf v_load_strided_as(kv_dtype dtype, const char *p, int64_t stride, int64_t n) {
    char gathered[4 * VL] = {0};
    if (stride == 1) return n == VL ? v_load_as(dtype, p) : v_load_n_as(dtype, p, n);
    const int64_t size = kv_itemsize(dtype);
    for (int64_t i = 0; i < n; i++) memcpy(gathered + i * size, p + i * stride * size, (size_t)size);
    return v_load_as(dtype, gathered);
}

/* The first n <= VL lanes to elements `stride` elements apart, rounded. */
KV_INLINE void v_store_strided_as(kv_dtype dtype, char *p, int64_t stride, int64_t n, vf x) {
    char packed[4 * VL];
    const int64_t size = kv_itemsize(dtype);
    if (dtype == KV_F8) { /* only ever to a pool, where elements lie without gaps */
        v_store_f8(p, n, x);
        return;
    }
    const vh half = dtype == KV_F16 ? v_to_f16(x) : v_to_bf16(x);
    if (dtype == KV_F32) memcpy(packed, &x, sizeof x);
    else memcpy(packed, &half, sizeof half);
    if (stride == 1 && n == VL) memcpy(p, packed, (size_t)(VL * size));
    else if (stride == 1) memcpy(p, packed, (size_t)(n * size));
    else
        for (int64_t i = 0; i < n; i++) memcpy(p + i * stride * size, packed + i * size, (size_t)size);
}
